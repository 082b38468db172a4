"""What each file of a head shows, settled before anything is drawn.

H head, Q query, K key.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from attnscope.figures.colours import Limits, find_limits, seen
from attnscope.figures.fonts import shown_label, undrawable
from attnscope.figures.style import (
    OPEN,
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
from attnscope.utils.display import printed


@dataclass(frozen=True)
class HeadMap:
    """What one file shows; where the style takes the sink out, sink_Q is its column, gone from values_QK or TAKEN."""

    path: Path
    title: str
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
    own_scale = style.per_head_scale or quantity == "logit"  # logits of different heads have no common measure
    heads = []
    for (path, maps, index), (rest, sink_HQ), values_QK in zip(jobs, split, values, strict=True):
        sink_Q = None if sink_HQ is None else sink_HQ[index]
        own = find_limits([values_QK], style, quantity, alone=first) if own_scale else shared
        heads.append(
            HeadMap(
                path=path,
                title=style.headed(title(maps, index)) + (f", max {own.high:.2g}" if style.per_head_scale else ""),
                note=_note(maps, _taken_note(maps, index, sink_Q, values_QK)),
                foot=foot(maps, style),
                axis_Q=rest.axis_Q,
                axis_K=rest.axis_K,
                axis_sink=_axis_sink(maps),
                turns=rest.turns,
                window=(maps.window, maps.ahead),
                values_QK=values_QK,
                sink_Q=sink_Q,
                limits=own,
                quantity=quantity,
            )
        )
    return heads


def foot(maps: Maps, style: Style, *, tokens: bool = True) -> tuple[str, ...]:
    """What stands below a figure: what it is of, and what its signs mean; tokens: whether it names them."""
    later = "not visible to the query" if maps.quantity != "share" else "nothing is attributed there"
    signs = [f"grey: {later}"] if not np.isfinite(maps.values_HQK).all() else []
    if tokens and any("·" in label for label in (*maps.labels_Q, *maps.labels_K)):
        signs.append("“·”: a space")
    if tokens and any(map(undrawable, {*maps.labels_Q, *maps.labels_K})):
        signs.append("a number alone: the position of a token without a font")
    if maps.sinks and style.sink == "mask":
        signs.append("darker grey: the sink, taken out")
    if maps.kv_heads or maps.by_kv:
        signs.append("kv: key and value head")
    if tokens and maps.heads and len(edge_boxes(maps.values_HQK[0], (maps.window, maps.ahead))):
        signs.append(f"black line: the edge of a {maps.window.split()[0]}")
    if maps.turns and tokens:
        signs.append(f"thin lines: {maps.begins} begins")
    return style.about.line, "; ".join(signs)


def _axis_sink(maps: Maps) -> Axis:
    """What stands below the strip: key 0, or, so that heads of different sinks share a figure, one word."""
    if maps.sinks:
        return Axis("", ("sink",))
    return replace(maps.axis_K, labels=maps.labels_K[:1], starts=maps.starts_K[:1])


def _note(maps: Maps, taken: str) -> str:
    return "; ".join(filter(None, (maps.window, parallel_note(maps), bin_note(maps), taken)))


def _taken_note(maps: Maps, index: int, sink_Q: np.ndarray | None, values_QK: np.ndarray) -> str:
    if sink_Q is None:
        return ""
    if maps.column(maps.sink(index)[0]) is None:
        return f"its sink, key {maps.sink(index)[0]}, is not among these"
    name, mean, (key, mass) = sink_name(maps, index), sink_mean(maps, index, sink_Q, values_QK), maps.sink(index)
    among = name.startswith("keys") and not math.isnan(mass)
    return sink_note(maps, name, f"{mean} on key {key}" if among else mean)


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
