"""What else `ablate` answers of the same heads and task: pairs, a pruning, a screen by gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from attnscope.calls.records import Record, picture_of
from attnscope.cells import head_name, model_name
from attnscope.errors import InputError, UsageError
from attnscope.figures import About, Style
from attnscope.figures.pruning import save_pruning
from attnscope.folder.parts import Parts, claim, with_weights
from attnscope.intervene.gradient import BACKWARD
from attnscope.intervene.passes import Passes, prepared
from attnscope.intervene.sets import HeadSet
from attnscope.selection import everything
from attnscope.selection import pairs as in_order
from attnscope.study.ablation.pairs import pair_sets, synergies
from attnscope.study.ablation.prune import curve, prune_cost, pruned
from attnscope.study.ablation.screen import TRIED, screened
from attnscope.study.study import effects_of, operations, pass_seconds, task_facts
from attnscope.tables import save
from attnscope.telling import SILENT, Teller

if TYPE_CHECKING:
    import pyarrow as pa

    from attnscope.drawing import Picture
    from attnscope.intervene.passes import Advance
    from attnscope.intervene.replacement import Replacement
    from attnscope.intervene.task import Task
    from attnscope.model.loaded import LoadedModel
    from attnscope.selection import HeadIndex


class Asked(Protocol):
    """What a question needs of the options."""

    @property
    def replace(self) -> Replacement: ...
    @property
    def out(self) -> str | Path | None: ...
    @property
    def force(self) -> bool: ...


@dataclass(frozen=True)
class Asking:
    """What is asked, of which heads. parts: where what is measured on the way is kept."""

    passes: Passes
    heads: Sequence[HeadIndex]
    parts: Parts
    advance: Advance = lambda token_layers: None


@dataclass(frozen=True)
class Result:
    """A table, what it is a table of, and a figure by name with what writes it."""

    table: pa.Table
    found: Any
    figure: tuple[str, Callable[[Path, Style], Path]] | None = None


@dataclass(frozen=True)
class HeadQuestion:
    """A name for its files; what it takes at the most, in tokens times layers; and who answers."""

    name: str
    cost: Callable[[Asking], int]
    answer: Callable[[Asking], Result]


@dataclass(frozen=True, repr=False)
class Answered(Record):
    """The answer to another question than what sets cost; question: pairs, prune or gradient."""

    model: LoadedModel
    task: Task
    question: str
    answer: Result
    facts: Mapping[str, Any]

    @property
    def line(self) -> str:
        heads = self.facts["heads"]
        return f"{self.question} of {len(heads)} heads of {self.model.name} on {len(self.task)} {self.task.name}"

    def table(self) -> pa.Table:
        """A row per pair, per head that is removed, or per head of the screen."""
        return self.answer.table

    def figure(self, style: Style = Style()) -> Picture | None:
        """The loss after each head that a pruning removes; None of the other questions."""
        if self.answer.figure is None:
            return None
        name, draw = self.answer.figure
        style = replace(style, about=self._about(style), image="png")
        return picture_of(self.question, lambda folder: draw(folder / f"{name}.png", style))

    def _picture(self) -> Picture | None:
        return self.figure()

    def _about(self, style: Style) -> About:
        line = f"{model_name(self.model.name)}, {self.task.name}, {len(self.task)} sequences"
        return replace(style.of_model(self.model.name).about, line=line)

    def export(self, folder: str | Path, *, force: bool = False, style: Style = Style()) -> list[Path]:
        """Write the table, and the figure where there is one; the paths.

        Raises UsageError for a folder that holds another study, unless force says to write over it.
        """
        claim(Path(folder), self.question, self.question, with_weights(self.facts, self.model), force)
        return self.write(Path(folder), style)

    def write(self, folder: Path, style: Style = Style()) -> list[Path]:
        """As `export`, into a folder that is this study's already."""
        written = [save(self.answer.table, folder / f"{self.question}.parquet")]
        if self.answer.figure is not None:
            name, draw = self.answer.figure
            draw(path := folder / f"{name}.{style.image}", replace(style, about=self._about(style)))
            written.append(path)
        return written


