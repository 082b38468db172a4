"""The commands: what `attnscope --help` says of each, and how one is made once it is called.

Last what Typer refuses, in our words: a value that an option does not take, a word that a command does not have. What
there is, is read off the commands' groups; `synonyms` has the words of other tools.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from itertools import groupby
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from attnscope._version import __version__
from attnscope.cli.option_groups import Parameter, as_typed, by_key, parameters, suggestion, synonyms_of
from attnscope.errors import listed, nearest

TEXT, CORPUS, CAUSE, MODEL, TOOL = (
    *("Look at one text", "Many texts", "Cause and effect", "A model as a whole", "Tool"),
)


class Row(NamedTuple):
    """A command: its heading in --help, and the first line of its docstring.

    others: its other names, which no list shows and which mean the same wherever a command is named. view_of: the
    command whose numbers it shows in another way, under which the list has it. module: its file in cli/, where that is
    not its name.
    """

    group: str
    summary: str
    others: tuple[str, ...] = ()
    view_of: str = ""
    module: str = ""


# By name: `heads` is the function of cli/heads.py, which is imported when the command is called, not to list it.
COMMANDS: dict[str, Row] = {
    "heads": Row(TEXT, "Rank every attention head by its behaviour on a text."),
    "relations": Row(TEXT, "List which token looks at which: the strongest keys of a query."),
    "keys": Row(TEXT, "List the weight on each token as a key, and its main heads.", view_of="relations"),
    "rollout": Row(TEXT, "Attribute each token to the input tokens, by attention rollout.", view_of="relations"),
    "text": Row(TEXT, "Print the text, coloured by where chosen tokens look.", view_of="relations"),
    "draw": Row(TEXT, "Draw the attention of a text: overview, layers, heads.", ("heatmap",)),
    "view": Row(TEXT, "Write one HTML page of a text's attention, to hover over."),
    "tokens": Row(TEXT, "List the tokens of a text, and which of them an expression names."),
    "depth": Row(TEXT, "List each block's share of the residual of later layers."),
    "explain": Row(TEXT, "Show one head's arithmetic on a sentence, step by step."),
    "batch": Row(CORPUS, "Measure heads and relations of every text of a corpus."),
    "compare": Row(CORPUS, "Compare two texts, or two models, head by head."),
    "ablate": Row(CAUSE, "Remove heads and measure the loss."),
    "knockout": Row(CAUSE, "Block attention edges and measure the loss."),
    "patch": Row(CAUSE, "Patch heads with those of another text and measure the loss."),
    "why": Row(CAUSE, "Decompose an attention logit by the components that wrote it."),
    "budgets": Row(CAUSE, "Keep a part of the KV cache and measure the loss."),
    "scan": Row(MODEL, "Test every head for known behaviours, with confidence intervals."),
    "parity": Row(MODEL, "Check attention layers against an independent implementation."),
    "info": Row(MODEL, "Print a model's layers, heads, windows and costs."),
    "serve": Row(TOOL, "Keep models loaded for the commands that follow."),
    "run": Row(TOOL, "Run the commands of a file in one process.", module="run_file"),  # `attnscope.cli.run` runs one
    "metrics": Row(TOOL, "List the metrics, and the rules that name a head's role."),
    "doctor": Row(TOOL, "Print system information for a bug report."),
}
VIEW = "  "  # before a command in the list that is a view of the one above it
OTHER_NAMES = {other: name for name, row in COMMANDS.items() for other in row.others}
QUESTIONS = {  # with a command that answers each, by the embedded model
    "What does each head do?": 'attnscope heads "the cat sat on the mat"',
    "Which heads see Mary?": 'attnscope heads "John gave Mary a book" --key Mary',
    "What does one head see?": 'attnscope draw "a cat" --select L1H4 --out a.png',
    "What do all heads see?": 'attnscope view "the cat sat" --out a.html',
    "Does it matter?": 'attnscope knockout "a cat is a cat" --key "cat#1"',
}
PLAIN: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False}
# Of each command too, not inherited alone: a command keeps the --help of the first context that it is called in.
HELP: dict[str, Any] = {"help_option_names": ["--help", "-h"], "max_content_width": sys.maxsize}


class LazyCommand(TyperCommand):
    """A command that is listed by its row, and made from its module when it is called; by any of its names."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return make_command(str(self.name)).make_context(self.name, args, parent, **extra)


