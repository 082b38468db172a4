"""p of symmetry about 0: the largest |t| of all heads under random signs of the sequences.

Where differences are skewed, a mean of 0 is not symmetry: this p is then below 0.05 far more often than in one of
twenty, without any effect on the mean.

Shapes: S sequence, N head, B draw.
"""

from __future__ import annotations

import numpy as np

from attnscope.study.statistics.bootstrap import blocks, standard_error

FLIPS = 10_000


def symmetric_p(
    known_SN: np.ndarray, flips: int, generator: np.random.Generator, count_N: np.ndarray | None = None
) -> np.ndarray:
    """How often the largest |t| of all heads under random signs reaches each head's own.

    count_N: how many sequences a head has, with 0 where it has none; all without it.
    """
    count, heads = known_SN.shape
    if not heads:
        return np.empty(0)
    of_N = np.full(heads, count) if count_N is None else count_N
    squares_N, reached_N = (known_SN**2).sum(0) / of_N, np.zeros(heads)
    t_N = np.abs(t_of(known_SN.sum(0) / of_N, squares_N, of_N))
    for block in blocks(flips, count + heads):
        signs_BS = generator.integers(0, 2, (block, count)).astype(np.float64) * 2 - 1
        largest_B = np.abs(t_of(signs_BS @ known_SN / of_N, squares_N, of_N)).max(1)
        reached_N += (largest_B[:, None] >= t_N * (1 - 1e-12)).sum(0)
    return (1 + reached_N) / (1 + flips)


def t_of(mean: np.ndarray, mean_of_squares: np.ndarray, count: np.ndarray | int) -> np.ndarray:
    """mean / standard error; infinite without spread, 0 for a mean of 0."""
    error = standard_error(mean, mean_of_squares, count)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(mean == 0, 0.0, mean / error)
