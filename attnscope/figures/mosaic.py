"""Many maps in one picture: tiles side by side in one array, drawn as one image; one axes per head would be slow.

And what each file of a head shows, settled before anything is drawn.

H head, R tile row, C tile column, Q query, K key.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from attnscope.figures import layout
from attnscope.figures.colours import (
    Limits,
    blank_cmap,
    cmap_of,
    colourbar_kws,
    drawable,
    find_cmap,
    find_limits,
    label_colourbar,
    make_norm,
    quantity_name,
    seen,
    sink_limits,
)
from attnscope.figures.fonts import missing_words, shown_label, undrawable
from attnscope.figures.style import (
    OPEN,
    OWN_SCALE,
    TAKEN,
    Axis,
    Maps,
    Quantity,
    Style,
    alone,
    bin_note,
    edge_boxes,
    head_title,
    parallel_note,
    split_sink,
)
from attnscope.figures.writer import Boxes
from attnscope.utils.display import printed

TITLE_SIZE, HEAD_SIZE = 14.0, 9.0
EDGE, GAP = 16, 14
PRINT_EDGE, PRINT_GAP, PRINT_BAR_PX = 5, 13, 9
BAR_GAP, BAR_PX, LEAST_BAR_PX, LONGEST_BAR_PX = 18, 14, 180, 420
SLENDER = 6  # a map is no more than so many times as long as it is wide
LINE_PX, LINE_LEAST, FRAME_PX = 2, 6, 3
PAPER = "#ffffff"
EDGE_COLOUR, EDGE_PX = "#000000", 2  # of a window
STRIP_SHARE = 12  # a sink strip is a twelfth of a map wide, and half that far from it


@dataclass(frozen=True)
class Mosaic:
    """Tiles of one shape on a grid, counted in cells; `strip` cells at a tile's left hold the sink and a gap.

    tall, wide: how many cells a query and a key take.
    """

    queries: int
    keys: int
    gap_down: int
    gap_right: int
    strip: int = 0
    strip_gap: int = 0
    tall: int = 1
    wide: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of a tile's map, in cells."""
        return self.queries * self.tall, self.keys * self.wide

    def corner(self, row: int, column: int) -> tuple[int, int]:
        """Row and column of the first cell of a tile's map."""
        high, wide = self.shape
        pitch = self.strip + self.strip_gap + wide + self.gap_right
        return row * (high + self.gap_down), column * pitch + self.strip + self.strip_gap

    def size(self, rows: int, columns: int) -> tuple[int, int]:
        """Rows and columns of the whole array, in cells."""
        down, right = self.corner(rows - 1, columns - 1)
        return down + self.shape[0], right + self.shape[1]

    def pixels(self, rows: int, columns: int, cell: float) -> tuple[float, float]:
        """Width and height of the whole array in pixels."""
        down, right = self.size(rows, columns)
        return right * cell, down * cell

    def assemble(self, tiles_RCQK: np.ndarray) -> np.ndarray:
        """Tiles (R x C x Q x K) -> one array, NaN between them."""
        return self._spread(tiles_RCQK.repeat(self.tall, -2).repeat(self.wide, -1), 0, self.shape[1])

    def assemble_strips(self, sinks_RCQ: np.ndarray) -> np.ndarray:
        """The sinks' columns (R x C x Q) -> an array of the same size, NaN but for the strips."""
        return self._spread(sinks_RCQ.repeat(self.tall, -1)[..., None], -self.strip_gap - self.strip, self.strip)

    def _spread(self, parts: np.ndarray, start: int, wide: int) -> np.ndarray:
        """The part of each tile (R x C x ...) in an array of the whole; start: from the left of the tile's map."""
        grid, high = parts.shape[:2], self.shape[0]
        array = np.full(self.size(*grid), np.nan)
        for place in np.ndindex(*grid):
            down, right = self.corner(*place)
            array[down : down + high, right + start : right + start + wide] = parts[place]
        return array

    def gaps(self, grid: tuple[int, int], gaps: tuple[Sequence[int], Sequence[int]], line: float) -> np.ndarray:
        """Boxes of thin lines (n x 4: left, top, right, bottom) before so many rows and columns of every map."""
        (rows, columns), (high, _), half = grid, self.shape, line / 2
        tops, lefts = [self.corner(row, 0)[0] for row in range(rows)], [self.corner(0, c)[1] for c in range(columns)]
        ys = [top + row * self.tall for top in tops for row in gaps[0]]
        xs = [(left + key * self.wide, top) for top in tops for left in lefts for key in gaps[1]]
        across = [(0, y - half, self.size(*grid)[1], y + half) for y in ys]
        down = [(x - half, top, x + half, top + high) for x, top in xs]
        return np.array([*across, *down], float).reshape(-1, 4)

    def frame(self, row: int, column: int, line: float) -> np.ndarray:
        """The four sides (4 x 4: left, top, right, bottom) of a frame around a tile."""
        (top, left), (high, wide) = self.corner(row, column), self.shape
        x0, x1, y0, y1 = left - self.strip_gap - self.strip, left + wide, top, top + high
        return np.array(
            [
                (x0 - line, y0 - line, x1 + line, y0),
                (x0 - line, y1, x1 + line, y1 + line),
                (x0 - line, y0, x0, y1),
                (x1, y0, x1 + line, y1),
            ]
        )


