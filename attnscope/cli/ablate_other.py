"""What else `ablate` answers of the same heads and task: pairs, a pruning, a screen by gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from attnscope.cli import output
from attnscope.cli.ablate_tables import pairs_sheet, prune_sheet, screen_sheet, trusted
from attnscope.cli.groups import option_group
from attnscope.cli.intervals import interval_notes
from attnscope.errors import UsageError
from attnscope.signals import unwinding

if TYPE_CHECKING:
    from attnscope.calls.ablate import AblateOptions
    from attnscope.cli.ablate_options import Measured, On, Taken
    from attnscope.figures import Style
    from attnscope.intervene.task import Task
    from attnscope.model.loaded import LoadedModel
    from attnscope.selection import HeadIndex
    from attnscope.sheets import Sheet


@option_group
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
        return any(self._wishes.values()) and not self.pairs

    def check(self, taken: Taken) -> None:
        """Raises UsageError for what only sets can have."""
        wanted = [f"--by {taken.by}"] * (taken.by == "kv") + ["--each"] * taken.each
        wanted += [f"--controls {taken.controls}"] * (taken.controls == "all")
        asked = next((name for name, asked in self._wishes.items() if asked), None)
        if asked is not None and wanted:
            raise UsageError(f"{wanted[0]} is for sets, and {asked} was given", "leave out one of them")


def ask_otherwise(
    loaded: LoadedModel,
    task: Task,
    heads: Sequence[HeadIndex],
    asked: AblateOptions,
    groups: tuple[On, Measured, Style],
) -> int:
    """Ask, print and write; heads: all of the model where none were named."""
    from attnscope.calls.ablate_other import QuestionPlan

    (on, measured, style), question = groups, asked.question
    assert question is not None
    plan = QuestionPlan(loaded, task, heads, question, asked)
    cost, operations = plan.cost(lambda count: on.of_all(count, task))
    said = f"{question.name} of {len(plan.asking.heads)} heads on {on.of_all(len(task), task)} sequences of {task.name}"
    said += f": {cost} tokens x layers, about {operations:.0e} operations"
    if on.dry_run:
        with output.progress("measuring a batch", None, measured.quiet):
            seconds = plan.seconds(cost)
        output.show(said + output.estimated(seconds))
        return 0
    output.talk(said, measured.quiet)
    with unwinding():
        found = plan.run(output.Talk(measured.quiet), cost, style).answer
    sheet, notes = SHEETS[question.name](found.found)
    format = output.wanted_format(measured.format)
    output.emit_first(found.table, on, format, lambda: sheet(on.shown), measured.quiet)
    for note in notes:
        output.talk(note, measured.quiet)
    return 0


PRUNED = "each step is chosen and measured on the same sequences: on average its loss is too low"
Shown = tuple[Callable[[int | None], "Sheet"], tuple[str, ...]]  # of the first rows, and the notes below


def _of_pruning(found: Any) -> Shown:
    steps, intact, unit = found
    return (lambda top: prune_sheet(steps, intact, top)), (f"intact {intact:.3f} {unit}", PRUNED)


SHEETS: Mapping[str, Callable[[Any], Shown]] = {
    "pairs": lambda found: (
        (lambda top: pairs_sheet(found, top)),
        tuple(interval_notes(found.statistics, "sequences")),
    ),
    "prune": _of_pruning,
    "gradient": lambda found: ((lambda top: screen_sheet(found, top)), (trusted(found),)),
}
