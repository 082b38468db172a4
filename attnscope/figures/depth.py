"""Metrics over the layers: a panel each, with a line for the mean of the heads and bands for their spread.

N head, L layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnscope.figures import layout
from attnscope.figures.colours import DARK_INK
from attnscope.figures.fonts import fonts_for
from attnscope.figures.intervals import drawn_ends
from attnscope.figures.style import Depth, Style
from attnscope.figures.writer import drawing, save_figure

EDGE, NAME_ROOM, TITLE_ROOM, MARK_ROOM, GAP = 18, 46, 50, 48, 24
PANEL_PX, ACROSS_PX, MOST_COLUMNS = (360, 210), 1300, 3
HEADING_SIZE, TITLE_SIZE, MARK_SIZE = 14.0, 11.0, 8.0
BLUE, ORANGE, *_ = sns.color_palette("colorblind").as_hex()
BANDS = ((100, "all heads", "#d9e8f3"), (50, "the middle half of the heads", "#a6cbe6"))


def save_depth(path: Path, depths: Sequence[Depth], style: Style, note: str = "") -> Path:
    """Write a panel for each metric. Raises UsageError for a folder that cannot be written.

    save_depth(Path("depth.png"), [Depth("sink", "share of the weight", layer_N, sink_N, null_N)], Style())
    """
    with drawing(fonts_for([style.title, style.about.line, note])):
        figure = layout.fitted(
            lambda room: depth_figure(depths, style, note, room), ACROSS_PX, style, lambda built: built
        )
        return save_figure(figure, path, style)


def depth_figure(depths: Sequence[Depth], style: Style, note: str, room: float) -> Figure:
    """The picture; to be called within `writer.drawing`."""
    columns = max(1, min(MOST_COLUMNS, len(depths), int(room // (PANEL_PX[0] + NAME_ROOM + GAP))))
    wide, high = min(PANEL_PX[0], room - NAME_ROOM - GAP), PANEL_PX[1]
    figure = layout.new_figure()
    panels = [layout.new_panel(figure) for _ in depths]
    for (ax, beside_ax), depth in zip(panels, depths, strict=True):
        beside_ax.set_axis_off()
        _draw(ax, depth)
        _axes(ax, depth, wide, style)
    layout.in_print(figure, style)
    frame = layout.Frame(
        left=EDGE + NAME_ROOM,
        top=TITLE_ROOM,
        size=(wide, high),
        bar=(0, 1, 1),
        right=GAP,
        below=MARK_ROOM,
        edge=EDGE,
        columns=columns,
        pitch=(NAME_ROOM + wide + GAP, TITLE_ROOM + high + MARK_ROOM),
    )
    layers = len(np.unique(np.concatenate([depth.layer_N for depth in depths])))
    title = style.headed(f"{', '.join(depth.name for depth in depths)} over {layers} layers")
    words = layout.Words(figure, (title, note, [style.about.line]), HEADING_SIZE, style, _legend(depths))
    layout.frame(figure, panels, frame, words, EDGE)
    return figure


def _legend(depths: Sequence[Depth]) -> list[tuple[str, str]]:
    """What lines, bands and bars are, and their colours."""
    found = [("mean of the heads", BLUE), *((name, colour) for _, name, colour in reversed(BANDS))]
    intervals = any(len(depth.interval) for depth in depths)
    uniform = any(np.isfinite(depth.null_N).any() for depth in depths)
    found += [("95 % interval of the mean over the texts", DARK_INK)] * intervals
    return found + [("uniform attention", ORANGE)] * uniform


def _draw(ax: Axes, depth: Depth) -> None:
    """The bands first, so that no line lies behind."""
    heads = {"x": depth.layer_N, "y": depth.value_N, "ax": ax}
    for share, _, colour in BANDS:
        sns.lineplot(**heads, errorbar=("pi", share), color=colour, linewidth=0, err_kws={"alpha": 1.0, "linewidth": 0})
    if np.isfinite(depth.null_N).any():
        sns.lineplot(x=depth.layer_N, y=depth.null_N, ax=ax, errorbar=None, color=ORANGE, linestyle="--", linewidth=1.2)
    points = {"color": BLUE, "marker": "o", "markersize": 4.5, "markeredgecolor": BLUE, "linewidth": 1.6}
    sns.lineplot(**heads, errorbar=None, **points)
    if depth.interval:
        layers, low, high = depth.interval
        mean = np.array([np.nanmean(depth.value_N[depth.layer_N == layer]) for layer in layers])
        ax.vlines(layers, *drawn_ends(mean, low, high), color=DARK_INK, linewidth=2.2, zorder=3)


def _axes(ax: Axes, depth: Depth, wide: float, style: Style) -> None:
    """Every layer is numbered where there is room; the scale has the metric's zero."""
    layers = np.unique(depth.layer_N)
    first, last = (int(layers[0]), int(layers[-1])) if len(layers) else (0, 0)
    step = layout.label_step(wide / max(1, last - first), layout.line_px(layout.sized(MARK_SIZE, style)) * 1.4)
    ax.set_xticks(range(first, last + 1, step))
    ax.set_xlim(first - 0.3, last + 0.3)
    least, high = float(np.nanmin(depth.value_N)), ax.get_ylim()[1]
    ax.set_ylim(min(least, 0.0), high)
    ax.tick_params(labelsize=MARK_SIZE)
    ax.set_xlabel("layer", fontsize=MARK_SIZE + 1, labelpad=2)
    ax.set_ylabel("")
    ax.grid(axis="y", color="#ececec", linewidth=0.8)
    ax.set_axisbelow(True)
    sns.despine(ax=ax)
    name, unit = (depth.name, TITLE_SIZE, 22, DARK_INK), (depth.unit, MARK_SIZE, 7, layout.NOTE_COLOUR)
    layout.say_above(ax, (name, unit))
