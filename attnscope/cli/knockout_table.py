"""What `knockout` shows on a terminal: a row per cut, the text coloured by each key's effect, and what to know."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from attnscope.cli.intervals import effects, interval_notes
from attnscope.cli.rounding import rounding_notes
from attnscope.utils import display as cells
from attnscope.utils.display import Column, Row, Sheet, number_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from attnscope.figures.terminal import Prose
    from attnscope.model.geometry import Geometry
    from attnscope.studies.knockout_records import KnockoutResult as Knocked
    from attnscope.studies.knockout_records import NullKind

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
    """What a reader of the table has to know, and what was measured without a cut."""
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
    from attnscope.studies.knockout import SEVERAL

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


def cuts_sheet(found: Knocked, top: int | None) -> Sheet:
    """A row per cut."""
    rows, intervals = found.table().to_pylist(), has_intervals(found)
    columns = [
        Column("cut", name="set", align="left"),
        Column("mass", partial(cells.number, decimals=3)),
        effects("effect", len(rows), intervals),
    ]
    columns += [Column("p", cells.p_value), Column("positive", cells.percentage)] * intervals
    kinds = [kind for kind in ALIKE if any(row[f"n_{kind}"] for row in rows)]
    if intervals:  # they leave room for p alone
        columns += [Column(f"{ALIKE[kind].removeprefix('other ')}: p", cells.p_value, f"p_{kind}") for kind in kinds]
        return Sheet(rows[:top], columns)
    # The effects of other heads are per weight, which no interval of the table is.
    titles = {"permuted": "other keys: 95 %, p", "heads": "other heads: p"}
    rows = [{**row, "permuted": _effects_and_p(row), "heads": cells.p_value(row["p_heads"])} for row in rows]
    return Sheet(rows[:top], [*columns, *(Column(titles[kind], name=kind) for kind in kinds)])


def _effects_and_p(row: Row) -> str:
    """`[-0.020, 0.010] .047`: where the effects of other keys lie, and p; p alone where there are no such keys."""
    p = cells.p_value(row["p_permuted"])
    if row["null_permuted"] is None:
        return p
    return f"{cells.interval(row['low_permuted'], row['high_permuted'])} {p}"


def has_intervals(found: Knocked) -> bool:
    """Whether there are texts enough for an interval of any effect."""
    from attnscope.studies.statistics import FEWEST

    return bool((found.statistics["n"] >= FEWEST).any())


def coloured(found: Knocked) -> Prose:
    """The text, each key by what its cut costs; keys that were not cut, or that no row sees, have no colour."""
    from attnscope.figures.colours import Limits
    from attnscope.figures.terminal import Prose

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
    from attnscope.studies.knockout_records import key_name

    return key_name(found.cases[0], place)
