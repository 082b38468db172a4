"""The commands: what `attnscope --help` says of each, and how one is made once it is called."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from itertools import groupby
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from attnscope._version import __version__
from attnscope.cli.option_groups import as_typed

TEXT, CORPUS, STUDY, LOOK_UP = "Read one text", "Read a corpus", "Study a model", "Check and look up"
# Name -> its heading in --help, and the first line of its docstring: `heads` is the function of cli/heads.py, which is
# imported when the command is called, not to list it.
COMMANDS: dict[str, tuple[str, str]] = {
    "heads": (TEXT, "What every head does with a text, as a ranked table."),
    "relations": (TEXT, "Which token looks at which: the strongest keys of every query."),
    "keys": (TEXT, "What every token receives as a key, and from which heads most."),
    "text": (TEXT, "The text itself, coloured by where chosen tokens look."),
    "heatmap": (TEXT, "The attention of a text, drawn: overview, layers, heads."),
    "view": (TEXT, "A text's attention as a page to hover over, in one HTML file."),
    "rollout": (TEXT, "Attention rolled out: which tokens each token is attributed to."),
    "explain": (TEXT, "One head, one sentence, every step with its numbers."),
    "tokens": (TEXT, "A text's tokens by number, and which of them an expression means."),
    "batch": (CORPUS, "Heads and relations of every text of a corpus, as a dataset."),
    "scan": (STUDY, "What each head does on probes, against a null, with intervals."),
    "compare": (STUDY, "Two texts, or two models on the same texts, head by head."),
    "ablate": (STUDY, "What is lost without some heads, alone and together."),
    "knockout": (STUDY, "What an answer loses where heads may not look."),
    "patch": (STUDY, "What an answer loses where heads are as in another text."),
    "why": (STUDY, "Why a head looks where it looks: its logit, by what wrote it."),
    "serve": (LOOK_UP, "Models that stay loaded, for commands that ask about them."),
    "parity": (LOOK_UP, "Every layer against attention written from the papers."),
    "info": (LOOK_UP, "A model's layers, heads, windows, and what N tokens would cost."),
    "metrics": (LOOK_UP, "What each metric is, and the rules that name a head's role."),
    "doctor": (LOOK_UP, "Versions, devices, fonts and caches: what a bug report needs."),
}
PLAIN: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False}
# Of each command too, not inherited alone: a command keeps the --help of the first context that it is called in.
HELP: dict[str, Any] = {"help_option_names": ["--help", "-h"], "max_content_width": sys.maxsize}


class LazyCommand(TyperCommand):
    """A command that is listed by its row, and made from its module when it is called."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return make_command(str(self.name)).make_context(info_name, args, parent, **extra)


class CommandList(TyperGroup):
    """The commands under their headings, one line each; `help heads all` is `heads --help all`, no word `--help`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, (panel, summary) in COMMANDS.items():
            self.add_command(LazyCommand(name, short_help=summary, rich_help_panel=panel))

    def get_params(self, ctx: Any) -> Any:
        return as_typed(super().get_params(ctx), ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] == ["help"] or not (args or ctx.resilient_parsing):
            args = [*args[1:2], "--help", *args[2:]]
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, COMMANDS))
        for panel, rows in groupby(COMMANDS.items(), lambda row: row[1][0]):
            with formatter.section(panel):
                formatter.write_dl([(name.ljust(width), summary) for name, (_, summary) in rows])


def module_of(name: str) -> Any:
    """The module of a command: its function, of the command's name, and its EXAMPLES."""
    return import_module(f"attnscope.cli.{name}")


@cache  # of some fifty options, each with a converter that Typer makes at its first use
def make_command(name: str) -> Any:
    """A command with its options, as Typer makes it; a module may say by COMMAND which class reads its arguments."""
    from attnscope.cli.help import PanelCommand

    module = module_of(name)
    alone = typer.Typer(add_completion=False, **PLAIN)
    epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in module.EXAMPLES)
    epilog += getattr(module, "MORE_HELP", "")
    run = getattr(module, name)
    alone.command(name, cls=getattr(module, "COMMAND", PanelCommand), epilog=epilog, context_settings=HELP)(run)
    command: Any = get_command(alone)
    command.groups = run.groups
    command.examples = module.EXAMPLES
    return command


app = typer.Typer(
    name="attnscope",
    cls=CommandList,
    context_settings=HELP,
    epilog="\b\nStart with:\n  attnscope heads 'the financial bank is located on river bank' --out runs/bank",
    **PLAIN,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"attnscope {__version__}")
        raise typer.Exit


@app.callback()
def attnscope(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """See, measure and verify what every attention head of a pretrained transformer attends to."""
