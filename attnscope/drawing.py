"""An observation as figures take it: maps with labels, panels of scores, pictures in memory.

Shapes: L layer, H head, Q query, K key, G unit of a rollout.
"""

from __future__ import annotations

import html
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.errors import UsageError
from attnscope.figures import Maps, Style, save_head_maps, save_layer, save_metrics, save_overview
from attnscope.files import write_whole

if TYPE_CHECKING:
    from attnscope.observation import Observation
    from attnscope.text.prompt import Prompt, Span

FIGURES = ("overview", "layers", "heads", "metrics")
LONGEST_UNIT = 24  # letters of a unit's text beside a map; the positions of longer ones
Advance = Callable[[int], None]


@dataclass(frozen=True)
class Picture:
    """A picture in memory: shown in a notebook, or saved."""

    png: bytes
    title: str

    def save(self, path: str | Path) -> Path:
        """Write the PNG, whole or not at all."""
        return write_whole(Path(path), lambda temp: temp.write_bytes(self.png))

    def _repr_png_(self) -> bytes:
        return self.png

    def _repr_html_(self) -> str:
        return f'<img alt="{html.escape(self.title)}" src="data:image/png;base64,{b64encode(self.png).decode()}">'

    def __repr__(self) -> str:
        return f"Picture: {self.title}, {len(self.png) // 1024} KiB of PNG"


@dataclass(frozen=True)
class Drawing:
    """One text's pictures before they are drawn, without torch: maps, heads to draw one by one, layer x head scores.

    layers: those of which the view keeps a head, the rows of the scores' panels.
    """

    maps: tuple[Maps, ...]
    heads: tuple[str, ...]
    layers: tuple[int, ...]
    scores: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, seen: Observation, heads: Sequence[str] | None = None) -> Drawing:
        """What there is to draw of an observation; heads: names of those drawn one by one, None for all kept."""
        names = [head.name for head in seen.kept_heads()] if heads is None else heads
        layers, scores = score_panels(seen)
        return cls(tuple(layer_maps(seen)) if seen.maps else (), tuple(names), layers, scores)

    def draw(
        self,
        folder: Path,
        kinds: Sequence[str] = FIGURES,
        style: Style = Style(),
        workers: int | None = 1,
        advance: Advance = lambda steps: None,
    ) -> list[Path]:
        """Write overview, layers/, heads/ and metrics into a folder; the paths."""
        written = []
        if "overview" in kinds and self.maps:
            written.append(save_overview(folder / f"overview.{style.image}", list(self.maps), style))
            advance(1)
        for maps in self._drawn_layers(kinds):
            written.append(save_layer(folder / "layers" / f"L{maps.layer:02d}.{style.image}", maps, style))
            advance(1)
        jobs = head_jobs(folder, self.maps, self.heads, style) if "heads" in kinds else []
        if jobs:
            written += save_head_maps(jobs, style, workers=workers, progress=_steps(advance))
        if "metrics" in kinds and self.scores:
            labels = [f"L{layer}" for layer in self.layers]
            written.append(save_metrics(folder / f"metrics.{style.image}", self.scores, style, layer_labels=labels))
        return written

    def pictures(self, kinds: Sequence[str] = FIGURES) -> int:
        """How many steps `draw` will report."""
        heads = len(self.heads) * ("heads" in kinds)
        return (heads + len(self._drawn_layers(kinds)) + ("overview" in kinds)) if self.maps else 0

    def _drawn_layers(self, kinds: Sequence[str]) -> list[Maps]:
        return [maps for maps in self.maps if maps.layer in self.layers] if "layers" in kinds else []


@dataclass(frozen=True)
class Pictures:
    """What to draw of every text of a corpus; called with an observation beside the model, drawn in another process."""

    kinds: tuple[str, ...]
    style: Style = Style()

    def __call__(self, seen: Observation) -> Drawing:
        """Everything that the drawing needs, without torch."""
        return Drawing.of(seen)

    def draw(self, drawing: Drawing, folder: Path) -> None:
        """Draw into a folder, made if need be."""
        folder.mkdir(parents=True, exist_ok=True)
        drawing.draw(folder, self.kinds, self.style)


def score_panels(seen: Observation) -> tuple[tuple[int, ...], dict[str, np.ndarray]]:
    """The layers with a kept head, and {metric: (L, H)} of the kept heads, NaN elsewhere."""
    columns, order = seen.columns, np.flatnonzero(seen.columns.kept)
    layer, number = columns.layer[order], np.where(columns.head[order] < 0, columns.kv_head[order], columns.head[order])
    layers = np.unique(layer)
    panels = {}
    for name, score in columns.scores.items() if len(order) else ():
        panels[name] = np.full((len(layers), int(number.max()) + 1), np.nan)
        panels[name][np.searchsorted(layers, layer), number] = score.value[order]
    return tuple(layers.tolist()), panels


