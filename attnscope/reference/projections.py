"""How projections of the hidden states become heads, before norms and positions: one function per layout.

What the oracle works from is a `LayerInputs`: one layer's parameters and hidden states, its layout, and what the config
says. A function of SPLITS makes of it q (B, T, H, D), k (B, T, G, D), v (B, T, G, V). In cross-attention k and v are of
the encoder's tokens.

    >>> [part.shape for part in SPLITS["separate"](inputs)]
    [torch.Size([1, 9, 2, 4]), torch.Size([1, 9, 1, 4]), torch.Size([1, 9, 1, 4])]

Norms of q and k before (or after) their positions: they bound the logits (Henry et al. 2020, "Query-Key
Normalization"; Dehghani et al. 2023, "ViT-22B"). The shape says which kind: x (..., H, D) with a weight (D,) is per
head with one weight for all heads (Qwen 3, Gemma 3), with (H, D) each head has its own (Cohere, StableLM); x
(..., H * D) before the split with (H * D,) is full width (OLMo 2). The mean always runs over the last dim.

Multi-head latent attention: q, k and v grown from two narrow vectors per token (DeepSeek-AI 2024, "DeepSeek-V2",
section 2.1.2 and 2.1.3, equations 37 to 47).

    c_q = norm(W_DQ h)             [q_nope ; q_rope] = W_UQ c_q            per head
    c_kv = norm(W_DKV h)           [k_nope ; v]      = W_UKV c_kv          per head
                                    k_rope           = W_KR h              one for all heads
    q = [q_nope ; rotate(q_rope)]   k = [k_nope ; rotate(k_rope)]

Shapes: B text, T token, S token of the encoder's text, A axis, E model width, H head, G kv head, D width of q and k
(nope + rope), V width of v, M pairs that are rotated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from attnscope.reference.layouts import Layout


def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) (Zhang and Sennrich 2019, equation 4); shape of x.

    offset: 1 for Gemma's (1 + w). Without a weight it is what Llama 4 and nanochat call their q and k norm.

    >>> rms_norm(torch.tensor([3.0, 3.0]), torch.tensor([0.0, 1.0]), offset=1.0)
    tensor([1.0000, 2.0000])
    """
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x if weight is None else x * (offset + weight)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias (Ba et al. 2016, equation 4); shape of x.

    >>> layer_norm(torch.tensor([1.0, 3.0]), bias=torch.tensor([5.0, 5.0]))
    tensor([4.0000, 6.0000])
    """
    centred = x - x.mean(-1, keepdim=True)
    x = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def l2_norm(x: Tensor, *, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps), a vector of length 1 (Henry et al. 2020, equation 3); shape of x.

    >>> l2_norm(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


class UnreadableError(Exception):
    """A layer that its layout does not describe: what was expected and what there was.

    >>> raise UnreadableError("its layout expects a parameter q_proj.weight, and there is none")
    Traceback (most recent call last):
    attnscope.reference.projections.UnreadableError: its layout expects a parameter q_proj.weight, and there is none
    """


@dataclass(frozen=True)
class LayerInputs:
    """What the oracle works from, all of it in one dtype.

    layout: how the family builds its attention. parameters: the attention module's own, by name. config: the model's
    (the text part). layer: index, heads, kv_heads, type ("sliding" and "chunked" limit the keys to `window`).
    hidden_BTE: what enters the module. position_T: the tokens' positions. arguments: other tensors that entered it, of
    which only the layout's residual is read. shared: k (B, G, T, D) and v (B, G, T, V) of an earlier layer, where this
    one reads those instead of its own (Gemma 3n). model_dtype: what the model runs in, which some families round to.
    stack: the layer's stack; only a "decoder" looks back alone. source_BSE: in cross-attention what the encoder gave,
    which keys and values are made of. axes_AT: positions on several axes, where tokens have them. block_T: the block
    that each token is of, -1 for none: in a decoder the tokens of a block see each other also ahead, in other stacks
    they see nothing else.

    >>> inputs.hidden_BTE.shape, inputs.layer.heads, inputs.rope["rope_theta"]
    (torch.Size([1, 9, 8]), 2, 10000.0)
    """

    layout: Layout
    parameters: Mapping[str, Tensor]
    config: Any
    layer: Any
    hidden_BTE: Tensor
    position_T: Tensor
    arguments: Mapping[str, Tensor] = field(default_factory=dict)
    shared: tuple[Tensor, Tensor] | None = None
    model_dtype: torch.dtype = torch.float32
    stack: str = "decoder"
    source_BSE: Tensor | None = None
    axes_AT: Tensor | None = None
    block_T: Tensor | None = None

    @property
    def keyed_BSE(self) -> Tensor:
        """What keys and values are made of: the hidden states, or in cross-attention the encoder's."""
        return self.hidden_BTE if self.source_BSE is None else self.source_BSE

    @property
    def rope(self) -> Mapping[str, Any] | None:
        """The config's rope parameters for this layer, None where it has none."""
        if self.layout.base is not None:
            own = setting(self.config, "rope_theta", self.layout.base)
            theta = setting(self.config, "rope_parameters.rope_theta", own)
            return {"rope_type": "default", "rope_theta": theta}
        rope = setting(self.config, "rope_parameters")
        kinds = setting(self.config, "layer_types")
        if rope is not None and kinds is not None and kinds[self.layer.index] in rope:
            return rope[kinds[self.layer.index]]
        return rope

    @property
    def eps(self) -> float:
        """What the layout's norms add under the root."""
        eps = self.layout.eps
        return eps if isinstance(eps, float) else setting(self.config, eps)

    def parameter(self, name: str) -> Tensor:
        """A parameter by name; raises UnreadableError where the module has none of that name."""
        if name not in self.parameters:
            raise UnreadableError(f"its layout ({self.layout.name}) expects a parameter {name}, which the module lacks")
        return self.parameters[name]

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x through one of the module's projections."""
        weight = self.parameter(f"{name}.weight")
        weight = weight.T if self.layout.transposed else weight
        return functional.linear(x, weight, self.parameters.get(f"{name}.bias"))


