"""The largest weight of every row. Shapes: B text, H head, Q query."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from attnscope.attention.questions import MaxWeight, Question
from attnscope.observe.collectors import Answers, Collector
from attnscope.observe.request import Layer, Request, TextInputs


class LargestCollector(Collector):
    """Of a layer (B, H, Q), of one text (H, Q)."""

    name = "largest"

    @classmethod
    def of(cls, texts: Sequence[TextInputs], request: Request) -> LargestCollector:
        """Of every text: a number a row is little."""
        return cls()

    def questions(self, layer: Layer) -> Sequence[Question]:
        return [MaxWeight()]

    def collect(self, layer: Layer, answers: Answers) -> Tensor:
        return answers[MaxWeight()].float().cpu()

    def of_text(self, collected: Tensor, row: int, text: TextInputs) -> Tensor:
        return collected[row, :, : len(text.prompt)]
