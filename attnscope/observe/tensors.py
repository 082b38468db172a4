"""Attention that somebody else computed -> an Observation, made without a pass.

    seen = observe_tensors(tensors_of([A0, A1], ["the", "cat", "sat"]), CaptureSpec("", Request(relations=True)))

Weights are checked as data: they are finite, and every row sums to 1 within what their dtype allows. Which keys a
query sees is read off them where the keys with weight in some head are those of a mask: causal, a window, runs of
tokens such as chunks, texts or a prefix. Elsewhere it is not known: numbers that need it are null, and no key counts as
hidden. q and k are finite too; their mask is what is given with them, and no matrix is made of them but where one is
asked for. What only a model could tell is refused, or listed as not measured.

Shapes: H head, G kv head, Q query, K key, T token, D width of q and k, V width of v.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnscope.attention.operator import AttentionOperator, DenseAttention, LastQueries
from attnscope.attention.spec import AttentionSpec, Visibility
from attnscope.errors import InputError, UsageError, visible
from attnscope.hooks.calls import value_error
from attnscope.hooks.engines import select_operator
from attnscope.hooks.report import GIVEN, CallCheck, tolerance
from attnscope.inputs.prompt import Medium, Prompt
from attnscope.inputs.tensors import ARRAYS, FLAGS, MASK, MEMORY, SEEN, WHOLE, GivenLayer, GivenTensors, axes_of
from attnscope.model.geometry import KEYS_NOT_KNOWN, LayerGeometry
from attnscope.model.selection import CROSS, DECODER, ENCODER, as_ranges, prefix
from attnscope.observe.collect import ReadyLayer, observe_layers
from attnscope.observe.masks import (
    AS_GIVEN,
    UNKNOWN,
    LayerMask,
    Sight,
    as_listed,
    below_causal,
    chunk_of,
    first_row,
    mask_of_layer,
)
from attnscope.observe.request import LayerKey, TextInputs
from attnscope.utils.memory import check_free
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
    """A layer whose every number was looked at; error: of weights the largest |row sum - 1|."""

    layer: Tensor | GivenLayer
    mask: LayerMask
    error: float | None


Layers = Mapping[LayerKey, LayerWeights | GivenLayer]


@dataclass(frozen=True)
class CheckedTensors:
    """Layers whose every number was looked at. dtype: that their rows allow. notes: what was left out, in words."""

    given: GivenTensors
    layers: Mapping[LayerKey, CheckedLayer]
    dtype: str
    notes: Sequence[str] = ()

    @property
    def stacks(self) -> dict[str, list[LayerKey]]:
        """The layers of each stack."""
        return {stack: [*keys] for stack, keys in groupby(self.layers, key=lambda key: key.stack)}


def checked(given: GivenTensors) -> CheckedTensors:
    """The same with its numbers checked, without padding, and each stack called by which way it looks.

    Raises InputError for weights that are none: not finite, negative, or with a row that does not sum to 1; and for q
    and k that are not finite, or of which a query sees no key.
    """
    layers: Layers = {
        LayerKey(index, stack): layer if isinstance(layer, GivenLayer) else LayerWeights.of(layer)
        for stack, of_stack in given.stacks.items()
        for index, layer in of_stack.items()
    }
    notes: list[str] = []
    if given.last is None:
        given, layers, notes = without_padding(given, layers)
    masks, narrowest, read = _masks(given, layers), "float32", dict[LayerKey, CheckedLayer]()
    # One stack over one text is an encoder's where a layer looks ahead.
    both_ways = given.stacks.keys() == {DECODER} and any(mask.looks_ahead for mask in masks.values())
    for key, layer in layers.items():
        name, error = f"{key.stack} " * (len(given.stacks) > 1) + f"L{key.layer}", None
        if isinstance(layer, GivenLayer):
            dtype = _check_finite(name, layer)
        else:
            dtype, error = _check_numbers(name, layer.weights_HQK, given.sink_logits)
        whole = layer if isinstance(layer, GivenLayer) else layer.weights_HQK
        narrowest = max(narrowest, dtype, key=lambda name: tolerance(name)[0])
        read[key._replace(stack=ENCODER) if both_ways else key] = CheckedLayer(whole, masks[key], error)
    result = CheckedTensors(given, read, narrowest, notes)
    stacks = {stack: {key.layer: read[key].layer for key in keys} for stack, keys in result.stacks.items()}
    return replace(result, given=replace(given, stacks=stacks))


def _masks(given: GivenTensors, layers: Layers) -> dict[LayerKey, LayerMask]:
    """The masks of all layers; those that are alike share what is made of them. InputError where one is contradicted.

    A mask that somebody gives says what the weights leave open.
    """
    rules: dict[tuple[Sight, torch.Size], LayerMask] = {}

    def mask_of(seen_QK: Tensor) -> LayerMask | None:
        # Of queries of the last tokens the rule is that of a text whose other tokens see all before them.
        sight = Sight.of(seen_QK if given.last is None else below_causal(seen_QK))
        if sight is None:
            return None
        mask = LayerMask(sight.words(seen_QK.shape[1]), sight.visible(seen_QK), sight)
        return rules.setdefault((sight, seen_QK.shape), mask)

    masks, named = dict[LayerKey, LayerMask](), None
    allowed_QK = torch.from_numpy(np.array(given.flags[MASK])) if MASK in given.flags else None
    if allowed_QK is not None:
        named = mask_of(allowed_QK) or LayerMask(AS_GIVEN, as_listed(allowed_QK))
    for key, layer in layers.items():
        if isinstance(layer, GivenLayer):
            # What a layer says of its keys counts more than the mask of all.
            name = f"{key.stack} " * (len(given.stacks) > 1) + f"layer {key.layer}"
            shown = allowed_QK if all(getattr(layer, part) is None for part in SEEN) else None
            layer = layer if shown is None else replace(layer, mask=shown)
            _, keys = axes_of(key.stack, given.text, given.target)
            mask = mask_of_layer(layer, name, len(keys), key.stack == DECODER, mask_of)
            if mask.sight is not None and not mask.visible.additive:
                mask = rules.setdefault((mask.sight, torch.Size((layer.q.shape[1], len(keys)))), mask)
            masks[key] = mask
            continue
        seen_QK = layer.seen_QK
        if allowed_QK is not None and bool((seen_QK & ~allowed_QK).any()):
            query, hidden = (seen_QK & ~allowed_QK).nonzero()[0].tolist()
            message = f"layer {key.layer}: query {query} gives weight to key {hidden}, which the mask hides"
            raise InputError(message, "leave out {mask}, or correct it")
        unknown = LayerMask(KEYS_NOT_KNOWN, as_listed(seen_QK, known=False))
        masks[key] = mask_of(seen_QK) or named or unknown
    return masks


def _check_finite(name: str, layer: GivenLayer) -> str:
    """The dtype of a layer's q. Raises InputError for an array with NaN or infinite numbers."""
    for part, value in layer.parts.items():
        if part not in ARRAYS or part == MASK or not value.is_floating_point():
            continue
        for head, of_head in enumerate(value if value.ndim > 1 else value[None]):
            if not bool(torch.isfinite(of_head.float()).all()):
                where = f" in head {head}" if len(value) > 1 and value.ndim > 1 else ""
                raise InputError(f"{name}: {part} has NaN or infinite numbers{where}", "give finite numbers")
    # As large as a logit may be: a product that float32 does not hold would make a row of NaN.
    largest = float(layer.q.double().norm(dim=-1).max() * layer.k.double().norm(dim=-1).max() * layer.scale)
    if largest > torch.finfo(torch.float32).max:
        raise InputError(f"{name}: q and k make logits up to {largest:.1g}, beyond float32", "give scaled numbers")
    return str(layer.q.dtype).removeprefix("torch.")


