"""`--help` in plain text, in columns at the terminal's width: what a command asks, its input, its output, the model.

A plain --help has the most used options, and those of model and engine by name, `--help all` all of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import typer

from attnscope.cli.config import ALL, SettingsCommand, with_options
from attnscope.cli.option_groups import FIRST, parameters, records
from attnscope.cli.options import PANELS, EngineChoice, Loading, MayAsk

NARROW, WIDE = 29, 60  # columns of the names, at most: where a help text is to stand beside them
SHORT = "    "  # the room of `-t, `
EXAMPLE_INDENT = 2
WORDS = re.compile(r"""(?:--?[\w-]+ (?=[^-\s&|]))?(?:"[^"]*"|'[^']*'|\S)+""")  # an option with its value is one
UNBROKEN = "\xa0"  # a space where no line ends; printed as a plain one
ASK, INPUT, OUTPUT, MODEL, SETTINGS = PANELS
TOGETHER = "Options"  # the one panel of a command with few options
FEW = 8  # options, without those of the model: so many need one panel, and a plain --help lists all


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
        options, whole = listed_options(ctx), bool(ctx.meta.get(ALL))
        listed, named = (options, []) if whole else most_used(options, self.groups)
        shown = [(panel_of(option, options), record) for option in listed if (record := record_of(option, ctx))]
        if whole:
            shown += [(SETTINGS, (SHORT + names, unbroken(text))) for names, text in records(self.groups, ctx)]
        most = WIDE if formatter.width > 120 else NARROW
        width = max((len(names) for _, (names, _) in shown if len(names) <= most), default=0)
        for panel in (TOGETHER, *PANELS):
            if rows := [(names.ljust(width), text) for name, (names, text) in shown if name == panel]:
                with formatter.section(panel):
                    formatter.write_dl(rows, col_max=width)
        if named:
            with formatter.section(MODEL):
                names = (" ".join(sorted(option.opts, key=len)) for option in named)  # `-m --model`
                formatter.write_text(f"{', '.join(names)}: attnscope help model")
        if left := len(options) - len(listed) - len(named):
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(f"{left} more options: {ctx.command_path} --help all")


class ModelOptions(EngineChoice, MayAsk, Loading):
    """The options of model and engine."""


def model_help(ctx: Any) -> str:
    """The help of model and engine, which most commands share."""

    @with_options(ModelOptions)
    def model(options: ModelOptions) -> int:
        """Which model reads the text, and which engine computes its attention.

        A model is named by `demo`, which is in the package, by a folder that save_pretrained wrote, by a GGUF file, by
        the folder of an adapter, or by its id on the Hugging Face hub, OWNER/NAME.

        Most commands have these options. `attnscope help COMMAND all` lists those that a command has.
        """
        raise NotImplementedError

    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(cls=PanelCommand, add_help_option=False)(model)
    command: Any = typer.main.get_command(alone)
    command.groups = (ModelOptions,)
    context = command.context_class(command, info_name="attnscope COMMAND", max_content_width=ctx.max_content_width)
    context.meta[ALL] = True
    shown: str = command.get_help(context)
    return shown


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
    """The arguments and options that --help may list, the arguments first."""
    listed = [option for option in context.command.get_params(context) if not getattr(option, "hidden", False)]
    return sorted(listed, key=lambda option: option.param_type_name != "argument")


def most_used(options: Sequence[Any], groups: Sequence[type]) -> tuple[list[Any], list[Any]]:
    """What a plain --help lists, and what it names on the line of model and engine."""
    declared = parameters(*groups)
    few = is_few(options)
    first = [
        option
        for option in options
        if few
        or option.name not in declared
        or declared[option.name].is_argument
        or FIRST in declared[option.name].extra
    ]
    named = [option for option in first if panel_of(option) == MODEL and FIRST in declared[option.name].extra]
    return [option for option in first if panel_of(option) not in (MODEL, SETTINGS)], named


def is_few(options: Sequence[Any]) -> bool:
    """Whether a command has so few options besides those of the model that one panel holds them."""
    return sum(panel_of(option) not in (MODEL, SETTINGS) for option in options) <= FEW


def whole_help(context: Any) -> str:
    """What to type for all options of a command: `attnscope heads --help all`, `attnscope metrics --help`."""
    options = listed_options(context)
    listed, named = most_used(options, getattr(context.command, "groups", ()))
    return f"{context.command_path} --help" + " all" * (len(listed) + len(named) < len(options))


def panel_of(parameter: Any, options: Sequence[Any] = ()) -> str:
    """The heading over an option or argument; options: all that the command lists."""
    # --help itself has no panel, and is listed last.
    panel = INPUT if parameter.param_type_name == "argument" else parameter.rich_help_panel or OUTPUT
    return TOGETHER if options and panel not in (MODEL, SETTINGS) and is_few(options) else panel


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
