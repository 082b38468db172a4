"""Head metrics as layer x head panels. L layer, H head."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from attnscope.figures import layout
from attnscope.figures.colours import BLANK, DARK_INK, Limits, cmap_of, ink_on, label_colourbar, number
from attnscope.figures.fonts import fonts_for
from attnscope.figures.style import DPI, Panel, Style, count
from attnscope.figures.writer import drawing, px, save_figure

EDGE, BAR_GAP, BAR_PX = 18, 14, 10
NAME_ROOM, TITLE_ROOM, MARK_ROOM, BAR_ROOM = 46, 58, 54, 66
HEADING_SIZE, TITLE_SIZE, MARK_SIZE = 14.0, 11.0, 8.0
PANEL_PX, LEAST_PANEL_PX, LARGEST_CELL, LEAST_CELL = 340, 170, 34, 5
MOST_COLUMNS = 3  # so that the six metrics that matter first fill the first two rows
ALL_COLUMNS_PX = MOST_COLUMNS * PANEL_PX
COLUMN_PX = 260  # a panel with its names and its bar, at the least
LEAST_NUMBERED, LEAST_PRINTED = 15, 30  # pixels of a cell that has room for a head's number, and for its value
VALUE_SIZE = 6.0
BEHIND, BEHIND_ALPHA = 0.9, 0.85  # grey, and how much of a colour it hides
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
    """Write one layer x head panel per metric, each on its own fixed scale, with uniform attention marked beside it.

    NaN cells are hatched grey, layers with too few rows for a role are hatched over their colours; metrics that are
    the same for every head are named in a line. title, note: what stands above the panels instead. Raises ValueError
    when a metric's shape differs from the labels or its neighbours', UsageError for an unknown colour map or a folder
    that cannot be written.

        save_metrics(Path("metrics.png"), [Panel("sink", sink_LH, 0, 1)], Style(), layer_labels=range(28))
    """
    labels = [str(label) for label in layer_labels]
    shapes = {np.shape(panel.values_LH) for panel in panels}
    if len(shapes) != 1 or next(iter(shapes))[0] != len(labels):
        raise ValueError(f"expected metrics of one shape with {len(labels)} layers, got {sorted(shapes)}")
    with drawing(fonts_for([style.title, style.about.line, note, "▸"])):
        return save_figure(metrics_figure(panels, style, labels, title, note), path, style)


def metrics_figure(
    panels: Sequence[Panel], style: Style, labels: Sequence[str], title: str = "", note: str = ""
) -> Figure:
    """The picture of all metrics; to be called within `writer.drawing`."""

    def build(room: float) -> Figure:
        return _metrics_figure(panels, style, labels, room, (title, note))

    return layout.fitted(build, ALL_COLUMNS_PX, style, lambda figure: figure)


def _metrics_figure(
    panels: Sequence[Panel], style: Style, labels: Sequence[str], room: float, said: tuple[str, str]
) -> Figure:
    shown = [panel for panel in panels if panel.values_printed or _varies(panel)] or list(panels)
    layers, heads = panels[0].values_LH.shape
    most = MOST_COLUMNS if style.inches is None else max(1, int(style.inches * DPI / COLUMN_PX))
    columns = math.ceil(len(shown) / math.ceil(len(shown) / most))  # four stand two by two
    side = room / columns
    cell = max(1 if room < ALL_COLUMNS_PX else LEAST_CELL, min(LARGEST_CELL, int(side // max(layers, heads))))
    wide, high = (max(count * cell, min(LEAST_PANEL_PX, side)) for count in (heads, layers))
    figure = layout.new_figure()
    pairs = [layout.new_panel(figure) for _ in shown]
    for (ax, bar_ax), panel in zip(pairs, shown, strict=True):
        _draw(ax, bar_ax, panel, style)
        _ticks(ax, labels, (wide / heads, high / layers))
        _head(ax, panel)
        _number(ax, panel, cell)
        if panel.values_printed and wide / heads >= LEAST_PRINTED:
            _print_values(ax, panel, style)
    plan = layout.Frame(
        left=EDGE + NAME_ROOM,
        top=TITLE_ROOM,
        size=(wide, high),
        bar=(BAR_GAP, BAR_PX, high),
        right=BAR_GAP + BAR_PX + BAR_ROOM - NAME_ROOM / 2,
        below=MARK_ROOM,
        edge=EDGE,
        columns=columns,
        pitch=(NAME_ROOM + wide + BAR_GAP + BAR_PX + BAR_ROOM, TITLE_ROOM + high + MARK_ROOM),
    )
    there = int(np.isfinite([panel.values_LH for panel in panels]).any(0).sum())
    title = style.headed(said[0] or f"Metrics of {count(there, 'head')} in {count(layers, 'layer')}")
    note = said[1] or _note(panels, shown)
    words = layout.Words(figure, (title, note, _foot(shown, style)), HEADING_SIZE, style)
    layout.frame(figure, pairs, plan, words, plan.left)
    return figure


def _varies(panel: Panel) -> bool:
    """Whether heads differ; of a single head every metric is drawn."""
    finite = panel.values_LH[np.isfinite(panel.values_LH)]
    return finite.size > 0 and (finite.size == 1 or float(np.ptp(finite)) > SAME * max(1.0, abs(panel.high)))


def _note(panels: Sequence[Panel], shown: Sequence[Panel]) -> str:
    """The metrics that are not drawn, and why."""
    left = [panel for panel in panels if not any(panel is one for one in shown)]
    empty = [panel.name for panel in left if np.isnan(panel.values_LH).all()]
    same = [f"{panel.name} {np.nanmean(panel.values_LH):.3g}" for panel in left if panel.name not in empty]
    lines = (("the same for every head: ", same), ("no value in this text: ", empty))
    return "\n".join(start + "; ".join(found) for start, found in lines if found)


def _foot(shown: Sequence[Panel], style: Style) -> list[str]:
    signs = [
        ("▸ beside a colour bar: uniform attention", any(panel.uniform for panel in shown)),
        ("hatched colours: too few rows for a role", any(any(panel.few_L) for panel in shown)),
        ("hatched grey: no value", any(np.isnan(panel.values_LH).any() for panel in shown)),
    ]
    return [line for line in (style.about.line, "; ".join(text for text, there in signs if there)) if line]


def _draw(ax: Axes, bar_ax: Axes, panel: Panel, style: Style) -> None:
    ax.patch.set(facecolor=BLANK, hatch="////", edgecolor="#b5b5b5", linewidth=0)
    layers, heads = panel.values_LH.shape
    image = ax.imshow(
        np.ma.masked_invalid(panel.values_LH),
        cmap=cmap_of(style, panel.quantity),
        vmin=panel.low,
        vmax=panel.high,
        extent=(-0.5, heads - 0.5, layers - 0.5, -0.5),
        aspect="auto",
        interpolation="nearest",
    )
    if panel.behind_LH is not None:
        grey = np.concatenate([np.full((layers, heads, 3), BEHIND), panel.behind_LH[..., None] * BEHIND_ALPHA], -1)
        ax.imshow(grey, extent=image.get_extent(), aspect="auto", interpolation="nearest")
    for layer in np.flatnonzero(panel.few_L):
        ax.add_patch(
            Rectangle((-0.5, layer - 0.5), heads, 1, fill=False, hatch="////", edgecolor="#ffffff88", linewidth=0)
        )
    bar = ax.get_figure().colorbar(image, cax=bar_ax)  # type: ignore[union-attr]
    label_colourbar(bar, Limits(panel.low, panel.high), Style(), "")
    bar_ax.tick_params(labelsize=MARK_SIZE)
    for value in panel.uniform:
        pointer = bar_ax.text(-0.05, value, "▸", fontsize=TITLE_SIZE, ha="right", va="center_baseline")
        pointer.set_transform(bar_ax.get_yaxis_transform())


def _print_values(ax: Axes, panel: Panel, style: Style) -> None:
    """The value in each cell, two decimals below 10."""
    image = ax.images[0]
    for (row, column), value in np.ndenumerate(panel.values_LH):
        if np.isfinite(value):
            ink = str(ink_on(np.asarray(image.cmap(image.norm(value)))))
            text = number(value, style, 2 if abs(value) < 10 else 1)
            ax.text(column, row, text, color=ink, fontsize=VALUE_SIZE, ha="center", va="center_baseline")


def _number(ax: Axes, panel: Panel, cell: float) -> None:
    """A frame around the first heads, and their numbers where a cell has room for one."""
    image = ax.images[0]
    for place, (row, column) in enumerate(panel.first, start=1):
        ink = str(ink_on(np.asarray(image.cmap(image.norm(panel.values_LH[row, column])))))
        corner = column - 0.5, row - 0.5
        ax.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="#ffffff", linewidth=px(2), clip_on=False))
        if cell >= LEAST_NUMBERED:
            ax.text(column, row, str(place), color=ink, fontsize=MARK_SIZE, ha="center", va="center_baseline")


def _head(ax: Axes, panel: Panel) -> None:
    """Name, unit, and in a third line what uniform attention scores and how many rows there are."""
    uniform = " / ".join(f"{value:.2f}" for value in panel.uniform)
    third = ", ".join(filter(None, (f"uniform {uniform}" if uniform else "", panel.support)))
    for text, size, up in ((panel.name, TITLE_SIZE, 36), (panel.unit, MARK_SIZE, 20), (third, MARK_SIZE, 5)):
        colour = layout.NOTE_COLOUR if size == MARK_SIZE else DARK_INK
        place = ax.annotate(text, (0, 1), (0, px(up)), xycoords="axes fraction", textcoords="offset points")
        place.set(fontsize=size, color=colour)


def _ticks(ax: Axes, labels: Sequence[str], cell: tuple[float, float]) -> None:
    """Every head and layer is numbered where there is room, else every 2nd, 5th, ..."""
    heads = ax.images[0].get_array().shape[1]  # type: ignore[union-attr]
    across = layout.label_step(cell[0], layout.line_px(MARK_SIZE) * (0.8 + 0.4 * len(str(heads - 1))))
    down = layout.label_step(cell[1], layout.line_px(MARK_SIZE))
    ax.set_xticks(range(0, heads, across), [str(head) for head in range(0, heads, across)], fontsize=MARK_SIZE)
    ax.set_yticks(range(0, len(labels), down), labels[::down], fontsize=MARK_SIZE)
    ax.set_xlabel("head", fontsize=MARK_SIZE + 1, labelpad=2)
    ax.set_ylabel("layer", fontsize=MARK_SIZE + 1, labelpad=2)
    for spine in ax.spines.values():
        spine.set_visible(False)
