"""knockout.png: what is lost by window of layers, as a curve; or the text, each token in the colour of its effect.

Shapes: N cut, T token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnscope.figures import layout
from attnscope.figures.colours import DARK_INK
from attnscope.figures.fonts import fonts_for, shown_text
from attnscope.figures.intervals import drawn_ends
from attnscope.figures.prose import RAMP
from attnscope.figures.style import DPI, Style
from attnscope.figures.writer import drawing, save_figure

WIDE_PX, HIGH_PX, STEP_PX = 560, 300, 22
LEGEND_PX, TITLE_PX, NAMES_PX = 17, 34, 78  # above and below the curve
NAME_SIZE, MARK_SIZE, TITLE_SIZE, TOKEN_SIZE = 10.5, 8.0, 13.0, 11.5
LINE_PX, MARGIN_PX, BLANK_PX = 30, 26, 5
MOST_NAMED = 50  # cuts whose names stand below the curve
BLUE, ORANGE, *_ = sns.color_palette("colorblind").as_hex()


@dataclass(frozen=True)
class Curve:
    """Effects in the model's order, (N,) each. names: of the cuts. low, high: their intervals, NaN for none. others: of
    the same weights on other keys the low end of 95 % of the effects, their mean, and the high end; NaN for none."""

    names: Sequence[str]
    effect: np.ndarray
    low: np.ndarray
    high: np.ndarray
    unit: str
    others: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None


def save_curve(path: Path, curve: Curve, style: Style, title: str, note: str = "") -> Path:
    """Write the curve. Raises UsageError for a folder that cannot be written.

    save_curve(Path("knockout.png"), Curve(["L0"], one, none, none, "nats"), Style(), "What is lost without the look")
    """
    with drawing(fonts_for([title, note, style.about.line])):
        return save_figure(curve_figure(curve, style, title, note), path, style)


def curve_figure(curve: Curve, style: Style, title: str, note: str) -> Figure:
    """The curve; to be called within `writer.drawing`."""
    count = len(curve.names)
    wide = min(max(WIDE_PX, STEP_PX * min(count, MOST_NAMED) + 110), (style.inches or np.inf) * DPI)
    figure = layout.new_figure()
    shown = 2 + sum(bool(np.isfinite(one).any()) for one in ([curve.low, curve.high], *(curve.others or ())[:1]))
    above, below = LEGEND_PX * shown + TITLE_PX * style.titled, NAMES_PX + TITLE_PX * style.captioned
    high = HIGH_PX + above + below
    figure.set_size_inches(wide / DPI, high / DPI)
    ax, place_N = figure.subplots(), np.arange(count)
    if curve.others is not None and np.isfinite(curve.others[0]).any():
        least_N, mean_N, most_N = curve.others
        ax.plot(place_N, mean_N, color=ORANGE, linewidth=1.2, label="same weights on other keys: mean, 95 %")
        ax.fill_between(place_N, least_N, most_N, color=ORANGE, alpha=0.18, linewidth=0)
    low_N, high_N = drawn_ends(curve.effect, curve.low, curve.high)
    if np.isfinite(low_N).any():
        ax.fill_between(place_N, low_N, high_N, color=BLUE, alpha=0.2, linewidth=0, label="95 % interval, of all cuts")
    ax.plot(place_N, curve.effect, "o-", color=BLUE, markersize=4, linewidth=1.5, label="these keys")
    ax.axhline(0, color=DARK_INK, linewidth=0.8)
    _axes(ax, curve)
    if style.titled:
        figure.text(0.02, 1 - 12 / high, title, fontsize=TITLE_SIZE, va="top")
    for line, text in enumerate((style.about.line, note) if style.captioned else ()):
        figure.text(0.02, (8 + 17 * line) / high, text, fontsize=layout.NOTE_SIZE, color=layout.NOTE_COLOUR)
    layout.in_print(figure, style)
    figure.subplots_adjust(left=70 / wide, right=1 - 20 / wide, top=1 - above / high, bottom=below / high)
    return figure


def _axes(ax: Axes, curve: Curve) -> None:
    """The cuts below by name, as many as have room."""
    step = 1 + (len(curve.names) - 1) // MOST_NAMED
    ax.set_xticks(range(0, len(curve.names), step), curve.names[::step], fontsize=MARK_SIZE, rotation=90)
    ax.set_xlabel("layers that are cut", fontsize=NAME_SIZE)
    ax.set_ylabel(f"{curve.unit} lost", fontsize=NAME_SIZE)
    ax.tick_params(axis="y", labelsize=MARK_SIZE)
    ax.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    ax.legend(fontsize=MARK_SIZE, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    sns.despine(ax=ax)


@dataclass(frozen=True)
class ColouredTokens:
    """A text by its tokens, and each one's effect, NaN for none, (T,); queries: the places that are framed."""

    plain: Sequence[str]
    effect_T: np.ndarray
    unit: str
    queries: Sequence[int] = ()


