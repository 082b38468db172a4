"""patching.png: what patches cost and give back, by heads, by layers, by positions, or by both of these."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from attnscope.figures import About, Style
from attnscope.show.ablation import Shown, save_effects
from attnscope.utils.display import shortened

if TYPE_CHECKING:
    from attnscope.figures.pictures import Grid, Lines
    from attnscope.studies.patching import PatchedPairs

PICTURE = "patching"  # without the suffix of its kind of file
TITLES = {"output": "outputs", "pattern": "patterns", "key": "keys", "value": "values"}
COSTS, BACK = "lost", "given back"


def save_patching(record: PatchedPairs, folder: Path, style: Style = Style()) -> Path | None:
    """The picture of patches; None where all was patched at once. Raises UsageError for a folder it cannot write."""
    from attnscope.figures.pictures import save_grid, save_lines

    facts, path = record.facts, folder / f"{PICTURE}.{style.image}"
    style = style.of(About(line=_line(record), command=style.about.command))
    title = f"Which {TITLES[facts['what']]} carry the difference"
    if facts["over"] == "none":
        return None
    if facts["over"] in ("heads", "kv"):
        return _heads(record, path, style, title)
    if facts["over"] == "layers,positions":
        return save_grid(path, _grid(record), style, style.headed(title))
    return save_lines(path, _lines(record), style, style.headed(title))


def _line(record: PatchedPairs) -> str:
    """What the picture is of."""
    count = len(record.pairs)
    texts = f"{count} pairs" if count > 1 else f"answer {shortened(record.pairs[0].clean.answer_text, 24)}"
    gap = "" if record.gap is None else f"; the texts differ by {record.gap:.2f} {record.facts['measure']['unit']}"
    return f"{record.facts['model']['name']}, {texts}{gap}"


def _values(record: PatchedPairs) -> tuple[np.ndarray, np.ndarray, str]:
    """What each patch costs and gives back, and the unit: shares of the gap where there is one. Estimates where
    patches were not run."""
    unit = record.facts["measure"]["unit"] if record.gap is None else "share of the gap"
    if record.estimates is not None:
        both = record.estimates[::2].mean(0), -record.estimates[1::2].mean(0)
        cost, back = both if record.gap is None else (record.normalised(one) for one in both)
        return cost, back, unit
    cost_name, back_name = ("effect", "restored") if record.gap is None else ("normalised", "restored_normalised")
    return record.statistics[cost_name], record.statistics[back_name], unit


def _heads(record: PatchedPairs, path: Path, style: Style, title: str) -> Path:
    """Layers x heads; a kv group's heads have the effect of their group."""
    *both, unit = _values(record)
    panels = [
        Shown(name, unit, {head: float(value) for one, value in pairs for head in one.patch.heads}, "effect")
        for name, values in zip((COSTS, BACK), both, strict=True)
        for pairs in [list(zip(record.asked, values, strict=True))]
    ]
    return save_effects(path, sorted(panels[0].values), panels, style, title=title)


def _lines(record: PatchedPairs) -> Lines:
    """In the order of the table."""
    from attnscope.figures.pictures import Lines

    *both, unit = _values(record)
    ends = [np.full((2, len(both[0])), np.nan)] * 2
    if record.estimates is None:
        named = ("low_all", "high_all") if record.gap is None else ("normalised_low", "normalised_high")
        ends = [np.stack([record.statistics[of + end] for end in named]) for of in ("", "restored_")]
    axis = "layer" if record.facts["over"] == "layers" else "token that is patched"
    series = {name: (values, end) for name, values, end in zip((COSTS, BACK), both, ends, strict=True)}
    return Lines([one.patch.name for one in record.asked], series, unit, axis)


def _grid(record: PatchedPairs) -> Grid:
    """Layers x positions."""
    from attnscope.figures.pictures import Grid

    *both, unit = _values(record)
    layers = sorted({one.layer for one in record.asked if one.layer is not None})
    names = [one.patch.name.partition(" ")[2] for one in record.asked if one.layer == layers[0]]
    shape = len(layers), len(names)
    panels = {name: values.reshape(shape) for name, values in zip((COSTS, BACK), both, strict=True)}
    return Grid([f"L{layer}" for layer in layers], names, panels, unit)
