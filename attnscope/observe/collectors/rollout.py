"""Attention rollout: how much of each token's final state is attributed to each input token, by attention alone.

Abnar & Zuidema 2020, arXiv 2005.00928: A_L ... A_1 with A = mean over heads of P + I, every row divided by its sum. The
product is never made: its sums over groups of keys are carried layer by layer, first layer first:
x <- (mean over heads of P x + x) / (mean row sum + 1), from x = a column of zeros and ones per group.

Shapes: B text, H head, Q query, T token, G group of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnscope.attention.operator import AttentionOperator
from attnscope.attention.questions import Features, Question, RowSum
from attnscope.attention.rows import indicator
from attnscope.errors import MemoryLimitError, ModelError
from attnscope.inputs.prompt import Span
from attnscope.metrics.texts import MAP_SIDE
from attnscope.observe.collector import Answers, Collected, Collector, groups_of, units_of
from attnscope.observe.records import Rollout
from attnscope.observe.request import Layer, Request, TextInputs
from attnscope.utils.memory import free_memory, human_bytes


@dataclass
class RolloutCollector(Collector):
    """Carries what every token holds of every group through the layers, in the order in which they are read.

    groups_BT: the group of each token, -1 for padding. A layer that is not read (no attention over tokens) changes
    nothing. Raises MemoryLimitError where tokens times groups do not fit.
    """

    groups_BT: Tensor
    group: str = "tokens"
    layers: list[int] = field(default_factory=list)
    _share_BTG: Tensor | None = None  # what each token holds of each group, after the layers so far

    name = "rollout"
    in_order = True

    @classmethod
    def of(cls, texts: Sequence[TextInputs], request: Request) -> RolloutCollector:
        """The rollout of the units that the request names."""
        assert request.rollout is not None
        return cls(groups_of([text.prompt for text in texts], request.rollout), request.rollout)

    def questions(self, layer: Layer) -> Sequence[Question]:
        if self._share_BTG is None:
            groups = int(self.groups_BT.max()) + 1
            _check_room(layer.P, groups)
            self._share_BTG = indicator(self.groups_BT, groups)
        self._share_BTG = self._share_BTG.to(layer.P.device)
        return [RowSum(), Features(self._share_BTG)]

    def collect(self, layer: Layer, answers: Answers) -> None:
        """One layer further: x <- (mean over heads of P x + x) / (mean row sum + 1)."""
        assert self._share_BTG is not None
        sum_BQ1 = answers[RowSum()].mean(1)[..., None]
        mixed_BTG = answers[Features(self._share_BTG)].mean(1)
        self._share_BTG = (mixed_BTG + self._share_BTG) / (sum_BQ1 + 1)
        self.layers.append(layer.key.layer)

    def of_texts(self, collected: Collected, texts: Sequence[TextInputs]) -> list[Rollout]:
        queries = (None if text.chosen.query is None else text.chosen.query.positions for text in texts)
        units = (units_of(text.prompt, self.group) for text in texts)
        return [self.rolled(*of_text) for of_text in zip(range(len(texts)), units, queries, strict=True)]

    def rolled(self, row: int, units: Sequence[Span], queries: Sequence[int] | None = None) -> Rollout:
        """The rollout of one text, `units` its groups in order: mean over the queries of a group.

        queries: the tokens that were asked about, None for all; the units with one of them are shown.

        Raises ModelError where no layer attends to tokens.
        """
        if self._share_BTG is None:
            raise ModelError("no layer of this model attends to tokens", "there is nothing to roll out")
        share_TG = self._share_BTG[row, :, : len(units)].cpu()
        share_GG = torch.stack([share_TG[unit.start : unit.stop].mean(0) for unit in units])
        rows = None
        if queries is not None:
            rows = tuple(n for n, unit in enumerate(units) if any(unit.start <= q < unit.stop for q in queries))
        return Rollout(tuple(units), share_GG.numpy(), tuple(self.layers), self.group, rows)


def _check_room(P: AttentionOperator, groups: int) -> None:
    needed, device = 4 * P.batch * P.queries * groups * (P.heads + 3), str(P.device)
    room = free_memory(device)
    if needed > room:
        raise MemoryLimitError(
            f"the rollout of {P.queries} tokens towards {groups} groups takes {human_bytes(needed)}, and {device} has "
            f"{human_bytes(room)} for it",
            f"take fewer, larger groups: without {{group}} there are at most {MAP_SIDE}",
        )
