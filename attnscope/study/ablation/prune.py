"""The greedy pruning curve: which heads go one after the other, and what is measured after each.

    for step in pruned(prepared(loaded, task, []), heads):
        print(step.layer, step.head, step.value)

At every step each head that is left is taken away together with those that are gone, and the one that costs least stays
away (Michel et al. 2019, arXiv 1905.10650, prune by a score instead of by the loss itself).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.folder.parts import Column, Parts
from attnscope.interventions.base import LOSS, Measure
from attnscope.interventions.spec import HeadSet
from attnscope.study.ablation.questions import HeadRecord, HeadStudy
from attnscope.utils.display import head_name
from attnscope.utils.tables import as_table

if TYPE_CHECKING:
    import pyarrow as pa

    from attnscope.interventions.passes import Advance, Passes
    from attnscope.model.selection import HeadIndex


@dataclass(frozen=True)
class Step:
    """A head that goes: which, and the mean of the measure without it and all before, as nats per token."""

    layer: int
    head: int
    value: float


@dataclass(frozen=True, repr=False)
class Pruning(HeadRecord):
    """The steps in their order. intact: the mean of the measure without any; guess: its value for a uniform guess."""

    stem = "prune"

    steps: Sequence[Step]
    intact: float
    guess: float
    facts: Mapping[str, Any]

    def table(self) -> pa.Table:
        """A row per step, see `curve`."""
        return curve(self.steps, self.intact)


@dataclass(frozen=True)
class PruneStudy(HeadStudy[Pruning]):
    """The heads in the order in which they are missed least, and what is lost with each."""

    kind, readings, schema = "prune", "prune", "prune/1"

    def token_layers(self, passes: Passes) -> int:
        return passes.token_layers([]) + prune_cost(passes, len(self.heads))

    def answer(self, passes: Passes, facts: dict[str, Any], parts: Parts, advance: Advance) -> Pruning:
        intact = float(passes.measured([], advance)[:, 0].mean())
        steps = list(pruned(passes, self.heads, parts, advance))
        return Pruning(steps, intact, math.log(self.model.geometry.vocab_size), facts)


def pruned(
    passes: Passes,
    heads: Sequence[HeadIndex],
    parts: Parts = Parts(),
    advance: Advance = lambda token_layers: None,
) -> Iterator[Step]:
    """The steps until no head is left; parts: where each is kept, and where a stopped pruning resumes."""
    away: list[HeadIndex] = []
    parts.expect(len(heads), "steps")
    while len(away) < len(heads):
        left = [head for head in heads if head not in away]
        step = _step(parts, passes, away, left)
        away.append((step.layer, step.head))
        advance(_cost(passes, len(left)))
        yield step


def prune_cost(passes: Passes, heads: int) -> int:
    """Token-layers that so many steps take at the most: sets that begin late take less."""
    return sum(_cost(passes, left) for left in range(1, heads + 1))


def curve(steps: Sequence[Step], intact: float, measure: Measure = LOSS) -> pa.Table:
    """A row per step: its number, the head that goes, the measure without it and all before, and what that costs."""
    values = np.array([one.value for one in steps], np.float64)
    return as_table(
        {
            "step": np.arange(1, len(steps) + 1, dtype=np.int32),
            "layer": np.array([one.layer for one in steps], np.int32),
            "head": np.array([one.head for one in steps], np.int32),
            measure.name: values,
            "effect": measure.worse * (values - intact),
        }
    )


def _best(passes: Passes, away: Sequence[HeadIndex], left: Sequence[HeadIndex]) -> Step:
    sets = [HeadSet(f"and {head_name(*head)}", tuple(sorted([*away, head]))) for head in left]
    value_K = passes.measured(sets)[:, 1:].mean(0)
    place = int(np.argmin(passes.measure.worse * value_K))
    return Step(*left[place], float(value_K[place]))


def _cost(passes: Passes, left: int) -> int:
    return passes.task.tokens * len(passes.loaded.geometry.layers) * (1 + left)


def _step(parts: Parts, passes: Passes, away: Sequence[HeadIndex], left: Sequence[HeadIndex]) -> Step:
    """The next step, from the folder where an earlier run left it."""
    found = parts.kept(
        f"step-{len(away) + 1:05}",
        {"layer": Column((), "i"), "head": Column((), "i"), "value": Column(())},
        lambda: {name: np.array(value) for name, value in asdict(_best(passes, away, left)).items()},
        fits=lambda columns: (int(columns["layer"]), int(columns["head"])) in left,
    )
    return Step(int(found["layer"]), int(found["head"]), float(found["value"]))
