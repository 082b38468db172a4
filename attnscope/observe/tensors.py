"""Attention weights that somebody else computed -> an Observation, made without a pass.

    seen = observe_tensors(tensors_of([A0, A1], ["the", "cat", "sat"]), CaptureSpec("", Request(relations=True)))

The weights are checked as data: they are finite, and every row sums to 1 within what their dtype allows. Which keys a
query sees is read off them where the keys with weight in some head are those of a mask: causal, a window, runs of
tokens such as chunks, texts or a prefix. Elsewhere it is not known: numbers that need it are null, and no key counts as
hidden. What only a model could tell is refused, or listed as not measured.

Shapes: H head, Q query, K key, T token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnscope.attention.operator import DenseAttention
from attnscope.attention.spec import Visibility
from attnscope.errors import InputError, UsageError, visible
from attnscope.hooks.report import GIVEN, CallCheck, tolerance
from attnscope.inputs.prompt import Prompt
from attnscope.inputs.tensor_files import check_room
from attnscope.inputs.tensors import FLAGS, MASK, MEMORY, GivenTensors, axes_of
from attnscope.model.geometry import KEYS_NOT_KNOWN, LayerGeometry
from attnscope.model.selection import CROSS, DECODER, ENCODER, as_ranges, prefix, select_stacks
from attnscope.observe.collect import ReadyLayer, observe_layers
from attnscope.observe.request import LayerKey, TextInputs
from attnscope.utils.stages import NO_PROGRESS, Progress

if TYPE_CHECKING:
    from attnscope.observe.observation import Observation
    from attnscope.observe.request import CaptureSpec, Request

NOT_VERIFIED = "not verified"
THESE = "this set of weights"
AXES = ("text", "queries")  # the names of texts 0 and 1, see `_axes`
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
        shown = _as_listed(seen_QK)
        place_Q, first_Q, last_Q = shown.position_Q, shown.reach_Q2[:, 0], shown.reach_Q2[:, 1] - 1
        whole_Q = (shown.counts_BHQ[0, 0] == last_Q - first_Q + 1) & (first_Q <= place_Q) & (place_Q <= last_Q)
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

    def visible(self, seen_QK: Tensor) -> Visibility:
        """The mask of this rule, which is `seen_QK`: by place where a rule of causal attention or of none says it."""
        (before, after), (queries, keys) = self, seen_QK.shape
        if after == 0 and not isinstance(before, tuple):
            return Visibility(queries, keys, window=None if before is None else before + 1)
        if self == (None, None):
            return Visibility(queries, keys, causal=False)
        return _as_listed(seen_QK)

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


class LayerWeights(NamedTuple):
    """A layer's weights, and the keys that have weight in some head: that a query sees those is certain."""

    weights_HQK: Tensor
    seen_QK: Tensor

    @classmethod
    def of(cls, weights_HQK: Tensor) -> LayerWeights:
        """The weights, and where they are not 0."""
        seen_QK = torch.zeros(weights_HQK.shape[1:], dtype=torch.bool)
        for weights_QK in weights_HQK:  # one by one: what is not 0 of all would take a quarter of them again
            seen_QK |= weights_QK != 0
        return cls(weights_HQK, seen_QK)


class CheckedLayer(NamedTuple):
    """A layer whose every number was looked at; error: its largest |row sum - 1|."""

    weights_HQK: Tensor
    mask: LayerMask
    error: float


Layers = Mapping[LayerKey, LayerWeights]


@dataclass(frozen=True)
class CheckedTensors:
    """Weights whose every number was looked at. dtype: that their rows allow. notes: what was left out, in words."""

    matrices: GivenTensors
    layers: Mapping[LayerKey, CheckedLayer]
    dtype: str
    notes: Sequence[str] = ()

    @property
    def stacks(self) -> dict[str, list[LayerKey]]:
        """The layers of each stack."""
        return {stack: [*keys] for stack, keys in groupby(self.layers, key=lambda key: key.stack)}


