"""What a dtype allows: how far correct weights and outputs are from exact ones, by rounding alone.

A logit is a sum of terms scale q_d k_d and a bias. Each term is rounded a few times on its way (projection, norm, turn,
product, sum), and so is the logit: it is off by at most d = ROUNDINGS eps (sum of the terms' sizes), Higham 2002,
"Accuracy and Stability of Numerical Algorithms", section 3.1. Where every logit of a row is off by up to d, the odds
w / (1 - w) of a weight change by a factor of at most e^2d.

Shapes: B text, H head, Q query, K key.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# In eps, where random roundings partly cancel: over all families of docs/families.md, up to 150 tokens and in all
# dtypes, logits were off by up to 1.5 of their terms, and outputs of given weights by up to 3 in half precision.
ROUNDINGS = 4.0
OUTPUT_ROUNDINGS = 8.0


def epsilon(dtype: torch.dtype) -> float:
    """The dtype's eps, and at least float32's: transformers takes softmax and angles in float32 also in float64.

    >>> epsilon(torch.bfloat16), epsilon(torch.float64) == epsilon(torch.float32)
    (0.0078125, True)
    """
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


def weights_allowed(weights_BHQK: Tensor, terms_BHQ: Tensor, dtype: torch.dtype) -> Tensor:
    """What each exact weight may be off by, (B, H, Q, K). terms_BHQ: as `logit_terms` gives them.

    >>> weights_allowed(torch.tensor([[0.0, 0.5, 0.5]]), torch.tensor([100.0]), torch.float32)
    tensor([[1.1921e-07, 2.4021e-05, 2.4021e-05]])
    """
    largest = math.log(torch.finfo(weights_BHQK.dtype).max) - 1
    grown_BHQ1 = torch.expm1((2 * ROUNDINGS * epsilon(dtype) * terms_BHQ).clamp(max=largest))[..., None]
    rest_BHQK = _rest(weights_BHQK)
    spread_BHQK = weights_BHQK * rest_BHQK / (1 / grown_BHQ1 + torch.minimum(weights_BHQK, rest_BHQK))
    return spread_BHQK + epsilon(dtype) * weights_BHQK + epsilon(torch.float32)


def _rest(weights_BHQK: Tensor) -> Tensor:
    """1 - w, a sink's share included; of each row's largest weight the others' sum, where 1 - w rounds to less."""
    top_BHQ1 = weights_BHQK.argmax(-1, keepdim=True)
    others_BHQ1 = weights_BHQK.scatter(-1, top_BHQ1, 0.0).sum(-1, keepdim=True)
    rest_BHQK = 1 - weights_BHQK
    return rest_BHQK.scatter(-1, top_BHQ1, torch.maximum(rest_BHQK.gather(-1, top_BHQ1), others_BHQ1))
