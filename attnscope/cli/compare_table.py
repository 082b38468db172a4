"""Compared heads as a person sees them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from attnscope import cells
from attnscope.cli import output
from attnscope.cli.heads_table import Column
from attnscope.cli.intervals import with_interval
from attnscope.measure.metrics import METRICS
from attnscope.study.statistics import FEWEST

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from attnscope.study.comparison import Comparison

SHOWN = ("previous_token", "induction", "sink", "entropy")  # metrics whose difference stands in the table


def differences_sheet(found: Comparison, places: Sequence[int]) -> RichTable:
    """The heads by divergence: as much of lost mass and of some metrics' differences as the terminal has room for."""
    sheet, columns = output.sheet(), _columns(found, places)
    heads = Column("head", [found.name(place) for place in places])
    used = accumulate(column.width for column in (heads, *columns))
    shown = [column for column, width in zip((heads, *columns), used, strict=True) if width <= output.width()]
    for column in shown:
        sheet.add_column(column.title, justify="left" if column is heads else "right", no_wrap=True)
    for row in zip(*(column.cells for column in shown), strict=True):
        sheet.add_row(*row)
    return sheet


def _columns(found: Comparison, places: Sequence[int]) -> list[Column]:
    rows = ({name: values[place] for name, values in vars(found.js).items()} for place in places)
    said = [with_interval(row, ("effect", "low", "high"), cells.divergence) for row in rows]
    columns = [Column("JS bits" + " [95 %]" * (found.texts >= FEWEST), said)]
    if found.lost_SN.any() or found.other_lost_SN.any():
        for title, lost_SN in (("lost", found.lost_SN), ("lost, other", found.other_lost_SN)):
            columns.append(Column(title, [cells.number(lost_SN[:, place].mean()) for place in places]))
    for name in SHOWN:
        difference = found.metric(name).effect
        columns.append(Column(f"Δ {METRICS[name].short}", [cells.signed(difference[place]) for place in places]))
    return columns
