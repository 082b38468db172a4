"""Means over sequences or texts, alone and paired: effect, interval and family-wise p of every head.

The unit is a sequence or a text, never a row: rows of one text are not independent.

    found = paired(score_SN, null_SN)
    found.effect, found.low, found.high, found.p       # (N,) each
    found = means(score_SN)
    found.mean, found.low, found.high, found.n

An interval is the mean plus or minus the larger of two widths, derived in docs/atlas.md:

- c standard errors, c the quantile of the largest |t| over resamples of the sequences;
- a margin for what so few sequences need not show: share * reach. An event rarer than `share` can be absent from all
  sequences; reach is how far the farthest sequence lies from the mean, or `span` where all are equal.

Shapes: S sequence, N head, B draw.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

FLIPS, DRAWS = 10_000, 2_000
LEVEL = 0.95
FEWEST = 32  # units for which an interval is given: below, bootstrap intervals miss their level
AT_ONCE = 1 << 22  # entries of a block of draws
COLLAPSED = 0.2  # of a head's standard error: a resample below that has left out what the spread rests on
NOTHING = 1e-3  # of the largest standard error: no head's counts as less beside the others'
COLUMNS = 256  # whose means are taken together, at least: one column alone costs hardly less


@dataclass(frozen=True)
class Effects:
    """What a probe shows of N heads, (N,) float64 each, NaN for null.

    score, null: means over the sequences. effect: the mean of their paired difference. low, high: an interval of the
    effect, head by head; low_all, high_all: one that holds for all heads at once. p: of no effect, against the largest
    of all heads. t: effect / its standard error, which grows with n and decides nothing. n: sequences behind it.
    """

    score: np.ndarray
    null: np.ndarray
    effect: np.ndarray
    low: np.ndarray
    high: np.ndarray
    low_all: np.ndarray
    high_all: np.ndarray
    p: np.ndarray
    t: np.ndarray
    n: np.ndarray


def paired(
    score_SN: np.ndarray,
    null_SN: np.ndarray,
    *,
    seed: int = 0,
    flips: int = FLIPS,
    draws: int = DRAWS,
    level: float = LEVEL,
    span: float = 1.0,
) -> Effects:
    """The effects of N heads over S sequences: score minus null, paired.

    A head with a NaN is null throughout: its mask hides the key that is asked about. p: sign flips of the sequences,
    the largest |t| of all heads (Westfall & Young 1993; Nichols & Holmes 2002). Intervals: symmetric bootstrap-t (Efron
    1981; Hall 1988, "On symmetric bootstrap confidence intervals": it covers its level more closely than the one with
    two tails), by each head's |t|, and by the largest |t| of all heads, and never narrower than the margin above; NaN
    under FEWEST sequences. span: how far one sequence can move a head whose sequences are all equal: 1 for masses and
    shares, 0 where no bound is known.

        >>> paired(np.ones((64, 2)), np.zeros((64, 2))).effect
        array([1., 1.])
    """
    difference_SN = np.asarray(score_SN, np.float64) - np.asarray(null_SN, np.float64)
    there = np.logical_not(np.isnan(difference_SN).any(0))
    known_SN = difference_SN[:, there]
    generator = np.random.default_rng(seed)

    def spread(values: np.ndarray) -> np.ndarray:
        found = np.full(len(there), np.nan)
        found[there] = values
        return found

    mean_N, t_N = known_SN.mean(0), _t(known_SN.mean(0), (known_SN**2).mean(0), len(known_SN))
    ends = _intervals(known_SN, draws, level, span, generator)
    return Effects(
        score=spread(np.asarray(score_SN, np.float64)[:, there].mean(0)),
        null=spread(np.asarray(null_SN, np.float64)[:, there].mean(0)),
        effect=spread(mean_N),
        low=spread(ends[0]),
        high=spread(ends[1]),
        low_all=spread(ends[2]),
        high_all=spread(ends[3]),
        p=spread(_family_wise(known_SN, np.abs(t_N), flips, generator)),
        t=spread(t_N),
        n=np.where(there, len(difference_SN), 0),
    )


@dataclass(frozen=True)
class Means:
    """Means of N columns, (N,) each, NaN for null: mean; low, high, an interval of each; n, the units behind it."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n: np.ndarray


