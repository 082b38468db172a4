"""probes.png: every probe of an atlas as a layers x heads map of its effects. L layer, H head."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from attnscope.figures import Panel, Style, save_metrics
from attnscope.study.roles import LEAST

if TYPE_CHECKING:
    from attnscope.study.atlas import Atlas
    from attnscope.study.findings import Finding


def save_probes(atlas: Atlas, path: Path, style: Style = Style()) -> Path:
    """Draw an atlas; heads whose lower bound names nothing stand behind grey."""
    layers = sorted({layer for layer, _ in atlas.heads})
    first: dict[str, Finding] = {}
    for one in atlas.findings:
        first.setdefault(one.probe, one)
    panels = [probe_panel(atlas, one, layers) for one in first.values()]
    title = style.headed(f"Probes of {len(atlas.heads)} heads in {len(layers)} layers")
    note = f"effect: score minus null; behind grey: a lower bound for all heads at once below {LEAST}"
    return save_metrics(path, panels, style, layer_labels=layers, title=title, note=note)


def probe_panel(atlas: Atlas, finding: Finding, layers: list[int]) -> Panel:
    """The effects of one contrast; layers: those of the atlas, in order."""
    place = np.array([layers.index(layer) for layer, _ in atlas.heads])
    head = np.array([head for _, head in atlas.heads])
    effect_LH, low_LH = (np.full((len(layers), int(head.max()) + 1), np.nan) for _ in range(2))
    effect_LH[place, head], low_LH[place, head] = finding.effects.effect, finding.effects.low_all
    return Panel(
        name=finding.probe,
        values_LH=effect_LH,
        low=0.0,
        high=1.0,
        unit=f"above {finding.against}",
        behind_LH=~(np.nan_to_num(low_LH, nan=-1.0) >= LEAST),
    )
