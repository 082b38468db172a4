"""Weights on the patches of a picture, drawn over it: a panel per head, beside the picture itself.

N patch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import Colormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from attnscope.figures import layout
from attnscope.figures.colours import (
    DARK_INK,
    Limits,
    cmap_of,
    drawable,
    find_limits,
    label_colourbar,
    make_norm,
    quantity_name,
)
from attnscope.figures.fonts import fonts_for
from attnscope.figures.style import PatchSheet, Style
from attnscope.figures.writer import drawing, px, save_figure

BAR_NAME = 20  # pixels of what stands beside the one bar
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
    with drawing(fonts_for([style.title, style.about.line, sheet.title, sheet.note])):
        figure = layout.fitted(lambda room: patches_figure(sheet, style, room), SHEET_PX, style, lambda built: built)
        return save_figure(figure, path, style)


def patches_figure(sheet: PatchSheet, style: Style, room: float = SHEET_PX) -> Figure:
    """The picture of it; to be called within `writer.drawing`."""
    image, box_N4, heads = sheet.image, sheet.box_N4, sheet.heads
    columns = min(len(heads) + 1, MOST_COLUMNS if style.inches is None else max(1, int(room // LEAST_PX)))
    bar_room = BAR_GAP + BAR_PX + BAR_ROOM + BAR_NAME * (not style.per_head_scale)
    beside = bar_room if style.per_head_scale else GAP  # of each panel: one scale has one bar, at the right of all
    size = _size(image, (room - bar_room * (not style.per_head_scale)) / columns - beside)
    edges, cells = grid_of(box_N4, [head.weight_N for head in heads])
    limits = [find_limits([cells[:, None]], style)] * len(heads)
    if style.per_head_scale:
        limits = [find_limits([one[None]], style) for one in cells]
    figure = layout.new_figure()
    pairs = [layout.new_panel(figure) for _ in range(len(heads) + 1)]
    scaled = image.resize((2 * int(size[0]), 2 * int(size[1])), Image.Resampling.LANCZOS)
    _show(pairs[0][0], np.asarray(scaled), ("picture", ""))
    _lines(pairs[0][0], box_N4)
    pairs[0][1].set_axis_off()
    pale = np.asarray(scaled.convert("L"), float)[..., None].repeat(3, -1) * PALE + 255 * (1 - PALE)
    with_bar = min(columns - 1, len(heads))
    for place, (head, cell, limit) in enumerate(zip(heads, cells, limits, strict=True), start=1):
        ax, bar_ax = pairs[place]
        _show(ax, pale.astype(np.uint8), (head.title, head.note))
        mesh = _over(ax, (*edges, cell), limit, style)
        if style.per_head_scale or place == max(1, with_bar):
            _bar(bar_ax, mesh, limit, style)
        else:
            bar_ax.set_axis_off()
    layout.in_print(figure, style)
    plan = layout.Frame(
        left=EDGE,
        top=TITLE_ROOM,
        size=size,
        bar=(BAR_GAP, BAR_PX, size[1]),
        right=bar_room - GAP,
        below=0,
        edge=EDGE,
        columns=columns,
        pitch=(size[0] + beside, TITLE_ROOM + size[1] + BELOW),
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


def _show(ax: Axes, pixels: np.ndarray, said: tuple[str, str]) -> None:
    """A picture with a frame, a title and a line below that."""
    ax.imshow(pixels, extent=(0, 1, 1, 0), aspect="auto", interpolation="antialiased")
    ax.add_patch(Rectangle((0, 0), 1, 1, fill=False, edgecolor=DARK_INK, linewidth=px(1), clip_on=False))
    title, note = said
    layout.say_above(ax, ((title, TITLE_SIZE, 20, DARK_INK), (note, MARK_SIZE, 5, layout.NOTE_COLOUR)))
    ax.set_axis_off()


def _lines(ax: Axes, box_N4: np.ndarray) -> None:
    """The patches' edges, where they are far enough apart to be seen."""
    for left, top, right, bottom in box_N4 if len(box_N4) <= 1024 else []:
        box = (left, top), right - left, bottom - top
        ax.add_patch(Rectangle(*box, fill=False, edgecolor="#ffffff88", linewidth=px(0.7)))
    ax.set(xlim=(0, 1), ylim=(1, 0))


def _clear(cmap: Colormap) -> Colormap:
    """The colour map over white paper as over the picture: the smaller a weight, the more is seen through it."""
    colours = cmap(np.linspace(0, 1, 256))
    colours[:, 3] = CLEAREST + (DENSEST - CLEAREST) * np.linspace(0, 1, 256) ** 0.7
    return ListedColormap(colours).with_extremes(bad=(0, 0, 0, 0))


def _over(ax: Axes, cells: tuple[np.ndarray, np.ndarray, np.ndarray], limits: Limits, style: Style) -> QuadMesh:
    """Weights in the colours of their scale, over what is there."""
    across, down, values = cells
    shown = drawable(values, limits, style)
    mesh = ax.pcolormesh(across, down, shown, cmap=_clear(cmap_of(style, "weight")), norm=make_norm(limits, style))
    mesh.set(linewidth=0, antialiased=False)
    ax.set(xlim=(0, 1), ylim=(1, 0))
    return mesh


def _bar(bar_ax: Axes, mesh: QuadMesh, limits: Limits, style: Style) -> None:
    figure = bar_ax.get_figure()
    assert isinstance(figure, Figure)
    bar = figure.colorbar(mesh, cax=bar_ax)
    bar_ax.tick_params(labelsize=MARK_SIZE)
    label_colourbar(bar, limits, style, "" if style.per_head_scale else quantity_name("weight", style))
