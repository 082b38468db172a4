"""Multi-head latent attention: q, k and v grown from two narrow vectors per token (DeepSeek-AI 2024, "DeepSeek-V2",
section 2.1.2 and 2.1.3, equations 37 to 47).

    c_q = norm(W_DQ h)             [q_nope ; q_rope] = W_UQ c_q            per head
    c_kv = norm(W_DKV h)           [k_nope ; v]      = W_UKV c_kv          per head
                                    k_rope           = W_KR h              one for all heads
    q = [q_nope ; rotate(q_rope)]   k = [k_nope ; rotate(k_rope)]

Shapes: T token, E model width, H head, D width of q and k (nope + rope), V width of v, M pairs that are rotated.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from attnscope.reference.norms import rms_norm
from attnscope.reference.rotary import apply_rotary


@dataclass(frozen=True)
class LatentWeights:
    """The matrices of one layer, each (out, in) as `torch.nn.Linear` keeps them.

    Without a low rank for q (DeepSeek-V2-Lite), q_down and q_norm are None and q_up takes the hidden states.
    kv_down gives the latent and, in its last `d_rope` rows, the shared rotary key (W_DKV and W_KR stacked).
    """

    n_heads: int
    d_rope: int
    d_value: int
    q_up: Tensor
    kv_down: Tensor
    kv_norm: Tensor
    kv_up: Tensor
    q_down: Tensor | None = None
    q_norm: Tensor | None = None
    q_down_bias: Tensor | None = None
    kv_down_bias: Tensor | None = None
    eps: float = 1e-6


def latent_qkv(
    hidden_TE: Tensor, weights: LatentWeights, cos_TM: Tensor, sin_TM: Tensor, *, layout: str = "deinterleaved"
) -> tuple[Tensor, Tensor, Tensor]:
    """q (..., H, T, D), k (..., H, T, D), v (..., H, T, V) of every head, ready for `attention_weights`.

    hidden_TE: (..., T, E). cos, sin, layout: as in `rotary.apply_rotary`; DeepSeek-V2 and V3 read interleaved pairs,
    MiniCPM 3 "half". The scale is 1 / sqrt(D), times `rotary.yarn_mscale` squared where DeepSeek stretches its context.

    >>> q_HTD, k_HTD, v_HTV = latent_qkv(hidden_TE, weights, *cos_sin(torch.arange(9), frequencies))
    >>> weights_HQK = attention_weights(q_HTD, k_HTD, mask=causal_mask(*positions(9)))
    """
    q_HTD = _heads(_query(hidden_TE, weights), weights.n_heads)
    latent_TC, k_rope_TD = _split(linear(hidden_TE, weights.kv_down, weights.kv_down_bias), weights.d_rope)
    kv_HTD = _heads(linear(rms_norm(latent_TC, weights.kv_norm, eps=weights.eps), weights.kv_up), weights.n_heads)
    k_nope_HTD, v_HTV = _split(kv_HTD, weights.d_value)
    q_nope_HTD, q_rope_HTD = _split(q_HTD, weights.d_rope)
    q_rope_HTD = apply_rotary(q_rope_HTD, cos_TM, sin_TM, layout=layout)
    k_rope_1TD = apply_rotary(k_rope_TD.unsqueeze(-3), cos_TM, sin_TM, layout=layout)
    k_rope_HTD = k_rope_1TD.expand(*k_nope_HTD.shape[:-1], weights.d_rope)
    return torch.cat([q_nope_HTD, q_rope_HTD], -1), torch.cat([k_nope_HTD, k_rope_HTD], -1), v_HTV


def _query(hidden_TE: Tensor, weights: LatentWeights) -> Tensor:
    if weights.q_down is None:
        return linear(hidden_TE, weights.q_up)
    latent_TC = linear(hidden_TE, weights.q_down, weights.q_down_bias)
    return linear(rms_norm(latent_TC, weights.q_norm, eps=weights.eps), weights.q_up)


def _heads(x_TM: Tensor, n_heads: int) -> Tensor:
    return x_TM.unflatten(-1, (n_heads, -1)).transpose(-3, -2)


def _split(x: Tensor, last: int) -> tuple[Tensor, Tensor]:
    return x[..., :-last], x[..., -last:]
