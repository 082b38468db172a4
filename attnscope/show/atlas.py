"""probes.png: every probe of an atlas as a layers x heads map of its effects; head_js.png: how far apart heads are.

L layer, H head, N head of all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from attnscope.figures import Pairs, Panel, Style, save_metrics, save_pairs
from attnscope.figures.style import ROLE_COLOURS, count
from attnscope.studies.atlas import LEAST
from attnscope.studies.head_distances import clustered
from attnscope.utils.display import head_name

if TYPE_CHECKING:
    from attnscope.studies.atlas import Atlas, Finding
    from attnscope.studies.head_distances import OnTexts

OTHER_ROLE = "#000000"
PROBES, HEAD_JS = "probes", "head_js"  # pictures, without the suffix of their kind of file


def save_probes(atlas: Atlas, folder: Path, name: str, style: Style = Style()) -> Path:
    """Draw an atlas into a folder; heads whose lower bound names nothing are hatched. name: of the model.

    A probe that names no head has no panel, unless none names any; the note lists them.
    """
    layers = sorted({layer for layer, _ in atlas.heads})
    first: dict[str, Finding] = {}
    for one in atlas.findings:
        first.setdefault(one.probe, one)
    kinds = list(dict.fromkeys(_kind(name) for name in first))
    names = sorted(first, key=lambda name: kinds.index(_kind(name)))
    every = [probe_panel(atlas, first[name], layers) for name in names]
    panels = [one for one in every if one.hatched_LH is not None and not one.hatched_LH.all()] or every
    title = f"Probes of {len(atlas.heads)} heads in {len(layers)} layers"
    note = probes_note(atlas, [one.name for one in every if all(one is not other for other in panels)])
    path = folder / f"{PROBES}.{style.image}"
    return save_metrics(path, panels, style.of_model(name), layer_labels=layers, title=title, note=note)


def probes_note(atlas: Atlas, left_out: Sequence[str]) -> str:
    """What numbers and hatching mean, on how many sequences they rest, and the probes without a panel."""
    sequences, seed = (atlas.facts.get(name) for name in ("sequences", "seed"))
    said = [f"{sequences} sequences"] * isinstance(sequences, int) + [f"seed {seed}"] * isinstance(seed, int)
    lines = [", ".join(["effect: score minus null", *said])]
    lines.append(f"hatched: the lower bound for all heads at once is below {LEAST}, which names no role")
    lines += [f"without a panel, for no head's bound reaches {LEAST}: {'; '.join(left_out)}"] * bool(left_out)
    return "\n".join(lines)


def _kind(probe: str) -> str:
    """The probe without its period: its panels are drawn side by side."""
    return probe.partition(" p")[0]


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
        hatched_LH=~(np.nan_to_num(low_LH, nan=-1.0) >= LEAST),
    )


def save_head_js(found: OnTexts, atlas: Atlas, path: Path, style: Style = Style()) -> Path:
    """Draw how far apart all heads are on texts, alike ones side by side, with the colours of their roles."""
    tree, roles = clustered(found.js_NN), [atlas.roles.get(head, ()) for head in found.heads]
    named = [one for one in atlas.by_role() if any(one in names for names in roles)]
    legend = {role: role_colour(role) for role in named}
    pairs = Pairs(
        values_NN=found.js_NN,
        labels=[head_name(*head) for head in found.heads],
        leaves=tree.leaves,
        merges=tree.merges,
        colours=[[legend[role] for role in names] for names in roles],
        legend=legend,
    )
    note = f"Jensen-Shannon divergence, mean over the rows of {count(found.texts, 'text')}; tree: average linkage"
    title = f"How far apart {len(roles)} heads are"
    return save_pairs(path, pairs, style, title=title, note=note, unit="JS, bits")


def role_colour(role: str) -> str:
    """Of a role of an atlas."""
    return ROLE_COLOURS.get(role, OTHER_ROLE)
