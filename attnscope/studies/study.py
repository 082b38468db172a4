"""A study of a model: what it asks, what that takes, its passes, and a record in a folder, where it resumes.

    study = KnockoutStudy(loaded, cases, CutPlan(over="heads"))
    study.cost().line                       # what it would take, before any of it is done
    result = study.run(Path("runs/cut"))    # where it was stopped it resumes
    result.table(), result.facts

A study is one class: on `Study`, or on `SetStudy` where sets of heads are changed in the texts of a task. It knows no
command: `cli/study.py` says, runs, draws and prints any of them.

Shapes: S text or sequence, K set.
"""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np

from attnscope.interventions.base import LOSS, Intervention, Measure, Replacement
from attnscope.interventions.passes import Advance, Passes, of, prepared
from attnscope.interventions.spec import HeadPlan, HeadSet, Task
from attnscope.model.checkpoint import weights_sha256
from attnscope.model.libraries import versions
from attnscope.model.selection import everything
from attnscope.studies.study_folder import Column, Parts, StudyRecord, claim, stacks_of
from attnscope.utils.display import head_name, number_of

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel

PASSED = "tokens x layers"  # what passes are counted in
HALF = ("bfloat16", "float16")
SHARED_FROM = 8  # sets from which sharing layers is worth its own check
Record = TypeVar("Record", bound=StudyRecord)


@dataclass(frozen=True)
class Cost:
    """What a study takes. line: in words. steps: as its progress counts them, such as tokens times layers.

    seconds: measures about how long it takes, by a batch that it runs.
    """

    line: str
    steps: int
    seconds: Callable[[], float]


