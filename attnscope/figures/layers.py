"""All heads of a layer in one picture.

H head, R tile row, C tile column, Q query, K key.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnscope.figures import layout
from attnscope.figures.colours import Limits, cmap_of, drawable, find_limits, label_colourbar, make_norm, quantity_name
from attnscope.figures.fonts import fonts_for, shown_label
from attnscope.figures.jobs import foot, sink_mean
from attnscope.figures.mosaic import (
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
from attnscope.figures.raster import press_images
from attnscope.figures.style import OPEN, Maps, Style, alone, bin_note, split_sink
from attnscope.figures.writer import Changed, Reused, drawing, px, save_behind, save_figure

LAYER_PX, LEAST_PANEL_PX, LARGEST_PANEL_PX, LARGEST_CELL = 2400, 130, 420, 26
TITLE_GAP, HEAD_GAP = 6, 30  # pixels between two titles, and above a map


def save_layer(path: Path, maps: Maps, style: Style) -> Path:
    """Write all heads of a layer in one picture, token labels at its margins; returns the path.

    One colour scale holds for the picture unless `style.per_head_scale`, which shows shares of each head's own.
    Raises UsageError for an unknown colour map or a folder that cannot be written.

        save_layer(Path("layers/L27.png"), maps, Style())
        save_layer(Path("layers/L27.svg"), maps, Style(image="svg", sink="mask"))
    """
    return next(save_layers([(path, maps)], style))


def save_layers(jobs: Sequence[tuple[Path, Maps]], style: Style) -> Iterator[Path]:
    """`save_layer` for many, one path at a time; layers that differ in their values alone share a figure.

    for path in save_layers([(Path("layers/L27.png"), maps)], Style()): ...
    """
    labels = {label for axes in {(maps.labels_Q, maps.labels_K) for _, maps in jobs} for one in axes for label in one}
    with drawing(fonts_for({style.title, style.about.line, *map(shown_label, labels)})):
        shown = _shown(jobs, style)
        if style.image == "png":
            yield from save_behind(((path, layer.pixels()) for path, layer in shown), style)
        else:
            yield from (save_figure(layer.figure, path, style) for path, layer in shown)


def _shown(jobs: Sequence[tuple[Path, Maps]], style: Style) -> Iterator[tuple[Path, LayerFigure]]:
    """Each path with the figure that shows what belongs there, until the next is asked for."""
    built: dict[tuple | None, LayerFigure] = {}
    for path, maps in jobs:
        kind = _kind(maps, style)
        layer = built[kind] if kind in built else LayerFigure.of(maps, style)
        if kind is not None:
            built[kind] = layer
        layer.show(maps)
        yield path, layer


def _kind(maps: Maps, style: Style) -> tuple | None:
    """What a figure is built for; None where it is for these maps alone, for titles of heads that carry numbers."""
    if style.sink == "mask" or style.per_head_scale:
        return None
    limits = find_limits([maps.values_HQK], style, maps.quantity)
    seen, digits = np.isfinite(maps.values_HQK).tobytes(), len(f"{limits.high:.0f}")
    return maps.heads, maps.kv_heads, maps.axis_Q, maps.axis_K, seen, limits.above, digits


class LayerFigure:
    """The figure of one kind of layer, its words drawn once; to be used within `writer.drawing`.

    figure = LayerFigure.of(maps, Style())
    figure.show(other_maps); figure.pixels()
    """

    def __init__(self, maps: Maps, style: Style, room: float = LAYER_PX) -> None:
        self.style = style
        self.reused: Reused | None = None
        self.bars: dict[Limits, Changed] = {}
        rest, sink_HQ = split_sink(maps, style)
        heads, queries, keys = rest.values_HQK.shape
        titles = [_panel_title(maps, (rest, sink_HQ), head, style) for head in range(heads)]
        titled = math.ceil(max(map(len, titles)) * layout.LETTER * HEAD_SIZE / px(1)) + TITLE_GAP
        shape = max(titled, keys * LARGEST_CELL) / (queries * LARGEST_CELL + HEAD_GAP) if maps.part else 1.0
        columns = grid_columns(heads, maps.kv_heads, shape)
        if style.inches is not None:
            columns = max(1, min(columns, int(room // titled)))
        self.grid = math.ceil(heads / columns), columns
        cell = _cell(max(queries, keys), room / columns, room)
        self.mosaic = make_mosaic(queries, keys, (HEAD_GAP, 18), cell, strip=sink_HQ is not None, least=titled)
        self.figure = layout.new_figure()
        self.ax, bar_ax = layout.new_panel(self.figure)
        self.limits, values_HQK = self._values(maps)
        tiles = _grid(values_HQK, *self.grid)
        self.image = draw_mosaic(self.ax, self.mosaic, tiles, self.limits, style, cmap_of(style, maps.quantity))
        if sink_HQ is not None:
            draw_strips(self.ax, self.mosaic, _grid(sink_HQ, *self.grid), maps.quantity)
        self.gaps = draw_gaps(self.ax, self.mosaic, self.grid, rest, cell)
        for head in range(heads):
            self._name(head, titles[head])
        _token_ticks(self.ax, self.mosaic, rest, self.grid, cell)
        self.bar = add_bar(bar_ax, self.image, self.limits, style, maps.quantity)
        notes = "; ".join(filter(None, (bin_note(maps), "" if sink_HQ is None else _strip_note(maps))))
        texts = (style.headed(_picture_name(maps)), notes, foot(replace(maps, turns=()), style))
        self.words = layout.Words(self.figure, texts, TITLE_SIZE, style)
        beyond = max(0, titled - TITLE_GAP - self.mosaic.shape[1] * cell)  # of the titles of the last column
        place_mosaic(self.figure, self.ax, self.bar, self.mosaic.pixels(*self.grid, cell), self.words, beyond)

    @classmethod
    def of(cls, maps: Maps, style: Style) -> LayerFigure:
        """The figure in the width that the style asks for."""
        return layout.fitted(lambda room: cls(maps, style, room), LAYER_PX, style, lambda built: built.figure)

    def _values(self, maps: Maps) -> tuple[Limits, np.ndarray]:
        """The picture's scale, and what is drawn on it (H x Q x K)."""
        rest, first = split_sink(maps, self.style)[0], alone([maps], self.style)
        limits = find_limits([rest.values_HQK], self.style, maps.quantity, alone=first)
        return limits, relative(rest, self.style, alone=first) if self.style.per_head_scale else rest.values_HQK

    def _name(self, head: int, name: str) -> None:
        down, right = self.mosaic.corner(*divmod(head, self.grid[1]))
        start = right - self.mosaic.strip - self.mosaic.strip_gap
        self.ax.annotate(name, (start, down), (0, 3), textcoords="offset points", fontsize=HEAD_SIZE)

    def show(self, maps: Maps) -> None:
        """The values, the scale and the title of another layer of the same kind."""
        self.words.set_title(self.style.headed(_picture_name(maps)))
        if self.style.per_head_scale:
            return
        before = self.limits
        self.limits, values_HQK = self._values(maps)
        array = self.mosaic.assemble(_grid(values_HQK, *self.grid))
        self.image.set_data(drawable(array, self.limits, self.style))
        if self.limits != before:
            self.image.set_norm(make_norm(self.limits, self.style))
            label_colourbar(self.bar, self.limits, self.style, quantity_name(maps.quantity, self.style))

    def pixels(self) -> np.ndarray:
        """The picture, height x width x 3: words once, a colour bar per scale, then the colours of every cell."""
        if self.reused is None:
            self.figure.set_dpi(self.style.dpi)
            self.reused = Reused(self.figure, [*self.ax.images, self.gaps, self.bar.ax, self.words.title])
        if self.limits not in self.bars:
            self.bars[self.limits] = self.reused.changed(self.bar.ax)
        pixels = self.reused.plain.copy()
        for changed in (self.bars[self.limits], self.reused.changed(self.words.title)):
            changed.press(pixels)
        by_hand = press_images(pixels, self.ax.images) and self.gaps.press(pixels)
        return pixels if by_hand else self.reused.pixels()


