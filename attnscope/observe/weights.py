"""Attention weights that somebody else computed -> an Observation, made without a pass.

    seen = observe_weights(weights_of([A0, A1], ["the", "cat", "sat"]), CaptureSpec("", Request(relations=True)))

The weights are checked as data: they are finite, and every row sums to 1 within what their dtype allows. Which keys a
query sees is read off them where the keys with weight in some head are those of a mask: causal, a window, runs of
tokens such as chunks, texts or a prefix. Elsewhere it is not known: numbers that need it are null, and no key counts as
hidden. What only a model could tell is refused, or listed as not measured.

Shapes: H head, Q query, K key, T token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnscope.attention.operator import DenseAttention
from attnscope.attention.spec import Visibility
from attnscope.errors import InputError, MemoryLimitError, UsageError, visible
from attnscope.hooks.report import GIVEN, CallCheck, CaptureReport, tolerance
from attnscope.inputs.prompt import Prompt
from attnscope.inputs.tokens import chosen_lines
from attnscope.inputs.weights import FLAGS, MASK, MEMORY, GivenWeights, axes_of
from attnscope.model.geometry import KEYS_NOT_KNOWN, LayerGeometry
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


Side = int | tuple[int, ...] | None  # so many keys; to the end of the run of tokens, by where runs begin; or all


class Sight(NamedTuple):
    """Which keys the queries of a layer see before their own and after it: so many, those of a run, or all (None).

    >>> Sight(None, 0).words(12), Sight((0, 4, 8), 0).words(12)
    ('causal', 'causal, chunk 4')
    """

    before: Side
    after: Side

    @classmethod
    def of(cls, seen_QK: Tensor) -> Sight | None:
        """The mask that lets queries see these keys and no others, None where no rule of these does.

        A rule has evidence in every query: each sees one stretch of keys with its own among them. A query that sees its
        own key alone is none, but the first of a run: its heads may look there.

        >>> Sight.of(torch.ones(3, 3).tril().bool())
        Sight(before=None, after=0)
        """
        queries, keys = seen_QK.shape
        if bool(seen_QK.all()):
            return cls(None, 0 if queries == keys == 1 else None)
        place_Q, first_Q = torch.arange(queries) + keys - queries, seen_QK.byte().argmax(-1)
        last_Q = keys - 1 - seen_QK.flip(-1).byte().argmax(-1)
        whole_Q = (seen_QK.sum(-1) == last_Q - first_Q + 1) & (first_Q <= place_Q) & (place_Q <= last_Q)
        if queries != keys or not bool(whole_Q.all()):
            return None
        before = _side(place_Q - first_Q, place_Q)
        after = _side((last_Q - place_Q).flip(0), place_Q)
        if isinstance(after, tuple):  # counted from the end of the text
            after = (0, *sorted(keys - start for start in after[1:]))
        alone_Q = (first_Q == place_Q) & (last_Q == place_Q)
        alone_Q[list(before) if isinstance(before, tuple) else [0]] = False
        short = isinstance(before, tuple) and _chunk(before, keys) is None and 1 in np.diff([*before, keys])
        return None if UNKNOWN in (before, after) or bool(alone_Q.any()) or short else cls(before, after)

    def words(self, tokens: int) -> str:
        """`causal, window 16`, `causal, chunk 4`, `both ways`, `both ways in the first 3 tokens, causal after them`."""
        before, after = self
        if isinstance(before, tuple):
            chunk = _chunk(before, tokens)
            runs = f"runs of tokens from {as_ranges(before)}" if chunk is None else f"chunk {chunk}"
            return f"both ways, {runs}" if after == before else f"{Sight(None, after).words(tokens)}, {runs}"
        if isinstance(after, tuple):
            prefix = after[1] if list(after[1:]) == list(range(after[1], tokens)) else None
            runs = "runs of tokens" if prefix is None else f"the first {prefix} tokens"
            window = "" if before is None else f", window {before + 1}"
            return f"causal{window}, both ways in {runs}"
        if after == 0:
            return "causal" if before is None else f"causal, window {before + 1}"
        sides = [f"{count} {side}" for count, side in zip(self, ("before", "after"), strict=True) if count is not None]
        return f"both ways, {' and '.join(sides)}" if sides else "both ways"


UNKNOWN = -1


def _side(reach_Q: Tensor, room_Q: Tensor) -> Side:
    """How far every query sees to one side, of so many keys that there are; UNKNOWN without a rule."""
    most = int(reach_Q.max())
    if torch.equal(reach_Q, room_Q.clamp(max=most)):
        return None if 0 < most == int(room_Q.max()) else most
    start_Q = room_Q - reach_Q
    # Runs: the query where one begins sees none further.
    if torch.equal(start_Q[start_Q], start_Q) and bool((start_Q.diff() >= 0).all()):
        return tuple(start_Q.unique().tolist())
    return UNKNOWN


def _chunk(starts: Sequence[int], tokens: int) -> int | None:
    """The length of runs of equal length, the last may be shorter; None where they differ."""
    size = starts[1]
    return size if list(starts) == list(range(0, tokens, size)) and 2 <= size <= tokens // 2 else None


def seen_of(weights_HQK: Tensor) -> Tensor:
    """Which keys have weight in some head, (Q, K): that a query sees those is certain."""
    seen_QK = torch.zeros(weights_HQK.shape[1:], dtype=torch.bool)
    for weights_QK in weights_HQK:  # one by one: what is not 0 of all would take a quarter of them again
        seen_QK |= weights_QK != 0
    return seen_QK


@dataclass(frozen=True)
class LayerMask:
    """Which keys the queries of a layer see; sight: the rule of it, None where it has none that is known."""

    words: str
    visible: Visibility
    sight: Sight | None = None

    @property
    def looks_ahead(self) -> bool:
        """Whether queries see keys after them, other than those of a prefix or a picture in a causal text."""
        if self.sight is None:
            return bool(self.visible.rows(0, self.visible.queries)[0, 0].triu(1).any())
        before, after = self.sight
        return after != 0 and (not isinstance(after, tuple) or isinstance(before, tuple))


@dataclass(frozen=True)
class CheckedWeights:
    """Weights whose every number was looked at.

    masks: {stack: {layer: its mask}}. errors: {stack: {layer: the largest |row sum - 1|}}. dtype: that their rows
    allow. notes: what was left out, in words.
    """

    matrices: GivenWeights
    masks: Mapping[str, Mapping[int, LayerMask]]
    errors: Mapping[str, Mapping[int, float]]
    dtype: str
    notes: Sequence[str] = ()


def checked(matrices: GivenWeights) -> CheckedWeights:
    """The same with its numbers checked, without padding, and each stack called by which way it looks.

    Raises InputError for weights that are none: not finite, negative, or with a row that does not sum to 1.
    """
    seen = {stack: {at: seen_of(layer) for at, layer in layers.items()} for stack, layers in matrices.stacks.items()}
    matrices, seen, notes = without_padding(matrices, seen)
    errors: dict[str, dict[int, float]] = {}
    narrowest = "float32"
    for stack, layers in matrices.stacks.items():
        before = f"{stack} " * (len(matrices.stacks) > 1)
        errors[stack] = {}
        for index, weights_HQK in layers.items():
            dtype, error = _check_numbers(f"{before}L{index}", weights_HQK, matrices.sink_logits)
            narrowest = max(narrowest, dtype, key=lambda name: tolerance(name)[0])
            errors[stack][index] = error
    # One stack over one text is an encoder's where a layer looks ahead.
    masks = _masks(matrices, seen)
    if masks.keys() == {DECODER} and any(mask.looks_ahead for mask in masks[DECODER].values()):
        matrices = replace(matrices, stacks={ENCODER: matrices.stacks[DECODER]})
        masks, errors = {ENCODER: masks[DECODER]}, {ENCODER: errors[DECODER]}
    return CheckedWeights(matrices, masks, errors, narrowest, notes)


def _masks(matrices: GivenWeights, seen: Mapping[str, Mapping[int, Tensor]]) -> dict[str, dict[int, LayerMask]]:
    """The masks of all layers; those that are alike share what is made of them. InputError where one is contradicted.

    A mask that somebody gives says what the weights leave open.
    """
    known: dict[tuple[Sight, int, int], LayerMask] = {}

    def ruled(sight: Sight, seen_QK: Tensor) -> LayerMask:
        queries, keys = seen_QK.shape
        if (sight, queries, keys) not in known:
            before, after = sight
            visible = Visibility(queries, keys, seen_QK[None, None])
            if after == 0 and not isinstance(before, tuple):
                visible = Visibility(queries, keys, window=None if before is None else before + 1)
            elif sight == (None, None):
                visible = Visibility(queries, keys, causal=False)
            known[sight, queries, keys] = LayerMask(sight.words(keys), visible, sight)
        return known[sight, queries, keys]

    allowed, named = matrices.flags.get(MASK), None
    if allowed is not None:
        allowed_QK = torch.from_numpy(np.array(allowed))
        sight = Sight.of(allowed_QK)
        visible = Visibility(len(allowed_QK), allowed_QK.shape[1], allowed_QK[None, None])
        named = ruled(sight, allowed_QK) if sight else LayerMask("mask as given", visible)
    masks: dict[str, dict[int, LayerMask]] = {}
    for stack, layers in seen.items():
        masks[stack] = {}
        for index, seen_QK in layers.items():
            if allowed is not None and bool((seen_QK & ~allowed_QK).any()):
                query, key = (seen_QK & ~allowed_QK).nonzero()[0].tolist()
                message = f"layer {index}: query {query} gives weight to key {key}, which the mask hides"
                raise InputError(message, "leave out {mask}, or correct it")
            sight = Sight.of(seen_QK)
            if sight is not None:
                masks[stack][index] = ruled(sight, seen_QK)
            else:
                unknown = Visibility(len(seen_QK), seen_QK.shape[1], seen_QK[None, None], known=False)
                masks[stack][index] = named or LayerMask(KEYS_NOT_KNOWN, unknown)
    return masks


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


Seen = dict[str, dict[int, Tensor]]


def without_padding(matrices: GivenWeights, seen: Seen) -> tuple[GivenWeights, Seen, list[str]]:
    """The same without the tokens of padding at the ends of its texts, and what was left out, in words.

    seen: the keys with weight, of every layer. Padding is what an attention mask says, else tokens without a row in any
    layer, and special tokens whose rows cannot be those of tokens, see `_cannot_be`. Raises InputError for such a row
    between others, and where a token of padding receives weight.
    """
    texts, notes, kept = (matrices.text, matrices.target), [], list[range]()
    for which, (text, what, flag) in enumerate(zip(texts, ("text", "queries"), FLAGS, strict=False)):
        kept.append(range(len(text or ())))
        if text is None:
            continue
        if flag in matrices.flags:
            padding_T = ~torch.from_numpy(np.array(matrices.flags[flag]))
        else:
            padding_T = _empty_rows(matrices, seen, which)
            suspects = _cannot_be(matrices, seen, which, padding_T)
            named = [at for at in suspects if text.special[at]]
            if suspects == named and (len(named) > 1 or any("pad" in text.tokens[at].lower() for at in named)):
                padding_T[named] = True
            elif suspects:
                notes.append(
                    f"tokens {as_ranges(suspects)} of the {what} may be padding: no token gives them weight; "
                    f"{flag} says which are"
                )
        full = (~padding_T).nonzero()[:, 0].tolist()
        if not full:
            raise InputError("all rows are zeros: no query has weights", "give weights after the softmax")
        kept[which] = range(full[0], full[-1] + 1)
        inside = next((row for row in kept[which] if bool(padding_T[row])), None)
        if inside is not None:
            what = "padding" if flag in matrices.flags else "all zeros in every head, expected a sum of 1"
            raise InputError(f"row {inside} is {what}", "leave out its token")
        if lost := len(text) - len(kept[which]):
            notes.append(f"{lost} tokens of padding at the ends of the {what} were left out")
    # Cut as views, without a copy; a row that loses weight by it looked at padding, which a mask would forbid.
    cut: Seen = {}
    stacks: Seen = {}
    for stack, layers in matrices.stacks.items():
        rows, columns = (slice(kept[which].start, kept[which].stop) for which in _axes(matrices, stack))
        for index, weights_HQK in layers.items():
            outside_QK = seen[stack][index][rows].clone()
            outside_QK[:, columns] = False
            if bool(outside_QK.any()):
                name = f"{prefix(stack) if len(matrices.stacks) > 1 else ''}layer {index}"
                raise InputError(f"{name}: tokens of padding receive weight", "leave out their rows and columns")
            stacks.setdefault(stack, {})[index] = weights_HQK[:, rows, columns]
            cut.setdefault(stack, {})[index] = seen[stack][index][rows, columns]
    text, target = (of and _part(of, range_) for of, range_ in zip(texts, kept, strict=True))
    assert text is not None
    flags = dict(matrices.flags)
    if MASK in flags:
        plain = next(iter(matrices.stacks))
        rows, columns = (slice(kept[which].start, kept[which].stop) for which in _axes(matrices, plain))
        flags[MASK] = flags[MASK][rows, columns]
    return replace(matrices, stacks=stacks, text=text, target=target, flags=flags), cut, notes


def _axes(matrices: GivenWeights, stack: str) -> tuple[int, int]:
    """Of which text a stack's queries are and its keys: 0 the text, 1 the target."""
    return axes_of(stack, 0, None if matrices.target is None else 1)


