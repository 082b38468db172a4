"""The pictures of `heads --out`, of every text of a corpus: prepared beside the model, drawn in worker processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from attnscope.cli.export import head_jobs, layer_maps
from attnscope.figures import Maps, Style, save_head_maps, save_layer, save_metrics, save_overview

if TYPE_CHECKING:
    from attnscope.observe import Observation


@dataclass(frozen=True)
class Drawing:
    """One text's pictures, before they are drawn: its maps, the heads to draw one by one, its scores."""

    layers: list[Maps]
    heads: list[str]
    scores: Mapping[str, np.ndarray]
    score_layers: list[int]


@dataclass(frozen=True)
class Pictures:
    """What to draw of every text: kinds of overview, layers, heads, metrics. Called with an observation."""

    kinds: tuple[str, ...]
    style: Style = Style()
    by_kv: bool = False

    def __call__(self, seen: Observation) -> Drawing:
        """Everything that the drawing needs, without torch."""
        kept = seen.kept_heads()
        layers = sorted({head.layer for head in kept})
        width = 1 + max(head.kv_head if head.head is None else head.head for head in kept)
        scores = {name: np.full((len(layers), width), np.nan) for name in kept[0].score}
        for head in kept:
            at = layers.index(head.layer), head.kv_head if head.head is None else head.head
            for name, score in head.score.items():
                scores[name][at] = score
        maps = [replace(one, values_HQK=np.ascontiguousarray(one.values_HQK)) for one in layer_maps(seen, self.by_kv)]
        return Drawing(maps, [head.name for head in kept], scores, layers)

    def paint(self, drawing: Drawing, folder: Path) -> None:
        """Draw into a folder; in a worker process."""
        folder.mkdir(parents=True, exist_ok=True)
        style = self.style
        if "overview" in self.kinds:
            save_overview(folder / f"overview.{style.image}", drawing.layers, style)
        if "layers" in self.kinds:
            for maps in drawing.layers:
                if maps.layer in drawing.score_layers:
                    save_layer(folder / "layers" / f"L{maps.layer:02d}.{style.image}", maps, style)
        if "heads" in self.kinds:
            save_head_maps(head_jobs(folder, drawing.layers, drawing.heads, style), style, workers=1)
        if "metrics" in self.kinds:
            labels = [f"L{layer}" for layer in drawing.score_layers]
            save_metrics(folder / f"metrics.{style.image}", dict(drawing.scores), style, layer_labels=labels)
