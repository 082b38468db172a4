"""What becomes of heads over checkpoints: a panel per probe, a line per head. R revision, N head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnscope.figures import layout
from attnscope.figures.colours import DARK_INK
from attnscope.figures.fonts import fonts_for, shown_label
from attnscope.figures.style import MARKERS, Style
from attnscope.figures.writer import drawing, px, save_figure

EDGE, NAME_ROOM, TITLE_ROOM, LABEL_ROOM, MARK_ROOM = 18, 40, 50, 56, 26
PANEL_PX, ACROSS_PX = (300, 180), 1240
HEADING_SIZE, TITLE_SIZE, MARK_SIZE = 14.0, 11.0, 8.0
MOST_COLUMNS, MOST_LABELS = 3, 10
GREY, LINE, NAMED_LINE = "#c9c9c9", 0.8, 2.2
# After Okabe and Ito; the yellow is too light for a line.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a0177", "#000000")


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
        head: (COLOURS[place % len(COLOURS)], MARKERS[(place + place // len(COLOURS)) % len(MARKERS)])
        for place, head in enumerate(every)
    }
    columns = max(1, min(MOST_COLUMNS, len(courses), int(room // (PANEL_PX[0] + NAME_ROOM + LABEL_ROOM))))
    wide, high = min(PANEL_PX[0], room - NAME_ROOM - LABEL_ROOM), PANEL_PX[1]
    figure = layout.new_figure()
    panels = [layout.new_panel(figure) for _ in courses]
    for (ax, beside_ax), course in zip(panels, courses, strict=True):
        beside_ax.set_axis_off()
        _draw(ax, course, looks)
        name, unit = (course.name, TITLE_SIZE, 22, DARK_INK), (course.unit, MARK_SIZE, 7, layout.NOTE_COLOUR)
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


def _draw(ax: Axes, course: Course, looks: dict[int, tuple[str, str]]) -> None:
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
    step = layout.label_step(wide / max(1, len(revisions) - 1), layout.line_px(layout.sized(MARK_SIZE, style)) * 1.4)
    places = range(0, len(revisions), step)
    ax.set_xticks(list(places), [revisions[place] for place in places], fontsize=MARK_SIZE)
    ax.set_xlim(-0.15, len(revisions) - 1 + 0.15)
    layout.turn(ax.get_xticklabels(), step * wide / max(1, len(revisions) - 1))
    ax.tick_params(axis="y", labelsize=MARK_SIZE)
    ax.grid(axis="y", color="#ececec", linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _label(ax: Axes, course: Course, named: Sequence[tuple[int, str, str]], high: float) -> None:
    """Names at the lines' right ends, pushed apart; of many those that end highest."""
    ends = {head: value for head, *_ in named if np.isfinite(value := course.values_RN[-1, head])}
    shown = sorted((one for one in named if one[0] in ends), key=lambda one: -ends[one[0]])[:MOST_LABELS]
    low, top = ax.get_ylim()
    gap, below = layout.line_px(MARK_SIZE) / high * (top - low), float("inf")
    for head, name, colour in shown:
        below = min(ends[head], below - gap)
        place = ax.annotate(name, (1, below), (px(8), 0), xycoords=("axes fraction", "data"), va="center")
        place.set(fontsize=MARK_SIZE, color=colour)
        place.set_anncoords("offset points")
