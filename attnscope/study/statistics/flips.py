"""p of the largest |t| of all heads under random signs of the sequences.

Shapes: S sequence, N head, B draw.
"""

from __future__ import annotations

import numpy as np

from attnscope.study.statistics.bootstrap import blocks, standard_error

FLIPS = 10_000


def family_wise(known_SN: np.ndarray, t_N: np.ndarray, flips: int, generator: np.random.Generator) -> np.ndarray:
    """How often the largest |t| of all heads under random signs reaches each head's own."""
    count, heads = known_SN.shape
    if not heads:
        return np.empty(0)
    squares_N, reached_N = (known_SN**2).mean(0), np.zeros(heads)
    for block in blocks(flips, count + heads):
        signs_BS = generator.integers(0, 2, (block, count)).astype(np.float64) * 2 - 1
        largest_B = np.abs(t_of(signs_BS @ known_SN / count, squares_N, count)).max(1)
        reached_N += (largest_B[:, None] >= t_N * (1 - 1e-12)).sum(0)
    return (1 + reached_N) / (1 + flips)


def t_of(mean: np.ndarray, mean_of_squares: np.ndarray, count: int) -> np.ndarray:
    """mean / standard error; infinite without spread, 0 for a mean of 0."""
    error = standard_error(mean, mean_of_squares, count)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(mean == 0, 0.0, mean / error)