def checked(matrices: GivenTensors) -> CheckedTensors:
    """The same with its numbers checked, without padding, and each stack called by which way it looks.

    Raises InputError for weights that are none: not finite, negative, or with a row that does not sum to 1.
    """
    layers = {
        LayerKey(index, stack): LayerWeights.of(weights_HQK)
        for stack, of_stack in matrices.stacks.items()
        for index, weights_HQK in of_stack.items()
    }
    matrices, layers, notes = without_padding(matrices, layers)
    masks, narrowest, read = _masks(matrices, layers), "float32", dict[LayerKey, CheckedLayer]()
    # One stack over one text is an encoder's where a layer looks ahead.
    both_ways = matrices.stacks.keys() == {DECODER} and any(mask.looks_ahead for mask in masks.values())
    for key, (weights_HQK, _) in layers.items():
        name = f"{key.stack} " * (len(matrices.stacks) > 1) + f"L{key.layer}"
        dtype, error = _check_numbers(name, weights_HQK, matrices.sink_logits)
        narrowest = max(narrowest, dtype, key=lambda name: tolerance(name)[0])
        read[key._replace(stack=ENCODER) if both_ways else key] = CheckedLayer(weights_HQK, masks[key], error)
    whole = CheckedTensors(matrices, read, narrowest, notes)
    stacks = {stack: {key.layer: read[key].weights_HQK for key in keys} for stack, keys in whole.stacks.items()}
    return replace(whole, matrices=replace(matrices, stacks=stacks))


def _masks(matrices: GivenTensors, layers: Layers) -> dict[LayerKey, LayerMask]:
    """The masks of all layers; those that are alike share what is made of them. InputError where one is contradicted.

    A mask that somebody gives says what the weights leave open.
    """
    rules: dict[tuple[Sight, torch.Size], LayerMask] = {}

    def mask_of(seen_QK: Tensor) -> LayerMask | None:
        if (sight := Sight.of(seen_QK)) is None:
            return None
        mask = LayerMask(sight.words(seen_QK.shape[1]), sight.visible(seen_QK), sight)
        return rules.setdefault((sight, seen_QK.shape), mask)

    masks, named = dict[LayerKey, LayerMask](), None
    allowed_QK = torch.from_numpy(np.array(matrices.flags[MASK])) if MASK in matrices.flags else None
    if allowed_QK is not None:
        named = mask_of(allowed_QK) or LayerMask("mask as given", _as_listed(allowed_QK))
    for key, (_, seen_QK) in layers.items():
        if allowed_QK is not None and bool((seen_QK & ~allowed_QK).any()):
            query, hidden = (seen_QK & ~allowed_QK).nonzero()[0].tolist()
            message = f"layer {key.layer}: query {query} gives weight to key {hidden}, which the mask hides"
            raise InputError(message, "leave out {mask}, or correct it")
        unknown = LayerMask(KEYS_NOT_KNOWN, _as_listed(seen_QK, known=False))
        masks[key] = mask_of(seen_QK) or named or unknown
    return masks


def _as_listed(seen_QK: Tensor, known: bool = True) -> Visibility:
    return Visibility(len(seen_QK), seen_QK.shape[1], seen_QK[None, None], known=known)


def _check_numbers(name: str, weights_HQK: Tensor, sink_logits: bool) -> tuple[str, float]:
    """The narrowest dtype that its row sums allow, and how far the furthest is from 1; head by head, as float32."""
    dtype, furthest = "float32", 0.0
    # Head by head: a float32 copy of a layer in half precision would take twice its memory.
    for head, weights in enumerate(weights_HQK):
        weights_QK, row_name = weights.float(), f"of {name}H{head}"
        if (row := _first(~torch.isfinite(weights_QK).all(-1))) is not None:
            raise InputError(f"row {row} {row_name} has NaN or infinite weights", "give finite weights")
        if (row := _first((weights_QK < 0).any(-1))) is not None:
            message = f"row {row} {row_name} has a weight of {float(weights_QK[row].min()):.3g}, expected 0 to 1"
            raise InputError(message, "give weights after the softmax, not logits")
        # A sink outside the keys takes a share of each row, so that a sum may be too small, and never too large.
        sum_Q = weights_QK.sum(-1, dtype=torch.float64)
        off_Q = (sum_Q - 1).clamp_min(0) if sink_logits else (sum_Q - 1).abs()
        error = float(off_Q.max())
        if error > tolerance(dtype)[0]:
            dtype = _precision(weights)
        if error > tolerance(dtype)[0]:
            row = int(off_Q.argmax())
            raise InputError(
                f"row {row} {row_name} sums to {float(sum_Q[row]):.4g}, expected 1",
                "give weights after the softmax and before dropout; where a sink takes the rest, {sink_logits=True}",
            )
        furthest = max(furthest, error)
    return dtype, furthest


