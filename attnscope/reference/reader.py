"""One layer of a real model, recomputed from its raw weights: the oracle.

    read(given)  ->  weights and output

It gets what enters the layer (hidden states, positions), the layer's parameters and what the config says, and does the
rest itself: projections, split, norms, positions, scale, mask, softmax, values, gates, output projection. It calls
nothing of the model's, and takes no cos, sin, mask or scale from it.

Shapes: B text, T token, E model width, H head, G kv head, Q query, K key, D width of q and k, V width of v. In
cross-attention K counts the encoder's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnscope.reference.attention import Note, Operands, attention_output, logit_terms, no_note
from attnscope.reference.frequencies import inverse_frequencies
from attnscope.reference.given import Given, UnreadableError, setting
from attnscope.reference.masks import block_mask, causal_mask, chunked_mask, sliding_window_mask
from attnscope.reference.norms import layer_norm, rms_norm
from attnscope.reference.relative import relative_bias
from attnscope.reference.rotary import apply_rotary, axial_cos_sin, cos_sin
from attnscope.reference.rules import ALIBI, AXES, FACTORS, GATES, NORM_ON, QUERY_FACTORS, SCALES, turns
from attnscope.reference.splits import SPLITS

CAUSAL = ("decoder", "patcher", "local", "global")  # the stacks whose queries see only what came before them


@dataclass(frozen=True)
class Reading:
    """What the oracle computed: weights, which keys were visible, values, the heads' outputs, the module's output.

    output_of: the module's output with other weights (B, H, Q, K) in place of the oracle's. logits: before the mask,
    (B, H, Q, K). terms: the largest sum of the sizes of a logit's terms in each row, (B, H, Q).

    >>> read(given).visible_QK.sum()
    tensor(45)
    """

    weights_BHQK: Tensor
    visible_QK: Tensor
    v_BGTV: Tensor
    heads_BTHV: Tensor
    output_BTE: Tensor
    output_of: Callable[[Tensor], Tensor]
    logits: Callable[[], Tensor]
    terms: Callable[[], Tensor]


class OutputStages(NamedTuple):
    """What follows the values: the heads' outputs after the gate, after the output projection, the module's output.

    >>> output_stages(given, read(given).heads_BTHV).projected_BTE.shape
    torch.Size([1, 9, 8])
    """

    gated_BTHV: Tensor
    projected_BTE: Tensor
    output_BTE: Tensor


def read(given: Given) -> Reading:
    """Recompute one attention layer from raw weights.

    Raises UnreadableError where the module is not what its layout describes.

    >>> read(given).weights_BHQK.shape, read(given).output_BTE.shape
    (torch.Size([1, 2, 9, 9]), torch.Size([1, 9, 8]))
    """
    operands = operands_of(given)
    weights_BHQK, v_BGTV = operands.weights(), operands.v_GKV
    sinks_apart = operands.sinks is not None and not given.layout.sinks_in_weights
    share_BHQ1 = weights_BHQK.sum(-1, keepdim=True) if sinks_apart else torch.ones(()).to(weights_BHQK)

    def heads(weights_BHQK: Tensor) -> Tensor:
        return attention_output(weights_BHQK, v_BGTV).transpose(1, 2)

    heads_BTHV = heads(weights_BHQK)
    return Reading(
        weights_BHQK / share_BHQ1,
        operands.mask,
        v_BGTV,
        heads_BTHV,
        output_stages(given, heads_BTHV).output_BTE,
        output_of=lambda others_BHQK: output_stages(given, heads(others_BHQK * share_BHQ1)).output_BTE,
        logits=operands.logits,
        terms=lambda: logit_terms(
            operands.q_HQD,
            operands.k_GKD,
            scale=operands.scale,
            bias=operands.bias,
            mask=operands.mask,
            sinks=None if operands.sinks is None else operands.sinks[:, None],
        ),
    )


def operands_of(given: Given, note: Note = no_note) -> Operands:
    """What a layer's weights and output are computed from; note: as in `queries_keys_values`.

    >>> operands_of(given).weights().shape
    torch.Size([1, 2, 9, 9])
    """
    layout, bias = given.layout, position_bias(given)
    q_BHTD, k_BGTD, v_BGTV = queries_keys_values(given, note)
    return Operands(
        q_BHTD,
        k_BGTD,
        v_BGTV,
        scale=SCALES[layout.scale](given, q_BHTD.shape[-1]),
        mask=visible(given),
        softcap=setting(given.config, layout.softcap) if layout.softcap else None,
        bias=None if bias is None else bias.to(q_BHTD),
        sinks=given.parameters.get(layout.sinks),
    )


def queries_keys_values(given: Given, note: Note = no_note) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, H, T, D), k (B, G, T, D) and v (B, G, T, V) as they meet: normed, multiplied, turned.

    note: called with the three after each step, "split", "norm", "multipliers", "positions", "factor"; of a layer that
    turns q and k with "frequencies" (M,) too, and what multiplies both.

    >>> [part.shape for part in queries_keys_values(given)]
    [torch.Size([1, 2, 9, 4]), torch.Size([1, 1, 9, 4]), torch.Size([1, 1, 9, 4])]
    """
    layout = given.layout
    if given.source_BSE is not None and layout.split != "separate":
        raise UnreadableError(f"its layout ({layout.name}) makes keys of the text that the queries are made of")
    q, k, v = SPLITS[layout.split](given)
    own = given.shared is None
    if given.shared is not None:  # an earlier layer's, as that layer used them: nothing is done to them again
        k, v = (x.transpose(1, 2) for x in given.shared)
    note("split", _by_head(q, k, v))

    normed = bool(layout.norm) and NORM_ON[layout.norm_on](given)
    v = _normed(given, layout.v_norm, v) if layout.v_norm and own else v
    if layout.norm_at != "rotated":  # before the heads are laid out: some norms are over all of a token's heads
        q = _normed(given, layout.q_norm, q) if normed else q
        k = _normed(given, layout.k_norm, k) if normed and own else k
        note("norm", _by_head(q, k, v))

    q = _clipped(given, q)
    if own:
        k, v = _clipped(given, k) * _factor(given, layout.key_factor), _clipped(given, v)
        v = v * _factor(given, layout.value_factor)
    q_BHTD, k_BGTD, v_BGTV = _by_head(q, k, v)
    note("multipliers", (q_BHTD, k_BGTD, v_BGTV))

    if layout.rotary and turns(layout.rotary_on, given):
        cos_TM, sin_TM = angles(given, q.shape[-1], note)
        turn = partial(
            apply_rotary,
            cos_TM=cos_TM,
            sin_TM=sin_TM,
            layout=layout.rotary,
            part=layout.part,
            reverse=layout.reverse,
        )
        q_BHTD, k_BGTD = turn(q_BHTD), turn(k_BGTD) if own else k_BGTD
        note("positions", (q_BHTD, k_BGTD, v_BGTV))

    if layout.norm_at == "rotated" and normed:
        q_BHTD = _normed(given, layout.q_norm, q_BHTD)
        k_BGTD = _normed(given, layout.k_norm, k_BGTD) if own else k_BGTD
        note("norm", (q_BHTD, k_BGTD, v_BGTV))

    q_BHTD = q_BHTD * _query_factor(given)  # where the scale of long texts' queries grows with the position
    note("factor", (q_BHTD, k_BGTD, v_BGTV))
    return q_BHTD, k_BGTD, v_BGTV


