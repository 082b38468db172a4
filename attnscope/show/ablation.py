"""ablation.png: score, direct effect, effect alone and effect together of every head, side by side. L layer, H head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from attnscope.figures import Panel, Style, save_metrics
from attnscope.figures.style import Quantity

if TYPE_CHECKING:
    from attnscope.selection import HeadIndex
    from attnscope.study.ablation.effects import Ablation
    from attnscope.study.atlas.atlas import Atlas

PICTURE = "ablation"  # without the suffix of its kind of file
STANDS_IN = {
    "mean": "mean ablation (over other sequences)",
    "zero": "zero ablation",
    "resample": "resample ablation (another sequence's output)",
}
SMALL = 0.1  # of what heads add: what they take away is drawn as 0 is


@dataclass(frozen=True)
class Shown:
    """What one panel shows: a number per head, NaN or left out for none; scale: panels of one name share its reach."""

    name: str
    unit: str
    values: Mapping[HeadIndex, float]
    scale: str


def save_ablation(
    found: Ablation, folder: Path, heads: Sequence[HeadIndex], atlas: Atlas | None = None, style: Style = Style()
) -> Path:
    """ablation.png of a study; heads: all of the model. The score is that of the atlas' induction probe."""
    facts = found.facts
    task, stands_in = facts["task"], STANDS_IN[facts["replacement"]]
    unit = facts["measure"]["unit"].partition(" per ")[0]
    note = f"task {task['name']}, {task['sequences']} sequences; intact {facts['intact']:.2f} {unit}; {stands_in}"
    style = style.of_model(facts["model"]["name"])
    return save_effects(folder / f"{PICTURE}.{style.image}", heads, shown_of(found, atlas), style, note)


def shown_of(found: Ablation, atlas: Atlas | None = None) -> list[Shown]:
    """The panels of a study: what was measured of score, direct, alone and together."""
    alone: dict[HeadIndex, float] = {}
    together: dict[HeadIndex, float] = {}
    for heads, effect_S in found.effects.items():
        if len(heads) == 1:
            alone[heads[0]] = float(effect_S.mean())
    for one in found.asked.named:
        for head in one.heads if len(one.heads) > 1 else ():
            together[head] = max(together.get(head, -np.inf), float(found.effect(one).mean()))
    unit = found.facts["measure"]["unit"]
    panels = [*_scores(found, atlas), Shown("direct", "logits of the right token", found.direct or {}, "direct")]
    panels.append(Shown("alone", f"{unit} without it", alone, "effect"))
    panels.append(Shown("together", f"{unit} without its costliest set", together, "effect"))
    return [one for one in panels if one.values]


def _scores(found: Ablation, atlas: Atlas | None) -> list[Shown]:
    """The induction probe of the task's period, or of the first that was run."""
    probes = [one for one in atlas.findings if one.probe.startswith("induction")] if atlas else []
    period = found.facts["task"].get("period")
    one = next((one for one in probes if one.probe == f"induction p{period}"), next(iter(probes), None))
    if one is None or atlas is None:
        return []
    values = dict(zip(atlas.heads, one.effects.effect.tolist(), strict=True))
    return [Shown(one.probe, f"above {one.against}", values, "score")]


def save_effects(
    path: Path, heads: Sequence[HeadIndex], shown: Sequence[Shown], style: Style, note: str = "", title: str = ""
) -> Path:
    """Draw the panels; heads: all of the model. Raises UsageError for a folder that cannot be written."""
    layers = sorted({layer for layer, _ in heads})
    title = style.headed(title or f"What {len(heads)} heads do, and what is lost without them")
    panels = effect_panels(heads, shown)
    return save_metrics(path, panels, style, layer_labels=layers, title=title, note=note)


def effect_panels(heads: Sequence[HeadIndex], shown: Sequence[Shown]) -> list[Panel]:
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
