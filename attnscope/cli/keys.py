"""`attnscope keys`: what every token receives as a key."""

from __future__ import annotations

from functools import partial

from attnscope.cli import output
from attnscope.cli.config import with_options
from attnscope.cli.one_text import export_text, observe_text, report_checks, say_shares
from attnscope.cli.option_groups import of_run
from attnscope.cli.options import Heads, Queries, TextRun
from attnscope.cli.output import Results, Top, writing_to
from attnscope.cli.relations import relations_sheet
from attnscope.metrics.roles import SINK_MASS
from attnscope.utils.folders import TABLES

TOP_KEY = "top key of"  # the heading of the column `resting` on a terminal
EXAMPLES = (
    'attnscope keys --text "the cat sat on the mat" --top 3',
    'attnscope keys --text "the cat sat on the mat" --query last',
    'echo "the bank by the river" | attnscope keys --text - --select last --format jsonl',
)


Listing = writing_to(Results, "Folder for keys.csv and manifest.json, or a file for the table.", *TABLES)


LEGEND = (
    "received: mean weight on the token as a key, over queries and heads",
    f"heads: how many give it most, with a mean weight above {SINK_MASS}; {TOP_KEY}: each of them, with that weight",
)


@with_options(TextRun, Heads, Queries, Top, Listing)
def keys(asked: TextRun, chosen: Heads, question: Queries, top: Top, printing: Results) -> int:
    """List the weight on each token as a key, and its main heads.

    The number is the mean weight on the token over queries and heads, largest first. Each head is listed under the
    token it attends to most, if that gets over 0.3 on average. --query takes the mean over those queries, --select
    over those heads. `attnscope heads` has a row per head, with its top key.
    """
    format = output.wanted_format(printing.format)

    from attnscope.observe.request import Request

    options = of_run("keys", asked, chosen, question, top, printing)
    keep = Request(view=chosen.view(), metrics=(), **question.asks())
    seen = observe_text(asked, chosen, printing, options, keep)
    table = seen.key_table()
    export_text(seen, printing, options=options, figures=(), keys=True)
    titles = [TOP_KEY if name == "resting" else name for name in table.column_names]
    sheet = partial(relations_sheet, table.rename_columns(titles), top.shown, wrapped=TOP_KEY)
    output.emit_first(table, top, format, sheet, printing)
    output.log_lines(LEGEND if format == "table" else (), printing.quiet)
    say_shares(seen, printing.quiet)
    return report_checks(seen, printing.quiet)
