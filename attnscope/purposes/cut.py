"""To cut edges: what an answer loses where heads may not look from some tokens at others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from attnscope.interventions.spec import DRAWS, AskedText, CutPlan
from attnscope.observe.progress import NO_PROGRESS as SILENT
from attnscope.observe.progress import Progress as Teller
from attnscope.purposes.purpose import Check, Purpose, unchecked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnscope.model.geometry import Geometry
    from attnscope.model.loaded import LoadedModel
    from attnscope.observe.request import CaptureSpec as Ask
    from attnscope.studies.knockout import KnockoutStudy
    from attnscope.studies.knockout_records import KnockoutResult as Knocked


@dataclass(frozen=True)
class KnockedModel:
    """What was measured, and the shape of the model that it was measured of."""

    found: Knocked
    geometry: Geometry


@dataclass(frozen=True)
class CutEdges(Purpose):
    """The edges from the ask's query to its key are cut, and what follows the text is its answer.

    foil: what is not to follow. over, how, random, seed: as `CutPlan` has them.
    """

    foil: str | tuple[int, ...] | None = None
    over: str = "none"
    how: Literal["mask", "zero"] = "mask"
    random: int = DRAWS
    seed: int = 0

    name = "knockout"
    record = "KnockedModel"

    def answer(self, loaded: LoadedModel, ask: Ask, tell: Teller = SILENT, check: Check = unchecked) -> KnockedModel:
        """What was measured; raises as `attnscope.knockout`."""
        tell.say(loaded.line)
        study = self.study(loaded, ask, [self.text_of(ask)])
        for line in study.lines:
            tell.say(line)
        with tell.stage(study.stage) as advance:
            return KnockedModel(study.run(advance=advance), loaded.geometry)

    def study(self, loaded: LoadedModel, ask: Ask, texts: Sequence[AskedText]) -> KnockoutStudy:
        """The study of some texts, of which the ask names the heads."""
        from attnscope.api.knockout import chosen_heads
        from attnscope.studies.knockout import KnockoutStudy

        heads = chosen_heads(loaded, ask.select, ask.atlas)
        plan = CutPlan(self.over, heads, ask.select or CutPlan.name, self.how, self.random, self.seed)
        return KnockoutStudy.of(loaded, texts, plan)

    def text_of(self, ask: Ask) -> AskedText:
        """What is asked of the text."""
        assert isinstance(ask.text, str | tuple | list)
        keep = ask.keep
        return AskedText(
            ask.text,
            keep.query or "last",
            keep.key,
            ask.answer,
            self.foil,
            keep.define,
            ask.chat,
            ask.truncate,
        )
