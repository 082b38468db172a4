"""budgets_curve.png and budgets.png: what is lost over the share of keys that is kept, or layer by layer.

What becomes of heads over checkpoints: a panel per probe, a line per head. R revision, N head.

knockout.png: what is lost by window of layers, as a curve; or the text, each token in the colour of its effect.

prune.png: the loss as heads go one after the other.

What sets of heads cost: a bar each, with its interval and where random sets of the same size lie.

Shapes: N point, N cut, T token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

from attnscope.figures import layout
from attnscope.figures.colours import DARK_INK, ROUND
from attnscope.figures.fonts import fonts_for, isolated, shown_label, shown_text
from attnscope.figures.layout import drawn_ends
from attnscope.figures.style import DPI, MARKERS, Style
from attnscope.figures.terminal import RAMP
from attnscope.figures.writer import drawing, px, save_figure
from attnscope.utils.display import printed

WIDE_PX, HIGH_PX = 600, 320
LEGEND_PX, TITLE_PX, NAMES_PX = 17, 34, 56  # a line above, the title, below the axes
COLUMNS = 3  # of the legend
NAME_SIZE, MARK_SIZE, TITLE_SIZE = 10.5, 8.0, 13.0
COLOURS = sns.color_palette("colorblind").as_hex()


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
    with drawing(fonts_for([title, style.about.line])):
        return save_figure(budget_lines_figure(lines, style, title, unit=unit, layers=layers), path, style)


def budget_lines_figure(
    lines: Sequence[BudgetLine], style: Style, title: str, *, unit: str, layers: bool = False
) -> Figure:
    """The lines; to be called within `writer.drawing`."""
    wide = min(WIDE_PX, (style.inches or np.inf) * DPI)
    above = LEGEND_PX * (1 + (len(lines) - 1) // COLUMNS) + TITLE_PX * style.titled + 10
    below = NAMES_PX + TITLE_PX * style.captioned
    high = HIGH_PX + above + below
    figure = layout.new_figure()
    figure.set_size_inches(wide / DPI, high / DPI)
    ax = figure.subplots()
    for place, (line, colour) in enumerate(zip(lines, COLOURS * len(lines), strict=False)):
        _draw(ax, line, colour, -9 if place % 2 else 4)
    ax.axhline(0, color=DARK_INK, linewidth=0.8)
    ax.set_ylabel(f"{unit} lost", fontsize=NAME_SIZE)
    ax.set_xlabel("layer" if layers else "share of the keys that is kept", fontsize=NAME_SIZE)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True)) if layers else ax.xaxis.set_major_formatter(
        PercentFormatter(1)
    )
    ax.tick_params(labelsize=MARK_SIZE)
    ax.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    ax.legend(
        fontsize=MARK_SIZE, frameon=False, ncols=COLUMNS, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2
    )
    sns.despine(ax=ax)
    if style.titled:
        figure.text(0.02, 1 - 12 / high, title, fontsize=TITLE_SIZE, va="top")
    if style.captioned:
        figure.text(0.02, 8 / high, style.about.line, fontsize=layout.NOTE_SIZE, color=layout.NOTE_COLOUR)
    layout.in_print(figure, style)
    figure.subplots_adjust(left=70 / wide, right=1 - 40 / wide, top=1 - above / high, bottom=below / high)
    return figure


def _draw(ax: Axes, line: BudgetLine, colour: str, above: int) -> None:
    """The points in the order of x, their intervals, and what each is called; above: by how many points of print."""
    order = np.argsort(line.x, kind="stable")
    x_N, effect_N = line.x[order], line.effect[order]
    ax.plot(x_N, effect_N, "o-", color=colour, markersize=4, linewidth=1.5, label=line.name)
    if np.isfinite([line.low, line.high]).any():
        ax.vlines(x_N, *drawn_ends(effect_N, line.low[order], line.high[order]), color=colour, linewidth=1.2, alpha=0.6)
    for place, at in enumerate(order if line.labels else ()):
        ax.annotate(
            line.labels[at],
            (x_N[place], effect_N[place]),
            xytext=(3, above),
            textcoords="offset points",
            fontsize=MARK_SIZE - 1,
            color=colour,
        )


EDGE, NAME_ROOM, TITLE_ROOM, LABEL_ROOM, MARK_ROOM = 18, 40, 50, 56, 26
PANEL_PX, ACROSS_PX = (300, 180), 1240
HEADING_SIZE, CHECKPOINTS_TITLE_SIZE, CHECKPOINTS_MARK_SIZE = 14.0, 11.0, 8.0
MOST_COLUMNS, MOST_LABELS = 3, 10
GREY, LINE, NAMED_LINE = "#c9c9c9", 0.8, 2.2
# After Okabe and Ito; the yellow is too light for a line.
CHECKPOINTS_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a0177", "#000000")


@dataclass(frozen=True)
class Course:
    """One probe: values_RN of every head at every revision, NaN for none. named: the heads that have a colour."""

    name: str
    unit: str
    values_RN: np.ndarray
    named: Sequence[int]


def save_courses(
    path: Path, courses: Sequence[Course], style: Style, *, heads: Sequence[str], revisions: Sequence[str], note: str
) -> Path:
    """Write a panel per probe; a head that is named in any keeps its colour and marker in all, the others are grey."""
    title = style.headed(f"{len(heads)} heads over {len(revisions)} checkpoints")
    with drawing(fonts_for([style.title, style.about.line, *revisions])):
        shown = list(map(shown_label, revisions))
        figure = layout.fitted(
            lambda room: courses_figure(courses, style, (heads, shown), (title, note), room),
            ACROSS_PX,
            style,
            lambda built: built,
        )
        return save_figure(figure, path, style)


def courses_figure(
    courses: Sequence[Course],
    style: Style,
    names: tuple[Sequence[str], Sequence[str]],
    said: tuple[str, str],
    room: float,
) -> Figure:
    """The picture; to be called within `writer.drawing`. names: heads and revisions. said: title and note."""
    heads, revisions = names
    every = dict.fromkeys(head for course in courses for head in course.named)
    looks = {
        head: (
            CHECKPOINTS_COLOURS[place % len(CHECKPOINTS_COLOURS)],
            MARKERS[(place + place // len(CHECKPOINTS_COLOURS)) % len(MARKERS)],
        )
        for place, head in enumerate(every)
    }
    columns = max(1, min(MOST_COLUMNS, len(courses), int(room // (PANEL_PX[0] + NAME_ROOM + LABEL_ROOM))))
    wide, high = min(PANEL_PX[0], room - NAME_ROOM - LABEL_ROOM), PANEL_PX[1]
    figure = layout.new_figure()
    panels = [layout.new_panel(figure) for _ in courses]
    for (ax, beside_ax), course in zip(panels, courses, strict=True):
        beside_ax.set_axis_off()
        _checkpoints_draw(ax, course, looks)
        name, unit = (
            (course.name, CHECKPOINTS_TITLE_SIZE, 22, DARK_INK),
            (course.unit, CHECKPOINTS_MARK_SIZE, 7, layout.NOTE_COLOUR),
        )
        layout.say_above(ax, (name, unit))
        _ticks(ax, revisions, wide, style)
        _label(ax, course, [(head, heads[head], looks[head][0]) for head in course.named], high)
    layout.in_print(figure, style)
    below = layout.extent(panels[0][0].get_xticklabels())[1] + MARK_ROOM
    frame = layout.Frame(
        left=EDGE + NAME_ROOM,
        top=TITLE_ROOM,
        size=(wide, high),
        bar=(0, 1, 1),
        right=LABEL_ROOM,
        below=below,
        edge=EDGE,
        columns=columns,
        pitch=(NAME_ROOM + wide + LABEL_ROOM, TITLE_ROOM + high + below),
    )
    texts = (style.headed(said[0]), said[1], [style.about.line])
    words = layout.Words(figure, texts, HEADING_SIZE, style)
    layout.frame(figure, panels, frame, words, EDGE)
    return figure


def _checkpoints_draw(ax: Axes, course: Course, looks: dict[int, tuple[str, str]]) -> None:
    """Grey first, so that no head that is named lies behind. looks: colour and marker of each that is."""
    for head in sorted(range(course.values_RN.shape[1]), key=lambda head: head in course.named):
        named = head in course.named
        colour, marker = looks[head] if named else (GREY, "o")
        [line] = ax.plot(course.values_RN[:, head], marker=marker, clip_on=False, color=colour)
        line.set(linewidth=NAMED_LINE if named else LINE, markersize=4.5 if named else 1.5)
    low = float(np.nanmin(course.values_RN)) if np.isfinite(course.values_RN).any() else 0.0
    ax.set_ylim(min(-0.02, low), 1.02)


def _ticks(ax: Axes, revisions: Sequence[str], wide: float, style: Style) -> None:
    """Every revision is named where there is room, slanted where names are long."""
    step = layout.label_step(
        wide / max(1, len(revisions) - 1), layout.line_px(layout.sized(CHECKPOINTS_MARK_SIZE, style)) * 1.4
    )
    places = range(0, len(revisions), step)
    ax.set_xticks(list(places), [revisions[place] for place in places], fontsize=CHECKPOINTS_MARK_SIZE)
    ax.set_xlim(-0.15, len(revisions) - 1 + 0.15)
    layout.turn(ax.get_xticklabels(), step * wide / max(1, len(revisions) - 1))
    ax.tick_params(axis="y", labelsize=CHECKPOINTS_MARK_SIZE)
    ax.grid(axis="y", color="#ececec", linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _label(ax: Axes, course: Course, named: Sequence[tuple[int, str, str]], high: float) -> None:
    """Names at the lines' right ends, pushed apart; of many those that end highest."""
    ends = {head: value for head, *_ in named if np.isfinite(value := course.values_RN[-1, head])}
    shown = sorted((one for one in named if one[0] in ends), key=lambda one: -ends[one[0]])[:MOST_LABELS]
    low, top = ax.get_ylim()
    gap, below = layout.line_px(CHECKPOINTS_MARK_SIZE) / high * (top - low), float("inf")
    for head, name, colour in shown:
        below = min(ends[head], below - gap)
        place = ax.annotate(name, (1, below), (px(8), 0), xycoords=("axes fraction", "data"), va="center")
        place.set(fontsize=CHECKPOINTS_MARK_SIZE, color=colour)
        place.set_anncoords("offset points")


