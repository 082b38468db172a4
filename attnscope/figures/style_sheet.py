"""A matplotlib style file as data: its fonts, colours, lines and axes, and nothing else of it.

    sheet = read_style_sheet("paper.mplstyle")
    Style(style=sheet)

A setting outside READ is refused by its name. Nothing of a file is run, and none names another file. Matplotlib is
loaded when a file is read.
"""

from __future__ import annotations

import logging
import math
import re
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from attnscope.errors import UsageError, visible
from attnscope.utils.files import read_small

log = logging.getLogger("attnscope")

MOST_BYTES = 1 << 20
MOST_NUMBER = 20.0  # points, of a line or a mark
MOST_LETTERS = 1000  # of a value
FONT_SIZES = 4.0, 24.0  # points of a text that may be asked for
BASE = 10.0  # points that `small` and `large` are relative to, in a file without font.size
GENERIC = ("sans-serif", "serif", "monospace", "cursive", "fantasy")
FAMILY, CYCLE, CMAP, SIZE = "font.family", "axes.prop_cycle", "image.cmap", "font.size"
ALPHA, DASHES = "grid.alpha", "grid.linestyle"
SIZES = (
    "figure.titlesize",
    "axes.titlesize",
    "axes.labelsize",
    "xtick.labelsize",
    "ytick.labelsize",
    "legend.fontsize",
)
MARKS = ("color", "labelcolor", "direction", "major.size", "major.width", "major.pad", "minor.size", "minor.width")
READ = (
    *(FAMILY, SIZE, *SIZES, "font.weight", "font.style", *(f"font.{name}" for name in GENERIC)),
    *("text.color", "figure.facecolor", "grid.color", "grid.linewidth", DASHES, ALPHA),
    *("lines.linewidth", "lines.markersize", "hatch.linewidth", CMAP, CYCLE),
    *(f"axes.{name}" for name in ("facecolor", "edgecolor", "labelcolor", "titlecolor", "linewidth", "labelweight")),
    *(f"axes.spines.{side}" for side in ("left", "right", "top", "bottom")),
    *(f"{axis}tick.{name}" for axis in "xy" for name in MARKS),
)
OURS = (SIZE, *SIZES, CYCLE, FAMILY, CMAP)  # what is applied here, and not by matplotlib
OF_COLOURS = re.compile(r"cycler\(\s*(?:['\"]color['\"]\s*,|color\s*=)\s*[\[(]([^\[\]()]*)[\])]\s*\)")
OF_CYCLE = re.compile("C[0-9]+")
NO_SHEET = "name a style file of matplotlib"
HINT = "take these lines out; docs/pictures.md lists what is read"


@dataclass(frozen=True)
class StyleSheet:
    """A style file: its name, and the settings that are read of it with their values as texts."""

    name: str
    settings: tuple[tuple[str, str], ...]

    def get(self, setting: str) -> str | None:
        """The value of a setting."""
        return dict(self.settings).get(setting)

    def points(self, setting: str) -> float | None:
        """A size in points: a number, or a word such as `small`, which is relative to font.size."""
        from matplotlib.font_manager import font_scalings

        value = self.get(setting)
        if value is None:
            return None
        scale = font_scalings.get(value)
        return float(value) if scale is None else scale * float(self.get(SIZE) or BASE)


