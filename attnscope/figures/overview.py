"""All heads of a layer, and all heads of all layers, in one picture each.

H head, L layer, R tile row, C tile column, Q query, K key.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure

from attnscope.figures import layout
from attnscope.figures.colours import cmap_of, find_limits
from attnscope.figures.fonts import fonts_for, shown_label
from attnscope.figures.jobs import foot, sink_mean, sink_note
from attnscope.figures.mosaic import (
    Mosaic,
    add_bar,
    draw_mosaic,
    draw_strips,
    make_mosaic,
    relative,
)
from attnscope.figures.style import Maps, Style, bin_note, count, split_sink
from attnscope.figures.writer import drawing, save_figure

TITLE_SIZE, HEAD_SIZE = 14.0, 9.0
EDGE, GAP = 16, 14
BAR_GAP, BAR_PX, LEAST_BAR_PX, LONGEST_BAR_PX = 18, 14, 180, 420
LAYER_PX, LEAST_PANEL_PX, LARGEST_PANEL_PX, LARGEST_LAYER_CELL = 2400, 130, 420, 26
SCREEN_PX = 1800
OVERVIEW_PX, LEAST_THUMB_PX, LARGEST_THUMB_PX, LARGEST_THUMB_CELL = 1680, 40, 150, 16


def save_layer(path: Path, maps: Maps, style: Style) -> Path:
    """Write all heads of a layer in one picture, token labels at its margins; returns the path.

    One colour scale holds for the picture unless `style.per_head_scale`, which shows shares of each head's own.
    Raises UsageError for an unknown colour map or a folder that cannot be written.

        save_layer(Path("layers/L27.png"), maps, Style())
        save_layer(Path("layers/L27.svg"), maps, Style(image="svg", sink="mask"))
    """
    texts = [style.title, style.about.line, *map(shown_label, (*maps.labels_Q, *maps.labels_K))]
    with drawing(fonts_for(texts)):
        return save_figure(layer_figure(maps, style), path, style)


def layer_figure(maps: Maps, style: Style) -> Figure:
    """The picture of one layer; to be called within `writer.drawing`."""
    return layout.fitted(lambda room: _layer_figure(maps, style, room), LAYER_PX, style, lambda figure: figure)


def _layer_figure(maps: Maps, style: Style, room: float) -> Figure:
    rest, sink_HQ = split_sink(maps, style)
    heads, queries, keys = rest.values_HQK.shape
    columns = grid_columns(heads, maps.kv_heads)
    rows = math.ceil(heads / columns)
    least = min(LEAST_PANEL_PX, int(room // columns))
    panel = max(least, min(LARGEST_PANEL_PX, int(room // columns)))
    longest = max(queries, keys)
    cell = max(1, min(LARGEST_LAYER_CELL, panel // longest), -(-least // longest) if room == LAYER_PX else 1)
    mosaic = make_mosaic(queries, keys, (30, 18), cell, strip=sink_HQ is not None)

    figure = layout.new_figure()
    ax, bar_ax = layout.new_panel(figure)
    limits = find_limits([rest.values_HQK], style, maps.quantity, sink_removed=sink_HQ is not None)
    values_HQK = rest.values_HQK
    if style.per_head_scale:
        values_HQK = relative(rest, style, sink_removed=sink_HQ is not None)
    cmap = cmap_of(style, maps.quantity)
    image = draw_mosaic(ax, mosaic, _grid(values_HQK, rows, columns), limits, style, cmap)
    if sink_HQ is not None:
        draw_strips(ax, mosaic, _grid(sink_HQ, rows, columns), maps.quantity)
    for head in range(heads):
        down, right = mosaic.corner(*divmod(head, columns))
        name = _panel_title(maps, head, None if sink_HQ is None else sink_HQ[head], rest.values_HQK[head])
        if style.per_head_scale:
            own = find_limits([rest.values_HQK[head]], style, maps.quantity, sink_removed=sink_HQ is not None)
            name += f", max {own.high:.2g}"
        start = right - mosaic.strip - mosaic.strip_gap
        ax.annotate(name, (start, down), (0, 3), textcoords="offset points", fontsize=HEAD_SIZE)
    _token_ticks(ax, mosaic, rest, heads, columns, cell)
    notes = "; ".join(filter(None, (bin_note(maps), "" if sink_HQ is None else _strip_note(maps))))
    bar = add_bar(bar_ax, image, limits, style, maps.quantity)
    words = layout.Words(figure, (style.headed(f"Layer {maps.layer}"), notes, foot(maps, style)), TITLE_SIZE, style)
    _frame(figure, ax, bar, mosaic.pixels(rows, columns, cell), words)
    return figure


def grid_columns(heads: int, kv_heads: Sequence[int]) -> int:
    """How many heads stand side by side: whole groups of a kv head, or whole parts of one, and no row cut short.

    Where no such grid is nearly square (5 heads), the last row is short.
    """
    groups = Counter(kv_heads).values()
    size = max(groups) if len(set(groups)) == 1 else 1
    whole = [wide for wide in range(1, heads + 1) if heads % wide == 0 and (wide % size == 0 or size % wide == 0)]
    best = max(whole, key=lambda wide: (-abs(math.log(wide * wide / heads)), wide))
    if max(best * best, heads) <= 4 * min(best * best, heads):
        return best
    return math.ceil(math.sqrt(1.5 * heads))


def _grid(values_H: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Heads -> a grid of them, NaN where the last row has no head left."""
    grid = np.full((rows * columns, *values_H.shape[1:]), np.nan)
    grid[: len(values_H)] = values_H
    return grid.reshape(rows, columns, *values_H.shape[1:])


