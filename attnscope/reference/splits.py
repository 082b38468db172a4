"""How projections of the hidden states become heads: one function a layout.

Each takes what was given and returns q (B, T, H, D), k (B, T, G, D), v (B, T, G, V), before norms and positions.

    >>> [part.shape for part in SPLITS["separate"](given)]
    [torch.Size([1, 9, 2, 4]), torch.Size([1, 9, 1, 4]), torch.Size([1, 9, 1, 4])]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnscope.reference.norms import rms_norm

if TYPE_CHECKING:
    from attnscope.reference.reader import Given

QKV = tuple[Tensor, Tensor, Tensor]


def _separate(given: Given) -> QKV:
    """Three projections, each a row of heads."""
    layout, x, layer = given.layout, given.hidden_BTE, given.layer
    q = given.linear(layout.q, x)
    if given.shared is not None:
        return q.unflatten(-1, (layer.heads, -1)), *given.shared
    k = given.linear(layout.k, x)
    # Gemma 4's global layers have no values of their own: they are the keys before norm and rotation
    v = given.linear(layout.v, x) if f"{layout.v}.weight" in given.parameters else k
    return (
        q.unflatten(-1, (layer.heads, -1)),
        k.unflatten(-1, (layer.kv_heads, -1)),
        v.unflatten(-1, (layer.kv_heads, -1)),
    )


def _gated_query(given: Given) -> QKV:
    """Separate, but each head's query projection brings a gate behind the query (the gate is applied at the end)."""
    q_BTHM, k, v = _separate(given)
    return q_BTHM.chunk(2, dim=-1)[0], k, v


def _concat(given: Given) -> QKV:
    """[all of q | all of k | all of v]."""
    fused, layer = given.linear(given.layout.fused, given.hidden_BTE), given.layer
    heads = fused.unflatten(-1, (layer.heads + 2 * layer.kv_heads, -1))
    return heads.split([layer.heads, layer.kv_heads, layer.kv_heads], dim=-2)


def _per_head(given: Given) -> QKV:
    """Head by head: its q, its k, its v."""
    fused = given.linear(given.layout.fused, given.hidden_BTE)
    return fused.unflatten(-1, (given.layer.heads, 3, -1)).unbind(-2)


def _grouped(given: Given) -> QKV:
    """Kv head by kv head: the queries that share it, its k, its v (Falcon's new decoder)."""
    fused, layer = given.linear(given.layout.fused, given.hidden_BTE), given.layer
    groups = fused.unflatten(-1, (layer.kv_heads, layer.heads // layer.kv_heads + 2, -1))
    return groups[..., :-2, :].flatten(-3, -2), groups[..., -2, :], groups[..., -1, :]


def _four_blocks(given: Given) -> QKV:
    """Four blocks, for four TPU cores, each [q | v | k] of a quarter of the heads (CodeGen)."""
    fused = given.linear(given.layout.fused, given.hidden_BTE)
    q, v, k = fused.unflatten(-1, (4, 3, given.layer.heads // 4, -1)).unbind(-3)
    return q.flatten(-3, -2), k.flatten(-3, -2), v.flatten(-3, -2)


def _latent(given: Given) -> QKV:
    """Multi-head latent attention: q, k and v grown from narrow vectors, as in `latent.latent_qkv` before rotation."""
    config, layer, x = given.config, given.layer, given.hidden_BTE
    both = given.linear("kv_a_proj_with_mqa", x)
    narrow, k_rope = both[..., : -config.qk_rope_head_dim], both[..., -config.qk_rope_head_dim :]
    narrow = rms_norm(narrow, given.parameter("kv_a_layernorm.weight"), eps=given.eps)
    narrow = narrow * _latent_factor(given, config.kv_lora_rank, given.layout.key_factor)
    kv = given.linear("kv_b_proj", narrow).unflatten(-1, (layer.heads, -1))
    k_nope, v = kv[..., : -config.v_head_dim], kv[..., -config.v_head_dim :]
    k_rope = k_rope[..., None, :].expand(*k_nope.shape[:-1], -1)
    return _latent_query(given), torch.cat([k_nope, k_rope], -1), v


def _latent_factor(given: Given, rank: int, rule: str) -> float:
    """LongCat multiplies what grows from a narrow vector by sqrt(model width / its width)."""
    return (given.config.hidden_size / rank) ** 0.5 if rule == "latent_width" else 1.0


def _latent_query(given: Given) -> Tensor:
    if "q_proj.weight" in given.parameters:  # DeepSeek-V2-Lite: no narrow vector for q
        q = given.linear("q_proj", given.hidden_BTE)
    else:
        narrow = given.linear("q_a_proj", given.hidden_BTE)
        q = given.linear("q_b_proj", rms_norm(narrow, given.parameter("q_a_layernorm.weight"), eps=given.eps))
        q = q * _latent_factor(given, narrow.shape[-1], given.layout.query_factor)
    return q.unflatten(-1, (given.layer.heads, -1))


SPLITS: Mapping[str, Callable[[Given], QKV]] = {
    "separate": _separate,
    "gated_query": _gated_query,
    "concat": _concat,
    "per_head": _per_head,
    "grouped": _grouped,
    "four_blocks": _four_blocks,
    "latent": _latent,
}
