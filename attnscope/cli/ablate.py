"""`attnscope ablate`: what a task costs without some heads, alone, together, and against random sets.

The options of `attnscope ablate`: which heads go, on what, and where the table goes.

What else `ablate` answers of the same heads and task: pairs, a pruning, a screen by gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from attnscope.cli import output
from attnscope.cli.config import with_options
from attnscope.cli.figure_options import MOST_SEQUENCES, MOST_SETS, Look, Sequences, StudyTable
from attnscope.cli.option_groups import FIRST, OptionGroup, check_one_given, command_line, fill
from attnscope.cli.options import Heads, Seed
from attnscope.cli.output import Top, writing_to
from attnscope.cli.scan import Studied
from attnscope.cli.study import Printed, load_studied, print_study, show_cost
from attnscope.cli.study_tables import (
    ablation_notes,
    interval_notes,
    pairs_sheet,
    prune_sheet,
    screen_sheet,
    sets_sheet,
    trusted,
)
from attnscope.errors import UsageError
from attnscope.utils.signals import unwinding

if TYPE_CHECKING:
    from attnscope.interventions.spec import Task


class Taken(Heads):
    """Which heads are taken away, and what replaces them."""

    sets: Annotated[Path | None, 'File of sets, per line {"set": "name", "heads": ["L3H0", "L3H1"]}.', FIRST] = None
    atlas: Annotated[Path | None, "Folder of `scan`: sets are its roles, or the heads of @ROLE.", "DIR"] = None
    by: Annotated[Literal["kv"] | None, "Remove whole groups: all heads of a kv head."] = None
    each: Annotated[bool, "Remove every head of the model alone, too."] = False
    replace: Annotated[
        Literal["mean", "zero", "resample"],
        "Replacement of a head: mean over other sequences, zero, or resample (the output in another sequence).",
        FIRST,
    ] = "mean"
    random: Annotated[int, "Number of random sets of equal size to compare with.", Option(min=0, max=MOST_SETS)] = 100
    controls: Annotated[
        Literal["unnamed", "all"], "Draw random sets from heads outside all sets, or from all heads."
    ] = "unnamed"

    def __post_init__(self) -> None:
        named = [f"--{name}" for name in ("select", "atlas") if getattr(self, name) is not None]
        if self.sets is not None and named:
            raise UsageError(f"{named[0]} and --sets were both given", "give one of them")

    @property
    def nothing(self) -> bool:
        """Whether no heads were named."""
        return self.select is None and self.sets is None and self.atlas is None


class On(Sequences, Seed, Top, panel="What to ask"):
    """What is to be predicted meanwhile."""

    on: Annotated[
        str | None,
        'Task: copy (repeated tokens), texts (of --texts), or a file with {"text": "...", "targets": '
        "[[12, 16]]} per line.",
        "copy|texts|FILE",
        FIRST,
    ] = None
    texts: Annotated[str | None, "Corpus, for the loss of every next token.", "FILE"] = None
    sequences: Annotated[int, "Sequences or texts at most; intervals need 32.", Option(min=2, max=MOST_SEQUENCES)] = 64
    top: Annotated[
        str | None,
        "Sets, pairs, steps or heads printed: a number, or all (default: 40 on a terminal, all in a "
        "pipe). Files have all.",
    ] = None

    def __post_init__(self) -> None:
        if self.texts is not None and self.on not in (None, "texts"):
            raise UsageError(f"--texts was given, and --on {self.on}", "leave out one of them")
        if self.texts is None and self.on == "texts":
            raise UsageError("--on texts needs a corpus", "name it with --texts FILE")

    def of_all(self, count: int, task: Task) -> int:
        """What all sequences take, where those of the task take so much: a rehearsal draws few of equal length."""
        drawn = self.texts is None and self.on in (None, "copy")
        return count * self.sequences // len(task) if drawn else count

    def read_texts(self) -> list[str] | None:
        """The texts of --texts; None without it."""
        if self.texts is None:
            return None
        from attnscope.corpus.items import texts_in

        return [item.text for item in texts_in(self.texts, self.sequences)]


Measured = writing_to(StudyTable, "Folder for table and facts; a stopped run resumes.")


class VariantOptions(OptionGroup, panel="What to ask"):
    """Another question than what sets cost."""

    pairs: Annotated[bool, "Measure pairwise synergy instead: the loss of two heads beyond the sum of both alone."] = (
        False
    )
    prune: Annotated[bool, "Remove heads one by one instead, the least costly first."] = False
    method: Annotated[
        Literal["replace", "gradient"],
        "gradient: estimate all heads to first order, and print the quality of their order.",
    ] = "replace"

    def __post_init__(self) -> None:
        check_one_given(self._wishes, "ask one question at a time")

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


def rows_of_sets(result: Any) -> Iterable[int]:
    """How many rows each set has."""
    return Counter(result.table()["set"].to_pylist()).values()


# Of each question what a terminal shows of the first rows, and the lines below.
ANSWERS: Mapping[str, Printed[Any]] = {
    "ablation": Printed(sets_sheet, ablation_notes, what="sets", sizes=rows_of_sets),
    "pairs": Printed(pairs_sheet, lambda record: interval_notes(record.statistics, "sequences")),
    "prune": Printed(prune_sheet, lambda record: [f"intact {record.intact:.3f} {record.unit}", PRUNED]),
    "gradient": Printed(screen_sheet, lambda record: [trusted(record)]),
}
EXAMPLES = (
    "attnscope ablate demo --select @previous-token --sequences 32 --out runs/ablate",
    "attnscope ablate demo --select 3.0-1,1.5 --pairs --sequences 32",
    "attnscope ablate demo --prune --dry-run",
    "attnscope ablate demo --method gradient --sequences 32",
)


@with_options(Studied, Taken, On, VariantOptions, Measured, Look)
def ablate(studied: Studied, taken: Taken, on: On, otherwise: VariantOptions, measured: StudyTable, look: Look) -> int:
    """Remove heads and measure the loss.

    A head's output is replaced before the output projection. The loss is that of the prediction, against the
    intact text's, in nats per token. Heads can back each other up: the loss of all together can exceed the
    sum of each alone. Sets are the roles of an atlas, the sets of a file, or a selection and each of its heads.
    Without any, probes find the roles first. A head of a linear layer goes by its name, linear.3.2: its output
    is replaced before gate and norm.
    """
    otherwise.check(taken)

    loaded = load_studied(studied, measured)

    from attnscope.api.ablate import (
        AblateOptions,
        atlas_named,
        loss_task,
        named_sets,
        probes_of,
        run_ablation,
        study_of,
    )

    asked = fill(AblateOptions, taken, on, otherwise, measured)
    # A question of all heads needs none that are named.
    task, whole = loss_task(loaded, on.read_texts(), asked, on.drawn), otherwise.asks_all and taken.nothing
    # Without an atlas the sets are not known before the probes have run: what both take is an estimate.
    if on.dry_run and taken.nothing and not whole and atlas_named(loaded, None) is None:
        layers = len(loaded.geometry.layers)
        output.show(
            f"probes find the roles: {probes_of(loaded, on.seed).tokens} tokens x {layers} layers; then per set and "
            f"random set at most {on.of_all(task.tokens, task)} tokens x {layers} layers"
        )
        return 0
    style = look.figure_style(command_line("ablate", studied, taken, on, otherwise, look))
    tell = output.TerminalProgress(measured.quiet)
    with unwinding():
        heads = taken.sets if taken.sets is not None else taken.select
        named, atlas = ([], None) if whole else named_sets(loaded, heads, asked, tell)
    study = study_of(loaded, task, named, asked)
    cost = study.cost(lambda count: on.of_all(count, task))
    if on.dry_run:
        show_cost(cost, measured.quiet)
        return 0
    output.log(cost.line, measured.quiet)
    with unwinding():
        result = run_ablation(study, asked, atlas, tell, cost.steps, style)
    return print_study(result.found, on, measured, ANSWERS[result.found.stem])
