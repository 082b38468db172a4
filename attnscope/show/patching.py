"""patching.png: what patches cost and give back, by heads, by layers, by positions, or by both of these."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from attnscope.cells import shortened
from attnscope.figures import About, Style
from attnscope.show.ablation import Shown, save_effects

if TYPE_CHECKING:
    from attnscope.figures.patches import Grid, Lines
    from attnscope.study.patching.effects import PatchedPairs

PICTURE = "patching"  # without the suffix of its kind of file
TITLES = {"output": "outputs", "pattern": "patterns", "key": "keys", "value": "values"}
COSTS, BACK = "lost", "given back"


def save_patching(found: PatchedPairs, folder: Path, style: Style = Style()) -> Path | None:
    """The picture of patches; None where all was patched at once. Raises UsageError for a folder it cannot write."""
    from attnscope.figures.patches import save_grid, save_lines

    facts, path = found.facts, folder / f"{PICTURE}.{style.image}"
    style = style.of(About(line=_line(found), command=style.about.command))
    title = f"Which {TITLES[facts['what']]} carry the difference"
    if facts["over"] == "none":
        return None
    if facts["over"] in ("heads", "kv"):
        return _heads(found, path, style, title)
    if facts["over"] == "layers,positions":
        return save_grid(path, _grid(found), style, style.headed(title))
    return save_lines(path, _lines(found), style, style.headed(title))


def _line(found: PatchedPairs) -> str:
    """What the picture is of."""
    count = len(found.pairs)
    texts = f"{count} pairs" if count > 1 else f"answer {shortened(found.pairs[0].clean.answer_text, 24)}"
    gap = "" if found.gap is None else f"; the texts differ by {found.gap:.2f} {found.facts['measure']['unit']}"
    return f"{found.facts['model']['name']}, {texts}{gap}"


def _values(found: PatchedPairs) -> tuple[np.ndarray, np.ndarray, str]:
    """What each patch costs and gives back, and the unit: shares of the gap where there is one. Estimates where
    patches were not run."""
    unit = found.facts["measure"]["unit"] if found.gap is None else "share of the gap"
    if found.estimates is not None:
        both = found.estimates[::2].mean(0), -found.estimates[1::2].mean(0)
        cost, back = both if found.gap is None else (found.normalised(one) for one in both)
        return cost, back, unit
    cost_name, back_name = ("effect", "restored") if found.gap is None else ("normalised", "restored_normalised")
    return found.statistics[cost_name], found.statistics[back_name], unit


def _heads(found: PatchedPairs, path: Path, style: Style, title: str) -> Path:
    """Layers x heads; a kv group's heads have the effect of their group."""
    *both, unit = _values(found)
    panels = [
        Shown(name, unit, {head: float(value) for one, value in pairs for head in one.patch.heads}, "effect")
        for name, values in zip((COSTS, BACK), both, strict=True)
        for pairs in [list(zip(found.asked, values, strict=True))]
    ]
    return save_effects(path, sorted(panels[0].values), panels, style, title=title)


def _lines(found: PatchedPairs) -> Lines:
    """In the order of the table."""
    from attnscope.figures.patches import Lines

    *both, unit = _values(found)
    ends = [np.full((2, len(both[0])), np.nan)] * 2
    if found.estimates is None:
        named = ("low_all", "high_all") if found.gap is None else ("normalised_low", "normalised_high")
        ends = [np.stack([found.statistics[of + end] for end in named]) for of in ("", "restored_")]
    axis = "layer" if found.facts["over"] == "layers" else "token that is patched"
    series = {name: (values, end) for name, values, end in zip((COSTS, BACK), both, ends, strict=True)}
    return Lines([one.patch.name for one in found.asked], series, unit, axis)


def _grid(found: PatchedPairs) -> Grid:
    """Layers x positions."""
    from attnscope.figures.patches import Grid

    *both, unit = _values(found)
    layers = sorted({one.layer for one in found.asked if one.layer is not None})
    names = [one.patch.name.partition(" ")[2] for one in found.asked if one.layer == layers[0]]
    shape = len(layers), len(names)
    panels = {name: values.reshape(shape) for name, values in zip((COSTS, BACK), both, strict=True)}
    return Grid([f"L{layer}" for layer in layers], names, panels, unit)