def _first(wrong_Q: Tensor) -> int | None:
    """The first row that is wrong."""
    return int(wrong_Q.byte().argmax()) if bool(wrong_Q.any()) else None


def _precision(weights: Tensor) -> str:
    """The narrowest dtype that holds all the numbers as they are: what they were rounded to before."""
    for name in NARROW:
        if torch.equal(weights.to(getattr(torch, name)).to(weights.dtype), weights):
            return name
    return "float32"


def without_padding(
    matrices: GivenTensors, layers: Layers
) -> tuple[GivenTensors, dict[LayerKey, LayerWeights], list[str]]:
    """The same without the tokens of padding at the ends of its texts, and what was left out, in words.

    Raises InputError where a token of padding is between others, and where it receives weight.
    """
    kept, notes = [slice(0), slice(0)], list[str]()
    for which, text in enumerate((matrices.text, matrices.target)):
        if text is None:
            continue
        padding_T, note = _padding(matrices, layers, which)
        full = (~padding_T).nonzero()[:, 0].tolist()
        if not full:
            raise InputError("all rows are zeros: no query has weights", "give weights after the softmax")
        kept[which] = slice(full[0], full[-1] + 1)
        if (inside := _first(padding_T[kept[which]])) is not None:
            why = "padding" if FLAGS[which] in matrices.flags else "all zeros in every head, expected a sum of 1"
            raise InputError(f"row {full[0] + inside} is {why}", "leave out its token")
        lost = len(text) - (full[-1] + 1 - full[0])
        left_out = f"{lost} tokens of padding at the ends of the {AXES[which]} were left out" if lost else ""
        notes += filter(None, (note, left_out))
    # Cut as views, without a copy; a row that loses weight by it looked at padding, which a mask would forbid.
    cut = dict[LayerKey, LayerWeights]()
    for key, (weights_HQK, seen_QK) in layers.items():
        rows, columns = (kept[which] for which in _axes(matrices, key.stack))
        outside_QK = seen_QK[rows].clone()
        outside_QK[:, columns] = False
        if bool(outside_QK.any()):
            name = f"{prefix(key.stack) if len(matrices.stacks) > 1 else ''}layer {key.layer}"
            raise InputError(f"{name}: tokens of padding receive weight", "leave out their rows and columns")
        cut[key] = LayerWeights(weights_HQK[:, rows, columns], seen_QK[rows, columns])
    target = matrices.target and _part(matrices.target, kept[1])
    flags = dict(matrices.flags)
    if MASK in flags:  # of one stack alone
        flags[MASK] = flags[MASK][rows, columns]
    return replace(matrices, text=_part(matrices.text, kept[0]), target=target, flags=flags), cut, notes


def _axes(matrices: GivenTensors, stack: str) -> tuple[int, int]:
    """Of which text a stack's queries are and its keys: 0 the text, 1 the target."""
    return axes_of(stack, 0, None if matrices.target is None else 1)


def _padding(matrices: GivenTensors, layers: Layers, which: int) -> tuple[Tensor, str]:
    """Which tokens of a text are padding, (T,), and a note of those that may be; which: as of `_axes`.

    Padding is what an attention mask says, else tokens without a row in any layer, and special tokens whose rows cannot
    be those of tokens.
    """
    text, flag = (matrices.text, matrices.target)[which], FLAGS[which]
    assert text is not None
    if flag in matrices.flags:
        return ~torch.from_numpy(np.array(matrices.flags[flag])), ""
    # In any layer: one empty row may be of a head that was dropped.
    empty = [~seen_QK.any(-1) for key, (_, seen_QK) in layers.items() if _axes(matrices, key.stack)[0] == which]
    padding_T = torch.stack(empty).all(0) if empty else torch.zeros(len(text), dtype=torch.bool)
    suspects = _cannot_be(matrices, layers, which, padding_T)
    named = [at for at in suspects if text.special[at]]
    if suspects == named and (len(named) > 1 or any("pad" in text.tokens[at].lower() for at in named)):
        padding_T[named] = True
    elif suspects:
        tokens = f"tokens {as_ranges(suspects)} of the {AXES[which]}"
        return padding_T, f"{tokens} may be padding: no token gives them weight; {flag} says which are"
    return padding_T, ""


