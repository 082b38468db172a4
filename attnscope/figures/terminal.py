"""Heads as a terminal shows them: maps in half blocks, two cells high; without colours in shades.

    console.print(HeadMaps(heads, Style()))

And the text itself, its tokens coloured by weight; without colours bars are below each line.

    console.print(Prose(("the", " bank"), np.array([0.2, 0.8]), Limits(0.0, 0.8), title="L1H4"))

Q query, K key, P pixel (one column wide, half a line high), T token, U unit: tokens that share a character are one.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from textwrap import wrap
from typing import TYPE_CHECKING

import numpy as np
from rich.cells import cell_len
from rich.color import Color
from rich.style import Style as Ink
from rich.text import Text

from attnscope.errors import visible
from attnscope.figures.colours import Limits, cmap_of, drawable, make_norm, quantity_name, sink_limits
from attnscope.figures.mosaic import HeadMap
from attnscope.figures.style import SIGNED, TAKEN, Axis, Quantity, Style

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

COLOURFUL = ("256", "truecolor")  # with fewer colours than a scale has steps, signs say more
SHADES = "·░▒▓█"
TAKEN_SIGN, TAKEN_GREY = "×", (128, 128, 128, 255)
STRIP_GREYS = (80, 208)  # seen on a dark screen and on a light one
LABELS = 14  # columns of the labels beside a map, at most
GAP = 3  # columns between two maps
LEAST_ACROSS = 64  # columns that a long text's map keeps where another could stand beside it
MOST_LINES = 50
WIDE_CELLS = 32  # tokens of a map whose cells are two pixels wide and high
LABEL_LINES = 8  # of the labels below a map of few tokens
LEAST_NOTE = 32  # columns of the lines between a title and its map
TICK = 12  # columns from one label to the next below a map of many


def side(width: int, coloured: bool, style: Style) -> int:
    """How many rows and columns of cells a map has room for on a screen so wide."""
    room = width - _labels(width)
    across = max(1, (room + GAP) // (LEAST_ACROSS + GAP))
    cells = (room - GAP * (across - 1)) // across // (1 if coloured else 2)
    strip = 3 if style.sink == "mask" else 0  # the sink's own column, a gap, and key 0 apart from the rest of its bin
    return max(1, min(cells - strip, MOST_LINES * (2 if coloured else 1)))


def _labels(width: int) -> int:
    """Columns before a map, the space before it with them."""
    return min(LABELS, width // 4) + 1


@dataclass(frozen=True)
class HeadMaps:
    """Several heads with the same axes, side by side where they fit, and the legend of their scale."""

    heads: Sequence[HeadMap]
    style: Style = Style()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width, coloured = options.max_width, console.color_system in COLOURFUL
        room = width - _labels(width)
        panels = [Panel.of(head, self.style, coloured, room) for head in self.heads]
        across = max(1, (room + GAP) // (max(panel.width for panel in panels) + GAP))
        for first in range(0, len(panels), across):
            for line in in_a_row(panels[first : first + across], _labels(width)):
                line.truncate(width)
                yield line
            yield Text()
        yield from legend(self.heads, self.style, coloured).wrap(console, width)


@dataclass(frozen=True)
class Panel:
    """One head's lines: above its map, the map, below it; and the label before each of the map's lines."""

    above: list[Text]
    map: list[Text]
    below: list[Text]
    query_labels: list[str]

    @classmethod
    def of(cls, head: HeadMap, style: Style, coloured: bool, room: int) -> Panel:
        """The lines of a head; room: columns that there are for it."""
        strip = 0 if head.sink_Q is None else 2
        wide = not coloured or (len(head.axis_Q.labels) <= WIDE_CELLS and 2 * (len(head.axis_K.labels) + strip) <= room)
        size = 2 if wide else 1
        drawn = blocks(rgba_of(head, style), size) if coloured else shades(head, style)
        below = keys_below(head.axis_K, size, strip * size)
        title = _cut(head.title, room, "bold")
        across = max(title.cell_len, *(line.cell_len for line in (*drawn, *below)))
        columns = max(1, min(room, max(across, LEAST_NOTE)))
        notes = [_cut(line, columns, "dim") for line in wrap(head.note, columns)]
        return cls([title, *notes], drawn, below, row_labels(head.axis_Q, 3 - size))

    @property
    def width(self) -> int:
        """The columns that it takes."""
        return max(line.cell_len for line in (*self.above, *self.map, *self.below))


def in_a_row(panels: Sequence[Panel], labels: int) -> Iterator[Text]:
    """The lines of several panels in a row, labels of so many columns before the maps."""
    width, first = max(panel.width for panel in panels), panels[0]
    above, below = (max(len(getattr(panel, part)) for panel in panels) for part in ("above", "below"))
    names = [*[""] * above, *first.query_labels, *[""] * below]
    for row, name in enumerate(names):
        line = _cut(name, labels - 1, "")
        line.pad_left(labels - 1 - line.cell_len)
        line.append(" ")
        for place, panel in enumerate(panels):
            lines = [*panel.above, *[Text()] * (above - len(panel.above)), *panel.map, *panel.below]
            part = lines[row] if row < len(lines) else Text()
            line.append_text(part)
            if place < len(panels) - 1:
                line.append(" " * (width + GAP - part.cell_len))
        yield line


def rgba_of(head: HeadMap, style: Style) -> np.ndarray:
    """The colours of a map's cells, (Q, K, 4) bytes, without one where nothing is; a sink's strip and a gap before."""
    cells_QK4 = cmap_of(style, head.quantity)(_levels(head.values_QK, head.limits, style), bytes=True)
    cells_QK4[head.values_QK == TAKEN] = TAKEN_GREY
    if head.sink_Q is None:
        return cells_QK4
    strip_Q1 = _strip(head.sink_Q, head.quantity)
    grey_Q11 = np.interp(np.ma.filled(strip_Q1, 0), (0, 1), STRIP_GREYS).astype(np.uint8)[..., None]
    strip_Q14 = np.concatenate([grey_Q11.repeat(3, -1), 255 * ~np.ma.getmaskarray(strip_Q1)[..., None]], axis=-1)
    return np.concatenate([strip_Q14, np.zeros_like(strip_Q14), cells_QK4], axis=1)


def blocks(cells_QK4: np.ndarray, size: int) -> list[Text]:
    """Cells of size x size pixels as lines of half blocks."""
    pixels_PP4 = cells_QK4.repeat(size, 0).repeat(size, 1)
    if len(pixels_PP4) % 2:
        pixels_PP4 = np.concatenate([pixels_PP4, np.zeros_like(pixels_PP4[:1])])
    lines = []
    for top_P4, bottom_P4 in zip(pixels_PP4[::2].tolist(), pixels_PP4[1::2].tolist(), strict=True):
        line = Text()
        for pair, run in groupby(zip(map(tuple, top_P4), map(tuple, bottom_P4), strict=True)):
            upper, lower = (Color.from_rgb(*pixel[:3]) if pixel[3] else None for pixel in pair)
            # What has no colour is the terminal's own, which no sign can give to the upper half alone.
            sign, ink = ("▀", Ink(color=upper, bgcolor=lower)) if upper else ("▄", Ink(color=lower))
            line.append((sign if upper or lower else " ") * len(list(run)), ink if upper or lower else Ink())
        lines.append(line)
    return lines


def shades(head: HeadMap, style: Style) -> list[Text]:
    """A line per query, two signs per key: the darker the more; blank where the query does not see the key."""
    signs_QK = _signs(_levels(head.values_QK, head.limits, style))
    signs_QK[head.values_QK == TAKEN] = TAKEN_SIGN
    if head.sink_Q is not None:
        strip_Q1 = _signs(_strip(head.sink_Q, head.quantity))
        signs_QK = np.concatenate([strip_Q1, np.full_like(strip_Q1, " "), signs_QK], axis=1)
    return [Text("".join(sign * 2 for sign in row)) for row in signs_QK.tolist()]


def _levels(values: np.ndarray, limits: Limits, style: Style) -> np.ma.MaskedArray:
    """How far values are up a scale, from 0 to 1; masked where there is none, or where it was taken out."""
    return make_norm(limits, style)(drawable(np.where(values == TAKEN, np.nan, values), limits, style))


def _strip(sink_Q: np.ndarray, quantity: Quantity) -> np.ma.MaskedArray:
    """The same for what was taken out of a head, (Q, 1), on the strip's own scale."""
    return _levels(sink_Q[:, None], sink_limits(sink_Q, quantity), Style())


