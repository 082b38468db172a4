"""What a KV cache keeps under a budget, and budgets as an intervention: rows lose the keys that are not kept.

    dropped = policy_of("stream:4+64").over(budgeted)    # of one attention call
    for block in RowsAgain(spec, heads).blocks(query_NR):
        dropped_ErK = dropped(block)

`stream` is StreamingLLM's (Xiao et al. 2023, arXiv 2309.17453), `h2o` is of Zhang et al. 2023 (arXiv 2306.14048),
`snap` is SnapKV (Li et al. 2024, arXiv 2404.14469). `received` and `snap` choose as KVPress 0.5.5 does.

Shapes: B text, N row of a pass (text, or set and text), P asked head, which is computed again, G kv head, E row of a
pass and head that has a budget, R asked row, r row of a block, K key.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from attnscope.attention.rows import RowBlock, RowsAgain, padded
from attnscope.attention.spec import AttentionSpec
from attnscope.hooks.calls import AttentionCall
from attnscope.hooks.engines import Change
from attnscope.interventions.base import Intervention, Kept
from attnscope.interventions.patching import recompute, spec_of
from attnscope.interventions.spec import HeadSet, written_budget
from attnscope.model.selection import DECODER

POOLED = 5  # neighbouring keys whose scores `snap` averages
Dropping = Callable[[RowBlock], Tensor]  # a block of rows, in their order -> (E, r, K), True for what is dropped


@dataclass(frozen=True)
class BudgetedHeads:
    """The heads of one attention call that have a budget.

    spec: the call of the whole pass. heads: those that are computed again. ends: of each text, the tokens of its
    prompt. row_E, place_E: the row of the pass, and the head's place among `heads`.
    """

    spec: AttentionSpec
    heads: tuple[int, ...]
    ends: tuple[int, ...]
    row_E: Tensor
    place_E: Tensor

    @property
    def key_K(self) -> Tensor:
        """The position of each key."""
        return torch.arange(self.spec.visible.keys, device=self.spec.device)

    def of(self, value_NPrK: Tensor) -> Tensor:
        """(E, r, K) of what a block has per row of the pass or once, per head or once."""
        rows, places = value_NPrK.shape[:2]
        return value_NPrK[self.row_E if rows > 1 else self.row_E * 0, self.place_E if places > 1 else self.place_E * 0]

    def query_Er(self, block: RowBlock) -> Tensor:
        """The positions of a block's rows, -1 for none."""
        return block.query_Nr[self.row_E]


class KeptKeys(ABC):
    """A budget."""

    @abstractmethod
    def over(self, budgeted: BudgetedHeads) -> Dropping:
        """What is dropped of each block of an attention call. Blocks come in the order of their rows."""


@dataclass(frozen=True)
class Stream(KeptKeys):
    """The first keys, and the last ones of each row, the query's own among them."""

    first: int
    last: int

    def over(self, budgeted: BudgetedHeads) -> Dropping:
        key_K = budgeted.key_K

        def dropped(block: RowBlock) -> Tensor:
            back_ErK = budgeted.query_Er(block)[..., None] - key_K
            return (back_ErK >= self.last) & (key_K >= self.first)

        return dropped


@dataclass(frozen=True)
class Top(KeptKeys):
    """Each row's keys of largest weight: what a cache would keep that knew the query."""

    size: int

    def over(self, budgeted: BudgetedHeads) -> Dropping:
        def dropped(block: RowBlock) -> Tensor:
            logits_ErK = budgeted.of(block.logits_NPrK)
            largest_Erk = logits_ErK.topk(min(self.size, logits_ErK.shape[-1]), -1).indices
            return torch.ones_like(logits_ErK, dtype=torch.bool).scatter_(-1, largest_Erk, False)

        return dropped


