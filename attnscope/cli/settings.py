"""Settings: values that few people change; see `Mark.SETTING`.

--help lists them apart, as `--set NAME=VALUE` gives them. They may be typed as options, too: `--dpi 200`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cache
from typing import Annotated, Any

import typer

from attnscope.cli.groups import Parameter, for_typer, option_group, parameters

AS_OPTIONS = "attnscope.settings"  # in a context: the settings that were typed as options, by field


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
        typer.Option(
            help="Give one of these, also typed as --NAME VALUE.", metavar="NAME=VALUE", autocompletion=offered
        ),
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


@cache
def as_options(groups: tuple[type, ...], hidden: bool = True) -> list[Any]:
    """The settings of groups as options of a command; hidden: no list shows them.

    They are copies: a command changes how its parameters convert, and `converters` go on converting.
    """
    options = [copy(option) for option in converters(groups).values()]
    for option in options:
        option.hidden = hidden
    return options


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
