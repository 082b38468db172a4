"""What sets of heads cost: a bar each, with its interval and where random sets of the same size lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from attnscope.figures import layout
from attnscope.figures.colours import DARK_INK
from attnscope.figures.fonts import fonts_for, isolated, shown_text
from attnscope.figures.intervals import drawn_ends
from attnscope.figures.style import Style
from attnscope.figures.writer import drawing, px, save_figure
from attnscope.utils.display import printed

EDGE, WIDE_PX, LEAST_PX, ROW_PX, MARK_ROOM, VALUE_ROOM, GAP = 18, 560, 60, 26, 48, 64, 8
HEADING_SIZE, NAME_SIZE, MARK_SIZE = 13.0, 10.0, 9.0
BAR, BAND = "#0072b2", "#808080"  # as roles are coloured: kept apart by colour-blind readers
HIGH, BAND_HIGH = 0.5, 0.86  # of a row
HERE = math.nan, math.nan


@dataclass(frozen=True)
class SetCost:
    """One set: its name, what is lost without it, the ends of its interval, and of where random sets lie; or NaN.

    An interval with one open end, NaN, is drawn from the value to its other end.
    """

    name: str
    value: float
    interval: tuple[float, float] = HERE
    random: tuple[float, float] = HERE


def save_sets(path: Path, costs: Sequence[SetCost], style: Style, *, title: str, note: str, unit: str) -> Path:
    """Write a bar for each set, in this order from above. Raises UsageError for a folder that cannot be written.

    save_sets(Path("sets.png"), [SetCost("induction", 2.5, (2.2, 2.8))], Style(), title="", note="", unit="nats")
    """
    with drawing(fonts_for([style.title, style.about.line, note, *(one.name for one in costs)])):
        figure = layout.fitted(
            lambda room: sets_figure(costs, style, (title, note, unit), room), WIDE_PX, style, lambda built: built
        )
        return save_figure(figure, path, style)


def sets_figure(costs: Sequence[SetCost], style: Style, said: tuple[str, str, str], room: float = WIDE_PX) -> Figure:
    """The picture; to be called within `writer.drawing`. said: title, note, and what the numbers are in."""
    title, note, unit = said
    figure = layout.new_figure()
    ax, beside_ax = layout.new_panel(figure)
    beside_ax.set_axis_off()
    for row, one in enumerate(costs):
        _draw(ax, row, one)
    _axes(ax, costs, unit)
    legend = [("random sets: 99 % of them", BAND)] if any(_known(one.random) for one in costs) else []
    words = layout.Words(figure, (style.headed(title), note, [style.about.line]), HEADING_SIZE, style, legend)
    layout.in_print(figure, style)
    edge = 2 if style.in_print else EDGE
    left = edge + layout.extent(ax.get_yticklabels())[0] + GAP
    plan = layout.Frame(
        left=left,
        top=GAP,
        size=(max(LEAST_PX, room - (left if style.inches else 0)), ROW_PX * len(costs)),
        bar=(0, 1, 1),
        right=VALUE_ROOM,
        below=MARK_ROOM,
        edge=edge,
    )
    layout.frame(figure, [(ax, beside_ax)], plan, words, edge)
    return figure


def _known(ends: tuple[float, float]) -> bool:
    return all(map(math.isfinite, ends))


def _draw(ax: Axes, row: int, one: SetCost) -> None:
    """The band behind, then the bar, then the interval; the number stands beyond whatever reaches farthest."""
    if _known(one.random):
        low, high = one.random
        ax.add_patch(
            Rectangle(
                (low, row - BAND_HIGH / 2), high - low, BAND_HIGH, facecolor=BAND, edgecolor=BAND, linewidth=px(2)
            )
        )
    ax.barh(row, one.value, HIGH, color=BAR, zorder=2)
    low, high = map(float, drawn_ends(np.array(one.value), *map(np.array, one.interval)))
    if math.isfinite(low):
        ax.hlines(row, low, high, color=DARK_INK, linewidth=1.6, zorder=3)
        ax.vlines(one.interval, row - HIGH / 4, row + HIGH / 4, color=DARK_INK, linewidth=1.2, zorder=3)
    ends = [0.0, one.value, *(end for pair in (one.interval, one.random) for end in pair if math.isfinite(end))]
    text = ax.annotate(printed(one.value), (max(ends), row), (px(6), 0), textcoords="offset points", va="center")
    text.set(fontsize=MARK_SIZE, color=DARK_INK, annotation_clip=False)


def _axes(ax: Axes, costs: Sequence[SetCost], unit: str) -> None:
    ax.set_yticks(range(len(costs)), [isolated(shown_text(one.name)) for one in costs], fontsize=NAME_SIZE)
    ax.set_ylim(len(costs) - 0.5, -0.5)
    ax.axvline(0, color="#b0b0b0", linewidth=px(1), zorder=0.5)
    ax.set_xlabel(unit, fontsize=NAME_SIZE)
    ax.tick_params(axis="x", labelsize=MARK_SIZE)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", color="#ececec", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
