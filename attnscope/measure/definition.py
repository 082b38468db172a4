"""What defines a head metric: its words, its questions, its value per row, and which rows count.

Shapes: B text, H head, Q query. v_i is the number of keys that query i may see.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnscope.attention.questions import Question
from attnscope.measure.texts import Texts
from attnscope.stacks import SOFTMAX

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.attention.operator import AttentionOperator


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One head metric: its definition in words, what it asks, and what it makes of the answers row by row.

    short: its heading in narrow tables. rows: which rows count, a key of ROWS. asks(texts): the questions. value(P,
    answer, ...): their answers, each (B, H, Q), to the metric's value per row; the first answer without one. extras(P,
    texts): what value takes behind the answers. stacks: the stacks of whose layers it says something; of others it is
    null.
    """

    id: str
    short: str
    title: str
    formula: str
    unit: str
    range: str
    source: str
    reading: str
    rows: str
    asks: Callable[[Texts], tuple[Question, ...]]
    value: Callable[..., Tensor] = lambda P, answer: answer
    extras: Callable[[AttentionOperator, Texts], tuple[Tensor, ...]] = lambda P, texts: ()
    stacks: tuple[str, ...] = SOFTMAX

    @property
    def span(self) -> float:
        """How far a text can lie from texts that are all equal: 1 for a share, 0 where no bound holds for all texts."""
        return 1.0 if self.range == "0 to 1" else 0.0


def visible_keys(P: AttentionOperator) -> Tensor:
    """(B or 1, H or 1, Q): v_i, how many keys each query may see."""
    return P.visible.counts_BHQ.to(P.device).float()


ROWS: Mapping[str, tuple[str, Callable[[AttentionOperator, Texts], Tensor]]] = {
    "two_keys": ("rows that see at least 2 keys", lambda P, texts: visible_keys(P) >= 2),
    "previous": (
        "rows that see at least 2 keys and have a token before them",
        lambda P, texts: (visible_keys(P) >= 2) & (texts.previous_BT >= 0)[:, None],
    ),
    "three_keys": ("rows that see at least 3 keys", lambda P, texts: visible_keys(P) >= 3),
    "all": ("all rows", lambda P, texts: visible_keys(P) >= 1),
    "repeats": (
        "rows that see at least 2 keys and have an earlier equal token",
        lambda P, texts: (visible_keys(P) >= 2) & texts.repeated(1)[:, None],
    ),
    "repeats_apart": (
        "rows that see at least 2 keys and have an equal token at least 3 tokens earlier",
        lambda P, texts: (visible_keys(P) >= 2) & texts.repeated(3)[:, None],
    ),
    "answer": (
        "rows of the answer's tokens but its last that see a token of the prompt",
        lambda P, texts: texts.answering(P, 0),
    ),
    "answer_beyond_0": (
        "rows of the answer's tokens but its last that see a token of the prompt other than key 0",
        lambda P, texts: texts.answering(P, 1),
    ),
    "sees_key": ("rows that see one of the named keys", lambda P, texts: texts.sees_key_BHQ(P.visible).to(P.device)),
}
