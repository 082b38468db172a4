"""Effects: scores held against nulls, sequence by sequence, and what many texts show of many heads.

Shapes: S sequence, N head.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attnscope.study.statistics.bootstrap import DRAWS, FEWEST, LEVEL, intervals
from attnscope.study.statistics.flips import FLIPS, family_wise, t_of
from attnscope.study.statistics.means import means


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

    mean_N, t_N = known_SN.mean(0), t_of(known_SN.mean(0), (known_SN**2).mean(0), len(known_SN))
    ends = intervals(known_SN, draws, level, span, generator)
    return Effects(
        score=spread(np.asarray(score_SN, np.float64)[:, there].mean(0)),
        null=spread(np.asarray(null_SN, np.float64)[:, there].mean(0)),
        effect=spread(mean_N),
        low=spread(ends[0]),
        high=spread(ends[1]),
        low_all=spread(ends[2]),
        high_all=spread(ends[3]),
        p=spread(family_wise(known_SN, np.abs(t_N), flips, generator)),
        t=spread(t_N),
        n=np.where(there, len(difference_SN), 0),
    )


def effect_columns(effect_SN: np.ndarray) -> dict[str, np.ndarray]:
    """Of N effects of S texts: effect, low, high, p (NaN for null), and n, the texts behind it; (N,) each.

    An effect that some texts lack (NaN) has no p, which is over all effects at once; nor has any under FEWEST texts.
    """
    found, p_N = means(effect_SN, span=0.0), np.full(effect_SN.shape[1], np.nan)
    whole_N = ~np.isnan(effect_SN).any(0)
    if len(effect_SN) >= FEWEST and whole_N.any():
        p_N[whole_N] = paired(effect_SN[:, whole_N], np.zeros_like(effect_SN[:, whole_N]), span=0.0).p
    return {"effect": found.mean, "low": found.low, "high": found.high, "p": p_N, "n": found.n}
