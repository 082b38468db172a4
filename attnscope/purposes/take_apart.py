"""To take a logit apart: why a head looks from one query at one key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from attnscope.observe.progress import NO_PROGRESS as SILENT
from attnscope.observe.progress import Progress as Teller
from attnscope.purposes.purpose import Check, Purpose, unchecked

if TYPE_CHECKING:
    from attnscope.api.why_record import Why, WhyOptions
    from attnscope.model.loaded import LoadedModel
    from attnscope.observe.request import CaptureSpec as Ask


@dataclass(frozen=True)
class TakeApart(Purpose):
    """What wrote the logit of the ask's query and key in a head; the fields are those of `WhyOptions`.

    >>> TakeApart("L3H0").answer(loaded, Ask("the bank of the river", Request(query="last"))).line
    """

    head: str
    against: str | int = "mean"
    side: Literal["key", "query", "both"] = "key"
    by: Literal["component", "tokens"] = "component"
    verify: bool = False

    name = "why"
    record = "Why"

    @classmethod
    def of(cls, head: str, options: WhyOptions) -> TakeApart:
        """What the options say beside the text and its tokens, which the ask holds."""
        return cls(head, options.against, options.side, options.by, options.verify)

    def answer(self, loaded: LoadedModel, ask: Ask, tell: Teller = SILENT, check: Check = unchecked) -> Why:
        """The logit with its parts; raises as `attnscope.why`."""
        from attnscope.api.why import STACKS, taken_apart
        from attnscope.api.why_record import WhyOptions
        from attnscope.observe.run import asked_lines, prepare, target_lines

        loaded.check_task(*STACKS)
        run = prepare(loaded, ask, compared=False)
        model = loaded.name, loaded.device, loaded.precision, loaded.geometry.in_words, f"{len(run.text)} tokens"
        for line in ("  ".join(model), *target_lines(run), *asked_lines(run)):
            tell.say(line)
        options = WhyOptions(
            query=ask.keep.query or "last",
            key=ask.keep.key,
            against=self.against,
            side=self.side,
            by=self.by,
            verify=self.verify,
            define=ask.keep.define,
        )
        with tell.stage("taking the logit apart"):
            return taken_apart(run, self.head, options)