def _panel_title(maps: Maps, head: int, sink_Q: np.ndarray | None, values_QK: np.ndarray) -> str:
    name = f"kv {maps.heads[head]}" if maps.by_kv else f"H{maps.heads[head]}"
    if maps.kv_heads and not maps.by_kv:
        name += f" (kv {maps.kv_heads[head]})"
    if sink_Q is None:
        return name
    return f"{name} · {sink_mean(sink_Q, values_QK, maps.key0[head : head + 1]):.2f}".replace("-", "−")


def _strip_note(maps: Maps) -> str:
    if maps.quantity == "logit":
        return "key 0 taken out: grey strips, its mean logit beside each title"
    return "key 0 taken out: grey strips from 0 to 1, its mean mass beside each title"


def _token_ticks(ax: Axes, mosaic: Mosaic, maps: Maps, heads: int, columns: int, cell: int) -> None:
    """Token labels at the left of each row of maps and below the maps of the lowest row."""
    size = layout.label_size(cell)
    step = layout.label_step(cell, layout.line_px(size))
    rows = math.ceil(heads / columns)
    cells, labels = maps.axis_Q.marks(step)
    tops = [mosaic.corner(row, 0)[0] for row in range(rows)]
    shown = [shown_label(label) for label in labels]
    ax.set_yticks([top + query + 0.5 for top in tops for query in cells], shown * rows, fontsize=size)
    cells, labels = maps.axis_K.marks(step)
    lowest = heads - (rows - 1) * columns
    lefts = [mosaic.corner(0, column)[1] for column in range(lowest)]
    shown = [shown_label(label) for label in labels]
    ax.set_xticks([left + key + 0.5 for left in lefts for key in cells], shown * lowest, fontsize=size, rotation=90)
    ax.set_ylabel(layout.axis_name(maps.axes[0], step), fontsize=layout.NAME_SIZE)
    ax.set_xlabel(layout.axis_name(maps.axes[1], step), fontsize=layout.NAME_SIZE)


