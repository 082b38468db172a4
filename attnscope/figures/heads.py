"""One labelled heatmap per head, drawn here or in worker processes.

A labelled heatmap that is built once and shown for one head after the other.

In a PNG what never changes (labels, axes, colour bar) is drawn once; each head then costs its cells, its
numbers, its title and the compression. Q query, K key.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Colormap
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from attnscope.figures import layout
from attnscope.figures.colours import (
    CMAP,
    Limits,
    cell_number,
    cmap_of,
    colourbar_kws,
    drawable,
    find_cmap,
    greys_of,
    ink_on,
    label_colourbar,
    make_norm,
    quantity_name,
    seen,
    sink_limits,
)
from attnscope.figures.drawing_process import draw_in_workers, worker_count
from attnscope.figures.fonts import Fonts, fonts_for
from attnscope.figures.mosaic import EDGE_COLOUR, EDGE_PX, LINE_LEAST, LINE_PX, PAPER, HeadMap, prepare_heads, texts_of
from attnscope.figures.style import OWN_SCALE, TAKEN, Maps, Quantity, Style, edge_boxes, head_title
from attnscope.figures.writer import Boxes, Reused, Stamps, configure, drawing, save_behind, save_figure, save_pixels

TITLE_SIZE = 13.0
EDGE, GAP, BAR_PX, LEAST_BAR_PX, LEAST_STRIP_PX = 14, 16, 14, 180, 14
PRINT_EDGE, PRINT_GAP, PRINT_BAR_PX = 2, 8, 9
RASTER_CELLS = 2500  # beyond this a vector file holds the cells as one picture, not as a path each
SINK_CMAP = "Greys"
TURN_COLOUR = "#a6a6a6"  # seen on weights and on blank cells


class Cells:
    """One heatmap whose colours and numbers can be replaced; `seen` (Q x K) is where it has numbers.

    As `seaborn.heatmap` draws it, whose import takes longer than twenty heads.
    """

    def __init__(
        self, ax: Axes, values_QK: np.ndarray, limits: Limits, style: Style, cmap: Colormap, quantity: Quantity
    ) -> None:
        self.ax, self.style, self.cmap = ax, style, cmap
        self.seen = seen(values_QK)
        (queries, keys), many = values_QK.shape, values_QK.size > RASTER_CELLS
        shown = drawable(np.where(values_QK == TAKEN, limits.low, values_QK), limits, style)
        self.mesh = ax.pcolormesh(shown, cmap=cmap, norm=make_norm(limits, style), linewidth=0, rasterized=many)
        ax.set(xlim=(0, keys), ylim=(queries, 0), xticks=[], yticks=[])
        ax.set_facecolor(greys_of(quantity)[0])
        ax.set_axisbelow(True)  # tick marks reach one pixel into the first column, and must not be drawn over it
        ax.spines[:].set_visible(False)
        cells = np.argwhere(self.seen if style.annotates(max(values_QK.shape)) else []).tolist()
        where: dict[str, Any] = {"ha": "center", "va": "center", "label": layout.NUMBER}
        self.numbers = [ax.text(key + 0.5, query + 0.5, "", **where) for query, key in cells]

    def size_numbers(self, cell: float) -> None:
        """Numbers as large as cells of so many pixels hold; none where they would be too small to read."""
        points = layout.number_size(cell, self.style)
        for text in self.numbers:
            text.remove() if not points else text.set_fontsize(points)
        self.numbers = self.numbers if points else []

    def show(self, values_QK: np.ndarray, limits: Limits, decimals: int = 2) -> None:
        """Other values, blank in the same cells; numbers with so many decimals."""
        shown = drawable(values_QK, limits, self.style)
        self.mesh.set_array(shown)
        self.mesh.set_clim(limits.low, limits.high)
        if not self.numbers:
            return
        inks = ink_on(np.asarray(self.cmap(self.mesh.norm(shown[self.seen]))))
        nothing = f"{0:.{decimals}f}" if limits.low >= 0 else None  # of weights: left out, so that the others stand out
        for text, value, ink in zip(self.numbers, values_QK[self.seen], inks, strict=True):
            shown_number = cell_number(float(value), self.style, decimals, limits.high)
            text.set_text("" if shown_number == nothing or not np.isfinite(value) else shown_number)
            text.set_color(ink)


class HeadFigure:
    """The figure of one kind of head (see HeadMap.kind); use it within `writer.drawing`.

    figure = HeadFigure(head, Style())
    figure.show(other_head); figure.save(other_head.path)
    """

    def __init__(self, head: HeadMap, style: Style, room: float = layout.MAP_PX) -> None:
        self.style, self.limits = style, head.limits
        self.own_scale = style.per_head_scale or head.quantity in OWN_SCALE
        self.figure = layout.new_figure()
        self.canvas = cast(FigureCanvasAgg, self.figure.canvas)
        self.ax, bar_ax = layout.new_panel(self.figure)
        queries, keys = len(head.axis_Q.labels), len(head.axis_K.labels) + (head.sink_Q is not None)
        self.cell = layout.cell_size(queries, keys, room, fill=style.in_print)
        self.map = Cells(self.ax, head.values_QK, head.limits, style, cmap_of(style, head.quantity), head.quantity)
        self.bar = self.figure.colorbar(self.map.mesh, bar_ax, **colourbar_kws(head.limits))
        label_colourbar(self.bar, head.limits, style, quantity_name(head.quantity, style))
        self.strip: Cells | None = None
        if head.sink_Q is not None:
            strip_ax, column_Q1 = self.figure.add_axes((0.05, 0.1, 0.05, 0.5)), head.sink_Q[:, None]
            plain = Style(annotate=bool(self.map.numbers), width=style.width)
            limits, greys = sink_limits(column_Q1, head.quantity), find_cmap(SINK_CMAP)
            self.strip = Cells(strip_ax, np.nan_to_num(column_Q1), limits, plain, greys, "weight")
        self.parts = [self.map, *([self.strip] if self.strip else [])]
        for part in self.parts:
            part.size_numbers(self.cell[0])
        self.taken = Rectangle((0, 0), 0, 0, color=greys_of(head.quantity)[1], linewidth=0)
        self.ax.add_patch(self.taken)
        # Thin white lines where tokens are left out between two rows or two columns.
        queries, keys, (wide, high) = len(head.axis_Q.labels), len(head.axis_K.labels), self.cell
        thick, tall = LINE_PX / wide / 2, LINE_PX / high / 2
        gaps: list[tuple[float, ...]] = [
            (0, row - tall, keys, row + tall) for row in head.axis_Q.gaps if high >= LINE_LEAST
        ]
        gaps += [(key - thick, 0, key + thick, queries) for key in head.axis_K.gaps if wide >= LINE_LEAST]
        self.gaps = Boxes(self.ax, np.array(gaps, float).reshape(-1, 4), [PAPER] * len(gaps))
        # A thin line at the edge of a window; nothing without one.
        edges = edge_boxes(head.values_QK, head.window, (min(1, EDGE_PX / wide), min(1, EDGE_PX / high)))
        self.edges = [Boxes(self.ax, edges, [EDGE_COLOUR] * len(edges))] if len(edges) else []
        self.turns = [line for row in head.turns for line in self._turn(row, queries)]
        self.words = layout.Words(self.figure, (head.longest, head.note, head.foot), TITLE_SIZE, style)
        # Labels are measured once, before every part gets whole pixels.
        left_ax = self.strip.ax if self.strip else self.ax
        step_Q = layout.put_tokens(left_ax, "y", head.axis_Q, high, style)
        step_K = layout.put_tokens(self.ax, "x", head.axis_K, wide, style)
        if self.strip and (step_K == 1 or head.axis_sink.name):  # elsewhere the first key's label has its room
            layout.put_tokens(self.strip.ax, "x", head.axis_sink, wide, style)
        self.ax.set_xlabel(head.axis_K.named(step_K), fontsize=layout.NAME_SIZE)
        left_ax.set_ylabel(head.axis_Q.named(step_Q), fontsize=layout.NAME_SIZE)
        layout.in_print(self.figure, style)
        layout.turn(self._key_labels(), wide * step_K)
        self._place(
            (max(wide, LEAST_STRIP_PX), max(6, wide // 6)) if self.strip else (0, 0), (keys * wide, queries * high)
        )
        self.figure.set_dpi(style.dpi)

    @classmethod
    def of(cls, head: HeadMap, style: Style) -> HeadFigure:
        """The figure in the width that the style asks for."""
        return layout.fitted(lambda room: cls(head, style, room), layout.MAP_PX, style, lambda built: built.figure)

    def _turn(self, row: int, queries: int) -> list[Line2D]:
        """Where a turn of a chat begins: down to the query, and from the key on."""
        across = self.ax.axhline(row, color=TURN_COLOUR, linewidth=0.6)
        column = row - (queries - self.map.seen.shape[1])  # without key 0 the columns begin later
        return [across, self.ax.axvline(column, color=TURN_COLOUR, linewidth=0.6)]

    def _key_labels(self) -> list[Text]:
        return [label for part in self.parts for label in part.ax.get_xticklabels()]

    def _place(self, strip: tuple[float, float], size: tuple[float, float]) -> None:
        """strip: its width and its gap to the map, 0 without one. size: width and height of the map. All in pixels."""
        left_ax = self.strip.ax if self.strip else self.ax
        edge, gap, bar = (PRINT_EDGE, PRINT_GAP, PRINT_BAR_PX) if self.style.in_print else (EDGE, GAP, BAR_PX)
        left = round(edge + layout.axis_room(left_ax.get_yticklabels(), layout.NAME_SIZE, gap)[0])
        plan = layout.PanelPlan(
            left=left + sum(strip),
            top=0,
            size=size,
            bar=(gap, bar, size[1] if self.style.in_print else max(size[1], LEAST_BAR_PX)),
            right=gap + bar + layout.axis_room(self.bar.ax.get_yticklabels(), layout.NAME_SIZE, gap)[0],
            below=layout.axis_room(self._key_labels(), layout.NAME_SIZE, gap)[1],
            edge=edge,
        )
        plan = layout.frame(self.figure, [(self.ax, self.bar.ax)], plan, self.words, left)
        if self.strip:
            layout.place(self.figure, self.strip.ax, (left, plan.top, strip[0], size[1]))

    def show(self, head: HeadMap) -> None:
        """Colours, numbers, title and note of another head of the same kind."""
        self.map.show(head.values_QK, head.limits)
        rows, columns = np.nonzero(head.values_QK == TAKEN)
        if rows.size:
            self.taken.set_bounds(columns[0], rows[0], 1, rows[-1] + 1 - rows[0])
        if self.strip and head.sink_Q is not None:
            column_Q1 = head.sink_Q[:, None]
            self.strip.show(column_Q1, sink_limits(column_Q1, head.quantity))
        if head.limits != self.limits:
            self.limits = head.limits
            label_colourbar(self.bar, head.limits, self.style, quantity_name(head.quantity, self.style))
        self.words.set_title(head.title)
        self.words.set_note(head.note)

    def save(self, path: Path) -> Path:
        """Write what is shown now."""
        if self.style.image != "png":
            return save_figure(self.figure, path, self.style)
        return save_pixels(self.pixels(), path, self.style, self.reused.shared)

    @cached_property
    def reused(self) -> Reused:
        """The figure in pixels, with all that changes from head to head left out."""
        live: list[Artist] = [self.taken, *(part.mesh for part in self.parts), self.gaps, *self.edges, *self.turns]
        live += [self.words.title, self.words.note, *[self.bar.ax] * self.own_scale]
        return Reused(self.figure, live, [text for part in self.parts for text in part.numbers])

    @cached_property
    def stamps(self) -> list[Stamps]:
        """What puts the numbers into the pixels."""
        numbered = [part for part in self.parts if part.numbers]
        return [Stamps(self.canvas, part.ax, part.numbers, np.argwhere(part.seen)) for part in numbered]

    def pixels(self) -> np.ndarray:
        """The picture (height x width x 3): what never changes is drawn once, the rest is put on top."""
        pixels = self.reused.pixels()
        for stamps in self.stamps:
            stamps.press(pixels)
        return pixels


def save_head_maps(
    jobs: Sequence[tuple[Path, Maps, int]],
    style: Style,
    *,
    title: Callable[[Maps, int], str] = head_title,
    workers: int | None = 1,
    progress: Callable[[int], None] | None = None,
) -> list[Path]:
    """Write one labelled heatmap per job (path, maps, index into maps.heads); returns the paths.

    Numbers are written into the cells of maps of at most 12 tokens. All files of weights share one colour scale unless
    `style.per_head_scale`, which prints each file's; a file of logits has its own. `workers=1` draws here;
    `workers=None` uses other processes when there are enough heads to pay for their start. They import no torch, but
    the calling script: its work must be under `if __name__ == "__main__"`. `progress` is called with the number of
    files written so far. Raises UsageError for an unknown colour map or a folder that cannot be written.

        save_head_maps([(Path("heads/L27H03.png"), maps, 3)], Style())
        save_head_maps(jobs, Style(sink="mask", scale="log"), workers=2)
    """
    tell = progress or (lambda done: None)
    with closing(head_maps(jobs, style, title, workers)) as drawn:  # an error in `progress` stops the workers too
        for done, _ in enumerate(drawn, start=1):
            tell(done)
    return [path for path, _, _ in jobs]


def head_maps(
    jobs: Sequence[tuple[Path, Maps, int]],
    style: Style,
    title: Callable[[Maps, int], str] = head_title,
    workers: int | None = 1,
) -> Generator[Path, None, None]:
    """`save_head_maps`, one path at a time."""
    find_cmap(style.cmap or CMAP)
    style = style.for_maps(jobs[0][1]) if jobs else style  # all are of one text
    titles = {title(maps, index) for _, maps, index in jobs}
    fonts = fonts_for(titles | texts_of((maps for _, maps, _ in jobs), style))
    heads = prepare_heads(jobs, style, title)
    if workers is None:
        workers = worker_count([head.values_QK.size for head in heads], style)
    if workers > 1:
        yield from draw_in_workers(partial(_draw_in_worker, style, fonts), heads, workers)
        return
    built: dict[tuple, HeadFigure] = {}
    with drawing(fonts, style.sheet):
        if style.image == "png":
            shown = ((head.path, _shown(head, style, built)) for head in heads)
            yield from save_behind(((path, figure.pixels(), figure.reused.shared) for path, figure in shown), style)
        else:
            yield from (_shown(head, style, built).save(head.path) for head in heads)


def _shown(head: HeadMap, style: Style, built: dict[tuple, HeadFigure]) -> HeadFigure:
    """The figure that shows a head; a kind's is built once."""
    if head.kind not in built:
        built[head.kind] = HeadFigure.of(head, style)
    built[head.kind].show(head)
    return built[head.kind]


def _draw_in_worker(style: Style, fonts: Fonts, head: HeadMap) -> Path:
    return _shown(head, style, _of_worker(style, fonts)).save(head.path)


@cache
def _of_worker(style: Style, fonts: Fonts) -> dict[tuple, HeadFigure]:
    """A worker's figures, one per kind; they and matplotlib's settings stay for as long as it lives."""
    configure(fonts, style.sheet)
    return {}
