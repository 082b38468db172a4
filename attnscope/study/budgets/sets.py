"""Which heads have which budget at a time: heads, kv groups or layers alone, and all chosen heads together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from attnscope.interventions.cache import HeadBudget
from attnscope.model.geometry import Geometry
from attnscope.study.ablation.sets import head_set, portions


@dataclass(frozen=True)
class AskedBudget:
    """One budget that is measured. condition: of all chosen heads "together", of what goes "alone", or of the heads
    that are "bearable": together, on other texts than those on which each alone cost little. layer, head: where it is
    of one."""

    budget: HeadBudget
    condition: Literal["together", "alone", "bearable"] = "together"
    layer: int | None = None
    head: int | None = None


def budgets_over(
    over: str, selection: Mapping[int, Sequence[int]], geometry: Geometry, kinds: Iterable[str], name: str
) -> list[AskedBudget]:
    """Of each kind of budget all chosen heads together, and what goes alone; selection: the heads, by layer. name: of
    all of them together."""
    whole, asked = head_set(name, selection), []
    alone = [] if over == "none" else portions(over, whole, geometry)
    for kind in kinds:
        asked.append(AskedBudget(HeadBudget(name, whole.heads, kind)))
        asked += [AskedBudget(HeadBudget(one.name, one.heads, kind), "alone", one.layer, one.head) for one in alone]
    return asked
