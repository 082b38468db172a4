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

from attnscope.attention.rows import RowBlock, RowsAgain, padded
from attnscope.attention.spec import AttentionSpec
from attnscope.hooks.calls import AttentionCall
from attnscope.hooks.engines import Change, Engine
from attnscope.intervene.again import recompute, spec_of
from attnscope.intervene.budget_names import written_budget
from attnscope.intervene.intervention import Intervention
from attnscope.intervene.policies import BudgetedHeads, Dropping, policy_of
from attnscope.intervene.sets import HeadSet
from attnscope.model.selection import DECODER


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
        budgets = [chosen for chosen in sets if isinstance(chosen, HeadBudget)]
        return replace(engine, change=self.cutting(budgets, texts))

    def cutting(self, budgets: Sequence[HeadBudget], texts: Sequence[int]) -> Change:
        """An engine's `change` for a pass of some texts and, after them, the same texts once per set."""
        kinds = list(dict.fromkeys(budget.keep for budget in budgets if budget.keep))
        ends = tuple(self.ends[text] for text in texts)

        def change(call: AttentionCall, output_NQHV: Tensor) -> Tensor:
            heads = self.heads.get(call.layer, ())
            if call.stack != self.stack or not heads:
                return output_NQHV
            spec = spec_of(call, output_NQHV)
            query_NR = padded(self.rows(kinds, texts), spec.device).repeat(spec.batch // len(texts), 1)

            # Heads of one kind of budget are read together, whichever sets of the pass they belong to.
            policies: list[tuple[BudgetedHeads, Dropping]] = []
            for kind in kinds:
                pairs = [
                    (at * len(texts) + number, heads.index(head))
                    for at, budget in enumerate(budgets, start=1)
                    for layer, head in budget.heads
                    if (layer, budget.keep) == (call.layer, kind)
                    for number in range(len(texts))
                ]
                if pairs:
                    budgeted = BudgetedHeads(spec, heads, ends, *torch.tensor(pairs, device=spec.device).T)
                    policies.append((budgeted, policy_of(kind).over(budgeted)))

            # A policy may depend on the rows before: every block is shown to all of them, in order.
            def output(block: RowBlock) -> Tensor:
                if not policies:
                    return block.output(None, "mask")
                cut_NPrK = torch.zeros(block.logits_NPrK.shape, dtype=torch.bool, device=spec.device)
                for budgeted, dropped in policies:
                    cut_NPrK[budgeted.row_E, budgeted.place_E] = dropped(block)
                return block.output(cut_NPrK, "mask")

            rows = [budgeted.row_E for budgeted, _ in policies]
            changed_E = torch.cat(rows) if rows else torch.empty(0, dtype=torch.long, device=spec.device)
            return recompute(call, output_NQHV, RowsAgain(spec, heads), query_NR, output, changed_E)

        return change

    def rows(self, kinds: Sequence[str], texts: Sequence[int]) -> list[range]:
        """The rows of each text that some budgets hold in: those after the prompt where all choose once."""
        once = bool(kinds) and all(written_budget(kind).once for kind in kinds)
        return [range(self.ends[text] * once, self.stops[text]) for text in texts]


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
        budgeted = BudgetedHeads(spec, heads, ends, *every_E2.view(-1, 2).T)
        dropped = policy_of(kind).over(budgeted)
        total_E, rows_E = torch.zeros(len(every_E2)), torch.zeros(len(every_E2))
        for block in RowsAgain(spec, heads).blocks(padded(self.cache.rows([kind], texts), spec.device)):
            seen_ErK, there_Er = budgeted.of(block.seen_NPrK), (budgeted.query_Er(block) >= 0).cpu()
            kept_Er = (seen_ErK & ~dropped(block)).sum(-1).cpu().double()
            count_Er = seen_ErK.sum(-1).cpu()
            share_Er = torch.where(count_Er > 0, kept_Er / count_Er.clamp_min(1), 1.0)
            total_E, rows_E = total_E + (share_Er * there_Er).sum(-1), rows_E + there_Er.sum(-1)
        return (total_E / rows_E).view(len(texts), len(heads))
