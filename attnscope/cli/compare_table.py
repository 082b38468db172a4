"""Compared heads as a person sees them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from attnscope.cli import output
from attnscope.cli.heads_table import Column
from attnscope.measure.metrics import METRICS
from attnscope.study.statistics import FEWEST

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from attnscope.study.comparison import Comparison

SHOWN = ("previous_token", "induction", "sink", "entropy")  # metrics whose difference stands in the table


def rendered(found: Comparison, places: Sequence[int]) -> RichTable:
    """The heads by divergence: as much of lost mass and of some metrics' differences as the terminal has room for."""
    sheet, columns = output.sheet(), _columns(found, places)
    heads = Column("head", [found.name(place) for place in places])
    used = accumulate(column.width for column in (heads, *columns))
    shown = [column for column, width in zip((heads, *columns), used, strict=True) if width <= output.width()]
    for column in shown:
        sheet.add_column(column.title, justify="left" if column is heads else "right", no_wrap=True)
    for cells in zip(*(column.cells for column in shown), strict=True):
        sheet.add_row(*cells)
    return sheet


def _columns(found: Comparison, places: Sequence[int]) -> list[Column]:
    js, interval = found.js, found.texts >= FEWEST
    said = [
        _bits(js.effect[place]) + f" [{_bits(js.low[place])}, {_bits(js.high[place])}]" * interval for place in places
    ]
    columns = [Column("JS bits" + " [95 %]" * interval, said)]
    if found.lost_SN.any() or found.other_lost_SN.any():
        for title, lost_SN in (("lost", found.lost_SN), ("lost, other", found.other_lost_SN)):
            lost = [lost_SN[:, place].mean() for place in places]
            columns.append(Column(title, ["-" if math.isnan(one) else f"{one:.2f}" for one in lost]))
    for name in SHOWN:
        difference = found.metric(name).effect
        columns.append(Column(f"Δ {METRICS[name].short}", [_signed(difference[place]) for place in places]))
    return columns


def _bits(value: float) -> str:
    if math.isnan(value) or value == 0:
        return "0" if value == 0 else "-"
    return f"{value:.4f}" if value >= 1e-3 else f"{value:.1e}"


def _signed(value: float) -> str:
    return f"{value:+.2f}" if value == value else "-"
