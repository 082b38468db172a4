"""Pictures of curves and bars: one frame for all of one pair of axes, one sheet for all of several panels.

budgets.png, budgets_curve.png: what is lost layer by layer, or over the share of the keys that is kept.
knockout.png: what is lost by window of layers, or the text with each token in the colour of its effect.
patching.png: effects of patches by layer or position. prune.png: the loss as heads go, one after the other.
ablation.png: what sets of heads cost, with intervals and the range of random sets of the same size.
probes.png: a panel per probe, a dot with its interval per head.
checkpoints.png: a panel per probe, a line per head. depth.png: metrics over the layers, a panel each.

Sizes are pixels, those of texts points. N point, cut, layer or head, R revision, T token.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from attnscope.figures import layout
from attnscope.figures.colours import DARK_INK, ROUND
from attnscope.figures.fonts import isolated, shown_label, shown_text
from attnscope.figures.layout import drawn_ends, save_drawn
from attnscope.figures.style import DPI, MARKERS, Depth, Style
from attnscope.figures.terminal import RAMP
from attnscope.figures.writer import px
from attnscope.utils.display import number_of, printed

TITLE_SIZE, NAME_SIZE, MARK_SIZE = 13.0, 10.5, 8.0
WIDE_PX, STEP_PX, TITLE_PX, LINE_PX = 560, 22, 34, 17  # a picture, a column, a title or foot, a line of legend or foot


def line_colours(count: int = 2) -> list[str]:
    """The colours of so many lines, in the order of the style."""
    colours = [str(colour) for colour in mpl.rcParams["axes.prop_cycle"].by_key()["color"]]
    return (colours * count)[:count]


class Frame:
    """A figure of one pair of axes that is `size` wide and high, or narrower where the style asks for it.

    left, right, above, below: pixels around the axes without title and foot, which take `title_px` each.
    """

    def __init__(
        self,
        style: Style,
        size: tuple[float, float],
        *,
        left: float = 70,
        right: float = 20,
        above: float,
        below: float,
        title_px: float = TITLE_PX,
    ) -> None:
        self.style, self.wide = style, min(size[0], (style.inches or math.inf) * DPI)
        growth = layout.growth(style)
        left, right, above, below, title_px = (growth * room for room in (left, right, above, below, title_px))
        above, below = above + title_px * style.titled, below + title_px * style.captioned
        high = size[1] + above + below
        self.figure = layout.new_figure()
        self.figure.set_size_inches(self.wide / DPI, high / DPI)
        self.ax = self.figure.subplots()
        sides = {"left": left / self.wide, "right": 1 - right / self.wide}
        self.figure.subplots_adjust(**sides, top=1 - above / high, bottom=below / high)

    def line(self, x_N: Sequence[float] | np.ndarray, y_N: np.ndarray, colour: str, name: str) -> None:
        """A line through points; name: in the legend."""
        self.ax.plot(x_N, y_N, "o-", color=colour, label=name)

    def axes(self, x_name: str, y_name: str, columns: int) -> None:
        """The line of 0, what both axes are, and a legend above them with so many columns."""
        self.ax.axhline(0, color=DARK_INK, linewidth=0.8)
        self.name_axes(x_name, y_name)
        corner: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
        self.ax.legend(fontsize=MARK_SIZE, frameon=False, ncols=columns, **corner)

    def name_axes(self, x_name: str, y_name: str) -> None:
        """What both axes are, and lines across at the marks."""
        self.ax.set_xlabel(x_name, fontsize=NAME_SIZE)
        self.ax.set_ylabel(y_name, fontsize=NAME_SIZE)
        self.ax.tick_params(axis="y", labelsize=MARK_SIZE)
        layout.rule(self.ax)

    def titled(self, title: str, left: float | None = None, down: float = 12) -> Figure:
        """The figure with its title, so many pixels from its corner, and its foot."""
        left = 0.02 * self.wide if left is None else left
        layout.entitle(self.figure, self.style, (title, self.style.about.line), TITLE_SIZE, (left, down, 8))
        return self.figure


class Panels:
    """Panels of curves on one figure, as many side by side as there is room for, three at most.

    size: of a panel, if there is room. before, after: pixels at its left and at its right.
    """

    EDGE, TITLE_ROOM, HEADING_SIZE, NAME_SIZE = 18, 50, 14.0, 11.0

    def __init__(
        self, count: int, style: Style, room: float, size: tuple[float, float], before: float, after: float
    ) -> None:
        self.style, self.growth = style, layout.growth(style)
        before, after = before * self.growth, after * self.growth
        self.before, self.after = before, after
        self.columns = max(1, min(3, count, int(room // (size[0] + before + after))))
        self.size = min(size[0], room - before - after), size[1]
        self.figure = layout.new_figure()
        self.pairs = [layout.new_panel(self.figure) for _ in range(count)]
        for _, bar_ax in self.pairs:
            bar_ax.set_axis_off()

    def label_step(self, gaps: int) -> int:
        """Every how many marks are labelled below a panel, which has so many gaps between marks."""
        line = layout.line_px(layout.sized(MARK_SIZE, self.style))
        return layout.label_step(self.size[0] / max(1, gaps), line * 1.4)

    def finish(self, ax: Axes, name: str, unit: str) -> None:
        """What is above a panel, and the lines across it."""
        layout.rule(ax, pale=True)
        ax.tick_params(axis="y", labelsize=MARK_SIZE)
        up = round(22 * self.growth), round(7 * self.growth)
        layout.say_above(ax, ((name, self.NAME_SIZE, up[0], DARK_INK), (unit, MARK_SIZE, up[1], layout.NOTE_COLOUR)))

    def titled(self, title: str, note: str, below: float, legend: Sequence[tuple[str, str]] = ()) -> Figure:
        """The figure with everything in its place; below: pixels for what is below a panel."""
        (wide, high), edge, above, below = self.size, self.EDGE, self.TITLE_ROOM * self.growth, below * self.growth
        plan = layout.PanelPlan(
            left=edge + self.before,
            top=above,
            size=self.size,
            right=self.after,
            below=below,
            edge=edge,
            columns=self.columns,
            pitch=(self.before + wide + self.after, above + high + below),
        )
        texts = (self.style.headed(title), note, [self.style.about.line])
        words = layout.Words(self.figure, texts, self.HEADING_SIZE, self.style, legend)
        layout.frame(self.figure, self.pairs, plan, words, edge)
        return self.figure


@dataclass(frozen=True)
class BudgetLine:
    """One line of effects, (N,) each. name: in the legend. x: the share of keys that is kept, or the layer. low, high:
    the intervals, NaN for an open end or none. labels: of the points, empty for none."""

    name: str
    x: np.ndarray
    effect: np.ndarray
    low: np.ndarray
    high: np.ndarray
    labels: Sequence[str] = ()


def save_budget_lines(
    path: Path, lines: Sequence[BudgetLine], style: Style, title: str, *, unit: str, layers: bool = False
) -> Path:
    """Write the lines; layers: whether x is a layer. Raises UsageError for a folder that cannot be written.

    save_budget_lines(Path("curve.png"), [BudgetLine("top", kept, effect, low, high)], Style(), "Cost", unit="nats")
    """
    return save_drawn(
        path, style, [title], lambda room: budget_lines_figure(lines, style, title, unit=unit, layers=layers)
    )


def budget_lines_figure(
    lines: Sequence[BudgetLine], style: Style, title: str, *, unit: str, layers: bool = False
) -> Figure:
    """The lines; to be called within `writer.drawing`."""
    columns = 3
    frame = Frame(style, (600, 320), right=40, above=10 + LINE_PX * math.ceil(len(lines) / columns), below=56)
    for number, (line, colour) in enumerate(zip(lines, line_colours(len(lines)), strict=True)):
        order = np.argsort(line.x, kind="stable")
        x_N, effect_N = line.x[order], line.effect[order]
        frame.line(x_N, effect_N, colour, line.name)
        if np.isfinite([line.low, line.high]).any():
            ends = drawn_ends(effect_N, line.low[order], line.high[order])
            frame.ax.vlines(x_N, *ends, color=colour, linewidth=1.2, alpha=0.6)
        # Labels of every other line go below its points: neighbouring lines would print over each other.
        offset = 3, -9 if number % 2 else 4
        for at, x, effect in zip(order if line.labels else (), x_N, effect_N, strict=False):
            label = frame.ax.annotate(line.labels[at], (x, effect), offset, textcoords="offset points")
            label.set(fontsize=MARK_SIZE - 1, color=colour)
    frame.ax.tick_params(labelsize=MARK_SIZE)
    # Half a layer is no mark, and a share is read in percent.
    if layers:
        frame.ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        frame.ax.xaxis.set_major_formatter(PercentFormatter(1))
    frame.axes("layer" if layers else "share of the keys that is kept", f"{unit} lost", columns)
    return frame.titled(title)


@dataclass(frozen=True)
class Curve:
    """Effects in the model's order, (N,) each. names: of the cuts. low, high: their intervals, NaN for none. others: of
    the same weights on other keys the low end of 95 % of the effects, their mean, and the high end; NaN for none."""

    names: Sequence[str]
    effect: np.ndarray
    low: np.ndarray
    high: np.ndarray
    unit: str
    others: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None


def save_curve(path: Path, curve: Curve, style: Style, title: str) -> Path:
    """Write the curve. Raises UsageError for a folder that cannot be written.

    save_curve(Path("knockout.png"), Curve(["L0"], one, none, none, "nats"), Style(), "What is lost without the look")
    """
    return save_drawn(path, style, [title], lambda room: curve_figure(curve, style, title))


def curve_figure(curve: Curve, style: Style, title: str) -> Figure:
    """The curve; to be called within `writer.drawing`."""
    blue, orange = line_colours()
    count, most_named = len(curve.names), 50
    others = curve.others if curve.others is not None and np.isfinite(curve.others[0]).any() else None
    low_N, high_N = drawn_ends(curve.effect, curve.low, curve.high)
    interval = bool(np.isfinite(low_N).any())
    wide = max(WIDE_PX, STEP_PX * min(count, most_named) + 110)
    frame = Frame(style, (wide, 300), above=LINE_PX * (2 + interval + (others is not None)), below=78)
    # The bands first, so that the curve itself is never covered.
    if others is not None:
        least_N, mean_N, most_N = others
        frame.ax.plot(mean_N, color=orange, linewidth=1.2, label="same weights on other keys: mean, 95 %")
        frame.ax.fill_between(range(count), least_N, most_N, color=orange, alpha=0.18, linewidth=0)
    if interval:
        band: dict[str, Any] = {"color": blue, "alpha": 0.2, "linewidth": 0, "label": "95 % interval, of all cuts"}
        frame.ax.fill_between(range(count), low_N, high_N, **band)
    frame.line(range(count), curve.effect, blue, "these keys")
    layout.name_columns(frame.ax, curve.names, most_named, MARK_SIZE)
    frame.axes("layers that are cut", f"{curve.unit} lost", 1)
    return frame.titled(title)


@dataclass(frozen=True)
class Lines:
    """Effects in the model's or the text's order. series: by name (N,) and their ends (2, N), NaN for none. axis: what
    the names are."""

    names: Sequence[str]
    series: Mapping[str, tuple[np.ndarray, np.ndarray]]
    unit: str
    axis: str


def save_lines(path: Path, lines: Lines, style: Style, title: str) -> Path:
    """Write the lines. Raises UsageError for a folder that cannot be written."""
    return save_drawn(path, style, [title, *lines.names], lambda room: lines_figure(lines, style, title))


def lines_figure(lines: Lines, style: Style, title: str) -> Figure:
    """A line per series; to be called within `writer.drawing`."""
    count, most_named = len(lines.names), 60
    wide = max(WIDE_PX, STEP_PX * min(count, most_named) + 64)
    frame = Frame(style, (wide, 280), left=64, above=28, below=84, title_px=38)
    for (name, (value_N, ends_2N)), colour in zip(lines.series.items(), line_colours(len(lines.series)), strict=True):
        if np.isfinite(ends_2N).any():
            ends = drawn_ends(value_N, *ends_2N)
            frame.ax.fill_between(range(count), *ends, color=colour, alpha=0.2, linewidth=0)
        frame.line(range(count), value_N, colour, name)
    layout.name_columns(frame.ax, lines.names, most_named, MARK_SIZE)
    frame.axes(lines.axis, lines.unit, 2)
    return frame.titled(title, left=14, down=10)


LEAST = 1e-4  # nats: below, a log axis would show rounding


def save_pruning(
    path: Path, heads: Sequence[str], losses: Sequence[float], references: Sequence[tuple[str, float]], style: Style
) -> Path:
    """Write the curve: losses[n] without the first n heads, on a log scale; losses[0] is intact.

    references: names and heights of lines to compare with. Raises UsageError for a folder that cannot be written.

        save_pruning(Path("prune.png"), ["L2H4"], [0.04, 0.04], [("uniform guess", 6.2)], Style())
    """
    if len(losses) != len(heads) + 1:
        raise ValueError(f"expected {len(heads) + 1} losses for {len(heads)} heads, got {len(losses)}")
    return save_drawn(path, style, [], lambda room: pruning_figure(heads, losses, references, style))


def pruning_figure(
    heads: Sequence[str], losses: Sequence[float], references: Sequence[tuple[str, float]], style: Style
) -> Figure:
    """The curve; to be called within `writer.drawing`."""
    blue, orange = line_colours()
    named = len(heads) <= 60
    wide = max(WIDE_PX, 24 * (len(heads) + 1) + 110) if named else 2 * WIDE_PX
    # The figure is as high with a title as without: the axes take the room.
    above, below, high = 49.0 if style.titled else 14.7, 102.9, 490
    frame = Frame(style, (wide, high - above - below), above=above, below=below, title_px=0)
    ax, loss_N = frame.ax, np.maximum(losses, LEAST)
    ax.plot(loss_N, "o-", color=blue, markeredgewidth=0.75)
    for name, height in (("intact", loss_N[0]), *references):
        ax.axhline(height, linestyle="--", color=DARK_INK if name == "intact" else orange, linewidth=1)
        ax.annotate(name, (0, height), (2, 3), textcoords="offset points", fontsize=MARK_SIZE, color=DARK_INK)
    if named:
        ax.set_xticks(range(len(losses)), ["intact", *heads], fontsize=MARK_SIZE, rotation=90)
    frame.name_axes("head that goes" if named else "heads gone", "nats per token")
    layout.rule(ax, "both")
    # A log axis with plain numbers, and room around the curve for one of them, however flat it is.
    low, high = ax.dataLim.intervaly * (1 / 1.6, 1.6)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    marks = [digit * 10.0**power for power in powers for digit in ROUND[:-1]]
    layout.log_axis(ax, [mark for mark in marks if low <= mark <= high])
    ax.set_ylim(low, high)
    title = style.headed("Loss as heads go, the least missed first")
    texts = (
        layout.wrapped(text, frame.wide * 0.96, size)
        for text, size in ((title, TITLE_SIZE), (style.about.line, layout.NOTE_SIZE))
    )
    layout.entitle(frame.figure, style, tuple(texts), TITLE_SIZE, (0.02 * frame.wide, 0.02 * 490, 0.015 * 490))
    return frame.figure


BAND = "#808080"
UNKNOWN = math.nan, math.nan


@dataclass(frozen=True)
class SetCost:
    """One set: its name, what is lost without it, the ends of its interval, and of where random sets lie; or NaN.

    An interval with one open end, NaN, is drawn from the value to its other end.
    """

    name: str
    value: float
    interval: tuple[float, float] = UNKNOWN
    random: tuple[float, float] = UNKNOWN


def save_sets(path: Path, costs: Sequence[SetCost], style: Style, *, title: str, note: str, unit: str) -> Path:
    """Write a bar for each set, in this order from above. Raises UsageError for a folder that cannot be written.

    save_sets(Path("sets.png"), [SetCost("induction", 2.5, (2.2, 2.8))], Style(), title="", note="", unit="nats")
    """
    texts = [style.title, note, *(cost.name for cost in costs)]
    return save_drawn(path, style, texts, lambda room: sets_figure(costs, style, (title, note, unit), room), WIDE_PX)


def sets_figure(costs: Sequence[SetCost], style: Style, texts: tuple[str, str, str], room: float = WIDE_PX) -> Figure:
    """The picture; to be called within `writer.drawing`. texts: title, note, and what the numbers are in."""
    (title, note, unit), gap = texts, 8
    figure = layout.new_figure()
    ax, bar_ax = layout.new_panel(figure)
    bar_ax.set_axis_off()
    thick, band_thick = 0.5, 0.86  # of a row
    for row, cost in enumerate(costs):
        # The random sets' band is below the bar, the interval above it.
        if np.isfinite(cost.random).all():
            low, high = cost.random
            corner = low, row - band_thick / 2
            ax.add_patch(Rectangle(corner, high - low, band_thick, facecolor=BAND, edgecolor=BAND, linewidth=px(2)))
        ax.barh(row, cost.value, thick, color=line_colours(1)[0], zorder=2)
        low, high = map(float, drawn_ends(np.array(cost.value), *map(np.array, cost.interval)))
        if math.isfinite(low):
            ax.hlines(row, low, high, color=DARK_INK, linewidth=1.6, zorder=3)
            ax.vlines(cost.interval, row - thick / 4, row + thick / 4, color=DARK_INK, linewidth=1.2, zorder=3)
        # The number is right of whatever reaches farthest.
        end = max(0.0, cost.value, *filter(math.isfinite, (*cost.interval, *cost.random)))
        text = ax.annotate(printed(cost.value), (end, row), (px(6), 0), textcoords="offset points", va="center")
        text.set(fontsize=9.0, color=DARK_INK, annotation_clip=False)
    # The first set is at the top, where a reader begins.
    ax.set_yticks(range(len(costs)), [isolated(shown_text(cost.name)) for cost in costs], fontsize=10.0)
    ax.set_ylim(len(costs) - 0.5, -0.5)
    ax.axvline(0, color="#b0b0b0", linewidth=px(1), zorder=0.5)
    ax.set_xlabel(unit, fontsize=10.0)
    ax.tick_params(axis="x", labelsize=9.0)
    ax.tick_params(axis="y", length=0)
    layout.rule(ax, "x", pale=True)
    ax.spines["left"].set_visible(False)
    # Names are measured as they are printed, before the bars get what is left of the width.
    layout.in_print(figure, style)
    edge = 2 if style.in_print else 18
    left = edge + layout.extent(ax.get_yticklabels())[0] + gap
    plan = layout.PanelPlan(
        left=left,
        top=gap,
        size=(max(60, room - (left if style.inches else 0)), 26 * len(costs)),
        right=64,
        below=48,
        edge=edge,
    )
    legend = [("random sets: 99 % of them", BAND)] if any(np.isfinite(cost.random).all() for cost in costs) else []
    words = layout.Words(figure, (style.headed(title), note, [style.about.line]), TITLE_SIZE, style, legend)
    layout.frame(figure, [(ax, bar_ax)], plan, words, edge)
    return figure


MOST_LABELS = 10  # heads with a name at the end of their line
GREY, DOT_GREY = "#c9c9c9", "#8c8c8c"
# After Okabe and Ito; the yellow is too light for a line.
HEAD_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a0177", "#000000")


@dataclass(frozen=True)
class Course:
    """One probe: values_RN of every head at every revision, NaN for none. named: the heads that have a colour."""

    name: str
    unit: str
    values_RN: np.ndarray
    named: Sequence[int]


@dataclass(frozen=True)
class CourseSheet:
    """Probes over checkpoints: a panel per probe, with the heads and revisions by their names."""

    courses: Sequence[Course]
    heads: Sequence[str]
    revisions: Sequence[str]
    note: str = ""


def save_courses(path: Path, sheet: CourseSheet, style: Style) -> Path:
    """Write a panel per probe; a head that is named in any keeps its colour and marker in all, the others are grey."""
    texts = [style.title, *sheet.revisions]
    return save_drawn(path, style, texts, lambda room: courses_figure(sheet, style, room), 1240)


def courses_figure(sheet: CourseSheet, style: Style, room: float) -> Figure:
    """The picture; to be called within `writer.drawing`."""
    courses, heads, revisions = sheet.courses, sheet.heads, list(map(shown_label, sheet.revisions))
    panels = Panels(len(courses), style, room, (300, 180), before=40, after=56)
    wide, high = panels.size
    # Colours go round once before a marker comes again with the same one.
    named = dict.fromkeys(head for course in courses for head in course.named)
    looks = {
        head: (HEAD_COLOURS[place % 8], MARKERS[(place + place // 8) % len(MARKERS)])
        for place, head in enumerate(named)
    }
    step = panels.label_step(len(revisions) - 1)
    for (ax, _), course in zip(panels.pairs, courses, strict=True):
        # Grey lines first, so that they cover no head that is named.
        for head in sorted(range(len(heads)), key=lambda head: head in course.named):
            colour, marker = looks[head] if head in course.named else (GREY, "o")
            thick, size = (2.2, 4.5) if head in course.named else (0.8, 1.5)
            line: dict[str, Any] = {"color": colour, "marker": marker, "linewidth": thick, "markersize": size}
            ax.plot(course.values_RN[:, head], clip_on=False, **line)
        low = float(np.nanmin(course.values_RN)) if np.isfinite(course.values_RN).any() else 0.0
        ax.set_ylim(min(-0.02, low), 1.02)
        ax.set_xticks(range(0, len(revisions), step), revisions[::step], fontsize=MARK_SIZE)
        ax.set_xlim(-0.15, len(revisions) - 1 + 0.15)
        layout.turn(ax.get_xticklabels(), step * wide / max(1, len(revisions) - 1))
        panels.finish(ax, course.name, course.unit)
        # Names are at the lines' right ends, pushed apart; of many those that end highest.
        ends = {head: value for head in course.named if np.isfinite(value := course.values_RN[-1, head])}
        bottom, top = ax.get_ylim()
        gap, below = layout.line_px(MARK_SIZE) / high * (top - bottom), math.inf
        for head in sorted(ends, key=lambda head: -ends[head])[:MOST_LABELS]:
            below = min(ends[head], below - gap)
            label = ax.annotate(heads[head], (1, below), (px(8), 0), xycoords=("axes fraction", "data"), va="center")
            label.set(fontsize=MARK_SIZE, color=looks[head][0])
            label.set_anncoords("offset points")
    # Long names of revisions are turned, so that what is below a panel is known only once they are drawn.
    layout.in_print(panels.figure, style)
    title = f"{len(heads)} heads over {len(revisions)} checkpoints"
    return panels.titled(title, sheet.note, below=layout.extent(panels.pairs[0][0].get_xticklabels())[1] + 26)


@dataclass(frozen=True)
class Dots:
    """One probe: the effects of the heads, (N,), the ends of their intervals, NaN for none, and which have a colour."""

    name: str
    unit: str
    effect_N: np.ndarray
    low_N: np.ndarray
    high_N: np.ndarray
    named_N: np.ndarray


@dataclass(frozen=True)
class DotSheet:
    """Probes side by side: a panel each, with a row per head, and below them all other heads in one row.

    heads: names. rows: the places of those with a row of their own. mark: where a dashed line is. texts: title, note,
    and a line of the foot.
    """

    probes: Sequence[Dots]
    heads: Sequence[str]
    rows: Sequence[int]
    mark: float
    texts: tuple[str, str, str]


DOTS_PX, DOTS_WIDE, DOTS_GAP, ROW_PX = 1000, 150, 18, 15  # a figure, a panel, a gap, a row
DOTS_NAME, UNIT_LETTERS = 9.5, 17  # points of a panel's name, letters of a line of its unit


def save_dots(path: Path, sheet: DotSheet, style: Style) -> Path:
    """Write a panel per probe. Raises UsageError for a folder that cannot be written."""
    texts = [style.title, *sheet.texts, *sheet.heads]
    return save_drawn(path, style, texts, lambda room: dots_figure(sheet, style, room), DOTS_PX)


def dots_figure(sheet: DotSheet, style: Style, room: float) -> Figure:
    """The picture; to be called within `writer.drawing`."""
    [blue] = line_colours(1)
    probes, heads, rows, (title, note, foot) = sheet.probes, sheet.heads, sheet.rows, sheet.texts
    others = np.setdiff1d(np.arange(len(heads)), rows)
    names = [heads[head] for head in rows] + [f"{len(others)} others"] * bool(len(others))
    line_px = layout.line_px(layout.sized(MARK_SIZE, style))
    row_px = max(ROW_PX, line_px)
    # As many panels side by side as there is room for, and all rows of panels nearly full.
    before = line_px * 0.6 * max(map(len, names)) + 12
    mark_size, name_size = (layout.sized(size, style) for size in (MARK_SIZE, DOTS_NAME))
    units = [textwrap.wrap(probe.unit, UNIT_LETTERS) for probe in probes]
    needed = max(
        *(layout.letters_wide(line, mark_size) for lines in units for line in lines),
        *(layout.letters_wide(probe.name, name_size) for probe in probes),
    )
    most = max(1, int((room - before) // (max(DOTS_WIDE * (room == DOTS_PX), needed) + DOTS_GAP)))
    columns = math.ceil(len(probes) / math.ceil(len(probes) / most))
    wide = min(max(DOTS_WIDE, needed), (room - before) / columns - DOTS_GAP)
    # Above a panel are its name and, in one line or two, its unit.
    lines_above = max(map(len, units))
    above = line_px * (1.25 * lines_above - 0.25) + 8
    figure = layout.new_figure()
    pairs = [layout.new_panel(figure) for _ in probes]
    # One scale for all, which has 0 and 1 as the ends of most effects.
    known = np.concatenate([np.ravel([probe.effect_N, probe.low_N, probe.high_N]) for probe in probes])
    low, high = min(0.0, np.nanmin(known, initial=0.0)), max(1.0, np.nanmax(known, initial=1.0))
    for index, ((ax, bar_ax), probe) in enumerate(zip(pairs, probes, strict=True)):
        bar_ax.set_axis_off()
        ax.axvline(0, color=DARK_INK, linewidth=px(1), zorder=1)
        ax.axvline(sheet.mark, color=layout.NOTE_COLOUR, linewidth=px(1), linestyle="--", zorder=1)
        # Pale dots of the heads without a row first, then every row's interval and its dot.
        if len(others):
            ax.plot(probe.effect_N[others], np.full(len(others), len(rows)), "o", color=GREY, markersize=3, alpha=0.6)
        places = np.arange(len(rows))
        effect_N, low_N, high_N, named_N = (
            values[list(rows)] for values in (probe.effect_N, probe.low_N, probe.high_N, probe.named_N)
        )
        colours = [blue if named else DOT_GREY for named in named_N]
        ends = drawn_ends(effect_N, low_N, high_N)
        ax.hlines(places, *ends, colors=colours, linewidth=1.4, zorder=2)
        ax.scatter(effect_N, places, s=14, c=colours, linewidths=0, zorder=3)
        ax.set(xlim=(low - 0.04, high + 0.04), ylim=(len(names) - 0.5, -0.5))
        ax.set_yticks(range(len(names)), names if index % columns == 0 else [""] * len(names), fontsize=MARK_SIZE)
        ax.tick_params(axis="y", length=0)
        ax.set_xticks([0, 0.5, 1], ["0", "0.5", "1"], fontsize=MARK_SIZE)
        layout.rule(ax, "y", pale=True)
        ax.spines["left"].set_visible(False)
        unit = "\n".join(units[index] + [""] * (lines_above - len(units[index])))
        words = (probe.name, DOTS_NAME, round(above), DARK_INK), (unit, MARK_SIZE, 5, layout.NOTE_COLOUR)
        layout.say_above(ax, words)
    layout.in_print(figure, style)
    edge = 2 if style.in_print else 18
    size, top, below = (wide, row_px * len(names)), above + 1.4 * layout.line_px(name_size), 2 * line_px + 8
    plan = layout.PanelPlan(
        left=edge + before,
        top=top,
        size=size,
        right=DOTS_GAP,
        below=below,
        edge=edge,
        columns=columns,
        pitch=(wide + DOTS_GAP, top + size[1] + below),
    )
    around = layout.Words(figure, (style.headed(title), note, [foot, style.about.line]), TITLE_SIZE, style)
    layout.frame(figure, pairs, plan, around, edge)
    return figure


BANDS = ((100, "all heads", "#d9e8f3"), (50, "the middle half of the heads", "#a6cbe6"))


def save_depth(path: Path, depths: Sequence[Depth], style: Style, note: str = "") -> Path:
    """Write a panel for each metric. Raises UsageError for a folder that cannot be written.

    save_depth(Path("depth.png"), [Depth("sink", "share of the weight", layer_N, sink_N, null_N)], Style())
    """
    return save_drawn(path, style, [style.title, note], lambda room: depth_figure(depths, style, note, room), 1300)


def depth_figure(depths: Sequence[Depth], style: Style, note: str, room: float) -> Figure:
    """A line for the mean of the heads, and bands for their spread; to be called within `writer.drawing`."""
    blue, orange = line_colours()
    panels = Panels(len(depths), style, room, (360, 210), before=46, after=24)
    for (ax, _), depth in zip(panels.pairs, depths, strict=True):
        # The bands first, so that they cover no line.
        heads = {"x": depth.layer_N, "y": depth.value_N, "ax": ax}
        for share, _, colour in BANDS:
            solid = {"alpha": 1.0, "linewidth": 0}
            sns.lineplot(**heads, errorbar=("pi", share), color=colour, linewidth=0, err_kws=solid)
        if np.isfinite(depth.null_N).any():
            dashes = {"color": orange, "linestyle": "--", "linewidth": 1.2}
            sns.lineplot(x=depth.layer_N, y=depth.null_N, ax=ax, errorbar=None, **dashes)
        points = {"color": blue, "marker": "o", "markeredgecolor": blue}
        sns.lineplot(**heads, errorbar=None, **points)
        if depth.interval:
            layers, low, high = depth.interval
            mean = np.array([np.nanmean(depth.value_N[depth.layer_N == layer]) for layer in layers])
            ax.vlines(layers, *drawn_ends(mean, low, high), color=DARK_INK, linewidth=2.2, zorder=3)
        # The scale has the metric's zero, so that a small difference between layers looks small.
        first, last = (int(depth.layer_N.min()), int(depth.layer_N.max())) if len(depth.layer_N) else (0, 0)
        ax.set_xticks(range(first, last + 1, panels.label_step(last - first)))
        ax.set_xlim(first - 0.3, last + 0.3)
        ax.set_ylim(min(float(np.nanmin(depth.value_N)), 0.0), ax.get_ylim()[1])
        ax.tick_params(labelsize=MARK_SIZE)
        ax.set_xlabel("layer", fontsize=MARK_SIZE + 1, labelpad=2)
        ax.set_ylabel("")
        panels.finish(ax, depth.name, depth.unit)
    # The legend says only what some panel has.
    several = any(len(depth.layer_N) > len(np.unique(depth.layer_N)) for depth in depths)
    bands = [(name, colour) for _, name, colour in reversed(BANDS)] if several else []
    legend = [("mean of the heads", blue), *bands]
    intervals = any(depth.interval for depth in depths)
    uniform = any(np.isfinite(depth.null_N).any() for depth in depths)
    legend += [("95 % interval of the mean over the texts", DARK_INK)] * intervals
    legend += [("uniform attention", orange)] * uniform
    over = number_of(len(np.unique(np.concatenate([depth.layer_N for depth in depths]))), "layer")
    title = f"{', '.join(depth.name for depth in depths)} over {over}"
    return panels.titled(title, note, 48, legend)


@dataclass(frozen=True)
class ColouredTokens:
    """A text by its tokens, and each one's effect, NaN for none, (T,); queries: the places that are framed."""

    plain: Sequence[str]
    effect_T: np.ndarray
    unit: str
    queries: Sequence[int] = ()


