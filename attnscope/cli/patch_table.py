"""What `patch` shows on a terminal: a row per patch, and what to know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope import cells
from attnscope.cli import output
from attnscope.cli.rounding import rounding_notes
from attnscope.intervene.what import SHARED

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from attnscope.study.patching.effects import PatchedPairs

ORDERED = ("layers", "positions", "layers,positions")  # that keep the model's or the text's order
EFFECT = "effect: what the answer loses where the heads are as in the corrupted text"
RESTORED = "restored: what the answer of the corrupted text gains where they are as in TEXT"
SHARE = "share: of the gap between the two texts, 0 as the text that is patched, 1 as the other"
GROUPS = "the heads of a kv group share keys and values, and are patched together"
ESTIMATE = "estimate: to first order, from one backward pass"


def to_know(found: PatchedPairs) -> list[str]:
    """What a reader of the table has to know beside it, and what was measured without a patch."""
    facts, unit = found.facts, found.facts["measure"]["unit"]
    lines = [f"{EFFECT}, in {unit}", RESTORED]
    lines += [SHARE] if found.gap is not None else ["there is no share: the two texts have the same answer"]
    if found.gap is not None and found.gap < 0:
        lines.append("the corrupted text makes the answer better: there is nothing to lose by it")
    lines += [GROUPS] * (facts["what"] in SHARED)
    if found.random:
        row = found.table().to_pylist()[0]
        above = cells.percent(row["percentile"])
        lines.append(f"{len(found.random)} sets of as many other heads: {above} of them cost less")
    if found.estimates is not None:
        rank = facts["rank_correlation"]
        said = (
            "they are equal, or too few for an order"
            if rank is None
            else f"rank correlation with what was measured {rank:.2f}"
        )
        lines.append(f"{ESTIMATE}; {facts['tried']} patches were run: {said}")
    if any(pair.alike for pair in found.pairs):
        lines.append("a text that is patched from itself loses 0, and was not run")
    lines += rounding_notes(facts, found.statistics["effect"])
    if facts["unshared"]:
        lines.append(f"the passes were unshared: {facts['unshared']}")
    count = f"{len(found.pairs)} pair{'s' * (len(found.pairs) > 1)}"
    return [*lines, f"intact {facts['intact']:.3f}, corrupted {facts['corrupted']:.3f} {unit}, {count}"]


def shown(found: PatchedPairs, top: int | None) -> RichTable:
    """A row per patch."""
    rows, sheet = found.table().to_pylist(), output.sheet()
    first = "effect" if found.estimates is None else "estimate"
    if found.facts["over"] not in ORDERED:
        rows.sort(key=lambda row: -(row[first] if row[first] is not None else -np.inf))
    intervals = any(row["low"] is not None for row in rows)
    interval, shares, estimates = " [95 %]" * intervals, found.gap is not None, found.estimates is not None
    titles = ["patch", "effect" + interval, *["p"] * intervals, *["share"] * shares]
    titles += ["restored" + interval, *["share"] * shares, *["estimate"] * estimates]
    for title in titles:
        sheet.add_column(title, justify="left" if title == "patch" or "[" in title else "right", no_wrap=True)
    for row in rows[:top]:
        cell: list[Any] = [output.one_line(row["set"]), _with_interval(row, "effect", "low", "high")]
        cell += [cells.p_value(row["p"])] * intervals + [cells.number(row["normalised"])] * shares
        cell.append(_with_interval(row, "restored", "restored_low", "restored_high"))
        cell += [cells.number(row["restored_normalised"])] * shares
        sheet.add_row(*cell, *[cells.signed(row["estimate"], 3)] * estimates)
    return sheet


def _with_interval(row: dict[str, Any], value: str, low: str, high: str) -> str:
    if row[value] is None:
        return cells.MISSING
    ends = f" [{cells.number(row[low])}, {cells.number(row[high])}]" if row[low] is not None else ""
    return cells.signed(row[value], 3) + ends
