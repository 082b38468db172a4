"""To cut edges: what an answer loses where heads may not look from some tokens at others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from attnscope.cells import shortened
from attnscope.purposes.purpose import Check, Purpose, unchecked
from attnscope.study.knockout.asked import DRAWS, AskedText, CutPlan
from attnscope.telling import SILENT, Teller

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnscope.ask import Ask
    from attnscope.model.geometry import Geometry
    from attnscope.model.loaded import LoadedModel
    from attnscope.study.knockout.records import Case, Knocked


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
        from attnscope.study.knockout.effects import knocked_out

        cases, plan = self.ready(loaded, ask, [self.text_of(ask)], tell)
        with tell.stage("cutting") as advance:
            return KnockedModel(knocked_out(loaded, cases, plan, advance=advance), loaded.geometry)

    def ready(
        self, loaded: LoadedModel, ask: Ask, texts: Sequence[AskedText], tell: Teller
    ) -> tuple[list[Case], CutPlan]:
        """What is cut in some texts, of which the ask names the heads, before any pass."""
        from attnscope.calls.knockout import chosen_heads
        from attnscope.study.knockout.cases import cases_of

        tell.say(f"{loaded.name}  {loaded.device}  {loaded.precision}  {loaded.geometry.in_words}")
        heads = chosen_heads(loaded, ask.select, ask.atlas)
        plan = CutPlan(self.over, heads, ask.select or CutPlan.name, self.how, self.random, self.seed)
        cases = cases_of(loaded, texts)
        if len(cases) == 1:
            for line in _lines(cases[0], texts[0]):
                tell.say(line)
        return cases, plan

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


def _lines(case: Case, asked: AskedText) -> Iterator[str]:
    """Which tokens are meant, and what the answer is."""
    from attnscope.study.knockout.records import key_name

    for name, places in (("query", case.queries), ("key", case.keys)):
        if name == "query" or asked.key is not None:
            yield f"{name}: {shortened(', '.join(key_name(case, at) for at in places), 200)}"
    yield f"answer: {case.said}"
