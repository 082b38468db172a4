"""A command gets its options from groups, and is called with one object of each."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from attnscope.cli.config import configured, flagged, keys_of, typed_settings
from attnscope.cli.groups import build, for_typer
from attnscope.cli.place import settle_figures
from attnscope.cli.settings import Settings, settings_of, signed
from attnscope.errors import UsageError

CONTEXT = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)


def check_place() -> None:
    """Raise UsageError where the folder that a command runs in was removed: no path can be read from there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        hint = "change to another, for example: cd ~"
        raise UsageError("the folder that this shell is in was removed", hint) from None


def takes(
    *groups: type,
    file: tuple[type, ...] = (),
    of_folder: Callable[..., int] | None = None,
    folders: Callable[[Path], bool] = lambda folder: True,
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command the options of these groups; it is called with one object of each, in this order.

    file: groups whose options may be in the file of --config too, where this command ignores them. of_folder: what
    is done with a folder as TEXT, called with the context, the folder, and the options by field; without it the run in
    the folder is repeated, and so it is of a folder that is none of `folders`.

        @takes(Loading, Top)
        def command(loading: Loading, top: Top) -> int: ...
    """
    options = for_typer(*groups, *[Settings] * bool(settings_of(groups)))
    keys = keys_of(*file, *groups)

    def give(run: Callable[..., int]) -> Callable[..., int]:
        def command(context: typer.Context, **given: Any) -> int:
            check_place()
            settings = typed_settings(context, groups, given.pop("set", None))
            folder = given.get("given") if of_folder else None
            folder = Path(folder) if folder and os.path.isdir(folder) and folders(Path(folder)) else None
            if "from_" in given and folder is None:
                from attnscope.cli.repeat import named_run, repeated

                given |= named_run(context)
                given |= repeated(context, groups, settings) if given["from_"] is not None else {}
            if given.get("config") is not None:
                given |= configured(context, groups, keys)
            given |= settings
            typed = settings.keys() | {name for name in given if flagged(context, name)}
            given |= settle_figures(groups, given, typed)
            if of_folder and folder:
                return of_folder(context, folder, given | {"given": None})
            return run(*(build(group, given) for group in groups))

        command.__name__, command.__doc__ = run.__name__, run.__doc__
        command.groups = groups  # type: ignore[attr-defined]
        made: Callable[..., int] = signed(command, [CONTEXT, *options])
        return made

    return give
