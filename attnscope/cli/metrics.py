"""`attnscope metrics`: what each number is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from attnscope.cli import output
from attnscope.cli.config import with_options
from attnscope.cli.option_groups import OptionGroup
from attnscope.cli.option_groups import metrics as metric_names
from attnscope.cli.output import Format, Quiet
from attnscope.utils.display import Column, Sheet

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table as RichTable

EXAMPLES = ("attnscope metrics", "attnscope metrics induction")


class ChosenMetrics(OptionGroup):
    """Which metrics are shown."""

    id: Annotated[str | None, "Id of a metric (default: all).", "METRIC", Argument(autocompletion=metric_names)] = None


@with_options(ChosenMetrics, Format, Quiet)
def metrics(which: ChosenMetrics, printing: Format, noise: Quiet) -> int:
    """List the metrics, and the rules that name a head's role.

    With an id: formula, rows, unit, range and source of that metric. A pipe gets all metrics as csv.
    """
    from attnscope.metrics.metrics import KNOWN, ROWS, metric_ids
    from attnscope.utils.tables import as_table

    chosen = [KNOWN[name] for name in (metric_ids([which.id]) if which.id else KNOWN)]
    fields = ("id", "short", "formula", "unit", "range", "source", "reading")
    columns = {field: [getattr(metric, field) for metric in chosen] for field in fields}
    columns["rows"] = [ROWS[metric.rows][0] for metric in chosen]
    columns["stacks"] = [", ".join(metric.stacks) for metric in chosen]
    format = output.wanted_format(printing.format)
    output.emit(as_table(columns), format, lambda: _sheet(columns) if which.id else _everything(columns))
    return 0


def _everything(columns: dict[str, list[str]]) -> Group:
    """A row per metric, a row per role, and how to see more."""
    from rich.console import Group
    from rich.text import Text

    from attnscope.metrics.roles import NEAR_UNIFORM, NEEDED_TOKENS, OTHER, ROLES

    shown = ("id", "short", "range", "reading")
    roles = [(role.name, f"{role.condition}; {role.needed} {NEEDED_TOKENS[role.rows]}") for role in ROLES]
    roles.append((OTHER, "none of these, where the text has the rows for all of them; else -"))
    mark = f"a mark, no role: entropy_normalised at least {NEAR_UNIFORM}, as random weights give"
    roles.append(("near_uniform", mark))
    atlas = "with an atlas (attnscope scan) role is what it names, and these are text_role"
    more = "formula, rows, unit and source of a metric: attnscope metrics ID"
    tables = (
        _table(shown, zip(*(columns[name] for name in shown), strict=True)),
        _table(("role on a text", "named where"), roles),
    )
    return Group(*tables, Text(f"{atlas}\n{more}", style="dim"))


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Sheet:
    """Columns of which the last is wrapped between words."""
    columns = [Column(title, align="left", fit="wrap" if title == titles[-1] else "whole") for title in titles]
    return Sheet([dict(zip(titles, row, strict=True)) for row in rows], columns)


def _sheet(columns: dict[str, list[str]]) -> RichTable:
    """A line per field of each metric."""
    from rich.table import Table
    from rich.text import Text

    from attnscope.model.selection import MIXING, SOFTMAX

    every = {", ".join((*SOFTMAX, *MIXING)): "all", ", ".join(SOFTMAX): "all with a softmax"}
    # Two columns, so that a long line continues under its own beginning.
    sheet = Table.grid(padding=(0, 1))
    sheet.add_column(no_wrap=True)
    sheet.add_column()
    for values in zip(*columns.values(), strict=True):
        metric = dict(zip(columns, values, strict=True))
        metric["stacks"] = every.get(metric["stacks"], metric["stacks"])
        sheet.add_row(Text("id", style="dim"), Text(metric["id"], style="bold"))
        for field in ("short", "formula", "rows", "stacks", "unit", "range", "reading", "source"):
            sheet.add_row(Text(field, style="dim"), metric[field])
        sheet.add_row()
    return sheet
