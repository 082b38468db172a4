"""To explain one head: every step for one query, with its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnscope.observe.progress import NO_PROGRESS as SILENT
from attnscope.observe.progress import Progress as Teller
from attnscope.purposes.purpose import Check, Purpose, unchecked

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel
    from attnscope.observe.request import CaptureSpec as Ask
    from attnscope.steps.records import Explanation


@dataclass(frozen=True)
class ExplainHead(Purpose):
    """The steps of a head for the token that the ask's query names; head: as `L2H3` or `2.3`."""

    head: str

    name = "explain"
    record = "Explanation"

    def answer(self, loaded: LoadedModel, ask: Ask, tell: Teller = SILENT, check: Check = unchecked) -> Explanation:
        """The steps; raises as `attnscope.explain`."""
        from attnscope.api.explain import STACKS, followed
        from attnscope.observe.run import prepare, run_lines

        loaded.check_task(*STACKS)
        run = prepare(loaded, ask)
        for line in (*run_lines(run), *run.chosen.notes):
            tell.say(line)
        with tell.stage("forward pass"):
            return followed(run, self.head).explanation
