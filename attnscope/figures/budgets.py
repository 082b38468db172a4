"""budgets_curve.png and budgets.png: what is lost over the share of keys that is kept, or layer by layer.

Shapes: N point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from attnscope.figures import layout
from attnscope.figures.colours import DARK_INK
from attnscope.figures.fonts import fonts_for
from attnscope.figures.intervals import drawn_ends
from attnscope.figures.style import DPI, Style
from attnscope.figures.writer import drawing, save_figure

WIDE_PX, HIGH_PX = 600, 320
LEGEND_PX, TITLE_PX, NAMES_PX = 17, 34, 56  # a line above, the title, below the axes
COLUMNS = 3  # of the legend
NAME_SIZE, MARK_SIZE, TITLE_SIZE = 10.5, 8.0, 13.0
COLOURS = sns.color_palette("colorblind").as_hex()


@dataclass(frozen=True)
class BudgetLine:
    """One line of effects, (N,) each. name: in the legend. x: the share of keys that is kept, or the layer. low, high:
    the intervals, NaN for an open end or none. labels: of the points, empty for none."""

    name: str
    x: np.ndarray
    effect: np.ndarray
    low: np.ndarray
    high: np.ndarray
    labels: Sequence[str] = ()


def save_budget_lines(
    path: Path, lines: Sequence[BudgetLine], style: Style, title: str, *, unit: str, layers: bool = False
) -> Path:
    """Write the lines; layers: whether x is a layer. Raises UsageError for a folder that cannot be written.

    save_budget_lines(Path("curve.png"), [BudgetLine("top", kept, effect, low, high)], Style(), "Cost", unit="nats")
    """
    with drawing(fonts_for([title, style.about.line])):
        return save_figure(budget_lines_figure(lines, style, title, unit=unit, layers=layers), path, style)


def budget_lines_figure(
    lines: Sequence[BudgetLine], style: Style, title: str, *, unit: str, layers: bool = False
) -> Figure:
    """The lines; to be called within `writer.drawing`."""
    wide = min(WIDE_PX, (style.inches or np.inf) * DPI)
    above = LEGEND_PX * (1 + (len(lines) - 1) // COLUMNS) + TITLE_PX * style.titled + 10
    below = NAMES_PX + TITLE_PX * style.captioned
    high = HIGH_PX + above + below
    figure = layout.new_figure()
    figure.set_size_inches(wide / DPI, high / DPI)
    ax = figure.subplots()
    for place, (line, colour) in enumerate(zip(lines, COLOURS * len(lines), strict=False)):
        _draw(ax, line, colour, -9 if place % 2 else 4)
    ax.axhline(0, color=DARK_INK, linewidth=0.8)
    ax.set_ylabel(f"{unit} lost", fontsize=NAME_SIZE)
    ax.set_xlabel("layer" if layers else "share of the keys that is kept", fontsize=NAME_SIZE)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True)) if layers else ax.xaxis.set_major_formatter(
        PercentFormatter(1)
    )
    ax.tick_params(labelsize=MARK_SIZE)
    ax.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    ax.legend(
        fontsize=MARK_SIZE, frameon=False, ncols=COLUMNS, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2
    )
    sns.despine(ax=ax)
    if style.titled:
        figure.text(0.02, 1 - 12 / high, title, fontsize=TITLE_SIZE, va="top")
    if style.captioned:
        figure.text(0.02, 8 / high, style.about.line, fontsize=layout.NOTE_SIZE, color=layout.NOTE_COLOUR)
    layout.in_print(figure, style)
    figure.subplots_adjust(left=70 / wide, right=1 - 40 / wide, top=1 - above / high, bottom=below / high)
    return figure


def _draw(ax: Axes, line: BudgetLine, colour: str, above: int) -> None:
    """The points in the order of x, their intervals, and what each is called; above: by how many points of print."""
    order = np.argsort(line.x, kind="stable")
    x_N, effect_N = line.x[order], line.effect[order]
    ax.plot(x_N, effect_N, "o-", color=colour, markersize=4, linewidth=1.5, label=line.name)
    if np.isfinite([line.low, line.high]).any():
        ax.vlines(x_N, *drawn_ends(effect_N, line.low[order], line.high[order]), color=colour, linewidth=1.2, alpha=0.6)
    for place, at in enumerate(order if line.labels else ()):
        ax.annotate(
            line.labels[at],
            (x_N[place], effect_N[place]),
            xytext=(3, above),
            textcoords="offset points",
            fontsize=MARK_SIZE - 1,
            color=colour,
        )
