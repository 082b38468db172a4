"""One change to a model's attention while it runs: where, and what instead. All studies that change one thing use it.

Where: a set of heads, and, where an intervention has them, queries and keys. What instead: zero, a mean, another text's
output, keys that are cut before the softmax. Passes, shared layers, statistics, random sets and the parts on disk take
any intervention, and any measure.

Shapes: B text, N row of a pass, T token, H head, V width of v.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from attnscope.hooks.calls import CallSite as CallPlace
from attnscope.hooks.engines import Engine
from attnscope.intervene.sets import HeadSet
from attnscope.intervene.task import Task

OnOutput = Callable[[CallPlace, Tensor, Sequence[int]], None]  # a call's place, its output (B, T, H, V), texts' lengths


class Intervention(ABC):
    """What is put in place of something, in the heads of a set; name: what tables and facts call it."""

    name: str

    @property
    def facts(self) -> Mapping[str, Any]:
        """What else tells it from another, in JSON's own types."""
        return {}

    @property
    def least(self) -> int:
        """Texts that a pass needs at least."""
        return 1

    @property
    def learns(self) -> bool:
        """Whether it has to read all texts once before it can be made."""
        return False

    def check(self, task: Task) -> None:  # noqa: B027  # any task will do
        """Raise InputError for a task that has nothing to put there."""

    def learnt(self, task: Task, each: Callable[[OnOutput], None]) -> Intervention:
        """The same, after it took what it needs from the task; each: calls with what every head gives for each text."""
        return self

    @abstractmethod
    def over(
        self, engine: Engine, sets: Sequence[HeadSet], lengths: Sequence[int], texts: Sequence[int] = ()
    ) -> Engine:
        """An engine for passes of some texts and, after them, the same texts once per set, in which it intervenes.

        lengths: of the texts, before padding. texts: which of the task's they are, for what differs from text to text.
        """
