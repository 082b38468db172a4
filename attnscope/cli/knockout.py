"""`attnscope knockout`: what an answer loses where chosen heads may not look from some tokens at others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnscope.cli import output
from attnscope.cli.copied import knockout_command, knockout_python
from attnscope.cli.figure_options import Look
from attnscope.cli.groups import command_line
from attnscope.cli.heads import GROUPS
from attnscope.cli.knockout_options import Answered, CacheBudgets, Compared, Edges, Table, asked_texts, cut_asked
from attnscope.cli.knockout_table import cautions, notes, shown
from attnscope.cli.place import ONE_BY_ONE, write_file
from attnscope.cli.takes import takes
from attnscope.errors import UsageError
from attnscope.signals import unwinding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnscope.figures import Style
    from attnscope.model.geometry import Geometry
    from attnscope.model.loaded import LoadedModel
    from attnscope.purposes.cut import KnockedModel
    from attnscope.show.knockout_page import Again
    from attnscope.study.knockout.asked import CutPlan
    from attnscope.study.knockout.records import Case, Knocked
    from attnscope.viewer.page import Page

EXAMPLES = (
    'attnscope knockout "the bank of the river, the bank of the" --key river --answer " river" --over heads',
    'attnscope knockout "the bank of the river, the bank of the" --answer " river" --foil " bank" --over keys',
    'attnscope knockout "the bank of the river, the bank of the" --key river --over window:3 --out runs/flow',
    "attnscope knockout --texts facts.jsonl --over layers --random 0 --out runs/facts",
    "attnscope knockout --file README.md --truncate right --keep stream:4+64,stream:4+16 --over layers",
)


@takes(Answered, Edges, CacheBudgets, Compared, Table, Look, file=GROUPS)
def knockout(
    answered: Answered, edges: Edges, budgets: CacheBudgets, compared: Compared, table: Table, look: Look
) -> int:
    """What an answer loses where heads may not look.

    In the rows of the --query tokens (default: last) the weights of the --key tokens are cut in chosen heads, the rows
    computed again, and the model runs on. The effect is what the answer loses against the intact rows of the same
    pass: nats, or with --foil logits. It is compared with that of other keys in the same rows and heads.

    With --keep, heads keep the keys of a cache budget in every row, and the effect is what the text loses per token, or
    the answer. stream:A+N keeps the first A keys and the last N, top:N each row's N largest, h2o:N those of the largest
    sum so far and the most recent. received:N and snap:N@W choose once, at the end of the prompt.
    """
    budgets.check(answered, edges)
    if budgets.keep is not None:
        from attnscope.cli.budgets import measure_budgets

        if table.html is not None:
            raise UsageError("there is no page of cache budgets", "leave out --html")
        return measure_budgets(answered, edges, budgets, compared, table, look)
    output.wanted_format(table.format)  # what it refuses is refused before the work
    text = None
    if answered.texts is None:
        from attnscope.cli.single import read_text

        text = read_text(answered, table)
    output.complain_through_talk(table.quiet)
    asked = asked_texts(answered, edges, text, compared.sequences)

    ask, purpose = cut_asked(answered, edges, compared, text)

    from attnscope.cli.single import answer, load_model
    from attnscope.show.knockout_page import PAGE, Again

    said = command_line("knockout", answered, edges, compared, look)
    asked_as = (answered, edges, compared, text)
    again = Again(said, knockout_command(*asked_as), knockout_python(*asked_as))
    style = look.style(said)
    if text is not None and table.folder is None and not compared.dry_run:
        measured: KnockedModel = answer(answered, ask, purpose, table)
        return _told(measured.found, measured.geometry, compared, table, again, style)
    loaded = load_model(answered, table)
    cases, plan = purpose.ready(loaded, ask, asked, output.Talk(table.quiet))
    if compared.dry_run:
        output.show(_rehearsed(loaded, cases, plan, table.quiet))
        return 0

    from attnscope.study.knockout.effects import knocked_out

    with unwinding():
        with output.progress("cutting", None, table.quiet) as advance:
            found = knocked_out(loaded, cases, plan, table.folder, force=table.force, advance=advance)
        if table.folder is not None:
            from attnscope.show.knockout import save_knockout

            with output.progress("drawing", None, table.quiet):
                save_knockout(found, table.folder, style)
                _page(found, loaded.geometry, again).save(table.folder / PAGE)
    return _told(found, loaded.geometry, compared, table, again, style)


def _page(found: Knocked, geometry: Geometry, again: Again) -> Page:
    from attnscope.show.knockout_page import cuts_page

    return cuts_page(found, geometry, cautions(found, geometry), again)


def _told(found: Knocked, geometry: Geometry, compared: Compared, table: Table, again: Again, style: Style) -> int:
    """The page or the file where one was asked for, the table on stdout, and what to know beside it."""
    if table.file is not None:
        from attnscope.show.knockout import save_knockout

        write_file(
            table.file, found.table, lambda folder: [save_knockout(found, folder, style)], table.quiet, ONE_BY_ONE
        )
    if table.html is not None:
        with unwinding():
            _page(found, geometry, again).save(table.html)
        output.talk(f"wrote {table.html}", table.quiet)
    format = output.wanted_format(table.format)
    output.emit_first(found.table(), compared, format, lambda: shown(found, compared.shown), table.quiet)
    for line in notes(found, geometry):
        output.talk(line, table.quiet)
    return 0


def _rehearsed(loaded: LoadedModel, cases: Sequence[Case], plan: CutPlan, quiet: bool) -> str:
    """What would be done, and its cost at most."""
    from attnscope.cli.rehearsal import number_of, rehearsed
    from attnscope.study.knockout.effects import every_head, planned
    from attnscope.study.knockout.nulls import edges_alone

    asked, passes = planned(loaded, cases, plan)
    cuts, times = [one.cut for one in asked], 1 + 2 * plan.random
    heads = every_head(loaded.geometry) if plan.random and edges_alone(cuts) else []
    total = len(cuts) * times + len(heads)
    said = f"{len(cuts)} cuts, at most {total} with others, on {number_of(len(cases), 'text')}"
    return rehearsed(loaded, passes, cuts, said, quiet, times=times, before=passes.token_layers(heads))
