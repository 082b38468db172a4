"""Effects with intervals in a table, and lines under it: which ends are open, and why p may be missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from attnscope import cells

if TYPE_CHECKING:
    import numpy as np


Names = tuple[str, str, str]
EFFECT: Names = ("effect", "low_all", "high_all")


def with_interval(row: Mapping[str, Any], names: Names = EFFECT, of: Callable[[Any], str] = cells.effect) -> str:
    """`+0.250 [0.200, 0.300]`: a mean and its interval, of as many digits; the mean alone of too few texts.

    row: of a study's table. names: its columns of the mean and of both ends. of: how the mean is printed: nats and
    logits with three decimals, masses and shares with two.
    """
    from attnscope.study.statistics import FEWEST

    value, low, high = map(row.__getitem__, names)
    return f"{of(value)} {cells.interval(low, high, of)}" if row["n"] >= FEWEST else of(value)


def interval_notes(statistics: Mapping[str, np.ndarray], units: str = "texts") -> list[str]:
    """A line where several texts are too few for intervals, where ends are open, and where too few texts leave no p.

    statistics: the columns of `effect_columns`. units: what effects were measured on.
    """
    import numpy as np

    from attnscope.study.statistics import FEWEST, fewest_for_p

    count_N, least = statistics["n"], fewest_for_p(len(statistics["n"]))
    enough_N = count_N >= FEWEST
    if not enough_N.any():
        return [f"no intervals: they need {FEWEST} {units}"] * int(count_N.max(initial=0) > 1)
    rows, ends = f"{int(enough_N.sum())} effects", np.isnan([statistics["low_all"], statistics["high_all"]])
    lines, opened = [], int((ends.any(0) & enough_N).sum())
    if opened:
        lines.append(f"{open_line(opened, rows, units)}; the written table has the median and its interval")
    if (enough_N & (count_N < least) & np.isnan(statistics["p"])).any():
        lines.append(f"no p under {least} {units}: it is of all {len(count_N)} effects at once")
    return lines


def open_line(opened: int, rows: str, units: str = "texts") -> str:
    """How many of some rows, as `24 effects`, have an interval with an open end, and why."""
    have = "has an open end" if opened == 1 else "have an open end"
    return f"{opened} of {rows} {have} ({cells.MISSING}): too few {units} carry the spread to bound the mean there"
