"""What Typer refuses, in our words: a value that an option does not take, a word that a command does not have.

What there is, is read off the commands' groups; `synonyms` has the words of other tools.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnscope.cli.app import COMMANDS, command_named, module_of
from attnscope.cli.help import whole_help
from attnscope.cli.option_groups import Parameter, by_key, parameters, suggestion, synonyms_of
from attnscope.errors import listed, nearest

if TYPE_CHECKING:
    import typer

MANY = 4  # commands that a message names
EXTRA = re.compile(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)")
MEANT = re.compile(r"did you mean (--[\w-]+(?: [\w-]+)?)")  # an option, with its value where one is known
MODEL, HEAD = re.compile(r"demo|.*/.*"), re.compile(r"L?[0-9]+[.H][0-9]+")  # what an argument too many may be
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
    first, named = extra.split()[0], {"model": MODEL, "head": HEAD, "select": HEAD}
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