def _check_numbers(name: str, weights_HQK: Tensor, sink_logits: bool) -> tuple[str, float]:
    """The narrowest dtype that its row sums allow, and how far the furthest is from 1; head by head, as float32."""
    dtype, furthest = "float32", 0.0
    # Head by head: a float32 copy of a layer in half precision would take twice its memory.
    for head, weights in enumerate(weights_HQK):
        weights_QK, row_name = weights.float(), f"of {name}H{head}"
        if (row := first_row(~torch.isfinite(weights_QK).all(-1))) is not None:
            raise InputError(f"row {row} {row_name} has NaN or infinite weights", "give finite weights")
        if (row := first_row((weights_QK < 0).any(-1))) is not None:
            message = f"row {row} {row_name} has a weight of {float(weights_QK[row].min()):.3g}, expected 0 to 1"
            raise InputError(message, "give weights after the softmax, not logits")
        # A sink outside the keys takes a share of each row, so that a sum may be too small, and never too large.
        sum_Q = weights_QK.sum(-1, dtype=torch.float64)
        off_Q = (sum_Q - 1).clamp_min(0) if sink_logits else (sum_Q - 1).abs()
        error = float(off_Q.max())
        if error > tolerance(dtype)[0]:
            # The narrowest dtype that holds all the numbers as they are: what they were rounded to before.
            held = (name for name in NARROW if torch.equal(weights.to(getattr(torch, name)).to(weights.dtype), weights))
            dtype = next(held, "float32")
        if error > tolerance(dtype)[0]:
            row = int(off_Q.argmax())
            raise InputError(
                f"row {row} {row_name} sums to {float(sum_Q[row]):.4g}, expected 1",
                "give weights after the softmax and before dropout; where a sink takes the rest, {sink_logits=True}",
            )
        furthest = max(furthest, error)
    return dtype, furthest


