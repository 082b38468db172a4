"""How far heads are from attending uniformly, the null of every other probe. B text, H head, Q query, K key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from attnscope.attention.questions import Question
from attnscope.metrics.divergence import js_bits
from attnscope.observe.collector import Answers
from attnscope.observe.layers import Layer

NEAR = 0.15  # bits: below it a head is marked


@dataclass(frozen=True)
class FromUniform:
    """The Jensen-Shannon divergence (bits, 0 to 1) of rows to uniform attention, a mean over the rows from `first` on.

    Lin 1991, doi 10.1109/18.61115. It reads dense rows: of short texts alone.
    """

    first: int

    def questions(self, layer: Layer) -> Sequence[Question]:
        return []

    def collect(self, layer: Layer, answers: Answers) -> Tensor:
        P = layer.P
        seen_BHQK = P.visible.rows(self.first, P.queries).to(P.device).double()
        return js_bits(P.rows(self.first, P.queries).double(), seen_BHQK).mean(-1).cpu()
