"""Effects: scores compared with nulls, sequence by sequence, and what many texts show of many heads.

Shapes: S sequence or text, N head.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attnscope.study.statistics.bootstrap import DRAWS, LEVEL
from attnscope.study.statistics.counts import medians, positive_share
from attnscope.study.statistics.flips import FLIPS, symmetric_p, t_of
from attnscope.study.statistics.intervals import FEWEST, Range, intervals


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
    level: float = LEVEL,
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
    ends = intervals(score_SN, null, generator, within=within, draws=draws, level=level)
    return Effects(
        score=spread(score_SN.mean(0)),
        null=spread(null.mean(0) if null.ndim > 1 else null),
        effect=spread(known_SN.mean(0)),
        **{name: spread(values) for name, values in ends._asdict().items()},
        p_symmetric=spread(p_symmetric_N),
        t=spread(t_N),
        n=np.where(there, len(difference_SN), 0),
    )


def effect_columns(effect_SN: np.ndarray, *, seed: int = 0) -> dict[str, np.ndarray]:
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
    count_N, generator = there_SN.sum(0), np.random.default_rng(seed)
    whole_SN = np.where(there_SN, effect_SN, 0.0)
    with np.errstate(invalid="ignore"):
        mean_N = whole_SN.sum(0) / np.where(count_N > 0, count_N, np.nan)
    p_symmetric_N, enough = np.full(len(count_N), np.nan), count_N >= FEWEST
    p_symmetric_N[enough] = symmetric_p(whole_SN[:, enough], FLIPS, generator, count_N[enough])
    ends = intervals(whole_SN, np.zeros(len(count_N)), generator, there_SN=there_SN)
    positive_N, p_positive_N = positive_share(effect_SN)
    median_N, median_low_N, median_high_N = medians(effect_SN)
    return {
        "effect": mean_N,
        **ends._asdict(),
        "p_symmetric": p_symmetric_N,
        "positive": positive_N,
        "p_positive": p_positive_N,
        "median": median_N,
        "median_low": median_low_N,
        "median_high": median_high_N,
        "n": count_N,
    }
