"""The steps before the scores and after the values, read from a layer's raw weights by its family's layout.

Shapes: H query head, G kv head, T token, M pairs that turn, D width of q and k, V width of v, E model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnscope.explain.steps import Check, Numbers, Rules, Step, Theirs, array, concatenation, kv_head_of
from attnscope.reference.frequencies import inverse_frequencies
from attnscope.reference.given import Given, setting
from attnscope.reference.reader import angles, queries_keys_values, rotary_dims, visible
from attnscope.reference.rules import ALIBI, GATES, SCALES
from attnscope.reference.splits import SPLITS

Heads = tuple[Tensor, Tensor, Tensor]  # q (H, T, D), k (G, T, D), v (G, T, V)
LATENT_PROJECTIONS = ("q_proj", "q_a_proj", "kv_a_proj_with_mqa")


def before_scores(given: Given, module: nn.Module, head: int, theirs: Theirs) -> tuple[list[Step], Heads]:
    """Hidden states, projections, heads, norms and positions; and q, k, v as they meet.

    module: the model's own, whose projections are asked for their output to compare with.
    """
    heads: Heads = tuple(x[0].transpose(0, 1) for x in SPLITS[given.layout.split](given))  # type: ignore[assignment]
    steps = [_hidden(given), _projections(given, heads, module, theirs), _heads_step(heads, head, given)]
    for name, formula, why, layout in _stages(given, heads[0].shape[-1]):
        now: Heads = tuple(x[0] for x in queries_keys_values(replace(given, layout=layout)))  # type: ignore[assignment]
        if not all(torch.equal(a, b) for a, b in zip(heads, now, strict=True)):
            steps.append(_change(name, formula, why, (heads, now), head, given))
            heads = now
    checks = _checks(heads, theirs, SCALES[given.layout.scale](given, heads[0].shape[-1]))
    steps[-1] = replace(steps[-1], checks=(*steps[-1].checks, *checks))
    return steps, heads


def rules(given: Given, head_dim: int) -> Rules:
    """Scale, mask, soft-cap, bias and sinks of the layer, from config and weights."""
    layout = given.layout
    return Rules(
        scale=SCALES[layout.scale](given, head_dim),
        mask=visible(given)[None],
        softcap=setting(given.config, layout.softcap) if layout.softcap else None,
        bias=ALIBI[layout.alibi](given).double()[:, None, :] if layout.alibi else None,
        sinks=given.parameters.get(layout.sinks),
        sinks_in_weights=layout.sinks_in_weights,
    )


def after_values(given: Given, heads_HTV: Tensor, head: int, theirs: Theirs) -> list[Step]:
    """Gate, concatenation and output projection, down to what the module gives back."""
    layout, steps = given.layout, []
    others_HTV = theirs.heads_HQV
    others_TE = None if others_HTV is None else _side_by_side(others_HTV)
    check = theirs.check("heads side by side", _side_by_side(heads_HTV), others_TE)
    if layout.gate:
        gated_HTV = GATES[layout.gate](heads_HTV.transpose(0, 1)[None], given)[0].transpose(0, 1)
        steps.append(_gate(heads_HTV, gated_HTV, head))
        heads_HTV, check = gated_HTV, ()
    concat_TE = _side_by_side(heads_HTV)
    steps.append(concatenation(heads_HTV, head, check))
    if not layout.out:
        return [*steps, _no_output(concat_TE, theirs)]
    output_TE = given.linear(layout.out, concat_TE)
    why = "A last matrix mixes what the heads found, back to the width of the model: what attention adds to the token."
    if layout.residual:
        output_TE = output_TE + given.arguments[layout.residual][0]
        why += " This family's module adds the token's own vector itself."
    formula = f"y = [heads] W_O{_bias(given, layout.out)}   {concat_TE.shape[-1]} → {output_TE.shape[-1]}"
    step = Step(
        "output projection",
        formula,
        why,
        (Numbers("y", ("token", "dim"), array(output_TE)),),
        theirs.check("output of the layer's attention", output_TE, theirs.output_QE),
    )
    return [*steps, step]


def heard_heads(theirs: Theirs, head: int, heads: int, kv_heads: int) -> Step:
    """q, k and v as the model passed them to its attention."""
    kv_head = kv_head_of(head, heads, kv_heads)
    assert theirs.q_HQD is not None
    assert theirs.k_GKD is not None
    assert theirs.v_GKV is not None
    return Step(
        "heads",
        f"{heads} query heads, {kv_heads} kv heads",
        f"As the model's attention received them. {_sharing(head, heads, kv_heads)}",
        _qkv((theirs.q_HQD, theirs.k_GKD, theirs.v_GKV), head, kv_head),
    )


def _hidden(given: Given) -> Step:
    x_TE = given.hidden_BTE[0]
    tokens, width = x_TE.shape
    return Step(
        "hidden states",
        f"X   {tokens} tokens × {width}",
        f"What enters the attention of layer {given.layer.index}: one vector a token, as the model hands it over.",
        (Numbers("x", ("token", "dim"), array(x_TE)),),
    )


def _projections(given: Given, heads: Heads, module: nn.Module, theirs: Theirs) -> Step:
    layout, x_TE = given.layout, given.hidden_BTE[0]
    sizes = [x.shape[0] * x.shape[-1] for x in heads]
    name = layout.q if layout.split in ("separate", "gated_query") else layout.fused
    matrices = f"q = x W_Q, k = x W_K, v = x W_V{_bias(given, name)}"
    how = {
        "latent": " This family first squeezes x into a short vector and grows k and v of all heads from it.",
        "separate": "",
        "gated_query": " The query's matrix also makes a gate, used after the values.",
    }.get(layout.split, f" This family keeps the three matrices in one, {layout.fused}.")
    return Step(
        "projections",
        f"{matrices}   {x_TE.shape[-1]} → {sizes[0]}, {sizes[1]}, {sizes[2]}",
        "Learned matrices make of each token a query (what it looks for), a key (what it is found by) and a value "
        f"(what it hands over).{how}",
        tuple(
            Numbers(letter, ("token", "dim"), array(x.transpose(0, 1).flatten(-2)))
            for letter, x in zip("qkv", heads, strict=True)
        ),
        _projection_checks(given, module, theirs),
    )


def _projection_checks(given: Given, module: nn.Module, theirs: Theirs) -> tuple[Check, ...]:
    """Our products against the model's own projection modules, on the same hidden states."""
    layout = given.layout
    names: Sequence[str] = (layout.q, layout.k, layout.v)
    if layout.split == "latent":
        names = LATENT_PROJECTIONS
    elif layout.split not in ("separate", "gated_query"):
        names = (layout.fused,)
    checks: list[Check] = []
    for name in names:
        if f"{name}.weight" not in given.parameters:
            continue
        projection = module.get_submodule(name)
        weight = next(projection.parameters())
        with torch.no_grad():
            output_TE = projection(given.hidden_BTE.to(weight))[0]
        checks += theirs.check(name, given.linear(name, given.hidden_BTE)[0], output_TE)
    return tuple(checks)


