"""All heads of all layers in one picture.

H head, L layer, R tile row, C tile column, Q query, K key.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from attnscope.figures import layout
from attnscope.figures.colours import BLANK, find_limits
from attnscope.figures.fonts import fonts_for
from attnscope.figures.jobs import column_mean, foot, sink_name, sink_note
from attnscope.figures.mosaic import (
    FRAME_PX,
    HEAD_SIZE,
    TITLE_SIZE,
    Mosaic,
    add_bar,
    draw_gaps,
    draw_mosaic,
    draw_strips,
    make_mosaic,
    place_mosaic,
    relative,
)
from attnscope.figures.raster import Boxes
from attnscope.figures.style import (
    OPEN,
    ROLE_COLOURS,
    Maps,
    Style,
    alone,
    bin_note,
    count,
    layer_name,
    split_sink,
)
from attnscope.figures.writer import drawing, save_figure
from attnscope.utils.display import printed

SCREEN_PX, GAP_PX = 1800, 8  # a gap holds the frames of two neighbours
OVERVIEW_PX, LEAST_THUMB_PX, LARGEST_THUMB_PX, LARGEST_THUMB_CELL = 1680, 40, 150, 16


def save_overview(path: Path, layers: Sequence[Maps], style: Style, *, subtitle: str = "") -> Path:
    """Write every head of every layer as a thumbnail in one picture, rows = layers, columns = heads.

    Maps larger than a thumbnail show the greatest weight of each square of cells, so that thin lines survive; the
    picture says so. Layers may differ in their heads, not in their tokens; one without heads is a grey row with its
    name, so that the others keep their place.
    Raises UsageError for an unknown colour map or a folder that cannot be written.

        save_overview(Path("overview.png"), layers, Style(), subtitle="demo · the financial bank …")
        save_overview(Path("overview.png"), layers, Style(scale="log"))
    """
    with drawing(fonts_for([subtitle, style.title, style.about.line])):
        return save_figure(overview_figure(layers, style, subtitle), path, style)


def overview_figure(layers: Sequence[Maps], style: Style, subtitle: str = "") -> Figure:
    """The picture of all layers; to be called within `writer.drawing`."""

    def build(room: float) -> Figure:
        return _overview_figure(layers, style, subtitle, room)

    return layout.fitted(build, OVERVIEW_PX, style, lambda figure: figure)


def _overview_figure(layers: Sequence[Maps], style: Style, subtitle: str, room: float) -> Figure:
    drawn, rows = [maps for maps in layers if maps.heads], [row for row, maps in enumerate(layers) if maps.heads]
    split = [split_sink(maps, style) for maps in drawn]
    removed = split[0][1] is not None
    quantity = drawn[0].quantity
    style = style.of_overview(drawn[0].tokens, quantity)
    first = alone(drawn, style)
    limits = find_limits([rest.values_HQK for rest, _ in split], style, quantity, alone=first)
    numbers = sorted({head for maps in layers for head in maps.heads})
    least = LEAST_THUMB_PX if room == OVERVIEW_PX else 1
    thumb = max(least, min(LARGEST_THUMB_PX, int(room // len(numbers))))
    pool = _pool(len(split[0][0].labels_Q), len(split[0][0].labels_K), thumb)
    tiles = [_thumbnails(rest, numbers, pool, style, first) for rest, _ in split]
    queries, keys = tiles[0].shape[1:]
    cell: float = max(1, min(LARGEST_THUMB_CELL, thumb // max(queries, keys)))
    if style.in_print:
        cell = room / (len(numbers) * (keys + 1))
    mosaic = make_mosaic(queries, keys, (GAP_PX, GAP_PX), cell, strip=removed)

    figure = layout.new_figure()
    ax, bar_ax = layout.new_panel(figure)
    image = draw_mosaic(ax, mosaic, _rows(tiles, rows, len(layers)), limits, style, quantity)
    if removed:
        strips = [_strips(rest, sink, numbers, pool[0]) for rest, sink in split]
        draw_strips(ax, mosaic, _rows(strips, rows, len(layers)), quantity)
    grid = len(layers), len(numbers)
    _name_rows(ax, mosaic, layers, len(numbers))
    if pool == (1, 1):
        draw_gaps(ax, mosaic, grid, split[0][0], cell)
    roles = _frames(ax, mosaic, layers, numbers, cell)
    _number_ticks(ax, mosaic, layers, numbers, cell, style)
    squares = f"each cell the greatest of {pool[0]} x {pool[1]}" if max(pool) > 1 else ""
    without = "grey rows: layers without attention" * (len(drawn) < len(layers))
    framed = f"frames: roles by {drawn[0].roles_by}" * bool(roles and drawn[0].roles_by)
    said = (subtitle, bin_note(drawn[0]), squares, _removed_note(split, drawn[0]), without, framed)
    notes = "; ".join(filter(None, said))
    bar = add_bar(bar_ax, image, limits, style, quantity)
    shown = count(len(numbers), "kv head" if drawn[0].by_kv else "head")
    title = f"{drawn[0].stack.capitalize()}{count(len(drawn), 'layer')} × {shown}"
    below = foot(replace(drawn[0], kv_heads=(), sinks=drawn[0].sinks if max(pool) == 1 else ()), style, tokens=False)
    words = layout.Words(figure, (style.headed(title), notes, below), TITLE_SIZE, style, roles)
    place_mosaic(figure, ax, bar, mosaic.pixels(*grid, cell), words)
    return figure


def _pool(queries: int, keys: int, thumb: int) -> tuple[int, int]:
    """How many queries and keys a cell of a thumbnail stands for: of one number, unless one side is far longer."""
    if max(queries, keys) <= 2 * min(queries, keys):
        queries = keys = max(queries, keys)
    return -(-queries // thumb), -(-keys // thumb)


def _rows(tiles: Sequence[np.ndarray], rows: Sequence[int], count: int) -> np.ndarray:
    """The tiles of some rows among so many, NaN in the others."""
    found = np.full((count, *tiles[0].shape), np.nan)
    found[list(rows)] = tiles
    return found


def _name_rows(ax: Axes, mosaic: Mosaic, layers: Sequence[Maps], columns: int) -> None:
    """Each layer without heads as a grey row with what it is."""
    high, right = mosaic.shape[0], mosaic.size(1, columns)[1]
    for row, maps in enumerate(layers):
        if not maps.heads:
            top, _ = mosaic.corner(row, 0)
            ax.add_patch(Rectangle((0, top), right, high, facecolor=BLANK, linewidth=0))
            middle = right / 2, top + high / 2
            ax.text(*middle, maps.name, color=layout.NOTE_COLOUR, fontsize=HEAD_SIZE, ha="center", va="center")


def _frames(
    ax: Axes, mosaic: Mosaic, layers: Sequence[Maps], numbers: Sequence[int], cell: float
) -> list[tuple[str, str]]:
    """A frame around every head that has a role; the roles that there are, and their colours."""
    found = [
        (role, mosaic.frame(row, numbers.index(head), FRAME_PX / cell))
        for row, maps in enumerate(layers)
        for head, role in zip(maps.heads, maps.roles, strict=False)
        if role in ROLE_COLOURS
    ]
    if found:
        colours = [ROLE_COLOURS[role] for role, sides in found for _ in sides]
        Boxes(ax, np.concatenate([sides for _, sides in found]), colours)
    there = {role for role, _ in found}
    return [(role, colour) for role, colour in ROLE_COLOURS.items() if role in there]


def _removed_note(split: Sequence[tuple[Maps, np.ndarray | None]], maps: Maps) -> str:
    sinks = [sink_HQ.ravel() for _, sink_HQ in split if sink_HQ is not None]
    if not sinks:
        return ""
    if maps.sinks:
        return "each head's own sink taken out (grey strips" + (")" if maps.quantity in OPEN else ", 0 to 1)")
    rows = [rest.values_HQK.reshape(-1, rest.values_HQK.shape[-1]) for rest, _ in split]
    key0 = [mass for rest, _ in split for mass in rest.key0]
    mean = float(np.mean(key0)) if key0 else column_mean(np.concatenate(sinks), np.concatenate(rows))
    return sink_note(maps, sink_name(maps), printed(mean))


def _thumbnails(
    maps: Maps, numbers: Sequence[int], pool: tuple[int, int], style: Style, first: int | None
) -> np.ndarray:
    """A layer's maps in the columns of their heads, made smaller; NaN for a head that the layer has not."""
    values_HQK = relative(maps, style, alone=first) if style.per_head_scale else maps.values_HQK
    small = pooled(values_HQK, *pool) if max(pool) > 1 else values_HQK
    tiles = np.full((len(numbers), *small.shape[1:]), np.nan)
    tiles[[numbers.index(head) for head in maps.heads]] = small
    return tiles