def _empty_rows(matrices: GivenWeights, seen: Seen, which: int) -> Tensor:
    """The tokens of a text that have no row in any layer, (T,): one empty row may be a dropped head."""
    tokens = len((matrices.text, matrices.target)[which] or ())
    rows = [~layer.any(-1) for stack in seen if _axes(matrices, stack)[0] == which for layer in seen[stack].values()]
    return torch.stack(rows).all(0) if rows else torch.zeros(tokens, dtype=torch.bool)


def _cannot_be(matrices: GivenWeights, seen: Seen, which: int, padding_T: Tensor) -> list[int]:
    """The tokens at one end of a text whose rows are none of tokens, although they hold weights.

    No token gives them weight in any layer, nor do they themselves; or each of their rows is uniform in all heads,
    padding and later tokens included, as eager attention writes it where a mask hides all.
    """
    text = (matrices.text, matrices.target)[which]
    stacks = [stack for stack in seen if which in _axes(matrices, stack)]
    odd_T = torch.ones(len(text or ()), dtype=torch.bool)
    received_TT = torch.zeros(len(odd_T), len(odd_T), dtype=torch.bool)
    for stack in stacks:
        queries, keys = _axes(matrices, stack)
        for index, seen_QK in seen[stack].items():
            if queries == keys:
                received_TT |= seen_QK
                if bool(seen_QK.all(-1)[0]) and len(odd_T) > 1:
                    weights_HQK = matrices.stacks[stack][index]
                    odd_T &= (weights_HQK == weights_HQK[..., :1]).all(-1).all(0) | ~seen_QK.any(0)
                else:
                    odd_T &= ~seen_QK.any(0)
            elif keys == which:
                odd_T &= ~seen_QK.any(0)
    odd_T &= ~padding_T
    full = (~odd_T & ~padding_T).nonzero()[:, 0].tolist()
    if not full or not stacks:
        return []
    outside = [at for at in range(len(odd_T)) if bool(odd_T[at]) and not full[0] <= at <= full[-1]]
    real = [at for at in range(len(odd_T)) if at not in set(outside)]
    return outside if outside and not bool(received_TT[real][:, outside].any()) else []


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