def _cannot_be(matrices: GivenTensors, layers: Layers, which: int, padding_T: Tensor) -> list[int]:
    """The tokens at one end of a text with rows that no token has, although they hold weights.

    No token gives them weight in any layer, nor do they themselves; or each of their rows is uniform in all heads,
    padding and later tokens included, as eager attention writes it where a mask hides all.
    """
    tokens = len(padding_T)
    odd_T, received_TT = ~padding_T, torch.zeros(tokens, tokens, dtype=torch.bool)
    for key, (weights_HQK, seen_QK) in layers.items():
        queries, keys = _axes(matrices, key.stack)
        if keys != which:
            continue
        none_T = ~seen_QK.any(0)
        if queries == keys:
            received_TT |= seen_QK
            if tokens > 1 and bool(seen_QK[0].all()):
                none_T |= (weights_HQK == weights_HQK[..., :1]).all(-1).all(0)
        odd_T &= none_T
    real = (~odd_T & ~padding_T).nonzero()[:, 0].tolist()
    if not real:
        return []
    outside = [at for at in odd_T.nonzero()[:, 0].tolist() if not real[0] <= at <= real[-1]]
    received_TT[outside] = False  # what they give each other does not count
    return [] if bool(received_TT[:, outside].any()) else outside


def _part(prompt: Prompt, places: slice) -> Prompt:
    """The tokens of a range alone; what was cut off is counted."""
    columns: dict[str, Any] = {
        name: getattr(prompt, name)[places] for name in ("ids", "tokens", "labels", "special", "plain")
    }
    lost = len(prompt) - len(columns["ids"])
    if not lost:
        return prompt
    return Prompt(text="".join(columns["plain"]), turns=(), removed=prompt.removed + lost, **columns)


def observe_tensors(matrices: GivenTensors, ask: CaptureSpec, tell: Progress = NO_PROGRESS) -> Observation:
    """The observation of weights that were given, as of a pass; the ask's `keep` and `select` say what is kept.

    Raises InputError for weights that are none, UsageError for what only a model can tell.
    """
    # What is refused is refused before every number is looked at.
    check_request(matrices, ask.keep)
    whole = checked(matrices)
    matrices, stacks = whole.matrices, whole.stacks
    shown = {
        stack: {key.layer: _geometry(whole.layers[key], key.layer, matrices.kv_heads) for key in keys}
        for stack, keys in stacks.items()
    }
    plain = next(stack for stack in (DECODER, ENCODER, CROSS) if stack in stacks)
    request = _selected(ask, shown, plain)
    _check_room(whole, request, plain)
    prompt, source = (matrices.text, None) if matrices.target is None else (matrices.target, matrices.text)
    texts = TextInputs(prompt, request.chosen(prompt, source), source)
    for line in tensors_lines(whole):
        tell.say(line)
    ready = {key: _ready(whole, key, shown[key.stack][key.layer]) for key in whole.layers}
    with tell.stage("reading weights", len(ready), "layers") as advance:
        return observe_layers(ready, texts, request, facts_of(whole), plain=plain, advance=advance, say=tell.say)


def check_request(matrices: GivenTensors, request: Request) -> None:
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


def _check_room(whole: CheckedTensors, request: Request, plain: str) -> None:
    """Refuse to keep float32 copies of matrices that the machine has no room for."""
    if not request.weights:
        return
    needed = 0
    for key, layer in whole.layers.items():
        of_stack, weights = request.of(key.stack, plain), layer.weights_HQK
        heads = of_stack.view_of(of_stack.weights).heads
        kept = len(weights) if heads is None else len(heads.get(key.layer, ()))
        needed += 4 * kept * weights[0].numel() * (weights.dtype != torch.float32)
    hint = "ask for fewer heads with {select}, or for a Request without weights"
    check_room("the matrices take as float32", needed, hint)


