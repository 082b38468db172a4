"""`attnscope metrics`: what each number is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from attnscope.cli import output
from attnscope.cli.completion import metrics as metric_names
from attnscope.cli.options import Format
from attnscope.cli.takes import takes

if TYPE_CHECKING:
    from rich.table import Table as RichTable

EXAMPLES = ("attnscope metrics", "attnscope metrics induction")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Which metrics are shown."""

    id: Annotated[
        str | None, Argument(help="A metric's id; all of them when left out.", autocompletion=metric_names)
    ] = None


@takes(Asked, Format)
def metrics(asked: Asked, printing: Format) -> int:
    """What each metric is, and the rules that name a head's role.

    Of a metric: its formula, rows, unit, range and source.
    """
    from attnscope.measure.metrics import METRICS, ROWS, known
    from attnscope.tables import as_table

    chosen = [METRICS[name] for name in (known([asked.id]) if asked.id else METRICS)]
    fields = ("id", "formula", "unit", "range", "source", "reading")
    columns = {field: [getattr(metric, field) for metric in chosen] for field in fields}
    columns["rows"] = [ROWS[metric.rows][0] for metric in chosen]
    format = output.wanted_format(printing.format)
    output.emit(as_table(columns), format, lambda: _sheet(columns, with_roles=asked.id is None))
    return 0


def _sheet(columns: dict[str, list[str]], with_roles: bool) -> RichTable:
    """Two columns, so that a long line goes on under its own beginning."""
    from rich.table import Table
    from rich.text import Text

    from attnscope.measure.roles import ROLES

    sheet = Table.grid(padding=(0, 1))
    sheet.add_column(no_wrap=True)
    sheet.add_column()
    for values in zip(*columns.values(), strict=True):
        metric = dict(zip(columns, values, strict=True))
        sheet.add_row(Text("id", style="dim"), Text(metric["id"], style="bold"))
        for field in ("formula", "rows", "unit", "range", "reading", "source"):
            sheet.add_row(Text(field, style="dim"), metric[field])
        sheet.add_row()
    for role in ROLES if with_roles else ():
        sheet.add_row(Text("role", style="dim"), Text(role.name, style="bold"))
        sheet.add_row("", f"{role.condition}; {role.needed} rows ({role.rows})")
    return sheet
