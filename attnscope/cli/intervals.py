"""Effects with intervals in a sheet, and lines under it: which ends are open, and why p may be missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from attnscope.utils import display as cells
from attnscope.utils.display import Column, Row

if TYPE_CHECKING:
    import numpy as np

ALL_AT_ONCE = ("low_all", "high_all")


@dataclass(frozen=True)
class Effect(Column):
    """`+0.250 [0.200, 0.300]`: a mean and its interval, of as many digits; the mean alone of too few texts.

    ends: the names of the interval's ends in a study's table. format: of the mean: nats and logits have three decimals,
    masses and shares two.
    """

    format: Callable[[Any], str] = cells.effect
    name: str = "effect"
    align: Literal["left", "right"] = "left"
    ends: tuple[str, str] = ALL_AT_ONCE

    def cell(self, row: Row) -> str:
        """Mean and interval; a text stays as it is."""
        from attnscope.studies.statistics import FEWEST

        mean = super().cell(row)
        if isinstance(row.get(self.key, ""), str) or row["n"] < FEWEST:
            return mean
        low, high = (row[end] for end in self.ends)
        return f"{mean} {cells.interval(low, high, self.format)}"


def effects(title: str, count: int, intervals: bool, ends: tuple[str, str] = ALL_AT_ONCE) -> Effect:
    """A column of so many effects; without intervals they are aligned as numbers are."""
    if not intervals:
        return Effect(title, name=title, align="right", ends=ends)
    return Effect(f"{title} [95 %{f', all {count}' * (count > 1)}]", name=title, ends=ends)


def with_interval(row: Row) -> str:
    """An effect and its interval in a line of words."""
    return Effect("").cell(row)


def interval_notes(statistics: Mapping[str, np.ndarray], units: str = "texts") -> list[str]:
    """A line where several texts are too few for intervals, where ends are open, and where too few texts leave no p.

    statistics: the columns of `effect_columns`. units: what effects were measured on.
    """
    import numpy as np

    from attnscope.studies.statistics import FEWEST, fewest_for_p

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
