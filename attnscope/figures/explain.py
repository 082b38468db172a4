"""What dividing by sqrt(d_k) does: four panels of one head, and std(q . k) against d_k.

Q query, K key, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from attnscope.figures import layout
from attnscope.figures.colours import (
    BLANK,
    Limits,
    drawable,
    find_cmap,
    find_limits,
    ink_on,
    label_colourbar,
    make_norm,
)
from attnscope.figures.fonts import fonts_for, shown_label
from attnscope.figures.style import Style
from attnscope.figures.writer import DPI, drawing, save_figure

EDGE, GAP, BAR_PX, BAR_ROOM, TITLE_ROOM = 18, 10, 12, 62, 52
PANEL_PX, LARGEST_CELL, LEAST_PITCH = 480, 110, 190
TITLE_SIZE, NAME_SIZE, NOTE_SIZE = 13.0, 10.5, 9.0
LINE = 1.15  # from line to line of the notes
RASTER_CELLS = 2500
SCORES, WEIGHTS = Style(weights="scores"), Style()
GREY = "#555555"


@dataclass(frozen=True)
class ScalingEffect:
    """Scores before and after scaling, and the softmax of each; NaN where the query may not look.

    std: of all visible scores. entropy: nats, mean over the queries that see at least 2 keys (NaN if none does);
    even_entropy: what attention spread evenly would have.
    """

    raw_QK: np.ndarray
    scaled_QK: np.ndarray
    raw_weights_QK: np.ndarray
    scaled_weights_QK: np.ndarray
    raw_std: float
    scaled_std: float
    raw_entropy: float
    scaled_entropy: float
    even_entropy: float


def scaling_effect(raw_QK: np.ndarray, visible_QK: np.ndarray, scale: float) -> ScalingEffect:
    """q . k and which keys are visible -> the four matrices of the figure and their numbers.

    Only scale, mask and softmax are applied: a soft-cap, a position bias or a sink logit is not.

        effect = scaling_effect(q @ k.T, np.tril(np.ones((9, 9), bool)), 32**-0.5)
        effect.raw_entropy, effect.scaled_entropy
    """
    raw_QK = np.where(visible_QK, raw_QK, np.nan)
    scaled_QK = raw_QK * scale
    before_QK, after_QK = _softmax(raw_QK), _softmax(scaled_QK)
    telling_Q = visible_QK.sum(-1) >= 2
    even_Q = np.log(visible_QK.sum(-1)[telling_Q])
    return ScalingEffect(
        raw_QK,
        scaled_QK,
        before_QK,
        after_QK,
        float(np.nanstd(raw_QK)),
        float(np.nanstd(scaled_QK)),
        _entropy(before_QK[telling_Q]),
        _entropy(after_QK[telling_Q]),
        float(even_Q.mean()) if even_Q.size else float("nan"),
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


def save_scaling_effect(
    path: Path,
    effect: ScalingEffect,
    labels: Sequence[str],
    *,
    head: str,
    divisor: str,
    note: str = "",
    image: str = "png",
) -> Path:
    """Write the four panels; returns the path.

    labels: one a token. head: whose scores they are, for the title. divisor: how the scaling is written ("/ √32").
    note: said below the panels. image: png, svg or pdf. Raises UsageError for a folder that cannot be written.

        save_scaling_effect(Path("L2H3.png"), effect, labels, head="L2H3 of demo", divisor="/ √32")
    """
    texts = [head, note, *map(shown_label, labels), "√·−"]
    with drawing(fonts_for(texts)):
        return save_figure(effect_figure(effect, labels, head, divisor, note), path, image)


def effect_figure(effect: ScalingEffect, labels: Sequence[str], head: str, divisor: str, note: str = "") -> Figure:
    """The four panels; to be called within `writer.drawing`."""
    figure = Figure(figsize=(8, 8), dpi=DPI)
    FigureCanvasAgg(figure)
    cell = max(1, min(LARGEST_CELL, PANEL_PX // len(labels)))
    scores = find_limits([effect.raw_QK, effect.scaled_QK], SCORES)
    weights = find_limits([effect.raw_weights_QK, effect.scaled_weights_QK], WEIGHTS)
    scaled = f"q · k {divisor}"
    panels = (
        (effect.raw_QK, scores, SCORES, "scores: q · k", f"std {effect.raw_std:.2f}"),
        (effect.raw_weights_QK, weights, WEIGHTS, "softmax of q · k", f"entropy {_nats(effect.raw_entropy)}"),
        (effect.scaled_QK, scores, SCORES, f"scaled: {scaled}", f"std {effect.scaled_std:.2f}"),
        (effect.scaled_weights_QK, weights, WEIGHTS, f"softmax of {scaled}", f"entropy {_nats(effect.scaled_entropy)}"),
    )
    axes = [figure.add_axes((0.1 * place, 0.1, 0.1, 0.1)) for place in range(4)]
    titles = [
        (figure.text(0, 0, name, fontsize=NAME_SIZE, weight="bold"), figure.text(0, 0, number, fontsize=NAME_SIZE))
        for _, _, _, name, number in panels
    ]
    for ax, (values_QK, limits, style, _, _) in zip(axes, panels, strict=True):
        _draw(ax, values_QK, limits, style, cell)
    bars = [
        _bar(figure, ax, limits, style, "score" if style is SCORES else "attention weight")
        for ax, (_, limits, style, _, _) in zip(axes, panels, strict=True)
    ]
    heading = figure.text(0, 0, f"{head}: what scaling does to the softmax", fontsize=TITLE_SIZE)
    step = _label(axes, labels, cell)
    notes = [figure.text(0, 0, line, fontsize=NOTE_SIZE, color=GREY) for line in _notes(effect, step, note)]
    _place(figure, axes, titles, bars, heading, notes, len(labels) * cell)
    return figure


def _nats(entropy: float) -> str:
    return "–" if np.isnan(entropy) else f"{entropy:.2f} nats"


def _notes(effect: ScalingEffect, step: int, note: str) -> list[str]:
    """What the numbers mean, below the panels."""
    lines = [
        "Colours mean the same in both panels of a column. Grey: the query may not look there.",
        "std: how far the scores of all visible (query, key) pairs spread.",
        "entropy: mean over the queries that see 2 keys or more;",
        f"0 means all weight on one key, {_nats(effect.even_entropy)} spread evenly over them.",
    ]
    every = [f"Every {step}{'nd' if step == 2 else 'th'} token is labelled."] if step > 1 else []
    return [*lines, *every, *([note] if note else [])]


def _draw(ax: Axes, values_QK: np.ndarray, limits: Limits, style: Style, cell: int) -> None:
    """One map, with numbers in its cells where there are few."""
    cmap, norm = find_cmap(style.cmap), make_norm(limits, style)
    shown = drawable(values_QK, limits, style)
    sns.heatmap(
        shown.filled(np.nan),
        ax=ax,
        norm=norm,
        vmin=limits.low,
        vmax=limits.high,
        cmap=cmap,
        cbar=False,
        xticklabels=False,
        yticklabels=False,
        rasterized=values_QK.size > RASTER_CELLS,
    )
    ax.set_facecolor(BLANK)
    if not style.annotates(len(values_QK)):
        return
    digits = 1 if np.nanmax(np.abs(values_QK)) >= 10 else 2
    for query, key in np.argwhere(np.isfinite(values_QK)):
        value = values_QK[query, key]
        text = f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")  # + 0.0: no −0.0
        size = layout.number_size(cell) * min(1.0, 4.5 / len(text))
        ink = str(ink_on(np.asarray(cmap(norm(value)))))
        ax.text(key + 0.5, query + 0.5, text, ha="center", va="center", fontsize=size, color=ink)


def _bar(figure: Figure, ax: Axes, limits: Limits, style: Style, name: str) -> Colorbar:
    bar = figure.colorbar(ax.collections[0], cax=figure.add_axes((0.9, 0.1, 0.02, 0.8)))
    label_colourbar(bar, limits, style, name)
    bar.ax.tick_params(labelsize=NOTE_SIZE)
    bar.ax.yaxis.label.set_fontsize(NOTE_SIZE)
    return bar


def _label(axes: Sequence[Axes], labels: Sequence[str], cell: int) -> int:
    """Queries at the left panels, keys below the lower ones; returns the step between labels."""
    for ax in axes[::2]:
        step = layout.put_tokens(ax, "y", labels, cell)
        ax.set_ylabel("query", fontsize=NAME_SIZE)
    for ax in axes[2:]:
        layout.put_tokens(ax, "x", labels, cell)
        layout.turn(ax.get_xticklabels(), cell * step)
        ax.set_xlabel("key", fontsize=NAME_SIZE)
    return step


def _place(
    figure: Figure,
    axes: Sequence[Axes],
    titles: Sequence[tuple[Text, Text]],
    bars: Sequence[Colorbar],
    heading: Text,
    notes: Sequence[Text],
    side: int,
) -> None:
    """Measure the words, then give every part its pixels."""
    name = layout.line_px(NAME_SIZE)
    left = round(EDGE + name + layout.extent(axes[0].get_yticklabels())[0] + GAP)
    top = round(EDGE + layout.line_px(TITLE_SIZE) + GAP + TITLE_ROOM)
    words = layout.extent([text for pair in titles for text in pair])[0]
    across = max(side + GAP + BAR_PX + BAR_ROOM, round(words) + 2 * GAP, LEAST_PITCH)
    down = side + TITLE_ROOM + 2 * GAP
    below = layout.extent(axes[2].get_xticklabels())[1] + name + 2 * GAP
    bottom = top + down + side + below
    width = max(left + 2 * across, left + max(layout.extent([heading, *notes])[0], 0) + EDGE)
    layout.resize(figure, width, bottom + len(notes) * LINE * layout.line_px(NOTE_SIZE) + EDGE)
    for place, (ax, bar, pair) in enumerate(zip(axes, bars, titles, strict=True)):
        row, column = divmod(place, 2)
        x, y = left + column * across, top + row * down
        layout.place(figure, ax, (x, y, side, side))
        layout.place(figure, bar.ax, (x + side + GAP, y, BAR_PX, side))
        layout.put_words(figure, pair[0], x, y - 31)
        layout.put_words(figure, pair[1], x, y - 9)
    layout.put_words(figure, heading, left, EDGE + layout.line_px(TITLE_SIZE) * 0.8)
    for line, text in enumerate(notes):
        layout.put_words(figure, text, left, bottom + (line + 0.8) * LINE * layout.line_px(NOTE_SIZE))


@dataclass(frozen=True)
class Curve:
    """std(q . k) by width, as measured and as the formula says."""

    label: str
    width_W: np.ndarray
    measured_W: np.ndarray
    predicted_W: np.ndarray


def save_scaling_curves(path: Path, curves: Sequence[Curve], *, note: str = "", image: str = "png") -> Path:
    """Write std(q . k) against d_k beside sqrt(d_k), and the same after the division by it; returns the path.

    Points are measured, lines are the formula. Raises UsageError for a folder that cannot be written.

        save_scaling_curves(Path("scaling.png"), curves, note="8192 pairs a point, seed 0")
    """
    with drawing(fonts_for([note, "√σμ²·"])):
        return save_figure(curves_figure(curves, note), path, image)


def curves_figure(curves: Sequence[Curve], note: str = "") -> Figure:
    """The two panels; to be called within `writer.drawing`."""
    figure = Figure(figsize=(11, 5.4), dpi=DPI)
    FigureCanvasAgg(figure)
    before, after = figure.subplots(1, 2)
    width_W = curves[0].width_W
    for curve, colour in zip(curves, sns.color_palette("colorblind", len(curves)), strict=True):
        root_W = np.sqrt(curve.width_W)
        for ax, by in ((before, np.ones_like(root_W)), (after, root_W)):
            ax.plot(curve.width_W, curve.predicted_W / by, color=colour, linewidth=1.4)
            ax.plot(curve.width_W, curve.measured_W / by, "o", color=colour, markersize=5, label=curve.label)
    before.plot(width_W, np.sqrt(width_W), "--", color="#262626", linewidth=1.6, label="√d_k")
    after.axhline(1.0, linestyle="--", color="#262626", linewidth=1.6)
    before.set_title("before: std of q · k", loc="left", fontsize=NAME_SIZE + 1)
    after.set_title("after the division by √d_k: back to 1 for mean 0, std 1", loc="left", fontsize=NAME_SIZE + 1)
    before.legend(frameon=False, fontsize=NOTE_SIZE, loc="upper left")
    for ax in (before, after):
        _doubling(ax, width_W)
    _steps(before, [0.5, 1, 2, 5, 10, 20, 50, 100])
    _steps(after, [0.5, 1, 2, 4, 8])
    after.set_ylim(0.4, 8)
    figure.text(0.055, 0.025, note, fontsize=NOTE_SIZE, color=GREY)
    figure.subplots_adjust(left=0.055, right=0.985, top=0.93, bottom=0.17, wspace=0.13)
    return figure


def _doubling(ax: Axes, width_W: np.ndarray) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(width_W, [f"{int(width)}" for width in width_W], fontsize=NOTE_SIZE)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("d_k, the width of q and k", fontsize=NAME_SIZE)
    ax.grid(color="#e6e6e6", linewidth=0.6)
    sns.despine(ax=ax)


def _steps(ax: Axes, ticks: Sequence[float]) -> None:
    """A log axis with plain numbers: matplotlib's own are formulas, which figures never parse."""
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(FixedLocator(list(ticks)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.tick_params(axis="y", labelsize=NOTE_SIZE)
