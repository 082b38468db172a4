"""What else `ablate` answers of the same heads and task: pairs, a pruning, a screen by gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from attnscope.cells import head_name, model_name
from attnscope.cli import output
from attnscope.cli.ablate_tables import pairs_sheet, prune_sheet, screen_sheet, trusted
from attnscope.errors import InputError, UsageError
from attnscope.signals import unwinding

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.table import Table as RichTable

    from attnscope.cli.ablate_options import Measured, On, Taken
    from attnscope.figures import Style
    from attnscope.folder.parts import Parts
    from attnscope.intervene.passes import Advance, Passes
    from attnscope.intervene.task import Task
    from attnscope.model.loaded import LoadedModel
    from attnscope.selection import HeadIndex


@dataclass(frozen=True, kw_only=True)
class Otherwise:
    """Another question than what sets cost."""

    panel = "Question"

    pairs: Annotated[bool, Option(help="Instead: what any two of the heads cost beyond what both cost alone.")] = False
    prune: Annotated[bool, Option(help="Instead: remove heads one by one, the least costly first.")] = False
    method: Annotated[
        Literal["replace", "gradient"],
        Option(help="gradient: screen all heads to first order, and print how well that orders them."),
    ] = "replace"

    def __post_init__(self) -> None:
        wanted = [name for name, asked in self._wishes.items() if asked]
        if len(wanted) > 1:
            raise UsageError(f"{wanted[0]} and {wanted[1]} were both given", "ask one question at a time")

    @property
    def _wishes(self) -> Mapping[str, bool]:
        return {"--pairs": self.pairs, "--prune": self.prune, "--method gradient": self.method == "gradient"}

    @property
    def asks_all(self) -> bool:
        """Whether a question is asked of all heads where none are named."""
        return self.question is not None and not self.pairs

    def check(self, taken: Taken) -> None:
        """Raises UsageError for what only sets can have."""
        wanted = [f"--by {taken.by}"] * (taken.by == "kv") + ["--each"] * taken.each
        wanted += [f"--controls {taken.controls}"] * (taken.controls == "all")
        asked = next((name for name, asked in self._wishes.items() if asked), None)
        if asked is not None and wanted:
            raise UsageError(f"{wanted[0]} is for sets, and {asked} was given", "leave out one of them")

    @property
    def question(self) -> HeadQuestion | None:
        """The question that is asked instead; None for sets."""
        return next((QUESTIONS[name] for name, asked in self._wishes.items() if asked), None)


@dataclass(frozen=True)
class Asking:
    """What is asked, of which heads. parts: where what is measured on the way is kept."""

    passes: Passes
    heads: Sequence[HeadIndex]
    parts: Parts
    advance: Advance = lambda token_layers: None


@dataclass(frozen=True)
class Result:
    """A table, what a terminal shows of its first rows, notes, and a figure by name with what writes it."""

    table: pa.Table
    sheet: Callable[[int | None], RichTable]
    notes: tuple[str, ...] = ()
    figure: tuple[str, Callable[[Path, Style], object]] | None = None


@dataclass(frozen=True)
class HeadQuestion:
    """A name for its files; what it takes at the most, in tokens times layers; and who answers."""

    name: str
    cost: Callable[[Asking], int]
    answer: Callable[[Asking], Result]


def answered(
    loaded: LoadedModel,
    task: Task,
    heads: Sequence[HeadIndex],
    otherwise: Otherwise,
    groups: tuple[Taken, On, Measured, Style],
) -> int:
    """Ask, print and write; heads: all of the model where none were named."""
    from attnscope.folder.parts import Parts, claim, with_weights
    from attnscope.intervene.intervention import HeadSet
    from attnscope.intervene.passes import Passes, prepared
    from attnscope.selection import everything
    from attnscope.selection import pairs as in_order
    from attnscope.study.ablation.effects import operations, pass_seconds, task_facts

    (taken, on, measured, style), question = groups, otherwise.question
    assert question is not None
    asking = Asking(
        Passes.planned(loaded, task, taken.replace),
        heads or in_order(everything(loaded.geometry.heads_by_layer)),
        Parts(),
    )
    means = asking.passes.token_layers([]) if asking.passes.intervention.learns else 0
    cost = on.of_all(question.cost(asking) + means, task)
    once = on.of_all(asking.passes.token_layers([]), task)
    rows = on.of_all(sum(map(len, task.rows)), task) * cost // max(1, once)
    plan = f"{question.name} of {len(asking.heads)} heads on {on.of_all(len(task), task)} sequences of {task.name}: "
    plan += f"{cost} tokens x layers, about {operations(loaded, cost, rows):.0e} operations"
    if on.dry_run:
        with output.progress("measuring a batch", None, measured.quiet):
            seconds = cost * pass_seconds(asking.passes, [HeadSet("", (head,)) for head in asking.heads])
        output.show(plan + output.estimated(seconds))
        return 0
    output.talk(plan, measured.quiet)
    facts = {**task_facts(loaded, task, taken.replace), "heads": [head_name(*head) for head in asking.heads]}
    if measured.out is not None:
        kept = claim(measured.out, question.name, question.name, with_weights(facts, loaded), measured.force)
        asking = replace(asking, parts=kept)
    with (
        unwinding(),
        asking.parts.resumable(),
        output.progress(question.name, cost, measured.quiet, "tokens x layers") as advance,
    ):
        passes = prepared(loaded, task, [HeadSet("", tuple(asking.heads))], taken.replace, advance=advance)
        found = question.answer(replace(asking, passes=passes, advance=advance))
    if measured.out is not None:
        line = f"{model_name(loaded.name)}, {task.name}, {len(task)} sequences"
        _write(found, question, measured.out, style.of(replace(style.of_model(loaded.name).about, line=line)))
    output.emit(found.table, output.wanted_format(measured.format), lambda: found.sheet(on.top))
    for note in found.notes:
        output.talk(note, measured.quiet)
    return 0


def _write(found: Result, question: HeadQuestion, folder: Path, style: Style) -> None:
    """The table, and the figure where there is one."""
    from attnscope.tables import save

    save(found.table, folder / f"{question.name}.parquet")
    if found.figure is not None:
        name, draw = found.figure
        draw(folder / f"{name}.{style.image}", style)


def _pairs_cost(asking: Asking) -> int:
    from attnscope.study.ablation.pairs import pair_sets

    return asking.passes.token_layers(pair_sets(asking.heads))


def _pairs(asking: Asking) -> Result:
    """The synergy of every two heads."""
    from attnscope.study.ablation.effects import effects_of
    from attnscope.study.ablation.pairs import pair_sets, synergies

    if len(asking.heads) < 2:
        raise InputError("a pair takes two heads, and one was named", "name more of them")
    _, effect_SK = effects_of(asking.passes, pair_sets(asking.heads), asking.parts, asking.advance)
    found = synergies(asking.heads, effect_SK)
    return Result(found.table(), lambda top: pairs_sheet(found, top))


def _pruning_cost(asking: Asking) -> int:
    from attnscope.study.ablation.prune import prune_cost

    return asking.passes.token_layers([]) + prune_cost(asking.passes, len(asking.heads))


def _pruning(asking: Asking) -> Result:
    """The heads in the order in which they are missed least."""
    from attnscope.study.ablation.prune import curve, pruned

    loaded, passes = asking.passes.loaded, asking.passes
    intact = float(passes.measured([], asking.advance)[:, 0].mean())
    steps = list(pruned(passes, asking.heads, asking.parts, asking.advance))

    def draw(path: Path, style: Style) -> None:
        from attnscope.figures.pruning import save_pruning

        names = [head_name(one.layer, one.head) for one in steps]
        guess = math.log(loaded.geometry.vocab_size)
        save_pruning(path, names, [intact, *(one.value for one in steps)], [("uniform guess", guess)], style)

    note = f"intact {intact:.3f} {passes.measure.unit}"
    return Result(curve(steps, intact), lambda top: prune_sheet(steps, intact, top), (note,), ("prune", draw))


def _screen_cost(asking: Asking) -> int:
    from attnscope.intervene.gradient import BACKWARD
    from attnscope.study.ablation.screen import TRIED

    return (BACKWARD + 1 + TRIED) * asking.passes.token_layers([])


def _screen(asking: Asking) -> Result:
    """All heads to first order, and some of them ablated."""
    from attnscope.study.ablation.screen import screened

    found = screened(asking.passes, asking.advance)
    return Result(found.table(), lambda top: screen_sheet(found, top), (trusted(found),))


QUESTIONS: Mapping[str, HeadQuestion] = {
    "--pairs": HeadQuestion("pairs", _pairs_cost, _pairs),
    "--prune": HeadQuestion("prune", _pruning_cost, _pruning),
    "--method gradient": HeadQuestion("gradient", _screen_cost, _screen),
}
