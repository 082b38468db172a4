"""What each file of a head shows, settled before anything is drawn.

H head, Q query, K key.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from attnscope.figures.colours import Limits, find_limits
from attnscope.figures.fonts import shown_label
from attnscope.figures.style import Axis, Maps, Quantity, Style, bin_note, head_title, split_sink


@dataclass(frozen=True)
class Head:
    """What one file shows; where the style takes key 0 out, values_QK are without it and sink_Q is its column."""

    path: Path
    title: str
    note: str
    foot: tuple[str, ...]
    axis_Q: Axis
    axis_K: Axis
    axis_sink: Axis
    turns: tuple[int, ...]
    values_QK: np.ndarray
    sink_Q: np.ndarray | None
    limits: Limits
    quantity: Quantity

    @property
    def kind(self) -> tuple:
        """Heads of one kind differ in values and titles alone, and share a figure."""
        seen = np.isfinite(self.values_QK).tobytes()
        parts = (
            self.axis_sink,
            self.sink_Q is None,
            bool(self.note),
            self.limits.above,
            len(f"{self.limits.high:.0f}"),
        )
        return self.axis_Q, self.axis_K, self.foot, self.turns, seen, parts


def prepare_heads(
    jobs: Sequence[tuple[Path, Maps, int]], style: Style, title: Callable[[Maps, int], str] = head_title
) -> list[Head]:
    """Jobs -> what each file shows, its colour scale settled. Raises ValueError for maps of several quantities."""
    quantities = {maps.quantity for _, maps, _ in jobs}
    if len(quantities) > 1:
        raise ValueError(f"expected maps of one quantity, got {sorted(quantities)}")
    quantity: Quantity = next(iter(quantities), "weight")
    split = [split_sink(maps, style) for _, maps, _ in jobs]
    values = [rest.values_HQK[index] for (rest, _), (_, _, index) in zip(split, jobs, strict=True)]
    removed = style.sink == "mask"
    shared = find_limits(values, style, quantity, sink_removed=removed)
    alone = style.per_head_scale or quantity == "logit"  # logits of different heads have no common measure
    heads = []
    for (path, maps, index), (rest, sink_HQ), values_QK in zip(jobs, split, values, strict=True):
        sink_Q = None if sink_HQ is None else sink_HQ[index]
        own = find_limits([values_QK], style, quantity, sink_removed=removed) if alone else shared
        removed_note = sink_note(maps, sink_Q, values_QK, maps.key0[index : index + 1])
        heads.append(
            Head(
                path=path,
                title=style.headed(title(maps, index)) + (f", max {own.high:.2g}" if style.per_head_scale else ""),
                note="; ".join(filter(None, (bin_note(maps), removed_note))),
                foot=foot(maps, style),
                axis_Q=rest.axis_Q,
                axis_K=rest.axis_K,
                axis_sink=replace(maps.axis_K, labels=maps.labels_K[:1], starts=maps.starts_K[:1]),
                turns=rest.turns,
                values_QK=values_QK,
                sink_Q=sink_Q,
                limits=own,
                quantity=quantity,
            )
        )
    return heads


def foot(maps: Maps, style: Style, *, tokens: bool = True) -> tuple[str, ...]:
    """What stands below a figure: what it is of, and what its signs mean; tokens: whether it names them."""
    later = "not visible to the query" if maps.quantity != "share" else "nothing came from there"
    signs = [f"grey: {later}"] if not np.isfinite(maps.values_HQK).all() else []
    if tokens and any("·" in label for label in (*maps.labels_Q, *maps.labels_K)):
        signs.append("“·”: a space")
    if maps.kv_heads or maps.by_kv:
        signs.append("kv: key and value head")
    if maps.turns and tokens:
        signs.append("thin lines: a turn begins")
    return tuple(filter(None, (style.about.line, "; ".join(signs))))


def sink_note(maps: Maps, sink_Q: np.ndarray | None, values_QK: np.ndarray, key0: Sequence[float] = ()) -> str:
    """How much was taken out with key 0; key0: the mean mass on it, where the column does not tell."""
    if sink_Q is None:
        return ""
    mean = "–" if np.isnan(mass := sink_mean(sink_Q, values_QK, key0)) else f"{mass:.2f}".replace("-", "−")
    if maps.quantity == "logit":
        return f"without {_sink_name(maps)}, mean {'of the largest logits' if maps.bin_size > 1 else 'logit'} {mean}"
    return f"without {_sink_name(maps)}, mean mass {mean} (grey strip, 0 to 1)"


def _sink_name(maps: Maps) -> str:
    """The first column: key 0, or the first bin where key 0 has no column of its own."""
    if maps.bin_size == 1 or maps.starts_K[1:2] == (1,):
        return f"key 0 ({shown_label(maps.labels_K[0])})"
    return f"keys 0–{maps.starts_K[1] - 1}" if maps.starts_K else f"keys {maps.labels_K[0]}"


def sink_mean(sink_Q: np.ndarray, values_QK: np.ndarray, key0: Sequence[float] = ()) -> float:
    """The mean of key 0's column over the queries that see another key too, `key0`'s where given; NaN without any."""
    if len(key0):
        return float(np.mean(key0))
    rows = sink_Q[np.isfinite(sink_Q) & np.isfinite(values_QK).any(-1)]
    return float(rows.mean(dtype=np.float64)) if rows.size else float("nan")