def _heads_step(heads: Heads, head: int, given: Given) -> Step:
    q_HTD, k_GTD, v_GTV = heads
    count, kv_heads = q_HTD.shape[0], k_GTD.shape[0]
    width = f"{q_HTD.shape[-1]}" if q_HTD.shape[-1] == v_GTV.shape[-1] else f"{q_HTD.shape[-1]} (v: {v_GTV.shape[-1]})"
    return Step(
        "split into heads",
        f"q → {count} heads × {width},  k, v → {kv_heads} kv heads × {width}",
        f"Each head attends on its own, with its own share of the numbers. {_sharing(head, count, kv_heads)}",
        _qkv(heads, head, kv_head_of(head, count, kv_heads)),
    )


def _qkv(heads: Heads, head: int, kv_head: int, names: Sequence[str] = ()) -> tuple[Numbers, ...]:
    """q of one head, k and v of its kv head."""
    names = names or (f"q of head {head}", f"k of kv head {kv_head}", f"v of kv head {kv_head}")
    return tuple(
        Numbers(name, ("token", "dim"), array(x[place]))
        for name, x, place in zip(names, heads, (head, kv_head, kv_head), strict=True)
    )


def _sharing(head: int, heads: int, kv_heads: int) -> str:
    """Which kv head serves which query heads, in a sentence or two."""
    if heads == kv_heads:
        return f"Every query head has its own k and v: head {head} reads kv head {head}."
    if kv_heads == 1:
        return f"All {heads} query heads share one kv head (multi-query)."
    group, mine = heads // kv_heads, kv_head_of(head, heads, kv_heads)
    served = "; ".join(
        f"kv head {one} serves query heads {_list(range(one * group, (one + 1) * group))}"
        for one in (range(kv_heads) if kv_heads <= 4 else (mine,))
    )
    return f"{group} query heads share a kv head (grouped-query): {served}."


def _list(numbers: range) -> str:
    return f"{numbers[0]} and {numbers[1]}" if len(numbers) == 2 else f"{numbers[0]} to {numbers[-1]}"


def _stages(given: Given, head_dim: int) -> list[tuple[str, str, str, Any]]:
    """What may happen to q, k and v between split and scores: name, formula, why, and the layout up to there."""
    full = given.layout
    last = replace(full, query_factor="")
    plain = replace(last, rotary="", norm="", v_norm="")
    multiplied = ("multipliers", "q, k, v × constants", "This family clips or multiplies its projections.", plain)
    turned = _turned(given, head_dim, replace(last, norm="", v_norm="") if full.norm_at == "rotated" else last)
    norm = (
        "norm of q and k",
        "q, k → q, k divided by their size, times a learned weight",
        "Bounds the lengths of q and k, so that no score can grow without limit.",
        last if full.norm_at == "rotated" else replace(last, rotary=""),
    )
    order = [multiplied, turned, norm] if full.norm_at == "rotated" else [multiplied, norm, turned]
    factor = ("factor on q", "q × factor of its position", "Keeps long texts' queries sharp.", full)
    return [*order, factor]