def without_padding(given: GivenTensors, layers: Layers) -> tuple[GivenTensors, Layers, list[str]]:
    """The same without the tokens of padding at the ends of its texts, and what was left out, in words.

    Raises InputError where a token of padding is between others, and where it receives weight.
    """
    kept, notes = [slice(0), slice(0)], list[str]()
    for which, text in enumerate((given.text, given.target)):
        if text is None:
            continue
        padding_T, note = _padding(given, layers, which)
        full = (~padding_T).nonzero()[:, 0].tolist()
        if not full:
            raise InputError("all rows are zeros: no query has weights", "give weights after the softmax")
        kept[which] = slice(full[0], full[-1] + 1)
        if (inside := first_row(padding_T[kept[which]])) is not None:
            why = "padding" if FLAGS[which] in given.flags else "all zeros in every head, expected a sum of 1"
            raise InputError(f"row {full[0] + inside} is {why}", "leave out its token")
        lost = len(text) - (full[-1] + 1 - full[0])
        left_out = f"{lost} tokens of padding at the ends of the {AXES[which]} were left out" if lost else ""
        notes += filter(None, (note, left_out))
    # Cut as views, without a copy; a row that loses weight by it looked at padding, which a mask would forbid.
    cut = dict[LayerKey, LayerWeights | GivenLayer]()
    for key, layer in layers.items():
        rows, columns = (kept[which] for which in _axes(given, key.stack))
        name = f"{prefix(key.stack) if len(given.stacks) > 1 else ''}layer {key.layer}"
        texts = (given.text, given.target)
        whole = columns == slice(0, len(texts[_axes(given, key.stack)[1]] or ()))
        if not whole and isinstance(layer, GivenLayer) and layer.key_positions is not None:
            raise InputError(f"{name} has key_positions and tokens of padding too", "leave out the tokens of padding")
        seen_QK = layer.seen_QK if isinstance(layer, LayerWeights) else _seen(layer.mask)
        outside_QK = torch.zeros(1, 1, dtype=torch.bool) if seen_QK is None else seen_QK[rows].clone()
        outside_QK[:, columns] = False
        if bool(outside_QK.any()):
            raise InputError(f"{name}: tokens of padding receive weight", "leave out their rows and columns")
        if isinstance(layer, GivenLayer):
            cut[key] = layer.cut(rows, columns)
        else:
            cut[key] = LayerWeights(layer.weights_HQK[:, rows, columns], layer.seen_QK[rows, columns])
    target = given.target and _part(given.target, kept[1])
    flags = dict(given.flags)
    if MASK in flags:  # of one stack alone
        flags[MASK] = flags[MASK][rows, columns]
    return replace(given, text=_part(given.text, kept[0]), target=target, flags=flags), cut, notes


