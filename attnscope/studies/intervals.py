"""Which interval a mean gets: resampled, of a mass by its bound, or with an open end; and p of symmetry.

Resampled: by the largest |t| over resamples (bootstrap-t), a margin for rare events, and p from both. Half the width of
an interval at a level is the larger of two:

- c standard errors, c the quantile of the largest |t| of all heads over resamples of the sequences;
- the margin share * reach, for what so few sequences need not show: an event rarer than `share` can be absent from all
  of them; reach is how far the farthest lies from the mean.

p is the smallest 1 - level at which 0 lies outside.

Where few sequences carry the spread: a bound for masses, which have a range, and an open end where there is none. A
score that is 0 in most sequences, or nearly so, shows in its few others neither how large it can be nor how often. Then
the bootstrap has nothing to draw from. docs/statistics.md derives all of these rules.

p of symmetry about 0: the largest |t| of all heads under random signs of the sequences. Where differences are skewed, a
mean of 0 is not symmetry: this p is then below 0.05 far more often than in one of twenty, without any effect on the
mean.

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
    own_margin_N, margin_N = (reach_N * _unseen(count_N, one) for one in (1, heads))
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

    own_N = np.maximum(_quantile(np.concatenate(own_t)) * error_N, own_margin_N)
    if not at_once:
        return Widths(own_N, *np.full((2, heads), np.nan))
    t_B = np.sort(np.concatenate(largest_t)) * TIE
    least_N = np.where(error_N > 0, np.maximum(error_N, least), 0.0)
    all_N = np.maximum(_quantile(t_B) * least_N, margin_N)
    # p is the smallest 1 - level at which both widths are below |mean|.
    with np.errstate(divide="ignore", invalid="ignore"):
        reached_N = draws - np.searchsorted(t_B, np.where(least_N > 0, np.abs(mean_N) / least_N, 0.0))
        beyond_N = np.where(reach_N > 0, np.clip(1 - np.abs(mean_N) / reach_N, 0, 1), 1.0)
    p_N = np.minimum(1.0, np.maximum((1 + reached_N) / (1 + draws), 2 * heads * beyond_N**count_N))
    return Widths(own_N, all_N, p_N)


def _quantile(t: np.ndarray) -> np.ndarray:
    """The |t| that 1 + (1 - LEVEL) (1 + B) of B draws reach at most, (...) of (B, ...): what p counts, turned round."""
    place = int((1 - LEVEL) * (1 + len(t)) * TIE)
    found: np.ndarray = np.partition(t, len(t) - place, axis=0)[len(t) - place] if place else np.full_like(t[0], np.inf)
    return found


def _unseen(count_N: np.ndarray, heads: int) -> np.ndarray:
    """The share of sequences at which an event shows in none of `count` for any of so many heads, too rarely to matter.

    (1 - share)^count = (1 - LEVEL) / 2 / heads: half of the error that the level allows, the other half is the t's.
    """
    share_N: np.ndarray = 1 - ((1 - LEVEL) / (2 * heads)) ** (1 / count_N)
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


BESIDE, SHOWING = 0.02, 20  # of a range: how far from the median a sequence shows something, and how many must
CARRIERS = 12  # masses: as many sequences must carry the variance of a difference, or a fifth of few
FEW = 5  # no range: with fewer that carry the variance, an end of the mean is open
BETS = {1.0: 3 / 4, 1 / 2: 1 / 8, 1 / 4: 1 / 16, 1 / 8: 1 / 16}  # bet: weight; heads that vary little win most by 1
STEPS = 30  # of a bisection: a mean in [0, 1] to 1e-9

Ends = tuple[np.ndarray, np.ndarray]


def carriers(off_SN: np.ndarray) -> np.ndarray:
    """How many sequences carry the spread about a middle: 1 / sum of squared shares of the squares; (N,).

    All of n equally far away are n, one alone is 1; NaN where none is away.

        >>> carriers(np.array([[1.0, 0.0], [-1.0, 3.0]]))
        array([2., 1.])
    """
    with np.errstate(invalid="ignore"):
        number_N: np.ndarray = (off_SN**2).sum(0) ** 2 / (off_SN**4).sum(0)
    return number_N


def open_ends(off_SN: np.ndarray) -> Ends:
    """Which ends of the interval of a mean are open, low and high, (N,) boolean each, for values without a range.

    off_SN: values less their mean, 0 where a head has none. Where fewer than FEW sequences carry the variance, others
    as large may be missing on their side: there the mean is too near, and its end is open. A side counts that has a
    quarter of the sum of squared shares. Where all values are equal, nothing shows how large what is missing may be:
    both are open.
    """
    fourths_SN = off_SN**4
    with np.errstate(invalid="ignore"):
        few_N = ~(carriers(off_SN) >= FEW)  # also where all are equal
        above_N = (fourths_SN * (off_SN > 0)).sum(0) / fourths_SN.sum(0)
    return few_N & ~(above_N > 0.75), few_N & ~(above_N < 0.25)


def mass_ends(mass_SN: np.ndarray, error: float) -> Ends:
    """The ends of the means of values in [0, 1], (N,) each; each interval misses with a chance of at most `error`.

    For any distribution and any number of sequences: of a mean m the product of 1 - b + b x / m over independent x is
    expected to be 1 for each bet b in [0, 1], and so is their weighted mean; that it is 2 / error or more has a chance
    of at most error / 2 (Markov; betting, Waudby-Smith & Ramdas 2024, arXiv 2010.09686). The lower end is the smallest
    m at which it is less, the upper end that of 1 - x.

        >>> mass_ends(np.zeros((64, 1)), 0.05)[1].round(2)
        array([0.06])
    """
    least = np.log(2 / error)
    low_N, high_N = np.empty((2, mass_SN.shape[1]))
    equal_N = (mass_SN == mass_SN[0]).all(0)  # 0 in all of many texts, as a rule: one row tells it
    for some_N, rows in ((equal_N, 1), (~equal_N, len(mass_SN))):
        some_SN, times = mass_SN[:rows, some_N], len(mass_SN) / rows
        low_N[some_N], high_N[some_N] = _lower_end(some_SN, times, least), 1 - _lower_end(1 - some_SN, times, least)
    return low_N, high_N


def _lower_end(mass_SN: np.ndarray, times: float, least: float) -> np.ndarray:
    """The smallest mean at which bets win less than e^least; times: how many sequences each row is of."""
    outside_N, inside_N = np.zeros(mass_SN.shape[1]), mass_SN.mean(0)
    for _ in range(STEPS):
        middle_N = (outside_N + inside_N) / 2
        inside = _won(mass_SN, times, middle_N) < least
        outside_N, inside_N = np.where(inside, outside_N, middle_N), np.where(inside, middle_N, inside_N)
    return outside_N


def _won(mass_SN: np.ndarray, times: float, mean_N: np.ndarray) -> np.ndarray:
    """log of what bets on a larger mean than this one make of 1: the weighted mean of their products over sequences."""
    share_SN = mass_SN / np.maximum(mean_N, np.finfo(np.float64).tiny)
    with np.errstate(divide="ignore"):
        won_N = [times * np.log(1 - bet + bet * share_SN).sum(0) + np.log(weight) for bet, weight in BETS.items()]
    total_N: np.ndarray = np.logaddexp.reduce(won_N)
    return total_N


def _about_median(values_SN: np.ndarray) -> np.ndarray:
    about_SN: np.ndarray = values_SN - np.median(values_SN, 0)
    return about_SN


FEWEST = 32  # units for which an interval is given: below, bootstrap intervals miss their level
FEWEST_OF_MANY, MANY = 64, 48  # units for which p is given of more than so many heads: docs/statistics.md

Range = tuple[float, float]
SHARE: Range = (0.0, 1.0)  # of masses, rates, divergences in bits


class Intervals(NamedTuple):
    """Of N heads: an interval of each, one for all at once, and p of all at once; NaN is an open end, or no p."""

    low: np.ndarray
    high: np.ndarray
    low_all: np.ndarray
    high_all: np.ndarray
    p: np.ndarray


def fewest_for_p(heads: int) -> int:
    """From how many sequences or texts on so many heads have a p that holds for all of them at once."""
    return FEWEST if heads <= MANY else FEWEST_OF_MANY


def intervals(
    score_SN: np.ndarray,
    null: np.ndarray,
    generator: np.random.Generator,
    *,
    there_SN: np.ndarray | None = None,
    within: Range | None = None,
    draws: int = DRAWS,
    at_once: bool = True,
) -> Intervals:
    """The intervals of mean scores less their nulls: (S, N) of the same sequences, or (N,) known numbers.

    there_SN: which sequences a head has, all without it. within: the range of one score, which a mass has. p is the
    smallest level at which the interval of all heads at once excludes 0; there is none where the end towards 0 is open,
    or of resampled heads under `fewest_for_p`.
    """
    difference_SN, heads = score_SN - null, score_SN.shape[1]
    count_N = np.full(heads, len(score_SN)) if there_SN is None else there_SN.sum(0)
    result = Intervals(*np.full((5, heads), np.nan))
    # Of fewer sequences no interval holds its level.
    enough = np.flatnonzero(count_N >= FEWEST)
    if not len(enough):
        return result
    here_SN = None if there_SN is None or there_SN[:, enough].all() else there_SN[:, enough]
    known_SN = difference_SN[:, enough]
    widths = bootstrap_widths(known_SN, generator, there_SN=here_SN, draws=draws, at_once=at_once)
    whole_SN = known_SN if here_SN is None else np.where(here_SN, known_SN, 0.0)
    mean_N = whole_SN.sum(0) / count_N[enough]
    result.low[enough], result.high[enough] = mean_N - widths.own, mean_N + widths.own
    result.low_all[enough], result.high_all[enough] = mean_N - widths.all_heads, mean_N + widths.all_heads
    result.p[enough] = np.where(count_N[enough] >= fewest_for_p(heads), widths.p, np.nan)
    # Where few sequences carry the spread, resampling does not know how far the mean may be off.
    if within is None:
        off_SN = np.where(widths.own > 0, known_SN - mean_N, 0.0)
        low_N, high_N = open_ends(off_SN if here_SN is None else np.where(here_SN, off_SN, 0.0))
        # Open ends are NaN, and so is p where the end between the mean and 0 is open: nothing decides there.
        for end in (result.low, result.low_all):
            end[enough[low_N]] = np.nan
        for end in (result.high, result.high_all):
            end[enough[high_N]] = np.nan
        result.p[enough[np.where(mean_N > 0, low_N, high_N)]] = np.nan
    else:
        _bounded(result, score_SN, null, within, at_once=at_once)
    return result


def _bounded(result: Intervals, score_SN: np.ndarray, null: np.ndarray, within: Range, *, at_once: bool) -> None:
    """The ends and p of masses whose spread few sequences carry are those of the bound."""
    least, size = within[0], within[1] - within[0]
    varies, heads = null.ndim > 1, score_SN.shape[1]
    share_SN, null_share = ((np.asarray(one) - least) / size for one in (score_SN, null))
    # Those whose spread few sequences carry, or that show something in few: of a mass, or of both masses that a
    # difference is of, and the difference.
    shown = (share_SN, null_share, share_SN - null_share) if varies else (share_SN,)
    few_N = ~(carriers(_about_median(shown[-1])) >= min(CARRIERS, len(score_SN) / 5))
    for values_SN in shown:
        few_N |= (np.abs(_about_median(values_SN)) > BESIDE).sum(0) < SHOWING
    few = np.flatnonzero(few_N)
    if varies:  # a difference is in [-1, 1]
        mass_SN, zero_N, size = (1 + share_SN[:, few] - null_share[:, few]) / 2, np.full(len(few), 0.5), 2 * size
    else:
        mass_SN, zero_N = share_SN[:, few], np.broadcast_to(null_share, heads)[few]
    mass_SN = np.clip(mass_SN, 0, 1)  # rounding leaves a row's mass beside 1
    for low_N, high_N, of in ((result.low, result.high, 1), (result.low_all, result.high_all, heads)):
        if of == 1 or at_once:
            low_N[few], high_N[few] = ((end - zero_N) * size for end in mass_ends(mass_SN, (1 - LEVEL) / of))
    if at_once:
        # The smallest error at which a null lies outside of `mass_ends`, for any of the heads.
        above_N = mass_SN.mean(0) > zero_N
        beyond_SN, mean_N = np.where(above_N, mass_SN, 1 - mass_SN), np.where(above_N, zero_N, 1 - zero_N)
        result.p[few] = np.minimum(1.0, heads * np.minimum(1.0, 2 * np.exp(-_won(beyond_SN, 1, mean_N))))


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
