"""What dividing by sqrt(d_k) does: four panels of one head, and std(q . k) against d_k.

Q query, K key, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import NullLocator

from attnscope.figures import layout
from attnscope.figures.colours import Limits, cmap_of, find_limits, label_colourbar
from attnscope.figures.fonts import shown_label
from attnscope.figures.heads import Cells
from attnscope.figures.style import DPI, MARKERS, Axis, Quantity, Style, ordinal
from attnscope.utils.display import printed

EDGE, GAP, BAR_PX, TITLE_ROOM = 18, 10, 12, 52
PANEL_PX, LARGEST_CELL, LEAST_PITCH = 480, 110, 190
TITLE_SIZE, NAME_SIZE = 13.0, 10.5
CURVES_WIDE, CURVES_HIGH, CURVES_BESIDE, CURVES_LEFT = 11.0, 5.4, 6.0, 0.6  # inches
STYLE = Style(scale="linear")
SCALES: dict[Quantity, str] = {"logit": "score", "weight": "attention weight"}


@dataclass(frozen=True)
class ScalingEffect:
    """Scores before and after scaling, and the softmax of each (Q x K); NaN where the query may not look.

    std: of all visible scores. entropy: nats, mean over the queries that see at least 2 keys (NaN if none does);
    uniform_entropy: that of uniform attention.
    """

    raw_QK: np.ndarray
    scaled_QK: np.ndarray
    raw_weights_QK: np.ndarray
    scaled_weights_QK: np.ndarray
    raw_std: float
    scaled_std: float
    raw_entropy: float
    scaled_entropy: float
    uniform_entropy: float


def scaling_effect(raw_QK: np.ndarray, visible_QK: np.ndarray, scale: float) -> ScalingEffect:
    """q . k (Q x K) and which keys are visible (Q x K, bool) -> the four matrices of the figure and their numbers.

    Only scale, mask and softmax are applied: a soft-cap, a position bias or a sink logit is not.

        effect = scaling_effect(q @ k.T, np.tril(np.ones((9, 9), bool)), 32**-0.5)
        effect.raw_entropy, effect.scaled_entropy
    """
    raw_QK = np.where(visible_QK, raw_QK, np.nan)
    scaled_QK = raw_QK * scale
    before_QK, after_QK = _softmax(raw_QK), _softmax(scaled_QK)
    several_Q = visible_QK.sum(-1) >= 2
    uniform_Q = np.log(visible_QK.sum(-1)[several_Q])
    return ScalingEffect(
        raw_QK,
        scaled_QK,
        before_QK,
        after_QK,
        float(np.nanstd(raw_QK)),
        float(np.nanstd(scaled_QK)),
        _entropy(before_QK[several_Q]),
        _entropy(after_QK[several_Q]),
        float(uniform_Q.mean()) if uniform_Q.size else float("nan"),
    )


def _softmax(logits_QK: np.ndarray) -> np.ndarray:
    seen_QK = np.isfinite(logits_QK)
    filled_QK = np.where(seen_QK, logits_QK, -np.inf)
    largest_Q1 = np.where(seen_QK.any(-1), filled_QK.max(-1), 0.0)[:, None]
    exp_QK = np.exp(filled_QK - largest_Q1)
    total_Q1 = exp_QK.sum(-1, keepdims=True)
    return np.where(seen_QK, exp_QK / np.where(total_Q1 > 0, total_Q1, 1.0), np.nan)


def _entropy(weights_QK: np.ndarray) -> float:
    """Mean over the queries of -sum A ln A, nats; NaN without a query."""
    if not len(weights_QK):
        return float("nan")
    positive = np.where(np.nan_to_num(weights_QK) > 0, weights_QK, 1.0)
    return float(-(positive * np.log(positive)).sum(-1).mean())


@dataclass(frozen=True)
class EffectSheet:
    """The four panels: the effect, a label per token, whose scores they are, and how the scaling is written ("/ √32").

    note: a line below the panels.
    """

    effect: ScalingEffect
    labels: Sequence[str]
    head: str
    divisor: str
    note: str = ""


def save_scaling_effect(path: Path, sheet: EffectSheet, style: Style = STYLE) -> Path:
    """Write the four panels; returns the path. Raises UsageError for a folder that cannot be written.

    save_scaling_effect(Path("L2H3.png"), EffectSheet(effect, labels, "L2H3 of demo", "/ √32"))
    """
    texts = [sheet.head, sheet.note, style.title, *map(shown_label, sheet.labels), "√·−"]
    return layout.save_drawn(path, style, texts, lambda room: effect_figure(sheet, style, room), 2 * PANEL_PX)


def effect_figure(sheet: EffectSheet, style: Style = STYLE, room: float = 2 * PANEL_PX) -> Figure:
    """The four panels; to be called within `writer.drawing`."""
    figure, effect, labels, note = layout.new_figure(), sheet.effect, sheet.labels, sheet.note
    cell = room / 2 / len(labels) if style.in_print else max(1, min(LARGEST_CELL, room // 2 // len(labels)))
    # Scores at the left, each on its own colour scale; weights at the right, both on one.
    scaled = f"q · k {sheet.divisor}"
    raw_limits, scaled_limits = (find_limits([scores], STYLE, "logit") for scores in (effect.raw_QK, effect.scaled_QK))
    shared = find_limits([effect.raw_weights_QK, effect.scaled_weights_QK], STYLE)
    panels: list[tuple[np.ndarray, Limits, Quantity, str, str]] = [
        (effect.raw_QK, raw_limits, "logit", "scores: q · k", f"std {effect.raw_std:.2f}"),
        (effect.raw_weights_QK, shared, "weight", "softmax of q · k", f"entropy {_nats(effect.raw_entropy)}"),
        (effect.scaled_QK, scaled_limits, "logit", f"scaled: {scaled}", f"std {effect.scaled_std:.2f}"),
        (effect.scaled_weights_QK, shared, "weight", f"softmax of {scaled}", f"entropy {_nats(effect.scaled_entropy)}"),
    ]
    axes = [figure.add_axes((0.1, 0.1, 0.3, 0.3)) for _ in panels]
    pairs = [(ax, figure.add_axes((0.9, 0.1, 0.02, 0.8))) for ax in axes]
    level = replace(style, scale="linear", floor=None)
    for (values_QK, limits, quantity, _, _), (ax, bar_ax) in zip(panels, pairs, strict=True):
        cells = Cells(ax, values_QK, limits, level, cmap_of(level, quantity), quantity)
        bar = figure.colorbar(cells.mesh, bar_ax)
        # Numbers are in the cells where there are few, smaller where they are long.
        cells.show(values_QK, limits, decimals=1 if np.nanmax(np.abs(values_QK)) >= 10 else 2)
        cells.size_numbers(cell)
        for text in cells.numbers:
            text.set_fontsize(float(text.get_fontsize()) * min(1.0, 4.5 / max(1, len(text.get_text()))))
        label_colourbar(bar, limits, level, SCALES[quantity])
        bar_ax.tick_params(labelsize=layout.NOTE_SIZE)
        bar_ax.yaxis.label.set_fontsize(layout.NOTE_SIZE)
    # Queries are named at the left panels, keys below the lower ones.
    tokens = Axis("query", tuple(labels), tuple(range(len(labels))))
    for ax in axes[::2]:
        step = layout.put_tokens(ax, "y", tokens, cell, style)
        ax.set_ylabel("query", fontsize=NAME_SIZE)
    for ax in axes[2:]:
        layout.put_tokens(ax, "x", tokens, cell, style)
        layout.in_print(figure, style)
        layout.turn(ax.get_xticklabels(), cell * step)
        ax.set_xlabel("key", fontsize=NAME_SIZE)
    titles = [
        (figure.text(0, 0, name, fontsize=NAME_SIZE, weight="bold"), figure.text(0, 0, number, fontsize=NAME_SIZE))
        for *_, name, number in panels
    ]
    # What the numbers mean is below the panels: who sees the picture may not have what explains it.
    foot = [
        "Each panel of scores has its own colour scale; the weights share one. Grey: the query may not look there.",
        "std: how far the scores of all visible (query, key) pairs spread.",
        "entropy: mean over the queries that see 2 keys or more;",
        f"0 means all weight on one key, {_nats(effect.uniform_entropy)} is uniform over them.",
    ]
    foot += [f"Every {ordinal(step)} token is labelled."] * (step > 1) + [note] * bool(note)
    heading = style.headed(f"{sheet.head}: what scaling does to the softmax")
    _place(figure, pairs, titles, layout.Words(figure, (heading, "", foot), TITLE_SIZE, style), len(labels) * cell)
    return figure


def _nats(entropy: float) -> str:
    return printed(entropy) + " nats" * (not np.isnan(entropy))


def _place(
    figure: Figure,
    panels: Sequence[tuple[Axes, Axes]],
    titles: Sequence[tuple[Text, Text]],
    words: layout.Words,
    side: float,
) -> None:
    """Measure the words, then give every part its pixels. side: of a map, pixels."""
    layout.in_print(figure, words.style)
    # A panel is as wide as its map with its bar, or as its title, whichever is wider.
    widest = layout.extent([text for pair in titles for text in pair])[0]
    bar_words = max(layout.outside(bar_ax) for _, bar_ax in panels) + GAP
    least = 0 if words.style.in_print else LEAST_PITCH
    across = max(side + GAP + BAR_PX + round(bar_words), round(widest) + 2 * GAP, least)
    # Only the lower panels have labels below, only the left ones at the side.
    marks = layout.axis_room(panels[2][0].get_xticklabels(), NAME_SIZE, 2 * GAP)[1]
    plan = layout.PanelPlan(
        left=round(EDGE + layout.axis_room(panels[0][0].get_yticklabels(), NAME_SIZE, GAP)[0]),
        top=GAP + TITLE_ROOM - 8,
        size=(side, side),
        bar=(GAP, BAR_PX, side),
        right=across - side - EDGE,
        below=marks,
        edge=EDGE,
        columns=2,
        pitch=(across, side + TITLE_ROOM + 2 * GAP),
    )
    plan = layout.frame(figure, panels, plan, words, plan.left)
    for index, (name, number) in enumerate(titles):
        left, top = plan.corner(index)
        layout.put_words(figure, name, left, top - 31)
        layout.put_words(figure, number, left, top - 9)


@dataclass(frozen=True)
class Curve:
    """std(q . k) by width, as measured and as the formula says."""

    label: str
    width_W: np.ndarray
    measured_W: np.ndarray
    predicted_W: np.ndarray


def save_scaling_curves(path: Path, curves: Sequence[Curve], *, note: str = "", style: Style = STYLE) -> Path:
    """Write std(q . k) against d_k, with sqrt(d_k), and the same after the division by it; returns the path.

    Points are measured, lines are the formula. Raises UsageError for a folder that cannot be written.

        save_scaling_curves(Path("scaling.png"), curves, note="8192 pairs per point, seed 0")
    """
    return layout.save_drawn(path, style, [note, style.title, "√σμ²·"], lambda room: curves_figure(curves, note, style))


def curves_figure(curves: Sequence[Curve], note: str = "", style: Style = STYLE) -> Figure:
    """The two panels, one above the other where there is no room; to be called within `writer.drawing`."""
    figure, wide = layout.new_figure(), style.inches or CURVES_WIDE
    rows = 1 if wide >= CURVES_BESIDE else 2
    high = rows * min(CURVES_HIGH, max(2.2, wide * rows / 2))
    figure.set_size_inches(wide, high)
    before, after = figure.subplots(rows, 3 - rows)
    # The same curves in both panels, divided by 1 and by the root that the scores are divided by.
    width_W = curves[0].width_W
    colours = sns.color_palette("colorblind", len(curves))
    for curve, colour, marker in zip(curves, colours, cycle(MARKERS)):
        root_W = np.sqrt(curve.width_W)
        for ax, by in ((before, np.ones_like(root_W)), (after, root_W)):
            line, points = curve.predicted_W / by, curve.measured_W / by
            shared = {"x": curve.width_W, "ax": ax, "color": colour, "errorbar": None, "legend": False}
            dots = {"linestyle": "", "marker": marker, "markersize": 5, "markeredgecolor": colour}
            sns.lineplot(y=line, linewidth=1.4, **shared)
            sns.lineplot(y=points, label=curve.label, **dots, **shared)
    before.plot(width_W, np.sqrt(width_W), "--", color="#262626", linewidth=1.6, label="√d_k")
    after.axhline(1.0, linestyle="--", color="#262626", linewidth=1.6)
    before.set_title("before: std of q · k", loc="left", fontsize=NAME_SIZE + 1)
    after.set_title("after the division by √d_k: back to 1 for mean 0, std 1", loc="left", fontsize=NAME_SIZE + 1)
    before.legend(frameon=False, fontsize=layout.NOTE_SIZE, loc="upper left")
    # Widths double from one to the next, and so do their steps on the axis.
    for ax, marks in ((before, [0.5, 1, 2, 5, 10, 20, 50, 100]), (after, [0.5, 1, 2, 4, 8])):
        ax.set_xscale("log", base=2)
        ax.set_xticks(width_W, [f"{int(width)}" for width in width_W], fontsize=layout.NOTE_SIZE)
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_xlabel("d_k, the width of q and k", fontsize=NAME_SIZE)
        layout.rule(ax, "both")
        layout.log_axis(ax, marks)
        ax.tick_params(axis="y", labelsize=layout.NOTE_SIZE)
    after.set_ylim(0.4, 8)
    # A note is broken into lines first: the panels leave room for so many.
    lines = layout.wrapped(note, (wide - 2 * CURVES_LEFT) * DPI, layout.NOTE_SIZE) if style.captioned else ""
    figure.text(CURVES_LEFT / wide, 0.02, lines, fontsize=layout.NOTE_SIZE, color=layout.NOTE_COLOUR, va="bottom")
    layout.in_print(figure, style)
    below = 0.55 + layout.line_px(layout.NOTE_SIZE) / DPI * (lines.count("\n") + 1) * bool(lines)
    sides = {"left": CURVES_LEFT / wide, "right": 1 - 0.15 / wide}
    figure.subplots_adjust(**sides, top=1 - 0.35 / high, bottom=below / high, wspace=0.13, hspace=0.45)
    return figure
