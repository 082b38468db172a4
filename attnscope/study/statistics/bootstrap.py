"""Intervals of means by the largest |t| over resamples (bootstrap-t), a margin for rare events, and p from both.

Half the width of an interval at a level is the larger of two, derived in docs/statistics.md:

- c standard errors, c the quantile of the largest |t| of all heads over resamples of the sequences;
- the margin share * reach, for what so few sequences need not show: an event rarer than `share` can be absent from all
  of them; reach is how far the farthest lies from the mean.

p is the smallest 1 - level at which 0 lies outside.

Shapes: S sequence, N head, B draw.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

DRAWS = 2_000
LEVEL = 0.95
AT_ONCE = 1 << 18  # entries of a block of draws: what fits into a cache
COLLAPSED = 0.2  # of a head's standard error: a resample below that has left out what the spread rests on
NOTHING = 1e-3  # of the largest standard error: no head's counts as less beside the others'
TIE = 1 + 1e-12  # a resample that is as far from its mean as the mean is from 0 counts as farther, rounding or not


class Widths(NamedTuple):
    """Of N heads: half the width of each one's interval, of the one for all at once, and p of all at once."""

    own: np.ndarray
    all_heads: np.ndarray
    p: np.ndarray


def bootstrap_widths(
    known_SN: np.ndarray,
    generator: np.random.Generator,
    *,
    there_SN: np.ndarray | None = None,
    draws: int = DRAWS,
    level: float = LEVEL,
    at_once: bool = True,
) -> Widths:
    """The widths and p of means over S sequences; NaN for all heads at once where that is not asked for.

    there_SN: which sequences a head has, all without it; other entries of known_SN are not read. All heads share
    the draws, and a resampled mean is over those of its sequences that the head has. A head with sequences that are all
    equal has the width 0, and p 1: the caller says what that means.
    """
    # What does not vary has no error, and stays off the draws: a rounding error would be its t.
    count, heads = known_SN.shape
    count_N = np.full(heads, count) if there_SN is None else there_SN.sum(0)
    whole_SN = known_SN if there_SN is None else np.where(there_SN, known_SN, 0.0)
    mean_N = whole_SN.sum(0) / count_N
    error_N = standard_error(mean_N, (whole_SN**2).sum(0) / count_N, count_N)
    off_SN = np.where(error_N > 0, known_SN - mean_N, 0.0)
    if there_SN is not None:
        off_SN = np.where(there_SN, off_SN, 0.0)
    reach_N = np.abs(off_SN).max(0, initial=0.0)
    own_margin_N, margin_N = (reach_N * _unseen(count_N, one, level) for one in (1, heads))
    least = NOTHING * error_N.max(initial=0.0)

    # A draw is how often each sequence is taken: a product of matrices makes all resampled means of a block at once.
    own_t, largest_t = [], []
    for block in blocks(draws, count + 5 * heads):
        times_BS = generator.multinomial(count, np.full(count, 1 / count), block) / count
        moved_BN, squares_BN, count_BN = times_BS @ off_SN, times_BS @ off_SN**2, count_N
        if there_SN is not None:
            share_BN = np.maximum(times_BS @ there_SN, 1 / count)
            moved_BN, squares_BN, count_BN = moved_BN / share_BN, squares_BN / share_BN, share_BN * count
        error_BN = standard_error(moved_BN, squares_BN, count_BN)
        moved_BN, collapsed_BN = np.abs(moved_BN), error_BN <= COLLAPSED * error_N
        own_t.append(_counted(moved_BN, error_BN, collapsed_BN, own_margin_N))
        if at_once:
            largest_t.append(_counted(moved_BN, np.maximum(error_BN, least), collapsed_BN, margin_N).max(1, initial=0))

    own_N = np.maximum(_quantile(np.concatenate(own_t), level) * error_N, own_margin_N)
    if not at_once:
        return Widths(own_N, *np.full((2, heads), np.nan))
    t_B = np.sort(np.concatenate(largest_t)) * TIE
    least_N = np.where(error_N > 0, np.maximum(error_N, least), 0.0)
    all_N = np.maximum(_quantile(t_B, level) * least_N, margin_N)
    return Widths(own_N, all_N, _inverted(np.abs(mean_N), least_N, t_B, reach_N, count_N))


def _quantile(t: np.ndarray, level: float) -> np.ndarray:
    """The |t| that 1 + (1 - level) (1 + B) of B draws reach at most, (...) of (B, ...): what p counts, turned round."""
    place = int((1 - level) * (1 + len(t)) * TIE)
    found: np.ndarray = np.partition(t, len(t) - place, axis=0)[len(t) - place] if place else np.full_like(t[0], np.inf)
    return found


def _inverted(
    mean_N: np.ndarray, error_N: np.ndarray, t_B: np.ndarray, reach_N: np.ndarray, count_N: np.ndarray
) -> np.ndarray:
    """The smallest 1 - level at which both widths are below |mean|; t_B ascending."""
    with np.errstate(divide="ignore", invalid="ignore"):
        reached_N = len(t_B) - np.searchsorted(t_B, np.where(error_N > 0, mean_N / error_N, 0.0))
        beyond_N = np.where(reach_N > 0, np.clip(1 - mean_N / reach_N, 0, 1), 1.0)
    return np.minimum(1.0, np.maximum((1 + reached_N) / (1 + len(t_B)), 2 * len(mean_N) * beyond_N**count_N))


def _unseen(count_N: np.ndarray, heads: int, level: float) -> np.ndarray:
    """The share of sequences at which an event shows in none of `count` for any of so many heads, too rarely to matter.

    (1 - share)^count = (1 - level) / 2 / heads: half of the error that the level allows, the other half is the t's.
    """
    share_N: np.ndarray = 1 - ((1 - level) / (2 * heads)) ** (1 / count_N)
    return share_N


def _counted(moved_BN: np.ndarray, error_BN: np.ndarray, collapsed_BN: np.ndarray, margin_N: np.ndarray) -> np.ndarray:
    """|t| of resamples. One that left out what makes a head's spread counts where it leaves the margin, too."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(collapsed_BN & (moved_BN <= margin_N), 0.0, moved_BN / error_BN)


def standard_error(mean: np.ndarray, mean_of_squares: np.ndarray, count: np.ndarray | int) -> np.ndarray:
    """The standard error of a mean of so many."""
    rounding = 4 * np.finfo(np.float64).eps * mean_of_squares  # what equal values leave
    variance = mean_of_squares - mean**2
    return np.sqrt(np.where(variance > rounding, variance, 0.0) / np.maximum(count - 1, 1))


def blocks(total: int, width: int) -> Iterator[int]:
    """A number of draws in blocks that fit into caches and memory."""
    size = max(1, AT_ONCE // max(width, 1))
    for start in range(0, total, size):
        yield min(size, total - start)
