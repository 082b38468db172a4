"""What an explanation is made of: steps, their numbers, and whether they are the model's.

Plain data: who prints, draws or sends it never sees a tensor, nor torch.

Shapes: Q query, K key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

# Logits below this are masked keys, in whatever dtype the mask was built: half of the most that float16 can hide by.
HIDDEN = float(np.finfo(np.float16).min) / 2


@dataclass(frozen=True)
class Numbers:
    """One array of a step, whole: its name, what each axis counts (token, query, key, head, dim, ...), its values."""

    name: str
    axes: tuple[str, ...]
    values: np.ndarray


@dataclass(frozen=True)
class Check:
    """Ours against another's: the largest difference, the largest number of theirs, and what is allowed."""

    against: str
    difference: float
    largest: float
    allowed: float

    @property
    def holds(self) -> bool:
        return self.difference <= self.allowed


@dataclass(frozen=True)
class Step:
    """One step: what it is called, its formula, one sentence of why, its numbers, its checks.

    missing: what cannot be shown here and why, for layers of which not everything can be read.
    """

    name: str
    formula: str
    why: str
    numbers: tuple[Numbers, ...] = ()
    checks: tuple[Check, ...] = ()
    missing: str = ""


@dataclass(frozen=True)
class Explanation:
    """One head of one text from start to end, a chosen query among its tokens.

    tokens: their exact text; labels: as they are shown. raw_QK: q . k; scale: what they are multiplied with; head_dim:
    d_k; visible_QK: which keys a query may see; weights_QK: after the softmax.
    """

    head: str
    source: str
    tokens: tuple[str, ...]
    labels: tuple[str, ...]
    query: int
    steps: tuple[Step, ...]
    raw_QK: np.ndarray
    scale: float
    head_dim: int
    visible_QK: np.ndarray
    weights_QK: np.ndarray

    @property
    def failures(self) -> list[str]:
        """The checks that do not hold, in words."""
        return [
            f"step {number}, {step.name}: differs from {check.against} by {check.difference:.2g} "
            f"(allowed {check.allowed:.2g})"
            for number, step in enumerate(self.steps, 1)
            for check in step.checks
            if not check.holds
        ]


def divisor(scale: float, width: int) -> str:
    """How a scale is written: `/ √32` where it is 1 / sqrt(32), else `× 0.25`.

    >>> divisor(0.125, 64)
    '/ √64'
    """
    return f"/ √{width}" if math.isclose(scale, width**-0.5, rel_tol=1e-6) else f"× {scale:.4g}"