CUTS_WIDE_PX, CUTS_HIGH_PX, STEP_PX = 560, 300, 22
CUTS_LEGEND_PX, CUTS_TITLE_PX, CUTS_NAMES_PX = 17, 34, 78  # above and below the curve
CUTS_NAME_SIZE, CUTS_MARK_SIZE, CUTS_TITLE_SIZE, TOKEN_SIZE = 10.5, 8.0, 13.0, 11.5
LINE_PX, MARGIN_PX, BLANK_PX = 30, 26, 5
MOST_NAMED = 50  # cuts whose names stand below the curve
BLUE, ORANGE, *_ = sns.color_palette("colorblind").as_hex()


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


def save_curve(path: Path, curve: Curve, style: Style, title: str, note: str = "") -> Path:
    """Write the curve. Raises UsageError for a folder that cannot be written.

    save_curve(Path("knockout.png"), Curve(["L0"], one, none, none, "nats"), Style(), "What is lost without the look")
    """
    with drawing(fonts_for([title, note, style.about.line])):
        return save_figure(curve_figure(curve, style, title, note), path, style)


def curve_figure(curve: Curve, style: Style, title: str, note: str) -> Figure:
    """The curve; to be called within `writer.drawing`."""
    count = len(curve.names)
    wide = min(max(CUTS_WIDE_PX, STEP_PX * min(count, MOST_NAMED) + 110), (style.inches or np.inf) * DPI)
    figure = layout.new_figure()
    shown = 2 + sum(bool(np.isfinite(one).any()) for one in ([curve.low, curve.high], *(curve.others or ())[:1]))
    above, below = (
        CUTS_LEGEND_PX * shown + CUTS_TITLE_PX * style.titled,
        CUTS_NAMES_PX + CUTS_TITLE_PX * style.captioned,
    )
    high = CUTS_HIGH_PX + above + below
    figure.set_size_inches(wide / DPI, high / DPI)
    ax, place_N = figure.subplots(), np.arange(count)
    if curve.others is not None and np.isfinite(curve.others[0]).any():
        least_N, mean_N, most_N = curve.others
        ax.plot(place_N, mean_N, color=ORANGE, linewidth=1.2, label="same weights on other keys: mean, 95 %")
        ax.fill_between(place_N, least_N, most_N, color=ORANGE, alpha=0.18, linewidth=0)
    low_N, high_N = drawn_ends(curve.effect, curve.low, curve.high)
    if np.isfinite(low_N).any():
        ax.fill_between(place_N, low_N, high_N, color=BLUE, alpha=0.2, linewidth=0, label="95 % interval, of all cuts")
    ax.plot(place_N, curve.effect, "o-", color=BLUE, markersize=4, linewidth=1.5, label="these keys")
    ax.axhline(0, color=DARK_INK, linewidth=0.8)
    _axes(ax, curve)
    if style.titled:
        figure.text(0.02, 1 - 12 / high, title, fontsize=CUTS_TITLE_SIZE, va="top")
    for line, text in enumerate((style.about.line, note) if style.captioned else ()):
        figure.text(0.02, (8 + 17 * line) / high, text, fontsize=layout.NOTE_SIZE, color=layout.NOTE_COLOUR)
    layout.in_print(figure, style)
    figure.subplots_adjust(left=70 / wide, right=1 - 20 / wide, top=1 - above / high, bottom=below / high)
    return figure