class CommandList(TyperGroup):
    """The commands under their headings, one line each; `help heads all` is `heads --help all`, no word `--help`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, row in COMMANDS.items():
            for each in (name, *row.others):
                self.add_command(LazyCommand(name, short_help=row.summary, hidden=each != name), each)

    def get_params(self, ctx: Any) -> Any:
        return as_typed(super().get_params(ctx), ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:2] == ["help", "model"] and not ctx.resilient_parsing:
            from attnscope.cli.help import model_help

            typer.echo(model_help(ctx))
            ctx.exit()
        if args[:1] == ["help"] or not (args or ctx.resilient_parsing):
            args = [*args[1:2], "--help", *args[2:]]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Common questions"):
            formatter.write_dl(QUESTIONS.items())
        self.format_commands(ctx, formatter)
        names = (", ".join(sorted(option.opts, key=len)) for option in self.get_params(ctx))
        with formatter.section("Options"):
            formatter.write_text("; ".join(names))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        names = {name: VIEW * bool(row.view_of) + name for name, row in COMMANDS.items()}
        width = max(map(len, names.values()))
        for group, rows in groupby(COMMANDS.items(), lambda row: row[1].group):
            with formatter.section(group):
                formatter.write_dl([(names[name].ljust(width), row.summary) for name, row in rows])


def command_named(word: str) -> str:
    """The command that a word names, by its own or another name; "" where none does.

    >>> command_named("heatmap")
    'draw'
    """
    return word if word in COMMANDS else OTHER_NAMES.get(word, "")


def module_of(name: str) -> Any:
    """The module of a command: its function, of the command's name, and its EXAMPLES."""
    return import_module(f"attnscope.cli.{COMMANDS[name].module or name}")


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
    epilog="\b\nHelp of a command: attnscope help heads, all of it: attnscope help heads all\n"
    "Help of model and engine: attnscope help model",
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


MANY = 4  # commands that a message names
EXTRA = re.compile(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)")
MEANT = re.compile(r"did you mean (--[\w-]+(?: [\w-]+)?)")  # an option, with its value where one is known
MODEL_NAME, HEAD = re.compile(r"demo|.*/.*"), re.compile(r"L?[0-9]+[.H][0-9]+")  # what an argument too many may be
ALL_COMMANDS = "`attnscope --help` lists all commands"


def refusal(error: typer.TyperException, arguments: Sequence[str]) -> str:
    """What Typer refuses, in one line with the next step. arguments: the words after `attnscope`."""
    message = " ".join(error.format_message().split()).rstrip(".").replace(". Did you mean", "; did you mean")
    context, typed = getattr(error, "ctx", None), getattr(error, "option_name", "")
    if context is None:  # of an option without its value Typer does not say which command has it
        named = command_named(arguments[0]) if arguments else ""
        own = parameters(*_groups(named)).values() if named else ()
        each = next((each for each in own if typed in (f"--{each.spelled}", *(each.info.param_decls or ()))), None)
        missing = f"its value is missing; write {typed} {each.metavar or 'VALUE'}" if each else ""
        return f"{typed}: {missing}" if missing else f"{message}; {ALL_COMMANDS}"
    groups = getattr(context.command, "groups", None)
    if groups is None:  # it comes before the name of the command
        called = next(filter(None, map(command_named, arguments)), None)
        if typed and called:
            options = by_key(_groups(called))
            words = MEANT.search(meant(_key(typed), options, called))
            typed_after = typed if _key(typed) in options else words[1] if words else ""
            written = f"; write it after the command: attnscope {called} {typed_after}" * bool(typed_after)
            return f"{typed} comes before the command{written or f'; {ALL_COMMANDS}'}"
        if message.startswith("No such command") and "did you mean" not in message:
            word = message.partition("'")[2].partition("'")[0]
            guess = command_meant(word.replace("-", "_"))
            return f"{message}; {guess + '; ' * bool(guess)}{ALL_COMMANDS}"
        near = nearest(typed, [name for each in context.command.params for name in each.opts]) if typed else None
        return (
            f"No such option: {typed}; did you mean {near}?; {ALL_COMMANDS}" if near else f"{message}; {ALL_COMMANDS}"
        )
    from attnscope.cli.help import whole_help

    listing = f"`{whole_help(context)}` lists all options"
    if hasattr(error, "possibilities"):  # which only an option has that does not exist
        return f"{instead(typed, str(context.command.name), groups, arguments)}; {listing}"
    option = parameters(*groups).get(getattr(getattr(error, "param", None), "name", ""))
    if option is not None and hasattr(error, "value"):
        where = context.command_path if option.is_argument else f"--{option.spelled}"
        return option.refusal(where, error.value, error.message, listing).for_shell()
    if extra := EXTRA.fullmatch(message):
        return _too_many(extra[1], context, groups)
    if message.startswith("Missing argument"):
        name = message.partition("'")[2].rstrip("'")
        return f"{name} is missing; for example: {context.command.examples[0]}"
    return f"{message}; {listing}"