def observe_weights(matrices: GivenWeights, ask: CaptureSpec, tell: Progress = NO_PROGRESS) -> Observation:
    """The observation of weights that were given, as of a pass; the ask's `keep` and `select` say what is kept.

    Raises InputError for weights that are none, UsageError for what only a model can tell.
    """
    # What is refused is refused before every number is looked at.
    check_request(matrices, ask.keep)
    whole = checked(matrices)
    matrices = whole.matrices
    shown = {
        stack: {index: _geometry(matrices, stack, index, mask) for index, mask in masks.items()}
        for stack, masks in whole.masks.items()
    }
    plain = next(stack for stack in (DECODER, ENCODER, CROSS) if stack in shown)
    request = _selected(ask, shown, plain)
    _check_room(matrices, request, plain)
    prompt, source = (matrices.text, None) if matrices.target is None else (matrices.target, matrices.text)
    texts = TextInputs(prompt, request.chosen(prompt, source), source)
    for line in weights_lines(whole):
        tell.say(line)
    report, facts = CaptureReport(tokens=len(matrices.text), attention=GIVEN), facts_of(whole)
    seen: dict[str, Observation] = {}
    with tell.stage("reading weights", sum(map(len, shown.values())), "layers") as advance, torch.no_grad():
        layers = GivenLayers(request, plain, shown, advance)
        for stack, of_stack in matrices.stacks.items():
            [text] = texts.of(stack, plain)
            for line in chosen_lines(text.prompt, text.key_prompt, text.chosen, f"{stack}: " * (len(shown) > 1)):
                tell.say(line)
            collector = StackCollector(layers, stack, [text])
            for index, weights_HQK in of_stack.items():
                P = DenseAttention(weights_HQK[None], whole.masks[stack][index].visible)
                P.sums_to_one = not matrices.sink_logits
                collector.ask(collector.layer(index, P))
            calls = [_check(whole, stack, index) for index in of_stack]
            report.calls += calls
            own = replace(report, calls=calls, tokens=len(text.key_prompt))
            seen[stack] = collector.observation(0, own, facts)
    return replace(seen[plain], other_stacks={stack: of for stack, of in seen.items() if stack != plain})


