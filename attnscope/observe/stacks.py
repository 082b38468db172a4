"""Which reading of a pass a call belongs to. What a family has beside plain stacks is chosen here, before the pass.

Shapes: B text, Q query, K key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnscope.errors import InputError
from attnscope.keep.request import Asked, Request
from attnscope.observe.reading import Reading
from attnscope.seam.call import AttentionCall, CallCheck
from attnscope.seam.differential import differences, strength
from attnscope.seam.inputs import given_of
from attnscope.seam.projection import output_projections
from attnscope.stacks import CSA, DIFFERENCE, GLOBAL, OVER_PATCHES, POOLING, UNPOOLING
from attnscope.text.summaries import of_patches, with_summaries
from attnscope.text.tokens import Chosen

if TYPE_CHECKING:
    from attnscope.model.loading import LoadedModel
    from attnscope.text.prompt import Prompt

Made = Callable[[str, Sequence[Asked]], Reading]  # the kind of a stack and its texts -> what reads it


class Stacks:
    """What reads the stacks of a pass: each call belongs to the stack that it names.

    readings: by kind. kinds: of which one has to be read. facts: what the manifest says of what was read.
    """

    def __init__(self, readings: dict[str, Reading], kinds: Sequence[str]) -> None:
        self.readings, self.kinds = readings, kinds
        self.facts: dict[str, Any] = {}

    def kind_of(self, call: AttentionCall | CallCheck) -> str:
        """The kind of the reading that a call belongs to."""
        return call.kind

    def on_call(self, call: AttentionCall) -> None:
        """Let its reading read a call."""
        reading = self.readings.get(self.kind_of(call))
        if reading is not None:
            reading.on_call(call)

    def first_read(self) -> str:
        """The first of the kinds of which a layer was read. Raises InputError where none was."""
        found = next((kind for kind in self.kinds if self.readings[kind].kv_of), None)
        if found is None:
            reading = self.readings[self.kinds[0]]
            raise InputError(
                f"no layer of {reading.model_type} attends to the tokens of this text themselves: from some length on "
                f"a key represents several tokens, and this text has {len(reading.prompts[0])}",
                "take a shorter text",
            )
        return found


class OverSummaries(Stacks):
    """Stacks of which some layers attend to tokens and to summaries of them: these are maps of their own."""

    def __init__(self, readings: dict[str, Reading], kinds: Sequence[str], views: Mapping[str, Reading]) -> None:
        super().__init__(readings, kinds)
        self.views = views

    def kind_of(self, call: AttentionCall | CallCheck) -> str:
        return next((kind for kind, one in self.views.items() if one.heard(call)), call.kind)


class Differential(Stacks):
    """Stacks whose heads are differences of two softmaxes: both are read, and their difference as a view."""

    def on_call(self, call: AttentionCall) -> None:
        super().on_call(call)
        if difference := differences(call):
            self.readings[DIFFERENCE].on_call(difference)
            self.facts.setdefault("lambda", {})[str(call.layer)] = strength(call.module)


class OverPatches(Stacks):
    """Stacks over tokens and over patches of them: the first call that pools says where the patches are."""

    def __init__(
        self, readings: dict[str, Reading], kinds: Sequence[str], made: Made, prompt: Prompt, parts: int
    ) -> None:
        super().__init__(readings, kinds)
        self.made, self.prompt, self.parts = made, prompt, parts

    def on_call(self, call: AttentionCall) -> None:
        if call.kind == POOLING and not self.readings.keys() & OVER_PATCHES:
            self.readings.update(self._over_patches(call))
        super().on_call(call)

    def _over_patches(self, call: AttentionCall) -> dict[str, Reading]:
        seen_QK = call.visible.rows(0, call.P.queries)[0, 0]
        patches = [one.nonzero()[:, 0].tolist() for one in seen_QK[:: self.parts]]
        whole, apart = of_patches(self.prompt, patches), of_patches(self.prompt, patches, self.parts)
        texts = {POOLING: (apart, self.prompt), GLOBAL: (whole, None), UNPOOLING: (self.prompt, apart)}
        return {kind: self.made(kind, [Asked(queries, Chosen(), keys=keys)]) for kind, (queries, keys) in texts.items()}


def stacks_of(
    loaded: LoadedModel, asked: Sequence[Asked], request: Request, check: bool, advance: Callable[[int], object]
) -> Stacks:
    """What reads the stacks of some texts; check, advance: see `Reading`."""
    made, geometry = _maker(loaded, asked, request, check, advance), loaded.geometry
    of_stacks = {kind: [text for one in asked for text in one.of(kind)] for kind in geometry.stacks}
    of_views = {kind: _view_of(kind, asked, request, geometry.rates.get(kind)) for kind in geometry.views}
    views = {kind: made(kind, texts) for kind, texts in of_views.items() if texts}
    readings = {kind: made(kind, texts) for kind, texts in of_stacks.items() if texts} | views
    kinds = geometry.kind, *views
    if DIFFERENCE in views:
        return Differential(readings, kinds)
    if views:
        return OverSummaries(readings, kinds, views)
    if POOLING in geometry.beside and not _of_tokens_alone(request, asked):
        return OverPatches(readings, kinds, made, asked[0].prompt, geometry.rates[POOLING])
    return Stacks(readings, kinds)


def _maker(
    loaded: LoadedModel, asked: Sequence[Asked], request: Request, check: bool, advance: Callable[[int], object]
) -> Made:
    """What makes the reading of a stack over some texts."""
    out = None
    if request.view.weights == "value":
        beginning, more = given_of(loaded, asked[0].prompt, asked[0].source, most=4)
        out = output_projections(loaded, beginning, **more)

    def made(kind: str, texts: Sequence[Asked]) -> Reading:
        return Reading(loaded, texts, request.of(kind, loaded.geometry.kind), check, advance, kind, out)

    return made


def _view_of(kind: str, asked: Sequence[Asked], request: Request, rate: int | None) -> list[Asked]:
    """What is read of layers with maps of their own; nothing where something is asked of tokens alone."""
    if _of_tokens_alone(request, asked):
        return []
    if rate is None:  # a difference has no logits and no values
        return list(asked) if request.view.weights == "softmax" else []
    return [one._replace(keys=with_summaries(one.prompt, rate, overlap=kind == CSA)) for one in asked]


def _of_tokens_alone(request: Request, asked: Sequence[Asked]) -> bool:
    """Whether something is asked that keys which are not tokens have no answer to."""
    of_tokens = (request.group, request.rollout, request.per_token, request.spans, request.operands)
    return any(of_tokens) or any(one.chosen != Chosen() for one in asked)
