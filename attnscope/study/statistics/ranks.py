"""Places and ranks of numbers, NaN left out."""

from __future__ import annotations

import numpy as np


def largest_of(values_N: np.ndarray) -> int:
    """The place of the largest number, NaN left out; 0 where all are NaN.

    >>> largest_of(np.array([np.nan, 1.0, 3.0]))
    2
    """
    return int(np.nan_to_num(values_N, nan=-np.inf).argmax())


def rank_correlation(first_N: np.ndarray, second_N: np.ndarray) -> float:
    """Spearman's: the correlation of the ranks, equal values sharing theirs; NaN where one does not vary.

    >>> rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([2.0, 30.0, 10.0]))
    0.5
    """
    ranks = [((one[:, None] > one) + (one[:, None] == one) / 2).sum(1) for one in (first_N, second_N)]
    with np.errstate(invalid="ignore"):
        return float(np.corrcoef(*ranks)[0, 1])