def _signs(level: np.ma.MaskedArray) -> np.ndarray:
    """The sign of each level from 0 to 1."""
    step = np.minimum((np.ma.filled(level, 0) * len(SHADES)).astype(int), len(SHADES) - 1)
    return np.where(np.ma.getmaskarray(level), " ", np.array(list(SHADES))[step])


def row_labels(axis: Axis, per_line: int) -> list[str]:
    """The label before each line of a map with so many queries per line."""
    names = [""] * -(-len(axis.labels) // per_line)
    for cell, name in zip(*axis.marks(per_line), strict=True):
        names[cell // per_line] = name
    return names


def keys_below(axis: Axis, size: int, start: int) -> list[Text]:
    """The labels below a map: of few tokens each one downwards, of many now and then, with their numbers."""
    if size == 2 and not axis.binned and len(axis.labels) <= WIDE_CELLS:
        names = [glyphs(label.strip("·") or label) for label in axis.labels]
        high = min(LABEL_LINES, max(map(len, names)))
        rows = ("".join(_padded(name[row] if row < len(name) else "", 2) for name in names) for row in range(high))
        return [Text(" " * start + row) for row in rows]
    line, end = "", start + len(axis.labels) * size
    for cell, name in zip(*axis.marks(-(-TICK // size)), strict=True):
        shown = _cut(name, TICK - 2, "").plain
        if not line or start + cell * size + 1 + cell_len(shown) <= end:
            line = f"{_padded(line, start + cell * size)}╵{shown}"
    return [Text(line)]


def glyphs(text: str) -> list[str]:
    """What of a text takes columns, each with the marks that belong to it."""
    signs: list[str] = []
    for char in text:
        if signs and (not cell_len(char) or signs[-1].endswith("\u200d")):
            signs[-1] += char
        else:
            signs.append(char)
    return signs


def legend(heads: Sequence[HeadMap], style: Style, coloured: bool) -> Text:
    """The scale, what it is of, and what the other signs mean."""
    quantity, limits, scale = heads[0].quantity, heads[0].limits, Text()
    shared, signed = all(head.limits == limits for head in heads), quantity in SIGNED
    low, high = ("-1", "+1 times the largest size") if signed else ("least", "largest")
    if coloured:
        # The colours from the least to the largest value.
        scale.append(f"{limits.low:.2g} " if shared else f"{low} ")
        for red, green, blue, _ in cmap_of(style, quantity)(np.linspace(0, 1, 16), bytes=True).tolist():
            scale.append("█", Ink(color=Color.from_rgb(red, green, blue)))
        scale.append(f" {limits.high:.2g}" if shared else f" {high} of each head")
    elif shared:
        # The shades, each with the value at which the next begins.
        steps = [make_norm(limits, style).inverse(step / len(SHADES)) for step in range(1, len(SHADES))]
        scale.append("  ".join(f"{sign} to {end:.2g}" for sign, end in zip(SHADES, [*steps, limits.high], strict=True)))
    else:
        middle = f"{SHADES[len(SHADES) // 2]} 0 " if signed else ""
        scale.append(f"{SHADES[0]} {low} {middle}to {SHADES[-1]} {high} of each head")
    signs = [quantity_name(quantity, style)]
    signs += ["blank: not visible to the query"] if any(np.isnan(head.values_QK).any() for head in heads) else []
    if any((head.values_QK == TAKEN).any() for head in heads):
        signs.append(f"{'grey' if coloured else TAKEN_SIGN}: the sink, taken out")
    return scale.append(f"  {'; '.join(signs)}")


def _cut(text: str, columns: int, ink: str) -> Text:
    """Text in a line of at most so many columns."""
    line = Text(text, ink)
    line.truncate(max(columns, 0), overflow="ellipsis" if columns > 1 else "crop")
    return line


def _padded(text: str, columns: int) -> str:
    return text + " " * (columns - cell_len(text))


BARS = "▁▂▃▄▅▆▇█"
FAINT = 0.5 / len(BARS)  # of the scale: what is less has no bar, and no colour
MARKS = {"query": ("»", "«"), "key": ("‹", "›")}
SIGNS = {"\n": "\n", "\t": "    ", "\r": "⇤"}
# From grey to orange at nearly one lightness, so that more stands out more on a dark screen and on a light one.
RAMP = np.array([(168, 168, 168), (196, 165, 120), (222, 156, 72), (244, 142, 20), (255, 126, 0)], float)
STEPS = 64
JOINER = "\u200d"
Paint = Callable[[float, bool], Ink | str]


@dataclass(frozen=True)
class Prose:
    """A text by its tokens: how each reads, its weight (NaN: hidden, or left out), and which are marked, and as what.

    summed: whether the tokens of one character add up; else they are averaged. title is above, legend below, next to
    the scale.
    """

    plain: Sequence[str]
    weight_T: np.ndarray
    limits: Limits
    style: Style = Style()
    marked: Mapping[int, str] = field(default_factory=dict)
    summed: bool = True
    title: str = ""
    legend: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        coloured = console.color_system in COLOURFUL
        yield Text(self.title, "bold")
        for line in self.written(ink if coloured else bar).wrap(console, options.max_width, tab_size=1):
            yield line if coloured else Text(line.plain)
            if not coloured and (bars := bars_below(line)):
                yield Text(bars)
        yield from self._scale(ink if coloured else bar).wrap(console, options.max_width)
        yield Text()

    def written(self, paint: Paint) -> Text:
        """The text, what is painted in a span of its own; a line break that has a weight is shown."""
        written, units = Text(), units_of(self.plain)
        for positions, level in zip(units, self._levels(units), strict=True):
            text = visible("".join(self.plain[place] for place in positions), SIGNS)
            mark = next((self.marked[place] for place in positions if place in self.marked), "")
            body = text.strip() or text
            lead, _, trail = text.partition(body)
            left, right = MARKS.get(mark, ("", ""))
            shown = body.replace("\n", "↵\n") if level >= FAINT or mark else body
            if shown.endswith("\n"):  # what marks the token stands before the break
                shown, trail = shown[:-1], f"\n{trail}"
            written.append(lead + left).append(shown, paint(level, bool(mark))).append(right + trail)
        if written.plain.endswith("\n"):  # a text that ends with a line has no empty one after it
            written.right_crop()
        return written

    def _levels(self, units: Sequence[range]) -> np.ndarray:
        """How far each unit's weight is up the scale, (U,); NaN for none."""
        together = np.nansum if self.summed else np.nanmean
        parts = [self.weight_T[unit.start : unit.stop] for unit in units]
        weight_U = np.array([np.nan if np.isnan(part).all() else together(part) for part in parts])
        return np.ma.filled(make_norm(self.limits, self.style)(drawable(weight_U, self.limits, self.style)), np.nan)

    def _scale(self, paint: Paint) -> Text:
        scale = Text(f"{self.limits.low:.2g} ")
        for step in range(1, len(BARS) + 1):
            style = paint(step / len(BARS), False)
            scale.append(style if isinstance(style, str) else " ", style)
        return scale.append(f" {self.limits.high:.2g}  {self.legend}")


def units_of(plain: Sequence[str]) -> list[range]:
    """Tokens that cannot be shown one by one: the pieces of a character, and what only modifies the one before."""
    starts = [place for place, text in enumerate(plain) if not place or not _extends(plain[place - 1], text)]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(plain)], strict=True)]


def _extends(before: str, text: str) -> bool:
    first = text[:1]
    modifies = first == JOINER or "\U0001f3fb" <= first <= "\U0001f3ff" or unicodedata.category(first or "x")[0] == "M"
    return not text or modifies or before.endswith(JOINER)


def ink(level: float, marked: bool) -> Ink:
    """The colours of a token so far up the scale; what is hidden is dim."""
    if np.isnan(level):
        return Ink(dim=True, bold=marked)
    return _ink(round(level * STEPS), marked) if level >= FAINT else Ink(bold=marked)


@lru_cache
def _ink(step: int, marked: bool) -> Ink:
    place = np.linspace(0, STEPS, len(RAMP))
    red, green, blue = (float(np.interp(step, place, channel)) for channel in RAMP.T)
    return Ink(color=Color.from_rgb(0, 0, 0), bgcolor=Color.from_rgb(red, green, blue), bold=marked)


def bar(level: float, marked: bool) -> str:
    """The bar of a token so far up the scale, nothing where there is none."""
    return BARS[round(level * len(BARS)) - 1] if level >= FAINT else ""


def bars_below(line: Text) -> str:
    """The bars of a line's tokens, each below its own columns."""
    bars = ""
    for span in sorted(line.spans, key=lambda span: span.start):
        if span.style:
            bars += " " * (cell_len(line.plain[: span.start]) - len(bars))
            bars += str(span.style) * cell_len(line.plain[span.start : span.end])
    return bars
