"""What a purpose is: a record that JSON can hold, and the way from a loaded model to a record that has no model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from attnscope.observe.progress import NO_PROGRESS as SILENT
from attnscope.observe.progress import Progress as Teller
from attnscope.observe.progress import RunInfo as Prepared

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel
    from attnscope.observe.request import CaptureSpec as Ask

Check = Callable[[Prepared], object]


def unchecked(prepared: Prepared) -> None:
    """Whatever is known before the pass will do."""


class Purpose(ABC):
    """What a text is read for. Its fields are what JSON can hold; it is imported without torch.

    name: how a question says it. record: the type of its answer.
    """

    name: ClassVar[str]
    record: ClassVar[str]

    @abstractmethod
    def answer(self, loaded: LoadedModel, ask: Ask, tell: Teller = SILENT, check: Check = unchecked) -> Any:
        """The answer. What can be refused is refused before the next costly step.

        tell: hears lines and stages. check: called before a pass whose results may go to a folder; what it raises ends
        the question.
        """