def read_style_sheet(path: str | Path) -> StyleSheet:
    """The settings of a style file. Raises UsageError, in one line, for a file or a setting that is not read."""
    name = visible(str(path))
    try:
        text = read_small(Path(path), MOST_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "it is not text in UTF-8"
        raise UsageError(f"style: {name} cannot be read: {why}", NO_SHEET) from None
    # Lines of `NAME: VALUE`, as matplotlib has them. Its own reader would also set backends and paths.
    settings: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if content := _without_comment(line):
            key, colon, value = content.partition(":")
            if not colon:
                raise UsageError(f"style: {name}, line {number}: expected NAME: VALUE", NO_SHEET)
            settings[key.strip()] = value.strip()
    if unknown := [visible(key) for key in settings if key not in READ]:
        more = f" and {len(unknown) - 5} others" * (len(unknown) > 5)
        raise UsageError(f"style: {', '.join(unknown[:5])}{more} of {name} cannot be used", HINT)
    sheet = StyleSheet(name, tuple(settings.items()))
    for key, value in settings.items():
        _check(name, key, value)
    for key in SIZES:
        points = sheet.points(key)
        if points is not None and not FONT_SIZES[0] <= points <= FONT_SIZES[1]:
            expected = f"expected points from {FONT_SIZES[0]:g} to {FONT_SIZES[1]:g}"
            raise UsageError(f"style: {key} of {name}: {expected}, got {points:g}", HINT)
    # A font that is missing here may be there where the figure is made for print: a warning, no error.
    named = _families(sheet)
    if named and _installed().isdisjoint(named):
        called = ", ".join(map(visible, named[:5]))
        log.warning("no installed font is called %s: %s names none that is here", called, name)
    return sheet


def parameters(sheet: StyleSheet, families: tuple[str, ...]) -> dict[Any, Any]:
    """A sheet as rcParams of matplotlib. families: further fonts, for letters that the sheet's own lack."""
    from matplotlib.rcsetup import cycler

    values: dict[str, Any] = {key: value for key, value in sheet.settings if key not in OURS}
    values[FAMILY] = [*(family for family in _families(sheet) if family in _installed()), *families]
    if colours := sheet.get(CYCLE):
        values[CYCLE] = cycler(color=_colours(colours))
    return values


def _without_comment(line: str) -> str:
    """A line without its comment; a # within quotes is a colour. Quotes around a whole value go."""
    parts = re.match(r"""(?:[^#"']|"[^"]*"|'[^']*')*""", line)
    key, colon, value = (parts[0] if parts else "").strip().partition(":")
    quoted = re.fullmatch(r'\s*"([^"]*)"\s*', value)
    return f"{key}{colon}{quoted[1] if quoted else value}"


def _check(name: str, key: str, value: str) -> None:
    """Raise UsageError for a value that names a file, or that the setting does not take."""
    where = f"style: {key} of {name}"
    if len(value) > MOST_LETTERS:
        raise UsageError(f"{where} has {len(value)} letters, expected at most {MOST_LETTERS}", HINT)
    if "/" in value or "\\" in value:
        raise UsageError(f"{where} names a file or a folder", HINT)
    if not _is_value(key, value):
        raise UsageError(f"{where}: there is no such value: {visible(value[:60])!r}", HINT)


def _is_value(key: Any, value: str) -> bool:
    """Whether a setting takes a value, and its number is one that can be drawn."""
    import matplotlib as mpl
    from matplotlib.colors import is_color_like

    if key == CYCLE:
        return bool(_colours(value))
    if key == CMAP:
        colours = _listed(value)
        return value in mpl.colormaps or (len(colours) > 1 and all(map(is_color_like, colours)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checked = mpl.RcParams({key: value})[key]
    except (ValueError, TypeError, KeyError, Warning, RecursionError, MemoryError):  # of Python's parser, for `----1`
        return False
    if isinstance(checked, float):  # of sizes, `read_style_sheet` and `Style` know the range
        most = math.inf if key in (SIZE, *SIZES) else 1.0 if key == ALPHA else MOST_NUMBER
        return math.isfinite(checked) and 0 <= checked <= most
    return key != DASHES or not isinstance(checked, tuple)  # dashes that are short enough are drawn for ever


def _colours(value: str) -> list[str]:
    """The colours of `cycler('color', ['#0072b2', 'd55e00'])`; none where one of them is no colour."""
    from matplotlib.colors import is_color_like

    cycle = OF_COLOURS.fullmatch(value)
    names = _listed(cycle[1]) if cycle else []
    colours = [name if is_color_like(name) else f"#{name}" for name in names]
    # C0 is the first colour of a cycle: none of the cycle itself.
    return colours if all(is_color_like(name) and not OF_CYCLE.fullmatch(name) for name in colours) else []


def _families(sheet: StyleSheet) -> list[str]:
    """The fonts that a sheet names, best first."""
    import matplotlib as mpl

    settings = dict(sheet.settings)
    if not any(key in settings for key in (FAMILY, *(f"font.{name}" for name in GENERIC))):
        return []
    families: list[str] = []
    for family in _listed(settings.get(FAMILY, GENERIC[0])):
        of_kind: Any = f"font.{family}"
        if family in GENERIC:
            families += _listed(settings[of_kind]) if of_kind in settings else list(mpl.rcParamsDefault[of_kind])
        else:
            families.append(family)
    return families


def _listed(value: str) -> list[str]:
    return [part.strip().strip("'\"") for part in value.split(",") if part.strip()]


@cache
def _installed() -> frozenset[str]:
    """The names of the fonts that matplotlib knows."""
    from matplotlib import font_manager

    return frozenset(entry.name for entry in font_manager.fontManager.ttflist)