def save_tokens(path: Path, tokens: ColouredTokens, style: Style, title: str) -> Path:
    """Write the text in the colours of its effects. Raises UsageError for a folder that cannot be written.

    save_tokens(Path("knockout.png"), ColouredTokens(["the", " bank"], effect_T, "nats"), Style(), "Each key's worth")
    """
    return save_drawn(path, style, [title, *tokens.plain], lambda room: tokens_figure(tokens, style, title))


def tokens_figure(tokens: ColouredTokens, style: Style, title: str) -> Figure:
    """The text, line by line; to be called within `writer.drawing`."""
    margin, blank, line_px = 26.0, 5, 30
    wide = int(min(2 * WIDE_PX, (style.inches or np.inf) * DPI))
    figure = layout.new_figure()
    figure.set_size_inches(wide / DPI, 1)
    # Tokens flow into lines by their measured widths; how wide and high the figure is shows only then.
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    size = style.points[1] if style.points else 11.5
    places, x, line, widest = [], margin, 0, 0.0
    for plain in tokens.plain:
        token = plain.replace("\n", "↵").replace("\t", " ")
        text = figure.text(0, 0, shown_text(token.strip()) or "·", fontsize=size, va="top")
        width = text.get_window_extent(renderer).width * DPI / figure.dpi
        if x + width > wide - margin and x > margin:
            x, line = margin, line + 1
        x += blank * token.startswith(" ")
        places.append((text, x, line))
        x += width + 2 * blank
        widest = max(widest, x)
        if plain.endswith("\n"):
            x, line = margin, line + 1
    wide = min(wide, max(WIDE_PX + 100, int(widest) + int(margin)))
    above, below = 20 + 50 * style.titled, 16 + 40 * style.captioned
    high = above + line_px * (line + 1) + below
    figure.set_size_inches(wide / DPI, high / DPI)
    # The colours have one scale, whose end is the largest effect to either side.
    most = max(float(np.nanmax(np.abs(tokens.effect_T))), 1e-9)
    for place, ((text, left, row), effect) in enumerate(zip(places, tokens.effect_T, strict=True)):
        text.set_position(((left + blank / 2) / wide, 1 - (above + line_px * row) / high))
        edge = DARK_INK if place in tokens.queries else "none"
        text.set_bbox({"facecolor": colour_of(effect / most), "edgecolor": edge, "pad": 2.0, "linewidth": 1.0})
    scale = f"orange: up to {most:.2f} {tokens.unit} lost without the key; blue: gained; framed: query"
    layout.entitle(figure, style, (title, style.about.line, scale), TITLE_SIZE, (margin, 14, 10))
    return figure


def colour_of(share: float) -> str | tuple[float, ...]:
    """White for 0, orange for what helps, blue for what harms, no colour for what was not cut; share: -1 to 1."""
    if np.isnan(share):
        return "none"
    end = RAMP[-1] / 255 if share > 0 else np.array([70, 130, 200]) / 255
    return tuple(map(float, 1 - abs(share) * (1 - end)))