def means(
    values_SN: np.ndarray, *, seed: int = 0, draws: int = DRAWS, level: float = LEVEL, span: float = 1.0
) -> Means:
    """The mean of each column over the sequences or texts that have it, NaN left out, with intervals as in `paired`.

    Columns that lack the same units are taken together; none depends on the others.

        >>> means(np.ones((64, 2))).mean
        array([1., 1.])
    """
    there_SN = np.logical_not(np.isnan(values_SN))
    mean_N, low_N, high_N = np.full((3, values_SN.shape[1]), np.nan)
    _, alike_N = np.unique(np.packbits(there_SN, axis=0), axis=1, return_inverse=True)
    for which in range(alike_N.max(initial=-1) + 1):
        columns = np.flatnonzero(alike_N == which)
        there_S = there_SN[:, columns[0]]
        width = max(COLUMNS, AT_ONCE // max(there_S.sum(), draws))
        for start in range(0, len(columns) if there_S.any() else 0, width):
            some = columns[start : start + width]
            known_SN = values_SN[np.ix_(there_S, some)].astype(np.float64)
            mean_N[some] = known_SN.mean(0)
            generator = np.random.default_rng(seed)
            low_N[some], high_N[some], *_ = _intervals(known_SN, draws, level, span, generator, at_once=False)
    return Means(mean_N, low_N, high_N, there_SN.sum(0))


def effect_columns(effect_SN: np.ndarray) -> dict[str, np.ndarray]:
    """Of N effects of S texts: effect, low, high, p (NaN for null), and n, the texts behind it; (N,) each.

    An effect that some texts lack (NaN) has no p, which is over all effects at once; nor has any under FEWEST texts.
    """
    found, p_N = means(effect_SN, span=0.0), np.full(effect_SN.shape[1], np.nan)
    whole_N = ~np.isnan(effect_SN).any(0)
    if len(effect_SN) >= FEWEST and whole_N.any():
        p_N[whole_N] = paired(effect_SN[:, whole_N], np.zeros_like(effect_SN[:, whole_N]), span=0.0).p
    return {"effect": found.mean, "low": found.low, "high": found.high, "p": p_N, "n": found.n}


def largest_of(values_N: np.ndarray) -> int:
    """The place of the largest number, NaN left out; 0 where all are NaN.

    >>> largest_of(np.array([np.nan, 1.0, 3.0]))
    2
    """
    return int(np.nan_to_num(values_N, nan=-np.inf).argmax())


def _t(mean: np.ndarray, mean_of_squares: np.ndarray, count: int) -> np.ndarray:
    """mean / standard error; infinite without spread, 0 for a mean of 0."""
    error = _error(mean, mean_of_squares, count)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(mean == 0, 0.0, mean / error)


def _error(mean: np.ndarray, mean_of_squares: np.ndarray, count: int) -> np.ndarray:
    """The standard error of a mean."""
    rounding = 4 * np.finfo(np.float64).eps * mean_of_squares  # what equal values leave
    variance = mean_of_squares - mean**2
    return np.sqrt(np.where(variance > rounding, variance, 0.0) / max(count - 1, 1))


def _family_wise(known_SN: np.ndarray, t_N: np.ndarray, flips: int, generator: np.random.Generator) -> np.ndarray:
    """How often the largest |t| of all heads under random signs reaches each head's own."""
    count, heads = known_SN.shape
    if not heads:
        return np.empty(0)
    squares_N, reached_N = (known_SN**2).mean(0), np.zeros(heads)
    for block in _blocks(flips, count + heads):
        signs_BS = generator.integers(0, 2, (block, count)).astype(np.float64) * 2 - 1
        largest_B = np.abs(_t(signs_BS @ known_SN / count, squares_N, count)).max(1)
        reached_N += (largest_B[:, None] >= t_N * (1 - 1e-12)).sum(0)
    return (1 + reached_N) / (1 + flips)


def _intervals(
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
    error_N = _error(mean_N, (known_SN**2).mean(0), count)
    off_SN = np.where(error_N > 0, known_SN - mean_N, 0.0)
    reach_N = np.where(error_N > 0, np.abs(off_SN).max(0), span)
    own_margin_N, margin_N = (reach_N * _unseen(count, one, level) for one in (1, heads))
    least = NOTHING * error_N.max()

    own_t, largest_t = [], []
    for block in _blocks(draws, count + 5 * heads):
        times_BS = generator.multinomial(count, np.full(count, 1 / count), block) / count
        moved_BN = times_BS @ off_SN
        error_BN = _error(moved_BN, times_BS @ off_SN**2, count)
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


def _blocks(total: int, width: int) -> Iterator[int]:
    """A number of draws in blocks that fit into caches and memory."""
    size = max(1, AT_ONCE // max(width, 1))
    for start in range(0, total, size):
        yield min(size, total - start)


def rank_correlation(first_N: np.ndarray, second_N: np.ndarray) -> float:
    """Spearman's: the correlation of the ranks, equal values sharing theirs; NaN where one does not vary.

    >>> rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([2.0, 30.0, 10.0]))
    0.5
    """
    ranks = [((one[:, None] > one) + (one[:, None] == one) / 2).sum(1) for one in (first_N, second_N)]
    with np.errstate(invalid="ignore"):
        return float(np.corrcoef(*ranks)[0, 1])
