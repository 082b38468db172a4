"""prune.png: the loss as heads go one after the other."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from attnscope.figures import layout
from attnscope.figures.colours import DARK_INK, ROUND
from attnscope.figures.fonts import fonts_for
from attnscope.figures.style import DPI, Style
from attnscope.figures.writer import drawing, save_figure

WIDE_PX, HIGH_PX, STEP_PX = 560, 380, 24
NAME_SIZE, MARK_SIZE, TITLE_SIZE = 10.5, 8.0, 13.0
MOST_NAMED = 60  # heads whose names stand below the curve
ROOM = 1.6  # above and below the curve, as a factor: enough for one number beside the flattest
LEAST = 1e-4  # nats: below, a log axis would show rounding


def save_pruning(
    path: Path, heads: Sequence[str], losses: Sequence[float], references: Sequence[tuple[str, float]], style: Style
) -> Path:
    """Write the curve: losses[n] without the first n heads, on a log scale; losses[0] is intact.

    references: names and heights of lines to compare with. Raises UsageError for a folder that cannot be written.

        save_pruning(Path("prune.png"), ["L2H4"], [0.04, 0.04], [("uniform guess", 6.2)], Style())
    """
    if len(losses) != len(heads) + 1:
        raise ValueError(f"expected {len(heads) + 1} losses for {len(heads)} heads, got {len(losses)}")
    with drawing(fonts_for([style.title, style.about.line])):
        return save_figure(pruning_figure(heads, losses, references, style), path, style)


def pruning_figure(
    heads: Sequence[str], losses: Sequence[float], references: Sequence[tuple[str, float]], style: Style
) -> Figure:
    """The curve; to be called within `writer.drawing`."""
    named = len(heads) <= MOST_NAMED
    wanted = max(WIDE_PX, STEP_PX * (len(heads) + 1) + 110) if named else 2 * WIDE_PX
    wide = min(wanted, (style.inches or np.inf) * DPI)
    figure = layout.new_figure()
    figure.set_size_inches(wide / DPI, (HIGH_PX + 110) / DPI)
    ax = figure.subplots()
    blue, orange, *_ = sns.color_palette("colorblind")
    points = {"color": blue, "marker": "o", "markersize": 4, "markeredgecolor": blue, "linewidth": 1.4}
    sns.lineplot(x=range(len(losses)), y=np.maximum(losses, LEAST), ax=ax, errorbar=None, **points)
    for name, height in (("intact", max(losses[0], LEAST)), *references):
        ax.axhline(height, linestyle="--", color=DARK_INK if name == "intact" else orange, linewidth=1)
        ax.annotate(name, (0, height), (2, 3), textcoords="offset points", fontsize=MARK_SIZE, color=DARK_INK)
    _axes(ax, ["intact", *heads] if named else [], len(losses))
    title = style.headed("Loss as heads go, the least missed first") if style.titled else ""
    figure.text(0.02, 0.98, layout.wrapped(title, wide * 0.96, TITLE_SIZE), fontsize=TITLE_SIZE, va="top")
    foot = layout.wrapped(style.about.line, wide * 0.96, layout.NOTE_SIZE) if style.captioned else ""
    figure.text(0.02, 0.015, foot, fontsize=layout.NOTE_SIZE, color=layout.NOTE_COLOUR)
    layout.in_print(figure, style)
    figure.subplots_adjust(left=70 / wide, right=1 - 20 / wide, top=0.9 if title else 0.97, bottom=0.21)
    return figure


def _axes(ax: Axes, names: Sequence[str], count: int) -> None:
    """The heads below, where they are named, else how many are gone; a log scale with plain numbers."""
    if names:
        ax.set_xticks(range(count), names, fontsize=MARK_SIZE, rotation=90)
    ax.set_xlabel("head that goes" if names else "heads gone", fontsize=NAME_SIZE)
    ax.set_ylabel("nats per token", fontsize=NAME_SIZE)
    ax.set_yscale("log")
    low, high = (end * by for end, by in zip(ax.dataLim.intervaly, (1 / ROOM, ROOM), strict=True))
    ax.set_ylim(low, high)
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))))
    ticks = [digit * 10.0**power for power in powers for digit in ROUND[:-1]]
    ax.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.tick_params(axis="y", labelsize=MARK_SIZE)
    ax.grid(color="#e6e6e6", linewidth=0.6)
    sns.despine(ax=ax)
