"""Means over sequences or texts, each by itself.

Shapes: S sequence, N head.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attnscope.study.statistics.bootstrap import AT_ONCE, DRAWS, LEVEL
from attnscope.study.statistics.intervals import Range, intervals

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
    level: float = LEVEL,
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
            ends = intervals(
                known_SN,
                np.zeros(len(some)),
                np.random.default_rng(seed),
                within=within,
                draws=draws,
                level=level,
                at_once=False,
            )
            low_N[some], high_N[some] = ends.low, ends.high
    return Means(mean_N, low_N, high_N, there_SN.sum(0))