def check_request(matrices: GivenWeights, request: Request) -> None:
    """Raise UsageError for what weights alone do not tell."""
    what = WITHOUT_MODEL.get(request.view.weights)
    if what is not None:
        raise UsageError(f"{what} need the model, and these are weights alone", "use {weights=softmax}")
    if request.operands:
        raise UsageError("q, k and v need the model, and these are weights alone", "ask for weights")
    if request.view.by_kv and matrices.kv_heads is None:
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


def _check_room(matrices: GivenWeights, request: Request, plain: str) -> None:
    """Refuse to keep float32 copies of matrices that the machine has no room for."""
    if not request.weights:
        return
    needed = 0
    for stack, layers in matrices.stacks.items():
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


def _geometry(matrices: GivenWeights, stack: str, index: int, mask: LayerMask) -> LayerGeometry:
    """A layer as far as its weights tell; 0 for what they do not."""
    heads, keys = matrices.stacks[stack][index].shape[::2]
    before, after = mask.sight or (UNKNOWN, UNKNOWN)
    window, kind, words = None, "full", ""
    if isinstance(before, tuple) and after == 0 and (window := _chunk(before, keys)):
        kind = "chunked"
    elif mask.sight is None or isinstance(before, tuple) or before != after != 0 or isinstance(after, tuple):
        kind, words = "sparse", mask.words
    elif before is not None:
        kind, window = "sliding", before + (after == 0)
    both_ways = mask.sight is not None and after != 0
    return LayerGeometry(index, kind, heads, matrices.kv_heads or 0, 0, 0, window, both_ways=both_ways, keys=words)


