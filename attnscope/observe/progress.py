"""What a long call says while it runs, and how far it is: nothing in Python, lines and bars on a terminal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnscope.inputs.prompt import Prompt


@dataclass(frozen=True)
class RunInfo:
    """What is known before the forward pass: the text that was given, and who reads it.

    by_memory: whether the engine was chosen by the memory that was free.
    """

    text: Prompt
    name: str
    revision: str | None
    device: str
    dtype: str
    by_memory: bool = False


class Progress:
    """Says nothing and shows nothing; `cli/output.py` has one that talks on stderr.

    >>> with NO_PROGRESS.stage("forward pass", 4, "layers") as advance:
    ...     advance(1)
    """

    def say(self, line: str) -> None:
        """A line for a person."""

    def stage(
        self, title: str, total: int | None = None, unit: str = ""
    ) -> AbstractContextManager[Callable[[int], object]]:
        """A stage of the work while the block runs; yields what is called with the steps that were done."""
        return nullcontext(lambda steps: None)


NO_PROGRESS = Progress()