def _seen(mask: Tensor | None) -> Tensor | None:
    """The keys that a mask shows in any head, (Q, K); None without one."""
    if mask is None:
        return None
    mask_HQK = mask if mask.ndim == 3 else mask[None]
    _, queries, keys = mask_HQK.shape
    return Visibility(queries, keys, mask_HQK[None]).rows(0, queries)[0].any(0)


def _axes(given: GivenTensors, stack: str) -> tuple[int, int]:
    """Of which text a stack's queries are and its keys: 0 the text, 1 the target."""
    return axes_of(stack, 0, None if given.target is None else 1)


def _of_weights(layers: Layers) -> Iterator[tuple[LayerKey, LayerWeights]]:
    """The layers that are weights."""
    return ((key, layer) for key, layer in layers.items() if isinstance(layer, LayerWeights))


def _padding(given: GivenTensors, layers: Layers, which: int) -> tuple[Tensor, str]:
    """Which tokens of a text are padding, (T,), and a note of those that may be; which: as of `_axes`.

    Padding is what an attention mask says, else tokens without a row in any layer, and special tokens whose rows cannot
    be those of tokens.
    """
    text, flag = (given.text, given.target)[which], FLAGS[which]
    assert text is not None
    if flag in given.flags:
        return ~torch.from_numpy(np.array(given.flags[flag])), ""
    # In any layer: one empty row may be of a head that was dropped.
    empty = [~layer.seen_QK.any(-1) for key, layer in _of_weights(layers) if _axes(given, key.stack)[0] == which]
    padding_T = torch.stack(empty).all(0) if empty else torch.zeros(len(text), dtype=torch.bool)
    suspects = _cannot_be(given, layers, which, padding_T)
    named = [at for at in suspects if text.special[at]]
    if suspects == named and (len(named) > 1 or any("pad" in text.tokens[at].lower() for at in named)):
        padding_T[named] = True
    elif suspects:
        tokens = f"tokens {as_ranges(suspects)} of the {AXES[which]}"
        return padding_T, f"{tokens} may be padding: no token gives them weight; {flag} says which are"
    return padding_T, ""


def _cannot_be(given: GivenTensors, layers: Layers, which: int, padding_T: Tensor) -> list[int]:
    """The tokens at one end of a text with rows that no token has, although they hold weights.

    No token gives them weight in any layer, nor do they themselves; or each of their rows is uniform in all heads,
    padding and later tokens included, as eager attention writes it where a mask hides all.
    """
    tokens = len(padding_T)
    odd_T, received_TT = ~padding_T, torch.zeros(tokens, tokens, dtype=torch.bool)
    for key, (weights_HQK, seen_QK) in _of_weights(layers):
        queries, keys = _axes(given, key.stack)
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


