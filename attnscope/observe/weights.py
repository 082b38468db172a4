"""Attention weights that somebody else computed -> an Observation, made without a pass.

    seen = observe_weights(weights_of([A0, A1], ["the", "cat", "sat"]), CaptureSpec("", Request(relations=True)))

The weights are checked as data: they are finite, and every row sums to 1 within what their dtype allows. Which keys a
query sees is read off them: a layer is causal where no query gives weight to a later key, has a window where no query
gives weight beyond it, and sees all keys otherwise. What only a model could tell is refused, or listed as not measured.

Shapes: H head, Q query, K key, T token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attnscope.attention.operator import DenseAttention
from attnscope.attention.spec import Visibility
from attnscope.errors import InputError, MemoryLimitError, UsageError, visible
from attnscope.hooks.report import GIVEN, CallCheck, CaptureReport, tolerance
from attnscope.inputs.prompt import Prompt
from attnscope.inputs.tokens import chosen_lines
from attnscope.inputs.weights import MEMORY, GivenWeights, axes_of
from attnscope.model.geometry import LayerGeometry
from attnscope.model.selection import CROSS, DECODER, ENCODER, as_ranges, prefix, select_stacks
from attnscope.observe.collect import StackCollector
from attnscope.observe.request import TextInputs
from attnscope.utils.memory import free_memory, human_bytes
from attnscope.utils.stages import NO_PROGRESS, Progress

if TYPE_CHECKING:
    from attnscope.observe.observation import Observation
    from attnscope.observe.request import CaptureSpec, Request

NOT_VERIFIED = "not verified"
THESE = "this set of weights"
SURELY_FREE = 2**20  # bytes that are not asked after
NARROW = ("bfloat16", "float16")  # dtypes that numbers may have gone through, whatever holds them now
WITHOUT_MODEL = {
    "scores": "logits before the softmax",
    "value": "norms of what keys write",
    "logit": "effects on a logit",
}


class Sight(NamedTuple):
    """Which keys the queries of a layer see: so many before their own, and so many after it; None for all there are."""

    before: int | None
    after: int | None

    def mask(self, queries: int, keys: int) -> Visibility:
        """The same as an operator reads it."""
        if self.after == 0:
            return Visibility(queries, keys, None, True, None if self.before is None else self.before + 1)
        if self == (None, None):
            return Visibility(queries, keys, None, causal=False)
        distance_QK = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
        seen_QK = torch.ones(queries, keys, dtype=torch.bool)
        seen_QK &= distance_QK <= (keys if self.before is None else self.before)
        seen_QK &= distance_QK >= -(keys if self.after is None else self.after)
        return Visibility(queries, keys, seen_QK[None, None])

    @property
    def words(self) -> str:
        """`causal, window 16`, `both ways`."""
        way = "causal" if self.after == 0 else "both ways"
        if self.after == 0:
            return way if self.before is None else f"{way}, window {self.before + 1}"
        sides = [f"{count} {side}" for count, side in zip(self, ("before", "after"), strict=True) if count is not None]
        return f"{way}, {' and '.join(sides)}" if sides else way


def sight_of(weights_HQK: Tensor) -> Sight:
    """What the weights of a layer say of its mask: exactly 0 for all heads beyond an edge that every query has.

    A window has at least 2 keys, and some head gives weight to each of them in every query: rows of a single 1, and
    weights that are too small for their dtype, are no window.

    >>> sight_of(torch.tensor([[[1.0, 0.0], [0.5, 0.5]]]))
    Sight(before=None, after=0)
    """
    queries, keys = weights_HQK.shape[1:]
    seen_QK = torch.zeros(queries, keys, dtype=torch.bool)
    for weights_QK in weights_HQK:  # one by one: what is not 0 of all would take a quarter of them again
        seen_QK |= weights_QK != 0
    place_Q = torch.arange(queries) + keys - queries
    first_Q, last_Q = seen_QK.byte().argmax(-1), keys - 1 - seen_QK.flip(-1).byte().argmax(-1)
    before_Q, after_Q = place_Q - first_Q, last_Q - place_Q
    ahead_Q = keys - 1 - place_Q
    most_before, most_after = int(before_Q.max()), int(after_Q.max())
    if most_after <= 0:
        most_after = 0
    # Every query sees one run of keys without a gap, as far as both edges and the ends of the text allow.
    runs = (seen_QK.sum(-1) == last_Q - first_Q + 1) & (before_Q == place_Q.clamp(max=most_before))
    edges = bool((runs & (after_Q == ahead_Q.clamp(max=most_after))).all()) and most_before + most_after > 0
    before = most_before if edges and most_before < int(place_Q.max()) else None
    after = most_after if edges and most_after < int(ahead_Q.max()) else None
    return Sight(before, 0 if most_after == 0 else after)


@dataclass(frozen=True)
class CheckedWeights:
    """Weights whose every number was looked at.

    sights: {stack: {layer: its mask}}. errors: {stack: {layer: the largest |row sum - 1|}}. dtype: that their rows
    allow. padding: tokens at the ends of the text that were left out, and of the target.
    """

    given: GivenWeights
    sights: Mapping[str, Mapping[int, Sight]]
    errors: Mapping[str, Mapping[int, float]]
    dtype: str
    padding: tuple[int, int] = (0, 0)

    @property
    def notes(self) -> list[str]:
        """What was left out, in words."""
        ends = zip(self.padding, ("text", "queries"), strict=True)
        return [f"{count} tokens of padding at the ends of the {what} were left out" for count, what in ends if count]


def checked(given: GivenWeights) -> CheckedWeights:
    """The same with its numbers checked, without padding, and each stack called by which way it looks.

    Raises InputError for weights that are none: not finite, negative, or with a row that does not sum to 1.
    """
    given, padding = _without_padding(given)
    sights: dict[str, dict[int, Sight]] = {}
    errors: dict[str, dict[int, float]] = {}
    narrowest = "float32"
    for stack, layers in given.stacks.items():
        before = f"{stack} " * (len(given.stacks) > 1)
        sights[stack], errors[stack] = {}, {}
        for index, weights_HQK in layers.items():
            dtype, error = _check_numbers(f"{before}L{index}", weights_HQK, given.sink_logits)
            narrowest = max(narrowest, dtype, key=lambda name: tolerance(name)[0])
            errors[stack][index] = error
            sights[stack][index] = Sight(None, None) if stack == CROSS else sight_of(weights_HQK)
    # One stack over one text is an encoder's where a layer looks ahead.
    if set(sights) == {DECODER} and any(sight.after != 0 for sight in sights[DECODER].values()):
        given = replace(given, stacks={ENCODER: given.stacks[DECODER]})
        sights, errors = {ENCODER: sights[DECODER]}, {ENCODER: errors[DECODER]}
    return CheckedWeights(given, sights, errors, narrowest, padding)


def _check_numbers(name: str, weights_HQK: Tensor, sink_logits: bool) -> tuple[str, float]:
    """The narrowest dtype that its row sums allow, and how far the furthest is from 1; head by head, as float32."""
    dtype, furthest = "float32", 0.0
    # Head by head: a float32 copy of a layer in half precision would take twice its memory.
    for head, weights in enumerate(weights_HQK):
        weights_QK = weights.float()
        if not torch.isfinite(weights_QK).all():
            row = int((~torch.isfinite(weights_QK)).any(-1).byte().argmax())
            raise InputError(f"row {row} of {name}H{head} has NaN or infinite weights", "give finite weights")
        if (weights_QK < 0).any():
            row = int((weights_QK < 0).any(-1).byte().argmax())
            least = float(weights_QK[row].min())
            raise InputError(
                f"row {row} of {name}H{head} has a weight of {least:.3g}, expected 0 to 1",
                "give weights after the softmax, not logits",
            )
        # A sink outside the keys takes a share of each row, so that a sum may be too small, and never too large.
        sum_Q = weights_QK.sum(-1, dtype=torch.float64)
        off_Q = (sum_Q - 1).clamp_min(0) if sink_logits else (sum_Q - 1).abs()
        error = float(off_Q.max())
        if error > tolerance(dtype)[0]:
            dtype = _precision(weights)
        if error > tolerance(dtype)[0]:
            row = int(off_Q.argmax())
            raise InputError(
                f"row {row} of {name}H{head} sums to {float(sum_Q[row]):.4g}, expected 1",
                "give weights after the softmax and before dropout; where a sink takes the rest, {sink_logits=True}",
            )
        furthest = max(furthest, error)
    return dtype, furthest


def _precision(weights: Tensor) -> str:
    """The narrowest dtype that holds all the numbers as they are: what they were rounded to before."""
    for name in NARROW:
        if torch.equal(weights.to(getattr(torch, name)).to(weights.dtype), weights):
            return name
    return "float32"


def _without_padding(given: GivenWeights) -> tuple[GivenWeights, tuple[int, int]]:
    """The same without the tokens of padding at the ends of its texts, and how many those were.

    A token is padding where it has no row in any head, only zeros. Raises InputError for such a row between others,
    and where a token of padding receives weight.
    """
    # A token is padding only where every layer and stack agrees: one empty row may be a dropped head.
    empty: dict[int, Tensor] = {}  # of each text, by its place: which of its queries have no row
    for stack, layers in given.stacks.items():
        none_Q = torch.stack([(weights == 0).all(-1).all(0) for weights in layers.values()]).all(0)
        which = 0 if axes_of(stack, 0, None if given.target is None else 1)[0] == 0 else 1
        empty[which] = none_Q if which not in empty else empty[which] & none_Q
    if not any(bool(none_Q.any()) for none_Q in empty.values()):
        return given, (0, 0)
    kept = {}
    for which, text in enumerate((given.text, given.target)):
        kept[which] = range(len(text or ()))
        if which not in empty or not empty[which].any():
            continue
        full = (~empty[which]).nonzero()[:, 0].tolist()
        if not full:
            raise InputError("all rows are zeros: no query has weights", "give weights after the softmax")
        kept[which] = range(full[0], full[-1] + 1)
        inside = next((row for row in kept[which] if bool(empty[which][row])), None)
        if inside is not None:
            raise InputError(f"row {inside} is all zeros in every head, expected a sum of 1", "leave out its token")
    # Cut as views, without a copy; a row that loses weight by it looked at padding, which a mask would forbid.
    stacks: dict[str, dict[int, Tensor]] = {}
    for stack, layers in given.stacks.items():
        rows, columns = (kept[which] for which in axes_of(stack, 0, None if given.target is None else 1))
        for index, weights_HQK in layers.items():
            own_HQK = weights_HQK[:, rows.start : rows.stop, columns.start : columns.stop]
            if not torch.allclose(own_HQK.float().sum(-1), weights_HQK[:, rows.start : rows.stop].float().sum(-1)):
                name = f"{prefix(stack) if len(given.stacks) > 1 else ''}layer {index}"
                raise InputError(f"{name}: tokens of padding receive weight", "leave out their rows and columns")
            stacks.setdefault(stack, {})[index] = own_HQK
    texts = [text and _part(text, kept[which]) for which, text in enumerate((given.text, given.target))]
    assert texts[0] is not None
    lost = [len(text or ()) - len(kept[which]) for which, text in enumerate((given.text, given.target))]
    return replace(given, stacks=stacks, text=texts[0], target=texts[1]), (lost[0], lost[1])


def _part(prompt: Prompt, places: range) -> Prompt:
    """The tokens of a range alone; what was cut off is counted."""
    if len(places) == len(prompt):
        return prompt
    columns: dict[str, Any] = {
        name: getattr(prompt, name)[places.start : places.stop]
        for name in ("ids", "tokens", "labels", "special", "plain")
    }
    text = "".join(columns["plain"])
    return Prompt(text=text, turns=(), removed=prompt.removed + len(prompt) - len(places), **columns)


@dataclass(frozen=True)
class GivenLayers:
    """Layers with their weights, as the `Reading` that a `StackCollector` takes."""

    request: Request
    plain: str
    shown: Mapping[str, Mapping[int, LayerGeometry]]
    advance: Callable[[int], object]

    device = "cpu"
    directions = out = None
    checks_padding = False

    @property
    def every(self) -> Mapping[str, Sequence[LayerGeometry]]:
        """All layers, by stack."""
        return {stack: tuple(layers.values()) for stack, layers in self.shown.items()}


def observe_weights(given: GivenWeights, ask: CaptureSpec, tell: Progress = NO_PROGRESS) -> Observation:
    """The observation of weights that were given, as of a pass; the ask's `keep` and `select` say what is kept.

    Raises InputError for weights that are none, UsageError for what only a model can tell.
    """
    # What is refused is refused before every number is looked at.
    check_request(given, ask.keep)
    whole = checked(given)
    given = whole.given
    shown = {
        stack: {index: _geometry(given, stack, index, sight) for index, sight in sights.items()}
        for stack, sights in whole.sights.items()
    }
    plain = next(stack for stack in (DECODER, ENCODER, CROSS) if stack in shown)
    request = _selected(ask, shown, plain)
    _check_room(given, request, plain)
    prompt, source = (given.text, None) if given.target is None else (given.target, given.text)
    texts = TextInputs(prompt, request.chosen(prompt, source), source)
    for line in weights_lines(whole):
        tell.say(line)
    report, facts = CaptureReport(tokens=len(given.text), attention=GIVEN), facts_of(whole)
    seen: dict[str, Observation] = {}
    with tell.stage("reading weights", sum(map(len, shown.values())), "layers") as advance, torch.no_grad():
        layers = GivenLayers(request, plain, shown, advance)
        for stack, of_stack in given.stacks.items():
            [text] = texts.of(stack, plain)
            for line in chosen_lines(text.prompt, text.key_prompt, text.chosen, f"{stack}: " * (len(shown) > 1)):
                tell.say(line)
            collector = StackCollector(layers, stack, [text])
            masks: dict[Sight, Visibility] = {}  # layers of one mask share what is made of it
            for index, weights_HQK in of_stack.items():
                sight = whole.sights[stack][index]
                P = DenseAttention(weights_HQK[None], masks.setdefault(sight, sight.mask(*weights_HQK.shape[1:])))
                P.sums_to_one = not given.sink_logits
                collector.ask(collector.layer(index, P))
            calls = [_check(whole, stack, index) for index in of_stack]
            report.calls += calls
            own = replace(report, calls=calls, tokens=len(text.key_prompt))
            seen[stack] = collector.observation(0, own, facts)
    return replace(seen[plain], other_stacks={stack: of for stack, of in seen.items() if stack != plain})


def check_request(given: GivenWeights, request: Request) -> None:
    """Raise UsageError for what weights alone do not tell."""
    what = WITHOUT_MODEL.get(request.view.weights)
    if what is not None:
        raise UsageError(f"{what} need the model, and these are weights alone", "use {weights=softmax}")
    if request.operands:
        raise UsageError("q, k and v need the model, and these are weights alone", "ask for weights")
    if request.view.by_kv and given.kv_heads is None:
        raise UsageError(
            "weights alone do not tell which heads share a kv head", "give {kv_heads=N}, or leave out {by}"
        )


def _selected(ask: CaptureSpec, shown: Mapping[str, Mapping[int, LayerGeometry]], plain: str) -> Request:
    """What is kept, of the heads that are named."""
    select = ask.select
    if select is None and ask.keep.per_token and len(shown) > 1 and CROSS in shown:
        select = CROSS  # as of a pass: which tokens of the text a target looks at
    if select is None:
        return ask.keep
    if "@" in select:
        raise UsageError(f"{select!r} names a role, and weights alone have no atlas", "name heads, as {select=1.4}")
    heads = {stack: {index: layer.heads for index, layer in layers.items()} for stack, layers in shown.items()}
    return ask.keep.selecting(select_stacks(select, heads, plain, of=THESE), plain, len(shown) > 1)


def _check_room(given: GivenWeights, request: Request, plain: str) -> None:
    """Refuse to keep float32 copies of matrices that the machine has no room for."""
    if not request.weights:
        return
    needed = 0
    for stack, layers in given.stacks.items():
        of_stack = request.of(stack, plain)
        heads = of_stack.view_of(of_stack.weights).heads
        for index, weights in layers.items():
            kept = weights.shape[0] if heads is None else len(heads.get(index, ()))
            needed += 4 * kept * weights[0].numel() * (weights.dtype != torch.float32)
    if needed > SURELY_FREE and needed > (room := free_memory("cpu")):
        raise MemoryLimitError(
            f"the matrices take {human_bytes(needed)} as float32, and this machine has {human_bytes(room)} free",
            "ask for fewer heads with {select}, or for a Request without weights",
        )


def _geometry(given: GivenWeights, stack: str, index: int, sight: Sight) -> LayerGeometry:
    """A layer as far as its weights tell; 0 for what they do not."""
    causal, window, kind = sight.after == 0, None, "full"
    if causal and sight.before is not None:
        kind, window = "sliding", sight.before + 1
    elif not causal and sight.before == sight.after and sight.before is not None:
        kind, window = "sliding", sight.before
    elif not causal and sight != Sight(None, None):
        kind = "sparse"
    heads = given.stacks[stack][index].shape[0]
    return LayerGeometry(index, kind, heads, given.kv_heads or 0, 0, 0, window, both_ways=not causal)


def _check(whole: CheckedWeights, stack: str, index: int) -> CallCheck:
    """What was measured of a layer: how far its rows are from a sum of 1. Masked keys are those without weight."""
    given = whole.given
    heads, queries, keys = given.stacks[stack][index].shape
    error = None if given.sink_logits else whole.errors[stack][index]
    check = CallCheck(index, 0, given.source, heads, GIVEN, error, stack=stack, keys=keys, queries=queries)
    check.sink_logits, check.kernel, check.dtype = given.sink_logits, "none", whole.dtype
    return check


def weights_lines(whole: CheckedWeights) -> Iterator[str]:
    """What is read, in a line as before a pass, and what was left out."""
    given = whole.given
    source = "weights" if given.source == MEMORY else f"weights from {visible(given.source)}"
    parts = [f"{source}, {NOT_VERIFIED}", *([visible(given.name)] if given.name else [])]
    for stack, layers in given.stacks.items():
        counts = sorted({weights.shape[0] for weights in layers.values()})
        heads = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        parts.append(f"{stack} " * (len(given.stacks) > 1) + f"{len(layers)} layers x {heads} heads")
    target = "" if given.target is None else f", target {len(given.target)}"
    yield "  ".join([*parts, f"{len(given.text)} tokens{target}", whole.dtype, masks_in_words(whole)])
    yield from whole.notes


def masks_in_words(whole: CheckedWeights) -> str:
    """`causal`, or of each mask the layers that have it: `causal in layers 1,3; causal, window 16 in layers 0,2`."""
    layers: dict[str, list[int]] = {}
    for stack, sights in whole.sights.items():
        for index, sight in sights.items():
            of = "cross-attention" if stack == CROSS else sight.words
            layers.setdefault(f"{stack} {of}" if len(whole.sights) > 1 and stack != CROSS else of, []).append(index)
    if len(layers) == 1:
        return next(iter(layers))
    return "; ".join(f"{words} in layers {as_ranges(indices)}" for words, indices in layers.items())


def facts_of(whole: CheckedWeights) -> dict[str, Any]:
    """What a manifest says of the weights: in the place of the model, and that nothing of them was verified."""
    given = whole.given
    name = given.name or (None if given.source == MEMORY else given.source)
    lines = [
        "the weights are not verified: no model computed them here, and no layer was compared with the oracle",
        f"masks were read off the weights: {masks_in_words(whole)}",
    ]
    lines += ["kv heads: weights alone do not tell which heads share one"] if given.kv_heads is None else []
    return {
        "model": {
            "name": f"weights {NOT_VERIFIED}" + (f": {name}" if name else ""),
            "revision": None,
            "type": "weights",
            "layers": sum(map(len, given.stacks.values())),
            "layers_without_attention": {},
        },
        "device": "cpu",
        "dtype": whole.dtype,
        "attention": GIVEN,
        "engine": "none",
        "output": "none",
        "source": {"weights": given.source, "sha256": given.sha256, "verified": False},
        "unverified": lines,
        **({"notes": whole.notes} if whole.notes else {}),
    }