def save_overview(path: Path, layers: Sequence[Maps], style: Style, *, subtitle: str = "") -> Path:
    """Write every head of every layer as a thumbnail in one picture, rows = layers, columns = heads.

    Maps larger than a thumbnail show the greatest weight of each square of cells, so that thin lines survive; the
    picture says so. Layers may differ in their heads, not in their tokens.
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
    split = [split_sink(maps, style) for maps in layers]
    removed = split[0][1] is not None
    quantity = layers[0].quantity
    limits = find_limits([rest.values_HQK for rest, _ in split], style, quantity, sink_removed=removed)
    numbers = sorted({head for maps in layers for head in maps.heads})
    least = LEAST_THUMB_PX if room == OVERVIEW_PX else 1
    thumb = max(least, min(LARGEST_THUMB_PX, int(room // len(numbers))))
    pool = -(-max(split[0][0].values_HQK.shape[1:]) // thumb)
    tiles_LHQK = np.stack([_thumbnails(rest, numbers, pool, style, removed) for rest, _ in split])
    queries, keys = tiles_LHQK.shape[2:]
    cell = max(1, min(LARGEST_THUMB_CELL, thumb // max(queries, keys)))
    mosaic = make_mosaic(queries, keys, (5, 5), cell, strip=removed)

    figure = layout.new_figure()
    ax, bar_ax = layout.new_panel(figure)
    image = draw_mosaic(ax, mosaic, tiles_LHQK, limits, style, cmap_of(style, quantity))
    if removed:
        draw_strips(ax, mosaic, np.stack([_strips(rest, sink, numbers, pool) for rest, sink in split]), quantity)
    _number_ticks(ax, mosaic, layers, numbers, cell)
    squares = f"each cell the greatest of {pool} x {pool}" if pool > 1 else ""
    notes = "; ".join(filter(None, (subtitle, bin_note(layers[0]), squares, _removed_note(split, layers[0]))))
    bar = add_bar(bar_ax, image, limits, style, quantity)
    title = f"{count(len(layers), 'layer')} × {count(len(numbers), 'kv head' if layers[0].by_kv else 'head')}"
    below = foot(replace(layers[0], kv_heads=()), style, tokens=False)
    words = layout.Words(figure, (style.headed(title), notes, below), TITLE_SIZE, style)
    _frame(figure, ax, bar, mosaic.pixels(len(layers), len(numbers), cell), words)
    return figure


def _removed_note(split: Sequence[tuple[Maps, np.ndarray | None]], maps: Maps) -> str:
    sinks = [sink_HQ.ravel() for _, sink_HQ in split if sink_HQ is not None]
    if not sinks:
        return ""
    rows = [rest.values_HQK.reshape(-1, rest.values_HQK.shape[-1]) for rest, _ in split]
    key0 = [mass for rest, _ in split for mass in rest.key0]
    return sink_note(maps, np.concatenate(sinks), np.concatenate(rows), key0)


def _thumbnails(maps: Maps, numbers: Sequence[int], pool: int, style: Style, removed: bool) -> np.ndarray:
    """A layer's maps in the columns of their heads, made smaller; NaN for a head that the layer has not."""
    values_HQK = relative(maps, style, sink_removed=removed) if style.per_head_scale else maps.values_HQK
    small = pooled(values_HQK, pool, pool)
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


def _number_ticks(ax: Axes, mosaic: Mosaic, layers: Sequence[Maps], numbers: Sequence[int], cell: int) -> None:
    """Layer numbers at the left, head numbers above; on all sides of a picture that no screen holds."""
    middles = [mosaic.corner(row, 0)[0] + mosaic.queries / 2 for row in range(len(layers))]
    ax.set_yticks(middles, [str(maps.layer) for maps in layers], fontsize=HEAD_SIZE)
    centres = [mosaic.corner(0, column)[1] + mosaic.keys / 2 for column in range(len(numbers))]
    step = layout.label_step(mosaic.keys * cell, layout.line_px(HEAD_SIZE) * 0.6 * len(str(numbers[-1])))
    ax.set_xticks(centres[::step], [str(head) for head in numbers[::step]], fontsize=HEAD_SIZE)
    large = max(mosaic.pixels(len(layers), len(numbers), cell)) > SCREEN_PX
    ax.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=large, labelright=large)
    ax.xaxis.set_label_position("top")
    ax.set_xlabel("kv head" if layers[0].by_kv else "head", fontsize=layout.NAME_SIZE)
    ax.set_ylabel("layer", fontsize=layout.NAME_SIZE)


def _frame(figure: Figure, ax: Axes, bar: Colorbar, size: tuple[int, int], words: layout.Words) -> None:
    """Put image (size: width and height in pixels), colour bar and words on a figure just large enough."""
    numbered_above = ax.xaxis.get_label_position() == "top"
    both = bool(ax.yaxis.get_tick_params()["labelright"])
    labels, numbers = (
        layout.extent(ax.get_yticklabels())[0],
        layout.axis_room(ax.get_xticklabels(), layout.NAME_SIZE, GAP)[1],
    )
    gap = BAR_GAP + (labels + 4 if both else 0)
    bar_words = layout.axis_room(bar.ax.get_yticklabels(), float(bar.ax.yaxis.label.get_fontsize()), GAP)[0]
    plan = layout.Frame(
        left=round(EDGE + layout.axis_room(ax.get_yticklabels(), layout.NAME_SIZE, GAP)[0]),
        top=round(numbers) if numbered_above else round(layout.line_px(HEAD_SIZE)) + 4,
        size=size,
        bar=(gap, BAR_PX, min(LONGEST_BAR_PX, max(size[1], LEAST_BAR_PX))),
        right=gap + BAR_PX + bar_words,
        below=numbers if both or not numbered_above else 0,
        edge=EDGE,
    )
    layout.frame(figure, [(ax, bar.ax)], plan, words, plan.left)
