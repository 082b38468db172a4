"""Means over sequences or texts, alone and paired: effect, interval and family-wise p of every head.

The unit is a sequence or a text, never a row: rows of one text are not independent.

    found = paired(score_SN, null_SN)
    found.effect, found.low, found.high, found.p       # (N,) each
    found = means(score_SN)
    found.mean, found.low, found.high, found.n

An interval is the mean plus or minus the larger of two widths, derived in docs/atlas.md:

- c standard errors, c the quantile of the largest |t| over resamples of the sequences;
- a margin for what so few sequences need not show: share * reach. An event rarer than `share` can be absent from all
  sequences; reach is how far the farthest sequence lies from the mean, or `span` where all are equal.

Shapes: S sequence, N head, B draw.
"""

from attnscope.study.statistics.bootstrap import FEWEST
from attnscope.study.statistics.effects import Effects, effect_columns, paired
from attnscope.study.statistics.means import Means, means
from attnscope.study.statistics.ranks import largest_of, rank_correlation

__all__ = ["FEWEST", "Effects", "Means", "effect_columns", "largest_of", "means", "paired", "rank_correlation"]