def layer_maps(seen: Observation) -> list[Maps]:
    """The observation's matrices as figures take them: with labels, bins and kv heads."""
    found, by_kv = seen.maps, seen.view.by_kv
    if found is None:
        raise UsageError("this observation kept no maps", "ask with Request(maps=...)")
    rule = "sum over keys, mean over queries" if found.rule == "sum" else "largest entry"
    labels_Q, labels_K = (bin_labels(seen.prompt.labels, sizes) for sizes in (found.rows, found.columns))
    return [
        Maps(
            key.layer,
            tuple(found.heads[key]),
            np.ascontiguousarray(values),
            labels_Q,
            labels_K,
            found.bin_size,
            rule if found.bin_size > 1 else "",
            () if by_kv else tuple(seen.kv_head(key, head) for head in found.heads[key]),
            by_kv,
            "logit" if seen.view.weights == "scores" else "weight",
            tuple(found.key0[key].tolist()) if key in found.key0 else (),
        )
        for key, values in found.values.items()
    ]


def head_jobs(folder: Path, layers: Sequence[Maps], names: Sequence[str], style: Style) -> list[tuple[Path, Maps, int]]:
    """A file per named head, in the model's order: heads/L27H03.png, heads/L27KV03.png."""
    mark, wanted = ("KV" if layers and layers[0].by_kv else "H"), set(names)
    return [
        (folder / "heads" / f"L{maps.layer:02d}{mark}{head:02d}.{style.image}", maps, index)
        for maps in layers
        for index, head in enumerate(maps.heads)
        if f"L{maps.layer}{mark}{head}" in wanted
    ]


def bin_labels(labels: Sequence[str], sizes: Sequence[int]) -> tuple[str, ...]:
    """Token labels, or the positions that each bin spans."""
    if all(size == 1 for size in sizes):
        return tuple(labels)
    starts = np.cumsum([0, *sizes[:-1]])
    return tuple(
        f"{start}" if size == 1 else f"{start}–{start + size - 1}" for start, size in zip(starts, sizes, strict=True)
    )


def save_rollout(seen: Observation, folder: Path, style: Style) -> Path:
    """rollout.png: units x units, put together where there are more than a map takes."""
    rolled = seen.rollout
    if rolled is None:
        raise UsageError("this observation kept no rollout", 'ask with Request(rollout="tokens")')
    values_GG, step = rolled.binned()
    if rolled.group == "bins":
        run, shown = rolled.longest, bin_labels(seen.prompt.labels, [unit.stop - unit.start for unit in rolled.units])
    else:
        run, shown = 1, unit_labels(seen.prompt, rolled.units, step)
    rule = "sum over keys, mean over queries" if run > 1 else ""
    maps = Maps(rolled.layers[-1], (0,), values_GG[None], shown, shown, run, rule, quantity="share")
    title = f"Rollout of {len(rolled.layers)} layers" + f", {step} {rolled.group} a cell" * (step > 1)
    jobs = [(folder / f"rollout.{style.image}", maps, 0)]
    return save_head_maps(jobs, style, title=lambda maps, index: title)[0]


def unit_labels(prompt: Prompt, units: Sequence[Span], step: int) -> tuple[str, ...]:
    """What stands beside each row of `step` units: the text of a short one, the positions that others span."""
    edges = [
        (units[start].start, units[min(start + step, len(units)) - 1].stop) for start in range(0, len(units), step)
    ]
    texts = ["".join(prompt.labels[start:stop]) for start, stop in edges]
    return tuple(
        text if step == 1 and (stop - start == 1 or len(text) <= LONGEST_UNIT) else f"{start}–{stop - 1}"
        for text, (start, stop) in zip(texts, edges, strict=True)
    )


def head_picture(seen: Observation, layer: int, head: int, **style: Any) -> Picture:
    """One head's labelled heatmap; style: fields of `Style`. Raises UsageError for a head whose map was not kept."""
    name, look = f"L{layer}{'KV' if seen.view.by_kv else 'H'}{head}", _style(style)
    maps = layer_maps(seen)
    if not head_jobs(Path(), maps, [name], look):
        raise UsageError(f"there is no map of {name}", "the observation keeps the maps that its Request asks for")
    return _picture(lambda folder: save_head_maps(head_jobs(folder, maps, [name], look), look)[0], name)


def overview_picture(seen: Observation, **style: Any) -> Picture:
    """Every head of every layer as a thumbnail; style: fields of `Style`."""
    look = _style(style)
    return _picture(lambda folder: save_overview(folder / "overview.png", layer_maps(seen), look), "overview")


def _style(style: Mapping[str, Any]) -> Style:
    names = sorted(set(Style.__dataclass_fields__) - {"image"})
    for name in style:
        if name not in names:
            raise UsageError(f"a picture has no {name!r}", f"it has {', '.join(names)}")
    return Style(**style)


def _picture(draw: Callable[[Path], Path], title: str) -> Picture:
    with TemporaryDirectory() as folder:
        return Picture(draw(Path(folder)).read_bytes(), title)


def _steps(advance: Advance) -> Callable[[int], None]:
    """From "so many are done" to "so many more"."""
    done = 0

    def tell(files: int) -> None:
        nonlocal done
        advance(files - done)
        done = files

    return tell