@dataclass(frozen=True)
class HeavyHitters(KeptKeys):
    """The keys with the largest sum of weights in the rows so far, and the most recent: half of the budget, rounded up.

    Each head has a sum of its own, over its rows under its own evictions. A key that was evicted does not return.
    """

    size: int

    def over(self, budgeted: BudgetedHeads) -> Dropping:
        shape, device = (len(budgeted.row_E), len(budgeted.key_K)), budgeted.spec.device
        kept_EK = torch.zeros(shape, dtype=torch.bool, device=device)
        sum_EK = torch.zeros(shape, device=device)

        def dropped(block: RowBlock) -> Tensor:
            nonlocal kept_EK
            query_Er, logits_ErK = budgeted.query_Er(block), budgeted.of(block.logits_NPrK)
            seen_ErK, sink_NPr1 = budgeted.of(block.seen_NPrK), block.row_sinks_NPr1
            sink_Er1 = None if sink_NPr1 is None else budgeted.of(sink_NPr1)
            dropped_ErK = torch.zeros_like(logits_ErK, dtype=torch.bool)
            for at in range(query_Er.shape[1]):
                back_EK = query_Er[:, at, None] - budgeted.key_K
                there_EK = (kept_EK | (back_EK == 0)) & seen_ErK[:, at]

                # Where the cache is full, the older key of the least sum is evicted.
                older_EK = there_EK & (back_EK >= (self.size + 1) // 2)
                least_E = sum_EK.masked_fill(~older_EK, torch.inf).argmin(-1)
                full_E = there_EK.sum(-1) > self.size
                evicted_EK = torch.zeros_like(there_EK).scatter_(-1, least_E[:, None], full_E[:, None])
                kept_EK = there_EK & ~evicted_EK
                logits_EX = logits_ErK[:, at].masked_fill(~kept_EK, -torch.inf)
                if sink_Er1 is not None:  # a sink logit takes its share of the row
                    logits_EX = torch.cat([logits_EX, sink_Er1[:, at]], -1)
                sum_EK.add_(logits_EX.softmax(-1).nan_to_num(0.0)[:, : len(budgeted.key_K)])  # 0 in a row without a key
                dropped_ErK[:, at] = ~kept_EK
            return dropped_ErK

        return dropped


class Once(KeptKeys):
    """Keys that are chosen once, at the end of the prompt, for each kv head: only rows after it lose the others.

    Such a row keeps all keys after the prompt, too. size: the keys of the prompt that stay.
    """

    size: int

    @abstractmethod
    def scores(self, spec: AttentionSpec, heads: tuple[int, ...], ends: Sequence[int]) -> Tensor:
        """(B, P, K): how much each key of the prompts counts for each head."""

    def chosen(self, spec: AttentionSpec, heads: tuple[int, ...], ends: Sequence[int]) -> Tensor:
        """(B, P, K), True for the keys of the prompts that the kv head of each asked head keeps; spec: of the texts.

        The scores are averaged over all heads of a kv head, also over those that are not asked.
        """
        shared = spec.heads // spec.kv_heads
        groups = sorted({head // shared for head in heads})
        whole = tuple(group * shared + member for group in groups for member in range(shared))
        score_BGK = self.scores(spec, whole, ends).unflatten(1, (len(groups), shared)).mean(2)
        kept_BGK = torch.zeros_like(score_BGK, dtype=torch.bool)
        for text, end in enumerate(ends):
            best_Gk = score_BGK[text, :, :end].topk(min(self.size, end), -1).indices
            kept_BGK[text].scatter_(-1, best_Gk, True)
        return kept_BGK[:, [groups.index(head // shared) for head in heads]]

    def over(self, budgeted: BudgetedHeads) -> Dropping:
        texts, text_E = budgeted.spec.first_texts(len(budgeted.ends)), budgeted.row_E % len(budgeted.ends)
        kept_EK = self.chosen(texts, budgeted.heads, budgeted.ends)[text_E, budgeted.place_E]
        end_E1 = torch.tensor(budgeted.ends, device=kept_EK.device)[text_E, None]
        lost_EK = ~kept_EK & (budgeted.key_K < end_E1)
        return lambda block: lost_EK[:, None] & (budgeted.query_Er(block) >= end_E1)[..., None]


@dataclass(frozen=True)
class Received(Once):
    """The keys of the prompt that receive most: the mean weight over the prompt's queries that see a key."""

    size: int

    def scores(self, spec: AttentionSpec, heads: tuple[int, ...], ends: Sequence[int]) -> Tensor:
        sum_BPK, seen_BPK = _sums(spec, heads, [range(end) for end in ends])
        return sum_BPK / seen_BPK.clamp_min(1)


@dataclass(frozen=True)
class Snap(Once):
    """The last keys of the prompt, and those that its last queries look at: their mean weight over these queries,
    averaged over POOLED neighbouring keys. window: how many queries and keys are the last."""

    size: int
    window: int

    def scores(self, spec: AttentionSpec, heads: tuple[int, ...], ends: Sequence[int]) -> Tensor:
        starts = [max(0, end - self.window) for end in ends]
        sum_BPK, _ = _sums(spec, heads, list(map(range, starts, ends)))
        score_BPK = torch.full_like(sum_BPK, torch.inf)
        for text, start in enumerate(starts):
            if start:
                mean_PK = sum_BPK[text, :, :start] / self.window
                score_BPK[text, :, :start] = avg_pool1d(mean_PK, POOLED, stride=1, padding=POOLED // 2)
        return score_BPK


def _sums(spec: AttentionSpec, heads: tuple[int, ...], queries: Sequence[range]) -> tuple[Tensor, Tensor]:
    """(B, P, K) each: the sum of the weights that some queries of each text give to a key, and how many see it."""
    sum_BPK = torch.zeros(spec.batch, len(heads), spec.visible.keys, device=spec.device)
    seen_BPK = torch.zeros_like(sum_BPK, dtype=torch.long)
    for block in RowsAgain(spec, heads).blocks(padded(queries, spec.device)):
        asked_B1r1 = (block.query_Nr >= 0)[:, None, :, None]
        sum_BPK += (block.weights_NPrK * asked_B1r1).sum(2)
        seen_BPK += (block.seen_NPrK & asked_B1r1).sum(2)
    return sum_BPK, seen_BPK


KINDS = {"stream": Stream, "top": Top, "h2o": HeavyHitters, "received": Received, "snap": Snap}


def policy_of(text: str) -> KeptKeys:
    """The budget that a text names. Raises UsageError for a text that names none.

    >>> policy_of("snap:64@16")
    Snap(size=64, window=16)
    """
    budget = written_budget(text)
    return KINDS[budget.kind](*budget.numbers)


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
    intact rows, too. first: the place of the first budget in a pass, 0 without the intact texts before it. kinds:
    budgets of other passes, in whose rows intact texts are computed again.
    """

    ends: tuple[int, ...]
    stops: tuple[int, ...]
    heads: Mapping[int, tuple[int, ...]]
    first: int = 1
    kinds: tuple[str, ...] = ()
    name = "budget"

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"ends": list(self.ends)}

    def alone(self, kept: Kept) -> CacheBudget:
        return replace(self, first=0)

    def keeping(self, sets: Sequence[HeadSet], kept: Kept) -> CacheBudget:
        return replace(self, kinds=kinds_of(sets))

    def change(self, sets: Sequence[HeadSet], lengths: Sequence[int], texts: Sequence[int]) -> Change:
        budgets, kinds = [budget for budget in sets if isinstance(budget, HeadBudget)], kinds_of(sets)
        ends = tuple(self.ends[text] for text in texts)

        def change(call: AttentionCall, output_NQHV: Tensor) -> Tensor:
            heads = self.heads.get(call.layer, ())
            if call.stack != DECODER or not heads:
                return output_NQHV
            spec = spec_of(call, output_NQHV)
            query_NR = padded(self.rows(kinds or self.kinds, texts), spec.device).repeat(spec.batch // len(texts), 1)

            # Heads of one kind of budget are read together, whichever sets of the pass they belong to.
            policies: list[tuple[BudgetedHeads, Dropping]] = []
            for kind in kinds:
                pairs = [
                    (at * len(texts) + number, heads.index(head))
                    for at, budget in enumerate(budgets, self.first)
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


def kinds_of(sets: Sequence[HeadSet]) -> tuple[str, ...]:
    """The budgets of some sets, each once."""
    return tuple(dict.fromkeys(budget.keep for budget in sets if isinstance(budget, HeadBudget) and budget.keep))


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
    name = "kept"

    def change(self, sets: Sequence[HeadSet], lengths: Sequence[int], texts: Sequence[int]) -> Change:
        def change(call: AttentionCall, output_BQHV: Tensor) -> Tensor:
            heads = self.cache.heads.get(call.layer, ())
            if call.stack == DECODER and heads and not call.call:  # one that attends twice is read once
                # Of every text and head; a row that sees nothing loses nothing.
                spec, sizes = spec_of(call, output_BQHV), (len(texts), len(heads))
                every_E2 = torch.cartesian_prod(*(torch.arange(size, device=spec.device) for size in sizes))
                ends = tuple(self.cache.ends[text] for text in texts)
                budgeted = BudgetedHeads(spec, heads, ends, *every_E2.view(-1, 2).T)
                for kind in self.kinds:
                    dropped = policy_of(kind).over(budgeted)
                    total_E, rows_E = torch.zeros(len(every_E2)), torch.zeros(len(every_E2))
                    for block in RowsAgain(spec, heads).blocks(padded(self.cache.rows([kind], texts), spec.device)):
                        seen_ErK, there_Er = budgeted.of(block.seen_NPrK), (budgeted.query_Er(block) >= 0).cpu()
                        kept_Er = (seen_ErK & ~dropped(block)).sum(-1).cpu().double()
                        count_Er = seen_ErK.sum(-1).cpu()
                        share_Er = torch.where(count_Er > 0, kept_Er / count_Er.clamp_min(1), 1.0)
                        total_E, rows_E = total_E + (share_Er * there_Er).sum(-1), rows_E + there_Er.sum(-1)
                    for text, share_P in zip(texts, (total_E / rows_E).view(sizes), strict=True):
                        self.on_kept(kind, text, call.layer, share_P)
            return output_BQHV

        return change
