"""Sizes in pixels that keep a picture readable from 2 to 1,000 tokens.

Cells are whole pixels, so that none is drawn wider than its neighbour. Q query, K key.

Intervals with an open end, NaN, as pictures draw them.
"""

import math
import re
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from attnscope.figures.fonts import caption, fonts_for, isolated, legible, shown_text, tick_label
from attnscope.figures.style import DPI, Axis, Style
from attnscope.figures.style_sheet import SIZES
from attnscope.figures.writer import drawing, px, save_figure

NAME_SIZE, NOTE_SIZE, NOTE_COLOUR = 10.0, 9.0, "#555555"  # of an axis' name; of the lines beside a title
MAP_PX = 840
WORDS_PX = 440  # room for the words above and below a small map
LETTER = 0.55  # of the font size: what a letter of a line is reckoned at, a little more than the average
FOOT_GAP, FOOT_LINE_PX = 8, 17  # above a foot; from line to line of one below curves
SIGN, SIGN_GAP, ENTRY_GAP = "■", 5, 10  # of a legend
TIED = "\ue000"  # a blank at which no line is broken
LINE = 1.2  # from line to line of a note, in lines
LARGEST_CELL, SMALLEST_CELL = 72, 1
NUMBER = "number"  # the label of a number in a cell
TITLE, HEADING = "figure.titlesize", "axes.titlesize"  # those of a figure's title and of what is above a panel
NUMBER_LETTER, LEAST_NUMBER = 0.6, 5.0  # how wide its letters are for their size; the smallest that is printed
SMALLEST_LABEL = 7.0  # points
LARGEST_LABEL = 11.0
STEPS = (1, 2, 5, 10, 20, 25, 50, 100, 200, 500, 1000)


