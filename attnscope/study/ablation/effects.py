"""What sets of heads cost a task: each head alone, all together, and random sets of the same shape beside them.

    asked = HeadSets.of(sets_of_roles, loaded.geometry)
    found = ablate_sets(loaded, task, asked, folder=Path("runs/ablate"))
    found.effect(asked.named[0])      # (S,) over intact, as nats per token

Shapes: S sequence, K set.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pyarrow as pa

from attnscope.errors import InputError
from attnscope.files import check_schema, check_types, damaged, read_json, save_json
from attnscope.folder.parts import Column, Parts, claim, with_weights
from attnscope.intervene.intervention import Intervention
from attnscope.intervene.measure import LOSS, Measure
from attnscope.intervene.passes import Advance, Passes, of, prepared
from attnscope.intervene.replacement import Replacement
from attnscope.intervene.sets import HeadSet
from attnscope.intervene.task import Task
from attnscope.keep.atlas import columns_of
from attnscope.model.geometry import Geometry
from attnscope.model.libraries import versions
from attnscope.study.ablation.sets import CONTROLS, DrawnFrom, controls_of, parts, whole_groups
from attnscope.study.statistics import FEWEST, beside_random, effect_columns
from attnscope.tables import as_table, integers, numbers, save, words

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel
    from attnscope.selection import HeadIndex
    from attnscope.study.ablation.direct import Direct

SCHEMA = "ablation/3"
NAME, TABLE, READINGS = "ablation.json", "ablation.parquet", "ablation"
STORED = pa.schema(  # what a picture shows
    {
        **dict.fromkeys(("set", "condition", "heads"), pa.string()),
        **dict.fromkeys(("direct", "effect", "low_all", "high_all", "random_low", "random_high"), pa.float64()),
    }
)
FACTS = {
    "task": {"name": str, "sequences": int},
    "intact": (int, float),
    "replacement": str,
    "measure": {"unit": str},
    "model": {"name": str},
}
AGAIN = "make one: attnscope ablate MODEL --out DIR"
COPY = HeadSet("intact copy", ())
SHARED_FROM = 8  # sets from which sharing layers is worth its own check


@dataclass(frozen=True)
class HeadSets:
    """Sets by name, what of each goes alone, and the random sets that each is held against, at most so many.

    controls: the heads that random sets are drawn from.
    """

    named: tuple[HeadSet, ...]
    alone: Mapping[str, Sequence[HeadSet]]
    random: Mapping[str, Sequence[HeadSet]]
    most: int = CONTROLS
    seed: int = 0
    controls: DrawnFrom = "unnamed"

    @classmethod
    def of(
        cls,
        named: Sequence[HeadSet],
        geometry: Geometry,
        *,
        by_kv: bool = False,
        seed: int = 0,
        random: int = CONTROLS,
        controls: DrawnFrom = "unnamed",
    ) -> HeadSets:
        """The sets, cut to whole kv groups with by_kv, with up to so many random ones each."""
        whole = tuple(whole_groups(one, geometry) if by_kv else one for one in named)
        left_out = whole if controls == "unnamed" else ()
        return cls(
            whole,
            {one.name: parts(one, geometry, by_kv) for one in whole},
            {one.name: controls_of(one, left_out, geometry, by_kv=by_kv, seed=seed, count=random) for one in whole},
            random,
            seed,
            controls,
        )

    @property
    def sets(self) -> list[HeadSet]:
        """All of them, none twice."""
        every = [*self.named, *(one for kind in (self.alone, self.random) for sets in kind.values() for one in sets)]
        return list({one.heads: one for one in every}.values())


@dataclass(frozen=True)
class Ablation:
    """What was measured of the intact model (S,), every set's effects (S,) by its heads, and facts."""

    asked: HeadSets
    intact_S: np.ndarray
    effects: Mapping[tuple[HeadIndex, ...], np.ndarray]
    facts: Mapping[str, Any]
    direct: Mapping[tuple[int, int], float] | None = None

    @cached_property
    def tested(self) -> list[tuple[HeadIndex, ...]]:
        """The heads of the sets that were asked for, together and alone, each once."""
        return list(dict.fromkeys(one.heads for one in chain(self.asked.named, *self.asked.alone.values())))

    @cached_property
    def statistics(self) -> Mapping[str, np.ndarray]:
        """Of each of `tested` the columns of `effect_columns`, NaN for null."""
        return effect_columns(np.stack([self.effects[heads] for heads in self.tested], 1))

    @property
    def has_intervals(self) -> bool:
        """Whether there are as many sequences as intervals need."""
        return len(self.intact_S) >= FEWEST

    def effect(self, one: HeadSet) -> np.ndarray:
        """(S,): how much worse the measure is without a set, as nats per token."""
        return self.effects[one.heads]

    def table(self) -> pa.Table:
        """A row per named set, head alone and random set, the rows of a set one after the other; NaN is null.
        docs/schemas.md says what the columns are."""
        rows = [("together", one.name, one) for one in self.asked.named]
        rows += [("alone", name, one) for name, sets in self.asked.alone.items() for one in sets]
        tested = len(rows)
        rows += [("random", name, one) for name, sets in self.asked.random.items() for one in sets]
        column = {heads: place for place, heads in enumerate(self.tested)}
        places, absent_K = [column[one.heads] for _, _, one in rows[:tested]], np.full(len(rows) - tested, np.nan)
        columns = {name: np.concatenate([of[places], absent_K]) for name, of in self.statistics.items()}
        columns["effect"][tested:] = [self.effect(one).mean() for _, _, one in rows[tested:]]
        n_K = columns.pop("n")
        n_K[tested:] = len(self.intact_S)
        direct = [np.nan if self.direct is None else self._direct(condition, one) for condition, _, one in rows]
        beside = {name: np.full(len(rows), np.nan) for name in ("random_low", "random_high", "p_random")}
        for place, one in enumerate(self.asked.named):
            random_D = np.array([self.effect(other).mean() for other in self.asked.random[one.name]])
            for name, value in zip(beside, beside_random(self.effect(one).mean(), random_D), strict=True):
                beside[name][place] = value
        drawn = [len(self.asked.random[name]) if condition == "together" else None for condition, name, _ in rows]
        sets = list(dict.fromkeys(name for _, name, _ in rows))
        whole = as_table(
            {
                "set": words([name for _, name, _ in rows]).dictionary_encode(),
                "condition": words([condition for condition, _, _ in rows]).dictionary_encode(),
                "heads": words([str(one) for _, _, one in rows]),
                "direct": numbers(np.array(direct)),
                **{name: numbers(values) for name, values in columns.items()},
                "n": n_K.astype(np.int32),
                **{name: numbers(values) for name, values in beside.items()},
                "n_random": integers(drawn, np.int32),
            }
        )
        return whole.take(numbers(np.argsort([sets.index(name) for _, name, _ in rows], kind="stable")))

    def save(self, folder: Path) -> None:
        """Write the table, and beside it the facts."""
        save(self.table(), folder / TABLE)
        save_json(self.facts, folder / NAME)

    def _direct(self, condition: str, one: HeadSet) -> float:
        assert self.direct is not None
        return sum(self.direct[head] for head in one.heads) if condition == "alone" else np.nan