def _check(whole: CheckedWeights, stack: str, index: int) -> CallCheck:
    """What was measured of a layer: how far its rows are from a sum of 1. Masked keys are those without weight."""
    matrices = whole.matrices
    heads, queries, keys = matrices.stacks[stack][index].shape
    error = None if matrices.sink_logits else whole.errors[stack][index]
    check = CallCheck(index, 0, matrices.source, heads, GIVEN, error, stack=stack, keys=keys, queries=queries)
    check.sink_logits, check.kernel, check.dtype = matrices.sink_logits, "none", whole.dtype
    return check


def weights_lines(whole: CheckedWeights) -> Iterator[str]:
    """What is read, in a line as before a pass, and what was left out."""
    matrices = whole.matrices
    source = "weights" if matrices.source == MEMORY else f"weights from {visible(matrices.source)}"
    parts = [f"{source}, {NOT_VERIFIED}", *([visible(matrices.name)] if matrices.name else [])]
    for stack, layers in matrices.stacks.items():
        counts = sorted({weights.shape[0] for weights in layers.values()})
        heads = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        parts.append(f"{stack} " * (len(matrices.stacks) > 1) + f"{len(layers)} layers x {heads} heads")
    target = "" if matrices.target is None else f", target {len(matrices.target)}"
    yield "  ".join([*parts, f"{len(matrices.text)} tokens{target}", whole.dtype, masks_in_words(whole)])
    yield from whole.notes


def masks_in_words(whole: CheckedWeights) -> str:
    """`causal`, or of each mask the layers that have it: `causal in layers 1,3; causal, window 16 in layers 0,2`."""
    layers: dict[str, list[int]] = {}
    for stack, masks in whole.masks.items():
        for index, mask in masks.items():
            of = f"{stack} {mask.words}" if len(whole.masks) > 1 else mask.words
            layers.setdefault("cross-attention" if stack == CROSS and mask.sight else of, []).append(index)
    if len(layers) == 1:
        return next(iter(layers))
    return "; ".join(f"{words} in layers {as_ranges(indices)}" for words, indices in layers.items())


def facts_of(whole: CheckedWeights) -> dict[str, Any]:
    """What a manifest says of the weights: in the place of the model, and that nothing of them was verified."""
    matrices = whole.matrices
    name = matrices.name or (None if matrices.source == MEMORY else matrices.source)
    lines = [
        "the weights are not verified: no model computed them here, and no layer was compared with the oracle",
        f"masks were read off the weights: {masks_in_words(whole)}",
    ]
    if any(not mask.visible.known for masks in whole.masks.values() for mask in masks.values()):
        lines.append(
            f"{KEYS_NOT_KNOWN}: some keys have no weight in any head; an array `{MASK}` says which a query sees"
        )
    lines += ["kv heads: weights alone do not tell which heads share one"] if matrices.kv_heads is None else []
    return {
        "model": {
            "name": f"weights {NOT_VERIFIED}" + (f": {name}" if name else ""),
            "revision": None,
            "type": "weights",
            "layers": sum(map(len, matrices.stacks.values())),
            "layers_without_attention": {},
        },
        "device": "cpu",
        "dtype": whole.dtype,
        "attention": GIVEN,
        "engine": "none",
        "output": "none",
        "source": {"weights": matrices.source, "sha256": matrices.sha256, "verified": False},
        "unverified": lines,
        **({"notes": whole.notes} if whole.notes else {}),
    }
