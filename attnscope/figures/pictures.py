"""Weights on the patches of a picture, drawn over it: a panel per head, next to the picture itself.

patching.png: effects of patches by layer and position as two grids.
head_js.png: how far apart all pairs of heads are, alike ones side by side.

Shapes: N patch or head, L layer, P position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from attnscope.figures import layout
from attnscope.figures.colours import (
    DARK_INK,
    Limits,
    cell_number,
    cmap_of,
    drawable,
    find_limits,
    hatch,
    label_colourbar,
    make_norm,
    quantity_name,
)
from attnscope.figures.layout import save_drawn
from attnscope.figures.style import DPI, UNSURE, PatchSheet, Style, effect_scale, ordinal
from attnscope.figures.writer import px, runs

BAR_NAME = 20  # pixels of the name of the one bar
EDGE, BAR_GAP, BAR_PX, BAR_ROOM, TITLE_ROOM, GAP, BELOW = 18, 8, 10, 62, 40, 20, 12
SHEET_PX, LARGEST_PX, HIGHEST_PX, LEAST_PX = 1500, 460, 420, 150
MOST_COLUMNS = 4
HEADING_SIZE, TITLE_SIZE, MARK_SIZE = 13.0, 11.0, 9.0
PALE = 0.6  # of the picture's contrast that is left below the colours
CLEAREST, DENSEST = 0.0, 0.65  # opacity of the least and of the largest weight: the picture stays visible


def save_patches(path: Path, sheet: PatchSheet, style: Style) -> Path:
    """Write the picture and, for each head, its weights over the picture; returns the path.

    One colour scale, and one bar, holds for all heads unless `style.per_head_scale`.

        save_patches(Path("picture.png"), PatchSheet(image, boxes, (Patches(weights, "L1H3"),)), Style())
    """
    texts = [style.title, sheet.title, sheet.note]
    return save_drawn(path, style, texts, lambda room: patches_figure(sheet, style, room), SHEET_PX)


def patches_figure(sheet: PatchSheet, style: Style, room: float = SHEET_PX) -> Figure:
    """The picture of it; to be called within `writer.drawing`."""
    image, box_N4, heads = sheet.image, sheet.box_N4, sheet.heads
    columns = min(len(heads) + 1, MOST_COLUMNS if style.inches is None else max(1, int(room // LEAST_PX)))
    # Each panel has a bar at its side, or one scale has one bar, at the right of all.
    bar_room = BAR_GAP + BAR_PX + BAR_ROOM + BAR_NAME * (not style.per_head_scale)
    side = bar_room if style.per_head_scale else GAP
    size = _size(image, (room - bar_room * (not style.per_head_scale)) / columns - side)
    edges, cells = grid_of(box_N4, [head.weight_N for head in heads])
    scales = [find_limits([cells[:, None]], style)] * len(heads)
    if style.per_head_scale:
        scales = [find_limits([cells_of_head[None]], style) for cells_of_head in cells]
    figure = layout.new_figure()
    pairs = [layout.new_panel(figure) for _ in range(len(heads) + 1)]
    # First the picture itself, with the edges of its patches where they are far enough apart to be seen.
    scaled = image.resize((2 * int(size[0]), 2 * int(size[1])), Image.Resampling.LANCZOS)
    growth = layout.growth(style)
    _show(pairs[0][0], np.asarray(scaled), ("picture", ""), growth)
    for left, top, right, bottom in box_N4 if len(box_N4) <= 1024 else []:
        box = (left, top), right - left, bottom - top
        pairs[0][0].add_patch(Rectangle(*box, fill=False, edgecolor="#ffffff88", linewidth=px(0.7)))
    pairs[0][0].set(xlim=(0, 1), ylim=(1, 0))
    pairs[0][1].set_axis_off()
    # Below the weights it is pale, and the colour map is clear at its low end: the picture stays visible.
    pale = np.asarray(scaled.convert("L"), float)[..., None].repeat(3, -1) * PALE + 255 * (1 - PALE)
    share = np.linspace(0, 1, 256)
    colours = cmap_of(style, "weight")(share)
    colours[:, 3] = CLEAREST + (DENSEST - CLEAREST) * share**0.7
    cmap = ListedColormap(colours).with_extremes(bad=(0, 0, 0, 0))
    with_bar = max(1, min(columns - 1, len(heads)))
    for place, (head, cell, limits) in enumerate(zip(heads, cells, scales, strict=True), start=1):
        ax, bar_ax = pairs[place]
        _show(ax, pale.astype(np.uint8), (head.title, head.note), growth)
        mesh = ax.pcolormesh(*edges, drawable(cell, limits, style), cmap=cmap, norm=make_norm(limits, style))
        mesh.set(linewidth=0, antialiased=False)
        ax.set(xlim=(0, 1), ylim=(1, 0))
        if style.per_head_scale or place == with_bar:
            bar = figure.colorbar(mesh, cax=bar_ax)
            bar_ax.tick_params(labelsize=MARK_SIZE)
            label_colourbar(bar, limits, style, "" if style.per_head_scale else quantity_name("weight", style))
        else:
            bar_ax.set_axis_off()
    layout.in_print(figure, style)
    plan = layout.PanelPlan(
        left=EDGE,
        top=TITLE_ROOM * growth,
        size=size,
        bar=(BAR_GAP, BAR_PX, size[1]),
        right=bar_room - GAP,
        below=0,
        edge=EDGE,
        columns=columns,
        pitch=(size[0] + side, TITLE_ROOM * growth + size[1] + BELOW),
    )
    texts = (style.headed(sheet.title), sheet.note, [style.about.line])
    words = layout.Words(figure, texts, HEADING_SIZE, style)
    layout.frame(figure, pairs, plan, words, EDGE)
    return figure


def grid_of(box_N4: np.ndarray, weights: Sequence[np.ndarray]) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """The edges (across, down) of the finest cells that patches are made of, and each head's weights on these.

    A patch of many cells gives each its share; cells of no patch, and of hidden ones, are NaN.

    >>> grid_of(np.array([[0.0, 0, 0.5, 1], [0.5, 0, 1, 1]]), [np.array([0.25, 0.75])])[1].tolist()
    [[[0.25, 0.75]]]
    """
    box_N4 = box_N4.round(6)
    across, down = (np.unique(box_N4[:, sides]) for sides in ([0, 2], [1, 3]))
    cells = np.full((len(weights), len(down) - 1, len(across) - 1), np.nan)
    for patch, (left, top, right, bottom) in enumerate(box_N4):
        rows, columns = _between(down, top, bottom), _between(across, left, right)
        high, wide = np.diff(down[rows.start : rows.stop + 1]), np.diff(across[columns.start : columns.stop + 1])
        share = high[:, None] * wide / ((bottom - top) * (right - left))
        for head, weight_N in enumerate(weights):
            if np.isfinite(weight_N[patch]):
                part = cells[head, rows, columns]
                cells[head, rows, columns] = np.nan_to_num(part) + weight_N[patch] * share
    return (across, down), cells


def _between(edges: np.ndarray, low: float, high: float) -> slice:
    return slice(int(np.searchsorted(edges, low)), int(np.searchsorted(edges, high)))


def _size(image: Image.Image, room: float) -> tuple[float, float]:
    """Pixels of a panel in the picture's proportions."""
    wide = max(1.0, min(room, LARGEST_PX, HIGHEST_PX * image.width / image.height))
    return math.floor(wide), math.ceil(wide * image.height / image.width)


