"""ALiBi: no position vectors, but a penalty that grows with distance (Press et al. 2022, "Train Short, Test Long").

    logits_HQK = scale * q k^T - slope_H * (query - key)

Shapes: H head, Q query, K key.
"""

import math

import torch
from torch import Tensor


def alibi_slopes(n_heads: int, max_bias: float = 8.0) -> Tensor:
    """The slopes (H,): 2^(-8/n), 2^(-16/n), ... 2^-8 for n heads, n a power of 2 (section 3; BLOOM, Falcon, MPT).

    For another number the authors' code takes the slopes of the power of 2 below, then every other slope of the power
    of 2 above. max_bias: another last exponent than 8 (`alibi_bias_max` of MPT). Falcon rounds slopes to bfloat16, and
    divides the bias by sqrt(D) together with the logits.

    >>> alibi_slopes(3)
    tensor([0.0625, 0.0039, 0.2500])
    """
    below = 2 ** math.floor(math.log2(n_heads))
    return torch.cat([_geometric(below, max_bias), _geometric(2 * below, max_bias)[::2]])[:n_heads]


def alibi_bias(slopes_H: Tensor, query_Q: Tensor, key_K: Tensor) -> Tensor:
    """The bias (H, Q, K) to add to the logits: -slope * (query - key), positions as in `masks.positions`.

    BLOOM and MPT add slope * key instead: the same weights, since softmax doesn't see a row's constant.

    >>> alibi_bias(torch.tensor([0.5]), torch.tensor([2]), torch.tensor([0, 1, 2]))
    tensor([[[-1.0000, -0.5000,  0.0000]]])
    """
    return slopes_H[:, None, None] * (key_K[None, :] - query_Q[:, None])


def _geometric(n: int, max_bias: float) -> Tensor:
    return torch.tensor([2.0 ** (-max_bias * (h + 1) / n) for h in range(n)])