@dataclass(frozen=True)
class QuestionPlan:
    """A question about to be answered; heads: all of the model where none were named."""

    model: LoadedModel
    task: Task
    heads: Sequence[HeadIndex]
    question: HeadQuestion
    asked: Asked

    @property
    def asking(self) -> Asking:
        """What is asked, of which heads."""
        passes = Passes.planned(self.model, self.task, self.asked.replace)
        heads = self.heads or in_order(everything(self.model.geometry.heads_by_layer))
        return Asking(passes, heads, Parts())

    def cost(self, of_all: Callable[[int], int] = lambda count: count) -> tuple[int, float]:
        """Tokens times layers, and about how many operations; of_all: of all sequences, where fewer were drawn."""
        asking = self.asking
        means = asking.passes.token_layers([]) if asking.passes.intervention.learns else 0
        cost, once = of_all(self.question.cost(asking) + means), of_all(asking.passes.token_layers([]))
        rows = of_all(sum(map(len, self.task.rows))) * cost // max(1, once)
        return cost, operations(self.model, cost, rows)

    def seconds(self, cost: int) -> float:
        """About how long it takes, by a batch that is read now."""
        asking = self.asking
        return cost * pass_seconds(asking.passes, [HeadSet("", (head,)) for head in asking.heads])

    def run(self, tell: Teller = SILENT, cost: int | None = None, style: Style = Style()) -> Answered:
        """The answer; with a folder, keep what is measured on the way, and write there."""
        asking, question, asked = self.asking, self.question, self.asked
        facts = task_facts(self.model, self.task, asked.replace)
        facts |= {"heads": [head_name(*head) for head in asking.heads]}
        if asked.out is not None:
            kept = claim(Path(asked.out), question.name, question.name, with_weights(facts, self.model), asked.force)
            asking = replace(asking, parts=kept)
        with asking.parts.resumable(), tell.stage(question.name, cost, "tokens x layers") as advance:
            sets = [HeadSet("", tuple(asking.heads))]
            passes = prepared(self.model, self.task, sets, asked.replace, advance=advance)
            answer = question.answer(replace(asking, passes=passes, advance=advance))
        found = Answered(self.model, self.task, question.name, answer, facts)
        if asked.out is not None:
            found.write(Path(asked.out), style)
        return found


def answered(
    loaded: LoadedModel, task: Task, heads: Sequence[HeadIndex], question: HeadQuestion, asked: Asked
) -> Answered:
    """The answer to a question; heads: all of the model where none were named."""
    return QuestionPlan(loaded, task, heads, question, asked).run()


def question_of(wishes: Mapping[str, bool]) -> HeadQuestion | None:
    """The one question that is wished for, None without one. Raises UsageError for two."""
    wanted = [name for name, asked in wishes.items() if asked]
    if len(wanted) > 1:
        raise UsageError(f"{wanted[0]} and {wanted[1]} were both asked for", "ask one question at a time")
    return QUESTIONS[wanted[0]] if wanted else None


def _pairs_cost(asking: Asking) -> int:
    return asking.passes.token_layers(pair_sets(asking.heads))


def _pairs(asking: Asking) -> Result:
    """The synergy of every two heads."""
    if len(asking.heads) < 2:
        raise InputError("a pair takes two heads, and one was named", "name more of them")
    _, effect_SK = effects_of(asking.passes, pair_sets(asking.heads), asking.parts, asking.advance)
    found = synergies(asking.heads, effect_SK)
    return Result(found.table(), found)


def _pruning_cost(asking: Asking) -> int:
    return asking.passes.token_layers([]) + prune_cost(asking.passes, len(asking.heads))


def _pruning(asking: Asking) -> Result:
    """The heads in the order in which they are missed least: the steps, and the intact loss."""
    loaded, passes = asking.passes.loaded, asking.passes
    intact = float(passes.measured([], asking.advance)[:, 0].mean())
    steps = list(pruned(passes, asking.heads, asking.parts, asking.advance))

    def draw(path: Path, style: Style) -> Path:
        names = [head_name(one.layer, one.head) for one in steps]
        guess = math.log(loaded.geometry.vocab_size)
        return save_pruning(path, names, [intact, *(one.value for one in steps)], [("uniform guess", guess)], style)

    return Result(curve(steps, intact), (steps, intact, passes.measure.unit), ("prune", draw))


def _screen_cost(asking: Asking) -> int:
    return (BACKWARD + 1 + TRIED) * asking.passes.token_layers([])


def _screen(asking: Asking) -> Result:
    """All heads to first order, and some of them ablated."""
    found = screened(asking.passes, asking.advance)
    return Result(found.table(), found)


QUESTIONS: Mapping[str, HeadQuestion] = {
    "pairs": HeadQuestion("pairs", _pairs_cost, _pairs),
    "prune": HeadQuestion("prune", _pruning_cost, _pruning),
    "gradient": HeadQuestion("gradient", _screen_cost, _screen),
}