def _axes(ax: Axes, curve: Curve) -> None:
    """The cuts below by name, as many as have room."""
    step = 1 + (len(curve.names) - 1) // MOST_NAMED
    ax.set_xticks(range(0, len(curve.names), step), curve.names[::step], fontsize=CUTS_MARK_SIZE, rotation=90)
    ax.set_xlabel("layers that are cut", fontsize=CUTS_NAME_SIZE)
    ax.set_ylabel(f"{curve.unit} lost", fontsize=CUTS_NAME_SIZE)
    ax.tick_params(axis="y", labelsize=CUTS_MARK_SIZE)
    ax.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    ax.legend(fontsize=CUTS_MARK_SIZE, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    sns.despine(ax=ax)


@dataclass(frozen=True)
class ColouredTokens:
    """A text by its tokens, and each one's effect, NaN for none, (T,); queries: the places that are framed."""

    plain: Sequence[str]
    effect_T: np.ndarray
    unit: str
    queries: Sequence[int] = ()


def save_tokens(path: Path, tokens: ColouredTokens, style: Style, title: str, note: str = "") -> Path:
    """Write the text in the colours of its effects. Raises UsageError for a folder that cannot be written.

    save_tokens(Path("knockout.png"), ColouredTokens(["the", " bank"], effect_T, "nats"), Style(), "Each key's worth")
    """
    with drawing(fonts_for([title, note, style.about.line, "".join(tokens.plain)])):
        return save_figure(tokens_figure(tokens, style, title, note), path, style)


def tokens_figure(tokens: ColouredTokens, style: Style, title: str, note: str) -> Figure:
    """The text, line by line; to be called within `writer.drawing`."""
    wide = int(min(2 * CUTS_WIDE_PX, (style.inches or np.inf) * DPI))
    figure = layout.new_figure()
    figure.set_size_inches(wide / DPI, 1)
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    most = max(float(np.nanmax(np.abs(tokens.effect_T))), 1e-9)
    size = style.points[1] if style.points else TOKEN_SIZE
    placed, x, line, widest = [], float(MARGIN_PX), 0, 0.0
    for place, plain in enumerate(tokens.plain):
        said = plain.replace("\n", "↵").replace("\t", " ")
        text = figure.text(0, 0, shown_text(said.strip()) or "·", fontsize=size)
        width = text.get_window_extent(renderer).width * DPI / figure.dpi
        if x + width > wide - MARGIN_PX and x > MARGIN_PX:
            x, line = float(MARGIN_PX), line + 1
        x += BLANK_PX * said.startswith(" ")
        placed.append((text, x, line, tokens.effect_T[place], place in tokens.queries))
        x += width + 2 * BLANK_PX
        widest = max(widest, x)
        if plain.endswith("\n"):
            x, line = float(MARGIN_PX), line + 1
    wide = min(wide, max(CUTS_WIDE_PX + 100, int(widest) + MARGIN_PX))
    above, below = 20 + 50 * style.titled, 16 + 40 * style.captioned
    high = above + LINE_PX * (line + 1) + below
    figure.set_size_inches(wide / DPI, high / DPI)
    for text, left, row, effect, asked in placed:
        text.set_position(((left + BLANK_PX / 2) / wide, 1 - (above + LINE_PX * row) / high))
        edge = DARK_INK if asked else "none"
        text.set_bbox({"facecolor": colour_of(effect / most), "edgecolor": edge, "pad": 2.0, "linewidth": 1.0})
        text.set_verticalalignment("top")
    if style.titled:
        figure.text(MARGIN_PX / wide, 1 - 14 / high, title, fontsize=CUTS_TITLE_SIZE, va="top")
    scale = f"orange: up to {most:.2f} {tokens.unit} lost without the key; blue: gained; framed: query"
    lines = (style.about.line, note, scale) if style.captioned else ()
    for number, said in enumerate(filter(None, lines)):
        figure.text(
            MARGIN_PX / wide, (10 + 17 * number) / high, said, fontsize=layout.NOTE_SIZE, color=layout.NOTE_COLOUR
        )
    layout.in_print(figure, style)
    return figure


def colour_of(share: float) -> str | tuple[float, ...]:
    """White for 0, orange for what helps, blue for what harms, no colour for what was not cut; share: -1 to 1."""
    if np.isnan(share):
        return "none"
    end = RAMP[-1] / 255 if share > 0 else np.array([70, 130, 200]) / 255
    return tuple(float(one) for one in 1 - abs(share) * (1 - end))


PRUNING_WIDE_PX, PRUNING_HIGH_PX, PRUNING_STEP_PX = 560, 380, 24
PRUNING_NAME_SIZE, PRUNING_MARK_SIZE, PRUNING_TITLE_SIZE = 10.5, 8.0, 13.0
PRUNING_MOST_NAMED = 60  # heads whose names stand below the curve
ROOM = 1.6  # above and below the curve, as a factor: enough for one number beside the flattest
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
    with drawing(fonts_for([style.title, style.about.line])):
        return save_figure(pruning_figure(heads, losses, references, style), path, style)


def pruning_figure(
    heads: Sequence[str], losses: Sequence[float], references: Sequence[tuple[str, float]], style: Style
) -> Figure:
    """The curve; to be called within `writer.drawing`."""
    named = len(heads) <= PRUNING_MOST_NAMED
    wanted = max(PRUNING_WIDE_PX, PRUNING_STEP_PX * (len(heads) + 1) + 110) if named else 2 * PRUNING_WIDE_PX
    wide = min(wanted, (style.inches or np.inf) * DPI)
    figure = layout.new_figure()
    figure.set_size_inches(wide / DPI, (PRUNING_HIGH_PX + 110) / DPI)
    ax = figure.subplots()
    blue, orange, *_ = sns.color_palette("colorblind")
    points = {"color": blue, "marker": "o", "markersize": 4, "markeredgecolor": blue, "linewidth": 1.4}
    sns.lineplot(x=range(len(losses)), y=np.maximum(losses, LEAST), ax=ax, errorbar=None, **points)
    for name, height in (("intact", max(losses[0], LEAST)), *references):
        ax.axhline(height, linestyle="--", color=DARK_INK if name == "intact" else orange, linewidth=1)
        ax.annotate(name, (0, height), (2, 3), textcoords="offset points", fontsize=PRUNING_MARK_SIZE, color=DARK_INK)
    _pruning_axes(ax, ["intact", *heads] if named else [], len(losses))
    title = style.headed("Loss as heads go, the least missed first") if style.titled else ""
    figure.text(
        0.02, 0.98, layout.wrapped(title, wide * 0.96, PRUNING_TITLE_SIZE), fontsize=PRUNING_TITLE_SIZE, va="top"
    )
    foot = layout.wrapped(style.about.line, wide * 0.96, layout.NOTE_SIZE) if style.captioned else ""
    figure.text(0.02, 0.015, foot, fontsize=layout.NOTE_SIZE, color=layout.NOTE_COLOUR)
    layout.in_print(figure, style)
    figure.subplots_adjust(left=70 / wide, right=1 - 20 / wide, top=0.9 if title else 0.97, bottom=0.21)
    return figure


def _pruning_axes(ax: Axes, names: Sequence[str], count: int) -> None:
    """The heads below, where they are named, else how many are gone; a log scale with plain numbers."""
    if names:
        ax.set_xticks(range(count), names, fontsize=PRUNING_MARK_SIZE, rotation=90)
    ax.set_xlabel("head that goes" if names else "heads gone", fontsize=PRUNING_NAME_SIZE)
    ax.set_ylabel("nats per token", fontsize=PRUNING_NAME_SIZE)
    ax.set_yscale("log")
    low, high = (end * by for end, by in zip(ax.dataLim.intervaly, (1 / ROOM, ROOM), strict=True))
    ax.set_ylim(low, high)
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))))
    ticks = [digit * 10.0**power for power in powers for digit in ROUND[:-1]]
    ax.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.tick_params(axis="y", labelsize=PRUNING_MARK_SIZE)
    ax.grid(color="#e6e6e6", linewidth=0.6)
    sns.despine(ax=ax)


