"""A labelled heatmap that is built once and shown for one head after the other.

In a PNG what never changes (labels, axes, colour bar) is drawn once; each head then costs its cells, its
numbers, its title and the compression. Q query, K key.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colorbar import Colorbar
from matplotlib.text import Text
from PIL import Image

from attnscope.figures import layout
from attnscope.figures.colours import (
    BLANK,
    Limits,
    colourbar_kws,
    drawable,
    find_cmap,
    ink_on,
    label_colourbar,
    make_norm,
    number,
    quantity_name,
    sink_limits,
)
from attnscope.figures.jobs import Head
from attnscope.figures.raster import Stamps, encode_png
from attnscope.figures.style import Style
from attnscope.figures.writer import DPI, save_figure, write_whole

TITLE_SIZE = 13.0
EDGE, GAP, BAR_PX, LEAST_BAR_PX, LEAST_STRIP_PX = 14, 16, 14, 180, 14
RASTER_CELLS = 2500  # beyond this a vector file holds the cells as one picture, not as a path each
SINK_CMAP = "Greys"


class Cells:
    """One seaborn heatmap whose colours and numbers can be replaced; `seen` (Q x K) is where it has numbers."""

    def __init__(self, ax: Axes, values_QK: np.ndarray, limits: Limits, style: Style, cmap: str, **seaborn: object):
        self.ax, self.style, self.cmap = ax, style, find_cmap(cmap)
        self.seen = np.isfinite(values_QK)
        before = len(ax.texts)
        sns.heatmap(
            drawable(values_QK, limits, style).filled(np.nan),
            ax=ax,
            norm=make_norm(limits, style),
            vmin=limits.low,
            vmax=limits.high,
            cmap=self.cmap,
            annot=style.annotates(max(values_QK.shape)),
            annot_kws={"fontsize": layout.number_size(layout.cell_size(*values_QK.shape)[0])},
            xticklabels=False,
            yticklabels=False,
            rasterized=values_QK.size > RASTER_CELLS,
            **seaborn,
        )
        ax.set_facecolor(BLANK)
        ax.set_axisbelow(True)  # tick marks reach one pixel into the first column, and must not be drawn over it
        self.mesh = ax.collections[0]
        self.numbers = ax.texts[before:]

    def show(self, values_QK: np.ndarray, limits: Limits, decimals: int = 2) -> None:
        """Other values, blank in the same cells; numbers with so many decimals."""
        shown = drawable(values_QK, limits, self.style)
        self.mesh.set_array(shown)
        self.mesh.set_clim(limits.low, limits.high)
        if not self.numbers:
            return
        inks = ink_on(np.asarray(self.cmap(self.mesh.norm(shown[self.seen]))))
        for text, value, ink in zip(self.numbers, values_QK[self.seen], inks, strict=True):
            text.set_text(number(float(value), self.style, decimals))
            text.set_color(ink)


class HeadFigure:
    """The figure of one kind of head (see Head.kind); use it within `writer.drawing`.

    figure = HeadFigure(head, Style())
    figure.show(other_head); figure.save(other_head.path)
    """

    def __init__(self, head: Head, style: Style) -> None:
        self.style, self.limits = style, head.limits
        self.figure = layout.new_figure()
        self.canvas = cast(FigureCanvasAgg, self.figure.canvas)
        self.ax, bar_ax = layout.new_panel(self.figure)
        bar_kws = colourbar_kws(head.limits)
        self.map = Cells(self.ax, head.values_QK, head.limits, style, style.cmap, cbar_ax=bar_ax, cbar_kws=bar_kws)
        self.bar = cast(Colorbar, self.map.mesh.colorbar)
        label_colourbar(self.bar, head.limits, style, quantity_name(head.quantity, style))
        self.strip = self._strip(head)
        self.title = self.figure.text(0, 0, head.title, fontsize=TITLE_SIZE)
        self.note = self.figure.text(0, 0, head.note, fontsize=layout.NOTE_SIZE, color=layout.NOTE_COLOUR)
        self._lay_out(head)
        self.background: Any = None
        self.stamps: list[Stamps] = []

    def _strip(self, head: Head) -> Cells | None:
        if head.sink_Q is None:
            return None
        ax = self.figure.add_axes((0.05, 0.1, 0.05, 0.5))
        column_Q1 = head.sink_Q[:, None]
        plain = Style(annotate=bool(self.map.numbers))
        return Cells(ax, column_Q1, sink_limits(column_Q1, head.quantity), plain, SINK_CMAP, cbar=False)

    def _lay_out(self, head: Head) -> None:
        """Measure the labels once and give every part whole pixels."""
        wide, high = layout.cell_size(len(head.labels_Q), len(head.labels_K) + (self.strip is not None))
        left_ax = self.strip.ax if self.strip else self.ax
        step_Q = layout.put_tokens(left_ax, "y", head.labels_Q, high)
        step_K = layout.put_tokens(self.ax, "x", head.labels_K, wide)
        if self.strip:
            layout.put_tokens(self.strip.ax, "x", [head.sink_label], wide)
        layout.turn(self._key_labels(), wide * step_K)
        self.ax.set_xlabel(layout.axis_name("key", step_K), fontsize=layout.NAME_SIZE)
        left_ax.set_ylabel(layout.axis_name("query", step_Q), fontsize=layout.NAME_SIZE)
        strip = (max(wide, LEAST_STRIP_PX), max(6, wide // 6)) if self.strip else (0, 0)
        self._place(strip, (len(head.labels_K) * wide, len(head.labels_Q) * high))

    def _key_labels(self) -> list[Text]:
        return [*self.ax.get_xticklabels(), *(self.strip.ax.get_xticklabels() if self.strip else ())]

    def _place(self, strip: tuple[int, int], size: tuple[int, int]) -> None:
        """strip: its width and its gap to the map, 0 without one. size: width and height of the map. All in pixels."""
        left_ax = self.strip.ax if self.strip else self.ax
        left = round(EDGE + layout.axis_room(left_ax.get_yticklabels(), layout.NAME_SIZE, GAP)[0])
        note = layout.line_px(layout.NOTE_SIZE) if self.note.get_text() else 0
        plan = layout.Frame(
            left=left + sum(strip),
            top=round(EDGE + layout.line_px(TITLE_SIZE) + 8 + note),
            size=size,
            bar=(GAP, BAR_PX, max(size[1], LEAST_BAR_PX)),
            right=GAP + BAR_PX + layout.axis_room(self.bar.ax.get_yticklabels(), layout.NAME_SIZE, GAP)[0],
            below=layout.axis_room(self._key_labels(), layout.NAME_SIZE, GAP)[1],
            edge=EDGE,
        )
        # another head's title may be longer
        words = max(layout.extent([self.title])[0] * 1.15, layout.extent([self.note])[0])
        layout.frame(self.figure, [(self.ax, self.bar.ax)], plan, words - sum(strip))
        if self.strip:
            layout.place(self.figure, self.strip.ax, (left, plan.top, strip[0], size[1]))
        layout.put_title(self.figure, self.title, left, EDGE)
        layout.put_words(self.figure, self.note, left, plan.top - 8)

    def show(self, head: Head) -> None:
        """Colours, numbers, title and note of another head of the same kind."""
        self.map.show(head.values_QK, head.limits)
        if self.strip and head.sink_Q is not None:
            column_Q1 = head.sink_Q[:, None]
            self.strip.show(column_Q1, sink_limits(column_Q1, head.quantity))
        if head.limits != self.limits:
            self.limits = head.limits
            label_colourbar(self.bar, head.limits, self.style, quantity_name(head.quantity, self.style))
        self.title.set_text(head.title)
        self.note.set_text(head.note)

    def save(self, path: Path) -> Path:
        """Write what is shown now."""
        if self.style.image != "png":
            return save_figure(self.figure, path, self.style.image)
        data = encode_png(self.pixels(), DPI)
        return write_whole(path, lambda temp: temp.write_bytes(data))

    def pixels(self) -> np.ndarray:
        """The picture (height x width x 3): what never changes is drawn once, the rest is put on top."""
        parts = [self.map, *([self.strip] if self.strip else [])]
        live = [*(part.mesh for part in parts), self.title, self.note]
        if self.style.per_head_scale:
            live.append(self.bar.ax)
        if self.background is None:
            self._draw_background([*live, *(text for part in parts for text in part.numbers)])
            self.stamps = [Stamps(self.canvas, p.ax, p.numbers, np.argwhere(p.seen)) for p in parts if p.numbers]
        self.canvas.restore_region(self.background)
        for artist in live:
            self.figure.draw_artist(artist)
        # Pillow drops the fourth channel five times faster than numpy
        pixels = np.array(Image.fromarray(np.asarray(self.canvas.buffer_rgba())).convert("RGB"))
        for stamps in self.stamps:
            stamps.press(pixels)
        return pixels

    def _draw_background(self, live: Sequence[Artist]) -> None:
        for artist in live:
            artist.set_animated(True)
        self.canvas.draw()
        self.background = self.canvas.copy_from_bbox(self.figure.bbox)
