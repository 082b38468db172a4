"""What two heads do together beyond what each does alone: synergy = pair - sum of singles.

Heads that back each other up have a positive one: alone neither is missed. Shapes: S sequence, K set, N pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from attnscope.cells import head_names
from attnscope.intervene.sets import HeadSet
from attnscope.study.statistics import Effects, paired
from attnscope.tables import as_table

if TYPE_CHECKING:
    import pyarrow as pa

    from attnscope.selection import HeadIndex


@dataclass(frozen=True)
class Pairs:
    """The pairs, and their effects in the measure's unit: score is what the pair costs, null what both cost alone."""

    pairs: tuple[tuple[HeadIndex, HeadIndex], ...]
    effects: Effects

    def table(self) -> pa.Table:
        """A row per pair: both heads, what the pair costs, what both cost alone, the synergy with its intervals."""
        ends = np.array(self.pairs, np.int32).reshape(-1, 4).T
        places = dict(zip(("layer", "head", "other_layer", "other_head"), ends, strict=True))
        asked = self.effects
        costs = {"pair": asked.score, "sum": asked.null, "synergy": asked.effect}
        rest = {name: getattr(asked, name) for name in ("low", "high", "low_all", "high_all", "p")}
        return as_table({**places, **costs, **rest, "n": asked.n.astype(np.int32)})


def pair_sets(heads: Sequence[HeadIndex]) -> list[HeadSet]:
    """What has to be ablated for the synergies of some heads: each alone, then each pair."""
    singles = [HeadSet(head_names([head]), (head,)) for head in sorted(heads)]
    return singles + [HeadSet(head_names(pair), pair) for pair in combinations(sorted(heads), 2)]


def synergies(heads: Sequence[HeadIndex], effect_SK: np.ndarray, seed: int = 0) -> Pairs:
    """The synergies of some heads; effect_SK: (S, K) over intact, of each set of `pair_sets`, in order."""
    heads, pairs = sorted(heads), tuple(combinations(sorted(heads), 2))
    single = {head: effect_SK[:, place] for place, head in enumerate(heads)}
    sums_SN = np.stack([single[one] + single[other] for one, other in pairs], 1)
    return Pairs(pairs, paired(effect_SK[:, len(heads) :], sums_SN, seed=seed))
