"""An observation's scores as layer x head panels, and in words the tokens that it was asked about.

Shapes: L layer, H head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from attnscope.errors import visible
from attnscope.figures import Depth, Panel, Patches, PatchSheet
from attnscope.figures.style import Quantity, count
from attnscope.metrics.metrics import KNOWN, MASS, Metric, ends, order_of
from attnscope.metrics.roles import NEEDED_ROWS, ROLES
from attnscope.utils.display import head_name, printed, shortened

if TYPE_CHECKING:
    from attnscope.observe.observation import Observation

FIRST = ("mass", "focus", "previous_token", "induction", "duplicate_token", "sink", "entropy")  # of the metrics' panels
LONGEST_NAME = 40  # letters of a model's name, and of an expression
MOST_UNIFORM = 3  # kinds of layer whose uniform value is marked
MOST_OVER = 7  # heads over a picture, which is drawn beside them
FRAMED = 5  # heads of the picture of their mass
NOTHING = 0.005  # of the weight: printed as 0.00


def score_panels(seen: Observation) -> tuple[tuple[int, ...], tuple[Panel, ...]]:
    """The layers with a kept head, and a panel per metric, (L, H) of the kept heads, NaN elsewhere."""
    columns, order = seen.columns, np.flatnonzero(seen.columns.kept)
    layers, panels = np.unique(columns.layer[order]), []
    for name in sorted(columns.scores, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST)):
        if len(order):
            values = _by_layer(seen, columns.scores[name].value)
            panels.append(_panel(seen, KNOWN[name], values, columns.scores[name].null[order], layers))
    return tuple(layers.tolist()), tuple(panels)


def depths_of(seen: Observation, names: Sequence[str], sort: str | None) -> tuple[tuple[Depth, ...], str]:
    """Metrics of the kept heads over the layers, and a note; without names that by which heads are sorted.

    Those that were not measured are left out.
    """
    columns, kept = seen.columns, np.flatnonzero(seen.columns.kept)
    first = order_of(sort)[0] if sort else ""
    names = names or [first if first in columns.scores else seen.ranked_by or ""]
    scores = {name: columns.scores[name] for name in names if name in columns.scores}
    depths = tuple(
        Depth(KNOWN[name].title, KNOWN[name].unit, columns.layer[kept], score.value[kept], score.null[kept])
        for name, score in scores.items()
        if np.isfinite(score.value[kept]).any()
    )
    return depths, chosen_words(seen)


def with_rows(
    layers: Sequence[int], panels: Sequence[Panel], without: Mapping[int, str]
) -> tuple[tuple[int, ...], tuple[Panel, ...]]:
    """The layers and panels with a grey row for each layer without attention; without: {layer: what it is}."""
    if not without or not panels:
        return tuple(layers), tuple(panels)
    every = sorted({*layers, *without})
    row_of, names = [every.index(layer) for layer in layers], tuple(without.get(layer, "") for layer in every)
    spread = []
    for panel in panels:
        values_LH, few_L = np.full((len(every), panel.values_LH.shape[1]), np.nan), np.zeros(len(every), bool)
        values_LH[row_of], few_L[row_of] = panel.values_LH, panel.few_L or False
        first = tuple((row_of[row], head) for row, head in panel.first)
        spread.append(replace(panel, values_LH=values_LH, few_L=tuple(few_L.tolist()), first=first, without_L=names))
    return tuple(every), tuple(spread)


def _by_layer(seen: Observation, values: np.ndarray) -> np.ndarray:
    """A value of all heads as (L, H) of the kept ones, NaN elsewhere."""
    order = np.flatnonzero(seen.columns.kept)
    rows, number = _places(seen)
    values_LH = np.full((rows.max() + 1, number.max() + 1), np.nan)
    values_LH[rows, number] = values[order]
    return values_LH


def _places(seen: Observation) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each kept head in a panel."""
    columns, order = seen.columns, np.flatnonzero(seen.columns.kept)
    number = np.where(columns.head[order] < 0, columns.kv_head[order], columns.head[order])
    return np.unique(columns.layer[order], return_inverse=True)[1], number


def mass_panels(seen: Observation) -> tuple[tuple[Panel, ...], str]:
    """The mass on the named keys, and, where uniform attention differs from head to head, how far it is above it.

    With a note: which tokens, and the heads furthest above uniform attention, which are framed. Nothing without keys.
    """
    mass, order = seen.columns.scores.get(MASS.id), np.flatnonzero(seen.columns.kept)
    if mass is None or not np.isfinite(mass.value[order]).any():
        return (), ""
    # the heads furthest above uniform attention are framed: in a short text every head gives much
    layers, above = np.unique(seen.columns.layer[order]).tolist(), mass.value - mass.null
    best = [head for head in seen.kept_heads(MASS.id)[:FRAMED] if math.isfinite(head.score[MASS.id])]
    first = tuple((layers.index(head.layer), head.kv_head if head.head is None else head.head) for head in best)
    high, uniform = float(np.nanmax(mass.value[order])) or 1.0, np.unique(mass.null[order].round(3))
    uniform = uniform[np.isfinite(uniform)]
    # the whole range only where it is nearly reached: small masses would all have the colour of 0
    panels = [
        Panel(
            name="mass",
            values_LH=_by_layer(seen, mass.value),
            low=0.0,
            high=1.0 if high >= 0.9 else high,
            unit=MASS.unit,
            uniform=tuple(uniform.tolist()) if len(uniform) <= MOST_UNIFORM else (),
            first=first,
            values_printed=True,
        )
    ]
    if len(uniform) > 1:  # elsewhere the second picture is the first with another zero
        reach, values_LH = float(np.nanmax(abs(above[order]))), _by_layer(seen, above)
        signed: Quantity = "logit"
        panels.append(
            Panel(
                "mass − uniform", values_LH, -reach, reach, MASS.unit, quantity=signed, first=first, values_printed=True
            )
        )
    said = ", ".join(f"{n} {head.name} {printed(head.score[MASS.id])}" for n, head in enumerate(best, start=1))
    return tuple(panels), f"{chosen_words(seen)}\nframed, furthest above uniform attention: {said}"