def _show(ax: Axes, pixels: np.ndarray, words: tuple[str, str], growth: float) -> None:
    """A picture with a frame, a title and a line below that; growth: of their room."""
    ax.imshow(pixels, extent=(0, 1, 1, 0), aspect="auto", interpolation="antialiased")
    ax.add_patch(Rectangle((0, 0), 1, 1, fill=False, edgecolor=DARK_INK, linewidth=px(1), clip_on=False))
    title, note = words
    up = round(20 * growth), round(5 * growth)
    layout.say_above(ax, ((title, TITLE_SIZE, up[0], DARK_INK), (note, MARK_SIZE, up[1], layout.NOTE_COLOUR)))
    ax.set_axis_off()


MOST_PRINTED = 400  # cells with numbers


@dataclass(frozen=True)
class Grid:
    """Effects of layers by positions, (L, P) by name; hatched: where an interval holds 0."""

    layers: Sequence[str]
    names: Sequence[str]
    panels: Mapping[str, np.ndarray]
    unit: str
    hatched: Mapping[str, np.ndarray] = field(default_factory=dict)


GRID_TITLE = 13.0  # points


def save_grid(path: Path, grid: Grid, style: Style, title: str) -> Path:
    """Write the grids. Raises UsageError for a folder that cannot be written."""
    return save_drawn(path, style, [title, *grid.names], lambda room: grid_figure(grid, style, title))