def observe_tensors(given: GivenTensors, ask: CaptureSpec, tell: Progress = NO_PROGRESS) -> Observation:
    """The observation of layers that were given, as of a pass; the ask's `keep` and `select` say what is kept.

    Raises InputError for layers that are none, UsageError for what only a model can tell.
    """
    # What is refused is refused before every number is looked at.
    check_request(given, ask.keep)
    whole = checked(given)
    given, stacks = whole.given, whole.stacks
    shown = {
        stack: {key.layer: _geometry(whole.layers[key], key.layer, given.kv_heads) for key in keys}
        for stack, keys in stacks.items()
    }
    plain = next(stack for stack in (DECODER, ENCODER, CROSS) if stack in stacks)
    request = _selected(ask, shown, plain)
    _check_room(whole, request, plain)
    prompt, source = (given.text, None) if given.target is None else (given.target, given.text)
    if given.last is not None:
        prompt = replace(prompt, medium=Medium(unasked=len(prompt) - given.last, virtual=False))
    texts = TextInputs(prompt, request.chosen(prompt, source), source)
    for line in tensors_lines(whole):
        tell.say(line)
    facts = facts_of(whole)
    if request.view.weights == "value":
        facts["unverified"].append("norms are those of v, before the output projection")
    with torch.no_grad(), tell.stage(f"reading {given.kind}", len(whole.layers), "layers") as advance:
        ready = {key: _ready(whole, key, shown[key.stack][key.layer]) for key in whole.layers}
        return observe_layers(ready, texts, request, facts, plain=plain, advance=advance, say=tell.say)


def check_request(given: GivenTensors, request: Request) -> None:
    """Raise UsageError for what these layers alone do not tell."""
    every = [(index, layer) for layers in given.stacks.values() for index, layer in layers.items()]
    what = WITHOUT_MODEL.get(request.view.weights)
    weights_alone = any(not isinstance(layer, GivenLayer) for _, layer in every)
    if what is not None and (weights_alone or request.view.weights == "logit"):
        raise UsageError(f"{what} need the model, and these are {given.kind} alone", "use {weights=softmax}")
    if request.operands and weights_alone:
        raise UsageError("q, k and v need the model, and these are weights alone", "ask for weights")
    lacks = next((index for index, layer in every if isinstance(layer, GivenLayer) and layer.v is None), None)
    if lacks is not None and (request.operands or request.view.weights == "value"):
        what = what or "q, k and v"
        raise UsageError(f"{what} need v, and layer {lacks} has none", "save v too, or use {weights=softmax}")
    if given.last is not None and (request.operands or request.rollout):
        what = "a rollout" if request.rollout else "what keeps q and k"
        raise UsageError(
            f"{what} needs the query of every token, and these are of the last {given.last}",
            "use attnscope heads, relations, draw or text",
        )
    if request.view.by_kv and weights_alone and given.kv_heads is None:
        raise UsageError(
            "weights alone do not tell which heads share a kv head", "give {kv_heads=N}, or leave out {by}"
        )


def _selected(ask: CaptureSpec, shown: Mapping[str, Mapping[int, LayerGeometry]], plain: str) -> Request:
    """What is kept, of the heads that are named."""
    select = ask.select
    if select is None and ask.keep.per_token and len(shown) > 1 and CROSS in shown:
        select = CROSS  # as of a pass: which tokens of the text a target looks at
    if select is not None and "@" in select:
        raise UsageError(f"{select!r} names a role, and weights alone have no atlas", "name heads, as {select=1.4}")
    heads = {stack: {index: layer.heads for index, layer in layers.items()} for stack, layers in shown.items()}
    return ask.keep.selecting(select, heads, plain, of=THESE)


def _check_room(whole: CheckedTensors, request: Request, plain: str) -> None:
    """Refuse to keep float32 copies of matrices that the machine has no room for."""
    if not request.weights:
        return
    needed = 0
    for key, layer in whole.layers.items():
        of_stack, (every, queries, keys) = request.of(key.stack, plain), layer.layer.shape
        heads = of_stack.view_of(of_stack.weights).heads
        kept = every if heads is None else len(heads.get(key.layer, ()))
        same = isinstance(layer.layer, Tensor) and layer.layer.dtype == torch.float32 and whole.given.last is None
        needed += 4 * kept * (queries if whole.given.last is None else keys) * keys * (not same)
    hint = "ask for fewer heads with {select}, or for a Request without weights"
    check_free("the matrices take as float32", needed, hint)


