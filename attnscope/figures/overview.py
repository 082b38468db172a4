"""All heads of all layers in one picture, and all heads of a layer in one picture.

H head, L layer, R tile row, C tile column, Q query, K key.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation, Text

from attnscope.figures import layout
from attnscope.figures.colours import BLANK, Limits, find_limits, label_colourbar, quantity_name
from attnscope.figures.fonts import fonts_for, shown_label, undrawable
from attnscope.figures.mosaic import (
    FRAME_PX,
    HEAD_SIZE,
    TITLE_SIZE,
    MosaicAxes,
    column_mean,
    foot,
    make_mosaic,
    on_scale,
    role_words,
    sink_mean,
    sink_name,
    sink_note,
    texts_of,
    title_px,
    title_words,
)
from attnscope.figures.style import (
    DPI,
    OPEN,
    ROLE_COLOURS,
    Maps,
    Style,
    alone,
    bin_note,
    layer_name,
    parallel_note,
    role_title,
    split_sink,
)
from attnscope.figures.writer import (
    Boxes,
    Changed,
    Reused,
    SharedRows,
    drawing,
    press_images,
    px,
    save_behind,
    save_figure,
)
from attnscope.utils.display import number_of, printed

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
    with drawing(fonts_for([subtitle, style.title, style.about.line]), style.sheet):
        return save_figure(overview_figure(layers, style, subtitle), path, style)


def overview_figure(layers: Sequence[Maps], style: Style, subtitle: str = "") -> Figure:
    """The picture of all layers; to be called within `writer.drawing`."""
    build = partial(_overview_figure, layers, style, subtitle)
    return layout.fitted(build, OVERVIEW_PX, style, lambda figure: figure)


def _overview_figure(layers: Sequence[Maps], style: Style, subtitle: str, room: float) -> Figure:
    drawn, rows = [maps for maps in layers if maps.heads], [row for row, maps in enumerate(layers) if maps.heads]
    split = [split_sink(maps, style) for maps in drawn]
    removed = split[0][1] is not None
    quantity = drawn[0].quantity
    style = style.for_maps(drawn[0], overview=True)
    first = alone(drawn, style)
    limits = find_limits([rest.values_HQK for rest, _ in split], style, quantity, alone=first)
    # A map larger than a thumbnail is made smaller, a small one has cells of several pixels.
    numbers = sorted({head for maps in layers for head in maps.heads})
    least = LEAST_THUMB_PX if room == OVERVIEW_PX else 1
    thumb = max(least, min(LARGEST_THUMB_PX, int(room // len(numbers))))
    pool = _pool(len(split[0][0].labels_Q), len(split[0][0].labels_K), thumb)
    tiles = [_thumbnails(on_scale(rest, style, alone=first), rest, numbers, pool) for rest, _ in split]
    queries, keys = tiles[0].shape[1:]
    cell: float = max(1, min(LARGEST_THUMB_CELL, thumb // max(queries, keys)))
    if style.in_print:
        cell = room / (len(numbers) * (keys + 1))
    mosaic = make_mosaic(queries, keys, (GAP_PX, GAP_PX), cell, strip=removed)

    def in_rows(tiles: Sequence[np.ndarray]) -> np.ndarray:
        array = np.full((len(layers), *tiles[0].shape), np.nan)
        array[rows] = tiles
        return array

    figure = layout.new_figure()
    ax, bar_ax = layout.new_panel(figure)
    tiled = MosaicAxes(ax, mosaic, (len(layers), len(numbers)), cell, style, quantity)
    sinks = [(rest, sink_HQ[..., None]) for rest, sink_HQ in split if sink_HQ is not None]
    strips = [_thumbnails(sink_HQ1, rest, numbers, (pool[0], 1))[..., 0] for rest, sink_HQ1 in sinks]
    tiled.draw(in_rows(tiles), in_rows(strips) if removed else None, limits)
    # A layer without heads is a grey row with what it is, so that the others keep their place.
    right = mosaic.size(1, len(numbers))[1]
    for top, maps in ((mosaic.corner(row, 0)[0], maps) for row, maps in enumerate(layers) if not maps.heads):
        ax.add_patch(Rectangle((0, top), right, mosaic.shape[0], facecolor=BLANK, linewidth=0))
        middle = right / 2, top + mosaic.shape[0] / 2
        ax.text(*middle, maps.name, color=layout.NOTE_COLOUR, fontsize=HEAD_SIZE, ha="center", va="center")
    if pool == (1, 1):
        tiled.draw_gaps(split[0][0])
    # A frame around every head that has a role, in the role's colour.
    framed = [
        (role, mosaic.frame(row, numbers.index(head), FRAME_PX / cell))
        for row, maps in enumerate(layers)
        for head, role in zip(maps.heads, maps.roles, strict=False)
        if role in ROLE_COLOURS
    ]
    if framed:
        colours = [ROLE_COLOURS[role] for role, sides in framed for _ in sides]
        Boxes(ax, np.concatenate([sides for _, sides in framed]), colours)
    roles = [(role, colour) for role, colour in ROLE_COLOURS.items() if role in {role for role, _ in framed}]
    # Layer numbers at the left, head numbers above; on all sides of a picture that no screen holds.
    high, wide = mosaic.shape
    middles = [mosaic.corner(row, 0)[0] + high / 2 for row in range(len(layers))]
    ax.set_yticks(middles, [layer_name(maps.layer, maps.parallel) for maps in layers], fontsize=HEAD_SIZE)
    centres = [mosaic.corner(0, column)[1] + wide / 2 for column in range(len(numbers))]
    step = layout.label_step(wide * cell, layout.line_px(layout.sized(HEAD_SIZE, style)) * 0.6 * len(str(numbers[-1])))
    ax.set_xticks(centres[::step], [str(head) for head in numbers[::step]], fontsize=HEAD_SIZE)
    large = max(mosaic.pixels(*tiled.grid, cell)) > SCREEN_PX
    ax.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=large, labelright=large)
    ax.xaxis.set_label_position("top")
    ax.set_xlabel("kv head" if layers[0].by_kv else "head", fontsize=layout.NAME_SIZE)
    ax.set_ylabel("layer", fontsize=layout.NAME_SIZE)
    # The note above the maps says how they were made, the note below what signs mean.
    notes = (
        subtitle,
        bin_note(drawn[0]),
        f"each cell the greatest of {pool[0]} x {pool[1]}" if max(pool) > 1 else "",
        _removed_note(split, drawn[0]),
        "grey rows: layers without attention" * (len(drawn) < len(layers)),
        f"frames: roles by {drawn[0].roles_by}" * bool(roles and drawn[0].roles_by),
    )
    bar = tiled.add_bar(bar_ax, limits)
    heads = number_of(len(numbers), "kv head" if drawn[0].by_kv else "head")
    title = style.headed(f"{drawn[0].stack.capitalize()}{number_of(len(drawn), 'layer')} × {heads}")
    below = foot(replace(drawn[0], kv_heads=(), sinks=drawn[0].sinks if max(pool) == 1 else ()), style, tokens=False)
    words = layout.Words(figure, (title, "; ".join(filter(None, notes)), below), TITLE_SIZE, style, roles)
    tiled.place(bar, words)
    return figure


def _pool(queries: int, keys: int, thumb: int) -> tuple[int, int]:
    """How many queries and keys a cell of a thumbnail has: of one number, unless one side is far longer."""
    if max(queries, keys) <= 2 * min(queries, keys):
        queries = keys = max(queries, keys)
    return -(-queries // thumb), -(-keys // thumb)


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


def _thumbnails(values_HQK: np.ndarray, maps: Maps, numbers: Sequence[int], pool: tuple[int, int]) -> np.ndarray:
    """What a layer's heads show in the columns of the heads, made smaller; NaN for a head that the layer has not."""
    small = pooled(values_HQK, *pool) if max(pool) > 1 else values_HQK
    tiles = np.full((len(numbers), *small.shape[1:]), np.nan)
    tiles[[numbers.index(head) for head in maps.heads]] = small
    return tiles


