"""What `knockout --keep` shows on a terminal: a row per budget and set of heads, and what to know to read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnscope.cli.intervals import Effect, interval_notes, with_interval
from attnscope.cli.rounding import rounding_notes
from attnscope.model.selection import written_heads
from attnscope.studies.statistics import FEWEST
from attnscope.utils import display as cells
from attnscope.utils.display import Column, Sheet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnscope.model.geometry import Geometry
    from attnscope.model.selection import HeadIndex
    from attnscope.studies.budgets import BudgetCosts

KEPT = "kept: the share of the keys a row sees that it keeps, mean over rows, heads and texts"
TOP = "top:N knows the query of each row: a cache chooses before it, and loses more"
AT_ONCE = "intervals and p: of all rows at once, of bearable heads apart; positive: in how many texts something is lost"
OWN = "top and h2o choose for each head: of a shared kv head a cache stores what any of its heads keeps"


def budget_notes(found: BudgetCosts, geometry: Geometry) -> list[str]:
    """What a reader of the table has to know, which heads can bear each budget, and what was measured without one."""
    facts = found.facts
    lines = [f"effect: what is lost where these heads keep no other keys, in {found.unit}", KEPT]
    lines += [AT_ONCE] * (len(found.cases) >= FEWEST)
    kinds = {one.partition(":")[0] for one in found.kinds}
    lines += [TOP] * ("top" in kinds)
    if kinds & {"top", "h2o"} and any(layer.kv_heads < layer.heads for layer in geometry.attention_layers):
        lines.append(OWN)
    bare = [layer.index for layer in geometry.layers if not layer.attention]
    if bare:
        lines.append(f"{len(bare)} of {len(geometry.layers)} layers have no attention, and keep no keys")
    lines += interval_notes(found.statistics)
    lines += rounding_notes(facts, found.statistics["effect"])
    if facts["unshared"]:
        lines.append(f"the passes were unshared: {facts['unshared']}")
    lines += bearable_lines(found) if facts["over"] != "none" else []
    texts = f"{len(found.cases)} text{'s' * (len(found.cases) > 1)}"
    return [*lines, f"intact {facts['intact']:.3f} {found.unit}, {texts}"]


def bearable_lines(found: BudgetCosts) -> list[str]:
    """The heads that can bear each budget, as --select takes them, which texts chose them, and what they lose together
    on the others."""
    below, first, texts = found.facts["below"], found.facts["choosing_texts"], len(found.cases)
    alone = {"heads": "alone", "kv": "by kv groups alone", "layers": "by layers alone"}[found.facts["over"]]
    by = "upper end of the interval for all at once; where few texts carry the loss, in every text"
    by = f"in every text: intervals take {FEWEST}" if texts < FEWEST else by
    on = f" on the first {first} texts" * bool(first)
    every = {head for one in found.asked for head in one.budget.heads}
    chosen = {one.budget.keep: place for place, one in enumerate(found.asked) if one.condition == "bearable"}
    rows, lines = dict(zip(found.order, found.table().to_pylist(), strict=True)), []
    for kind in found.kinds:
        heads: Sequence[HeadIndex] = () if first else found.bearing(kind, below)
        heads = found.asked[chosen[kind]].budget.heads if kind in chosen else heads
        said = f"{kind}: {len(heads)} of {len(every)} heads, {alone}, lose less than {below:g} {found.unit}{on} ({by})"
        lines.append(said + f": --select {written_heads(heads, found.widths)}" * bool(heads))
        if kind in chosen:
            together, worst = with_interval(rows[chosen[kind]]), float(found.effect_SN[first:, chosen[kind]].max())
            said = f"{kind}: together these lose {together} on the other {texts - first} texts"
            lines.append(f"{said}, {cells.effect(worst)} in the worst of them")
    if not first:
        lines.append(f"what they lose together is another question: from {2 * FEWEST} texts on, half of them answer it")
    return lines


def budgets_sheet(found: BudgetCosts, top: int | None) -> Sheet:
    """A row per budget and set."""
    rows, intervals = found.table().to_pylist(), len(found.cases) >= FEWEST
    at_once = sum(row["condition"] != "bearable" for row in rows)
    heads = {one.budget.keep: one.budget.heads for one in found.asked if one.condition == "bearable"}
    # The heads that can bear a budget are many: how many they are says more than their names.
    rows = [
        {**row, "set": f"{len(heads[row['keep']])} bearable"} if row["condition"] == "bearable" else row for row in rows
    ]
    columns = [
        Column("keep", align="left"),
        Column("set", align="left"),
        Column("kept", cells.share),
        Effect(f"effect [95 %, all {at_once}]" if intervals else "effect"),
    ]
    return Sheet(rows[:top], columns + [Column("p", cells.p_value), Column("positive", cells.percentage)] * intervals)
