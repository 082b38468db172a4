"""`--help` in plain text, in columns at the terminal's width: the most used options, or all of them in panels."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from attnscope.cli.config import ALL, SettingsCommand
from attnscope.cli.option_groups import records
from attnscope.cli.options import PANELS

NARROW, WIDE = 29, 60  # columns of the names, at most: where a help text is to stand beside them
SHORT = "    "  # the room of `-t, `
EXAMPLE_INDENT = 2
WORDS = re.compile(r"""(?:--?[\w-]+ (?=[^-\s&|]))?(?:"[^"]*"|'[^']*'|\S)+""")  # an option with its value is one
UNBROKEN = "\xa0"  # a space where no line ends; printed as a plain one
ARGUMENTS, MOST_USED, SETTINGS = "Arguments", PANELS[0], PANELS[-1]
MOST = 14  # options of a plain --help; it shows all of a command that has no more


class PanelCommand(SettingsCommand):
    """A command that lists its options by panel, the most used ones first, and its settings last."""

    examples: tuple[str, ...] = ()

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace(UNBROKEN, " ")

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if self.epilog:
            room = formatter.width - EXAMPLE_INDENT
            lines = (continued(line, room) if line[2:] in self.examples else line for line in self.epilog.split("\n"))
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text("\n".join(lines))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        options = listed_options(ctx)
        listed = options if ctx.meta.get(ALL) else most_used(options)
        shown = [(panel_of(option), record) for option in listed if (record := record_of(option, ctx))]
        if len(listed) == len(options):
            shown += [(SETTINGS, (SHORT + names, unbroken(text))) for names, text in records(self.groups, ctx)]
        most = WIDE if formatter.width > 120 else NARROW
        width = max((len(names) for _, (names, _) in shown if len(names) <= most), default=0)
        for panel, rows in by_panel(shown):
            with formatter.section(panel):
                formatter.write_dl([(names.ljust(width), text) for names, text in rows], col_max=width)
        if len(listed) < len(options):
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(f"{len(options) - len(listed)} more options: {ctx.command_path} --help all")


def continued(line: str, room: int) -> str:
    """A command on lines of at most so many characters, broken at blanks outside quotes as a shell continues it.

    >>> continued("  attnscope info demo --tokens 9", 24)
    '  attnscope info demo \\\\\\n      --tokens 9'
    """
    lines, words = [""], WORDS.findall(line)
    for word in words:
        joined = f"{lines[-1]} {word}" if lines[-1] else f"  {word}"
        if (len(joined) + len(" \\") > room and lines[-1] and word != words[-1]) or len(joined) > room:
            lines.append(f"      {word}")
        else:
            lines[-1] = joined
    return " \\\n".join(lines)


def listed_options(context: Any) -> list[Any]:
    """The arguments and options that --help may list."""
    return [option for option in context.command.get_params(context) if not getattr(option, "hidden", False)]


def most_used(options: Sequence[Any]) -> list[Any]:
    """The arguments and options that a plain --help shows."""
    listed = [option for option in options if panel_of(option) != ARGUMENTS and "--help" not in option.opts]
    shown = (ARGUMENTS, MOST_USED, *(PANELS if len(listed) <= MOST else ()))
    return [option for option in options if panel_of(option) in shown]


def whole_help(context: Any) -> str:
    """What to type for all options of a command: `attnscope heads --help all`, `attnscope info --help`."""
    options = listed_options(context)
    return f"{context.command_path} --help" + " all" * (len(most_used(options)) < len(options))


def panel_of(parameter: Any) -> str:
    """The heading over an option or argument."""
    if parameter.param_type_name == "argument":
        return ARGUMENTS
    return parameter.rich_help_panel or MOST_USED


def record_of(parameter: Any, ctx: Any) -> tuple[str, str] | None:
    """The names and the help of an option, long names in one column whether or not there is a short one."""
    record = parameter.get_help_record(ctx)
    if record is None:
        return None
    text = unbroken(record[1])
    if parameter.param_type_name == "argument":
        return record[0].partition(" <")[0], text
    names = record[0].replace(" / ", "/")
    return (SHORT + names if names.startswith("--") else names), text


def unbroken(text: str) -> str:
    """A help text whose default no line end tears apart."""
    words, mark, default = text.partition("  [")
    return words + mark + default.replace(" ", UNBROKEN)


def by_panel(shown: list[tuple[str, tuple[str, str]]]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The records of each panel, the panels in their order."""
    for panel in (ARGUMENTS, *PANELS):
        if rows := [record for name, record in shown if name == panel]:
            yield panel, rows
