"""Means over sequences or texts, alone and paired: effect, interval and family-wise p of every head.

The unit is a sequence or a text, never a row: rows of one text are not independent.

    result = paired(score_SN, null_SN, within=(0, 1))
    result.effect, result.low, result.high, result.p   # (N,) each
    result = means(score_SN, within=(0, 1))
    result.mean, result.low, result.high, result.n
    effect_columns(effect_SN)                           # the columns of a study's table
    ratios(effect_SN, gap_S).low                        # of shares
    beside_random(effect, random_D)                     # of a set among random ones: their range, and p

`intervals` says which interval a mean gets: `bootstrap` resamples, `bounds` has the bound for masses and the open ends
of values without a range. `flips` tests symmetry, `counts` has what goes by signs and order, `ratios` shares.
docs/statistics.md derives them.
"""

from attnscope.study.statistics.counts import beside_random, largest_first, largest_of, rank_correlation
from attnscope.study.statistics.effects import Effects, effect_columns, paired
from attnscope.study.statistics.intervals import FEWEST, SHARE, Range, fewest_for_p
from attnscope.study.statistics.means import Means, means
from attnscope.study.statistics.ratios import Ratios, ratios

__all__ = [
    "FEWEST",
    "SHARE",
    "Effects",
    "Means",
    "Range",
    "Ratios",
    "beside_random",
    "effect_columns",
    "fewest_for_p",
    "largest_first",
    "largest_of",
    "means",
    "paired",
    "rank_correlation",
    "ratios",
]
