"""What a layout's names mean: the scale, the factors, who turns, the ALiBi bias, the gates. One short rule each.

Shapes: B text, T token, H head, D width of q and k, V width of v, Q query, K key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from attnscope.reference.alibi import alibi_bias, alibi_slopes
from attnscope.reference.frequencies import yarn_mscale
from attnscope.reference.given import Given, setting
from attnscope.reference.norms import rms_norm


def _gpt2_scale(given: Given, head_dim: int) -> float:
    scale = head_dim**-0.5 if setting(given.config, "scale_attn_weights", True) else 1.0
    return scale / (given.layer.index + 1) if setting(given.config, "scale_attn_by_inverse_layer_idx") else scale


def _yarn_scale(given: Given, head_dim: int) -> float:
    """DeepSeek puts YaRN's temperature into the softmax: mscale(all_dim)^2 / sqrt(D)."""
    rope = setting(given.config, "rope_parameters", {})
    all_dim = rope.get("mscale_all_dim", 0)
    if rope.get("rope_type", "default") == "default" or not all_dim:
        return head_dim**-0.5
    return head_dim**-0.5 * yarn_mscale(rope["factor"], all_dim) ** 2


SCALES: Mapping[str, Callable[[Given, int], float]] = {
    "head_dim": lambda given, head_dim: head_dim**-0.5,
    "half_head_dim": lambda given, head_dim: (head_dim / 2) ** -0.5,
    "one": lambda given, head_dim: 1.0,
    "attention_multiplier": lambda given, head_dim: given.config.attention_multiplier,
    "query_pre_attn_scalar": lambda given, head_dim: given.config.query_pre_attn_scalar**-0.5,
    "gpt2": _gpt2_scale,
    "mpt": lambda given, head_dim: setting(given.config, "attn_config.softmax_scale", head_dim**-0.5),
    "yarn": _yarn_scale,
}

FACTORS: Mapping[str, Callable[[Any], float]] = {
    "key_multiplier": lambda config: config.key_multiplier,
    "attention_value_scale": lambda config: setting(config, "attention_value_scale", 1.0),
}


def _llama4_factor(given: Given) -> Tensor | float:
    """Llama 4's layers without rotation grow their queries with the position, in steps of floor_scale."""
    config = given.config
    if not config.attn_temperature_tuning or turns("listed", given):
        return 1.0
    steps_T = torch.floor((given.position_T.float() + 1) / config.floor_scale)
    return torch.log1p(steps_T) * config.attn_scale + 1


def _ministral3_factor(given: Given) -> Tensor | float:
    rope = given.config.rope_parameters
    steps_T = torch.floor(given.position_T / rope["original_max_position_embeddings"])
    return 1 + rope["llama_4_scaling_beta"] * torch.log(1 + steps_T)


def _beam_factor(given: Given) -> Tensor | float:
    """(1 + (position + 1) / 2048)^0.1 on layers without rotation."""
    if given.rope is not None:
        return 1.0
    return (1 + (given.position_T.float() + 1) / 2048) ** 0.1


QUERY_FACTORS: Mapping[str, Callable[[Given], Tensor | float]] = {
    "llama4": _llama4_factor,
    "ministral3": _ministral3_factor,
    "beam": _beam_factor,
}

ROTARY_ON: Mapping[str, Callable[[Given], bool]] = {
    "all": lambda given: True,
    "sliding": lambda given: given.layer.type == "sliding",
    "sliding_or_no_window": lambda given: given.layer.type == "sliding" or not given.config.sliding_window,
    "listed": lambda given: bool(given.config.no_rope_layers[given.layer.index]),  # 1 where it turns
    "cohere2_moe": lambda given: (
        given.layer.type == "sliding"
        or (
            given.config.mlp_layer_types[given.layer.index] == "dense"
            and given.config.prefix_dense_sliding_window_pattern == 1
        )
    ),
    "position_embedding_type": lambda given: given.config.position_embedding_type == "rope",
    "use_mem_rope": lambda given: bool(given.config.use_mem_rope),
}


def _sections(section: Sequence[int]) -> Tensor:
    """One stretch of pairs per axis (Wang et al. 2024, "Qwen2-VL", section 2.1)."""
    return torch.arange(len(section)).repeat_interleave(torch.tensor(section)) % 3


def _interleaved(section: Sequence[int]) -> Tensor:
    """Time, row, column, time, ... as far as rows and columns have pairs; time has the others (Qwen3-VL, 2025)."""
    axis_M = torch.arange(sum(section)) % 3
    return axis_M * (torch.arange(sum(section)) < 3 * torch.tensor(section)[axis_M])


