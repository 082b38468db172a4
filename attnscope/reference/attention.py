"""Scaled dot-product attention in its matrix form: the weights, the output, and the layer that learns.

    logits  = softcap(scale * q k^T) + bias + mask
    weights = softmax(logits)                    Vaswani et al. 2017, "Attention Is All You Need", equation 1
    output  = weights v

Each step in this order: scale, softcap, bias, mask, sink, softmax. `naive.py` says the same with loops. The layer has
several heads (section 3.2.2):

    head_h = attention(query W_Q_h, key W_K_h, value W_V_h),   output = [head_1 ; ... ; head_H] W_O

Shapes: H query head, G kv head, Q query, K key, D width of q and k, V width of v, E model width; any leading (batch)
dims before them. Query head h reads kv head h // (H / G) (Ainslie et al. 2023, "GQA", section 2.2); with G = 1 that is
multi-query attention (Shazeer 2019). Without a head dim, q (Q, D) and k (K, D) are a single head. Everything is
computed in the dtype that comes in.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Note = Callable[[str, Any], object]  # receives the name of a step and its numbers, as they are computed


def no_note(step: str, numbers: Any) -> None:
    """A `Note` that keeps nothing.

    >>> no_note("raw", torch.zeros(1))
    """


@dataclass(frozen=True, eq=False)
class Operands:
    """What weights and output are computed from: q, k and v as they meet, and what is done to q . k.

    mask, softcap, bias, sinks: as in `attention_weights`.

    >>> Operands(torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(2, 4), 0.5, torch.ones(2, 2).bool()).weights()
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    """

    q_HQD: Tensor
    k_GKD: Tensor
    v_GKV: Tensor
    scale: float
    mask: Tensor
    softcap: float | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None

    def logits(self) -> Tensor:
        """Before the mask: (..., H, Q, K)."""
        return attention_logits(self.q_HQD, self.k_GKD, scale=self.scale, softcap=self.softcap, bias=self.bias)

    def weights(self, note: Note = no_note) -> Tensor:
        """(..., H, Q, K); note: as in `attention_weights`."""
        return attention_weights(
            self.q_HQD,
            self.k_GKD,
            scale=self.scale,
            softcap=self.softcap,
            bias=self.bias,
            mask=self.mask,
            sinks=self.sinks,
            note=note,
        )


def attention_logits(
    q_HQD: Tensor,
    k_GKD: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    note: Note = no_note,
) -> Tensor:
    """What each query says to each key, before mask and softmax: (..., H, Q, K).

    scale: 1 / sqrt(D) where it is None. softcap: c * tanh(logits / c), which keeps them inside (-c, c) (Gemma 2, 2024,
    section 2). bias: added as it is, broadcast to (..., H, Q, K): ALiBi, T5's relative positions. note: called with the
    steps "raw" (q . k), "scaled", and where there are such "capped", "biased".
    Raises ValueError where the widths of q and k differ, or H is no multiple of G.

    >>> attention_logits(torch.ones(1, 4), torch.ones(1, 4))
    tensor([[2.]])
    """
    if q_HQD.shape[-1] != k_GKD.shape[-1]:
        raise ValueError(f"expected q and k of one width, got {q_HQD.shape[-1]} and {k_GKD.shape[-1]}")
    scale = 1 / math.sqrt(q_HQD.shape[-1]) if scale is None else scale
    # one name for all steps: a step's matrix is freed when the next is there, unless it was noted
    logits_HQK = _matmul_by_group(q_HQD, k_GKD.transpose(-1, -2))
    note("raw", logits_HQK)
    logits_HQK = logits_HQK * scale
    note("scaled", logits_HQK)
    if softcap is not None:
        logits_HQK = softcap * torch.tanh(logits_HQK / softcap)
        note("capped", logits_HQK)
    if bias is not None:
        logits_HQK = logits_HQK + bias
        note("biased", logits_HQK)
    return logits_HQK


def logit_terms(
    q_HQD: Tensor,
    k_GKD: Tensor,
    *,
    scale: float,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The sum of the sizes of a logit's terms, scale |q_d k_d| and |bias|, the largest of each row: (..., H, Q).

    What rounding acts on: the terms may cancel in the logit (Higham 2002, "Accuracy and Stability of Numerical
    Algorithms", section 3.1). mask: boolean, True = a key that counts. sinks: broadcast to (..., H, Q); a sink's logit
    is added, which the largest of the row may be measured from.

    >>> logit_terms(torch.tensor([[1.0, -1.0]]), torch.tensor([[3.0, 3.0]]), scale=0.5)
    tensor([3.])
    """
    terms_HQK = attention_logits(q_HQD.abs(), k_GKD.abs(), scale=scale, bias=None if bias is None else bias.abs())
    terms_HQ = (terms_HQK if mask is None else terms_HQK * mask).amax(-1)
    return terms_HQ if sinks is None else terms_HQ + sinks.abs()


