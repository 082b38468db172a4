"""Means over sequences or texts, alone and paired: effect, interval and family-wise p of every head.

The unit is a sequence or a text, never a row: rows of one text are not independent.

    result = paired(score_SN, null_SN, within=(0, 1))
    result.effect, result.low, result.high, result.p   # (N,) each
    result = means(score_SN, within=(0, 1))
    result.mean, result.low, result.high, result.n
    effect_columns(effect_SN)                           # the columns of a study's table
    ratios(effect_SN, gap_S).low                        # of shares
    beside_random(effect, random_D)                     # of a set among random ones: their range, and p

First what needs no distribution: signs of effects, medians, ranks, and the place among draws. Then effects: scores
compared with nulls, sequence by sequence, and what many texts show of many heads. Then means, each by itself. Last
shares: the ratio of two means over the same pairs, with an interval. A part and its whole vary together from pair to
pair. An interval of the part over the mean whole is too wide where they rise together, and too narrow where one falls
as the other rises.

`intervals` says which interval a mean gets. docs/statistics.md derives all of it, and has how often it holds.

Shapes: S sequence, text or pair, N head or part, B resample, D draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from attnscope.studies.intervals import (
    AT_ONCE,
    DRAWS,
    FEWEST,
    FLIPS,
    LEVEL,
    Range,
    intervals,
    open_ends,
    standard_error,
    symmetric_p,
    t_of,
)

RANGE = (0.005, 0.995)  # of random sets


def positive_share(effect_SN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The share of texts with an effect above 0, and its p, (N,) each; NaN for a head without a text.

    p: of positive against negative effects, two-sided and exact (sign test), by Holm's step-down over the heads. A text
    without an effect, 0, counts for neither side. It holds for any distribution: what is tested is that an effect
    is as often positive as negative.

        >>> positive_share(np.ones((6, 1)))
        (array([1.]), array([0.03125]))
    """
    positive_N, negative_N, there_N = (effect_SN > 0).sum(0), (effect_SN < 0).sum(0), (~np.isnan(effect_SN)).sum(0)
    p_N = np.minimum(1.0, 2 * binomial_tail(np.maximum(positive_N, negative_N), positive_N + negative_N))
    with np.errstate(invalid="ignore"):
        return positive_N / np.where(there_N > 0, there_N, np.nan), holm(np.where(there_N > 0, p_N, np.nan))


def binomial_tail(least_N: np.ndarray, count_N: np.ndarray) -> np.ndarray:
    """The chance of at least so many heads in so many tosses of a fair coin.

    >>> binomial_tail(np.array([2]), np.array([3]))
    array([0.5])
    """
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, count_N.max(initial=0) + 1)))])
    tail_N = np.ones(len(count_N))
    for count in np.unique(count_N):
        chance = np.exp(factorials[count] - factorials[: count + 1] - factorials[count::-1] - count * np.log(2))
        at_least = np.cumsum(chance[::-1])[::-1]  # from the small ones on, so that a tail keeps its digits
        of = count_N == count
        tail_N[of] = at_least[least_N[of]]
    return tail_N


def holm(p_N: np.ndarray) -> np.ndarray:
    """p of each, so that any below a level is wrong as rarely as the level says (Holm 1979); NaN counts for none.

    >>> holm(np.array([0.01, 0.04, 0.03]))
    array([0.03, 0.06, 0.06])
    """
    adjusted_N = np.full(len(p_N), np.nan)
    order = np.argsort(p_N)[: np.isfinite(p_N).sum()]  # NaN is sorted last
    stepped = np.maximum.accumulate(p_N[order] * np.arange(len(order), 0, -1))
    adjusted_N[order] = np.minimum(stepped, 1.0)
    return adjusted_N


