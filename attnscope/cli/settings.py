"""Settings: values that few people change, which `--set NAME=VALUE` and --config give; see `Mark.SETTING`."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any

import typer

from attnscope.cli.groups import Parameter, for_typer, option_group, parameters


def offered(ctx: typer.Context) -> list[tuple[str, str]]:
    """What the shell offers behind --set: `dpi=` and its help."""
    found = settings_of(getattr(ctx.command, "groups", ())).values()
    return [(f"{one.key}=", one.info.help or "") for one in found]


@option_group
class Settings:
    """How settings are given on a command line."""

    panel = "Settings"
    set: Annotated[
        list[str] | None,
        typer.Option(help="Give one of these; may be repeated.", metavar="NAME=VALUE", autocompletion=offered),
    ] = None


def settings_of(groups: Sequence[type]) -> dict[str, Parameter]:
    """The settings of a command with these groups, by field."""
    return {name: one for name, one in parameters(*groups).items() if one.is_setting}


@cache
def converters(groups: tuple[type, ...]) -> Mapping[str, Any]:
    """The settings of groups as Typer's parameters, which convert values and describe themselves, by field."""
    alone = typer.Typer(add_completion=False)
    alone.command()(signed(lambda **given: None, for_typer(*groups, settings=True)))
    return {one.name: one for one in typer.main.get_command(alone).params}


def signed(function: Any, asked: Sequence[inspect.Parameter]) -> Any:
    """The function, with parameters that Typer reads."""
    function.__signature__ = inspect.Signature(asked)
    function.__annotations__ = {one.name: one.annotation for one in asked}
    return function


def records(groups: tuple[type, ...], context: typer.Context) -> list[tuple[str, str]]:
    """What --help lists of the settings: `dpi=N` and its help."""
    found = settings_of(groups)
    return [
        (f"{found[name].key}={found[name].metavar}", one.get_help_record(context)[1])
        for name, one in converters(groups).items()
    ]


def instead(context: typer.Context, option: str, arguments: Sequence[str], drawing: Collection[str]) -> str | None:
    """What to type for an option that is a setting of the command, or nearly its name; None for what is neither.

    drawing: the settings, by field, that are options of heatmap.

    >>> instead(context, "--dpi", ["heads", "--dpi", "200"], {"dpi"})
    '--dpi is a setting here: --set dpi=200, or give it to attnscope heatmap'
    """
    found = {one.spelled: one for one in settings_of(getattr(context.command, "groups", ())).values()}
    name = option.removeprefix("--")
    one = found.get(name) or found.get(name.removeprefix("no-"))
    if one is None:
        near = get_close_matches(name, found, n=1)
        return f"No such option: {option}. Did you mean {found[near[0]].typed}?" if near else None
    value = _value(one, option, arguments)
    elsewhere = ", or give it to attnscope heatmap" * (one.name in drawing)
    return f"{option} is a setting here: {shlex.join(['--set', f'{one.key}={value}'])}{elsewhere}"


def _value(one: Parameter, option: str, arguments: Sequence[str]) -> str:
    """The value that was typed behind an option, or its placeholder in --help."""
    if one.metavar == "true|false":
        return str(option == f"--{one.spelled}" or not option.startswith("--no-")).lower()
    for place, argument in enumerate(arguments):
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2]
        if argument == option and place + 1 < len(arguments):
            return arguments[place + 1]
    return one.metavar
