"""`attnscope heads`: what every head does with a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from typer import Option

from attnscope.cli import output
from attnscope.cli.groups import recorded, spelled
from attnscope.cli.options import Drawing, Entries, Printing, Relations, TextRun, Top
from attnscope.cli.takes import takes

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from attnscope.observation import Head, Observation

EXAMPLES = (
    'attnscope heads --text "the financial bank is located on river bank" --out runs/bank',
    "attnscope heads --file README.md --truncate right --sort induction --top 5",
)
# The metrics that narrow screens keep, first to last; those not named here come after them.
KEPT_FIRST = (
    *("focus", "previous_token", "induction", "first_token", "entropy", "duplicate_token", "self", "distance"),
    *("effective_keys", "sink", "confidence", "local_mass_32", "entropy_normalised", "off_token_mass"),
)


@dataclass(frozen=True, kw_only=True)
class Ranking(Top):
    """In which order the heads stand, and how many are printed."""

    sort: Annotated[str, Option(help="Rank by a metric of `attnscope metrics`.", metavar="METRIC")] = "focus"
    top: Annotated[int, Option(help="Heads in the printed table.")] = 20


GROUPS = (TextRun, Entries, Ranking, Printing, Relations, Drawing)


@takes(*GROUPS)
def heads(
    asked: TextRun, entries: Entries, ranking: Ranking, printing: Printing, relations: Relations, drawing: Drawing
) -> int:
    """What every head does with a text, as a ranked table.

    On a terminal the heads are ranked by --sort; in a pipe all heads are printed as csv. With --out, relations,
    heatmaps and a manifest are written too.
    """
    from attnscope.measure.metrics import known

    entries.check(relations.group, drawing.scale)
    known([ranking.sort])
    format = output.wanted_format(printing.format)

    from attnscope.cli.single import export_text, observe_text, report_checks

    seen = observe_text(
        asked,
        entries,
        printing,
        key_zero=drawing.sink == "keep",
        relations=printing.out is not None,
        top_k=relations.keys_per_query,
        group=relations.group,
        maps="all" if printing.out else None,
        **drawing.maps(),
    )
    shown = seen.kept_heads(ranking.sort)[: ranking.top]
    if printing.out:
        names = [head.name for head in (seen.kept_heads() if entries.select else shown)]
        options = recorded(asked, entries, ranking, printing, relations, drawing)
        style = drawing.style(spelled("heads", asked, entries, ranking, printing, relations, drawing))
        how = {"sort": ranking.sort, "min_weight": relations.min_weight, "style": style}
        export_text(seen, printing, options, heads=names, **how)
    output.emit(seen.table(ranking.sort), format, lambda: rendered(seen, shown, ranking.sort))
    for line in missing_support(seen):
        output.talk(line, printing.quiet)
    return report_checks(seen, printing.quiet)


def rendered(seen: Observation, shown: Sequence[Head], sort: str) -> RichTable:
    """The ranked heads for a person: as many metrics as the terminal has room for."""
    relations = [strongest(seen, head) for head in shown]
    from attnscope.measure.metrics import METRICS

    names = _columns_that_fit(shown, relations, sort)
    table = output.sheet()
    table.add_column("head", no_wrap=True)
    table.add_column("kv", justify="right", no_wrap=True)
    table.add_column("role", no_wrap=True)
    for name in names:
        table.add_column(METRICS[name].short + (" ▾" if name == sort else ""), justify="right", no_wrap=True)
    table.add_column("strongest relation", min_width=8)
    for head, relation in zip(shown, relations, strict=True):
        cells = [_number(head.score[name]) for name in names]
        table.add_row(head.name, str(head.kv_head), head.role, *cells, output.one_line(relation))
    uniform = seen.uniform((shown[0].layer, shown[0].kind))
    table.add_section()
    cells = [_number(uniform[name]) for name in names]
    table.add_row("uniform", "", "", *cells, output.one_line("attention spread evenly"), style="dim")
    return table


def strongest(seen: Observation, head: Head) -> str:
    """A head's strongest relation as text: `bank(8) → river(7) 0.63`."""
    if head.strongest is None:
        return "-"
    label = [shown.strip("·") or shown for shown in seen.prompt.labels]
    query, key, weight = head.strongest.query, head.strongest.key, head.strongest.weight
    return f"{label[query]}({query}) → {label[key]}({key}) {weight:.2f}"


def missing_support(seen: Observation) -> list[str]:
    """Why heads have no role, where the text is too short or repeats too little to show it."""
    from attnscope.measure.roles import unsupported

    first = next(iter(seen.support.values()), None)
    return [f"no role without support: {line}" for line in unsupported(first)] if first else []


def _columns_that_fit(shown: Sequence[Head], relations: Sequence[str], sort: str) -> list[str]:
    from attnscope.measure.metrics import METRICS

    order = list(dict.fromkeys((*KEPT_FIRST, *METRICS)))
    taken = 10 + 3 + 16 + max(24, *(len(text) for text in relations))
    room = output.width() - taken
    names = []
    for name in [sort, *(name for name in order if name != sort)]:
        need = max(len(METRICS[name].short) + 2 * (name == sort), 5) + 1
        if need <= room:
            names.append(name)
            room -= need
    return sorted(names, key=order.index)


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{round(value, 2) + 0.0:.2f}"  # + 0.0: no -0.00