SETS_EDGE, SETS_WIDE_PX, LEAST_PX, ROW_PX, SETS_MARK_ROOM, VALUE_ROOM, GAP = 18, 560, 60, 26, 48, 64, 8
SETS_HEADING_SIZE, SETS_NAME_SIZE, SETS_MARK_SIZE = 13.0, 10.0, 9.0
BAR, BAND = "#0072b2", "#808080"  # as roles are coloured: kept apart by colour-blind readers
HIGH, BAND_HIGH = 0.5, 0.86  # of a row
HERE = math.nan, math.nan


@dataclass(frozen=True)
class SetCost:
    """One set: its name, what is lost without it, the ends of its interval, and of where random sets lie; or NaN.

    An interval with one open end, NaN, is drawn from the value to its other end.
    """

    name: str
    value: float
    interval: tuple[float, float] = HERE
    random: tuple[float, float] = HERE


def save_sets(path: Path, costs: Sequence[SetCost], style: Style, *, title: str, note: str, unit: str) -> Path:
    """Write a bar for each set, in this order from above. Raises UsageError for a folder that cannot be written.

    save_sets(Path("sets.png"), [SetCost("induction", 2.5, (2.2, 2.8))], Style(), title="", note="", unit="nats")
    """
    with drawing(fonts_for([style.title, style.about.line, note, *(one.name for one in costs)])):
        figure = layout.fitted(
            lambda room: sets_figure(costs, style, (title, note, unit), room), SETS_WIDE_PX, style, lambda built: built
        )
        return save_figure(figure, path, style)