def grid_figure(grid: Grid, style: Style, title: str) -> Figure:
    """Two grids of one scale, one below the other; to be called within `writer.drawing`."""
    left, right, head, mark_size = 64, 90, 28, 8.0
    # Cells share the width, as long as each can be seen; a row is lower, so that both grids are seen at once.
    count, room = len(grid.names), (1600.0 if style.inches is None else style.inches * DPI) - left - right
    cell = float(np.clip(room / count, 4, 34))
    # No narrower than the title and the foot, nor lower than the name of the colour bar.
    lines = (title * style.titled, GRID_TITLE), (style.about.line * style.captioned, layout.NOTE_SIZE)
    words_px = max(layout.letters_wide(line, size) for line, size in lines) - right
    wide = max(cell * count, min(words_px, room), 200.0)
    high = max(min(cell, 24.0) * len(grid.layers), layout.letters_wide(grid.unit, mark_size))
    hatched = UNSURE * any(map(np.any, grid.hatched.values()))
    foot_px = 38 + layout.FOOT_LINE_PX * bool(hatched)
    above, below = 38 * style.titled, 84 + foot_px * style.captioned
    whole_wide, whole_high = wide + left + right, above + below + len(grid.panels) * (high + head)
    figure = layout.new_figure()
    figure.set_size_inches(whole_wide / DPI, whole_high / DPI)
    # One scale, and one colour bar, for both.
    values = np.concatenate([np.ravel(value_LP) for value_LP in grid.panels.values()])
    quantity, least, most = effect_scale(min(0.0, np.nanmin(values)), max(0.0, np.nanmax(values)))
    scale = {"vmin": least, "vmax": most, "cmap": cmap_of(style, quantity)}
    # Numbers where the longest has room in a cell, and a reader would not drown in them.
    points = min(6.0, px(0.85 * cell) / (len("-0.53") * layout.NUMBER_LETTER))
    printed = points >= layout.LEAST_NUMBER and len(grid.layers) * count <= MOST_PRINTED
    for number, (name, value_LP) in enumerate(grid.panels.items()):
        ax, bar_ax = layout.new_panel(figure)
        top = above + head + number * (high + head)
        layout.place(figure, ax, (left, top, wide, high))
        layout.place(figure, bar_ax, (left + wide + 12, top, 10, high))
        numbers = np.array([[cell_number(value, style) for value in value_P] for value_P in value_LP])
        written = {"annot": numbers if printed else False, "fmt": "", "annot_kws": {"size": points}}
        sns.heatmap(value_LP, ax=ax, cbar=not number, cbar_ax=bar_ax, linewidths=0.3, **written, **scale)
        bar_ax.set_visible(not number)
        for text in ax.texts:
            text.set_label(layout.NUMBER)
        for row, hatched_P in enumerate(grid.hatched.get(name, ())):
            for columns in runs(hatched_P):
                corner = columns.start, row
                ax.add_patch(Rectangle(corner, columns.stop - columns.start, 1, **hatch(quantity)))
        bar_ax.set_ylabel(grid.unit, fontsize=mark_size)
        bar_ax.tick_params(labelsize=mark_size)
        ax.set_title(name, fontsize=10.5, loc="left", pad=5)
        step = 1 + (len(grid.layers) - 1) // max(1, int(high / 11))
        marks = np.arange(0, len(grid.layers), step) + 0.5
        ax.set_yticks(marks, grid.layers[::step], fontsize=mark_size, rotation=0)
        ax.set_xticks([])
    layout.name_columns(ax, grid.names, 60, mark_size, middle=0.5)
    layout.entitle(figure, style, (title, hatched, style.about.line), GRID_TITLE, (14, 10, 8))
    return figure


