"""To observe a text: heads, relations, keys, maps, whatever the ask keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnscope.observe.progress import NO_PROGRESS as SILENT
from attnscope.observe.progress import Progress as Teller
from attnscope.purposes.purpose import Check, Purpose, unchecked

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel
    from attnscope.observe.observation import Observation
    from attnscope.observe.request import CaptureSpec as Ask


@dataclass(frozen=True)
class Observe(Purpose):
    """An Observation of the text."""

    name = "observe"
    record = "Observation"

    def answer(self, loaded: LoadedModel, ask: Ask, tell: Teller = SILENT, check: Check = unchecked) -> Observation:
        """See `attnscope.observe.run.observed`."""
        from attnscope.observe.run import run_and_report as observed

        return observed(loaded, ask, tell, check)
