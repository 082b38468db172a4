"""Budgets of a KV cache as an intervention: every row of some heads loses the keys that a cache would not keep.

Shapes: B text, N row of a pass (text, or set and text), P head of a layer that is computed again, E row of a pass and
head that has a budget, R asked row, r row of a block, K key.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attnscope.attention.again import RowBlock, RowsAgain, padded
from attnscope.attention.spec import AttentionSpec
from attnscope.intervene.again import check_again, put, spec_of
from attnscope.intervene.budget_names import written_budget
from attnscope.intervene.intervention import Intervention
from attnscope.intervene.policies import BudgetedHeads, Dropping, policy_of
from attnscope.intervene.sets import HeadSet
from attnscope.seam.call import AttentionCall
from attnscope.seam.engines import Change, Engine
from attnscope.stacks import DECODER


@dataclass(frozen=True)
class HeadBudget(HeadSet):
    """Heads, and the budget of their cache as it is written; empty for none."""

    keep: str = ""

    @property
    def identity(self) -> Hashable:
        return self.heads, self.keep


@dataclass(frozen=True)
class CacheBudget(Intervention):
    """Rows lose the keys that a budget does not keep. The sets of its passes are HeadBudgets.

    ends: of every text of the task, the tokens of its prompt, after which `received` and `snap` choose. stops: of every
    text, the rows that anything depends on. heads: of every layer, all that any set has: they are computed again in the
    intact rows, too. stack: whose layers the heads are of.
    """

    ends: tuple[int, ...]
    stops: tuple[int, ...]
    heads: Mapping[int, tuple[int, ...]]
    stack: str = DECODER
    name: str = "budget"

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"ends": list(self.ends)}

    def over(
        self, engine: Engine, sets: Sequence[HeadSet], lengths: Sequence[int], texts: Sequence[int] = ()
    ) -> Engine:
        return replace(engine, change=self.cutting([one for one in sets if isinstance(one, HeadBudget)], texts))

    def cutting(self, budgets: Sequence[HeadBudget], texts: Sequence[int]) -> Change:
        """An engine's `change` for a pass of some texts and, behind them, the same texts once per set."""
        kinds = list(dict.fromkeys(one.keep for one in budgets if one.keep))

        def change(call: AttentionCall, output_NQHV: Tensor) -> Tensor:
            heads = self.heads.get(call.layer, ())
            if call.stack != self.stack or not heads:
                return output_NQHV
            spec = spec_of(call, output_NQHV)
            query_NR = padded(self.rows(kinds, texts), spec.device).repeat(spec.batch // len(texts), 1)
            asked = {kind: self._budgeted(spec, call.layer, kind, budgets, texts) for kind in kinds}
            cutting = [(one, policy_of(kind).over(one)) for kind, one in asked.items() if len(one.row_E)]
            row_E = torch.cat([one.row_E for one, _ in cutting]) if cutting else query_NR[:0, 0]
            changed, worst = output_NQHV.clone(), 0.0
            for block in RowsAgain(spec, heads).blocks(query_NR):
                found_NrPV = block.output(_cut(block, cutting), "mask")
                worst = max(worst, put(changed, output_NQHV, heads, block, found_NrPV, row_E))
            check_again(call, worst, output_NQHV.dtype)
            return changed

        return change

    def rows(self, kinds: Sequence[str], texts: Sequence[int]) -> list[range]:
        """The rows of each text that some budgets hold in: those behind the prompt where all choose once."""
        once = bool(kinds) and all(written_budget(one).once for one in kinds)
        return [range(self.ends[text] * once, self.stops[text]) for text in texts]

    def _budgeted(
        self, spec: AttentionSpec, layer: int, kind: str, budgets: Sequence[HeadBudget], texts: Sequence[int]
    ) -> BudgetedHeads:
        """The heads of a layer that have one kind of budget; budgets: of the sets of the pass."""
        heads = self.heads[layer]
        pairs = [
            (at * len(texts) + number, heads.index(head))
            for at, one in enumerate(budgets, start=1)
            for of, head in one.heads
            if (of, one.keep) == (layer, kind)
            for number in range(len(texts))
        ]
        pair_E2 = torch.tensor(pairs, dtype=torch.long, device=spec.device).view(-1, 2)
        return BudgetedHeads(spec, heads, tuple(self.ends[text] for text in texts), *pair_E2.T)


def _cut(block: RowBlock, cutting: Sequence[tuple[BudgetedHeads, Dropping]]) -> Tensor | None:
    """Which weights of a block are cut, (N, P, r, K); None for none."""
    if not cutting:
        return None
    cut_NPrK = torch.zeros(block.logits_NPrK.shape, dtype=torch.bool, device=block.logits_NPrK.device)
    for one, dropped in cutting:
        cut_NPrK[one.row_E, one.place_E] = dropped(block)
    return cut_NPrK


OnKept = Callable[[str, int, int, Tensor], object]  # a budget, a text, a layer, the share of each head (P,)


@dataclass(frozen=True)
class KeptShares(Intervention):
    """Nothing is changed: how much each budget would keep is read of the intact rows.

    on_kept: called with each budget, text of the task and layer, and for each head the mean over the rows of the keys
    that are kept of those that the row sees. A budget is read by itself, whatever the layers below would lose.
    """

    cache: CacheBudget
    kinds: Sequence[str]
    on_kept: OnKept
    name: str = field(default="kept", init=False)

    def over(
        self, engine: Engine, sets: Sequence[HeadSet], lengths: Sequence[int], texts: Sequence[int] = ()
    ) -> Engine:
        def read(call: AttentionCall, output_BQHV: Tensor) -> Tensor:
            heads = self.cache.heads.get(call.layer, ())
            if call.stack == self.cache.stack and heads and not call.place.call:  # one that attends twice is read once
                spec = spec_of(call, output_BQHV)
                for kind in self.kinds:
                    share_BP = self._shares(spec, heads, kind, texts)
                    for text, share_P in zip(texts, share_BP, strict=True):
                        self.on_kept(kind, text, call.layer, share_P)
            return output_BQHV

        return replace(engine, change=read)

    def _shares(self, spec: AttentionSpec, heads: tuple[int, ...], kind: str, texts: Sequence[int]) -> Tensor:
        every_E2 = torch.cartesian_prod(*(torch.arange(size, device=spec.device) for size in (len(texts), len(heads))))
        ends = tuple(self.cache.ends[text] for text in texts)
        one = BudgetedHeads(spec, heads, ends, *every_E2.view(-1, 2).T)
        dropped, total_E, rows_E = policy_of(kind).over(one), torch.zeros(len(one.row_E)), torch.zeros(len(one.row_E))
        for block in RowsAgain(spec, heads).blocks(padded(self.cache.rows([kind], texts), spec.device)):
            seen_ErK, there_Er = one.of(block.seen_NPrK), (one.query_Er(block) >= 0).cpu()
            kept_Er = (seen_ErK & ~dropped(block)).sum(-1).cpu().double()
            count_Er = seen_ErK.sum(-1).cpu()
            share_Er = torch.where(count_Er > 0, kept_Er / count_Er.clamp_min(1), 1.0)
            total_E, rows_E = total_E + (share_Er * there_Er).sum(-1), rows_E + there_Er.sum(-1)
        return (total_E / rows_E).view(len(texts), len(heads))