PAIRS_PX = 1344  # two pixels for each of 672 heads


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
    return save_drawn(
        path, style, [style.title], lambda room: pairs_figure(pairs, style, (title, note, unit), room), PAIRS_PX
    )


def pairs_figure(pairs: Pairs, style: Style, words: tuple[str, str, str], room: float) -> Figure:
    """The picture; to be called within `writer.drawing`. words: title, note, and what the colours of the map mean."""
    count, (title, note, unit) = len(pairs.labels), words
    gap, bar_px, bar_room, tree_px, strip_px, strip_gap = 14, 12, 56, 90, 10, 3
    cell = max(1, min(26, int(room // count)))
    side = max(cell * count, min(300, room))
    figure = layout.new_figure()
    ax, bar_ax = layout.new_panel(figure)
    tree_ax = figure.add_axes((0.1, 0.9, 0.7, 0.1))
    # Rows and columns are in the order of the tree, so that alike heads are neighbours.
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
    bar_ax.tick_params(labelsize=MARK_SIZE)
    # Heads are named, every how many there is room for; between names and map is the strip of colours.
    size = layout.label_size(side / count, style, "x")
    step = layout.label_step(side / count, layout.line_px(size))
    places, names = np.arange(0, count, step) + 0.5, [pairs.labels[leaf] for leaf in order[::step]]
    for axis, pad, rotation in ((ax.yaxis, strip_px + 2 * strip_gap, 0), (ax.xaxis, strip_gap, 90)):
        axis.set_ticks(places, names, fontsize=size, rotation=rotation)
        axis.set_tick_params(length=0, pad=px(pad))
    ax.spines[:].set_visible(False)
    # In the strip each row has a mark per colour of its head, side by side.
    wide = strip_px / side * count
    for row, leaf in enumerate(order):
        for place, colour in enumerate(pairs.colours[leaf]):
            width = wide / len(pairs.colours[leaf])
            corner = place * width - wide * (1 + strip_gap / strip_px), row
            ax.add_patch(Rectangle(corner, width, 1, facecolor=colour, linewidth=0, clip_on=False))
    _tree(tree_ax, pairs)
    layout.in_print(figure, style)
    left, below = (layout.extent(axis.get_ticklabels()) for axis in (ax.yaxis, ax.xaxis))
    frame = layout.PanelPlan(
        left=EDGE + left[0] + strip_px + 2 * strip_gap,
        top=tree_px + 2 * strip_gap,
        size=(side, side),
        bar=(gap, bar_px, min(side, 240)),
        right=gap + bar_px + bar_room,
        below=below[1] + gap,
        edge=EDGE,
    )
    legend = list(pairs.legend.items())
    note += f"; every {ordinal(step)} head labelled" * (step > 2)
    texts = (style.headed(title), note, [style.about.line])
    around = layout.Words(figure, texts, 14.0, style, legend)
    placed = layout.frame(figure, [(ax, bar_ax)], frame, around, EDGE)
    layout.place(figure, tree_ax, (placed.left, placed.top - tree_px - strip_gap, side, tree_px))
    return figure


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
    ax.add_collection(LineCollection(brackets, colors=layout.NOTE_COLOUR, linewidths=px(1.2), capstyle="projecting"))
    ax.set(xlim=(0, count), ylim=(0, max(height.values(), default=0.0) * 1.03 or 1.0))
    ax.set_axis_off()
