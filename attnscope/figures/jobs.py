"""What each file of a head shows, settled before anything is drawn.

H head, Q query, K key.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attnscope.figures.colours import Limits, find_limits
from attnscope.figures.fonts import shown_label
from attnscope.figures.style import Maps, Quantity, Style, bin_note, head_title, split_sink


@dataclass(frozen=True)
class Head:
    """What one file shows; where the style takes key 0 out, values_QK are without it and sink_Q is its column."""

    path: Path
    title: str
    note: str
    labels_Q: tuple[str, ...]
    labels_K: tuple[str, ...]
    values_QK: np.ndarray
    sink_Q: np.ndarray | None
    sink_label: str
    limits: Limits
    quantity: Quantity

    @property
    def kind(self) -> tuple:
        """Heads of one kind differ in values and titles alone, and share a figure."""
        seen = np.isfinite(self.values_QK).tobytes()
        parts = (self.sink_label, self.sink_Q is None, bool(self.note), self.limits.above)
        return self.labels_Q, self.labels_K, seen, parts


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
    heads = []
    for (path, maps, index), (rest, sink_HQ), values_QK in zip(jobs, split, values, strict=True):
        sink_Q = None if sink_HQ is None else sink_HQ[index]
        removed_note = sink_note(maps, sink_Q, values_QK, maps.key0[index : index + 1])
        own = find_limits([values_QK], style, quantity, sink_removed=removed) if style.per_head_scale else shared
        heads.append(
            Head(
                path=path,
                title=title(maps, index),
                note=" · ".join(filter(None, (bin_note(maps), removed_note))),
                labels_Q=rest.labels_Q,
                labels_K=rest.labels_K,
                values_QK=values_QK,
                sink_Q=sink_Q,
                sink_label=maps.labels_K[0],
                limits=own,
                quantity=quantity,
            )
        )
    return heads


def sink_note(maps: Maps, sink_Q: np.ndarray | None, values_QK: np.ndarray, key0: Sequence[float] = ()) -> str:
    """How much was taken out with key 0; key0: the mean mass on it, where the column does not tell."""
    if sink_Q is None:
        return ""
    first = maps.labels_K[0]
    name = f"key{'s' * ('–' in first)} {first}" if maps.bin_size > 1 else f"key 0 ({shown_label(first)})"
    mean = "–" if np.isnan(mass := sink_mean(sink_Q, values_QK, key0)) else f"{mass:.2f}".replace("-", "−")
    if maps.quantity == "logit":
        return f"without {name}, mean {'of the largest logits' if maps.bin_size > 1 else 'logit'} {mean}"
    return f"without {name}, mean mass {mean} (grey strip, 0 to 1)"


def sink_mean(sink_Q: np.ndarray, values_QK: np.ndarray, key0: Sequence[float] = ()) -> float:
    """The mean of key 0's column over the queries that see another key too, `key0`'s where given; NaN without any."""
    if len(key0):
        return float(np.mean(key0))
    rows = sink_Q[np.isfinite(sink_Q) & np.isfinite(values_QK).any(-1)]
    return float(rows.mean(dtype=np.float64)) if rows.size else float("nan")


def shown_texts(head: Head) -> tuple[str, ...]:
    """All words of a file, as they are drawn."""
    return (head.title, head.note, *map(shown_label, (*head.labels_Q, *head.labels_K, head.sink_label)))
