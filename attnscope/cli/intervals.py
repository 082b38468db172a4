"""What lines say beside a table of effects with intervals: which ends are open, and why p may be missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attnscope.cells import MISSING

if TYPE_CHECKING:
    import numpy as np


def interval_notes(statistics: Mapping[str, np.ndarray], units: str = "texts") -> list[str]:
    """A line where effects lack an end of their interval, and one where they lack p for want of texts.

    statistics: the columns of `effect_columns`. units: what effects were measured on.
    """
    import numpy as np

    from attnscope.study.statistics import FEWEST, fewest_for_p

    count_N, least = statistics["n"], fewest_for_p(len(statistics["n"]))
    enough_N = count_N >= FEWEST
    if not enough_N.any():
        return []
    rows, ends = f"{int(enough_N.sum())} effects", np.isnan([statistics["low_all"], statistics["high_all"]])
    lines, opened = [], int((ends.any(0) & enough_N).sum())
    if opened:
        have = "has an open end" if opened == 1 else "have an open end"
        lines.append(
            f"{opened} of {rows} {have} ({MISSING}): too few {units} carry the spread to bound the mean there; the "
            "written table has the median and its interval"
        )
    if (enough_N & (count_N < least) & np.isnan(statistics["p"])).any():
        lines.append(f"no p under {least} {units}: it is of all {len(count_N)} effects at once")
    return lines
