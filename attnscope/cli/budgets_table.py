"""What `knockout --keep` shows on a terminal: a row per budget and set of heads, and what to know to read it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnscope import cells
from attnscope.cli import output
from attnscope.cli.rounding import rounding_notes

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from attnscope.model.geometry import Geometry
    from attnscope.study.budgets.effects import BudgetCosts

KEPT = "kept: the share of the keys a row sees that it keeps, mean over rows, heads and texts"
TOP = "top:N knows the query of each row: a cache chooses before it, and loses more"
OWN = "top and h2o choose for each head: of a shared kv head a cache stores what any of its heads keeps"


def budget_notes(found: BudgetCosts, geometry: Geometry, below: float) -> list[str]:
    """What a reader of the table has to know, which heads can bear each budget, and what was measured without one."""
    facts = found.facts
    lines = [f"effect: what is lost where these heads keep no other keys, in {found.unit}", KEPT]
    kinds = {one.partition(":")[0] for one in found.kinds}
    lines += [TOP] * ("top" in kinds)
    if kinds & {"top", "h2o"} and any(layer.kv_heads < layer.heads for layer in geometry.attention_layers):
        lines.append(OWN)
    bare = [layer.index for layer in geometry.layers if not layer.attention]
    if bare:
        lines.append(f"{len(bare)} of {len(geometry.layers)} layers have no attention, and keep no keys")
    lines += rounding_notes(facts, found.statistics["effect"])
    if facts["unshared"]:
        lines.append(f"the passes were unshared: {facts['unshared']}")
    lines += bearable_lines(found, below) if facts["over"] != "none" else []
    texts = f"{len(found.cases)} text{'s' * (len(found.cases) > 1)}"
    return [*lines, f"intact {facts['intact']:.3f} {found.unit}, {texts}"]


def bearable_lines(found: BudgetCosts, below: float) -> list[str]:
    """The heads that can bear each budget, as --select takes them."""
    every = {head for one in found.asked for head in one.budget.heads}
    interval = " (upper end of the interval)" * bool((found.statistics["high"] == found.statistics["high"]).any())
    alone = {"heads": "alone", "kv": "by kv groups alone", "layers": "by layers alone"}[found.facts["over"]]
    lines = []
    for kind, heads in found.bearable(below).items():
        count = len(found.bearing(kind, below))
        said = f"{kind}: {count} of {len(every)} heads, {alone}, lose less than {below:g} {found.unit}{interval}"
        lines.append(f"{said}: --select {heads}" if heads else said)
    return lines


def budgets_sheet(found: BudgetCosts, top: int | None) -> RichTable:
    """A row per budget and set; all heads together first, heads by effect, layers in order."""
    rows, sheet = found.table().to_pylist(), output.sheet()
    order = {kind: place for place, kind in enumerate(found.kinds)}
    by_effect = found.facts["over"] in ("heads", "kv")
    rows.sort(key=lambda row: (order[row["keep"]], row["layer"] is not None, -row["effect"] if by_effect else 0))
    intervals = any(row["low"] is not None for row in rows)
    for title in ["keep", "set", "kept", "effect" + " [95 %]" * intervals] + ["p"] * intervals:
        left = title in ("keep", "set", "effect [95 %]")
        sheet.add_column(title, justify="left" if left else "right", no_wrap=True)
    for row in rows[:top]:
        cell: list[Any] = [row["keep"], output.one_line(row["set"]), cells.share(row["kept"]), _effect(row)]
        sheet.add_row(*cell, *[cells.p_value(row["p"])] * intervals)
    return sheet


def _effect(row: dict[str, Any]) -> str:
    interval = f" [{cells.number(row['low'], 3)}, {cells.number(row['high'], 3)}]" if row["low"] is not None else ""
    return cells.signed(row["effect"], 3) + interval