def _geometry(layer: CheckedLayer, index: int, kv_heads: int | None) -> LayerGeometry:
    """A layer as far as its weights tell; 0 for what they do not."""
    (heads, _, keys), mask = layer.weights_HQK.shape, layer.mask
    before, after = mask.sight or (UNKNOWN, UNKNOWN)
    window, kind, words = None, "full", ""
    if isinstance(before, tuple) and after == 0 and (window := _chunk(before, keys)):
        kind = "chunked"
    elif mask.sight is None or isinstance(before, tuple) or before != after != 0 or isinstance(after, tuple):
        kind, words = "sparse", mask.words
    elif before is not None:
        kind, window = "sliding", before + (after == 0)
    both_ways = mask.sight is not None and after != 0
    return LayerGeometry(index, kind, heads, kv_heads or 0, 0, 0, window, both_ways=both_ways, keys=words)


def _ready(whole: CheckedTensors, key: LayerKey, geometry: LayerGeometry) -> ReadyLayer:
    """A layer as it is read. What was measured is how far its rows are from 1; masked keys are those without weight."""
    matrices, layer = whole.matrices, whole.layers[key]
    heads, queries, keys = layer.weights_HQK.shape
    P = DenseAttention(layer.weights_HQK[None], layer.mask.visible)
    P.sums_to_one = not matrices.sink_logits
    error = layer.error if P.sums_to_one else None
    check = CallCheck(key.layer, 0, matrices.source, heads, GIVEN, error, stack=key.stack, keys=keys, queries=queries)
    check.sink_logits, check.kernel, check.dtype = matrices.sink_logits, "none", whole.dtype
    return ReadyLayer(P, geometry, check)


def tensors_lines(whole: CheckedTensors) -> Iterator[str]:
    """What is read, in a line as before a pass, and what was left out."""
    matrices = whole.matrices
    source = "weights" if matrices.source == MEMORY else f"weights from {visible(matrices.source)}"
    parts = [f"{source}, {NOT_VERIFIED}", *([visible(matrices.name)] if matrices.name else [])]
    for stack, keys in whole.stacks.items():
        counts = sorted({len(whole.layers[key].weights_HQK) for key in keys})
        heads = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        parts.append(f"{stack} " * (len(whole.stacks) > 1) + f"{len(keys)} layers x {heads} heads")
    target = "" if matrices.target is None else f", target {len(matrices.target)}"
    yield "  ".join([*parts, f"{len(matrices.text)} tokens{target}", whole.dtype, masks_in_words(whole)])
    yield from whole.notes


def masks_in_words(whole: CheckedTensors) -> str:
    """`causal`, or of each mask the layers that have it: `causal in layers 1,3; causal, window 16 in layers 0,2`."""
    layers: dict[str, list[int]] = {}
    for key, (_, mask, _) in whole.layers.items():
        words = f"{key.stack} {mask.words}" if len(whole.stacks) > 1 else mask.words
        words = "cross-attention" if key.stack == CROSS and mask.sight else words
        layers.setdefault(words, []).append(key.layer)
    if len(layers) == 1:
        return next(iter(layers))
    return "; ".join(f"{words} in layers {as_ranges(indices)}" for words, indices in layers.items())


def facts_of(whole: CheckedTensors) -> dict[str, Any]:
    """What a manifest says of the weights: in the place of the model, and that nothing of them was verified."""
    matrices = whole.matrices
    name = matrices.name or (None if matrices.source == MEMORY else matrices.source)
    lines = [
        "the weights are not verified: no model computed them here, and no layer was compared with the oracle",
        f"masks were read off the weights: {masks_in_words(whole)}",
    ]
    if any(not layer.mask.visible.known for layer in whole.layers.values()):
        lines.append(
            f"{KEYS_NOT_KNOWN}: some keys have no weight in any head; an array `{MASK}` says which a query sees"
        )
    lines += ["kv heads: weights alone do not tell which heads share one"] if matrices.kv_heads is None else []
    # The names are those of a pass, which all readers of a manifest expect.
    return {
        "model": {
            "name": f"weights {NOT_VERIFIED}" + (f": {name}" if name else ""),
            "revision": None,
            "type": "weights",
            "layers": len(whole.layers),
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