def _turned(given: Given, head_dim: int, layout: Any) -> tuple[str, str, str, Any]:
    why = (
        "Rotary positions: pairs of numbers of q and k turn by an angle t that grows with the token's position; then "
        "q · k depends on how far apart two tokens are. Turning keeps their length"
    )
    factor = 1.0
    if given.layout.rotary and given.rope is not None:
        cos_TM, sin_TM = angles(given, head_dim)
        factor = float(torch.hypot(cos_TM[0, 0], sin_TM[0, 0]))
    why += (
        "." if abs(factor - 1) < 1e-6 else f"; this model's long-context scaling then multiplies both by {factor:.4g}."
    )
    formula = "(a, b) → (a cos t − b sin t, b cos t + a sin t),   t = position × frequency of the pair"
    return "positions", formula, why, layout


def _change(name: str, formula: str, why: str, heads: tuple[Heads, Heads], head: int, given: Given) -> Step:
    """q, k (and v where it changes) of the chosen head before and after."""
    kv_head = kv_head_of(head, heads[0][0].shape[0], heads[0][1].shape[0])
    names = [("q before", "k before", "v before"), ("q after", "k after", "v after")]
    before, after = (_qkv(one, head, kv_head, names=these) for one, these in zip(heads, names, strict=True))
    pairs = [pair for pair in zip(before, after, strict=True) if not np.array_equal(pair[0].values, pair[1].values)]
    numbers = tuple(one for pair in pairs for one in pair)
    extra = _angles(given, heads[0][0].shape[-1]) if name == "positions" else ()
    return Step(name, formula, why, numbers + extra)


def _angles(given: Given, head_dim: int) -> tuple[Numbers, ...]:
    """Angle t of every token and pair, radians; and which numbers make pair m: (a, b) of the input and the output."""
    rope = given.rope
    assert rope is not None
    dims = rotary_dims(given, rope, head_dim)
    longest, most = len(given.position_T), setting(given.config, "max_position_embeddings")
    frequency_M, _ = inverse_frequencies(rope, dims, max_position=most, seq_len=longest)
    angle_TM = given.position_T.cpu()[:, None].double() * frequency_M.double() * (-1 if given.layout.reverse else 1)
    start = head_dim - dims if given.layout.part == "last" else 0
    half = dims // 2
    near = [(start + 2 * pair, start + 2 * pair + 1) for pair in range(half)]
    far = [(start + pair, start + pair + half) for pair in range(half)]
    ways = {"half": (far, far), "interleaved": (near, near), "deinterleaved": (near, far)}[given.layout.rotary]
    places = np.array([(*a, *b) for a, b in zip(*ways, strict=True)])
    return (
        Numbers("angle t", ("token", "pair"), array(angle_TM)),
        Numbers("places of a and b", ("pair", "place"), places),
    )


def _checks(heads: Heads, theirs: Theirs, scale: float) -> tuple[Check, ...]:
    """q, k and v as they meet against what the model's attention received."""
    q_HTD = theirs.q_HQD
    if q_HTD is not None and theirs.scale == 1.0:
        q_HTD = q_HTD.cpu().double() / scale  # OPT and Whisper multiply q by the scale before, and the scores by 1
    others = (q_HTD, theirs.k_GKD, theirs.v_GKV)
    return tuple(
        check
        for name, ours, other in zip("qkv", heads, others, strict=True)
        for check in theirs.check(f"{name}, all heads", ours, _repeated(other, len(ours)))
    )


def _repeated(theirs: Tensor | None, heads: int) -> Tensor | None:
    """Families that repeat a kv head for each of its query heads pass more heads than they have."""
    return theirs if theirs is None or len(theirs) == heads else theirs[:: len(theirs) // heads]


def _gate(heads_HTV: Tensor, gated_HTV: Tensor, head: int) -> Step:
    return Step(
        "gate",
        "output of the head × gate(x)",
        "This family lets each token damp what its heads found before they are mixed.",
        (
            Numbers("before the gate", ("token", "dim"), array(heads_HTV[head])),
            Numbers("after the gate", ("token", "dim"), array(gated_HTV[head])),
        ),
    )


def _no_output(concat_TE: Tensor, theirs: Theirs) -> Step:
    return Step(
        "output projection",
        "[heads] W_O",
        "From the heads back to the width of the model.",
        checks=theirs.check("output of its attention module", concat_TE, theirs.output_QE),
        missing="this family projects in another module; its attention gives back the heads side by side",
    )


def _side_by_side(heads_HTV: Tensor) -> Tensor:
    return heads_HTV.transpose(0, 1).flatten(-2)


def _bias(given: Given, name: str) -> str:
    return " + bias" if f"{name}.bias" in given.parameters else ""
