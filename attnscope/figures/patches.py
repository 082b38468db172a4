"""patching.png: effects of patches by layer or position as lines, by layer and position as two grids.

Shapes: N patch, L layer, P position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnscope.figures import layout
from attnscope.figures.colours import DARK_INK, cell_number, cmap_of
from attnscope.figures.fonts import fonts_for, isolated, shown_text
from attnscope.figures.intervals import drawn_ends
from attnscope.figures.style import DPI, Style
from attnscope.figures.writer import drawing, px, save_figure

BLUE, ORANGE, *_ = sns.color_palette("colorblind").as_hex()
SMALL = 0.1  # of what is lost: what is gained is drawn as 0 is
WIDE_PX, HIGH_PX, STEP_PX, CELL_PX, LEAST_CELL_PX, MOST_PX = 560, 280, 22, 34, 4, 1600
LEFT_PX, RIGHT_PX, NAMES_PX, TITLE_PX, HEAD_PX, EDGE_PX = 64, 90, 84, 38, 28, 14
NAME_SIZE, MARK_SIZE, TITLE_SIZE, VALUE_SIZE = 10.5, 8.0, 13.0, 6.0
MOST_NAMED = 60  # columns with names below
LONGEST, MOST_PRINTED = "-0.53", 400  # number of a cell; cells with numbers


@dataclass(frozen=True)
class Lines:
    """Effects in the model's or the text's order. series: by name (N,) and their ends (2, N), NaN for none. axis: what
    the names are."""

    names: Sequence[str]
    series: Mapping[str, tuple[np.ndarray, np.ndarray]]
    unit: str
    axis: str


@dataclass(frozen=True)
class Grid:
    """Effects of layers by positions, (L, P) by name."""

    layers: Sequence[str]
    names: Sequence[str]
    panels: Mapping[str, np.ndarray]
    unit: str


def save_lines(path: Path, lines: Lines, style: Style, title: str) -> Path:
    """Write the lines. Raises UsageError for a folder that cannot be written."""
    with drawing(fonts_for([title, style.about.line, *lines.names])):
        return save_figure(lines_figure(lines, style, title), path, style)


def save_grid(path: Path, grid: Grid, style: Style, title: str) -> Path:
    """Write the grids. Raises UsageError for a folder that cannot be written."""
    with drawing(fonts_for([title, style.about.line, *grid.names])):
        return save_figure(grid_figure(grid, style, title), path, style)


def lines_figure(lines: Lines, style: Style, title: str) -> Figure:
    """A line per series; to be called within `writer.drawing`."""
    count = len(lines.names)
    wide = min(max(WIDE_PX, STEP_PX * min(count, MOST_NAMED) + LEFT_PX), _room(style))
    above, below = HEAD_PX + TITLE_PX * style.titled, NAMES_PX + TITLE_PX * style.captioned
    figure, ax = _sheet(wide, HIGH_PX + above + below)
    for (name, (value_N, ends_2N)), colour in zip(lines.series.items(), (BLUE, ORANGE), strict=False):
        if np.isfinite(ends_2N).any():
            ax.fill_between(range(count), *drawn_ends(value_N, *ends_2N), color=colour, alpha=0.2, linewidth=0)
        ax.plot(range(count), value_N, "o-", color=colour, markersize=4, linewidth=1.5, label=name)
    ax.axhline(0, color=DARK_INK, linewidth=0.8)
    _name_columns(ax, lines.names, 0.0)
    ax.set_xlabel(lines.axis, fontsize=NAME_SIZE)
    ax.set_ylabel(lines.unit, fontsize=NAME_SIZE)
    ax.tick_params(axis="y", labelsize=MARK_SIZE)
    ax.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    ax.legend(fontsize=MARK_SIZE, frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    sns.despine(ax=ax)
    return _said(figure, style, title, (LEFT_PX, 20, above, below))


def grid_figure(grid: Grid, style: Style, title: str) -> Figure:
    """Two grids of one scale, one below the other; to be called within `writer.drawing`."""
    count, wide_room = len(grid.names), _room(style) - LEFT_PX - RIGHT_PX
    cell = float(np.clip(wide_room / count, LEAST_CELL_PX, CELL_PX))
    wide, high = max(cell * count, 200.0), max(min(cell, 24.0) * len(grid.layers), 60.0)
    above, below = TITLE_PX * style.titled, NAMES_PX + TITLE_PX * style.captioned
    whole = above + below + len(grid.panels) * (high + HEAD_PX)
    figure, first = _sheet(wide + LEFT_PX + RIGHT_PX, whole)
    first.remove()
    values = np.concatenate([np.ravel(one) for one in grid.panels.values()])
    low, high_value = min(0.0, np.nanmin(values)), max(0.0, np.nanmax(values))
    signed, end = -low > SMALL * high_value, max(-low, high_value) or 1.0
    cmap = cmap_of(style, "logit" if signed else "weight")
    scale = {"vmin": -end if signed else 0.0, "vmax": end, "cmap": cmap}
    points = min(VALUE_SIZE, px(0.85 * cell) / (len(LONGEST) * layout.NUMBER_LETTER))
    printed = points >= layout.LEAST_NUMBER and len(grid.layers) * count <= MOST_PRINTED
    for number, (name, value_LP) in enumerate(grid.panels.items()):
        said = np.array([[cell_number(value, style) for value in value_P] for value_P in value_LP])
        top = above + HEAD_PX + number * (high + HEAD_PX)
        box = LEFT_PX / _wide(figure), 1 - (top + high) / whole, wide / _wide(figure), high / whole
        bar_box = (LEFT_PX + wide + 12) / _wide(figure), box[1], 10 / _wide(figure), box[3]
        ax, bar = figure.add_axes(box), figure.add_axes(bar_box)
        sns.heatmap(
            value_LP,
            ax=ax,
            cbar_ax=bar,
            annot=said if printed else False,
            fmt="",
            annot_kws={"size": points},
            linewidths=0.3,
            **scale,
        )
        for number_text in ax.texts:
            number_text.set_label(layout.NUMBER)
        bar.set_ylabel(grid.unit, fontsize=MARK_SIZE)
        bar.tick_params(labelsize=MARK_SIZE)
        ax.set_title(name, fontsize=NAME_SIZE, loc="left", pad=5)
        step = 1 + (len(grid.layers) - 1) // max(1, int(high / 11))
        ax.set_yticks(np.arange(0, len(grid.layers), step) + 0.5, grid.layers[::step], fontsize=MARK_SIZE, rotation=0)
        if number == len(grid.panels) - 1:
            _name_columns(ax, grid.names, 0.5)
        else:
            ax.set_xticks([])
    return _said(figure, style, title)


def _room(style: Style) -> float:
    """The pixels that a picture may be wide."""
    return float(MOST_PX if style.inches is None else style.inches * DPI)


def _sheet(wide: float, high: float) -> tuple[Figure, Axes]:
    figure = layout.new_figure()
    figure.set_size_inches(wide / DPI, high / DPI)
    return figure, figure.subplots()


def _wide(figure: Figure) -> float:
    return float(figure.get_size_inches()[0] * DPI)


def _name_columns(ax: Axes, names: Sequence[str], middle: float) -> None:
    """Names below the columns, as many as have room."""
    step = 1 + (len(names) - 1) // MOST_NAMED
    said = [isolated(shown_text(name)) for name in names[::step]]
    ax.set_xticks(np.arange(0, len(names), step) + middle, said, fontsize=MARK_SIZE, rotation=90)


def _said(figure: Figure, style: Style, title: str, margins: tuple[float, float, float, float] | None = None) -> Figure:
    """Title and caption; margins: left, right, above, below, in pixels."""
    wide, high = (float(one * DPI) for one in figure.get_size_inches())
    if style.titled:
        figure.text(EDGE_PX / wide, 1 - 10 / high, title, fontsize=TITLE_SIZE, va="top")
    if style.captioned:
        line = style.about.line
        figure.text(EDGE_PX / wide, 8 / high, line, fontsize=layout.NOTE_SIZE, color=layout.NOTE_COLOUR)
    layout.in_print(figure, style)
    if margins is not None:
        left, right, above, below = margins
        figure.subplots_adjust(left=left / wide, right=1 - right / wide, top=1 - above / high, bottom=below / high)
    return figure