def medians(effect_SN: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The median of each head, and its interval between two order statistics, (N,) each; NaN for null.

    The k-th smallest and the k-th largest of n, k as large as 2 P(Binomial(n, 1/2) < k) <= 1 - LEVEL allows: at least
    that level for any distribution, of each head alone. Under 6 texts no two reach 95 %.
    """
    sorted_SN, count_N = np.sort(effect_SN, axis=0), (~np.isnan(effect_SN)).sum(0)  # NaN is sorted last
    median_N, low_N, high_N = np.full((3, len(count_N)), np.nan)
    for count in np.unique(count_N[count_N > 0]):
        of = count_N == count
        median_N[of] = (sorted_SN[(count - 1) // 2, of] + sorted_SN[count // 2, of]) / 2
        at_least = binomial_tail(np.arange(count + 1), np.full(count + 1, count))
        place = int((2 * at_least[::-1] <= 1 - LEVEL).sum())  # at_least[n - k]: k or fewer of n
        if place:
            low_N[of], high_N[of] = sorted_SN[place - 1, of], sorted_SN[count - place, of]
    return median_N, low_N, high_N


def beside_random(effect: float, random_D: np.ndarray) -> tuple[float, float, float]:
    """Where 99 % of the effects of random sets lie, and p of an effect among them; NaN without any.

    p: (1 + those as large) / (1 + all of them), the set itself being one of as many as can be drawn. So it is
    1 / (1 + all of them) or more.

        >>> beside_random(2.0, np.array([1.0, 1.0, 1.0]))
        (1.0, 1.0, 0.25)
    """
    if not len(random_D):
        return (np.nan,) * 3
    low, high = np.quantile(random_D, RANGE)
    return float(low), float(high), float((1 + (random_D >= effect).sum()) / (1 + len(random_D)))


def largest_of(values_N: np.ndarray) -> int:
    """The place of the largest number, NaN left out; 0 where all are NaN.

    >>> largest_of(np.array([np.nan, 1.0, 3.0]))
    2
    """
    return int(np.nan_to_num(values_N, nan=-np.inf).argmax())


def largest_first(values_N: np.ndarray) -> list[int]:
    """The places of numbers, the largest first, NaN last; ties in their own order.

    >>> largest_first(np.array([np.nan, 1.0, 3.0]))
    [2, 1, 0]
    """
    places: list[int] = np.argsort(-np.nan_to_num(values_N, nan=-np.inf), kind="stable").tolist()
    return places


def rank_correlation(first_N: np.ndarray, second_N: np.ndarray) -> float:
    """Spearman's: the correlation of the ranks, equal values sharing theirs; NaN where one does not vary.

    >>> rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([2.0, 30.0, 10.0]))
    0.5
    """
    ranks = [((values[:, None] > values) + (values[:, None] == values) / 2).sum(1) for values in (first_N, second_N)]
    with np.errstate(invalid="ignore"):
        return float(np.corrcoef(*ranks)[0, 1])


@dataclass(frozen=True)
class Effects:
    """What a probe shows of N heads, (N,) float64 each, NaN for null.

    score, null: means over the sequences. effect: the mean of their paired difference. low, high: an interval of the
    effect, head by head; low_all, high_all: one that holds for all heads at once. An end that so few sequences do not
    show is NaN. p: the smallest level at which the interval for all heads at once excludes 0. p_symmetric: that the
    differences are symmetric about 0, against the largest |t| of all heads. t: effect / its standard error, which grows
    with n and decides nothing. n: sequences behind it.
    """

    score: np.ndarray
    null: np.ndarray
    effect: np.ndarray
    low: np.ndarray
    high: np.ndarray
    low_all: np.ndarray
    high_all: np.ndarray
    p: np.ndarray
    p_symmetric: np.ndarray
    t: np.ndarray
    n: np.ndarray


def paired(
    score_SN: np.ndarray,
    null: np.ndarray | float,
    *,
    seed: int = 0,
    flips: int = FLIPS,
    draws: int = DRAWS,
    within: Range | None = None,
) -> Effects:
    """The effects of N heads over S sequences: score minus null, paired.

    null: (S, N), measured on the same sequences, or one number or (N,) that are known. within: the range of one score
    and one null: (0, 1) for masses and shares, None where there is no bound. A head with a NaN is null throughout: its
    mask hides the key that is asked about.

    Intervals: symmetric bootstrap-t (Efron 1981; Hall 1988, "On symmetric bootstrap confidence intervals": it covers
    its level more closely than the one with two tails), by each head's |t|, and by the largest |t| of all heads, never
    narrower than a margin for rare events; NaN under FEWEST sequences. Where few sequences carry the spread, a bound by
    bets for what has a range, and else an open end, NaN (`bounds`). p_symmetric: sign flips of the sequences, the
    largest |t| of all heads (Westfall & Young 1993; Nichols & Holmes 2002).

        >>> paired(np.ones((64, 2)), np.zeros((64, 2)), within=(0, 1)).effect
        array([1., 1.])
    """
    score_SN, null = np.asarray(score_SN, np.float64), np.asarray(null, np.float64)
    difference_SN = score_SN - null
    # Heads without a number have no part in what holds for all at once.
    there = np.logical_not(np.isnan(difference_SN).any(0))
    null = null[..., there] if null.ndim else null
    known_SN, score_SN = difference_SN[:, there], score_SN[:, there]
    generator = np.random.default_rng(seed)

    def spread(values: np.ndarray) -> np.ndarray:
        whole = np.full(len(there), np.nan)
        whole[there] = values
        return whole

    # The flips take the generator's first numbers, and the resampling those after them.
    t_N = t_of(known_SN.mean(0), (known_SN**2).mean(0), len(known_SN))
    p_symmetric_N = symmetric_p(known_SN, flips, generator)
    ends = intervals(score_SN, null, generator, within=within, draws=draws)
    return Effects(
        score=spread(score_SN.mean(0)),
        null=spread(null.mean(0) if null.ndim > 1 else null),
        effect=spread(known_SN.mean(0)),
        **{name: spread(values) for name, values in ends._asdict().items()},
        p_symmetric=spread(p_symmetric_N),
        t=spread(t_N),
        n=np.where(there, len(difference_SN), 0),
    )


def paired_where_shown(score_SN: np.ndarray, null: np.ndarray, **how: Any) -> Effects:
    """The same over the sequences in which any head has a difference; over all of them where none has.

    null: (S, N), or (N,) that are known. how: as for `paired`.
    """
    there_S = np.isfinite(score_SN - null).any(1)
    there_S |= not there_S.any()
    return paired(score_SN[there_S], null[there_S] if null.ndim > 1 else null, **how)


def effect_columns(effect_SN: np.ndarray) -> dict[str, np.ndarray]:
    """What S texts show of N effects, (N,) each, NaN for null; an effect that a text lacks is NaN there.

    effect: the mean. low, high: its interval, effect by effect; low_all, high_all: one that holds for all effects at
    once. An end is NaN where few texts carry the variance (`bounds.open_ends`), both under FEWEST texts. p: the
    smallest level at which the interval for all at once excludes 0; NaN where its end towards 0 is open, and under
    `fewest_for_p`. p_symmetric: that effects are symmetric about 0, by flips of their signs against the largest |t|;
    NaN under FEWEST texts. positive, p_positive: the share of texts with an effect above 0, and p of positive against
    negative ones, exact, for all effects at once. median, median_low, median_high: of each effect alone, by order. n:
    the texts behind it.

        >>> effect_columns(np.ones((64, 2)))["positive"]
        array([1., 1.])
    """
    effect_SN = np.asarray(effect_SN, np.float64)
    there_SN = ~np.isnan(effect_SN)
    count_N, generator = there_SN.sum(0), np.random.default_rng(0)
    whole_SN = np.where(there_SN, effect_SN, 0.0)
    with np.errstate(invalid="ignore"):
        mean_N = whole_SN.sum(0) / np.where(count_N > 0, count_N, np.nan)
    p_symmetric_N, enough = np.full(len(count_N), np.nan), count_N >= FEWEST
    p_symmetric_N[enough] = symmetric_p(whole_SN[:, enough], FLIPS, generator, count_N[enough])
    ends = intervals(whole_SN, np.zeros(len(count_N)), generator, there_SN=there_SN)
    shares = dict(zip(("positive", "p_positive"), positive_share(effect_SN), strict=True))
    middles = dict(zip(("median", "median_low", "median_high"), medians(effect_SN), strict=True))
    return {
        "effect": mean_N,
        **ends._asdict(),
        "p_symmetric": p_symmetric_N,
        **shares,
        **middles,
        "n": count_N.astype(np.int32),
    }


COLUMNS = 256  # whose means are taken together, at least: one column alone costs hardly less


@dataclass(frozen=True)
class Means:
    """Means of N columns, (N,) each, NaN for null: mean; low, high, an interval of each; n, the units behind it."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n: np.ndarray