def _strips(maps: Maps, sink_HQ: np.ndarray | None, numbers: Sequence[int], pool: int) -> np.ndarray:
    assert sink_HQ is not None
    small = pooled(sink_HQ[:, :, None], pool, 1)[:, :, 0]
    strips = np.full((len(numbers), small.shape[1]), np.nan)
    strips[[numbers.index(head) for head in maps.heads]] = small
    return strips


def pooled(values_HQK: np.ndarray, queries: int, keys: int) -> np.ndarray:
    """The greatest finite value of each block of queries x keys; NaN where there is none."""
    heads, rows, columns = values_HQK.shape
    pad = ((0, 0), (0, -rows % queries), (0, -columns % keys))
    low = np.where(np.isfinite(values_HQK), values_HQK, -np.inf)
    blocks = np.pad(low, pad, constant_values=-np.inf).reshape(heads, -(-rows // queries), queries, -1, keys)
    greatest = blocks.max((2, 4))
    return np.where(np.isfinite(greatest), greatest, np.nan)


def _number_ticks(
    ax: Axes, mosaic: Mosaic, layers: Sequence[Maps], numbers: Sequence[int], cell: float, style: Style
) -> None:
    """Layer numbers at the left, head numbers above; on all sides of a picture that no screen holds."""
    high, wide = mosaic.shape
    middles = [mosaic.corner(row, 0)[0] + high / 2 for row in range(len(layers))]
    ax.set_yticks(middles, [layer_name(maps.layer, maps.parallel) for maps in layers], fontsize=HEAD_SIZE)
    centres = [mosaic.corner(0, column)[1] + wide / 2 for column in range(len(numbers))]
    step = layout.label_step(wide * cell, layout.line_px(layout.sized(HEAD_SIZE, style)) * 0.6 * len(str(numbers[-1])))
    ax.set_xticks(centres[::step], [str(head) for head in numbers[::step]], fontsize=HEAD_SIZE)
    large = max(mosaic.pixels(len(layers), len(numbers), cell)) > SCREEN_PX
    ax.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=large, labelright=large)
    ax.xaxis.set_label_position("top")
    ax.set_xlabel("kv head" if layers[0].by_kv else "head", fontsize=layout.NAME_SIZE)
    ax.set_ylabel("layer", fontsize=layout.NAME_SIZE)