def sets_figure(
    costs: Sequence[SetCost], style: Style, said: tuple[str, str, str], room: float = SETS_WIDE_PX
) -> Figure:
    """The picture; to be called within `writer.drawing`. said: title, note, and what the numbers are in."""
    title, note, unit = said
    figure = layout.new_figure()
    ax, beside_ax = layout.new_panel(figure)
    beside_ax.set_axis_off()
    for row, one in enumerate(costs):
        _sets_draw(ax, row, one)
    _sets_axes(ax, costs, unit)
    legend = [("random sets: 99 % of them", BAND)] if any(_known(one.random) for one in costs) else []
    words = layout.Words(figure, (style.headed(title), note, [style.about.line]), SETS_HEADING_SIZE, style, legend)
    layout.in_print(figure, style)
    edge = 2 if style.in_print else SETS_EDGE
    left = edge + layout.extent(ax.get_yticklabels())[0] + GAP
    plan = layout.Frame(
        left=left,
        top=GAP,
        size=(max(LEAST_PX, room - (left if style.inches else 0)), ROW_PX * len(costs)),
        bar=(0, 1, 1),
        right=VALUE_ROOM,
        below=SETS_MARK_ROOM,
        edge=edge,
    )
    layout.frame(figure, [(ax, beside_ax)], plan, words, edge)
    return figure


