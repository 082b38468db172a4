"""ablation.png: what each set costs, next to random ones; ablation_heads.png: score, direct effect, cost of each head.

L layer, H head.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope import figures
from attnscope.figures import Panel, SetCost, Style, save_metrics
from attnscope.figures.style import Quantity, count
from attnscope.studies.atlas import NAMED_BY
from attnscope.utils.display import shortened

if TYPE_CHECKING:
    from attnscope.model.selection import HeadIndex
    from attnscope.studies.ablation import Ablation
    from attnscope.studies.atlas import Atlas

PICTURE, OF_HEADS = "ablation", "ablation_heads"  # without the suffix of their kind of file
MOST_SETS = 40  # bars of a picture
STANDS_IN = {
    "mean": "mean ablation (over other sequences)",
    "zero": "zero ablation",
    "resample": "resample ablation (another sequence's output)",
}
LONGEST_SET = 32  # letters of a set's name
SMALL = 0.1  # of what heads add: what they take away is drawn as 0 is


@dataclass(frozen=True)
class Shown:
    """What one panel shows: a number per head, NaN or left out for none; scale: panels of one name share its reach."""

    name: str
    unit: str
    values: Mapping[HeadIndex, float]
    scale: str


def save_ablation(
    record: Ablation,
    folder: Path,
    heads: Sequence[HeadIndex],
    atlas: Atlas | None = None,
    style: Style = Style(),
    costs: Sequence[SetCost] | None = None,
) -> list[Path]:
    """The pictures of a study; heads: all of the model. costs: of its sets, where its table was read from a folder.

    A score is of the probe that names the heads of a set: a set that is a role of the atlas, or selected by one.
    """
    facts = record.facts
    task, stands_in = facts["task"], STANDS_IN[facts["replacement"]]
    unit = facts["measure"]["unit"].partition(" per ")[0]
    note = f"task {task['name']}, {task['sequences']} sequences; intact {facts['intact']:.2f} {unit}; {stands_in}"
    style = style.of_model(facts["model"]["name"])
    costs = costs_of(record.table().to_pydict()) if costs is None else costs
    left = f"the first {MOST_SETS} of {len(costs)} sets" * (len(costs) > MOST_SETS)
    interval = "in black 95 % intervals for all rows at once" * any(one.interval[0] == one.interval[0] for one in costs)
    said = "; ".join(filter(None, (note, interval, left)))
    paths = [folder / f"{name}.{style.image}" for name in (PICTURE, OF_HEADS)]
    title = f"What is lost without {count(len(costs), 'set')} of heads"
    figures.save_sets(paths[0], costs[:MOST_SETS], style, title=title, note=said, unit=facts["measure"]["unit"])
    if shown := shown_of(record, atlas):
        save_effects(paths[1], heads, shown, style, note)
    return paths[: 1 + bool(shown)]


def costs_of(rows: Mapping[str, Sequence[Any]]) -> list[SetCost]:
    """A bar per named set of an ablation's table, in its order."""
    columns = ("set", "condition", "heads", "effect", "low_all", "high_all", "random_low", "random_high")
    absent = [None] * len(rows["set"])
    every = zip(*(rows.get(name, absent) for name in columns), strict=True)
    return [
        SetCost(_set_name(str(name), str(heads)), _end(effect), (_end(low), _end(high)), (_end(least), _end(most)))
        for name, condition, heads, effect, low, high, least, most in every
        if condition == "together"
    ]


def _set_name(name: str, heads: str) -> str:
    """`induction, 3 heads`; a head alone by its name."""
    several = len(heads.split())
    return name if several < 2 and name else f"{shortened(name, LONGEST_SET)}, {count(several, 'head')}"


def _end(value: float | None) -> float:
    return math.nan if value is None else float(value)


def shown_of(record: Ablation, atlas: Atlas | None = None) -> list[Shown]:
    """The panels of a study: what was measured of score, direct and alone."""
    alone: dict[HeadIndex, float] = {}
    for heads, effect_S in record.effects.items():
        if len(heads) == 1:
            alone[heads[0]] = float(effect_S.mean())
    unit = record.facts["measure"]["unit"]
    panels = [*_scores(record, atlas), Shown("direct", "logits of the right token", record.direct or {}, "direct")]
    panels.append(Shown("alone", f"{unit} without it", alone, "effect"))
    return [one for one in panels if one.values]


def _scores(record: Ablation, atlas: Atlas | None) -> list[Shown]:
    """The probe that names each role by which the sets were chosen; of several periods the task's, else the first."""
    if atlas is None:
        return []
    said = [f"@{one.name}" for one in record.asked.named]
    roles = [role for role in NAMED_BY if any(re.search(rf"@{re.escape(role)}(?![\w-])", name) for name in said)]
    period, shown = record.facts["task"].get("period"), dict[str, Shown]()
    for probe, against in (NAMED_BY[role] for role in roles):
        probes = [one for one in atlas.findings if one.probe.partition(" p")[0] == probe and one.against == against]
        one = next((one for one in probes if one.probe == f"{probe} p{period}"), next(iter(probes), None))
        if one is not None:
            values = dict(zip(atlas.heads, one.effects.effect.tolist(), strict=True))
            shown[one.probe] = Shown(one.probe, f"above {one.against}", values, "score")
    return list(shown.values())


def save_effects(
    path: Path, heads: Sequence[HeadIndex], shown: Sequence[Shown], style: Style, note: str = "", title: str = ""
) -> Path:
    """Draw the panels; heads: all of the model. Raises UsageError for a folder that cannot be written."""
    layers = sorted({layer for layer, _ in heads})
    title = title or f"What {len(heads)} heads do, and what is lost without them"
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
