"""One layer of a real model, recomputed from its raw weights: the oracle.

    read(inputs)  ->  weights and output

It gets what enters the layer (hidden states, positions), the layer's parameters and what the config says, and does the
rest itself: projections, split, norms, positions, scale, mask, softmax, values, gates, output projection. It calls
nothing of the model's, and takes no cos, sin, mask or scale from it.

The tables at the top say what a layout's names mean, one short rule each: the scale, the factors, who turns, who norms.

Shapes: B text, T token, E model width, H head, G kv head, Q query, K key, D width of q and k, V width of v, M pairs
that turn, A axis. In cross-attention K counts the encoder's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from attnscope.reference.attention import Note, Operands, attention_output, logit_terms, no_note
from attnscope.reference.masks import block_mask, causal_mask, chunked_mask, sliding_window_mask
from attnscope.reference.positions import (
    alibi_bias,
    alibi_slopes,
    apply_rotary,
    axial_cos_sin,
    cos_sin,
    inverse_frequencies,
    relative_bias,
    yarn_mscale,
)
from attnscope.reference.projections import SPLITS, LayerInputs, UnreadableError, layer_norm, rms_norm, setting


def _yarn_scale(inputs: LayerInputs, head_dim: int) -> float:
    """DeepSeek puts YaRN's temperature into the softmax: mscale(all_dim)^2 / sqrt(D)."""
    rope = setting(inputs.config, "rope_parameters", {})
    all_dim = rope.get("mscale_all_dim", 0)
    if rope.get("rope_type", "default") == "default" or not all_dim:
        return head_dim**-0.5
    return head_dim**-0.5 * yarn_mscale(rope["factor"], all_dim) ** 2


SCALES: Mapping[str, Callable[[LayerInputs, int], float]] = {
    "head_dim": lambda inputs, head_dim: head_dim**-0.5,
    "half_head_dim": lambda inputs, head_dim: (head_dim / 2) ** -0.5,
    "one": lambda inputs, head_dim: 1.0,
    "attention_multiplier": lambda inputs, head_dim: inputs.config.attention_multiplier,
    "query_pre_attn_scalar": lambda inputs, head_dim: inputs.config.query_pre_attn_scalar**-0.5,
    "gpt2": lambda inputs, head_dim: (
        (head_dim**-0.5 if setting(inputs.config, "scale_attn_weights", True) else 1.0)
        / (inputs.layer.index + 1 if setting(inputs.config, "scale_attn_by_inverse_layer_idx") else 1)
    ),
    "mpt": lambda inputs, head_dim: setting(inputs.config, "attn_config.softmax_scale", head_dim**-0.5),
    "yarn": _yarn_scale,
}

FACTORS: Mapping[str, Callable[[Any], float]] = {
    "key_multiplier": lambda config: config.key_multiplier,
    "attention_value_scale": lambda config: setting(config, "attention_value_scale", 1.0),
}


def _llama4_factor(inputs: LayerInputs) -> Tensor | float:
    """Llama 4's layers without rotation grow their queries with the position, in steps of floor_scale."""
    config = inputs.config
    if not config.attn_temperature_tuning or turns("listed", inputs):
        return 1.0
    steps_T = torch.floor((inputs.position_T.float() + 1) / config.floor_scale)
    return torch.log1p(steps_T) * config.attn_scale + 1


QUERY_FACTORS: Mapping[str, Callable[[LayerInputs], Tensor | float]] = {
    "llama4": _llama4_factor,
    "ministral3": lambda inputs: (
        1
        + inputs.config.rope_parameters["llama_4_scaling_beta"]
        * torch.log(
            1 + torch.floor(inputs.position_T / inputs.config.rope_parameters["original_max_position_embeddings"])
        )
    ),
    # (1 + (position + 1) / 2048)^0.1 on layers without rotation
    "beam": lambda inputs: 1.0 if inputs.rope is not None else (1 + (inputs.position_T.float() + 1) / 2048) ** 0.1,
}

ROTARY_ON: Mapping[str, Callable[[LayerInputs], bool]] = {
    "all": lambda inputs: True,
    "sliding": lambda inputs: inputs.layer.type == "sliding",
    "sliding_or_no_window": lambda inputs: inputs.layer.type == "sliding" or not inputs.config.sliding_window,
    "listed": lambda inputs: bool(inputs.config.no_rope_layers[inputs.layer.index]),  # 1 where it turns
    "cohere2_moe": lambda inputs: (
        inputs.layer.type == "sliding"
        or (
            inputs.config.mlp_layer_types[inputs.layer.index] == "dense"
            and inputs.config.prefix_dense_sliding_window_pattern == 1
        )
    ),
    "position_embedding_type": lambda inputs: inputs.config.position_embedding_type == "rope",
    "use_mem_rope": lambda inputs: bool(inputs.config.use_mem_rope),
}


