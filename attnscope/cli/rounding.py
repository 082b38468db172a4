"""What a line says of half precision beside a table of effects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

ROUNDING = {"bfloat16": "0.4 %", "float16": "0.05 %"}  # of a number, at most: half of torch.finfo's eps
FLOAT32 = "--dtype float32 shows what it is worth"


def rounding_notes(facts: Mapping[str, Any], effects: Iterable[float]) -> list[str]:
    """In half precision a line: how many effects are smaller than what two intact rows of one pass differ by.

    Both go through the same sums, so that they may be equal while an effect is not what float32 gives. facts: of a
    knockout, an ablation or budgets; effects: those of its table, NaN where there is none.
    """
    spread, dtype = facts["spread"], facts["dtype"]
    if spread is None:
        return []
    rounded = f"rounding to {dtype} is up to {ROUNDING[dtype]} of each number: {FLOAT32}"
    if spread == 0:
        return [f"two intact rows of one pass are equal, but {rounded}"]
    unit = facts["measure"]["unit"].partition(" per ")[0]
    known = [abs(effect) for effect in effects if effect == effect]
    below = f"{sum(effect < spread for effect in known)} of {len(known)} effects are smaller"
    return [f"two intact rows of one pass differ by up to {spread:.1g} {unit}, and {below}; {rounded}"]
