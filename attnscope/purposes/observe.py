"""To observe a text: heads, relations, keys, maps, whatever the ask keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnscope.purposes.purpose import Check, Purpose, unchecked
from attnscope.telling import SILENT, Teller

if TYPE_CHECKING:
    from attnscope.ask import Ask
    from attnscope.model.loaded import LoadedModel
    from attnscope.observation import Observation


@dataclass(frozen=True)
class Observe(Purpose):
    """An Observation of the text."""

    name = "observe"
    record = "Observation"

    def answer(self, loaded: LoadedModel, ask: Ask, tell: Teller = SILENT, check: Check = unchecked) -> Observation:
        """See `attnscope.told.observed`."""
        from attnscope.told import observed

        return observed(loaded, ask, tell, check)