def _geometry(checked: CheckedLayer, index: int, kv_heads: int | None) -> LayerGeometry:
    """A layer as far as it tells; 0 for what it does not."""
    layer, mask = checked.layer, checked.mask
    (heads, _, _), keys = layer.shape, mask.visible.keys
    before, after = mask.sight or (UNKNOWN, UNKNOWN)
    window, kind, words = None, "full", ""
    if isinstance(before, tuple) and after == 0 and (window := chunk_of(before, keys)):
        kind = "chunked"
    elif mask.sight is None or isinstance(before, tuple) or before != after != 0 or isinstance(after, tuple):
        kind, words = "sparse", mask.words
    elif before is not None:
        kind, window = "sliding", before + (after == 0)
    both_ways, widths = mask.sight is not None and after != 0, (0, 0)
    if isinstance(layer, GivenLayer):
        kv_heads, widths = layer.k.shape[0], layer.widths
    return LayerGeometry(index, kind, heads, kv_heads or 0, *widths, window, both_ways=both_ways, keys=words)


def _ready(whole: CheckedTensors, key: LayerKey, geometry: LayerGeometry) -> ReadyLayer:
    """A layer as it is read, and what was measured of it.

    Of weights that is how far their rows are from 1, and masked keys are those without weight; of q and k how far P V
    is from the output that was given with them.
    """
    given, (layer, mask, error) = whole.given, whole.layers[key]
    (heads, queries, _), keys = layer.shape, mask.visible.keys
    check = CallCheck(key.layer, 0, given.source, heads, GIVEN, stack=key.stack, keys=keys, queries=queries)
    check.kernel, check.dtype, written = "none", whole.dtype, None
    if isinstance(layer, GivenLayer):
        spec = _spec(layer, mask.visible)
        P: AttentionOperator = (operator := select_operator(spec))
        check.answered_by, check.sink_logits = operator.answered_by, spec.row_sinks is not None
        if layer.output is not None and layer.v is not None and not spec.sinks_scale_output:
            check.note(value_error=value_error(P, spec.v_BGKV, layer.output.transpose(0, 1)[None]))
            check.dtype = layer.output.dtype
    else:
        P = DenseAttention(layer[None], mask.visible)
        check.sink_logits, P.sums_to_one = given.sink_logits, not given.sink_logits
        check.row_sum_error = error if P.sums_to_one else None
    if given.last is not None:
        P = LastQueries(P, mask.visible.once("of text", partial(_of_text, mask.visible)))
    if isinstance(layer, GivenLayer) and layer.v is not None:
        written = BareNorms(P, spec)
    return ReadyLayer(P, geometry, check, written)


@dataclass(eq=False)
class BareNorms:
    """The norms of what a whole weight on a key writes before the output projection, |v|, of a block of queries."""

    P: AttentionOperator
    spec: AttentionSpec

    def __call__(self, start: int, stop: int, *of_rows: object) -> Tensor:
        return self.P.placed(start, stop, self._rows) if isinstance(self.P, LastQueries) else self._rows(start, stop)

    def _rows(self, start: int, stop: int) -> Tensor:
        shares = self.spec.output_shares(start, stop)
        return self._norm_1H1K.expand(-1, -1, stop - start, -1) if shares is None else self._norm_1H1K * shares

    @cached_property
    def _norm_1H1K(self) -> Tensor:
        heads_of_one = self.spec.heads // self.spec.kv_heads
        return self.spec.v_BGKV.float().norm(dim=-1).repeat_interleave(heads_of_one, 1)[:, :, None]


