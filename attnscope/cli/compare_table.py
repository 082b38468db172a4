"""Compared heads as a person sees them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from attnscope.cli.intervals import Effect
from attnscope.metrics.metrics import METRICS
from attnscope.studies.statistics import FEWEST
from attnscope.utils import display as cells
from attnscope.utils.display import Column, Sheet

if TYPE_CHECKING:
    from attnscope.studies.comparison import Comparison

SHOWN = ("previous_token", "induction", "sink", "entropy")  # metrics whose difference is in the table


def differences_sheet(found: Comparison, places: Sequence[int], width: int) -> Sheet:
    """The heads by divergence: as much of lost mass and of some metrics' differences as so many characters hold."""
    rows = [
        {
            "head": found.name(place),
            **{name: values[place] for name, values in vars(found.js).items()},
            "lost": found.lost_SN[:, place].mean(),
            "lost, other": found.other_lost_SN[:, place].mean(),
            **{name: found.metric(name).effect[place] for name in SHOWN},
        }
        for place in places
    ]
    divergence = Effect(
        "JS bits" + " [95 %]" * (found.texts >= FEWEST), cells.divergence, align="right", ends=("low", "high")
    )
    losses = [Column("lost", cells.number), Column("lost, other", cells.number)]
    columns = [
        Column("head", align="left"),
        divergence,
        *losses * bool(found.lost_SN.any() or found.other_lost_SN.any()),
        *(Column(f"Δ {METRICS[name].short}", cells.signed, name) for name in SHOWN),
    ]
    ends = accumulate(column.width(rows) for column in columns)
    return Sheet(rows, [column for column, end in zip(columns, ends, strict=True) if end <= width])
