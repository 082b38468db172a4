"""What needs no distribution: signs of effects, medians, ranks, and the place among draws.

Shapes: S text, N head, D draw.
"""

from __future__ import annotations

import numpy as np

from attnscope.study.statistics.bootstrap import LEVEL

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


def medians(effect_SN: np.ndarray, level: float = LEVEL) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The median of each head, and its interval between two order statistics, (N,) each; NaN for null.

    The k-th smallest and the k-th largest of n, k as large as 2 P(Binomial(n, 1/2) < k) <= 1 - level allows: at least
    that level for any distribution, of each head alone. Under 6 texts no two reach 95 %.
    """
    sorted_SN, count_N = np.sort(effect_SN, axis=0), (~np.isnan(effect_SN)).sum(0)  # NaN is sorted last
    median_N, low_N, high_N = np.full((3, len(count_N)), np.nan)
    for count in np.unique(count_N[count_N > 0]):
        of = count_N == count
        median_N[of] = (sorted_SN[(count - 1) // 2, of] + sorted_SN[count // 2, of]) / 2
        at_least = binomial_tail(np.arange(count + 1), np.full(count + 1, count))
        place = int((2 * at_least[::-1] <= 1 - level).sum())  # at_least[n - k]: k or fewer of n
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
    ranks = [((one[:, None] > one) + (one[:, None] == one) / 2).sum(1) for one in (first_N, second_N)]
    with np.errstate(invalid="ignore"):
        return float(np.corrcoef(*ranks)[0, 1])
