"""Head metrics as layer x head panels. L layer, H head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle

from attnscope.figures import layout
from attnscope.figures.colours import (
    BLANK,
    DARK_INK,
    Limits,
    cell_number,
    cmap_of,
    greys_of,
    hatch,
    ink_on,
    label_colourbar,
)
from attnscope.figures.fonts import fonts_for
from attnscope.figures.style import DPI, UNSURE, Panel, Style
from attnscope.figures.writer import Reused, drawing, drawn_pixels, px, runs, save_figure, save_pixels
from attnscope.utils import display as cells

EDGE, BAR_GAP, BAR_PX = 18, 14, 10
NAME_ROOM, TITLE_ROOM, MARK_ROOM, BAR_ROOM = 46, 58, 54, 66
HEADING_SIZE, TITLE_SIZE, MARK_SIZE = 14.0, 11.0, 8.0
PANEL_PX, LEAST_PANEL_PX, LARGEST_CELL, LEAST_CELL = 340, 170, 34, 5
MOST_COLUMNS = 3  # so that the six metrics that matter first fill the first two rows
ALL_COLUMNS_PX = MOST_COLUMNS * PANEL_PX
COLUMN_PX = 260  # a panel with its names and its bar, at the least
LEAST_PRINTED = 30  # pixels of a cell that has room for its value
VALUE_SIZE = 6.0
INSET = 0.46  # from the middle of a cell to a frame within it, in cells
SAME = 1e-6  # float32 noise of a metric that is the same for every head


def save_metrics(
    path: Path,
    panels: Sequence[Panel],
    style: Style,
    *,
    layer_labels: Sequence[str | int],
    title: str = "",
    note: str = "",
) -> Path:
    """Write one layer x head panel per metric, each on its own fixed scale, with a mark for uniform attention.

    NaN cells are hatched grey, layers with too few rows for a role are hatched over their colours; metrics that are
    the same for every head are named in a line. title, note: what is above the panels instead. Raises ValueError
    when a metric's shape differs from the labels or its neighbours', UsageError for an unknown colour map or a folder
    that cannot be written.

        save_metrics(Path("metrics.png"), [Panel("sink", sink_LH, 0, 1)], Style(), layer_labels=range(28))
    """
    labels = [str(label) for label in layer_labels]
    shapes = {np.shape(panel.values_LH) for panel in panels}
    if len(shapes) != 1 or next(iter(shapes))[0] != len(labels):
        raise ValueError(f"expected metrics of one shape with {len(labels)} layers, got {sorted(shapes)}")
    with drawing(fonts_for([style.title, style.about.line, note, "▸"]), style.sheet):
        if style.image != "png":
            return save_figure(metrics_figure(panels, style, labels, title, note), path, style)
        return save_pixels(_fitted(panels, style, labels, (title, note), in_turn=True).pixels(), path, style)


def metrics_figure(
    panels: Sequence[Panel], style: Style, labels: Sequence[str], title: str = "", note: str = ""
) -> Figure:
    """The picture of all metrics; to be called within `writer.drawing`."""
    return _fitted(panels, style, labels, (title, note), in_turn=False).figure


def _fitted(
    panels: Sequence[Panel], style: Style, labels: Sequence[str], words: tuple[str, str], *, in_turn: bool
) -> Sheet:
    """In the width that the style asks for. words: title and note, empty for those of metrics."""
    build = partial(Sheet, panels, style, labels, words, in_turn=in_turn)
    return layout.fitted(build, ALL_COLUMNS_PX, style, lambda sheet: sheet.figure)


class Sheet:
    """Panels of one shape on a figure, to be used within `writer.drawing`.

    in_turn: one pair of axes that is filled, moved and drawn panel by panel, its names and marks drawn once; making
    axes and ticks costs several times the rest. Without it each panel has axes of its own, as a vector file needs.
    """

    def __init__(
        self,
        panels: Sequence[Panel],
        style: Style,
        labels: Sequence[str],
        words: tuple[str, str],
        room: float,
        *,
        in_turn: bool,
    ) -> None:
        self.style, self.growth = style, layout.growth(style)
        self.shown = [panel for panel in panels if panel.always or _varies(panel)] or list(panels)
        layers, heads = panels[0].values_LH.shape
        most = MOST_COLUMNS if style.inches is None else max(1, int(style.inches * DPI / COLUMN_PX))
        self.columns = math.ceil(len(self.shown) / math.ceil(len(self.shown) / most))  # four stand two by two
        side = room / self.columns
        self.cell = max(1 if room < ALL_COLUMNS_PX else LEAST_CELL, min(LARGEST_CELL, int(side // max(layers, heads))))
        self.size = tuple(max(count * self.cell, min(LEAST_PANEL_PX, side)) for count in (heads, layers))
        self.step = self.size[0] / heads, self.size[1] / layers
        # Panels of one scale have one bar, at the right of the first row.
        scales = {(panel.low, panel.high, panel.quantity) for panel in self.shown}
        self.shared = len(self.shown) > 1 and len(scales) == 1 and not any(panel.uniform for panel in self.shown)
        self.figure = layout.new_figure()
        self.pairs = [layout.new_panel(self.figure) for _ in self.shown[: 1 if in_turn else None]]
        # Every head and layer is numbered where there is room, else every 2nd, 5th, ...
        line = layout.line_px(layout.sized(MARK_SIZE, style))
        across = layout.label_step(self.step[0], line * (0.8 + 0.4 * len(str(heads - 1))))
        down = layout.label_step(self.step[1], line)
        for ax, _ in self.pairs:
            ax.set_xticks(range(0, heads, across), [str(head) for head in range(0, heads, across)], fontsize=MARK_SIZE)
            ax.set_yticks(range(0, layers, down), labels[::down], fontsize=MARK_SIZE)
            ax.set_xlabel("head", fontsize=MARK_SIZE + 1, labelpad=2)
            ax.set_ylabel("layer", fontsize=MARK_SIZE + 1, labelpad=2)
            ax.set_axisbelow(True)  # tick marks reach one pixel into the first column
            ax.spines[:].set_visible(False)
        self.bars = [self._fill(*pair, panel) for pair, panel in zip(self.pairs, self.shown, strict=False)]
        for index, (_, bar_ax) in enumerate(self.pairs):
            bar_ax.set_visible(self._has_bar(index))
        self._place(panels, words)

    def _has_bar(self, index: int) -> bool:
        """Whether a panel has a colour bar of its own."""
        return not self.shared or index == self.columns - 1

    def _fill(self, ax: Axes, bar_ax: Axes, panel: Panel, bar: Colorbar | None = None) -> Colorbar:
        """A panel in a pair of axes; bar: the one that is there already, on which only the change is drawn."""
        image, scale = _draw(ax, panel, self.style), Limits(panel.low, panel.high)
        if bar is None:
            bar = self.figure.colorbar(image, cax=bar_ax)
            bar_ax.tick_params(labelsize=MARK_SIZE)
            label_colourbar(bar, scale, Style(), "")
        elif (bar.mappable.get_clim(), bar.mappable.get_cmap()) != (image.get_clim(), image.get_cmap()):
            bar.update_normal(image)
            label_colourbar(bar, scale, Style(), "")
        for value in panel.uniform:
            pointer = bar_ax.text(-0.05, value, "▸", fontsize=TITLE_SIZE, ha="right", va="center_baseline")
            pointer.set_transform(bar_ax.get_yaxis_transform())
        # Name, unit, and in a third line what uniform attention scores and how many rows there are.
        largest = max([*panel.values_LH[np.isfinite(panel.values_LH)].tolist(), *panel.uniform], default=1.0)
        decimals = cells.decimals_of(largest) if panel.low >= 0 else 2  # a sign leaves a cell no room for a third
        uniform = " / ".join(f"{value:.{decimals}f}" for value in panel.uniform)
        third = ", ".join(filter(None, (f"uniform {uniform}" if uniform else "", panel.support)))
        up = [round(place * self.growth) for place in (36, 20, 5)]
        small = ((panel.unit, MARK_SIZE, up[1], layout.NOTE_COLOUR), (third, MARK_SIZE, up[2], layout.NOTE_COLOUR))
        layout.say_above(ax, ((panel.name, TITLE_SIZE, up[0], DARK_INK), *small))
        # Layers without attention in a row are one grey box, with what they are where it has room.
        for name, run in groupby(range(len(panel.without_L)), lambda row: panel.without_L[row]):
            first, *rest = run
            heads, high = panel.values_LH.shape[1], 1 + len(rest)
            if name:
                ax.add_patch(Rectangle((-0.5, first - 0.5), heads, high, facecolor=BLANK, linewidth=0))
            if name and high * self.step[1] >= layout.line_px(MARK_SIZE):
                text = ax.text((heads - 1) / 2, first + (high - 1) / 2, name, ha="center", va="center_baseline")
                text.set(fontsize=MARK_SIZE, color=layout.NOTE_COLOUR)
        # Frames of the first heads and numbers are light on dark colours and dark on light ones.
        for row, column in panel.first:
            box = (column - INSET, row - INSET), 2 * INSET, 2 * INSET
            ink = _ink(image, panel.values_LH[row, column])
            ax.add_patch(Rectangle(*box, fill=False, clip_on=False, edgecolor=ink, linewidth=px(2)))
        for (row, column), value in np.ndenumerate(panel.values_LH):
            if self.step[0] >= LEAST_PRINTED and np.isfinite(value):
                shown = cell_number(value, self.style, decimals if abs(value) < 10 else 1)
                number = ax.text(column, row, shown, fontsize=VALUE_SIZE, ha="center", va="center_baseline")
                number.set(color=_ink(image, value), label=layout.NUMBER)
        layout.in_print(self.figure, self.style)
        return bar

    def _place(self, panels: Sequence[Panel], words: tuple[str, str]) -> None:
        """Title, notes and foot, and everything in its place."""
        (layers, _), (wide, high) = panels[0].values_LH.shape, self.size
        rooms = (room * self.growth for room in (NAME_ROOM, TITLE_ROOM, MARK_ROOM, BAR_ROOM))
        name_room, title_room, mark_room, bar_room = rooms
        beside = BAR_GAP if self.shared else BAR_GAP + BAR_PX + bar_room
        plan = layout.PanelPlan(
            left=EDGE + name_room,
            top=title_room,
            size=(wide, high),
            bar=(BAR_GAP, BAR_PX, high),
            right=BAR_GAP + BAR_PX + bar_room - name_room / 2,
            below=mark_room,
            edge=EDGE,
            columns=self.columns,
            pitch=(name_room + wide + beside, title_room + high + mark_room),
        )
        measured = int(np.isfinite([panel.values_LH for panel in panels]).any(0).sum())
        attending = cells.number_of(layers - len([name for name in panels[0].without_L if name]), "layer")
        title = self.style.headed(words[0] or f"Metrics of {cells.number_of(measured, 'head')} in {attending}")
        # The note says which metrics are not drawn, and why; the foot explains the signs that some panel has.
        shown = self.shown
        left = [panel for panel in panels if not any(panel is other for other in shown)]
        empty = [panel.name for panel in left if np.isnan(panel.values_LH).all()]
        same = [f"{panel.name} {np.nanmean(panel.values_LH):.3g}" for panel in left if panel.name not in empty]
        reasons = (("the same for every head: ", same), ("no value in this text: ", empty))
        note = words[1] or "\n".join(reason + "; ".join(names) for reason, names in reasons if names)
        no_value = any(
            np.isnan(values_H).any() and not name
            for panel in shown
            for values_H, name in zip(panel.values_LH, panel.without_L or [""] * len(panel.values_LH), strict=True)
        )
        signs = [
            ("▸ next to a colour bar: uniform attention", any(panel.uniform for panel in shown)),
            ("hatched colours: too few rows for a role", any(any(panel.few_L) for panel in shown)),
            ("hatched grey: no value", no_value),
            (UNSURE, any(panel.hatched_LH is not None and panel.hatched_LH.any() for panel in shown)),
            ("grey rows: layers without attention", any(any(panel.without_L) for panel in shown)),
        ]
        foot = [self.style.about.line, "; ".join(text for text, needed in signs if needed)]
        around = layout.Words(self.figure, (title, note, foot), HEADING_SIZE, self.style)
        pairs = self.pairs * (len(shown) // len(self.pairs))  # of one pair, the last place holds
        self.plan = layout.frame(self.figure, pairs, plan, around, plan.left)

    def pixels(self) -> np.ndarray:
        """The picture of panels in turn, height x width x 3."""
        self.figure.set_dpi(self.style.dpi)
        ((ax, bar_ax),) = self.pairs
        layout.place_panel(self.figure, (ax, bar_ax), self.plan, 0)
        reused = Reused(self.figure, [ax, bar_ax])
        marks = reused.changed(ax.xaxis, ax.yaxis)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_visible(False)
        scale, (left_0, top_0) = self.style.dpi / DPI, self.plan.corner(0)
        for index, panel in enumerate(self.shown):
            layout.place_panel(self.figure, (ax, bar_ax), self.plan, index)
            bar_ax.set_visible(self._has_bar(index))
            left, top = self.plan.corner(index)
            marks.press(reused.buffer, round((top - top_0) * scale), round((left - left_0) * scale))
            # The pair of axes holds the first panel already; it is emptied for each of the others.
            if index:
                for artist in [*ax.images, *ax.patches, *ax.texts, *bar_ax.texts]:
                    artist.remove()
                self._fill(ax, bar_ax, panel, self.bars[0])
            reused.draw()
        return drawn_pixels(self.figure)


def _varies(panel: Panel) -> bool:
    """Whether heads differ; of a single head every metric is drawn."""
    finite = panel.values_LH[np.isfinite(panel.values_LH)]
    return finite.size > 0 and (finite.size == 1 or float(np.ptp(finite)) > SAME * max(1.0, abs(panel.high)))


def _draw(ax: Axes, panel: Panel, style: Style) -> AxesImage:
    ax.patch.set(facecolor=greys_of(panel.quantity)[0], hatch="////", edgecolor="#b5b5b5", linewidth=0)
    layers, heads = panel.values_LH.shape
    image = ax.imshow(
        np.ma.masked_invalid(panel.values_LH),
        cmap=cmap_of(style, panel.quantity),
        vmin=panel.low,
        vmax=panel.high,
        extent=(-0.5, heads - 0.5, layers - 0.5, -0.5),
        aspect="auto",
        interpolation="nearest",
        zorder=1,
    )
    boxes = [(slice(0, heads), rows) for rows in runs(panel.few_L)]
    for row, hatched_H in enumerate(panel.hatched_LH if panel.hatched_LH is not None else ()):
        boxes += [(columns, slice(row, row + 1)) for columns in runs(hatched_H)]
    for columns, rows in boxes:
        box = (columns.start - 0.5, rows.start - 0.5), columns.stop - columns.start, rows.stop - rows.start
        ax.add_patch(Rectangle(*box, **hatch(panel.quantity)))
    return image


def _ink(image: AxesImage, value: float) -> str:
    """What is read best on the colour of a value."""
    return str(ink_on(np.asarray(image.cmap(image.norm(np.asarray(value))))))