def _sections(section: Sequence[int]) -> Tensor:
    """One stretch of pairs per axis (Wang et al. 2024, "Qwen2-VL", section 2.1)."""
    return torch.arange(len(section)).repeat_interleave(torch.tensor(section)) % 3


def _interleaved(section: Sequence[int]) -> Tensor:
    """Time, row, column, time, ... as far as rows and columns have pairs; time has the others (Qwen3-VL, 2025)."""
    axis_M = torch.arange(sum(section)) % 3
    return axis_M * (torch.arange(sum(section)) < 3 * torch.tensor(section)[axis_M])


AXES: Mapping[str, Callable[[LayerInputs, int], Tensor]] = {
    "sections": lambda inputs, pairs: _sections(setting(inputs.rope, "mrope_section")),
    "interleaved": lambda inputs, pairs: _interleaved(setting(inputs.rope, "mrope_section")),
    "halves": lambda inputs, pairs: torch.arange(2).repeat_interleave(pairs // 2),  # rows, then columns
}

NORM_ON: Mapping[str, Callable[[LayerInputs], bool]] = {
    "all": lambda inputs: True,
    "use_qk_norm": lambda inputs: inputs.config.use_qk_norm and turns(inputs.layout.rotary_on, inputs),
}


def turns(rule: str, inputs: LayerInputs) -> bool:
    """Whether this layer turns its queries and keys.

    >>> turns("all", inputs), turns("sliding", inputs)
    (True, False)
    """
    return inputs.rope is not None and ROTARY_ON[rule](inputs)


ALIBI = ("press", "falcon", "mpt")
GATES = ("sigmoid", "sigmoid_per_head", "sigmoid_with_head_bias", "sigmoid_of_query_half", "softplus", "sub_norm")
CAUSAL = ("decoder", "patcher", "local", "global")  # the stacks whose queries see only what came before them


@dataclass(frozen=True)
class Reading:
    """What the oracle computed: weights, which keys were visible, values, the module's output.

    output_of: the module's output with other weights (B, H, Q, K) in place of the oracle's. logits: before the mask,
    (B, H, Q, K). terms: the largest sum of the sizes of a logit's terms in each row, (B, H, Q).

    >>> read(inputs).visible_QK.sum()
    tensor(45)
    """

    weights_BHQK: Tensor
    visible_QK: Tensor
    v_BGTV: Tensor
    output_BTE: Tensor
    output_of: Callable[[Tensor], Tensor]
    logits: Callable[[], Tensor]
    terms: Callable[[], Tensor]


class OutputStages(NamedTuple):
    """What follows the values: the heads' outputs after the gate, after the output projection, the module's output.

    >>> output_stages(inputs, torch.zeros(1, 9, 2, 4)).projected_BTE.shape
    torch.Size([1, 9, 8])
    """

    gated_BTHV: Tensor
    projected_BTE: Tensor
    output_BTE: Tensor


def read(inputs: LayerInputs) -> Reading:
    """Recompute one attention layer from raw weights.

    Raises UnreadableError where the module is not what its layout describes.

    >>> read(inputs).weights_BHQK.shape, read(inputs).output_BTE.shape
    (torch.Size([1, 2, 9, 9]), torch.Size([1, 9, 8]))
    """
    operands = operands_of(inputs)
    weights_BHQK, v_BGTV = operands.weights(), operands.v_GKV
    sinks_apart = operands.sinks is not None and not inputs.layout.sinks_in_weights
    share_BHQ1 = weights_BHQK.sum(-1, keepdim=True) if sinks_apart else torch.ones(()).to(weights_BHQK)

    def output(weights_BHQK: Tensor) -> Tensor:
        return output_stages(inputs, attention_output(weights_BHQK, v_BGTV).transpose(1, 2)).output_BTE

    return Reading(
        weights_BHQK / share_BHQ1,
        operands.mask,
        v_BGTV,
        output(weights_BHQK),
        output_of=lambda others_BHQK: output(others_BHQK * share_BHQ1),
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


def operands_of(inputs: LayerInputs, note: Note = no_note) -> Operands:
    """What a layer's weights and output are computed from; note: as in `queries_keys_values`.

    >>> operands_of(inputs).weights().shape
    torch.Size([1, 2, 9, 9])
    """
    layout, bias = inputs.layout, position_bias(inputs)
    q_BHTD, k_BGTD, v_BGTV = queries_keys_values(inputs, note)
    return Operands(
        q_BHTD,
        k_BGTD,
        v_BGTV,
        scale=SCALES[layout.scale](inputs, q_BHTD.shape[-1]),
        mask=visible(inputs),
        softcap=setting(inputs.config, layout.softcap) if layout.softcap else None,
        bias=None if bias is None else bias.to(q_BHTD),
        sinks=inputs.parameters.get(layout.sinks),
    )


def queries_keys_values(inputs: LayerInputs, note: Note = no_note) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, H, T, D), k (B, G, T, D) and v (B, G, T, V) as they meet: normed, multiplied, turned.

    note: called with the three after each step, "split", "norm", "multipliers", "positions", "factor"; of a layer that
    turns q and k with "frequencies" (M,) too, and what multiplies both.

    >>> [part.shape for part in queries_keys_values(inputs)]
    [torch.Size([1, 2, 9, 4]), torch.Size([1, 1, 9, 4]), torch.Size([1, 1, 9, 4])]
    """
    layout = inputs.layout
    if inputs.source_BSE is not None and layout.split != "separate":
        raise UnreadableError(f"its layout ({layout.name}) makes keys of the text that the queries are made of")
    q, k, v = SPLITS[layout.split](inputs)
    own = inputs.shared is None
    if inputs.shared is not None:  # an earlier layer's, as that layer used them: nothing is done to them again
        k, v = (x.transpose(1, 2) for x in inputs.shared)
    note("split", _by_head(q, k, v))

    normed = bool(layout.norm) and NORM_ON[layout.norm_on](inputs)
    v = _normed(inputs, layout.v_norm, v) if layout.v_norm and own else v
    if layout.norm_at != "rotated":  # before the heads are laid out: some norms are over all of a token's heads
        q = _normed(inputs, layout.q_norm, q) if normed else q
        k = _normed(inputs, layout.k_norm, k) if normed and own else k
        note("norm", _by_head(q, k, v))

    q = _clipped(inputs, q)
    if own:
        k, v = _clipped(inputs, k) * _factor(inputs, layout.key_factor), _clipped(inputs, v)
        v = v * _factor(inputs, layout.value_factor)
    q_BHTD, k_BGTD, v_BGTV = _by_head(q, k, v)
    note("multipliers", (q_BHTD, k_BGTD, v_BGTV))

    if layout.rotary and turns(layout.rotary_on, inputs):
        cos_TM, sin_TM = angles(inputs, q.shape[-1], note)
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
        q_BHTD = _normed(inputs, layout.q_norm, q_BHTD)
        k_BGTD = _normed(inputs, layout.k_norm, k_BGTD) if own else k_BGTD
        note("norm", (q_BHTD, k_BGTD, v_BGTV))

    # where the scale of long texts' queries grows with the position
    rule = QUERY_FACTORS.get(layout.query_factor)
    factor = rule(inputs) if rule else 1.0
    q_BHTD = q_BHTD * (factor[:, None].to(inputs.hidden_BTE) if isinstance(factor, Tensor) else factor)
    note("factor", (q_BHTD, k_BGTD, v_BGTV))
    return q_BHTD, k_BGTD, v_BGTV


def _by_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, H, D) as (B, H, T, D)."""
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _factor(inputs: LayerInputs, rule: str) -> float:
    return FACTORS[rule](inputs.config) if rule in FACTORS else 1.0


def angles(inputs: LayerInputs, head_dim: int, note: Note = no_note) -> tuple[Tensor, Tensor]:
    """cos and sin (T, M) of this layer's rotary positions, from the config alone; note: see `queries_keys_values`.

    >>> cos_TM, sin_TM = angles(inputs, head_dim=4)
    >>> cos_TM.shape
    torch.Size([9, 2])
    """
    rope, axes, device = inputs.rope, inputs.layout.axes, inputs.position_T.device
    assert rope is not None
    positions = inputs.position_T if inputs.axes_AT is None else inputs.axes_AT
    dims = rotary_dims(inputs, rope, head_dim)
    inv_freq_M, scaling = inverse_frequencies(
        rope,
        dims // 2 if axes == "halves" else dims,
        max_position=setting(inputs.config, "max_position_embeddings"),
        seq_len=int(positions.max()) + 1,
    )
    inv_freq_M = inv_freq_M.to(device).repeat(2 if axes == "halves" else 1)
    note("frequencies", (inv_freq_M, scaling))
    if inputs.axes_AT is None or not axes:
        cos_TM, sin_TM = cos_sin(inputs.position_T, inv_freq_M, scaling)
    else:
        cos_TM, sin_TM = axial_cos_sin(inputs.axes_AT, AXES[axes](inputs, dims // 2).to(device), inv_freq_M, scaling)
    return cos_TM.to(inputs.hidden_BTE), sin_TM.to(inputs.hidden_BTE)


def rotary_dims(inputs: LayerInputs, rope: Mapping[str, Any], head_dim: int) -> int:
    """How many dims of a head turn.

    >>> rotary_dims(inputs, {"partial_rotary_factor": 0.5}, head_dim=64)
    32
    """
    if inputs.layout.split == "latent":
        return inputs.config.qk_rope_head_dim
    if rope.get("rope_type") == "proportional":
        return head_dim
    if setting(inputs.config, "rotary_dim") and "partial_rotary_factor" not in rope:
        return inputs.config.rotary_dim
    return int(head_dim * rope.get("partial_rotary_factor", setting(inputs.config, "partial_rotary_factor", 1.0)))


def position_bias(inputs: LayerInputs) -> Tensor | None:
    """What positions add to the logits, (H, Q or 1, K); None where they add nothing.

    >>> position_bias(inputs) is None
    True
    """
    layout, position_T, heads = inputs.layout, inputs.position_T, inputs.layer.heads
    if layout.alibi:
        mpt, falcon = layout.alibi == "mpt", layout.alibi == "falcon"
        slopes_H = alibi_slopes(heads, setting(inputs.config, "attn_config.alibi_bias_max", 8) if mpt else 8)
        slopes_H = (slopes_H.bfloat16() if falcon else slopes_H).to(position_T.device)
        # One row for all queries, of the first or the last: rows differ by a constant, which softmax drops.
        query = -1 if mpt else 0
        bias_HK = alibi_bias(slopes_H, position_T[query, None], position_T)[:, 0]
        # BLOOM and Falcon round the bias; Falcon rounds slopes too, and divides the bias together with the logits.
        bias_HK = bias_HK if mpt else bias_HK.to(inputs.model_dtype)
        bias_HK = bias_HK.float() * (inputs.config.hidden_size // heads) ** -0.5 if falcon else bias_HK
        return bias_HK[:, None]
    if not layout.table:
        return None
    return relative_bias(
        inputs.parameter(layout.table).to(position_T.device),  # the first layer's may lie on another
        position_T,
        position_T,
        max_distance=inputs.config.relative_attention_max_distance,
        both_ways=inputs.stack not in CAUSAL,
    )


def visible(inputs: LayerInputs) -> Tensor:
    """Which keys each query may see, (Q, K) boolean: the layer's window or chunk, a decoder's past, blocks of tokens.

    >>> visible(inputs).sum(-1)
    tensor([1, 2, 3, 4, 5, 6, 7, 8, 9])
    """
    position_T, layer = inputs.position_T, inputs.layer
    causal = inputs.stack in CAUSAL or layer.type == "chunked"  # which look back whatever `is_causal` says
    if inputs.source_BSE is not None:
        return position_T.new_ones(len(position_T), inputs.source_BSE.shape[1], dtype=torch.bool)
    mask_QK = causal_mask(position_T, position_T)
    mask_QK = mask_QK if causal else torch.ones_like(mask_QK)
    if inputs.layout.window and layer.window and layer.type == "sliding":
        mask_QK = mask_QK & sliding_window_mask(position_T, position_T, layer.window if causal else _side(inputs))
    if inputs.layout.window and layer.window and layer.type == "chunked":
        mask_QK = mask_QK & chunked_mask(position_T, position_T, layer.window)
    if inputs.block_T is None:
        return mask_QK
    together_QK = block_mask(inputs.block_T)
    if not causal:
        return mask_QK & together_QK
    if inputs.layout.block_in_window and layer.window:  # Gemma 3's ends behind the query alone
        together_QK = together_QK & (position_T[:, None] - position_T < layer.window)
    return mask_QK | together_QK


def _side(inputs: LayerInputs) -> int:
    """How many keys a window that looks both ways has on one side, the query's own included.

    transformers leaves the query's own out of the config's number, but for the window that Gemma 3 makes of its causal
    one by `use_bidirectional_attention`.
    """
    config = inputs.config
    if setting(config, "use_bidirectional_attention") and setting(config, "is_causal", True):
        return config.sliding_window
    return inputs.layer.window + 1


def _clipped(inputs: LayerInputs, x: Tensor) -> Tensor:
    limit = setting(inputs.config, inputs.layout.clip) if inputs.layout.clip else None
    return x.clamp(-limit, limit) if limit else x


def _normed(inputs: LayerInputs, name: str, x: Tensor) -> Tensor:
    """x normed by the parameters of this name, unchanged where the module has none; `*` is a norm without weights."""
    layout = inputs.layout
    weight, bias = norm_parameters(inputs.parameters, name)
    if weight is None and name != "*":
        return x
    shaped = x.flatten(-2) if layout.norm_at == "whole" else x
    if layout.norm == "layer":
        return layer_norm(shaped, weight, bias, eps=inputs.eps).view_as(x)
    return rms_norm(shaped, weight, eps=inputs.eps, offset=layout.offset).view_as(x)


def norm_parameters(parameters: Mapping[str, Tensor], name: str) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias of a norm; StableLM has one for each head, which are stacked to (H, D).

    >>> norm_parameters(inputs.parameters, "q_norm")
    (None, None)
    """

    def of(kind: str) -> Tensor | None:
        keys = (f"{name}.norms.{head}.{kind}" for head in range(len(parameters)))
        heads = [parameters[key] for key in keys if key in parameters]
        return torch.stack(heads) if heads else parameters.get(f"{name}.{kind}")

    return of("weight"), of("bias")


def output_stages(inputs: LayerInputs, heads_BTHV: Tensor) -> OutputStages:
    """From the heads' outputs to the module's: gate, output projection, residual, norm.

    Raises UnreadableError where the residual is missing.

    >>> output_stages(inputs, torch.zeros(1, 9, 2, 4)).output_BTE.shape
    torch.Size([1, 9, 8])
    """
    layout = inputs.layout
    heads_BTHV = _gated(inputs, heads_BTHV)
    projected_BTE = heads_BTHV.flatten(-2)
    projected_BTE = inputs.linear(layout.out, projected_BTE) if layout.out else projected_BTE
    output_BTE = projected_BTE
    if layout.residual:
        if layout.residual not in inputs.arguments:
            raise UnreadableError(f"its layout ({layout.name}) expects an argument {layout.residual}, which is missing")
        output_BTE = output_BTE + inputs.arguments[layout.residual]
    if layout.out_norm:
        output_BTE = layer_norm(output_BTE, *norm_parameters(inputs.parameters, layout.out_norm), eps=inputs.eps)
    return OutputStages(heads_BTHV, projected_BTE, output_BTE)


def _gated(inputs: LayerInputs, heads_BTHV: Tensor) -> Tensor:
    """The heads' outputs after the layout's gate, as they were without one."""
    gate, parameters = inputs.layout.gate, inputs.parameters
    if not gate or (gate == "sigmoid_per_head" and "g_proj.weight" not in parameters):  # lfm3 may have it off
        return heads_BTHV
    if gate == "sub_norm":
        weight = parameters["attn_sub_norm.weight"]
        return rms_norm(heads_BTHV.flatten(-2), weight, eps=inputs.config.rms_norm_eps).view_as(heads_BTHV)
    if gate == "sigmoid_of_query_half":  # the second half of each head's query projection (Qwen3-Next, 2025)
        both_BTHM = inputs.linear("q_proj", inputs.hidden_BTE).unflatten(-1, (inputs.layer.heads, -1))
        return heads_BTHV * torch.sigmoid(both_BTHM.chunk(2, dim=-1)[1])
    # A projection of what entered the module: a number for each of a head's, or one for the whole head.
    name = next(name for name in ("gate_proj", "g_proj") if f"{name}.weight" in parameters)
    gates = inputs.linear(name, inputs.hidden_BTE)
    per_head = gate == "sigmoid_per_head" or (gate == "softplus" and inputs.config.gating in (True, "per-head"))
    gates = gates[..., None] if per_head else gates.view_as(heads_BTHV)
    if gate == "sigmoid_with_head_bias":
        gates = gates + parameters["gate_bias"][:, None]
    return heads_BTHV * (functional.softplus(gates) if gate == "softplus" else torch.sigmoid(gates))