def _too_many(extra: str, context: Any, groups: Sequence[type]) -> str:
    """More arguments than a command takes: a text without quotes, a second text, or the name of a model."""
    own, command = parameters(*groups), context.command_path
    arguments = [option.metavar or option.name.upper() for option in own.values() if option.is_argument]
    expected = f"expected one {arguments[0]}" if arguments else "expected no argument"
    first, named = extra.split()[0], {"model": MODEL_NAME, "head": HEAD, "select": HEAD}
    steps = [f"write --{name} {first}" for name, kind in named.items() if name in own and kind.fullmatch(first)][:1]
    if "compare_text" in own:
        steps.append("give the second text with --compare-text")
    if "given" in own:
        steps.append("put a text of several words in quotes")
    return f"{expected}, got {extra} too; {', or '.join(steps) or 'leave it out'}, and see `{command} --help`"


def instead(option: str, command: str, groups: Sequence[type], arguments: Sequence[str]) -> str:
    """What to say of an option that a command does not have: what was probably meant, and where it is.

    >>> instead("--limit", "keys", groups, ["keys", "--limit", "3"])
    'No such option: --limit; did you mean --top (Rows printed on a terminal: a number, or all)?'
    """
    long = re.compile(re.escape(option) + "[a-z_-]{2,}")  # of `-layer`, Typer names -l
    typed = next(filter(long.fullmatch, arguments), option) if len(option) == 2 else option
    guess = meant(_key(typed), by_key(groups), command)
    return f"No such option: {typed}; {guess}" if guess else f"No such option: {option}"


def meant(word: str, own: Mapping[str, Parameter], command: str) -> str:
    """What a word probably means that a command does not know; empty where nothing is near.

    own: the command's options and settings, by key.
    """
    synonyms = [key for key, _ in synonyms_of(word)]
    if not own.keys() & set(synonyms):
        for key in synonyms:
            if key in COMMANDS and key != command:
                return f"`attnscope {key}` does that"
        if commands := _elsewhere(word, command):
            return f"it is {commands}"
    if guess := suggestion(word, own):
        return guess
    places = [(key, commands) for key in synonyms if (commands := _elsewhere(key, command))]
    return "".join(f"--{key.replace('_', '-')} is {commands}" for key, commands in places[:1])


def _key(option: str) -> str:
    """`--top-k` as configuration files have it."""
    return option.lstrip("-").replace("-", "_")


def command_meant(word: str) -> str:
    """What a word probably means that is no command: a command that others call so, or an option; empty for neither.

    >>> command_meant("visualize")
    'did you mean draw?'
    """
    named = [key for key, value in synonyms_of(word) if key in COMMANDS and not value]
    if named:
        return f"did you mean {named[0]}?"
    commands = _elsewhere(word, next(iter(COMMANDS)))
    return f"--{word.replace('_', '-')} is {commands}" if commands else ""


def _groups(command: str) -> tuple[type, ...]:
    groups: tuple[type, ...] = getattr(module_of(command), command).groups
    return groups


def _elsewhere(key: str, command: str) -> str:
    """`an option of heads, text and 7 more`: the commands that have it, those with the command's heading first."""
    having = [name for name in COMMANDS if key in by_key(_groups(name))]
    having.sort(key=lambda name: COMMANDS[name].group != COMMANDS[command].group)
    return f"an option of {listed(having, MANY)}" if having else ""
