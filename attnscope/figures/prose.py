"""The text itself as a terminal shows it, its tokens coloured by weight; without colours bars stand below each line.

T token, U unit: tokens that share a character are one.

    console.print(Prose(("the", " bank"), np.array([0.2, 0.8]), Limits(0.0, 0.8), title="L1H4"))
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from rich.cells import cell_len
from rich.color import Color
from rich.style import Style as Ink
from rich.text import Text

from attnscope.errors import visible
from attnscope.figures.colours import Limits, drawable, make_norm
from attnscope.figures.style import Style
from attnscope.figures.terminal import COLOURFUL

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

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

    summed: whether the tokens of one character add up; else they are averaged. title stands above, legend below, beside
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
    """Tokens whose text cannot stand apart: the pieces of a character, and what only modifies the one before."""
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
