"""What `patch` shows on a terminal: a row per patch, and what to know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope import cells
from attnscope.cli import output
from attnscope.cli.intervals import interval_notes, with_interval
from attnscope.cli.rounding import rounding_notes
from attnscope.intervene.what import SHARED

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from attnscope.study.patching.effects import PatchedPairs

EFFECT = "effect: what the answer loses where the heads are as in the corrupted text"
RESTORED = "restored: what the answer of the corrupted text gains where they are as in TEXT"
SHARE = "share: of the gap between the two texts, 0 as the text that is patched, 1 as the other"
AT_ONCE = "intervals of effects and p hold for all patches at once, those of shares for each alone"
POSITIVE = "positive: in how many pairs the effect is above 0"
RANDOM = "(1 + those that cost as much) / (1 + all)"
GROUPS = "the heads of a kv group share keys and values, and are patched together"
SHARES = ("normalised", "normalised_low", "normalised_high")
BACK = ("restored", "restored_low_all", "restored_high_all")
ESTIMATE = "estimate: to first order, from one backward pass"


def to_know(found: PatchedPairs) -> list[str]:
    """What a reader of the table has to know beside it, and what was measured without a patch."""
    facts, unit = found.facts, found.facts["measure"]["unit"]
    lines = [f"{EFFECT}, in {unit}", RESTORED]
    lines += [SHARE] if found.gap is not None else [f"there is no share: {found.no_share}"]
    lines += [AT_ONCE] * has_intervals(found) + [POSITIVE] * (has_intervals(found) and found.gap is None)
    if found.gap is not None and found.gap < 0:
        lines.append("the corrupted text makes the answer better: there is nothing to lose by it")
    lines += [GROUPS] * (facts["what"] in SHARED)
    if found.random:
        row = found.table().to_pylist()[0]
        sets = f"{row['n_random']} set{'s' * (row['n_random'] > 1)}"
        lines.append(f"{sets} of as many other heads: p {cells.p_value(row['p_random'])}, {RANDOM}")
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
    lines += rounding_notes(facts, found.statistics["effect"]) + interval_notes(found.statistics, "pairs")
    if facts["unshared"]:
        lines.append(f"the passes were unshared: {facts['unshared']}")
    count = f"{len(found.pairs)} pair{'s' * (len(found.pairs) > 1)}"
    return [*lines, f"intact {facts['intact']:.3f}, corrupted {facts['corrupted']:.3f} {unit}, {count}"]


def shown(found: PatchedPairs, top: int | None) -> RichTable:
    """A row per patch."""
    rows, sheet = found.table().to_pylist(), output.sheet()
    intervals, shares, estimates = has_intervals(found), found.gap is not None, found.estimates is not None
    alone, all_patches = " [95 %]" * intervals, f" [95 %, all {len(rows)}]" * intervals
    all_patches = alone if len(rows) == 1 else all_patches
    titles = ["patch", "effect" + all_patches, *["p"] * intervals]
    if shares:
        titles += ["share" + alone * (not estimates), "restored", "share"]
    else:
        titles += [*["positive"] * intervals, "restored" + all_patches]
    for title in [*titles, *["estimate"] * estimates]:
        sheet.add_column(title, justify="left" if title == "patch" or "[" in title else "right", no_wrap=True)
    for row in rows[:top]:
        cell: list[Any] = [output.one_line(row["set"]), with_interval(row), *[cells.p_value(row["p"])] * intervals]
        if shares:
            share = cells.number(row["normalised"]) if estimates else with_interval(row, SHARES, cells.number)
            cell += [share, cells.effect(row["restored"]), cells.number(row["restored_normalised"])]
        else:
            cell += [*[cells.percentage(row["positive"])] * intervals, with_interval(row, BACK)]
        sheet.add_row(*cell, *[cells.effect(row["estimate"])] * estimates)
    return sheet


def has_intervals(found: PatchedPairs) -> bool:
    """Whether an effect has an end of an interval."""
    ends = np.stack([found.statistics[name] for name in ("low_all", "high_all")])
    return not bool(np.isnan(ends).all())