AXES: Mapping[str, Callable[[Given, int], Tensor]] = {
    "sections": lambda given, pairs: _sections(setting(given.rope, "mrope_section")),
    "interleaved": lambda given, pairs: _interleaved(setting(given.rope, "mrope_section")),
    "halves": lambda given, pairs: torch.arange(2).repeat_interleave(pairs // 2),  # rows, then columns
}


NORM_ON: Mapping[str, Callable[[Given], bool]] = {
    "all": lambda given: True,
    "use_qk_norm": lambda given: given.config.use_qk_norm and turns(given.layout.rotary_on, given),
}


def turns(rule: str, given: Given) -> bool:
    """Whether this layer turns its queries and keys.

    >>> turns("all", given), turns("sliding", given)
    (True, False)
    """
    return given.rope is not None and ROTARY_ON[rule](given)


def _alibi(given: Given, slopes_H: Tensor, query: int) -> Tensor:
    """The row (H, K) of ALiBi's bias for the query at this place: rows differ by a constant, which softmax drops."""
    position_T = given.position_T
    return alibi_bias(slopes_H.to(position_T.device), position_T[query, None], position_T)[:, 0]


def _press(given: Given) -> Tensor:
    return _alibi(given, alibi_slopes(given.layer.heads), 0).to(given.model_dtype)


def _falcon(given: Given) -> Tensor:
    """Falcon rounds slopes and bias to bfloat16, and divides the bias together with the logits."""
    bias_HK = _alibi(given, alibi_slopes(given.layer.heads).bfloat16(), 0).to(given.model_dtype)
    return bias_HK.float() * (given.config.hidden_size // given.layer.heads) ** -0.5


def _mpt(given: Given) -> Tensor:
    max_bias = setting(given.config, "attn_config.alibi_bias_max", 8)
    return _alibi(given, alibi_slopes(given.layer.heads, max_bias), -1)


ALIBI: Mapping[str, Callable[[Given], Tensor]] = {"press": _press, "falcon": _falcon, "mpt": _mpt}


def _gate_name(given: Given) -> str:
    return next(name for name in ("gate_proj", "g_proj") if f"{name}.weight" in given.parameters)


def _sigmoid(heads_BTHV: Tensor, given: Given) -> Tensor:
    gate_BTHV = given.linear(_gate_name(given), given.hidden_BTE).view_as(heads_BTHV)
    return heads_BTHV * torch.sigmoid(gate_BTHV)


def _sigmoid_per_head(heads_BTHV: Tensor, given: Given) -> Tensor:
    if "g_proj.weight" not in given.parameters:  # lfm3 without use_attention_gate
        return heads_BTHV
    return heads_BTHV * torch.sigmoid(given.linear("g_proj", given.hidden_BTE))[..., None]


def _sigmoid_with_head_bias(heads_BTHV: Tensor, given: Given) -> Tensor:
    gate_BTHV = given.linear("gate_proj", given.hidden_BTE).view_as(heads_BTHV)
    return heads_BTHV * torch.sigmoid(gate_BTHV + given.parameters["gate_bias"][:, None])


def _softplus(heads_BTHV: Tensor, given: Given) -> Tensor:
    gate = functional.softplus(given.linear("g_proj", given.hidden_BTE))
    per_head = given.config.gating is True or given.config.gating == "per-head"
    return heads_BTHV * (gate[..., None] if per_head else gate.view_as(heads_BTHV))


def _sub_norm(heads_BTHV: Tensor, given: Given) -> Tensor:
    weight = given.parameters["attn_sub_norm.weight"]
    return rms_norm(heads_BTHV.flatten(-2), weight, eps=given.config.rms_norm_eps).view_as(heads_BTHV)


def _sigmoid_of_query_half(heads_BTHV: Tensor, given: Given) -> Tensor:
    """The second half of each head's query projection gates that head's values (Qwen3-Next, 2025)."""
    both_BTHM = given.linear("q_proj", given.hidden_BTE).unflatten(-1, (given.layer.heads, -1))
    return heads_BTHV * torch.sigmoid(both_BTHM.chunk(2, dim=-1)[1])


GATES: Mapping[str, Callable[[Tensor, Given], Tensor]] = {
    "sigmoid": _sigmoid,
    "sigmoid_per_head": _sigmoid_per_head,
    "sigmoid_with_head_bias": _sigmoid_with_head_bias,
    "sigmoid_of_query_half": _sigmoid_of_query_half,
    "softplus": _softplus,
    "sub_norm": _sub_norm,
}
