"""One labelled heatmap per head: what each file shows, and who draws it.

H head, Q query, K key.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attnscope.figures.colours import Limits, find_cmap, find_limits
from attnscope.figures.fonts import Fonts, fonts_for, shown_label
from attnscope.figures.style import Maps, Style, bin_note, head_title, split_sink
from attnscope.figures.writer import drawing


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


def save_head_maps(
    jobs: Sequence[tuple[Path, Maps, int]],
    style: Style,
    *,
    title: Callable[[Maps, int], str] = head_title,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Path]:
    """Write one labelled heatmap per job (path, maps, index into maps.heads); returns the paths.

    Numbers are written into the cells of maps of at most 12 tokens. All files share one colour scale unless
    `style.per_head_scale`. `workers=None` uses other processes when there are enough heads to pay for their
    start; they import no torch. `progress` is called with the number of files written so far.
    Raises UsageError for an unknown colour map or a folder that cannot be written.

        save_head_maps([(Path("heads/L27H03.png"), maps, 3)], Style())
        save_head_maps(jobs, Style(sink="mask", scale="log"), workers=2)
    """
    from attnscope.figures.pool import run_in_workers, worker_count

    find_cmap(style.cmap)
    heads = prepare_heads(jobs, style, title)
    fonts = fonts_for({text for head in heads for text in shown_texts(head)})
    tell = progress or (lambda done: None)
    if workers is None:
        workers = worker_count([head.values_QK.size for head in heads], style)
    drawn = run_in_workers(heads, style, fonts, workers) if workers > 1 else draw_heads(heads, style, fonts)
    with closing(drawn):  # an error in `progress` stops the workers too
        for done, _ in enumerate(drawn, start=1):
            tell(done)
    return [head.path for head in heads]


def draw_heads(heads: Sequence[Head], style: Style, fonts: Fonts) -> Generator[Path, None, None]:
    """Write the heads in this process, one path at a time."""
    from attnscope.figures.heatmap import HeadFigure

    built: dict[tuple, HeadFigure] = {}
    with drawing(fonts):
        for head in heads:
            if head.kind not in built:
                built[head.kind] = HeadFigure(head, style)
            built[head.kind].show(head)
            yield built[head.kind].save(head.path)


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
