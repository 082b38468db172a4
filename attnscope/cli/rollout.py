"""`attnscope rollout`: how much of each token's final state is attributed to each input token."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from attnscope.cli import output
from attnscope.cli.config import with_options
from attnscope.cli.figure_options import Map
from attnscope.cli.one_text import export_text, observe_text, report_checks
from attnscope.cli.option_groups import FIRST, command_line, of_run
from attnscope.cli.options import Queries, Relations, Selected, TextRun
from attnscope.cli.output import Results, Top, writing_to
from attnscope.cli.relations import relations_sheet
from attnscope.model.selection import as_ranges
from attnscope.utils.folders import PICTURES, TABLES

if TYPE_CHECKING:
    from attnscope.observe.observation import Observation

EXAMPLES = (
    'attnscope rollout --text "the cat sat on the mat" --query last --top-k 3',
    'attnscope rollout --text "the cat sat on the mat" --top-k 3 --out runs/rolled',
    "attnscope rollout --file README.md --truncate right --group sentences --set sink=mask --out runs/sentences",
)
SUM_TOLERANCE = 1e-4


class Units(Relations):
    """Which keys are listed, of which units."""

    group: Annotated[
        Literal["tokens", "words", "sentences"] | None,
        "Unit of rows and columns: sum over keys, mean over queries (default: tokens, in bins if over 200).",
        FIRST,
    ] = None  # type: ignore[assignment]


OUT = "Folder for rollout.csv, its heatmap and manifest.json, or a file for one of both."
Rolled = writing_to(Results, OUT, *PICTURES, *TABLES)


@with_options(TextRun, Queries, Top, Rolled, Units, Map)
def rollout(asked: TextRun, question: Queries, top: Top, printing: Results, units: Units, drawing: Map) -> int:
    """Attribute each token to the input tokens, by attention rollout.

    Rollout multiplies over all layers the heads' mean plus the residual (Abnar & Zuidema 2020). It ignores values
    and MLPs. A row is a token's state after the last layer; --query lists the rows of those tokens. Encoder and
    decoder are rolled out separately, each over its own text.
    """
    format = output.wanted_format(printing.format)

    from attnscope.observe.request import Request

    groups = (asked, question, top, printing, units, drawing)
    options = of_run("rollout", *groups)
    keep = Request(metrics=(), rollout=units.group or "bins", **question.asks())
    seen = observe_text(asked, Selected(), printing, options, keep)
    top_k = units.keys_per_query
    table = seen.rollout_table(top_k, units.min_weight)
    style = drawing.figure_style(command_line("rollout", *groups))
    export_text(seen, printing, options=options, figures=(), style=style, top_k=top_k, min_weight=units.min_weight)
    sheet = partial(relations_sheet, table, top.shown)
    output.emit_first(table, top, format, sheet, printing)
    return max(
        report_checks(seen, printing.quiet), *(report_rollout(stack, printing.quiet) for stack in seen.stacks.values())
    )


def report_rollout(seen: Observation, quiet: bool) -> int:
    """Say what a stack's rows are where they are not what one expects, and what did not hold; the exit code."""
    rolled = seen.rollout
    if rolled is None:
        return 0
    if rolled.group == "bins" and rolled.longest > 1:
        output.log(f"a row is a run of {rolled.longest} tokens; --group tokens keeps them apart", quiet)
    if passed_over := seen.facts["rollout"]["passed_over"]:
        output.log(f"layers {as_ranges(passed_over)} have no attention: the rollout passes over them", quiet)
    if rolled.row_sum_error <= SUM_TOLERANCE:
        return 0
    output.log(f"check failed: rollout rows sum to 1 only within {rolled.row_sum_error:.2g}", quiet=False)
    return 1