class Study(ABC, Generic[Record]):
    """A question to a model that takes many passes; a frozen dataclass with the model, what is asked, and a plan.

    kind: what messages call it. readings: the folder in its folder in which parts are kept. schema: of its facts.
    """

    kind: ClassVar[str]
    readings: ClassVar[str]
    schema: ClassVar[str]
    model: LoadedModel

    @property
    @abstractmethod
    def stage(self) -> str:
        """What a progress bar says while it runs."""

    @property
    def lines(self) -> Iterable[str]:
        """Lines for a person before it runs, such as the tokens that are meant."""
        return ()

    @property
    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What tells this study from another of its kind: a folder with other facts is not written to."""

    @abstractmethod
    def cost(self) -> Cost:
        """What it would take, at most."""

    @abstractmethod
    def measure(self, facts: dict[str, Any], parts: Parts, advance: Advance) -> Record:
        """Run it. facts: go into the record, with what was measured after them. parts: keep what passes read.

        advance: called with the tokens times layers of every pass, and of what an earlier run had read.
        """

    def claim(self, folder: Path, force: bool = False) -> tuple[dict[str, Any], Parts]:
        """The facts with the weights' hash, and the parts of the study in a folder, which is its own from then on.

        Raises UsageError where another study fills it, unless force says to write over it.
        """
        # Another model may have its name.
        weights = weights_sha256(self.model.source_folder, self.model.base_folder)
        facts = {**self.facts, "model": {**self.facts["model"], "weights_sha256": weights}}
        return facts, claim(folder, self.readings, self.kind, facts, force)

    def run(
        self, folder: Path | None = None, *, force: bool = False, advance: Advance = lambda token_layers: None
    ) -> Record:
        """What was measured; with a folder, keep each pass's readings there, and write table and facts.

        Raises UsageError for a folder that holds another study, unless force says to write over it, and what the study
        itself raises: ModelError for a family that it cannot change, InputError for texts that it cannot be of.
        """
        facts, parts = self.facts, Parts()
        if folder is not None:
            facts, parts = self.claim(folder, force)
        with parts.resumable():
            result = self.measure(facts, parts, advance)
        # A record is a frozen dataclass: its facts end with the versions that made it.
        result = replace(result, facts={"schema": self.schema, **result.facts, "versions": versions()})  # type: ignore[type-var]
        if folder is not None:
            result.save(folder)
        return result


class SetStudy(Study[Record]):
    """A study of sets of heads that are changed, one after the other, in the texts of a task."""

    plan: HeadPlan

    @property
    @abstractmethod
    def sets(self) -> Sequence[HeadSet]:
        """The sets that are asked for."""

    @property
    @abstractmethod
    def task(self) -> tuple[Task, Measure]:
        """The texts with the rows that count, and what is measured in them."""

    @property
    @abstractmethod
    def intervention(self) -> Intervention:
        """What changes the heads of a set."""

    @property
    def selection(self) -> Mapping[int, Sequence[int]]:
        """The heads that are chosen, by layer. Raises ModelError for a model without heads."""
        self.model.check_heads("none can be changed")
        select = self.plan.select
        return everything(self.model.geometry.unnamed) if select is None else select

    @cached_property
    def passes(self) -> Passes:
        """Passes that share no layers."""
        task, measure = self.task
        return prepared(self.model, task, self.sets, self.intervention, measure=measure, shared=False)

    @property
    def task_facts(self) -> dict[str, Any]:
        """The model, the texts, and what is changed and measured in them."""
        return task_facts(self.model, self.passes.task, self.passes.intervention, self.passes.measure)

    def heads_facts(self, sets: Iterable[HeadSet]) -> dict[str, Any]:
        """Which heads are changed; sets: those that have them all."""
        sets = list(sets)
        names = " ".join(sorted(head_name(*head) for changed in sets for head in changed.heads))
        return {
            "select": self.plan.name,
            "heads_sha256": hashlib.sha256(names.encode()).hexdigest(),
            "stack": stacks_of(sets),
        }

    @property
    def facts(self) -> dict[str, Any]:
        return self.task_facts | self.heads_facts(self.sets)

    def cost(self) -> Cost:
        texts = number_of(len(self.passes.task), "text")
        what = f"{number_of(len(self.sets), 'set')} of heads, on {texts}: at most"
        return cost_of_passes(what, self.passes, self.sets)


def cost_of_passes(
    what: str,
    passes: Passes,
    sets: Sequence[HeadSet],
    *,
    times: int = 1,
    before: int = 0,
    of_all: Callable[[int], int] = lambda count: count,
) -> Cost:
    """What passes take. what: how many sets of what kind, on how many texts. times: the sets that are run for each.
    before: tokens times layers of the passes that come first. of_all: what all sequences take, where those of the task
    take so much and are but some of them."""
    token_layers = before + passes.token_layers(sets) * times
    rows = sum(map(len, passes.task.rows)) * (1 + len(sets) * times)
    return cost_of(what, of_all(token_layers), of_all(rows), passes, sets)


def learning_cost(passes: Passes) -> int:
    """Tokens times layers of the pass that the intervention learns from, such as means; 0 where it learns nothing."""
    return passes.token_layers([]) if passes.intervention.learns else 0


def cost_of(what: str, token_layers: int, rows: int, passes: Passes, sets: Sequence[HeadSet]) -> Cost:
    """So many tokens times layers, and the logits of so many rows, timed by a batch of some sets."""
    geometry = passes.loaded.geometry
    unembed = geometry.vocab_size * geometry.hidden_size
    per_layer = max(0, (geometry.parameters or 0) - unembed) / len(geometry.layers)
    operations = 2.0 * (token_layers * per_layer + rows * unembed)
    line = f"{what} {token_layers} tokens x layers, about {operations:.0e} operations"

    def seconds() -> float:
        sharing = passes.sharing(sets)
        _, part = next(iter(sharing.chunks(sets)))
        batch = sharing.batches(len(part))[0]
        # The first pass is to warm up.
        sharing.run(batch[: sharing.intervention.least], part[:1])
        start = time.perf_counter()
        sharing.run(batch, part)
        return token_layers * (time.perf_counter() - start) / sharing.cost(batch, part)

    return Cost(line, token_layers, seconds)


@dataclass(frozen=True)
class SetEffects:
    """What passes measured. passes: those that were run, with shared layers where that pays. intact_S: without a
    change. by_set: (S,) how much worse every set makes it, by its identity. spread: in half precision, what two intact
    rows of a pass differ by at most; None in others."""

    passes: Passes
    intact_S: np.ndarray
    by_set: Mapping[Hashable, np.ndarray]
    spread: float | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """As the facts of a study have it."""
        return {"intact_by_text": self.intact_S.tolist(), "spread": self.spread}

    @property
    def unshared(self) -> dict[str, Any]:
        """Why no layers were shared, as the facts of a study have it."""
        return {"unshared": self.passes.why_not or None}


def effects_by_set(
    passes: Passes, sets: Sequence[HeadSet], parts: Parts, advance: Advance, copy: HeadSet
) -> SetEffects:
    """What every set costs over the intact model. copy: a set that changes nothing, and is run in half precision: what
    it costs is noise."""
    copies = [copy] if passes.loaded.dtype in HALF else []
    sets = [*copies, *sets]
    if len(sets) >= SHARED_FROM and not (passes.layers or passes.why_not):
        passes = passes.sharing(sets)
    intact_S, effect_SK = effects_of(passes, sets, parts, advance)
    by_set = {one.identity: effect_SK[:, place] for place, one in enumerate(sets)}
    return SetEffects(passes, intact_S, by_set, float(np.abs(by_set[copy.identity]).max()) if copies else None)


def effects_of(
    passes: Passes, sets: Sequence[HeadSet], parts: Parts, advance: Advance
) -> tuple[np.ndarray, np.ndarray]:
    """What is measured of the intact model, (S,), and what every set costs over it, (S, K)."""
    chunks = [part for _, part in passes.chunks(sets)]
    parts.expect(sum(len(passes.batches(len(part))) for part in chunks))

    def values_of(part: Sequence[HeadSet]) -> np.ndarray:
        """(S, 1 + K), from the folder where an earlier run left them."""
        spelled = repr([one.identity for one in part])
        name, width = hashlib.sha256(spelled.encode()).hexdigest()[:16], 1 + len(part)

        def keep(batch: Sequence[int], read: Callable[[], np.ndarray]) -> np.ndarray:
            expected = {"value_BK": Column((len(batch), width))}
            return parts.batch(name, batch, expected, lambda: {"value_BK": read()})["value_BK"]

        return parts.kept(
            name,
            {"value_SK": Column((len(passes.task), width))},
            lambda: {"value_SK": passes.measured(part, advance, keep)},
            skipped=lambda: advance(passes.token_layers(part)),
            batches=len(passes.batches(len(part))),
        )["value_SK"]

    by_chunk = [values_of(part) for part in chunks]
    return by_chunk[0][:, 0], np.hstack([passes.effects(value_SK) for value_SK in by_chunk])


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
