"""Head metrics as layer x head panels. L layer, H head."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnscope.figures import layout
from attnscope.figures.colours import BLANK, Limits, find_cmap, label_colourbar
from attnscope.figures.fonts import fonts_for
from attnscope.figures.style import Style
from attnscope.figures.writer import drawing, save_figure

EDGE, BAR_GAP, BAR_PX = 18, 8, 10
NAME_ROOM, TITLE_ROOM, MARK_ROOM, NOTE_ROOM, BAR_ROOM = 46, 26, 54, 20, 74
TITLE_SIZE, MARK_SIZE = 11.0, 8.0
PANEL_PX, LEAST_PANEL_PX, LARGEST_CELL, LEAST_CELL = 340, 110, 34, 5
MOST_COLUMNS = 4


def save_metrics(
    path: Path, values: Mapping[str, np.ndarray], style: Style, *, layer_labels: Sequence[str | int]
) -> Path:
    """Write one layer x head panel per metric, each with its own colour scale; NaN cells are hatched.

    values: metric id -> L x H. Raises ValueError when a metric's shape differs from the labels or its neighbours',
    UsageError for an unknown colour map or a folder that cannot be written.

        save_metrics(Path("metrics.png"), {"entropy": entropy_LH}, Style(), layer_labels=range(28))
        save_metrics(Path("metrics.svg"), values, Style(image="svg"), layer_labels=("0", "2", "5"))
    """
    labels = [str(label) for label in layer_labels]
    shapes = {np.shape(array) for array in values.values()}
    if len(shapes) != 1 or next(iter(shapes))[0] != len(labels):
        raise ValueError(f"expected metrics of one shape with {len(labels)} layers, got {sorted(shapes)}")
    with drawing(fonts_for([])):
        return save_figure(metrics_figure(values, style, labels), path, style.image)


def metrics_figure(values: Mapping[str, np.ndarray], style: Style, labels: Sequence[str]) -> Figure:
    """The picture of all metrics; to be called within `writer.drawing`."""
    layers, heads = next(iter(values.values())).shape
    cell = max(LEAST_CELL, min(LARGEST_CELL, PANEL_PX // max(layers, heads)))
    wide, high = max(heads * cell, LEAST_PANEL_PX), max(layers * cell, LEAST_PANEL_PX)
    columns = min(len(values), MOST_COLUMNS)
    rows = math.ceil(len(values) / columns)
    hatched = any(np.isnan(array).any() for array in values.values())
    plan = layout.Frame(
        left=EDGE + NAME_ROOM,
        top=EDGE + TITLE_ROOM,
        size=(wide, high),
        bar=(BAR_GAP, BAR_PX, high),
        right=BAR_PX + BAR_ROOM,
        below=MARK_ROOM + (NOTE_ROOM if hatched else 0),
        edge=EDGE,
        columns=columns,
        pitch=(NAME_ROOM + wide + BAR_PX + BAR_ROOM, TITLE_ROOM + high + MARK_ROOM),
    )
    figure = layout.new_figure()
    panels = [layout.new_panel(figure) for _ in values]
    layout.frame(figure, panels, plan)
    for (ax, bar_ax), (name, array_LH) in zip(panels, values.items(), strict=True):
        _panel(ax, bar_ax, array_LH, style)
        _ticks(ax, labels, (wide / heads, high / layers))
        ax.set_title(name, fontsize=TITLE_SIZE, loc="left", pad=5)
    if hatched:
        words = figure.text(0, 0, "hatched: no value", fontsize=layout.NOTE_SIZE, color=layout.NOTE_COLOUR)
        layout.put_words(figure, words, plan.left, rows * plan.pitch[1] + 2 * EDGE + 6)
    return figure


def _panel(ax: Axes, bar_ax: Axes, array_LH: np.ndarray, style: Style) -> None:
    finite = array_LH[np.isfinite(array_LH)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if low == high:  # one value everywhere: a scale from nothing to it
        low, high = (0.0, 1.0) if low == 0 else (min(low, 0.0), max(low, 0.0))
    ax.patch.set(facecolor=BLANK, hatch="////", edgecolor="#b5b5b5", linewidth=0)
    box = (-0.5, array_LH.shape[1] - 0.5, array_LH.shape[0] - 0.5, -0.5)
    image = ax.imshow(
        np.ma.masked_invalid(array_LH),
        cmap=find_cmap(style.cmap),
        vmin=low,
        vmax=high,
        extent=box,
        aspect="auto",
        interpolation="nearest",
    )
    bar = ax.get_figure().colorbar(image, cax=bar_ax)  # type: ignore[union-attr]
    label_colourbar(bar, Limits(low, high), Style(), "")
    bar_ax.tick_params(labelsize=MARK_SIZE)


def _ticks(ax: Axes, labels: Sequence[str], cell: tuple[float, float]) -> None:
    """Every head and layer is numbered where there is room, else every 2nd, 5th, ..."""
    heads = ax.images[0].get_array().shape[1]  # type: ignore[union-attr]
    across = layout.label_step(cell[0], layout.line_px(MARK_SIZE) * (0.8 + 0.4 * len(str(heads - 1))))
    down = layout.label_step(cell[1], layout.line_px(MARK_SIZE))
    ax.set_xticks(range(0, heads, across), [str(head) for head in range(0, heads, across)], fontsize=MARK_SIZE)
    ax.set_yticks(range(0, len(labels), down), labels[::down], fontsize=MARK_SIZE)
    ax.set_xlabel("head", fontsize=MARK_SIZE + 1, labelpad=2)
    ax.set_ylabel("layer", fontsize=MARK_SIZE + 1, labelpad=2)
    for spine in ax.spines.values():
        spine.set_visible(False)