def ablate_sets(
    loaded: LoadedModel,
    task: Task,
    asked: HeadSets,
    replacement: Replacement | Intervention = "mean",
    folder: Path | None = None,
    *,
    measure: Measure = LOSS,
    force: bool = False,
    direct: Direct | None = None,
    advance: Advance = lambda token_layers: None,
) -> Ablation:
    """Run a task with every set's heads changed; with a folder, keep each pass's readings, and write table and facts.

    direct: the heads' direct effects. advance: called with the tokens times layers of every pass, and of what an
    earlier run had read. Raises as `measured`, and UsageError for a folder that holds another ablation, unless force
    says to write over it.
    """
    sets = [*([COPY] if loaded.dtype in HALF else []), *asked.sets]
    facts = _facts(loaded, task, asked, replacement, measure)
    parts = Parts()
    if folder is not None:
        facts = with_weights(facts, loaded)
        parts = claim(folder, READINGS, "ablation", facts, force)
    with parts.resumable():
        passes = prepared(loaded, task, sets, replacement, measure=measure, advance=advance)
        intact_S, effect_SK = effects_of(passes, sets, parts, advance)
    effects = dict(zip([one.heads for one in sets], effect_SK.T, strict=True))
    spread = float(np.abs(effects[()]).max()) if () in effects else None
    measured = {"intact": float(intact_S.mean()), "spread": spread, "unshared": passes.why_not or None}
    facts |= {**measured, "direct": (direct.said or None) if direct else None, "versions": versions()}
    found = Ablation(asked, intact_S, effects, {"schema": SCHEMA, **facts}, (direct.values or None) if direct else None)
    if folder is not None:
        found.save(folder)
    return found


