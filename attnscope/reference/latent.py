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
    q_HTD, k_HTD, v_HTV = latent_heads(hidden_TE, weights)
    q_HTD, k_HTD = (apply_rotary(x_HTD, cos_TM, sin_TM, layout=layout, part="last") for x_HTD in (q_HTD, k_HTD))
    return q_HTD, k_HTD, v_HTV


def latent_heads(hidden_TE: Tensor, weights: LatentWeights) -> tuple[Tensor, Tensor, Tensor]:
    """q (..., H, T, D), k (..., H, T, D), v (..., H, T, V) of every head before rotation; k_rope repeated per head.

    >>> [x.shape for x in latent_heads(hidden_TE, weights)]
    [torch.Size([2, 9, 6]), torch.Size([2, 9, 6]), torch.Size([2, 9, 3])]
    """
    latent_TC, k_rope_TD = _split(linear(hidden_TE, weights.kv_down, weights.kv_down_bias), weights.d_rope)
    kv_HTM = _heads(linear(rms_norm(latent_TC, weights.kv_norm, eps=weights.eps), weights.kv_up), weights.n_heads)
    k_nope_HTD, v_HTV = _split(kv_HTM, weights.d_value)
    k_rope_HTD = k_rope_TD.unsqueeze(-3).expand(*k_nope_HTD.shape[:-1], weights.d_rope)
    query_TE = hidden_TE
    if weights.q_down is not None:  # else q has no narrow vector, as in DeepSeek-V2-Lite
        query_TE = rms_norm(linear(hidden_TE, weights.q_down, weights.q_down_bias), weights.q_norm, eps=weights.eps)
    q_HTD = _heads(linear(query_TE, weights.q_up), weights.n_heads)
    return q_HTD, torch.cat([k_nope_HTD, k_rope_HTD], -1), v_HTV


def _heads(x_TM: Tensor, n_heads: int) -> Tensor:
    return x_TM.unflatten(-1, (n_heads, -1)).transpose(-3, -2)


def _split(x: Tensor, last: int) -> tuple[Tensor, Tensor]:
    return x[..., :-last], x[..., -last:]