def cell_size(queries: int, keys: int, room: float = MAP_PX, *, fill: bool = False) -> tuple[float, float]:
    """Width and height of a cell in so many pixels: square, unless one side has far more cells than the other.

    Whole pixels, unless keys are to `fill` the room, as in a paper's figure, which has finer dots.
    """

    def whole(count: int) -> int:
        return max(SMALLEST_CELL, min(LARGEST_CELL, int(room // count)))

    if max(queries, keys) <= 2 * min(queries, keys):
        side = room / keys if fill else whole(max(queries, keys))
        return side, side
    wide, high = room / keys if fill else whole(keys), whole(queries)
    return wide if fill else min(wide, 4 * high), min(high, 4 * wide)


def in_print(figure: Figure, style: Style) -> None:
    """Every text at the points that the style asks for, but numbers in cells; to be called before it is measured."""
    sizes = {setting: style.size_of(setting) for setting in SIZES}
    if style.points is None and not any(sizes.values()):
        return
    least, most = style.points or (0.0, math.inf)

    def within(points: float, setting: str = "") -> float:
        return sizes.get(setting) or min(most, max(least, points))

    def resize(texts: Iterable[Text], setting: str) -> None:
        for text in texts:
            text.set_fontsize(within(float(text.get_fontsize()), setting))

    for text in figure.findobj(Text):
        if text.get_label() != NUMBER:
            text.set_fontsize(within(float(text.get_fontsize()), str(text.get_label())))
    for ax in figure.axes:
        for name, axis in (("xtick", ax.xaxis), ("ytick", ax.yaxis)):
            longest = max((float(text.get_fontsize()) for text in axis.get_ticklabels()), default=0)
            axis.set_tick_params(labelsize=within(longest, f"{name}.labelsize"))
            resize([*axis.get_ticklabels()], f"{name}.labelsize")
            resize([axis.label], "axes.labelsize")
        legend = ax.get_legend()
        resize(legend.get_texts() if legend else (), "legend.fontsize")
        resize([ax.title], HEADING)


def label_size(cell: float, style: Style, side: str) -> float:
    """Points that fit a cell of so many pixels along a side ("x" or "y"); those that were asked for where some were."""
    return sized(max(SMALLEST_LABEL, min(LARGEST_LABEL, px(0.85 * cell))), style, f"{side}tick.labelsize")


def sized(points: float, style: Style, setting: str = "") -> float:
    """The size of a text that has so many points by default; setting: its kind, as a style file has it."""
    asked = style.size_of(setting) if setting else style.font_size
    return points if asked is None else asked


def growth(style: Style) -> float:
    """How many times the room of a text grows, where larger letters than the usual are asked for."""
    return max(1.0, max(style.size_of(setting) or 0.0 for setting in SIZES) / NOTE_SIZE)


def number_size(cell: float, style: Style) -> float:
    """Points at which "0.53" fits into a cell of so many pixels; 0 in a paper, where it would be too small."""
    if style.points is not None:
        points = min(style.points[1], px(0.85 * cell) / (4 * NUMBER_LETTER))
        return points if points >= LEAST_NUMBER else 0.0
    return max(3.0, min(10.0, 10 * (cell - 6) / 44))


def label_step(cell: float, needed: float) -> int:
    """Every how many cells a label that needs so many pixels has room; a round number."""
    least = math.ceil(needed / cell)
    return next((step for step in STEPS if step >= least), least)


def line_px(points: float) -> float:
    """Pixels that one line of text takes."""
    return points / px(1) * 1.15


def put_tokens(ax: Axes, side: str, tokens: Axis, cell: float, style: Style) -> int:
    """Token labels along one side ("x" or "y") of a map; returns the step between labels."""
    size = label_size(cell, style, side)
    step = label_step(cell, line_px(size))
    cells, labels = tick_labels(tokens, step)
    axis = ax.xaxis if side == "x" else ax.yaxis
    axis.set_ticks([place + 0.5 for place in cells], labels, fontsize=size, rotation=0)
    return step


def tick_labels(tokens: Axis, step: int) -> tuple[list[int], list[str]]:
    """The cells that are labelled, every `step`th, and what is drawn there."""
    cells, labels = tokens.marks(step)
    places = [tokens.starts[cell] if tokens.starts else cell for cell in cells]
    return cells, list(map(tick_label, labels, places))


def turn(texts: Sequence[Text], room: float) -> None:
    """Labels below a map: level where they fit side by side, slanted for a few, upright for many."""
    if extent(texts)[0] <= room - 4:
        return
    for text in texts:
        if room >= 1.6 * line_px(float(text.get_fontsize())):
            text.set(rotation=45, ha="right", rotation_mode="anchor")
        else:
            text.set(rotation=90)


def extent(texts: Sequence[Text]) -> tuple[float, float]:
    """Width and height in pixels of the largest of the texts."""
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    return max((box.width for box in boxes), default=0.0), max((box.height for box in boxes), default=0.0)


def axis_room(labels: Sequence[Text], name_size: float, gap: float) -> tuple[float, float]:
    """Pixels that tick labels, the name of their axis and a gap take: next to a panel, and below it."""
    wide, high = extent(labels)
    more = line_px(name_size) + gap
    return wide + more, high + more


def say_above(ax: Axes, lines: Iterable[tuple[str, float, int, str]]) -> None:
    """Lines above a panel, from its left edge: text, size, pixels above the panel, colour."""
    for place, (text, size, up, colour) in enumerate(lines):
        line = ax.annotate(text, (0, 1), (0, px(up)), xycoords="axes fraction", textcoords="offset points")
        line.set(fontsize=size, color=colour, label="" if place else HEADING)


def outside(ax: Axes) -> float:
    """Pixels that ticks, labels and name of axes take at their right."""
    box = ax.get_tightbbox()
    return box.x1 - ax.get_window_extent().x1 if box else 0.0


@dataclass(frozen=True)
class PanelPlan:
    """Panels of one size, each with its colour bar at its right; all in pixels.

    left, top: of the first panel, from the figure's upper left corner. size: width and height of a panel. right, below:
    what the last panel needs for bar, labels and notes. edge: blank margin at the right and the bottom. bar: its gap to
    the panel, width and height, where it is not hidden. Panels fill `columns` row by row, `pitch` (across, down) apart.
    """

    left: float
    top: float
    size: tuple[float, float]
    right: float
    below: float
    edge: float
    bar: tuple[float, float, float] = (0, 1, 1)
    columns: int = 1
    pitch: tuple[float, float] = (0, 0)

    def corner(self, index: int) -> tuple[float, float]:
        """Left and top of a panel."""
        row, column = divmod(index, self.columns)
        return self.left + column * self.pitch[0], self.top + row * self.pitch[1]


class Words:
    """Title and notes above the panels of a figure, its foot below them; wrapped, so that they never widen it."""

    def __init__(
        self,
        figure: Figure,
        texts: tuple[str, str, Sequence[str]],
        size: float,
        style: Style,
        legend: Sequence[tuple[str, str]] = (),
    ) -> None:
        """texts: title, note, and the lines of the foot. legend: names and their colours, in a line below the note."""
        title, note, foot = texts
        self.style, self.titled, self.captioned = style, style.titled, style.captioned
        foot = foot if self.captioned else ()
        self.room, self.note_size = math.inf, sized(NOTE_SIZE, style)
        self.least = min(WORDS_PX, (style.inches or math.inf) * DPI - 40)  # pixels, beside a small map
        self.title = figure.text(0, 0, title * self.titled, fontsize=size, va="top", label=TITLE)
        self.note, self.foot = (
            figure.text(0, 0, text, fontsize=NOTE_SIZE, color=NOTE_COLOUR, va="top", linespacing=LINE)
            for text in (note * self.captioned, "\n".join(legible(line) for line in foot if line))
        )
        self.legend = [
            [
                figure.text(0, 0, text, fontsize=NOTE_SIZE, color=ink, va="top")
                for text, ink in ((SIGN, colour), (name, NOTE_COLOUR))
            ]
            for name, colour in legend
        ]

    def set_title(self, text: str) -> None:
        """Another title, as wide as there is room for."""
        self.title.set_text(wrapped(text * self.titled, self.room, float(self.title.get_fontsize())))

    def set_note(self, text: str) -> None:
        """Another note, as wide as there is room for."""
        self.note.set_text(wrapped(text * self.captioned, self.room, self.note_size))

    def wrap(self, room: float) -> float:
        """Break the lines where so many pixels are full; how wide the widest is."""
        self.room = room
        self.set_title(self.title.get_text())
        self.set_note(self.note.get_text())
        self.foot.set_text(wrapped(self.foot.get_text(), room, self.note_size))
        legend = [sum(map(_width, line)) for line in self._legend_lines()]
        return max([extent([self.title, self.note, self.foot])[0], *legend])

    def heights(self) -> tuple[float, float]:
        """Pixels that the words take above the panels, and below them."""
        title, note, foot = map(_height, (self.title, self.note, self.foot))
        legend = LINE * line_px(self.note_size) * len(self._legend_lines())
        return title + note + legend + 4, foot + (FOOT_GAP if foot else 0)

    def _legend_lines(self) -> list[list[list[Text]]]:
        """The signs and names of the legend, in lines that fit."""
        lines: list[list[list[Text]]] = []
        room = 0.0
        for sign in self.legend:
            room -= _width(sign)
            if room < 0:
                lines.append([])
                room = self.room - _width(sign)
            lines[-1].append(sign)
        return lines

    def put(self, figure: Figure, left: float, edge: float) -> None:
        """In place, `edge` from the upper and the lower border."""
        put_words(figure, self.title, left, edge)
        put_words(figure, self.note, left, edge + _height(self.title))
        down = edge + _height(self.title) + _height(self.note)
        for line in self._legend_lines():
            right = left
            for sign in line:
                for text in sign:
                    put_words(figure, text, right, down)
                    right += extent([text])[0] + SIGN_GAP
                right += ENTRY_GAP
            down += LINE * line_px(self.note_size)
        put_words(figure, self.foot, left, figure.bbox.height - edge - self.heights()[1] + FOOT_GAP)


def _height(text: Text) -> float:
    lines = text.get_text().count("\n") + 1 if text.get_text() else 0
    return LINE * line_px(float(text.get_fontsize())) * lines


def _width(texts: Sequence[Text]) -> float:
    """Pixels that a sign and its name take side by side, with a gap behind each."""
    return sum(extent([text])[0] + SIGN_GAP for text in texts) + ENTRY_GAP


def wrapped(text: str, room: float, points: float) -> str:
    """Words as they are drawn, `caption` and `isolated`, in lines of so many pixels by their letters; wide letters of
    East Asia count twice."""
    letters = room / (LETTER * points / px(1))
    return "\n".join(isolated(part) for line in caption(text).split("\n") for part in _broken(line, letters))


def letters_wide(line: str, points: float) -> float:
    """Pixels that a line takes, by its letters."""
    return LETTER * len(line) * points / px(1)


def _broken(line: str, letters: float) -> list[str]:
    """Between phrases where these fit in a line: `queries “bank” (2 of 9), ` stays whole."""
    needed = sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in line)
    if needed <= letters:
        return [line]
    width = max(8, int(letters * len(line) / needed))
    phrases = re.split(r"(?<=[,;:]) ", line)
    tied = (phrase if len(phrase) > width else phrase.replace(" ", TIED) for phrase in phrases)
    return [part.replace(TIED, " ") for part in textwrap.wrap(" ".join(tied), width)]


def frame(figure: Figure, panels: Sequence[tuple[Axes, Axes]], plan: PanelPlan, words: Words, left: float) -> PanelPlan:
    """Size the figure to its panels (map, colour bar), and put them and the words in place.

    plan.top: of the first panel below the words. left: of the words. Returns the places of the panels.
    """
    in_print(figure, words.style)
    high, bar_high = plan.size[1], plan.bar[2]
    panels_wide = plan.corner(min(plan.columns, len(panels)) - 1)[0] + plan.size[0] + plan.right
    written = words.wrap(max(panels_wide, words.least) - left)
    above, below = words.heights()
    plan = replace(plan, top=round(plan.top + plan.edge + above))
    height = plan.corner(len(panels) - 1)[1] + max(high + plan.below, bar_high) + below + plan.edge
    # whole pixels, so that cells stay aligned with them
    width = max(panels_wide, left + written) + plan.edge
    figure.set_size_inches(math.ceil(width) / figure.dpi, math.ceil(height) / figure.dpi)
    for index, panel in enumerate(panels):
        place_panel(figure, panel, plan, index)
    words.put(figure, left, plan.edge)
    return plan


def place_panel(figure: Figure, panel: tuple[Axes, Axes], plan: PanelPlan, index: int) -> None:
    """Put a map and its colour bar where the plan has one."""
    (x, y), (wide, high), (gap, bar_wide, bar_high) = plan.corner(index), plan.size, plan.bar
    place(figure, panel[0], (x, y, wide, high))
    place(figure, panel[1], (x + wide + gap, y, bar_wide, bar_high))


Built = TypeVar("Built")


def fitted(build: Callable[[float], Built], room: float, style: Style, figure_of: Callable[[Built], Figure]) -> Built:
    """What `build` makes of the pixels that its panels may take across: no wider than the style asks.

    Measured once built: the room around the panels depends on their labels.
    """
    if style.inches is None:
        return build(room)
    wanted = style.inches * DPI
    room = min(room, wanted)
    built = build(room)
    while (over := figure_of(built).bbox.width * DPI / figure_of(built).dpi - wanted) > 0 and room > 1:
        room = max(1.0, room - over)
        built = build(room)
    return built


def save_drawn(
    path: Path, style: Style, texts: Iterable[str], build: Callable[[float], Figure], room: float = math.inf
) -> Path:
    """Write what `build` draws in so many pixels across, or in fewer where the style asks for a narrower picture.

    texts: what is drawn besides the line of the foot. room: infinite for a figure that keeps to the width by itself.
    Raises UsageError for a folder that cannot be written.
    """
    with drawing(fonts_for([style.about.line, *texts]), style.sheet):
        figure = build(room) if room == math.inf else fitted(build, room, style, lambda figure: figure)
        return save_figure(figure, path, style)


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
    width, height = figure.get_size_inches() * DPI
    left, top, wide, high = box
    ax.set_position((left / width, 1 - (top + high) / height, wide / width, high / height))


def put_words(figure: Figure, text: Text, left: float, down: float) -> None:
    """Put a figure's text at pixels counted from the upper left corner."""
    width, height = figure.get_size_inches() * figure.dpi
    text.set_position((left / width, 1 - down / height))


def rule(ax: Axes, axis: Literal["x", "y", "both"] = "y", *, pale: bool = False) -> None:
    """Lines across the axes at their marks.

    pale: below all that is drawn, where that has no colour which such a line could be seen through.
    """
    ax.grid(axis=axis)
    if pale:
        ax.set_axisbelow(True)


def log_axis(ax: Axes, marks: Sequence[float]) -> None:
    """A log scale upwards with plain numbers: matplotlib's own are formulas, which figures never parse."""
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(FixedLocator(marks))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_locator(NullLocator())


def name_columns(ax: Axes, names: Sequence[str], most: int, size: float, middle: float = 0.0) -> None:
    """Names below columns, as many as have room; middle: of a column, from its left."""
    step = 1 + (len(names) - 1) // most
    labels = [isolated(shown_text(name)) for name in names[::step]]
    ax.set_xticks(np.arange(0, len(names), step) + middle, labels, fontsize=size, rotation=90)


def entitle(
    figure: Figure, style: Style, texts: tuple[str, ...], size: float, place: tuple[float, float, float]
) -> None:
    """The title and the lines of the foot, from the lowest on, where the style draws them.

    place: pixels from the left, of the title from the top, and of the lowest line from the bottom.
    """
    title, *foot = texts
    left, down, up = place
    wide, high = (float(inches * DPI) for inches in figure.get_size_inches())
    if style.titled:
        figure.text(left / wide, 1 - down / high, title, fontsize=size, va="top", label=TITLE)
    for number, line in enumerate(filter(None, foot) if style.captioned else ()):
        at = left / wide, (up + FOOT_LINE_PX * number) / high
        figure.text(*at, line, fontsize=NOTE_SIZE, color=NOTE_COLOUR)
    in_print(figure, style)


def drawn_ends(value_N: np.ndarray, low_N: np.ndarray, high_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ends that are drawn of intervals around values, (N,) each: an open end is drawn no farther than its value.

    Where both are NaN there is nothing to draw.

        >>> drawn_ends(np.array([2.0]), np.array([1.5]), np.array([np.nan]))
        (array([1.5]), array([2.]))
    """
    nothing_N = np.isnan(low_N) & np.isnan(high_N)
    low_N, high_N = (np.where(np.isnan(end_N) & ~nothing_N, value_N, end_N) for end_N in (low_N, high_N))
    return low_N, high_N