def patch_sheets(seen: Observation, names: Sequence[str]) -> tuple[PatchSheet, ...]:
    """For each picture that was given with the text, what the chosen queries' weights on its patches are drawn from.

    names: the heads, or none for those that look most at the pictures, without those that hardly look. Nothing where
    no weights per token were kept, where they are of keys alone, and where the patches' places are not known.
    """
    patches, on_keys = seen.queries.medium.patches, seen.chosen.query is None and seen.chosen.key is not None
    if not seen.per_token or on_keys or any(patch.box is None for patch in patches.values()):
        return ()
    heads = [
        (head_name(key.layer, head, seen.view.by_kv), np.asarray(weight_T))
        for key, kept in seen.per_token.items()
        for head, weight_T in zip(kept.heads, kept.weight, strict=True)
    ]
    every = np.array(list(patches), int)
    heads.sort(key=lambda head: -np.nansum(head[1][every]))
    looking = [head for head in heads[:MOST_OVER] if np.nansum(head[1][every]) >= NOTHING]
    shown = [head for head in heads if head[0] in names] or looking or heads[:1]
    return tuple(_patch_sheet(seen, number, shown, len(heads)) for number in range(len(seen.queries.medium.images)))


def _patch_sheet(seen: Observation, number: int, heads: Sequence[tuple[str, np.ndarray]], of: int) -> PatchSheet:
    patches, images = seen.queries.medium.patches, seen.queries.medium.images
    elsewhere = "on the text" if seen.queries.text else "on other tokens"
    at = [place for place, patch in patches.items() if patch.picture == number]

    def mass_words(weight_T: np.ndarray) -> str:
        here, every, all_T = (float(np.nansum(part)) for part in (weight_T[at], weight_T[list(patches)], weight_T))
        others = f", {every - here:.2f} on the others" * (len(images) > 1)
        return f"{here:.2f} on the picture{others}, {all_T - every:.2f} {elsewhere}"

    which = f"picture {number + 1} of {len(images)}" if len(images) > 1 else "the picture"
    first = f"; the {len(heads)} of {of} heads that look most at it" * (len(heads) < of and seen.view.heads is None)
    box_N4 = np.array([patches[place].box for place in at])
    twice = float(np.prod(box_N4[:, 2:] - box_N4[:, :2], 1).sum()) > 1.5  # its tiles, and the whole in small
    each = "tokens of its parts and of the whole are added up" if twice else "a patch is a token"
    return PatchSheet(
        image=images[number],
        box_N4=box_N4,
        heads=tuple(Patches(weight_T[at], name, mass_words(weight_T)) for name, weight_T in heads),
        title=f"Attention weights on {which}",
        note=f"{chosen_words(seen) or 'mean over all queries'}; {each}{first}",
    )


def _panel(seen: Observation, metric: Metric, values: np.ndarray, null: np.ndarray, layers: np.ndarray) -> Panel:
    """A metric on its whole range, with what uniform attention scores and from how many rows it was measured."""
    role = next((row for row in ROLES if metric.id.startswith(row.name.replace("-", "_"))), None)
    kind, needed = (role.rows, role.needed) if role else (metric.rows, NEEDED_ROWS)
    rows = [seen.support[layer][kind] for layer in layers.tolist()]
    finite = values[np.isfinite(values)]  # for a metric with an open range: the least and the largest of its values
    measured = (float(finite.min()), float(finite.max())) if finite.size and np.ptp(finite) else (0.0, 1.0)
    low, high = ends(metric, len(seen.prompt)) or measured
    uniform = np.unique(null[np.isfinite(null)].round(2))
    return Panel(
        name=metric.title,
        values_LH=values,
        low=low,
        high=high,
        unit=metric.unit,
        uniform=tuple(uniform.tolist()) if len(uniform) <= MOST_UNIFORM else (),
        few_L=tuple(count < needed for count in rows),
        support=f"{count(min(rows), 'row')}, {needed} needed" if min(rows) < needed else "",
    )


def chosen_words(seen: Observation) -> str:
    """`queries “bank” (2 of 9), keys “Mary” (1 of 9)`, nothing where no tokens were asked about."""
    named = {"queries": (seen.chosen.query, seen.queries), "keys": (seen.chosen.key, seen.keys)}
    return visible(
        ", ".join(
            f"{side} “{shortened(match.expression, LONGEST_NAME)}” ({len(match.positions)} of {len(text)})"
            for side, (match, text) in named.items()
            if match
        )
    )
