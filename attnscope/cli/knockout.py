"""`attnscope knockout`: what an answer loses where chosen heads may not look from some tokens at others."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from attnscope.cli import output
from attnscope.cli.budgets import measure_budgets
from attnscope.cli.config import with_options
from attnscope.cli.figure_options import Look
from attnscope.cli.knockout_options import Answered, Compared, Edges, OtherName, Table
from attnscope.cli.option_groups import command_line, fill
from attnscope.cli.reproduce import knockout_python, study_command
from attnscope.cli.study import Printed, load_studied, print_study, questions, read_one, run_study
from attnscope.cli.study_tables import cautions, knockout_notes, knockout_sheet
from attnscope.errors import UsageError
from attnscope.utils.signals import unwinding

if TYPE_CHECKING:
    from pathlib import Path

    from attnscope.model.geometry import Geometry
    from attnscope.serve.questions import KnockedModel
    from attnscope.studies.knockout_records import KnockoutResult
    from attnscope.viewer.page import Page

EXAMPLES = (
    'attnscope knockout "the bank of the river, the bank of the" --key river --answer " river" --over heads',
    'attnscope knockout "the bank of the river, the bank of the" --answer " river" --foil " bank" --over keys',
    'attnscope knockout "the bank of the river, the bank of the" --key river --over window:3 --out runs/flow',
    "attnscope knockout --texts facts.jsonl --over layers --random 0 --out runs/facts",
)


@with_options(Answered, Edges, OtherName, Compared, Table, Look)
def knockout(answered: Answered, edges: Edges, other: OtherName, compared: Compared, table: Table, look: Look) -> int:
    """Block attention edges and measure the loss.

    In the rows of the --query tokens (default: last) the weights on the --key tokens are cut in chosen heads. The
    rows are computed again, and the model runs on. The effect is the loss of the answer against the intact
    text's: in nats, or with --foil in logits. It is compared with that of other keys in the same rows and
    heads.
    """
    other.check(edges)
    if other.keep is not None:
        if table.html is not None:
            raise UsageError("there is no page of cache budgets", "leave out --html")
        return measure_budgets(answered, edges, other, compared, table, look)
    text = read_one(answered, table)

    from attnscope.interventions.spec import AskedText, asked_of
    from attnscope.observe.request import Request

    asks = edges.asks()
    asks["query"] = asks["query"] or "last"
    make = partial(asked_of, shared={**asks, **answered.shared}, each_key=edges.over == "keys")
    asked = questions(answered, text, AskedText.FIELDS, make, compared.sequences)

    from attnscope.cli.one_text import answer
    from attnscope.serve.questions import KnockoutQuestion
    from attnscope.viewer.study_pages import PAGE, Again, cuts_page

    # Of the one text, "" of a corpus, and what is cut in it.
    ask, purpose = answered.ask(text or "", edges, Request(**asks)), fill(KnockoutQuestion, answered, edges, compared)

    # The page says how its numbers are made again: as a command, and as a program.
    said = command_line("knockout", answered, edges, compared, look)
    command = study_command("knockout", text, answered, edges, compared)
    again = Again(said, command, knockout_python(answered, edges, compared, text))
    style = look.figure_style(said)

    def draw(record: KnockoutResult, folder: Path) -> list[Path | None]:
        from attnscope.export.study_figures import save_knockout

        return [save_knockout(record, folder, style)]

    def printed(geometry: Geometry) -> Printed[KnockoutResult]:
        def page(record: KnockoutResult) -> Page:
            return cuts_page(record, geometry, cautions(record, geometry), again)

        def write_html(record: KnockoutResult) -> None:
            if table.html is not None:
                with unwinding():
                    page(record).save(table.html)
                output.log(f"wrote {table.html}", table.quiet)

        return Printed(
            knockout_sheet,
            lambda record: knockout_notes(record, geometry),
            draw,
            lambda record, folder: page(record).save(folder / PAGE),
            write_html,
        )

    # One text may be asked of a server, which writes no folder that a stopped run resumes from.
    if text is not None and table.folder is None and not compared.dry_run:
        measured: KnockedModel = answer(answered, ask, purpose, table)
        return print_study(measured.found, compared, table, printed(measured.geometry))
    loaded = load_studied(answered, table)
    return run_study(purpose.study(loaded, ask, asked), compared, table, printed(loaded.geometry))
