"""`attnscope metrics`: what each number is."""

from __future__ import annotations

from typing import Annotated

import typer

from attnscope.cli import options, output

EXAMPLES = ("attnscope metrics", "attnscope metrics induction")


def metrics(
    id: Annotated[str | None, typer.Argument(help="A metric's id; all of them when left out.")] = None,
    format: options.Format = None,
) -> int:
    """What each metric is: formula, rows, unit, range, source; and the rules that name a head's role."""
    from attnscope.metrics import METRICS, ROWS, known
    from attnscope.tables import Table

    chosen = [METRICS[name] for name in (known([id]) if id else METRICS)]
    fields = ("id", "formula", "unit", "range", "source", "reading")
    columns = {field: [getattr(metric, field) for metric in chosen] for field in fields}
    columns["rows"] = [ROWS[metric.rows][0] for metric in chosen]
    output.emit(Table(columns), output.wanted_format(format), lambda: _sheet(columns, with_roles=id is None))
    return 0


def _sheet(columns: dict[str, list[str]], with_roles: bool):  # type: ignore[no-untyped-def]
    from rich.text import Text

    from attnscope.roles import ROLES

    sheet = Text()
    for values in zip(*columns.values(), strict=True):
        metric = dict(zip(columns, values, strict=True))
        sheet.append(metric["id"] + "\n", style="bold")
        for field in ("formula", "rows", "unit", "range", "reading", "source"):
            sheet.append(f"  {field:8} ", style="dim").append(metric[field] + "\n")
    if with_roles:
        sheet.append("roles, the first that holds\n", style="bold")
        for role in ROLES:
            sheet.append(f"  {role.name:16}", style="bold").append(
                f" {role.condition}; {role.needed} rows ({role.rows})\n"
            )
    return sheet