def kept_ablation(folder: Path) -> Ablation:
    """What the tables of a finished ablation say of its sets, one number for all sequences.

    Raises InputError for a folder whose tables are not whole.
    """
    with damaged(f"{folder} holds no whole ablation", AGAIN):
        facts = read_json(folder / NAME)
        check_schema(facts, SCHEMA, folder, "ablate again", InputError)
        check_types(facts, FACTS)
        if facts["replacement"] not in get_args(Replacement):
            raise ValueError(f"{facts['replacement']} replaces no head")
        columns = columns_of(folder / TABLE, STORED, lists="heads")
        rows = list(zip(*(columns[name] for name in ("set", "condition", "heads", "effect")), strict=True))
        heads = [_heads_of(spelled) for _, _, spelled, _ in rows]
        effects = {of: np.array([effect], np.float64) for of, (*_, effect) in zip(heads, rows, strict=True)}
        together = [
            (of, name) for of, (name, condition, *_) in zip(heads, rows, strict=True) if condition == "together"
        ]
        named = [HeadSet(name, of) for of, name in together]
        direct = zip(heads, columns.get("direct") or [None] * len(rows), strict=True)
        alone = {of[0]: float(value) for of, value in direct if len(of) == 1 and value is not None}
        said = {name: facts[name] for name in FACTS}
        return Ablation(HeadSets(tuple(named), {}, {}), np.empty(0), effects, said, alone or None)


def _heads_of(spelled: str) -> tuple[HeadIndex, ...]:
    """`L3H0 L3H1` as heads. Raises ValueError for what is none."""
    found = [re.fullmatch(r"L(\d{1,6})H(\d{1,6})", one, re.ASCII) for one in spelled.split()]
    if not found or None in found:
        raise ValueError(f"{spelled!r} are no heads")
    return tuple((int(one[1]), int(one[2])) for one in found if one)


HALF = ("bfloat16", "float16")


def ablation_cost(
    loaded: LoadedModel, task: Task, asked: HeadSets, replacement: Replacement | Intervention
) -> tuple[int, int]:
    """Tokens times layers of all passes, and about how many operations that is."""
    passes = Passes.planned(loaded, task, replacement)
    token_layers = passes.token_layers(asked.sets) + (passes.token_layers([]) if passes.intervention.learns else 0)
    return token_layers, round(operations(loaded, token_layers, sum(map(len, task.rows)) * (1 + len(asked.sets))))


def pass_seconds(passes: Passes, sets: Sequence[HeadSet]) -> float:
    """About the seconds a token takes in a layer: of the first pass that `sets` take, after one to warm up."""
    passes = passes.sharing(sets)
    _, part = next(iter(passes.chunks(sets)))
    batch = passes.batches(len(part))[0]
    passes.run(batch[: passes.intervention.least], part[:1])
    start = time.perf_counter()
    passes.run(batch, part)
    return (time.perf_counter() - start) / passes.cost(batch, part)