def attention_weights(
    q_HQD: Tensor,
    k_GKD: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    note: Note = no_note,
) -> Tensor:
    """How much each query attends to each key: (..., H, Q, K), rows that sum to 1 (less with sinks).

    mask, broadcast to (..., H, Q, K): boolean, True = attend, a row that may attend to nothing is zeros; or additive,
    taken as it is, so that a row of `finfo.min` is uniform and a row of `-inf` is zeros.
    sinks (H,): one more logit per head that takes its share of the row and gives nothing (gpt-oss, 2025; Miller 2023,
    "Attention Is Off By One", has it fixed at 0). scale, softcap, bias: as in `attention_logits`.
    note: called with the steps of `attention_logits`, then "masked" and "weights".
    Raises ValueError as `attention_logits` does, and for a mask that is neither boolean nor floating.

    >>> attention_weights(torch.zeros(2, 4), torch.zeros(2, 4), mask=torch.ones(2, 2).tril().bool())
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    logits_HQK = attention_logits(q_HQD, k_GKD, scale=scale, softcap=softcap, bias=bias, note=note)
    logits_HQK = apply_mask(logits_HQK, mask)
    note("masked", logits_HQK)
    weights_HQK = softmax(logits_HQK, sinks)
    note("weights", weights_HQK)
    return weights_HQK


def attention_output(weights_HQK: Tensor, v_GKV: Tensor, *, dropout: float = 0.0) -> Tensor:
    """The values, weighted: (..., H, Q, V).

    dropout: the share of the weights that is zeroed at random, the others divided by 1 - dropout (Srivastava et al.
    2014); the caller's weights stay as they are. Raises ValueError where H is no multiple of G.

    >>> attention_output(torch.tensor([[0.25, 0.75]]), torch.tensor([[4.0], [8.0]]))
    tensor([[7.]])
    """
    return _matmul_by_group(functional.dropout(weights_HQK, dropout) if dropout else weights_HQK, v_GKV)


def apply_mask(logits_HQK: Tensor, mask: Tensor | None) -> Tensor:
    """Logits with the mask laid over them: False becomes -inf, numbers are added as they are.

    Raises ValueError for a mask of integers: 0 and 1 could mean either.

    >>> apply_mask(torch.zeros(1, 2), torch.tensor([True, False]))
    tensor([[0., -inf]])
    """
    if mask is None:
        return logits_HQK
    if mask.dtype == torch.bool:
        return logits_HQK.masked_fill(~mask, -torch.inf)
    if not mask.is_floating_point():
        raise ValueError(f"expected a boolean mask (True = attend) or an additive one, got {mask.dtype}")
    return logits_HQK + mask


def softmax(logits_HQK: Tensor, sinks_H: Tensor | None = None) -> Tensor:
    """exp(logits) / sum(exp(logits)) over the keys, the sink's share dropped; a row of nothing but -inf is zeros.

    The shape stays. sinks: (H,), or one number for logits without a head dim.

    >>> softmax(torch.zeros(1, 1, 3), sinks_H=torch.zeros(1))
    tensor([[[0.2500, 0.2500, 0.2500]]])
    """
    if sinks_H is not None:
        sink_HQ1 = sinks_H.to(logits_HQK)[..., None, None].expand(*logits_HQK.shape[:-1], 1)
        return torch.softmax(torch.cat([logits_HQK, sink_HQ1], dim=-1), dim=-1)[..., :-1]
    empty_HQ1 = logits_HQK.amax(-1, keepdim=True) == -torch.inf
    if not empty_HQ1.any():
        return torch.softmax(logits_HQK, dim=-1)
    # filled before and after: softmax of such a row is NaN, and so would be its gradient
    return torch.softmax(logits_HQK.masked_fill(empty_HQ1, 0.0), dim=-1).masked_fill(empty_HQ1, 0.0)


def split_heads(x_TM: Tensor, n_heads: int) -> Tensor:
    """Heads side by side (..., T, H * D) as (..., H, T, D).

    >>> split_heads(torch.zeros(9, 8), n_heads=2).shape
    torch.Size([2, 9, 4])
    """
    return x_TM.unflatten(-1, (n_heads, -1)).transpose(-3, -2)


class MultiHeadAttention(nn.Module):
    """Learned W_Q, W_K, W_V, W_O around scaled dot-product attention.

    d_model: width of the inputs and of the output. n_kv_heads: fewer heads for k and v, grouped-query or with 1
    multi-query. d_key, d_value: width per head, d_model // n_heads where left out. out_proj=False leaves W_O away: the
    output is the heads side by side, n_heads * d_value wide. dropout: on the weights, while training.
    Raises ValueError where d_model is no multiple of n_heads, n_heads none of n_kv_heads, a size is below 1, or dropout
    is not in [0, 1).

    >>> attn = MultiHeadAttention(3, 1, d_key=5, d_value=4, out_proj=False)
    >>> x = torch.randn(50, 5, 3)
    >>> attn(x, x, x)[0].shape
    torch.Size([50, 5, 4])
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        n_kv_heads: int | None = None,
        d_key: int | None = None,
        d_value: int | None = None,
        bias: bool = False,
        out_proj: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        self.dropout = dropout
        # Sizes that do not divide would give heads of another width than the weights were made for.
        _at_least_one(d_model=d_model, n_heads=n_heads, n_kv_heads=self.n_kv_heads)
        if d_model % n_heads:
            raise ValueError(
                f"expected d_model to be a multiple of n_heads, got d_model={d_model} and n_heads={n_heads}"
            )
        if n_heads % self.n_kv_heads:
            raise ValueError(
                f"expected n_heads to be a multiple of n_kv_heads, got n_heads={n_heads} and "
                f"n_kv_heads={self.n_kv_heads}"
            )
        if not 0 <= dropout < 1:
            raise ValueError(f"expected dropout in [0, 1), got {dropout}")
        self.d_key = d_model // n_heads if d_key is None else d_key
        self.d_value = d_model // n_heads if d_value is None else d_value
        _at_least_one(d_key=self.d_key, d_value=self.d_value)
        # A row of heads each, as a checkpoint has them: head h is rows h * d_key to (h + 1) * d_key of W_Q.
        self.W_Q = nn.Linear(d_model, n_heads * self.d_key, bias=bias)
        self.W_K = nn.Linear(d_model, self.n_kv_heads * self.d_key, bias=bias)
        self.W_V = nn.Linear(d_model, self.n_kv_heads * self.d_value, bias=bias)
        self.W_O = nn.Linear(n_heads * self.d_value, d_model, bias=bias) if out_proj else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Matrices uniform with variance 2 / (in + out) (Glorot and Bengio 2010, equation 16), biases 0.

        >>> MultiHeadAttention(8, 2).reset_parameters()
        """
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.xavier_uniform_(parameter)

    def forward(
        self, query_QE: Tensor, key_KE: Tensor, value_KE: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output (..., Q, E) and weights (..., H, Q, K), the weights before dropout.

        query (..., Q, E), key and value (..., K, E); the same tensor three times is self-attention. mask: boolean
        (True = attend) or additive, broadcast to (..., H, Q, K), as `masks` makes them.

        >>> output, weights_HQK = attn(x, x, x, causal_mask(*positions(5)))
        """
        q_HQD = split_heads(self.W_Q(query_QE), self.n_heads)
        k_GKD = split_heads(self.W_K(key_KE), self.n_kv_heads)
        v_GKV = split_heads(self.W_V(value_KE), self.n_kv_heads)
        weights_HQK = attention_weights(q_HQD, k_GKD, mask=mask)
        dropout = self.dropout if self.training else 0.0
        heads_QE = attention_output(weights_HQK, v_GKV, dropout=dropout).transpose(-3, -2).flatten(-2)
        return (heads_QE if self.W_O is None else self.W_O(heads_QE)), weights_HQK


def _matmul_by_group(a_HQM: Tensor, b_GMN: Tensor) -> Tensor:
    """a @ b, where the H / G query heads of a group share one b: their queries are stacked, b isn't repeated."""
    if min(a_HQM.dim(), b_GMN.dim()) == 2 or a_HQM.shape[-3] == b_GMN.shape[-3]:
        return a_HQM @ b_GMN
    heads, kv_heads = a_HQM.shape[-3], b_GMN.shape[-3]
    if heads % kv_heads:
        raise ValueError(f"expected query heads to be a multiple of kv heads, got {heads} and {kv_heads}")
    repeats = heads // kv_heads
    stacked = a_HQM.unflatten(-3, (kv_heads, repeats)).flatten(-3, -2)
    return (stacked @ b_GMN).unflatten(-2, (repeats, -1)).flatten(-4, -3)


def _at_least_one(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"expected {name} to be at least 1, got {name}={size}")
