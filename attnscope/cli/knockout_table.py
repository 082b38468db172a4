"""What `knockout` shows on a terminal: a row per cut, the text coloured by each key's effect, and what to know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope import cells
from attnscope.cli import output
from attnscope.cli.intervals import interval_notes, with_interval
from attnscope.cli.rehearsal import number_of
from attnscope.cli.rounding import rounding_notes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table as RichTable

    from attnscope.figures.prose import Prose
    from attnscope.model.geometry import Geometry
    from attnscope.study.knockout.records import Knocked, NullKind

EFFECT = "effect: what the answer loses without these edges, positive where the look helped"
NULLS = {
    "permuted": "other keys: where the same weights lie on other keys and are cut there, 95 % of the effects, and p",
    "heads": "other heads: their own strongest looks of like weight, and p of the effect per weight",
}
ALIKE: Mapping[NullKind, str] = {"permuted": "other keys", "heads": "other heads"}
AT_ONCE = "intervals and p: of all cuts at once; positive: in how many texts the look helped"
EDGE = "an edge is cut, and not what it carries: later layers and other positions may still bring that"
SINK = "key 0 is often a sink: to cut it harms whatever the head does"


def notes(found: Knocked, geometry: Geometry) -> list[str]:
    """What a reader of the table has to know beside it, and what was measured without a cut."""
    facts, unit = found.facts, found.facts["measure"]["unit"]
    intact = f"intact {facts['intact']:.3f} {unit}, {len(found.cases)} text{'s' * (len(found.cases) > 1)}"
    return [*cautions(found, geometry), intact]


def cautions(found: Knocked, geometry: Geometry) -> list[str]:
    """How the numbers are read, and what they do not say."""
    facts, unit = found.facts, found.facts["measure"]["unit"]
    lines = [f"{EFFECT}, in {unit}", *[AT_ONCE] * has_intervals(found), *_null_lines(found), EDGE]
    if any(0 in one.keys for one in found.cases):
        lines.append(SINK)
    if facts["emptied"]:
        lines.append(f"rows were left without keys and give 0, in {', '.join(facts['emptied'][:8])}")
    bare = [layer.index for layer in geometry.layers if not layer.attention]
    if bare:
        lines.append(f"{len(bare)} of {len(geometry.layers)} layers have no attention, and nothing is cut in them")
    lines += interval_notes(found.statistics)
    lines += rounding_notes(facts, found.statistics["effect"])
    if facts["unshared"]:
        lines.append(f"the passes were unshared: {facts['unshared']}")
    return lines


def _null_lines(found: Knocked) -> list[str]:
    """What each null is, the least p that its draws can give, and why some cuts have none."""
    if not found.facts["random"]:
        return []
    from attnscope.study.knockout.nulls import SEVERAL

    lines = []
    for kind, name in ALIKE.items():
        counts = [len(null.draws) for null in found.nulls[kind]]
        if any(counts):
            least = cells.p_value((2 if kind == "permuted" else 1) / (1 + max(counts)))
            lines.append(f"{NULLS[kind]}, at least {least} with {number_of(max(counts), 'draw')}")
        of, texts = f"of {number_of(len(found.asked), 'cut')}", ", in some texts or all" * (len(found.cases) > 1)
        lines += [
            f"no {name} to compare {count} {of} with{texts}: {why}"
            for why, count in found.facts["without_null"][kind].items()
            if why != SEVERAL
        ]
        if rounded := sum(map(bool, counts)) - found.table()[f"p_{kind}"].is_valid().to_numpy().sum():
            lines.append(f"no p against {name}, {rounded} {of}: all effects are within rounding")
    return lines


def shown(found: Knocked, top: int | None) -> RenderableType:
    """The table; above it, where keys were cut one by one, the text in the colours of their effects."""
    from rich.console import Group

    table = cuts_sheet(found, top)
    return Group(coloured(found), table) if found.facts["over"] == "keys" else table


def cuts_sheet(found: Knocked, top: int | None) -> RichTable:
    """A row per cut."""
    rows, sheet = found.table().to_pylist(), output.sheet()
    intervals = has_intervals(found)
    kinds = [kind for kind in ALIKE if any(row[f"n_{kind}"] for row in rows)]
    all_cuts = f", all {len(rows)}" * (len(rows) > 1)
    effect = "effect" + f" [95 %{all_cuts}]" * intervals
    titles = ["cut", "mass", effect] + ["p", "positive"] * intervals
    if intervals:
        titles += [f"{ALIKE[kind].removeprefix('other ')}: p" for kind in kinds]
    else:
        titles += [f"{ALIKE[kind]}: {'95 %, p' if kind == 'permuted' else 'p'}" for kind in kinds]
    for title in titles:
        sheet.add_column(title, justify="left" if title == "cut" or "[" in title else "right", no_wrap=True)
    for row in rows[:top]:
        cell: list[Any] = [output.one_line(row["set"]), cells.number(row["mass"], 3), with_interval(row)]
        cell += [cells.p_value(row["p"]), cells.percent(_times(100, row["positive"]))] * intervals
        sheet.add_row(*cell, *[_null(row, kind, intervals) for kind in kinds])
    return sheet


def has_intervals(found: Knocked) -> bool:
    """Whether there are texts enough for an interval of any effect."""
    from attnscope.study.statistics import FEWEST

    return bool((found.statistics["n"] >= FEWEST).any())


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def _null(row: dict[str, Any], kind: str, narrow: bool) -> str:
    """`[-0.020, 0.010] .047`; p alone where there is no room, and of other heads, whose p is of effects per weight."""
    p = cells.p_value(row[f"p_{kind}"])
    if narrow or kind == "heads" or row[f"null_{kind}"] is None:
        return p
    return f"{cells.interval(row[f'low_{kind}'], row[f'high_{kind}'])} {p}"


def coloured(found: Knocked) -> Prose:
    """The text, each key by what its cut costs; keys that were not cut, or that no row sees, have no colour."""
    from attnscope.figures.colours import Limits
    from attnscope.figures.prose import Prose

    case = found.cases[0]
    effect_T = found.by_token()
    largest = int(np.nan_to_num(effect_T, nan=-np.inf).argmax())
    legend = f"largest {cells.effect(effect_T[largest])} {case_name(found, largest)}, »query«"
    marked = {place: "query" for place in case.queries if place < len(case.prompt)}
    limits = Limits(0.0, max(float(np.nanmax(effect_T)), 1e-9))
    title = f"{found.facts['measure']['unit']} lost without each key in {found.where}"
    return Prose(case.prompt.plain, effect_T, limits, marked=marked, summed=False, title=title, legend=legend)


def case_name(found: Knocked, place: int) -> str:
    """A token as the table names it."""
    from attnscope.study.knockout.records import key_name

    return key_name(found.cases[0], place)
