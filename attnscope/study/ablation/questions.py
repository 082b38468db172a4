"""Another question than what sets of heads cost, to the same heads and task: what all such studies have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from attnscope.folder.parts import Parts
from attnscope.interventions.base import Intervention
from attnscope.interventions.passes import Advance, Passes, prepared
from attnscope.interventions.replacement import Replacement
from attnscope.interventions.spec import HeadSet, Task
from attnscope.model.selection import everything, pairs
from attnscope.study.records import StudyRecord
from attnscope.study.study import Cost, Study, cost_of, operations, task_facts
from attnscope.utils.display import head_name
from attnscope.utils.tables import save

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel
    from attnscope.model.selection import HeadIndex


class HeadRecord(StudyRecord):
    """What was measured of some heads; its folder holds the table alone."""

    @property
    def line(self) -> str:
        """Which question it is, of what."""
        facts = self.facts
        task = f"{facts['task']['sequences']} {facts['task']['name']}"
        return f"{self.stem} of {len(facts['heads'])} heads of {facts['model']['name']} on {task}"

    def save(self, folder: Path) -> None:
        """Write the table."""
        save(self.table(), folder / f"{self.stem}.parquet")


Record = TypeVar("Record", bound=HeadRecord)


@dataclass(frozen=True)
class HeadStudy(Study[Record]):
    """A question to some heads. named: the heads; all of the model where none are named."""

    model: LoadedModel
    task: Task
    named: Sequence[HeadIndex] = ()
    replacement: Replacement | Intervention = "mean"

    @property
    def stage(self) -> str:
        return self.kind

    @cached_property
    def heads(self) -> Sequence[HeadIndex]:
        """The heads that are asked about."""
        return self.named or pairs(everything(self.model.geometry.heads_by_layer))

    @property
    def facts(self) -> dict[str, Any]:
        names = [head_name(*head) for head in self.heads]
        return task_facts(self.model, self.task, self.replacement) | {"heads": names}

    @abstractmethod
    def token_layers(self, passes: Passes) -> int:
        """Tokens times layers that the answer takes at most."""

    @abstractmethod
    def answer(self, passes: Passes, facts: dict[str, Any], parts: Parts, advance: Advance) -> Record:
        """The answer by passes that were prepared; the rest as of `measure`."""

    def cost(self, of_all: Callable[[int], int] = lambda count: count) -> Cost:
        """As of any study; of_all: what all sequences take, where those of the task are but some of them."""
        passes = Passes.planned(self.model, self.task, self.replacement)
        means = passes.token_layers([]) if passes.intervention.learns else 0
        token_layers, once = of_all(self.token_layers(passes) + means), of_all(passes.token_layers([]))
        rows = of_all(sum(map(len, self.task.rows))) * token_layers // max(1, once)
        what = f"{self.kind} of {len(self.heads)} heads on {of_all(len(self.task))} sequences of {self.task.name}:"
        sets = [HeadSet("", (head,)) for head in self.heads]
        return cost_of(what, token_layers, operations(self.model, token_layers, rows), passes, sets)

    def measure(self, facts: dict[str, Any], parts: Parts, advance: Advance) -> Record:
        sets = [HeadSet("", tuple(self.heads))]
        passes = prepared(self.model, self.task, sets, self.replacement, advance=advance)
        return self.answer(passes, facts, parts, advance)
