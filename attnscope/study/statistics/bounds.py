"""Where few sequences carry the spread: a bound for masses, which have a range, and an open end where there is none.

A score that is 0 in most sequences, or nearly so, shows in its few others neither how large it can be nor how often.
Then the bootstrap has nothing to draw from. docs/statistics.md derives both rules.

Shapes: S sequence, N head.
"""

from __future__ import annotations

import numpy as np

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


def few_show(score_SN: np.ndarray, null_SN: np.ndarray | None) -> np.ndarray:
    """Whether few sequences carry the spread of a mass in [0, 1], or of what it differs by from a null that varies."""
    difference_SN = score_SN if null_SN is None else score_SN - null_SN
    few_N = ~(carriers(_about_median(difference_SN)) >= min(CARRIERS, len(score_SN) / 5))
    for values_SN in (score_SN,) if null_SN is None else (score_SN, null_SN, difference_SN):
        few_N |= (np.abs(_about_median(values_SN)) > BESIDE).sum(0) < SHOWING
    return few_N


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


def mass_p(mass_SN: np.ndarray, null_N: np.ndarray) -> np.ndarray:
    """The smallest error at which a null lies outside of `mass_ends`."""
    above_N = mass_SN.mean(0) > null_N
    beyond_SN, mean_N = np.where(above_N, mass_SN, 1 - mass_SN), np.where(above_N, null_N, 1 - null_N)
    return np.minimum(1.0, 2 * np.exp(-_won(beyond_SN, 1, mean_N)))


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
