"""What a head is called, from the atlas: a set of roles, each by a lower bound that holds for all heads at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnscope.observe.atlas import OFFSETS
from attnscope.study.atlas.findings import Finding
from attnscope.study.atlas.long_range_copying import RECALLED
from attnscope.study.atlas.uniformity import NEAR

LEAST, COPIES, PERIODS = 0.3, 0.5, 2
OLSSON = "Olsson et al. 2022, arXiv 2209.11895"


@dataclass(frozen=True)
class Rule:
    """A role and its condition in words; bounds are those that hold for all heads at once."""

    role: str
    condition: str
    source: str = ""


RULES = (
    Rule(
        "induction",
        f"lower bound >= {LEAST} against other tokens and above 0 against shuffled ones, at {PERIODS} periods; "
        f"copying >= {COPIES}",
        OLSSON,
    ),
    Rule("prefix-matching", "as induction, without copying, or where that was not measured", OLSSON),
    *(Rule(role, f"lower bound >= {LEAST} above the best other offset") for role in OFFSETS.values()),
    Rule(
        "duplicate-token",
        f"lower bound >= {LEAST} and above 0, as induction, at {PERIODS} periods",
        "Wang et al. 2022, arXiv 2211.00593",
    ),
    Rule(
        "sink",
        f"lower bound >= {LEAST} above uniform attention, key 0 of {64} tokens",
        "Gu et al. 2024, arXiv 2410.10781",
    ),
    Rule(
        "long-range-copying",
        f"lower bound >= {LEAST} above a moved span, over runs with recall > {RECALLED}",
        "counted as by Wu et al. 2024, arXiv 2404.15574, on random tokens",
    ),
)
NAMED_BY = {  # role: the probe, of several periods without the period, and what its lower bound is above
    "induction": ("induction", "other"),
    "prefix-matching": ("induction", "other"),
    **{role: (f"offset {steps}", "best other offset") for steps, role in OFFSETS.items()},
    "duplicate-token": ("duplicate-token", "other"),
    "sink": ("sink", "uniform"),
    "long-range-copying": ("long-range-copying", "moved span"),
}
MARK = Rule("near_uniform", f"mean Jensen-Shannon divergence (JS) to uniform attention < {NEAR} bits; a mark, no role")


def near_uniform(divergence_SN: np.ndarray) -> dict[int, float]:
    """{head: its mean divergence} of the heads that the mark holds for."""
    mean_N = divergence_SN.mean(0)
    return {int(head): float(mean_N[head]) for head in np.flatnonzero(mean_N < NEAR)}


def roles_of(findings: Sequence[Finding], heads: int) -> list[tuple[str, ...]]:
    """Each head's roles, in the order of RULES; none where no rule holds."""
    low = {(one.probe, one.against): one.effects.low_all for one in findings}
    score = {one.probe: one.effects.score for one in findings}

    def bound(probe: str, against: str) -> np.ndarray:
        return np.nan_to_num(low.get((probe, against), np.full(heads, np.nan)), nan=-np.inf)

    def at_periods(probe: str) -> np.ndarray:
        names = {name for name, _ in low if name.startswith(f"{probe} p")}
        held = [(bound(name, "other") >= LEAST) & (bound(name, "shuffled") > 0) for name in names]
        return np.sum(held, axis=0) >= PERIODS if held else np.zeros(heads, bool)

    matches, copies = at_periods("induction"), np.nan_to_num(score.get("copying", np.zeros(heads))) >= COPIES
    holds = {
        "induction": matches & copies,
        "prefix-matching": matches & ~copies,
        **{role: bound(*NAMED_BY[role]) >= LEAST for role in OFFSETS.values()},
        "duplicate-token": at_periods("duplicate-token"),
        **{role: bound(*NAMED_BY[role]) >= LEAST for role in ("sink", "long-range-copying")},
    }
    return [tuple(rule.role for rule in RULES if holds[rule.role][head]) for head in range(heads)]


def named_by(role: str, findings: Sequence[Finding], place: int) -> Finding:
    """The contrast that named a head's role; of several periods the one with the bound that decided.

    place: the head's, in the order of the findings' effects.
    """
    probe, against = NAMED_BY[role]
    found = [one for one in findings if one.against == against and one.probe.partition(" p")[0] == probe]
    return sorted(found, key=lambda one: -float(one.effects.low_all[place]))[:PERIODS][-1]
