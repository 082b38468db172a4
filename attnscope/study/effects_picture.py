"""ablation.png: score, direct effect, effect alone and effect together of every head, side by side. L layer, H head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attnscope.figures import Panel, Style, save_metrics
from attnscope.figures.style import Quantity

Head = tuple[int, int]
SMALL = 0.1  # of what heads add: what they take away is drawn as 0 is


@dataclass(frozen=True)
class Shown:
    """What one panel shows: a number per head, NaN or left out for none; scale: panels of one name share its reach."""

    name: str
    unit: str
    values: Mapping[Head, float]
    scale: str


def save_effects(path: Path, heads: Sequence[Head], shown: Sequence[Shown], style: Style, note: str = "") -> Path:
    """Draw the panels; heads: all of the model. Raises UsageError for a folder that cannot be written."""
    layers = sorted({layer for layer, _ in heads})
    title = style.headed(f"What {len(heads)} heads do, and what is lost without them")
    panels = effect_panels(heads, shown)
    return save_metrics(path, panels, style, layer_labels=layers, title=title, note=note)


def effect_panels(heads: Sequence[Head], shown: Sequence[Shown]) -> list[Panel]:
    """The panels: colours from 0 on, or centred on 0 where effects reach far to both sides of it."""
    layers = sorted({layer for layer, _ in heads})
    shape = len(layers), 1 + max(head for _, head in heads)
    reach: dict[str, tuple[float, float]] = {}
    for one in shown:
        known = [value for value in one.values.values() if value == value]
        low, high = reach.get(one.scale, (0.0, 0.0))
        reach[one.scale] = min([low, *known]), max([high, *known])
    panels = []
    for one in shown:
        values_LH = np.full(shape, np.nan)
        for (layer, head), value in one.values.items():
            values_LH[layers.index(layer), head] = value
        low, high = reach[one.scale]
        signed, end = -low > SMALL * high, max(-low, high) or 1.0
        scale = (-end, end) if signed else (low, end)
        quantity: Quantity = "logit" if signed else "weight"
        panels.append(Panel(one.name, values_LH, *scale, one.unit, quantity=quantity, values_printed=True))
    return panels
