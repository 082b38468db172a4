"""Sizes in pixels that keep a picture readable from 2 to 1,000 tokens.

Cells are whole pixels, so that none is drawn wider than its neighbour. Q query, K key.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from attnscope.figures.fonts import shown_label
from attnscope.figures.writer import DPI, px

NAME_SIZE, NOTE_SIZE, NOTE_COLOUR = 10.0, 9.0, "#555555"  # of an axis' name; of the lines beside a title
MAP_PX = 840
LARGEST_CELL, SMALLEST_CELL = 72, 1
SMALLEST_LABEL = 7.0  # points
LARGEST_LABEL = 11.0
STEPS = (1, 2, 5, 10, 20, 25, 50, 100, 200, 500, 1000)


def cell_size(queries: int, keys: int) -> tuple[int, int]:
    """Width and height of a cell: square, unless one side has far more cells than the other."""
    if max(queries, keys) <= 2 * min(queries, keys):
        side = _cell(max(queries, keys))
        return side, side
    wide, high = _cell(keys), _cell(queries)
    return min(wide, 4 * high), min(high, 4 * wide)


def _cell(count: int) -> int:
    return max(SMALLEST_CELL, min(LARGEST_CELL, MAP_PX // count))


def label_size(cell: float) -> float:
    """Points that fit a cell of so many pixels."""
    return max(SMALLEST_LABEL, min(LARGEST_LABEL, px(0.85 * cell)))


def number_size(cell: float) -> float:
    """Points at which "0.53" fits into a cell of so many pixels."""
    return max(3.0, min(10.0, 10 * (cell - 6) / 44))


def label_step(cell: float, needed: float) -> int:
    """Every how many cells a label that needs so many pixels has room; a round number."""
    least = math.ceil(needed / cell)
    return next((step for step in STEPS if step >= least), least)


def line_px(points: float) -> float:
    """Pixels that one line of text takes."""
    return points / px(1) * 1.15


def put_tokens(ax: Axes, side: str, labels: Sequence[str], cell: float) -> int:
    """Token labels along one side ("x" or "y") of a map; returns the step between labels."""
    size = label_size(cell)
    step = label_step(cell, line_px(size))
    places = [index + 0.5 for index in range(0, len(labels), step)]
    axis = ax.xaxis if side == "x" else ax.yaxis
    axis.set_ticks(places, [shown_label(label) for label in labels[::step]], fontsize=size, rotation=0)
    return step


def turn(texts: Sequence[Text], room: float) -> None:
    """Labels below a map: level where they fit side by side, slanted for a few, upright for many."""
    if extent(texts)[0] <= room - 4:
        return
    for text in texts:
        if room >= 1.6 * line_px(float(text.get_fontsize())):
            text.set(rotation=45, ha="right", rotation_mode="anchor")
        else:
            text.set(rotation=90)


def axis_name(name: str, step: int) -> str:
    """`key`, or `key (every 5th labelled)`."""
    return name if step == 1 else f"{name} (every {step}{'nd' if step == 2 else 'th'} labelled)"


def extent(texts: Sequence[Text]) -> tuple[float, float]:
    """Width and height in pixels of the largest of the texts."""
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    return max((box.width for box in boxes), default=0.0), max((box.height for box in boxes), default=0.0)


def axis_room(labels: Sequence[Text], name_size: float, gap: float) -> tuple[float, float]:
    """Pixels that tick labels, the name of their axis and a gap take: beside a panel, and below it."""
    wide, high = extent(labels)
    more = line_px(name_size) + gap
    return wide + more, high + more


@dataclass(frozen=True)
class Frame:
    """Panels of one size, each with its colour bar at its right; all in pixels.

    left, top: of the first panel, from the figure's upper left corner. size: width and height of a panel. bar: its
    gap to the panel, width and height. right, below: what the last panel needs for bar, labels and notes. edge: blank
    margin at the right and the bottom. Panels fill `columns` row by row, `pitch` (across, down) apart.
    """

    left: float
    top: float
    size: tuple[float, float]
    bar: tuple[float, float, float]
    right: float
    below: float
    edge: float
    columns: int = 1
    pitch: tuple[float, float] = (0, 0)

    def corner(self, index: int) -> tuple[float, float]:
        """Left and top of a panel."""
        row, column = divmod(index, self.columns)
        return self.left + column * self.pitch[0], self.top + row * self.pitch[1]


def frame(figure: Figure, panels: Sequence[tuple[Axes, Axes]], plan: Frame, words: float = 0) -> None:
    """Size the figure to its panels (map, colour bar) and to a line of `words` pixels, and put the panels in place."""
    (wide, high), (gap, bar_wide, bar_high) = plan.size, plan.bar
    last_left, last_top = plan.corner(min(plan.columns, len(panels)) - 1)[0], plan.corner(len(panels) - 1)[1]
    width = max(last_left + wide + plan.right, plan.left + words) + plan.edge
    _resize(figure, width, last_top + max(high + plan.below, bar_high) + plan.edge)
    for index, (ax, bar_ax) in enumerate(panels):
        left, top = plan.corner(index)
        place(figure, ax, (left, top, wide, high))
        place(figure, bar_ax, (left + wide + gap, top, bar_wide, bar_high))


def new_figure() -> Figure:
    """A figure to be filled and then framed; no window knows of it."""
    figure = Figure(dpi=DPI)
    FigureCanvasAgg(figure)
    return figure


def new_panel(figure: Figure) -> tuple[Axes, Axes]:
    """Axes for a map and its colour bar, still to be placed; labels can be measured in them."""
    return figure.add_axes((0.1, 0.1, 0.7, 0.7)), figure.add_axes((0.9, 0.1, 0.02, 0.8))


def place(figure: Figure, ax: Axes, box: tuple[float, float, float, float]) -> None:
    """Put axes at (left, top, width, height) pixels, counted from the figure's upper left corner."""
    width, height = figure.get_size_inches() * figure.dpi
    left, top, wide, high = box
    ax.set_position((left / width, 1 - (top + high) / height, wide / width, high / height))


def _resize(figure: Figure, width: float, height: float) -> None:
    """Whole pixels, so that cells stay aligned with them."""
    figure.set_size_inches(math.ceil(width) / figure.dpi, math.ceil(height) / figure.dpi)


def put_words(figure: Figure, text: Text, left: float, baseline: float) -> None:
    """Put a figure's text at pixels counted from the upper left corner."""
    width, height = figure.get_size_inches() * figure.dpi
    text.set_position((left / width, 1 - baseline / height))


def put_title(figure: Figure, title: Text, left: float, edge: float) -> None:
    """Put the title below the upper margin."""
    put_words(figure, title, left, edge + line_px(float(title.get_fontsize())) * 0.8)
