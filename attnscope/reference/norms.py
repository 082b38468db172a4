"""Norms of q and k before (or after) their positions: they bound the logits (Henry et al. 2020, "Query-Key
Normalization"; Dehghani et al. 2023, "ViT-22B").

The shape says which kind: x (..., H, D) with a weight (D,) is per head with one weight for all heads (Qwen 3, Gemma 3),
with (H, D) each head has its own (Cohere, StableLM); x (..., H * D) before the split with (H * D,) is full width
(OLMo 2). The mean always runs over the last dim.
"""

import torch
from torch import Tensor


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
