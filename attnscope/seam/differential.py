"""Differential attention (Ye et al. 2025, arXiv:2410.05258): a head's weights are P1 - lambda P2, of two softmaxes.

The model's call has both, the first of every pair in the first half of its heads.

Shapes: B text, H head, Q query, K key.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from attnscope.attention.operator import DenseAttention
from attnscope.model.selection import DIFFERENCE
from attnscope.seam.call import AttentionCall

LEARNED = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def strength(module: nn.Module) -> float | None:
    """The lambda of a module of differential attention, None for another.

    >>> strength(nn.Linear(2, 2)) is None
    True
    """
    learned = [getattr(module, name, None) for name in LEARNED]
    q1, k1, q2, k2 = (vector.detach().float() if isinstance(vector, Tensor) else None for vector in learned)
    if q1 is None or k1 is None or q2 is None or k2 is None:
        return None
    return float(torch.exp(q1 @ k1) - torch.exp(q2 @ k2)) + float(getattr(module, "lambda_init", 0.0))


def differences(call: AttentionCall) -> AttentionCall | None:
    """The differences of a call's pairs of heads as a call; None where there are none, or no matrix to take them of."""
    factor = strength(call.module) if call.call == 0 and call.weights_BHQK is not None else None
    if factor is None:
        return None
    first, second = call.P.dense().chunk(2, 1)
    weights_BHQK = first - factor * second
    return replace(
        call,
        place=replace(call.place, stack=DIFFERENCE),
        P=DenseAttention(weights_BHQK, call.visible),
        spec=None,
        weights_BHQK=weights_BHQK,
        output_BQHV=None,
    )
