"""`attnscope heads`: what every head does with a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from attnscope.cli import output
from attnscope.cli.completion import metrics
from attnscope.cli.groups import recorded, spelled
from attnscope.cli.options import Drawing, Entries, Question, Relations, Results, TextRun, Top
from attnscope.cli.show import FEW, Show, draw, stream
from attnscope.cli.takes import takes

EXAMPLES = (
    'attnscope heads --text "the financial bank is located on river bank" --out runs/bank',
    "attnscope heads --file README.md --truncate right --sort induction --top 5",
)


@dataclass(frozen=True, kw_only=True)
class Ranking(Top):
    """In which order the heads stand, and how many are printed."""

    sort: Annotated[
        str,
        Option(
            help="Rank by a metric of `attnscope metrics`, or layer; -METRIC: smallest first.",
            metavar="METRIC",
            autocompletion=metrics,
        ),
    ] = "focus"
    ascending: Annotated[bool, Option(help="Smallest first.")] = False
    top: Annotated[int | None, Option(help="Heads printed on a terminal, and drawn: a number, or all.")] = 20

    @property
    def order(self) -> str:
        """The metric, with a minus where the smallest come first."""
        return f"-{self.sort.removeprefix('-')}" if self.ascending else self.sort


GROUPS = (TextRun, Entries, Question, Ranking, Results, Relations, Drawing, Show)


@takes(*GROUPS)
def heads(
    asked: TextRun,
    entries: Entries,
    question: Question,
    ranking: Ranking,
    printing: Results,
    relations: Relations,
    drawing: Drawing,
    showing: Show,
) -> int:
    """What every head does with a text, as a ranked table.

    On a terminal the heads are ranked by --sort; in a pipe all heads are printed as csv. With --out, relations,
    heatmaps and a manifest are written too. With --show heads are drawn below the table; in a pipe, on stderr.
    """
    from attnscope.measure.metrics import order_of

    entries.check(relations.group, drawing.scale)
    order_of(ranking.sort)
    format = output.wanted_format(printing.format)

    from attnscope.cli.heads_table import legend, missing_support, rendered
    from attnscope.cli.single import export_text, observe_text, report_checks

    options = recorded(asked, entries, question, ranking, printing, relations, drawing)
    style = drawing.style(spelled("heads", asked, entries, question, ranking, printing, relations, drawing))
    seen = observe_text(
        asked,
        entries,
        printing,
        options,
        relations=printing.out is not None,
        top_k=relations.keys_per_query,
        group=relations.group,
        **question.asks(),
        **drawing.maps(),
        **({"maps": "all"} if printing.out else showing.maps(style, stream(only=False))),
    )
    shown = seen.kept_heads(ranking.order)[: ranking.top]
    if printing.out:
        names = [head.name for head in (seen.kept_heads() if entries.select else shown)]
        how = {"sort": ranking.order, "min_weight": relations.min_weight, "style": style}
        export_text(seen, printing, options, heads=names, spreadsheet=printing.spreadsheet, **how)
        say_rest(len(names), len(seen.heads), "drawn one by one; --top or --select draws others", printing.quiet)
    output.emit(seen.table(ranking.order), format, lambda: rendered(seen, shown, ranking.order), printing.spreadsheet)
    if format == "table":
        output.talk(legend(shown), printing.quiet)
        say_rest(len(shown), len(seen.kept_heads()), "shown; --top N shows more, a pipe gets all", printing.quiet)
    for line in missing_support(seen):
        output.talk(line, printing.quiet)
    if showing.show:
        draw(seen, shown if entries.select else shown[:FEW], style, stream(only=False))
    return report_checks(seen, printing.quiet)


def say_rest(count: int, heads: int, how: str, quiet: bool) -> None:
    """Say how many heads there are, where fewer are shown."""
    output.talk(f"{count} of {heads} heads {how}", quiet or count == heads)
