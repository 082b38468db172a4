"""Intervals of means by the largest |t| over resamples of the sequences (bootstrap-t), and a margin for rare events.

Shapes: S sequence, N head, B draw.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

DRAWS = 2_000
LEVEL = 0.95
FEWEST = 32  # units for which an interval is given: below, bootstrap intervals miss their level
AT_ONCE = 1 << 22  # entries of a block of draws
COLLAPSED = 0.2  # of a head's standard error: a resample below that has left out what the spread rests on
NOTHING = 1e-3  # of the largest standard error: no head's counts as less beside the others'


def intervals(
    known_SN: np.ndarray,
    draws: int,
    level: float,
    span: float,
    generator: np.random.Generator,
    *,
    at_once: bool = True,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Ends of the intervals, (N,) each: of each head, and of all heads at once where that is asked, else NaN."""
    count, heads = known_SN.shape
    if count < FEWEST or not heads:
        return (np.full(heads, np.nan),) * 4
    mean_N = known_SN.mean(0)
    error_N = standard_error(mean_N, (known_SN**2).mean(0), count)
    off_SN = np.where(error_N > 0, known_SN - mean_N, 0.0)
    reach_N = np.where(error_N > 0, np.abs(off_SN).max(0), span)
    own_margin_N, margin_N = (reach_N * _unseen(count, one, level) for one in (1, heads))
    least = NOTHING * error_N.max()

    own_t, largest_t = [], []
    for block in blocks(draws, count + 5 * heads):
        times_BS = generator.multinomial(count, np.full(count, 1 / count), block) / count
        moved_BN = times_BS @ off_SN
        error_BN = standard_error(moved_BN, times_BS @ off_SN**2, count)
        moved_BN, collapsed_BN = np.abs(moved_BN), error_BN <= COLLAPSED * error_N
        own_t.append(_counted(moved_BN, error_BN, collapsed_BN, own_margin_N))
        if at_once:
            largest_t.append(_counted(moved_BN, np.maximum(error_BN, least), collapsed_BN, margin_N).max(1))

    def width(t: np.ndarray, error_N: np.ndarray, margin_N: np.ndarray) -> np.ndarray:
        times = np.quantile(t, level, axis=0, method="higher")  # than which: an infinite t has no neighbour
        return np.maximum(times * error_N, margin_N)

    own_N = width(np.concatenate(own_t), error_N, own_margin_N)
    if not at_once:
        return mean_N - own_N, mean_N + own_N, *(np.full(heads, np.nan),) * 2
    all_N = width(np.concatenate(largest_t), np.where(error_N > 0, np.maximum(error_N, least), 0.0), margin_N)
    return mean_N - own_N, mean_N + own_N, mean_N - all_N, mean_N + all_N


def _unseen(count: int, heads: int, level: float) -> float:
    """The share of sequences at which an event shows in none of `count` for any of so many heads, too rarely to matter.

    (1 - share)^count = (1 - level) / 2 / heads: half of the error that the level allows, the other half is the t's.
    """
    return float(1 - ((1 - level) / (2 * heads)) ** (1 / count))


def _counted(moved_BN: np.ndarray, error_BN: np.ndarray, collapsed_BN: np.ndarray, margin_N: np.ndarray) -> np.ndarray:
    """|t| of resamples. One that left out what a head's spread rests on counts where it leaves the margin, too."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(collapsed_BN & (moved_BN <= margin_N), 0.0, moved_BN / error_BN)


def standard_error(mean: np.ndarray, mean_of_squares: np.ndarray, count: int) -> np.ndarray:
    """The standard error of a mean."""
    rounding = 4 * np.finfo(np.float64).eps * mean_of_squares  # what equal values leave
    variance = mean_of_squares - mean**2
    return np.sqrt(np.where(variance > rounding, variance, 0.0) / max(count - 1, 1))


def blocks(total: int, width: int) -> Iterator[int]:
    """A number of draws in blocks that fit into caches and memory."""
    size = max(1, AT_ONCE // max(width, 1))
    for start in range(0, total, size):
        yield min(size, total - start)
