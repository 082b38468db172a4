"""`--help` in plain text: the options in the panels that they name, in columns, at the terminal's width."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand

from attnscope.cli.completion import as_typed
from attnscope.cli.options import PANELS

NARROW, WIDE = 29, 60  # columns of the names, at most: where a help text is to stand beside them
SHORT = "    "  # the room of `-t, `
UNBROKEN = "\xa0"  # a space where no line ends; printed as a plain one


class PanelCommand(TyperCommand):
    """A command whose options stand under the headings of their panels, the main one first."""

    def get_params(self, ctx: Any) -> Any:
        return as_typed(super().get_params(ctx), ctx)

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace(UNBROKEN, " ")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        shown = [(panel_of(one), record) for one in self.get_params(ctx) if (record := record_of(one, ctx))]
        most = WIDE if formatter.width > 120 else NARROW
        width = max((len(names) for _, (names, _) in shown if len(names) <= most), default=0)
        for panel, rows in by_panel(shown):
            with formatter.section(panel):
                formatter.write_dl([(names.ljust(width), text) for names, text in rows], col_max=width)


def panel_of(parameter: Any) -> str:
    """The heading that an option or argument stands under."""
    if parameter.param_type_name == "argument":
        return "Arguments"
    return parameter.rich_help_panel or PANELS[0]


def record_of(parameter: Any, ctx: Any) -> tuple[str, str] | None:
    """The names and the help of an option, long names in one column whether or not there is a short one."""
    record = parameter.get_help_record(ctx)
    if record is None:
        return None
    text, mark, default = record[1].partition("  [")
    text += mark + default.replace(" ", UNBROKEN)
    if parameter.param_type_name == "argument":
        return record[0].partition(" <")[0], text
    names = record[0].replace(" / ", "/")
    return (SHORT + names if names.startswith("--") else names), text


def by_panel(shown: list[tuple[str, tuple[str, str]]]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The records of each panel, the panels in their order."""
    for panel in ("Arguments", *PANELS):
        if rows := [record for name, record in shown if name == panel]:
            yield panel, rows