def _known(ends: tuple[float, float]) -> bool:
    return all(map(math.isfinite, ends))


def _sets_draw(ax: Axes, row: int, one: SetCost) -> None:
    """The band behind, then the bar, then the interval; the number stands beyond whatever reaches farthest."""
    if _known(one.random):
        low, high = one.random
        ax.add_patch(
            Rectangle(
                (low, row - BAND_HIGH / 2), high - low, BAND_HIGH, facecolor=BAND, edgecolor=BAND, linewidth=px(2)
            )
        )
    ax.barh(row, one.value, HIGH, color=BAR, zorder=2)
    low, high = map(float, drawn_ends(np.array(one.value), *map(np.array, one.interval)))
    if math.isfinite(low):
        ax.hlines(row, low, high, color=DARK_INK, linewidth=1.6, zorder=3)
        ax.vlines(one.interval, row - HIGH / 4, row + HIGH / 4, color=DARK_INK, linewidth=1.2, zorder=3)
    ends = [0.0, one.value, *(end for pair in (one.interval, one.random) for end in pair if math.isfinite(end))]
    text = ax.annotate(printed(one.value), (max(ends), row), (px(6), 0), textcoords="offset points", va="center")
    text.set(fontsize=SETS_MARK_SIZE, color=DARK_INK, annotation_clip=False)


def _sets_axes(ax: Axes, costs: Sequence[SetCost], unit: str) -> None:
    ax.set_yticks(range(len(costs)), [isolated(shown_text(one.name)) for one in costs], fontsize=SETS_NAME_SIZE)
    ax.set_ylim(len(costs) - 0.5, -0.5)
    ax.axvline(0, color="#b0b0b0", linewidth=px(1), zorder=0.5)
    ax.set_xlabel(unit, fontsize=SETS_NAME_SIZE)
    ax.tick_params(axis="x", labelsize=SETS_MARK_SIZE)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", color="#ececec", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