def _spec(layer: GivenLayer, visible: Visibility) -> AttentionSpec:
    """A layer as the call that it was, keys that are missing as zeros that no query sees."""
    kv = {name: value for name in ("k", "v", "bias") if (value := getattr(layer, name)) is not None}
    if layer.k.shape[1] < visible.keys:
        assert layer.key_positions is not None
        places_K = layer.key_positions.long()
        for name, value in kv.items():
            axis = value.ndim - 1 if name == "bias" else 1
            shape = [*value.shape[:axis], visible.keys, *value.shape[axis + 1 :]]
            check_free(f"{name} of all tokens takes", value.element_size() * math.prod(shape), "save fewer tokens")
            kv[name] = value.new_zeros(shape).index_copy_(axis, places_K, value)
    bias, sinks = kv.get("bias"), layer.sinks
    return AttentionSpec(
        layer.q[None],
        kv["k"][None],
        kv["v"][None] if "v" in kv else kv["k"][None, ..., :0],
        layer.scale,
        visible,
        layer.softcap,
        bias if bias is None else (bias if bias.ndim == 3 else bias[None])[None],
        sinks if sinks is None else (sinks if sinks.ndim == 2 else sinks[:, None])[None],
        bool(layer.sinks_scale_output),
    )


def _of_text(visible: Visibility) -> Visibility:
    """Which keys all tokens of a text see whose last ones have queries; what the others do is not asked."""
    keys, mask = visible.keys, visible.mask
    if mask is None:
        return Visibility(keys, keys, causal=visible.causal, window=visible.window)
    of_heads = [below_causal(seen_QK) for seen_QK in visible.rows(0, visible.queries)[0]]
    return replace(visible, queries=keys, mask=torch.stack(of_heads)[None], _once={})


def tensors_lines(whole: CheckedTensors) -> Iterator[str]:
    """What is read, in a line as before a pass, and what was left out."""
    given = whole.given
    source = given.kind if given.source == MEMORY else f"{given.kind} from {visible(given.source)}"
    parts = [f"{source}, {NOT_VERIFIED}", *([visible(given.name)] if given.name else [])]
    for stack, keys in whole.stacks.items():
        counts = sorted({whole.layers[key].layer.shape[0] for key in keys})
        heads = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        parts.append(f"{stack} " * (len(whole.stacks) > 1) + f"{len(keys)} layers x {heads} heads")
    target = "" if given.target is None else f", target {len(given.target)}"
    target = target if given.last is None else f", queries of the last {given.last}"
    yield "  ".join([*parts, f"{len(given.text)} tokens{target}", whole.dtype, masks_in_words(whole)])
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
    """What a manifest says of the layers: in the place of the model, and that nothing of them was verified."""
    given = whole.given
    name = given.name or (None if given.source == MEMORY else given.source)
    every, kind = [layer.layer for layer in whole.layers.values()], given.kind
    read_off = "read off the weights" if kind == WHOLE else "read as they were given"
    lines = [
        f"the {kind} are not verified: no model computed them here, and no layer was compared with the oracle",
        f"masks were {read_off}: {masks_in_words(whole)}",
    ]
    if any(not layer.mask.visible.known for layer in whole.layers.values()):
        lines.append(
            f"{KEYS_NOT_KNOWN}: some keys have no weight in any head; an array `{MASK}` says which a query sees"
        )
    # What weights do not tell, and what q and k were not compared with.
    weights_alone = not all(isinstance(layer, GivenLayer) for layer in every)
    if given.kv_heads is None and weights_alone:
        lines.append("kv heads: weights alone do not tell which heads share one")
    without = [key.layer for key, layer in whole.layers.items() if getattr(layer.layer, "output", layer) is None]
    if without:
        lines.append(f"layers {as_ranges(without)}: no output was given with q and k, and P V was compared with none")
    # The names are those of a pass, which all readers of a manifest expect.
    return {
        "model": {
            "name": f"{kind} {NOT_VERIFIED}" + (f": {name}" if name else ""),
            "revision": None,
            "type": kind,
            "layers": len(whole.layers),
            "layers_without_attention": {},
        },
        "device": "cpu",
        "dtype": whole.dtype,
        "attention": GIVEN,
        "engine": "none" if kind == WHOLE else "fused",
        "output": "none",
        "source": {kind: given.source, "sha256": given.sha256, "verified": False},
        "unverified": lines,
        **({"notes": whole.notes} if whole.notes else {}),
    }
