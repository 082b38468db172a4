"""How far apart all pairs of heads are, alike ones side by side. N head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from attnscope.figures import layout
from attnscope.figures.colours import Limits, cmap_of, label_colourbar
from attnscope.figures.fonts import fonts_for
from attnscope.figures.style import Style, ordinal
from attnscope.figures.writer import drawing, px, save_figure

EDGE, GAP, BAR_PX, BAR_ROOM = 18, 14, 12, 56
PAIRS_PX, LARGEST_CELL, LEAST_PX = 1344, 26, 300  # two pixels for each of 672 heads
TREE_PX, STRIP_PX, STRIP_GAP = 90, 10, 3
HEADING_SIZE, BAR_SIZE = 14.0, 9.0
TREE_COLOUR = "#555555"


@dataclass(frozen=True)
class Pairs:
    """values_NN: of every pair, from 0 to 1, as labels name them. leaves: the order in which they are drawn.

    merges: (one, two, height), the tree over them: heads are 0 to N-1, N + k is what merge k made. colours: of what
    each head is called, none for most; legend: what the colours mean.
    """

    values_NN: np.ndarray
    labels: Sequence[str]
    leaves: Sequence[int]
    merges: Sequence[tuple[int, int, float]]
    colours: Sequence[Sequence[str]]
    legend: Mapping[str, str]


def save_pairs(path: Path, pairs: Pairs, style: Style, *, title: str, note: str, unit: str) -> Path:
    """Write the map of all pairs with its tree above it, and a strip at its left with the colours of the heads."""
    with drawing(fonts_for([style.title, style.about.line])):
        figure = layout.fitted(
            lambda room: pairs_figure(pairs, style, (title, note, unit), room), PAIRS_PX, style, lambda built: built
        )
        return save_figure(figure, path, style)


def pairs_figure(pairs: Pairs, style: Style, said: tuple[str, str, str], room: float) -> Figure:
    """The picture; to be called within `writer.drawing`. said: title, note, and what the colours of the map mean."""
    count, (title, note, unit) = len(pairs.labels), said
    cell = max(1, min(LARGEST_CELL, int(room // count)))
    side = max(cell * count, min(LEAST_PX, room))
    figure = layout.new_figure()
    ax, bar_ax = layout.new_panel(figure)
    tree_ax = figure.add_axes((0.1, 0.9, 0.7, 0.1))
    order = np.array(pairs.leaves)
    image = ax.imshow(
        pairs.values_NN[np.ix_(order, order)],
        cmap=cmap_of(style, "share"),
        vmin=0.0,
        vmax=1.0,
        extent=(0, count, count, 0),
        aspect="auto",
        interpolation="nearest",
    )
    bar = figure.colorbar(image, cax=bar_ax)
    label_colourbar(bar, Limits(0.0, 1.0), Style(), unit)
    bar_ax.tick_params(labelsize=BAR_SIZE)
    step = _ticks(ax, [pairs.labels[leaf] for leaf in order], side / count, style)
    _strip(ax, [pairs.colours[leaf] for leaf in order], STRIP_PX / side * count)
    _tree(tree_ax, pairs)
    layout.in_print(figure, style)
    left, below = (layout.extent(axis.get_ticklabels()) for axis in (ax.yaxis, ax.xaxis))
    frame = layout.Frame(
        left=EDGE + left[0] + STRIP_PX + 2 * STRIP_GAP,
        top=TREE_PX + 2 * STRIP_GAP,
        size=(side, side),
        bar=(GAP, BAR_PX, min(side, 240)),
        right=GAP + BAR_PX + BAR_ROOM,
        below=below[1] + GAP,
        edge=EDGE,
    )
    legend = list(pairs.legend.items())
    note += f"; every {ordinal(step)} head labelled" * (step > 2)
    texts = (style.headed(title), note, [style.about.line])
    words = layout.Words(figure, texts, HEADING_SIZE, style, legend)
    placed = layout.frame(figure, [(ax, bar_ax)], frame, words, EDGE)
    layout.place(figure, tree_ax, (placed.left, placed.top - TREE_PX - STRIP_GAP, side, TREE_PX))
    return figure


def _ticks(ax: Axes, labels: Sequence[str], cell: float, style: Style) -> int:
    """Names heads, every how many there is room for; the strip of colours stands between names and map."""
    size = layout.label_size(cell, style)
    step = layout.label_step(cell, layout.line_px(size))
    places = range(0, len(labels), step)
    for axis, pad in ((ax.yaxis, STRIP_PX + 2 * STRIP_GAP), (ax.xaxis, STRIP_GAP)):
        axis.set_ticks([place + 0.5 for place in places], [labels[place] for place in places], fontsize=size)
        axis.set_tick_params(length=0, pad=px(pad))
    for text in ax.get_xticklabels():
        text.set(rotation=90)
    for spine in ax.spines.values():
        spine.set_visible(False)
    return step


def _strip(ax: Axes, colours: Sequence[Sequence[str]], wide: float) -> None:
    """A mark per colour of a head, side by side at the left of its row; wide: of all, in cells."""
    start = -wide * (1 + STRIP_GAP / STRIP_PX)
    for row, found in enumerate(colours):
        for place, colour in enumerate(found):
            corner = (start + place * wide / len(found), row)
            ax.add_patch(Rectangle(corner, wide / len(found), 1, facecolor=colour, linewidth=0, clip_on=False))


def _tree(ax: Axes, pairs: Pairs) -> None:
    """A bracket per merge, as high as its two parts are apart."""
    count = len(pairs.leaves)
    centre = {leaf: place + 0.5 for place, leaf in enumerate(pairs.leaves)}
    height = dict.fromkeys(range(count), 0.0)
    brackets = []
    for number, (one, two, high) in enumerate(pairs.merges, start=count):
        ends = [(centre[part], height[part]) for part in (one, two)]
        brackets.append([ends[0], (ends[0][0], high), (ends[1][0], high), ends[1]])
        centre[number], height[number] = (centre[one] + centre[two]) / 2, high
    ax.add_collection(LineCollection(brackets, colors=TREE_COLOUR, linewidths=px(1.2), capstyle="projecting"))
    ax.set(xlim=(0, count), ylim=(0, max(height.values(), default=0.0) * 1.03 or 1.0))
    ax.set_axis_off()
