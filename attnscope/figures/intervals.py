"""Intervals with an open end, NaN, as pictures draw them."""

import numpy as np


def drawn_ends(value_N: np.ndarray, low_N: np.ndarray, high_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ends that are drawn of intervals around values, (N,) each: an open end is drawn no farther than its value.

    Where both are NaN there is nothing to draw.

        >>> drawn_ends(np.array([2.0]), np.array([1.5]), np.array([np.nan]))
        (array([1.5]), array([2.]))
    """
    nothing_N = np.isnan(low_N) & np.isnan(high_N)
    low_N, high_N = (np.where(np.isnan(end_N) & ~nothing_N, value_N, end_N) for end_N in (low_N, high_N))
    return low_N, high_N
