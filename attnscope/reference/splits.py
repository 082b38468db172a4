"""How projections of the hidden states become heads: one function per layout.

Each takes a `Given` and returns q (B, T, H, D), k (B, T, G, D), v (B, T, G, V), before norms and positions. In
cross-attention k and v are of the encoder's tokens.

    >>> [part.shape for part in SPLITS["separate"](given)]
    [torch.Size([1, 9, 2, 4]), torch.Size([1, 9, 1, 4]), torch.Size([1, 9, 1, 4])]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from attnscope.reference.given import Given
from attnscope.reference.latent import LatentWeights, latent_heads

QKV = tuple[Tensor, Tensor, Tensor]


def _separate(given: Given) -> QKV:
    """Three projections, each a row of heads."""
    layout, x, layer = given.layout, given.hidden_BTE, given.layer
    q = given.linear(layout.q, x)
    if given.shared is not None:
        k_BGTD, v_BGTV = given.shared
        return q.unflatten(-1, (layer.heads, -1)), k_BGTD.transpose(1, 2), v_BGTV.transpose(1, 2)
    k = given.linear(layout.k, given.keyed_BSE)
    # Gemma 4's global layers have no values of their own: they are the keys before norm and rotation
    v = given.linear(layout.v, given.keyed_BSE) if f"{layout.v}.weight" in given.parameters else k
    return (
        q.unflatten(-1, (layer.heads, -1)),
        k.unflatten(-1, (layer.kv_heads, -1)),
        v.unflatten(-1, (layer.kv_heads, -1)),
    )


def _gated_query(given: Given) -> QKV:
    """Separate, but each head's query projection brings a gate after the query (the gate is applied at the end)."""
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
    """Multi-head latent attention: q, k and v of every head from narrow vectors."""
    q_BHTD, k_BHTD, v_BHTV = latent_heads(given.hidden_BTE, _latent_weights(given))
    return q_BHTD.transpose(1, 2), k_BHTD.transpose(1, 2), v_BHTV.transpose(1, 2)


def _latent_weights(given: Given) -> LatentWeights:
    """The module's matrices by the names that DeepSeek gave them; without q_a_proj (V2-Lite) q has no narrow vector."""
    config, layout, narrow = given.config, given.layout, "q_proj.weight" not in given.parameters
    return LatentWeights(
        n_heads=given.layer.heads,
        d_rope=config.qk_rope_head_dim,
        d_value=config.v_head_dim,
        q_up=given.parameter("q_b_proj.weight" if narrow else "q_proj.weight"),
        kv_down=given.parameter("kv_a_proj_with_mqa.weight"),
        kv_norm=_latent_norm(given, "kv_a_layernorm", layout.key_factor),
        kv_up=given.parameter("kv_b_proj.weight"),
        q_down=given.parameter("q_a_proj.weight") if narrow else None,
        q_norm=_latent_norm(given, "q_a_layernorm", layout.query_factor) if narrow else None,
        q_down_bias=given.parameters.get("q_a_proj.bias"),
        kv_down_bias=given.parameters.get("kv_a_proj_with_mqa.bias"),
        eps=given.eps,
    )


def _latent_norm(given: Given, name: str, factor: str) -> Tensor:
    """The weight of a narrow vector's norm, with what LongCat multiplies: sqrt(model width / width of the vector)."""
    weight = given.parameter(f"{name}.weight")
    return weight * (given.config.hidden_size / len(weight)) ** 0.5 if factor == "latent_width" else weight


SPLITS: Mapping[str, Callable[[Given], QKV]] = {
    "separate": _separate,
    "gated_query": _gated_query,
    "concat": _concat,
    "per_head": _per_head,
    "grouped": _grouped,
    "four_blocks": _four_blocks,
    "latent": _latent,
}
