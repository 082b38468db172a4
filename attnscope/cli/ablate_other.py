"""What else `ablate` answers of the same heads and task: pairs, a pruning, a screen by gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from attnscope.cli import output
from attnscope.cli.ablate_tables import (
    first_sets,
    notes,
    pairs_sheet,
    prune_sheet,
    screen_sheet,
    sets_sheet,
    trusted,
)
from attnscope.cli.groups import option_group
from attnscope.cli.intervals import interval_notes
from attnscope.errors import UsageError

if TYPE_CHECKING:
    from attnscope.cli.ablate_options import Measured, On, Taken
    from attnscope.utils.display import Sheet


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


PRUNED = "each step is chosen and measured on the same sequences: on average its loss is too low"


def print_answer(record: Any, on: On, measured: Measured) -> int:
    """The table on stdout, of sets a number of sets and not of rows; on stderr what a reader has to know."""
    format = output.wanted_format(measured.format)
    kind, table = record.stem, record.table()
    if kind == "ablation":
        output.emit(first_sets(table, on.limit(format)), format, lambda: sets_sheet(record, on.shown))
        sets = table["set"].unique()
        rest = on.rest(len(sets.slice(0, on.shown)), len(sets), "sets") if format == "table" else []
        lines = [*rest, *notes(record)]
    else:
        sheet, told = ANSWERS[kind]
        output.emit_first(table, on, format, lambda: sheet(record, on.shown), measured.quiet)
        lines = told(record)
    for line in lines:
        output.talk(line, measured.quiet)
    return 0


# Of each question what a terminal shows of the first rows, and the lines below.
ANSWERS: Mapping[str, tuple[Callable[[Any, int | None], Sheet], Callable[[Any], list[str]]]] = {
    "pairs": (pairs_sheet, lambda record: interval_notes(record.statistics, "sequences")),
    "prune": (
        lambda record, top: prune_sheet(record.steps, record.intact, top),
        lambda record: [f"intact {record.intact:.3f} {record.unit}", PRUNED],
    ),
    "gradient": (screen_sheet, lambda record: [trusted(record)]),
}