def pooled(values_HQK: np.ndarray, queries: int, keys: int) -> np.ndarray:
    """The greatest finite value of each block of queries x keys; NaN where there is none."""
    heads, rows, columns = values_HQK.shape
    pad = ((0, 0), (0, -rows % queries), (0, -columns % keys))
    low = np.where(np.isfinite(values_HQK), values_HQK, -np.inf)
    blocks = np.pad(low, pad, constant_values=-np.inf).reshape(heads, -(-rows // queries), queries, -1, keys)
    greatest = blocks.max((2, 4))
    return np.where(np.isfinite(greatest), greatest, np.nan)


LAYER_PX, LEAST_PANEL_PX, LARGEST_PANEL_PX, LARGEST_CELL = 2400, 130, 420, 26
TITLE_GAP, HEAD_GAP = 6, 30  # pixels between two titles, and above a map with a title of one line


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
    with drawing(fonts_for(texts_of((maps for _, maps in jobs), style)), style.sheet):
        shown = figures_of(jobs, style)
        if style.image == "png":
            yield from save_behind(((path, layer.pixels(), layer.shared) for path, layer in shown), style)
        else:
            yield from (save_figure(layer.figure, path, style) for path, layer in shown)


def figures_of(jobs: Sequence[tuple[Path, Maps]], style: Style) -> Iterator[tuple[Path, LayerFigure]]:
    """Each path with the figure that shows its layer until the next is asked for; within `writer.drawing`."""
    style = style.for_maps(jobs[0][1]) if jobs else style  # all are of one text
    titles = [_titles(maps, style) for _, maps in jobs]
    # One size for all: numbers in titles would give each layer a width of its own, roles a height.
    lines = [title.split("\n") for of_layer in titles for title in of_layer]
    longest = max((len(line) for of_title in lines for line in of_title), default=0)
    titled = math.ceil(longest * layout.LETTER * layout.sized(HEAD_SIZE, style, layout.HEADING) / px(1)) + TITLE_GAP
    tallest = max(map(len, lines), default=1)
    gap = HEAD_GAP + round(tallest * title_px(style) - layout.line_px(HEAD_SIZE))
    built: dict[tuple, LayerFigure] = {}
    for (path, maps), of_layer in zip(jobs, titles, strict=True):
        layer = Layer.of(maps, style, of_layer, (titled, gap, tallest))
        kind = layer.kind(style)
        if kind not in built:
            built[kind] = LayerFigure.of(layer, style)
        built[kind].show(layer)
        yield path, built[kind]


@dataclass(frozen=True)
class Layer:
    """What a picture of a layer shows: its maps without what is taken out (H x Q), which has a strip of its own.

    values_HQK: what is drawn on the scale: shares of each head's own with `per_head_scale`. room: pixels from the
    left of a title to the next, and above a map; lines of the tallest title.
    """

    maps: Maps
    rest: Maps
    sink_HQ: np.ndarray | None
    limits: Limits
    values_HQK: np.ndarray
    titles: tuple[str, ...]
    room: tuple[int, int, int]

    @classmethod
    def of(cls, maps: Maps, style: Style, titles: tuple[str, ...], room: tuple[int, int, int]) -> Layer:
        """The values and the scale, as the style asks for them."""
        (rest, sink_HQ), first = split_sink(maps, style), alone([maps], style)
        limits = find_limits([rest.values_HQK], style, maps.quantity, alone=first)
        return cls(maps, rest, sink_HQ, limits, on_scale(rest, style, alone=first), titles, room)

    @property
    def notes(self) -> str:
        """What is below the title."""
        maps, strips = self.maps, ""
        if self.sink_HQ is not None:
            what = "each head's own sink (key 0 where none is named)" if maps.sinks else "key 0"
            scale, mean = ("", maps.quantity) if maps.quantity in OPEN else (" from 0 to 1", "mass")
            strips = f"{what} taken out: grey strips{scale}, its mean {mean} next to each title"
        return "; ".join(filter(None, (maps.window, parallel_note(maps), bin_note(maps), strips)))

    def foot(self, style: Style) -> tuple[str, ...]:
        """What is below the maps."""
        maps = self.maps
        roles = role_words(maps) if maps.titles else title_words(maps, range(len(maps.heads))) * style.titled
        return foot(replace(maps, turns=()), style, roles=roles)

    def kind(self, style: Style) -> tuple:
        """Layers of one kind differ in values, titles and scale alone, and share a figure."""
        maps, limits = self.maps, self.limits
        words = self.room, self.notes, self.foot(style), maps.axes
        bar = maps.quantity, () if style.per_head_scale else (limits.above, limits.below, len(f"{limits.high:.0f}"))
        shape = maps.heads, maps.kv_heads, maps.part is None, self.sink_HQ is None
        return self.rest.axis_Q, self.rest.axis_K, shape, words, bar


class LayerFigure:
    """The figure of one kind of layer, its words drawn once; to be used within `writer.drawing`.

    figure = LayerFigure.of(layer, Style())
    figure.show(other_layer); figure.pixels()
    """

    def __init__(self, layer: Layer, style: Style, room: float = LAYER_PX) -> None:
        self.style, self.limits = style, layer.limits
        self.background: tuple[Limits, SharedRows] | None = None
        self.drawn: dict[Text, tuple[str, Changed]] = {}
        maps, rest, (titled, gap, lines) = layer.maps, layer.rest, layer.room
        heads, queries, keys = rest.values_HQK.shape
        largest = max(LARGEST_CELL, -(-LEAST_PANEL_PX // max(queries, keys)))  # few cells are larger, see `_cell`
        shape = max(titled, keys * largest) / (queries * largest + gap) if maps.part else 1.0
        columns = grid_columns(heads, maps.kv_heads, shape)
        if style.inches is not None:
            columns = max(1, min(columns, int(room // titled)))
        self.grid = math.ceil(heads / columns), columns
        cell = _cell(max(queries, keys), room / columns, room, fill=style.in_print)
        mosaic = make_mosaic(queries, keys, (gap, 18), cell, strip=layer.sink_HQ is not None, least=titled)
        self.figure = layout.new_figure()
        self.ax, bar_ax = layout.new_panel(self.figure)
        self.tiled = MosaicAxes(self.ax, mosaic, self.grid, cell, style, maps.quantity)
        self.tiled.draw(*self._tiles(layer), layer.limits)
        self.gaps, self.edges = self.tiled.draw_gaps(rest), self.tiled.draw_edges(rest)
        self.titles = [self._title(head, title) for head, title in enumerate(layer.titles)]
        # Tokens are named at the left of each row of maps, and below the maps of the lowest row.
        (tall, wide), rows = (mosaic.tall, mosaic.wide), self.grid[0]
        lowest = heads - (rows - 1) * columns
        self.copies: dict[Axis, list[int]] = {}
        for axis, tokens, longer, starts, rotation in (
            (self.ax.yaxis, rest.axis_Q, tall, [mosaic.corner(row, 0)[0] for row in range(rows)], 0),
            (self.ax.xaxis, rest.axis_K, wide, [mosaic.corner(0, column)[1] for column in range(lowest)], 90),
        ):
            size = layout.label_size(cell * min(tall, wide), style, axis.axis_name)
            step = layout.label_step(cell * longer, layout.line_px(size))
            cells, shown = layout.tick_labels(tokens, step)
            # In pixels what one map has is copied to the others, where cells are whole pixels.
            if style.image == "png" and style.dpi == DPI and not style.in_print:
                self.copies[axis], starts = [int(cell) * (start - starts[0]) for start in starts], starts[:1]
            places = [start + (at + 0.5) * longer for start in starts for at in cells]
            axis.set_ticks(places, shown * len(starts), fontsize=size, rotation=rotation)
            axis.set_label_text(tokens.named(step), fontsize=layout.NAME_SIZE)
        self.bar = self.tiled.add_bar(bar_ax, layer.limits)
        texts = (style.headed(_picture_name(maps)), layer.notes, layer.foot(style))
        self.words = layout.Words(self.figure, texts, TITLE_SIZE, style)
        beyond = max(0, titled - TITLE_GAP - mosaic.shape[1] * cell)  # of the titles of the last column
        self.tiled.place(self.bar, self.words, (beyond, lines))

    @classmethod
    def of(cls, layer: Layer, style: Style) -> LayerFigure:
        """The figure in the width that the style asks for."""
        return layout.fitted(lambda room: cls(layer, style, room), LAYER_PX, style, lambda built: built.figure)

    def _tiles(self, layer: Layer) -> tuple[np.ndarray, np.ndarray | None]:
        """The maps of its heads, and what was taken out of them, on the grid."""
        sinks_RCQ = None if layer.sink_HQ is None else _grid(layer.sink_HQ, *self.grid)
        return _grid(layer.values_HQK, *self.grid), sinks_RCQ

    def _title(self, head: int, title: str) -> Annotation:
        mosaic = self.tiled.mosaic
        down, right = mosaic.corner(*divmod(head, self.grid[1]))
        start = right - mosaic.strip - mosaic.strip_gap
        text = self.ax.annotate(title, (start, down), (0, 1), textcoords="offset points", fontsize=HEAD_SIZE)
        text.set(verticalalignment="bottom", linespacing=1.0, label=layout.HEADING)
        return text

    def show(self, layer: Layer) -> None:
        """The values, the scale and the titles of another layer of the same kind."""
        quantity = layer.maps.quantity
        self.words.set_title(self.style.headed(_picture_name(layer.maps)))
        for text, title in zip(self.titles, layer.titles, strict=True):
            text.set_text(title)
        self.tiled.show(*self._tiles(layer), layer.limits)
        if not self.style.per_head_scale and layer.limits != self.limits:
            self.limits = layer.limits
            label_colourbar(self.bar, self.limits, self.style, quantity_name(quantity, self.style))

    @cached_property
    def reused(self) -> Reused:
        """The figure in pixels, with all that changes from layer to layer left out."""
        self.figure.set_dpi(self.style.dpi)
        live = [*self.ax.images, self.gaps, *self.edges, self.bar.ax, self.words.title, *self.titles]
        reused = Reused(self.figure, live, list(self.copies))
        for axis, places in self.copies.items():
            axis.label.set_visible(False)
            marks = reused.changed(axis)
            for place in places:
                marks.press(reused.background, *((place, 0) if axis is self.ax.yaxis else (0, place)))
            axis.label.set_visible(True)
            reused.changed(axis.label).press(reused.background)
        return reused

    def pixels(self) -> np.ndarray:
        """The picture, height x width x 3: words once, a colour bar per scale, then the colours of every cell."""
        pixels = self.shared.background.copy()
        for changed in self._named():
            changed.press(pixels)
        by_hand = press_images(pixels, self.ax.images)
        by_hand = by_hand and all(boxes.press(pixels) for boxes in (self.gaps, *self.edges))
        return pixels if by_hand else self.reused.pixels()

    @property
    def shared(self) -> SharedRows:
        """The background with the colour bar of the scale: layers of one scale share its rows."""
        if self.background is None or self.background[0] != self.limits:
            background = self.reused.plain.copy()
            self.reused.changed(self.bar.ax).press(background)
            self.background = self.limits, SharedRows(background)
        return self.background[1]

    def _named(self) -> Iterator[Changed]:
        """What each title changes; one that stays, as of a head whose title has no number, is drawn once."""
        for text in (self.words.title, *self.titles):
            title = text.get_text()
            if text not in self.drawn or self.drawn[text][0] != title:
                self.drawn[text] = title, self.reused.changed(text)
            yield self.drawn[text][1]


def _cell(longest: int, panel: float, room: float, *, fill: bool) -> float:
    """Pixels of a cell; a panel is no smaller than can be read, where there is room; fill: it takes what there is."""
    if fill:
        return panel / longest
    fits = min(LARGEST_CELL, int(min(LARGEST_PANEL_PX, max(panel, LEAST_PANEL_PX * (room == LAYER_PX))) // longest))
    return max(1, fits, -(-LEAST_PANEL_PX // longest) if room == LAYER_PX else 1)


def grid_columns(heads: int, kv_heads: Sequence[int], shape: float = 1.0) -> int:
    """How many heads are side by side: whole groups of a kv head, or whole parts of one, and no row cut short.

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


def _titles(maps: Maps, style: Style) -> tuple[str, ...]:
    """`H3 (kv 1)` of each head, with the mean of what was taken out, and the scale where it is the head's own.

    Its role and its score are in a line below; a paper's figure has the panels' names alone.
    """
    (rest, sink_HQ), titles = split_sink(maps, style), []
    for head, values_QK in enumerate(rest.values_HQK):
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
        role = role_title(maps, head) if style.titled and not maps.titles else ""
        titles.append("\n".join(filter(None, (name, role))))
    return tuple(titles)


def _picture_name(maps: Maps) -> str:
    return maps.name or f"{maps.stack}layer {maps.layer}".capitalize()


def _named(maps: Maps, head: int) -> str:
    """`.(9) `, the sink of a head that has another than key 0."""
    key, _ = maps.sink(head)
    column = maps.column(key)
    if not key or column is None:
        return ""
    label = maps.labels_K[column]
    return f"key {key} " if maps.bin_size > 1 or undrawable(label) else f"{shown_label(label)}({key}) "
