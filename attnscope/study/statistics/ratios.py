"""Shares: the ratio of two means over the same pairs, with an interval.

A part and its whole vary together from pair to pair. An interval of the part over the mean whole is too wide where they
rise together, and too narrow where one falls as the other rises. docs/statistics.md has how often either holds.

Shapes: S pair, N part, B draw.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from attnscope.study.statistics.bootstrap import DRAWS, LEVEL, standard_error
from attnscope.study.statistics.bounds import open_ends
from attnscope.study.statistics.intervals import FEWEST
from attnscope.study.statistics.means import means


class Ratios(NamedTuple):
    """Of N parts, (N,) each, NaN for null: the mean part over the mean whole; low, high, an interval of each alone."""

    ratio: np.ndarray
    low: np.ndarray
    high: np.ndarray


def ratios(
    part_SN: np.ndarray, whole: np.ndarray, *, seed: int = 0, draws: int = DRAWS, level: float = LEVEL
) -> Ratios:
    """The mean of each part over the mean of its whole, with an interval from FEWEST pairs on.

    whole: (S,) of all parts, or (S, N). The interval holds each r for which the mean of part - r whole is within c
    standard errors of 0 (Fieller 1954). c is a quantile of t over resamples of part - ratio whole (bootstrap-t): of the
    tail on that side, or of |t| where that is farther. Where the interval of the mean whole reaches 0 there is no
    ratio: any number would be inside. An end is NaN where few pairs carry the variance, as that of a mean, and where c
    standard errors of the whole reach 0.

        >>> ratios(np.array([[1.0], [3.0]]), np.array([2.0, 6.0])).ratio
        array([0.5])
    """
    part_SN = np.asarray(part_SN, np.float64)
    of_whole = np.reshape(whole, (len(part_SN), -1)).astype(np.float64)  # (S, 1) or (S, N)
    whole_SN = np.broadcast_to(of_whole, part_SN.shape)
    mean_N = whole_SN.mean(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio_N = np.where(mean_N != 0, part_SN.mean(0) / mean_N, np.nan)
    low_N, high_N = np.full((2, len(ratio_N)), np.nan)
    if len(part_SN) < FEWEST:
        return Ratios(ratio_N, low_N, high_N)
    ends = means(of_whole, seed=seed, draws=draws, level=level)
    ratio_N[np.broadcast_to(~((ends.low > 0) | (ends.high < 0)), ratio_N.shape)] = np.nan

    known = np.flatnonzero(~np.isnan(ratio_N))
    sign_N, mean_N = np.sign(mean_N[known]), np.abs(mean_N[known])
    off_SN = sign_N * (whole_SN - whole_SN.mean(0))[:, known]
    rest_SN = sign_N * (part_SN - part_SN.mean(0))[:, known] - ratio_N[known] * off_SN
    t_BN = _resampled_t(rest_SN, np.random.default_rng(seed), draws)
    low_N[known], high_N[known] = _apart(rest_SN, off_SN, mean_N, t_BN, level)
    return Ratios(ratio_N, ratio_N + low_N, ratio_N + high_N)


def _apart(
    rest_SN: np.ndarray, off_SN: np.ndarray, mean_N: np.ndarray, t_BN: np.ndarray, level: float
) -> list[np.ndarray]:
    """How far both ends are from the ratio; NaN where an end is open.

    rest_SN: part - ratio whole. off_SN: how far the whole is from its mean, mean_N, which is above 0. t_BN: of
    resampled rests. At d from the ratio the mean of the rest is -d mean and its variance that of rest - d off, so that
    both ends are the roots of a quadratic.
    """
    count = len(rest_SN)
    either_N = np.quantile(np.abs(t_BN), level, axis=0, method="higher")
    below_N, above_N = np.quantile(t_BN, [(1 - level) / 2, (1 + level) / 2], axis=0, method="nearest")
    rest_N, both_N, whole_N = (one.sum(0) / count / (count - 1) for one in (rest_SN**2, rest_SN * off_SN, off_SN**2))
    ends = []
    for side, tail_N, open_N in zip((-1, 1), (above_N, -below_N), open_ends(rest_SN), strict=True):
        square_N = np.maximum(either_N, tail_N) ** 2
        least_N, middle_N = mean_N**2 - square_N * whole_N, -square_N * both_N
        with np.errstate(invalid="ignore", divide="ignore"):
            end_N = (middle_N + side * np.sqrt(middle_N**2 + least_N * square_N * rest_N)) / least_N
        ends.append(np.where(open_N | ~(least_N > 0), np.nan, end_N))
    return ends


def _resampled_t(rest_SN: np.ndarray, generator: np.random.Generator, draws: int) -> np.ndarray:
    """(B, N): t of resampled means of columns with mean 0; NaN of a column that is 0 throughout."""
    count = len(rest_SN)
    times_BS = generator.multinomial(count, np.full(count, 1 / count), draws) / count
    moved_BN = times_BS @ rest_SN
    with np.errstate(invalid="ignore", divide="ignore"):
        t_BN: np.ndarray = moved_BN / standard_error(moved_BN, times_BS @ rest_SN**2, count)
    return t_BN