def means(
    values_SN: np.ndarray,
    *,
    seed: int = 0,
    draws: int = DRAWS,
    within: Range | None = None,
) -> Means:
    """The mean of each column over the sequences or texts that have it, NaN left out, with intervals as in `paired`.

    within: the range of one value, None where there is no bound. Columns that lack the same units are taken together;
    none depends on the others.

        >>> means(np.ones((64, 2))).mean
        array([1., 1.])
    """
    there_SN = np.logical_not(np.isnan(values_SN))
    mean_N, low_N, high_N = np.full((3, values_SN.shape[1]), np.nan)
    # Columns with the same units share their draws, so many at a time as memory allows.
    _, alike_N = np.unique(np.packbits(there_SN, axis=0), axis=1, return_inverse=True)
    for which in range(alike_N.max(initial=-1) + 1):
        columns = np.flatnonzero(alike_N == which)
        there_S = there_SN[:, columns[0]]
        width = max(COLUMNS, AT_ONCE // max(there_S.sum(), draws))
        for start in range(0, len(columns) if there_S.any() else 0, width):
            some = columns[start : start + width]
            known_SN = values_SN[np.ix_(there_S, some)].astype(np.float64)
            mean_N[some] = known_SN.mean(0)
            # Each from the same seed: a mean does not depend on which others are asked for.
            null_N, generator = np.zeros(len(some)), np.random.default_rng(seed)
            ends = intervals(known_SN, null_N, generator, within=within, draws=draws, at_once=False)
            low_N[some], high_N[some] = ends.low, ends.high
    return Means(mean_N, low_N, high_N, there_SN.sum(0))


class Ratios(NamedTuple):
    """Of N parts, (N,) each, NaN for null: the mean part over the mean whole; low, high, an interval of each alone."""

    ratio: np.ndarray
    low: np.ndarray
    high: np.ndarray


def ratios(part_SN: np.ndarray, whole: np.ndarray, *, seed: int = 0, draws: int = DRAWS) -> Ratios:
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
    ends = means(of_whole, seed=seed, draws=draws)
    ratio_N[np.broadcast_to(~((ends.low > 0) | (ends.high < 0)), ratio_N.shape)] = np.nan

    known = np.flatnonzero(~np.isnan(ratio_N))
    sign_N, mean_N = np.sign(mean_N[known]), np.abs(mean_N[known])
    off_SN = sign_N * (whole_SN - whole_SN.mean(0))[:, known]
    rest_SN = sign_N * (part_SN - part_SN.mean(0))[:, known] - ratio_N[known] * off_SN
    # t of resampled means of the rest, whose mean is 0; NaN of a rest that is 0 throughout.
    count, generator = len(rest_SN), np.random.default_rng(seed)
    times_BS = generator.multinomial(count, np.full(count, 1 / count), draws) / count
    moved_BN = times_BS @ rest_SN
    with np.errstate(invalid="ignore", divide="ignore"):
        t_BN = moved_BN / standard_error(moved_BN, times_BS @ rest_SN**2, count)
    low_N[known], high_N[known] = _apart(rest_SN, off_SN, mean_N, t_BN)
    return Ratios(ratio_N, ratio_N + low_N, ratio_N + high_N)


def _apart(rest_SN: np.ndarray, off_SN: np.ndarray, mean_N: np.ndarray, t_BN: np.ndarray) -> list[np.ndarray]:
    """How far both ends are from the ratio; NaN where an end is open.

    rest_SN: part - ratio whole. off_SN: how far the whole is from its mean, mean_N, which is above 0. t_BN: of
    resampled rests. At d from the ratio the mean of the rest is -d mean and its variance that of rest - d off, so that
    both ends are the roots of a quadratic.
    """
    count = len(rest_SN)
    either_N = np.quantile(np.abs(t_BN), LEVEL, axis=0, method="higher")
    below_N, above_N = np.quantile(t_BN, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0, method="nearest")
    rest_N, both_N, whole_N = (one.sum(0) / count / (count - 1) for one in (rest_SN**2, rest_SN * off_SN, off_SN**2))
    ends = []
    for side, tail_N, open_N in zip((-1, 1), (above_N, -below_N), open_ends(rest_SN), strict=True):
        square_N = np.maximum(either_N, tail_N) ** 2
        least_N, middle_N = mean_N**2 - square_N * whole_N, -square_N * both_N
        with np.errstate(invalid="ignore", divide="ignore"):
            end_N = (middle_N + side * np.sqrt(middle_N**2 + least_N * square_N * rest_N)) / least_N
        ends.append(np.where(open_N | ~(least_N > 0), np.nan, end_N))
    return ends