def _by_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, H, D) as (B, H, T, D)."""
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _query_factor(given: Given) -> Tensor | float:
    rule = QUERY_FACTORS.get(given.layout.query_factor)
    factor = rule(given) if rule else 1.0
    return factor[:, None].to(given.hidden_BTE) if isinstance(factor, Tensor) else factor


def _factor(given: Given, rule: str) -> float:
    return FACTORS[rule](given.config) if rule in FACTORS else 1.0


def angles(given: Given, head_dim: int, note: Note = no_note) -> tuple[Tensor, Tensor]:
    """cos and sin (T, M) of this layer's rotary positions, from the config alone; note: see `queries_keys_values`.

    >>> cos_TM, sin_TM = angles(given, head_dim=4)
    >>> cos_TM.shape
    torch.Size([9, 2])
    """
    rope, axes, device = given.rope, given.layout.axes, given.position_T.device
    assert rope is not None
    positions = given.position_T if given.axes_AT is None else given.axes_AT
    dims = rotary_dims(given, rope, head_dim)
    inv_freq_M, scaling = inverse_frequencies(
        rope,
        dims // 2 if axes == "halves" else dims,
        max_position=setting(given.config, "max_position_embeddings"),
        seq_len=int(positions.max()) + 1,
    )
    inv_freq_M = inv_freq_M.to(device).repeat(2 if axes == "halves" else 1)
    note("frequencies", (inv_freq_M, scaling))
    if given.axes_AT is None or not axes:
        cos_TM, sin_TM = cos_sin(given.position_T, inv_freq_M, scaling)
    else:
        cos_TM, sin_TM = axial_cos_sin(given.axes_AT, AXES[axes](given, dims // 2).to(device), inv_freq_M, scaling)
    return cos_TM.to(given.hidden_BTE), sin_TM.to(given.hidden_BTE)


def rotary_dims(given: Given, rope: Mapping[str, Any], head_dim: int) -> int:
    """How many dims of a head turn.

    >>> rotary_dims(given, {"partial_rotary_factor": 0.5}, head_dim=64)
    32
    """
    if given.layout.split == "latent":
        return given.config.qk_rope_head_dim
    if rope.get("rope_type") == "proportional":
        return head_dim
    if setting(given.config, "rotary_dim") and "partial_rotary_factor" not in rope:
        return given.config.rotary_dim
    return int(head_dim * rope.get("partial_rotary_factor", setting(given.config, "partial_rotary_factor", 1.0)))


def position_bias(given: Given) -> Tensor | None:
    """What positions add to the logits, (H, Q or 1, K); None where they add nothing.

    >>> position_bias(given) is None
    True
    """
    layout, position_T = given.layout, given.position_T
    if layout.alibi:
        return ALIBI[layout.alibi](given)[:, None, :]
    if not layout.table:
        return None
    return relative_bias(
        given.parameter(layout.table).to(position_T.device),  # the first layer's may lie on another
        position_T,
        position_T,
        max_distance=given.config.relative_attention_max_distance,
        both_ways=given.stack not in CAUSAL,
    )


def visible(given: Given) -> Tensor:
    """Which keys each query may see, (Q, K) boolean: the layer's window or chunk, a decoder's past, blocks of tokens.

    >>> visible(given).sum(-1)
    tensor([1, 2, 3, 4, 5, 6, 7, 8, 9])
    """
    position_T, layer = given.position_T, given.layer
    causal = given.stack in CAUSAL or layer.type == "chunked"  # which look back whatever `is_causal` says
    if given.source_BSE is not None:
        return position_T.new_ones(len(position_T), given.source_BSE.shape[1], dtype=torch.bool)
    mask_QK = causal_mask(position_T, position_T)
    mask_QK = mask_QK if causal else torch.ones_like(mask_QK)
    if given.layout.window and layer.window and layer.type == "sliding":
        mask_QK = mask_QK & sliding_window_mask(position_T, position_T, layer.window if causal else _side(given))
    if given.layout.window and layer.window and layer.type == "chunked":
        mask_QK = mask_QK & chunked_mask(position_T, position_T, layer.window)
    if given.block_T is None:
        return mask_QK
    together_QK = block_mask(given.block_T)
    if not causal:
        return mask_QK & together_QK
    if given.layout.block_in_window and layer.window:  # Gemma 3's ends behind the query alone
        together_QK = together_QK & (position_T[:, None] - position_T < layer.window)
    return mask_QK | together_QK


def _side(given: Given) -> int:
    """How many keys a window that looks both ways has on one side, the query's own included.

    transformers leaves the query's own out of the config's number, but for the window that Gemma 3 makes of its causal
    one by `use_bidirectional_attention`.
    """
    config = given.config
    if setting(config, "use_bidirectional_attention") and setting(config, "is_causal", True):
        return config.sliding_window
    return given.layer.window + 1


def _clipped(given: Given, x: Tensor) -> Tensor:
    limit = setting(given.config, given.layout.clip) if given.layout.clip else None
    return x.clamp(-limit, limit) if limit else x


def _normed(given: Given, name: str, x: Tensor) -> Tensor:
    """x normed by the parameters of this name, as it came where the module has none; `*` is a norm without weights."""
    layout = given.layout
    weight, bias = norm_parameters(given.parameters, name)
    if weight is None and name != "*":
        return x
    shaped = x.flatten(-2) if layout.norm_at == "whole" else x
    if layout.norm == "layer":
        return layer_norm(shaped, weight, bias, eps=given.eps).view_as(x)
    return rms_norm(shaped, weight, eps=given.eps, offset=layout.offset).view_as(x)


def norm_parameters(parameters: Mapping[str, Tensor], name: str) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias of a norm; StableLM has one for each head, which are stacked to (H, D).

    >>> norm_parameters(given.parameters, "q_norm")
    (None, None)
    """
    first = f"{name}.norms.0"
    if f"{first}.weight" not in parameters:
        return parameters.get(f"{name}.weight"), parameters.get(f"{name}.bias")
    count = sum(key.startswith(f"{name}.norms.") and key.endswith(".weight") for key in parameters)
    weight = torch.stack([parameters[f"{name}.norms.{head}.weight"] for head in range(count)])
    if f"{first}.bias" not in parameters:
        return weight, None
    return weight, torch.stack([parameters[f"{name}.norms.{head}.bias"] for head in range(count)])


def output_stages(given: Given, heads_BTHV: Tensor) -> OutputStages:
    """From the heads' outputs to the module's: gate, output projection, residual, norm.

    Raises UnreadableError where the residual is missing.

    >>> output_stages(given, read(given).heads_BTHV).output_BTE.shape
    torch.Size([1, 9, 8])
    """
    layout = given.layout
    if layout.gate:
        heads_BTHV = GATES[layout.gate](heads_BTHV, given)
    projected_BTE = heads_BTHV.flatten(-2)
    projected_BTE = given.linear(layout.out, projected_BTE) if layout.out else projected_BTE
    output_BTE = projected_BTE
    if layout.residual:
        if layout.residual not in given.arguments:
            raise UnreadableError(f"its layout ({layout.name}) expects an argument {layout.residual}, which is missing")
        output_BTE = output_BTE + given.arguments[layout.residual]
    if layout.out_norm:
        output_BTE = layer_norm(output_BTE, *norm_parameters(given.parameters, layout.out_norm), eps=given.eps)
    return OutputStages(heads_BTHV, projected_BTE, output_BTE)
