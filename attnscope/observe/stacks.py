"""Which reading of a pass a call belongs to. What a family has beside plain stacks is chosen here, before the pass.

Shapes: B text, Q query, K key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnscope.errors import InputError
from attnscope.hooks.calls import AttentionCall
from attnscope.hooks.forward import given_of
from attnscope.hooks.projections import ProjectionInputs, differences, norms_behind, plain_and_gated, strength
from attnscope.hooks.report import CallCheck, CaptureReport
from attnscope.inputs.answers import of_patches, with_summaries
from attnscope.inputs.tokens import TokenSelection as Chosen
from attnscope.keep.request import Asked, Request
from attnscope.keep.values import Directions, Projections
from attnscope.model.selection import CSA, DIFFERENCE, GLOBAL, OVER_PATCHES, POOLING, UNPOOLING
from attnscope.observe.reading import Reading

if TYPE_CHECKING:
    from attnscope.inputs.prompt import Prompt
    from attnscope.model.loaded import LoadedModel

Made = Callable[[str, Sequence[Asked]], Reading]  # a stack and its texts -> what reads it


class Stacks:
    """What reads the stacks of a pass: each call belongs to the stack that it names.

    readings: by stack. stacks: of which one has to be read. facts: what the manifest says of what was read.
    """

    def __init__(self, readings: dict[str, Reading], stacks: Sequence[str]) -> None:
        self.readings, self.stacks = readings, stacks
        self.facts: dict[str, Any] = {}

    def stack_of(self, call: AttentionCall | CallCheck) -> str:
        """The stack of the reading that a call belongs to."""
        return call.stack

    def on_call(self, call: AttentionCall) -> None:
        """Let its reading read a call."""
        reading = self.readings.get(self.stack_of(call))
        if reading is not None:
            reading.on_call(call)

    def first_read(self, report: CaptureReport) -> str:
        """The first of the stacks of which a layer was read. Raises InputError where none was; report: of the pass."""
        found = next((stack for stack in self.stacks if self.readings[stack].kv_of), None)
        if found is None:
            raise self._unread(self.readings[self.stacks[0]], report.calls)
        return found

    def _unread(self, reading: Reading, calls: Sequence[CallCheck]) -> InputError:
        tokens = len(reading.prompts[0])
        sizes = {(call.queries, call.keys) for call in calls if call.stack == reading.stack}
        heard = " or ".join(f"{queries} queries and {keys} keys" for queries, keys in sorted(sizes))
        message = (
            f"no layer of {reading.model_type} attends from the {tokens} tokens of this text to the same {tokens}, "
            f"but with {heard}"
        )
        if all(queries == tokens for queries, _ in sizes):
            return InputError(f"{message}: from some length on a key represents several tokens", "take a shorter text")
        return InputError(f"{message}: its code adds tokens to this text", "choose another")


class OverSummaries(Stacks):
    """Stacks of which some layers attend to tokens and to summaries of them: these are maps of their own."""

    def __init__(self, readings: dict[str, Reading], stacks: Sequence[str], views: Mapping[str, Reading]) -> None:
        super().__init__(readings, stacks)
        self.views = views

    def stack_of(self, call: AttentionCall | CallCheck) -> str:
        return next((stack for stack, one in self.views.items() if one.heard(call)), call.stack)


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
        self, readings: dict[str, Reading], stacks: Sequence[str], made: Made, prompt: Prompt, parts: int
    ) -> None:
        super().__init__(readings, stacks)
        self.made, self.prompt, self.parts = made, prompt, parts

    def on_call(self, call: AttentionCall) -> None:
        if call.stack == POOLING and not self.readings.keys() & OVER_PATCHES:
            self.readings.update(self._over_patches(call))
        super().on_call(call)

    def _over_patches(self, call: AttentionCall) -> dict[str, Reading]:
        seen_QK = call.visible.rows(0, call.P.queries)[0, 0]
        patches = [one.nonzero()[:, 0].tolist() for one in seen_QK[:: self.parts]]
        whole, apart = of_patches(self.prompt, patches), of_patches(self.prompt, patches, self.parts)
        texts = {POOLING: (apart, self.prompt), GLOBAL: (whole, None), UNPOOLING: (self.prompt, apart)}
        return {
            stack: self.made(stack, [Asked(queries, Chosen(), keys=keys)]) for stack, (queries, keys) in texts.items()
        }


def stacks_of(
    loaded: LoadedModel,
    asked: Sequence[Asked],
    request: Request,
    check: bool,
    advance: Callable[[int], object],
    out: Projections | None = None,
    directions: Directions | None = None,
) -> Stacks:
    """What reads the stacks of some texts; check, advance, out, directions: see `Reading`."""
    geometry = loaded.geometry

    def made(stack: str, texts: Sequence[Asked]) -> Reading:
        return Reading(loaded, texts, request.of(stack, geometry.stack), check, advance, stack, out, directions)

    of_stacks = {stack: [text for one in asked for text in one.of(stack, geometry.stack)] for stack in geometry.stacks}
    of_views = {stack: _view_of(stack, asked, request, geometry.rates.get(stack)) for stack in geometry.views}
    views = {stack: made(stack, texts) for stack, texts in of_views.items() if texts}
    readings = {stack: made(stack, texts) for stack, texts in of_stacks.items() if texts} | views
    stacks = geometry.stack, *views
    if DIFFERENCE in views:
        return Differential(readings, stacks)
    if views:
        return OverSummaries(readings, stacks, views)
    if geometry.over_patches and not _of_tokens_alone(request, asked):
        return OverPatches(readings, stacks, made, asked[0].prompt, geometry.rates[POOLING])
    return Stacks(readings, stacks)


def projections_of(loaded: LoadedModel, asked: Asked) -> Projections:
    """How the heads of a model write, found in passes over the beginning of a text."""
    beginning, more = given_of(loaded, asked.prompt, asked.source, most=4)
    modules = sum(len(layers) for layers in loaded.geometry.stacks.values())
    plain, gated = plain_and_gated(loaded, beginning, modules, **more)
    every = plain | gated
    return Projections(every, norms_behind(loaded, every, beginning, **more), ProjectionInputs(gated))


def _view_of(stack: str, asked: Sequence[Asked], request: Request, rate: int | None) -> list[Asked]:
    """What is read of layers with maps of their own; nothing where something is asked of tokens alone."""
    if _of_tokens_alone(request, asked):
        return []
    if rate is None:  # a difference has no logits and no values
        return list(asked) if request.view.weights == "softmax" else []
    return [one._replace(keys=with_summaries(one.prompt, rate, overlap=stack == CSA)) for one in asked]


def _of_tokens_alone(request: Request, asked: Sequence[Asked]) -> bool:
    """Whether something is asked that keys which are not tokens have no answer to."""
    of_tokens = (request.group, request.rollout, request.per_token, request.spans, request.operands)
    return any(of_tokens) or any(one.chosen != Chosen() for one in asked)