def layer_figure(maps: Maps, style: Style) -> Figure:
    """The picture of one layer; to be called within `writer.drawing`."""
    return LayerFigure.of(maps, style).figure


def _cell(longest: int, panel: float, room: float) -> int:
    """Pixels of a cell; a panel is no smaller than can be read, where there is room."""
    fits = min(LARGEST_CELL, int(min(LARGEST_PANEL_PX, max(panel, LEAST_PANEL_PX * (room == LAYER_PX))) // longest))
    return max(1, fits, -(-LEAST_PANEL_PX // longest) if room == LAYER_PX else 1)


def grid_columns(heads: int, kv_heads: Sequence[int], shape: float = 1.0) -> int:
    """How many heads stand side by side: whole groups of a kv head, or whole parts of one, and no row cut short.

    Where no such grid is nearly square (5 heads), the last row is short. shape: how wide a map is for its height.
    """
    groups = Counter(kv_heads).values()
    size = max(groups) if len(set(groups)) == 1 else 1
    whole = [wide for wide in range(1, heads + 1) if heads % wide == 0 and (wide % size == 0 or size % wide == 0)]
    best = max(whole, key=lambda wide: (-abs(math.log(wide * wide * shape / heads)), wide))
    if max(best * best * shape, heads) <= 4 * min(best * best * shape, heads):
        return best
    return min(heads, math.ceil(math.sqrt(1.5 * heads / shape)))


def _grid(values_H: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Heads -> a grid of them, NaN where the last row has no head left."""
    grid = np.full((rows * columns, *values_H.shape[1:]), np.nan)
    grid[: len(values_H)] = values_H
    return grid.reshape(rows, columns, *values_H.shape[1:])


def _panel_title(maps: Maps, split: tuple[Maps, np.ndarray | None], head: int, style: Style) -> str:
    """`H3 (kv 1)`, with the mean of what was taken out, and the scale where it is the head's own."""
    rest, sink_HQ = split
    values_QK = rest.values_HQK[head]
    name = f"kv {maps.heads[head]}" if maps.by_kv else f"H{maps.heads[head]}"
    if maps.titles:
        name = maps.titles[head]
    elif maps.kv_heads and not maps.by_kv:
        name += f" (kv {maps.kv_heads[head]})"
    if sink_HQ is not None and maps.column(maps.sink(head)[0]) is not None:
        name += f" · {_named(maps, head)}{sink_mean(maps, head, sink_HQ[head], values_QK)}"
    if style.per_head_scale:
        limits = find_limits([values_QK], style, maps.quantity, alone=alone([maps], style))
        name += f", max {limits.high:.2g}"
    return name


def _picture_name(maps: Maps) -> str:
    return maps.name or f"{maps.stack}layer {maps.layer}".capitalize()


def _named(maps: Maps, head: int) -> str:
    """`.(9) `, the sink of a head that does not rest on key 0."""
    key, _ = maps.sink(head)
    column = maps.column(key)
    if not key or column is None:
        return ""
    return f"key {key} " if maps.bin_size > 1 else f"{shown_label(maps.labels_K[column])}({key}) "


def _strip_note(maps: Maps) -> str:
    what = "each head's own sink (key 0 where none is named)" if maps.sinks else "key 0"
    if maps.quantity in OPEN:
        return f"{what} taken out: grey strips, its mean {maps.quantity} beside each title"
    return f"{what} taken out: grey strips from 0 to 1, its mean mass beside each title"


def _token_ticks(ax: Axes, mosaic: Mosaic, maps: Maps, grid: tuple[int, int], cell: int) -> None:
    """Token labels at the left of each row of maps and below the maps of the lowest row."""
    size = layout.label_size(cell * min(mosaic.tall, mosaic.wide))
    step_Q, step_K = (layout.label_step(cell * longer, layout.line_px(size)) for longer in (mosaic.tall, mosaic.wide))
    rows, columns = grid
    cells, labels = maps.axis_Q.marks(step_Q)
    tops = [mosaic.corner(row, 0)[0] for row in range(rows)]
    shown = [shown_label(label) for label in labels]
    places = [top + (query + 0.5) * mosaic.tall for top in tops for query in cells]
    ax.set_yticks(places, shown * rows, fontsize=size)
    cells, labels = maps.axis_K.marks(step_K)
    lowest = len(maps.heads) - (rows - 1) * columns
    lefts = [mosaic.corner(0, column)[1] for column in range(lowest)]
    shown = [shown_label(label) for label in labels]
    places = [left + (key + 0.5) * mosaic.wide for left in lefts for key in cells]
    ax.set_xticks(places, shown * lowest, fontsize=size, rotation=90)
    ax.set_ylabel(layout.axis_name(maps.axes[0], step_Q), fontsize=layout.NAME_SIZE)
    ax.set_xlabel(layout.axis_name(maps.axes[1], step_K), fontsize=layout.NAME_SIZE)
