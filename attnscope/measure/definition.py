"""What defines a head metric: its words, its questions, its value per row, and which rows count.

Shapes: B text, H head, Q query.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnscope.attention.questions import Question
from attnscope.measure.texts import Texts
from attnscope.model.selection import SOFTMAX

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.attention.operator import AttentionOperator


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One head metric: its definition in words, what it asks, and what it makes of the answers row by row.

    short: its heading in narrow tables. rows: which rows count, a key of ROWS. asks(texts): the questions. value(P,
    answer, ...): their answers, each (B, H, Q), to the metric's value per row; None for the first answer. extras(P,
    texts): what value takes after the answers, None for nothing. stacks: the stacks of whose layers it says something;
    of others it is null.
    """

    id: str
    short: str
    title: str
    formula: str
    source: str
    reading: str
    rows: str
    asks: Callable[[Texts], tuple[Question, ...]]
    unit: str = "share of a row"
    range: str = "0 to 1"
    value: Callable[..., Tensor] | None = None
    extras: Callable[[AttentionOperator, Texts], tuple[Tensor, ...]] | None = None
    stacks: tuple[str, ...] = SOFTMAX

    @property
    def within(self) -> tuple[float, float] | None:
        """The range of a text's value: that of a share; None where no bound holds for all texts, however long."""
        return (0.0, 1.0) if self.range == "0 to 1" else None