def operations(loaded: LoadedModel, token_layers: int, rows: int) -> float:
    """About how many operations so many tokens times layers take, and the logits of so many rows."""
    layers = len(loaded.geometry.layers)
    unembed = loaded.geometry.vocab_size * loaded.geometry.hidden_size
    per_layer = max(0, (loaded.geometry.parameters or 0) - unembed) / layers
    return 2.0 * (token_layers * per_layer + rows * unembed)


def task_facts(
    loaded: LoadedModel, task: Task, replacement: Replacement | Intervention, measure: Measure = LOSS
) -> dict[str, Any]:
    """What tells a study of a task from another."""
    intervention = of(replacement)
    return {
        "model": {"name": loaded.name, "revision": loaded.revision, "type": loaded.geometry.model_type},
        "dtype": loaded.dtype,
        "task": {"name": task.name, "sequences": len(task), "sha256": task.sha256, **task.facts},
        "replacement": intervention.name,
        **({"intervention": intervention.facts} if intervention.facts else {}),
        "measure": {"name": measure.name, "unit": measure.unit, **measure.facts},
    }


def _facts(
    loaded: LoadedModel, task: Task, asked: HeadSets, replacement: Replacement | Intervention, measure: Measure
) -> dict[str, Any]:
    return {
        **task_facts(loaded, task, replacement, measure),
        "sets": {one.name: str(one).split() for one in asked.named},
        "seed": asked.seed,
        "controls": asked.controls,
        "random_asked": asked.most,
        "random_sets": {name: len(sets) for name, sets in asked.random.items()},
    }


def effects_of(
    passes: Passes, sets: Sequence[HeadSet], parts: Parts, advance: Advance
) -> tuple[np.ndarray, np.ndarray]:
    """What is measured of the intact model, (S,), and what every set costs over it, (S, K)."""
    chunks = [part for _, part in passes.chunks(sets)]
    parts.expect(sum(len(passes.batches(len(part))) for part in chunks))
    found = [_part(passes, part, parts, advance) for part in chunks]
    return found[0][:, 0], np.hstack([passes.effects(one_SK) for one_SK in found])


def effects_by_identity(
    passes: Passes, sets: Sequence[HeadSet], parts: Parts, advance: Advance
) -> tuple[Passes, np.ndarray, dict[Hashable, np.ndarray]]:
    """The passes, with shared layers where that pays, what is measured of the intact model, (S,), and what every set
    costs over it, (S,), by its identity."""
    if len(sets) >= SHARED_FROM:
        passes = passes.sharing(sets)
    intact_S, effect_SK = effects_of(passes, sets, parts, advance)
    return passes, intact_S, {one.identity: effect_SK[:, place] for place, one in enumerate(sets)}


def _part(passes: Passes, part: Sequence[HeadSet], parts: Parts, advance: Advance) -> np.ndarray:
    """(S, 1 + K): what is measured of some sets, from the folder where an earlier run left them."""
    spelled = repr([one.identity for one in part])
    name, width = hashlib.sha256(spelled.encode()).hexdigest()[:16], 1 + len(part)

    def keep(batch: Sequence[int], read: Callable[[], np.ndarray]) -> np.ndarray:
        expected = {"value_BK": Column((len(batch), width))}
        return parts.batch(name, batch, expected, lambda: {"value_BK": read()})["value_BK"]

    found = parts.kept(
        name,
        {"value_SK": Column((len(passes.task), width))},
        lambda: {"value_SK": passes.measured(part, advance, keep)},
        skipped=lambda: advance(passes.token_layers(part)),
        batches=len(passes.batches(len(part))),
    )
    return found["value_SK"]