def setting(config: Any, name: str, default: Any = None) -> Any:
    """A config's value by name; a dot goes into a nested config. The default where it is missing or None.

    >>> setting(config, "attn_config.clip_qkv", default=8.0)
    8.0
    """
    for part in name.split("."):
        config = config.get(part) if isinstance(config, Mapping) else getattr(config, part, None)
    return default if config is None else config


QKV = tuple[Tensor, Tensor, Tensor]


def _separate(inputs: LayerInputs) -> QKV:
    """Three projections, each a row of heads."""
    layout, layer = inputs.layout, inputs.layer
    q_BTHD = inputs.linear(layout.q, inputs.hidden_BTE).unflatten(-1, (layer.heads, -1))
    if layout.split == "gated_query":  # a gate comes after each head's query, and is applied at the end
        q_BTHD = q_BTHD.chunk(2, dim=-1)[0]
    if inputs.shared is not None:
        k_BGTD, v_BGTV = inputs.shared
        return q_BTHD, k_BGTD.transpose(1, 2), v_BGTV.transpose(1, 2)
    k = inputs.linear(layout.k, inputs.keyed_BSE)
    # Gemma 4's global layers have no values of their own: they are the keys before norm and rotation
    v = inputs.linear(layout.v, inputs.keyed_BSE) if f"{layout.v}.weight" in inputs.parameters else k
    return q_BTHD, k.unflatten(-1, (layer.kv_heads, -1)), v.unflatten(-1, (layer.kv_heads, -1))


def _fused(inputs: LayerInputs) -> QKV:
    """One projection for all three, which families lay out each in their way."""
    fused, layer, split = inputs.linear(inputs.layout.fused, inputs.hidden_BTE), inputs.layer, inputs.layout.split
    if split == "concat":  # all of q, all of k, all of v
        heads = fused.unflatten(-1, (layer.heads + 2 * layer.kv_heads, -1))
        return heads.split([layer.heads, layer.kv_heads, layer.kv_heads], dim=-2)
    if split == "per_head":  # head by head: its q, its k, its v
        return fused.unflatten(-1, (layer.heads, 3, -1)).unbind(-2)
    if split == "grouped":  # kv head by kv head: the queries that share it, its k, its v (Falcon's new decoder)
        groups = fused.unflatten(-1, (layer.kv_heads, layer.heads // layer.kv_heads + 2, -1))
        return groups[..., :-2, :].flatten(-3, -2), groups[..., -2, :], groups[..., -1, :]
    # four blocks, for four TPU cores, each q, v, k of a quarter of the heads (CodeGen)
    q, v, k = fused.unflatten(-1, (4, 3, layer.heads // 4, -1)).unbind(-3)
    return q.flatten(-3, -2), k.flatten(-3, -2), v.flatten(-3, -2)


def _latent(inputs: LayerInputs) -> QKV:
    """Multi-head latent attention: q, k and v of every head from narrow vectors; the rotary key is one for all heads.

    The module's matrices have the names that DeepSeek gave them.
    """
    config, layout, heads = inputs.config, inputs.layout, inputs.layer.heads

    def narrow(x: Tensor, name: str, factor: str) -> Tensor:
        """A narrow vector, normed, and what LongCat multiplies it by: sqrt(model width / vector's width)."""
        weight = inputs.parameter(f"{name}.weight")
        weight = weight * (config.hidden_size / len(weight)) ** 0.5 if factor == "latent_width" else weight
        return rms_norm(x, weight, eps=inputs.eps)

    if "q_proj.weight" in inputs.parameters:  # q has no narrow vector, as in DeepSeek-V2-Lite
        q = inputs.linear("q_proj", inputs.hidden_BTE)
    else:
        latent_q = narrow(inputs.linear("q_a_proj", inputs.hidden_BTE), "q_a_layernorm", layout.query_factor)
        q = inputs.linear("q_b_proj", latent_q)
    latent_kv, k_rope = _split(inputs.linear("kv_a_proj_with_mqa", inputs.hidden_BTE), config.qk_rope_head_dim)
    kv = inputs.linear("kv_b_proj", narrow(latent_kv, "kv_a_layernorm", layout.key_factor))
    k_nope, v_BTHV = _split(kv.unflatten(-1, (heads, -1)), config.v_head_dim)
    k_BTHD = torch.cat([k_nope, k_rope[:, :, None].expand(-1, -1, heads, -1)], -1)
    return q.unflatten(-1, (heads, -1)), k_BTHD, v_BTHV


def _split(x: Tensor, last: int) -> tuple[Tensor, Tensor]:
    return x[..., :-last], x[..., -last:]


SPLITS: Mapping[str, Callable[[LayerInputs], QKV]] = {
    **dict.fromkeys(("separate", "gated_query"), _separate),
    **dict.fromkeys(("concat", "per_head", "grouped", "four_blocks"), _fused),
    "latent": _latent,
}
