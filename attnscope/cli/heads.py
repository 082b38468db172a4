"""`attnscope heads`: what every head does with a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from typer import Option

from attnscope.cli import output
from attnscope.cli.groups import recorded
from attnscope.cli.options import Drawing, Entries, Printing, Relations, TextRun, Top
from attnscope.cli.signals import unwinding
from attnscope.cli.takes import takes

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from attnscope.observe import Head, Observation

EXAMPLES = (
    'attnscope heads --text "the financial bank is located on river bank" --out runs/bank',
    "attnscope heads --file README.md --truncate right --sort induction --top 5",
)
# heading of each metric on the terminal, in the order in which narrow screens keep them
SHORT = {
    "focus": "focus",
    "previous_token": "prev",
    "induction": "induct",
    "first_token": "first",
    "entropy": "entropy",
    "duplicate_token": "dupl",
    "self": "self",
    "distance": "dist",
    "effective_keys": "eff keys",
    "sink": "sink",
    "confidence": "conf",
    "local_mass_32": "loc 32",
    "entropy_normalised": "entr norm",
    "off_token_mass": "off tok",
}


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

    from attnscope.cli.single import observe_text, report_checks

    loaded, seen = observe_text(
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
    seen.heads = rank(seen.kept_heads(), ranking.sort)
    shown = seen.heads[: ranking.top]
    if printing.out:
        from attnscope.cli.export import export

        names = [head.name for head in (seen.heads if entries.select else shown)]
        options = recorded(asked, entries, ranking, printing, relations, drawing)
        with unwinding():
            export(printing, loaded, seen, names, drawing.style(), relations.min_weight, options)
    output.emit(seen.table(), format, lambda: picture(seen, shown, ranking.sort))
    for line in missing_support(seen):
        output.talk(line, printing.quiet)
    return report_checks(loaded, seen, printing.quiet)


def rank(found: Sequence[Head], key: str) -> list[Head]:
    """The selected heads, largest score first; nulls last, ties in the model's order."""
    return sorted(found, key=lambda head: (math.isnan(head.score[key]), -head.score[key], head.layer, head.kv_head))


def picture(seen: Observation, shown: Sequence[Head], sort: str) -> RichTable:
    """The ranked heads for a person: as many metrics as the terminal has room for."""
    relations = [strongest(seen, head) for head in shown]
    names = _columns_that_fit(shown, relations, sort)
    table = output.sheet()
    table.add_column("head", no_wrap=True)
    table.add_column("kv", justify="right", no_wrap=True)
    table.add_column("role", no_wrap=True)
    for name in names:
        table.add_column(SHORT[name] + (" ▾" if name == sort else ""), justify="right", no_wrap=True)
    table.add_column("strongest relation", min_width=8)
    for head, relation in zip(shown, relations, strict=True):
        cells = [_number(head.score[name]) for name in names]
        table.add_row(head.name, str(head.kv_head), head.role, *cells, output.one_line(relation))
    even = seen.even[shown[0].layer]
    table.add_section()
    table.add_row(
        "even",
        "",
        "",
        *(_number(even[name]) for name in names),
        output.one_line("attention spread evenly"),
        style="dim",
    )
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
    taken = 10 + 3 + 16 + max(24, *(len(text) for text in relations))
    room = output.width() - taken
    names = []
    for name in [sort, *(name for name in SHORT if name != sort)]:
        need = max(len(SHORT[name]) + 2 * (name == sort), 5) + 1
        if need <= room:
            names.append(name)
            room -= need
    return sorted(names, key=list(SHORT).index)


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{round(value, 2) + 0.0:.2f}"  # + 0.0: no -0.00
