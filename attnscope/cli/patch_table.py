"""What `patch` shows on a terminal: a row per patch, and what to know."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from attnscope.cli.intervals import effects, interval_notes
from attnscope.cli.rounding import rounding_notes
from attnscope.interventions.spec import SHARED
from attnscope.utils import display as cells
from attnscope.utils.display import Column, Sheet

if TYPE_CHECKING:
    from attnscope.studies.patching import PatchedPairs

EFFECT = "effect: what the answer loses where the heads are as in the corrupted text"
RESTORED = "restored: what the answer of the corrupted text gains where they are as in TEXT"
SHARE = "share: of the gap between the two texts, 0 as the text that is patched, 1 as the other"
AT_ONCE = "intervals of effects and p hold for all patches at once, those of shares for each alone"
POSITIVE = "positive: in how many pairs the effect is above 0"
RANDOM = "(1 + those that cost as much) / (1 + all)"
GROUPS = "the heads of a kv group share keys and values, and are patched together"
SHARE_ENDS = ("normalised_low", "normalised_high")
BACK_ENDS = ("restored_low_all", "restored_high_all")
ESTIMATE = "estimate: to first order, from one backward pass"


def to_know(found: PatchedPairs) -> list[str]:
    """What a reader of the table has to know, and what was measured without a patch."""
    facts, unit = found.facts, found.facts["measure"]["unit"]
    # What each column is, those alone that the table has.
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
    # What the numbers do not say.
    if any(pair.alike for pair in found.pairs):
        lines.append("a text that is patched from itself loses 0, and was not run")
    lines += rounding_notes(facts, found.statistics["effect"]) + interval_notes(found.statistics, "pairs")
    if facts["unshared"]:
        lines.append(f"the passes were unshared: {facts['unshared']}")
    count = f"{len(found.pairs)} pair{'s' * (len(found.pairs) > 1)}"
    return [*lines, f"intact {facts['intact']:.3f}, corrupted {facts['corrupted']:.3f} {unit}, {count}"]


def shown(found: PatchedPairs, top: int | None) -> Sheet:
    """A row per patch."""
    rows = found.table().to_pylist()
    intervals, shares, estimates = has_intervals(found), found.gap is not None, found.estimates is not None
    columns: list[Column] = [Column("patch", name="set", align="left"), effects("effect", len(rows), intervals)]
    columns += [Column("p", cells.p_value)] * intervals
    if shares:
        lost = Column("share", cells.number, "normalised")
        if not estimates:  # which take the room of the interval
            lost = replace(effects("share", 1, intervals, SHARE_ENDS), format=cells.number, name="normalised")
        columns.append(lost)
        columns += [Column("restored", cells.effect), Column("share", cells.number, "restored_normalised")]
    else:
        columns += [Column("positive", cells.percentage)] * intervals
        columns.append(effects("restored", len(rows), intervals, BACK_ENDS))
    columns += [Column("estimate", cells.effect)] * estimates
    return Sheet(rows[:top], columns)


def has_intervals(found: PatchedPairs) -> bool:
    """Whether an effect has an end of an interval."""
    ends = np.stack([found.statistics[name] for name in ("low_all", "high_all")])
    return not bool(np.isnan(ends).all())
