"""What each file of a head shows, settled before anything is drawn.

H head, Q query, K key.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attnscope.figures.colours import Limits, find_limits
from attnscope.figures.fonts import shown_label
from attnscope.figures.style import Maps, Style, bin_note, head_title, split_sink


@dataclass(frozen=True)
class Head:
    """What one file shows: values_QK without key 0 where the style takes it out, and then sink_Q."""

    path: Path
    title: str
    note: str
    labels_Q: tuple[str, ...]
    labels_K: tuple[str, ...]
    values_QK: np.ndarray
    sink_Q: np.ndarray | None
    sink_label: str
    limits: Limits

    @property
    def kind(self) -> tuple:
        """Heads of one kind differ in values and titles alone, and share a figure."""
        seen = np.isfinite(self.values_QK).tobytes()
        parts = (self.sink_label, self.sink_Q is None, bool(self.note), self.limits.above)
        return self.labels_Q, self.labels_K, seen, parts


def prepare_heads(
    jobs: Sequence[tuple[Path, Maps, int]], style: Style, title: Callable[[Maps, int], str] = head_title
) -> list[Head]:
    """Jobs -> what each file shows, its colour scale settled."""
    split = {id(maps): split_sink(maps, style) for _, maps, _ in jobs}
    chosen = [split[id(maps)][0].values_HQK[index] for _, maps, index in jobs]
    removed = style.sink == "mask"
    shared = find_limits(chosen, style, sink_removed=removed)
    heads = []
    for (path, maps, index), values_QK in zip(jobs, chosen, strict=True):
        rest, sink_HQ = split[id(maps)]
        sink_Q = None if sink_HQ is None else sink_HQ[index]
        limits = find_limits([values_QK], style, sink_removed=removed) if style.per_head_scale else shared
        note = " · ".join(filter(None, (bin_note(maps), sink_note(maps, sink_Q, values_QK, style))))
        text = (title(maps, index), note, rest.labels_Q, rest.labels_K)
        heads.append(Head(path, *text, values_QK, sink_Q, maps.labels_K[0], limits))
    return heads


def sink_note(maps: Maps, sink_Q: np.ndarray | None, values_QK: np.ndarray, style: Style) -> str:
    """How much was taken out with key 0."""
    if sink_Q is None:
        return ""
    name = f"keys {maps.labels_K[0]}" if maps.bin_size > 1 else f"key 0 ({shown_label(maps.labels_K[0])})"
    mean = "–" if np.isnan(mass := sink_mean(sink_Q, values_QK)) else f"{mass:.2f}".replace("-", "−")
    if style.weights == "scores":
        return f"without {name}, mean logit {mean}"
    return f"without {name}, mean mass {mean} (grey strip, 0 to 1)"


def sink_mean(sink_Q: np.ndarray, values_QK: np.ndarray) -> float:
    """The mean of key 0's column over the queries that see another key too; NaN when there is none."""
    rows = sink_Q[np.isfinite(sink_Q) & np.isfinite(values_QK).any(-1)]
    return float(rows.mean(dtype=np.float64)) if rows.size else float("nan")


def shown_texts(head: Head) -> tuple[str, ...]:
    """All words of a file, as they are drawn."""
    return (head.title, head.note, *map(shown_label, (*head.labels_Q, *head.labels_K, head.sink_label)))
