"""What two heads do together beyond what each does alone: synergy = pair - sum of singles.

Heads that back each other up have a positive one: alone neither is missed. Shapes: S sequence, K set, N pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.errors import InputError
from attnscope.folder.parts import Parts
from attnscope.interventions.spec import HeadSet
from attnscope.study.ablation.questions import HeadRecord, HeadStudy
from attnscope.study.statistics import effect_columns, largest_first
from attnscope.study.study import effects_of
from attnscope.utils.display import head_names
from attnscope.utils.tables import as_table, integers

if TYPE_CHECKING:
    import pyarrow as pa

    from attnscope.interventions.passes import Advance, Passes
    from attnscope.model.selection import HeadIndex


@dataclass(frozen=True, repr=False)
class Pairs(HeadRecord):
    """The pairs; pair_SN: what each costs, sum_SN: what its heads cost alone, in the measure's unit."""

    stem = "pairs"

    pairs: tuple[tuple[HeadIndex, HeadIndex], ...]
    pair_SN: np.ndarray
    sum_SN: np.ndarray
    facts: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def statistics(self) -> Mapping[str, np.ndarray]:
        """Of every synergy the columns of `effect_columns`, (N,) each, NaN for null."""
        return effect_columns(self.pair_SN - self.sum_SN)

    def table(self) -> pa.Table:
        """A row per pair: both heads, what the pair costs, what both cost alone, the synergy and its statistics; the
        largest synergy first."""
        ends = np.array(self.pairs, np.int32).reshape(-1, 4).T
        places = dict(zip(("layer", "head", "other_layer", "other_head"), ends, strict=True))
        costs = {"pair": self.pair_SN.mean(0), "sum": self.sum_SN.mean(0)}
        found = {"synergy" if name == "effect" else name: values for name, values in self.statistics.items()}
        columns = {**places, **costs, **found, "n": found["n"].astype(np.int32)}
        return as_table(columns).take(integers(largest_first(self.statistics["effect"])))


@dataclass(frozen=True)
class PairsStudy(HeadStudy[Pairs]):
    """The synergy of every two heads."""

    kind, readings, schema = "pairs", "pairs", "pairs/1"

    def token_layers(self, passes: Passes) -> int:
        return passes.token_layers(pair_sets(self.heads))

    def answer(self, passes: Passes, facts: dict[str, Any], parts: Parts, advance: Advance) -> Pairs:
        if len(self.heads) < 2:
            raise InputError("a pair takes two heads, and one was named", "name more of them")
        _, effect_SK = effects_of(passes, pair_sets(self.heads), parts, advance)
        return replace(synergies(self.heads, effect_SK), facts=facts)


def pair_sets(heads: Sequence[HeadIndex]) -> list[HeadSet]:
    """What has to be ablated for the synergies of some heads: each alone, then each pair."""
    singles = [HeadSet(head_names([head]), (head,)) for head in sorted(heads)]
    return singles + [HeadSet(head_names(pair), pair) for pair in combinations(sorted(heads), 2)]


def synergies(heads: Sequence[HeadIndex], effect_SK: np.ndarray) -> Pairs:
    """The synergies of some heads; effect_SK: (S, K) over intact, of each set of `pair_sets`, in order."""
    heads, pairs = sorted(heads), tuple(combinations(sorted(heads), 2))
    single = {head: effect_SK[:, place] for place, head in enumerate(heads)}
    sums_SN = np.stack([single[one] + single[other] for one, other in pairs], 1)
    return Pairs(pairs, effect_SK[:, len(heads) :], sums_SN)
