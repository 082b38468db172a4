"""Which interval a mean gets: resampled, of a mass by its bound, or with an open end.

Shapes: S sequence, N head.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from attnscope.study.statistics.bootstrap import DRAWS, LEVEL, bootstrap_widths
from attnscope.study.statistics.bounds import few_show, mass_ends, mass_p, open_ends

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
    level: float = LEVEL,
    at_once: bool = True,
) -> Intervals:
    """The intervals of mean scores less their nulls: (S, N) of the same sequences, or (N,) known numbers.

    there_SN: which sequences a head has, all without it. within: the range of one score, which a mass has. p is the
    smallest level at which the interval of all heads at once excludes 0; there is none where the end towards 0 is open,
    or of resampled heads under `fewest_for_p`.
    """
    difference_SN, heads = score_SN - null, score_SN.shape[1]
    count_N = np.full(heads, len(score_SN)) if there_SN is None else there_SN.sum(0)
    found = Intervals(*np.full((5, heads), np.nan))
    # Of fewer sequences no interval holds its level.
    enough = np.flatnonzero(count_N >= FEWEST)
    if not len(enough):
        return found
    here_SN = None if there_SN is None or there_SN[:, enough].all() else there_SN[:, enough]
    known_SN = difference_SN[:, enough]
    widths = bootstrap_widths(known_SN, generator, there_SN=here_SN, draws=draws, level=level, at_once=at_once)
    whole_SN = known_SN if here_SN is None else np.where(here_SN, known_SN, 0.0)
    mean_N = whole_SN.sum(0) / count_N[enough]
    found.low[enough], found.high[enough] = mean_N - widths.own, mean_N + widths.own
    found.low_all[enough], found.high_all[enough] = mean_N - widths.all_heads, mean_N + widths.all_heads
    found.p[enough] = np.where(count_N[enough] >= fewest_for_p(heads), widths.p, np.nan)
    # Where few sequences carry the spread, resampling does not know how far the mean may be off.
    if within is None:
        off_SN = np.where(widths.own > 0, known_SN - mean_N, 0.0)
        low_N, high_N = open_ends(off_SN if here_SN is None else np.where(here_SN, off_SN, 0.0))
        _open(found, enough, low_N, high_N, mean_N)
    else:
        _bounded(found, score_SN, null, within, 1 - level, at_once=at_once)
    return found


def _open(found: Intervals, places: np.ndarray, low_N: np.ndarray, high_N: np.ndarray, mean_N: np.ndarray) -> None:
    """Open ends are NaN, and so is p where the end between the mean and 0 is open: nothing decides there.

    low_N, high_N: whether an end is open, of the heads at these places.
    """
    for end, open_N in ((found.low, low_N), (found.low_all, low_N), (found.high, high_N), (found.high_all, high_N)):
        end[places[open_N]] = np.nan
    found.p[places[np.where(mean_N > 0, low_N, high_N)]] = np.nan


def _bounded(
    found: Intervals, score_SN: np.ndarray, null: np.ndarray, within: Range, error: float, *, at_once: bool
) -> None:
    """The ends and p of masses whose spread few sequences carry are those of the bound."""
    least, size = within[0], within[1] - within[0]
    varies, heads = null.ndim > 1, score_SN.shape[1]
    share_SN, null_share = ((np.asarray(one) - least) / size for one in (score_SN, null))
    few = np.flatnonzero(few_show(share_SN, null_share if varies else None))
    if varies:  # a difference is in [-1, 1]
        mass_SN, zero_N, size = (1 + share_SN[:, few] - null_share[:, few]) / 2, np.full(len(few), 0.5), 2 * size
    else:
        mass_SN, zero_N = share_SN[:, few], np.broadcast_to(null_share, heads)[few]
    mass_SN = np.clip(mass_SN, 0, 1)  # rounding leaves a row's mass beside 1
    for low_N, high_N, of in ((found.low, found.high, 1), (found.low_all, found.high_all, heads)):
        if of == 1 or at_once:
            low_N[few], high_N[few] = ((end - zero_N) * size for end in mass_ends(mass_SN, error / of))
    if at_once:
        found.p[few] = np.minimum(1.0, heads * mass_p(mass_SN, zero_N))