def make_mosaic(
    queries: int, keys: int, gap_px: tuple[int, int], cell: float, *, strip: bool, least: int = 0
) -> Mosaic:
    """A mosaic whose gaps (down, right) are at least so many pixels wide at so many pixels per cell.

    least: pixels from the left of a tile to the next. Where a map has far more cells on one side, those of the other
    are longer.
    """
    gap_down, gap_right = (max(1, math.ceil(gap / cell)) for gap in gap_px)
    wide = max(1, round(max(queries, keys) / STRIP_SHARE)) if strip else 0
    longer = (max(1, keys // (SLENDER * queries)), max(1, queries // (SLENDER * keys)))
    beside = wide + max(1, wide // 2) if strip else 0
    gap_right = max(gap_right, math.ceil(least / cell) - beside - keys * longer[1])
    return Mosaic(queries, keys, gap_down, gap_right, wide, beside - wide, *longer)


def on_scale(maps: Maps, style: Style, *, alone: int | None) -> np.ndarray:
    """The values that are drawn, H x Q x K: for `per_head_scale` as shares (0 to 1) of each head's own colour scale."""
    if not style.per_head_scale:
        return maps.values_HQK
    shares = np.full(maps.values_HQK.shape, np.nan)
    for head, values_QK in enumerate(maps.values_HQK):
        limits = find_limits([values_QK], style, maps.quantity, alone=alone)
        shares[head] = make_norm(limits, style)(drawable(values_QK, limits, style)).filled(np.nan)
    return np.where(maps.values_HQK == TAKEN, TAKEN, shares)


@dataclass(frozen=True)
class MosaicAxes:
    """A mosaic in axes of which a cell is one unit: what is drawn there, once or with other values.

    grid: rows and columns of tiles. cell: pixels of a cell.
    """

    ax: Axes
    mosaic: Mosaic
    grid: tuple[int, int]
    cell: float
    style: Style
    quantity: Quantity

    def draw(self, tiles_RCQK: np.ndarray, sinks_RCQ: np.ndarray | None, limits: Limits) -> AxesImage:
        """All maps as one image over grey tiles, and the sinks that were taken out as a grey strip at each one's left.

        Returns the image of the maps.
        """
        cmaps = blank_cmap(self.quantity), cmap_of(self.style, self.quantity), find_cmap("Greys")
        how: dict[str, Any] = {"interpolation": "nearest", "aspect": "auto", "zorder": 1}
        for (array, norm), cmap in zip(self._fills(tiles_RCQK, sinks_RCQ, limits), cmaps, strict=False):
            self.ax.imshow(array, cmap=cmap, norm=norm, extent=(0, array.shape[1], array.shape[0], 0), **how)
        self.ax.set_axisbelow(True)  # tick marks reach one pixel into the first column, and must not be drawn over it
        self.ax.spines[:].set_visible(False)
        return self.ax.images[1]

    def show(self, tiles_RCQK: np.ndarray, sinks_RCQ: np.ndarray | None, limits: Limits) -> None:
        """Other values, and their scales where these are others."""
        for image, (array, norm) in zip(self.ax.images, self._fills(tiles_RCQK, sinks_RCQ, limits), strict=True):
            image.set_data(array)
            if image.get_clim() != (norm.vmin, norm.vmax):
                image.set_norm(norm)

    def _fills(
        self, tiles_RCQK: np.ndarray, sinks_RCQ: np.ndarray | None, limits: Limits
    ) -> Iterator[tuple[np.ndarray, Normalize]]:
        """What lies beneath the cells, the cells, and the strips: arrays of the whole mosaic, each with its norm."""
        array, own_scale = self.mosaic.assemble(tiles_RCQK), self.style.per_head_scale
        present_RC = np.isfinite(tiles_RCQK).any((-2, -1))
        grey = self.mosaic.assemble(np.where(present_RC[..., None, None], tiles_RCQK == TAKEN, np.nan))
        yield np.ma.masked_invalid(grey), Normalize(0, 1)
        norm = Normalize(0, 1, clip=True) if own_scale else make_norm(limits, self.style)
        yield np.ma.masked_invalid(array) if own_scale else drawable(array, limits, self.style), norm
        if sinks_RCQ is not None:
            strips = self.mosaic.assemble_strips(sinks_RCQ)
            ends = sink_limits(strips, self.quantity)
            yield np.ma.masked_invalid(strips), Normalize(ends.low, ends.high)

    def draw_gaps(self, maps: Maps) -> Boxes:
        """A thin white line wherever tokens are left out between two rows or two columns."""
        gaps = (maps.axis_Q.gaps, maps.axis_K.gaps) if self.cell >= LINE_LEAST else ((), ())
        boxes = self.mosaic.gaps(self.grid, gaps, LINE_PX / self.cell)
        return Boxes(self.ax, boxes, [PAPER] * len(boxes))

    def draw_edges(self, maps: Maps) -> list[Boxes]:
        """A thin line at the edge of what a query's window lets it see, in every map; nothing without one."""
        tall, wide = self.mosaic.tall, self.mosaic.wide
        line = min(1, EDGE_PX / (self.cell * wide)), min(1, EDGE_PX / (self.cell * tall))
        edge = edge_boxes(maps.values_HQK[0], (maps.window, maps.ahead), line) * np.array([wide, tall] * 2)
        corners = [self.mosaic.corner(*divmod(head, self.grid[1]))[::-1] * 2 for head in range(len(maps.heads))]
        boxes = np.concatenate([edge + corner for corner in corners])
        return [Boxes(self.ax, boxes, [EDGE_COLOUR] * len(boxes))] if len(boxes) else []

    def add_bar(self, bar_ax: Axes, limits: Limits) -> Colorbar:
        """The colour bar of the maps that were drawn."""
        figure, image = cast(Figure, bar_ax.get_figure()), self.ax.images[1]
        if self.style.per_head_scale:
            bar = figure.colorbar(image, cax=bar_ax)
            label_colourbar(bar, Limits(0.0, 1.0), Style(), "share of each head's own scale")
        else:
            bar = figure.colorbar(image, cax=bar_ax, **colourbar_kws(limits))
            label_colourbar(bar, limits, self.style, quantity_name(self.quantity, self.style))
        bar_ax.yaxis.label.set_fontsize(layout.NAME_SIZE)
        bar_ax.tick_params(labelsize=layout.NAME_SIZE)
        return bar

    def place(self, bar: Colorbar, words: layout.Words, titles: tuple[float, int] = (0, 1)) -> None:
        """Put image, colour bar and words on a figure just large enough.

        titles: pixels that they reach beyond the image, and their lines.
        """
        ax, figure = self.ax, cast(Figure, self.ax.get_figure())
        layout.in_print(figure, words.style)
        (beyond, lines), in_print = titles, words.style.in_print
        edge, space, thick = (PRINT_EDGE, PRINT_GAP, PRINT_BAR_PX) if in_print else (EDGE, GAP, BAR_PX)
        # Numbers stand beneath the image, above it, or on all sides: then those at its right are before the bar.
        numbered_above = ax.xaxis.get_label_position() == "top"
        both = bool(ax.yaxis.get_tick_params()["labelright"])
        labels = layout.extent(ax.get_yticklabels())[0]
        numbers = layout.axis_room(ax.get_xticklabels(), layout.NAME_SIZE, space)[1]
        # The lowest number next to the bar reaches below it by half a line.
        beneath = layout.line_px(HEAD_SIZE) / 2 if in_print else 0
        gap = (space if in_print else BAR_GAP) + beyond + (labels + 4 if both else 0)
        bar_words = layout.axis_room(bar.ax.get_yticklabels(), float(bar.ax.yaxis.label.get_fontsize()), space)[0]
        size = self.mosaic.pixels(*self.grid, self.cell)
        plan = layout.PanelPlan(
            left=round(edge + layout.axis_room(ax.get_yticklabels(), layout.NAME_SIZE, space)[0]),
            top=round(numbers) if numbered_above else round(lines * title_px(words.style)) + 4,
            size=size,
            bar=(gap, thick, min(LONGEST_BAR_PX, max(size[1], LEAST_BAR_PX * (not in_print)))),
            right=gap + thick + bar_words,
            below=numbers if both or not numbered_above else beneath,
            edge=edge,
        )
        layout.frame(figure, [(ax, bar.ax)], plan, words, plan.left)


def title_px(style: Style) -> float:
    """Pixels that a line of a panel's title takes."""
    return layout.line_px(layout.sized(HEAD_SIZE, style, layout.HEADING))


@dataclass(frozen=True)
class HeadMap:
    """What one file shows; where the style takes the sink out, sink_Q is its column, gone from values_QK or TAKEN.

    longest: the longest title of all files, for which a figure that several share has room.
    """

    path: Path
    title: str
    longest: str
    note: str
    foot: tuple[str, ...]
    axis_Q: Axis
    axis_K: Axis
    axis_sink: Axis
    turns: tuple[int, ...]
    window: tuple[str, bool]
    values_QK: np.ndarray
    sink_Q: np.ndarray | None
    limits: Limits
    quantity: Quantity

    @property
    def kind(self) -> tuple:
        """Heads of one kind differ in values and titles alone, and share a figure."""
        parts = (
            self.axis_sink,
            self.sink_Q is None,
            bool(self.note),
            self.limits.above,
            len(f"{self.limits.high:.0f}"),
        )
        return self.axis_Q, self.axis_K, self.foot, self.turns, self.window, seen(self.values_QK).tobytes(), parts


def prepare_heads(
    jobs: Sequence[tuple[Path, Maps, int]], style: Style, title: Callable[[Maps, int], str] = head_title
) -> list[HeadMap]:
    """Jobs -> what each file shows, its colour scale settled. Raises ValueError for maps of several quantities."""
    quantities = {maps.quantity for _, maps, _ in jobs}
    if len(quantities) > 1:
        raise ValueError(f"expected maps of one quantity, got {sorted(quantities)}")
    quantity: Quantity = next(iter(quantities), "weight")
    layers = {id(maps): maps for _, maps, _ in jobs}
    split_of = {place: split_sink(maps, style) for place, maps in layers.items()}  # once, for it may copy
    split = [split_of[id(maps)] for _, maps, _ in jobs]
    values = [rest.values_HQK[index] for (rest, _), (_, _, index) in zip(split, jobs, strict=True)]
    first = alone(layers.values(), style)
    shared = find_limits(values, style, quantity, alone=first)
    own_scale = style.per_head_scale or quantity in OWN_SCALE
    titles = [style.headed(title(maps, index)) for _, maps, index in jobs]
    longest = max(titles, key=len, default="")
    # Titles are cut to the longest of all, so that every figure has the same place for its map.
    heads = []
    for (path, maps, index), name, (rest, sink_HQ), values_QK in zip(jobs, titles, split, values, strict=True):
        sink_Q = None if sink_HQ is None else sink_HQ[index]
        own = find_limits([values_QK], style, quantity, alone=first) if own_scale else shared
        # Below the strip is key 0, or, so that heads of different sinks share a figure, one word.
        axis_sink = Axis("", ("sink",))
        if not maps.sinks:
            axis_sink = replace(maps.axis_K, labels=maps.labels_K[:1], starts=maps.starts_K[:1])
        (key, mass), taken = maps.sink(index), ""
        if sink_Q is not None and maps.column(key) is None:
            taken = f"its sink, key {key}, is not among these"
        elif sink_Q is not None:
            sink, mean = sink_name(maps, index), sink_mean(maps, index, sink_Q, values_QK)
            among = sink.startswith("keys") and not math.isnan(mass)
            taken = sink_note(maps, sink, f"{mean} on key {key}" if among else mean)
        heads.append(
            HeadMap(
                path=path,
                title=name + (f", max {own.high:.2g}" if style.per_head_scale else ""),
                longest=longest + ", max 0.00" * style.per_head_scale,
                note="; ".join(filter(None, (maps.window, parallel_note(maps), bin_note(maps), taken))),
                foot=foot(maps, style, roles=title_words(maps, [index]) if title is head_title else ""),
                axis_Q=rest.axis_Q,
                axis_K=rest.axis_K,
                axis_sink=axis_sink,
                turns=rest.turns,
                window=(maps.window, maps.ahead),
                values_QK=values_QK,
                sink_Q=sink_Q,
                limits=own,
                quantity=quantity,
            )
        )
    return heads


def title_words(maps: Maps, heads: Iterable[int]) -> str:
    """What role and number in the titles of these heads are, where any has them."""
    named = [head for head in heads if maps.roles and maps.roles[head]]
    scored = maps.role_scores and any(not math.isnan(maps.role_scores[head]) for head in named)
    return (role_words(maps) + ", number: its score on this text" * bool(scored)) * bool(named)


def texts_of(layers: Iterable[Maps], style: Style) -> set[str]:
    """What is drawn around maps, and their labels, before glyphs that no font has are replaced."""
    axes = {axis for maps in layers for axis in (maps.labels_Q, maps.labels_K)}
    return {style.title, style.about.line, *(shown_label(label) for axis in axes for label in axis)}


def foot(maps: Maps, style: Style, *, tokens: bool = True, roles: str = "") -> tuple[str, ...]:
    """The lines below a figure: its text, and the meaning of its signs.

    tokens: whether it names tokens. roles: what roles in titles are.
    """
    later = "not visible to the query" if maps.quantity != "share" else "nothing is attributed there"
    signs = [f"grey: {later}"] if not np.isfinite(maps.values_HQK).all() else []
    if tokens and any("·" in label for label in (*maps.labels_Q, *maps.labels_K)):
        signs.append("“·”: a space")
    if tokens and (missing := missing_words({*maps.labels_Q, *maps.labels_K})):
        signs.append(missing)
    if maps.sinks and style.sink == "mask":
        signs.append("darker grey: the sink, taken out")
    if maps.kv_heads or maps.by_kv:
        signs.append("kv: key and value head")
    if roles:
        signs.append(roles)
    if tokens and maps.heads and len(edge_boxes(maps.values_HQK[0], (maps.window, maps.ahead))):
        signs.append(f"black line: the edge of a {maps.window.split()[0]}")
    if maps.turns and tokens:
        signs.append(f"thin lines: {maps.begins} begins")
    return style.about.line, "; ".join(signs)


def role_words(maps: Maps) -> str:
    """Whose word the roles in titles are; nothing without roles."""
    return f"role: by {maps.roles_by}" * any(maps.roles)


def sink_note(maps: Maps, name: str, mean: str) -> str:
    """What was taken out, and how much it was."""
    if maps.quantity in OPEN:
        what = f"of the largest {maps.quantity}s" if maps.bin_size > 1 else maps.quantity
        return f"without {name}, mean {what} {mean}"
    return f"without {name}, mean mass {mean} (grey strip, 0 to 1)"


def sink_name(maps: Maps, index: int = 0) -> str:
    """What is taken out of a head: `key 9 (.)`, or the bin where its sink has no column of its own."""
    key, _ = maps.sink(index)
    column = maps.column(key) or 0
    label, starts = maps.labels_K[column], maps.starts_K[column : column + 2]
    if maps.bin_size == 1 or starts == (key, key + 1):
        return f"key {key}" + (f" ({shown_label(label)})" if not undrawable(label) else "")
    if len(starts) == 2:
        return f"keys {starts[0]}–{starts[1] - 1}"
    return f"keys from {starts[0]}" if starts else f"keys {label}"


def sink_mean(maps: Maps, index: int, sink_Q: np.ndarray, values_QK: np.ndarray) -> str:
    """The mean of what was taken out of a head, as it is printed."""
    mass = maps.sink(index)[1]
    return printed(column_mean(sink_Q, values_QK) if math.isnan(mass) else mass)


def column_mean(sink_Q: np.ndarray, values_QK: np.ndarray) -> float:
    """The mean of a column over the queries that see another key too; NaN without any."""
    rows = sink_Q[np.isfinite(sink_Q) & np.isfinite(values_QK).any(-1)]
    return float(rows.mean(dtype=np.float64)) if rows.size else math.nan
