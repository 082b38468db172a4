"""Which heads have which budget at a time: heads, kv groups or layers alone, and all chosen heads together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from attnscope.cells import head_name
from attnscope.intervene.budgets import HeadBudget
from attnscope.model.geometry import Geometry
from attnscope.study.ablation.sets import head_set, parts


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
    whole = head_set(name, selection)
    alone: list[tuple[str, tuple[tuple[int, int], ...], int, int | None]] = []
    if over == "heads":
        alone = [(head_name(*head), (head,), *head) for head in whole.heads]
    elif over == "kv":
        alone = [(one.name, one.heads, one.heads[0][0], None) for one in parts(whole, geometry, True)]
    elif over == "layers":
        alone = [
            (f"L{layer}", tuple((layer, head) for head in heads), layer, None)
            for layer, heads in sorted(selection.items())
        ]
    found = []
    for kind in kinds:
        found.append(AskedBudget(HeadBudget(name, whole.heads, kind)))
        found += [AskedBudget(HeadBudget(said, heads, kind), "alone", *place) for said, heads, *place in alone]
    return found