def save_tokens(path: Path, tokens: ColouredTokens, style: Style, title: str, note: str = "") -> Path:
    """Write the text in the colours of its effects. Raises UsageError for a folder that cannot be written.

    save_tokens(Path("knockout.png"), ColouredTokens(["the", " bank"], effect_T, "nats"), Style(), "Each key's worth")
    """
    with drawing(fonts_for([title, note, style.about.line, "".join(tokens.plain)])):
        return save_figure(tokens_figure(tokens, style, title, note), path, style)


def tokens_figure(tokens: ColouredTokens, style: Style, title: str, note: str) -> Figure:
    """The text, line by line; to be called within `writer.drawing`."""
    wide = int(min(2 * WIDE_PX, (style.inches or np.inf) * DPI))
    figure = layout.new_figure()
    figure.set_size_inches(wide / DPI, 1)
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    most = max(float(np.nanmax(np.abs(tokens.effect_T))), 1e-9)
    size = style.points[1] if style.points else TOKEN_SIZE
    placed, x, line, widest = [], float(MARGIN_PX), 0, 0.0
    for place, plain in enumerate(tokens.plain):
        said = plain.replace("\n", "↵").replace("\t", " ")
        text = figure.text(0, 0, shown_text(said.strip()) or "·", fontsize=size)
        width = text.get_window_extent(renderer).width * DPI / figure.dpi
        if x + width > wide - MARGIN_PX and x > MARGIN_PX:
            x, line = float(MARGIN_PX), line + 1
        x += BLANK_PX * said.startswith(" ")
        placed.append((text, x, line, tokens.effect_T[place], place in tokens.queries))
        x += width + 2 * BLANK_PX
        widest = max(widest, x)
        if plain.endswith("\n"):
            x, line = float(MARGIN_PX), line + 1
    wide = min(wide, max(WIDE_PX + 100, int(widest) + MARGIN_PX))
    above, below = 20 + 50 * style.titled, 16 + 40 * style.captioned
    high = above + LINE_PX * (line + 1) + below
    figure.set_size_inches(wide / DPI, high / DPI)
    for text, left, row, effect, asked in placed:
        text.set_position(((left + BLANK_PX / 2) / wide, 1 - (above + LINE_PX * row) / high))
        edge = DARK_INK if asked else "none"
        text.set_bbox({"facecolor": colour_of(effect / most), "edgecolor": edge, "pad": 2.0, "linewidth": 1.0})
        text.set_verticalalignment("top")
    if style.titled:
        figure.text(MARGIN_PX / wide, 1 - 14 / high, title, fontsize=TITLE_SIZE, va="top")
    scale = f"orange: up to {most:.2f} {tokens.unit} lost without the key; blue: gained; framed: query"
    lines = (style.about.line, note, scale) if style.captioned else ()
    for number, said in enumerate(filter(None, lines)):
        figure.text(
            MARGIN_PX / wide, (10 + 17 * number) / high, said, fontsize=layout.NOTE_SIZE, color=layout.NOTE_COLOUR
        )
    layout.in_print(figure, style)
    return figure


def colour_of(share: float) -> str | tuple[float, ...]:
    """White for 0, orange for what helps, blue for what harms, no colour for what was not cut; share: -1 to 1."""
    if np.isnan(share):
        return "none"
    end = RAMP[-1] / 255 if share > 0 else np.array([70, 130, 200]) / 255
    return tuple(float(one) for one in 1 - abs(share) * (1 - end))
