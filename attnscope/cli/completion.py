"""What the shell's TAB offers where Typer cannot know: metrics, models, devices. Nothing heavy is imported for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any


def as_typed(parameters: list[Any], ctx: Any) -> list[Any]:
    """A command's parameters, which convert no more than they have to: that takes importing pydantic.

    While a shell asks what may follow they convert nothing, else neither a default nor a text. They are changed
    in place, since parsing tells parameters apart by identity, and changed back by the next command.
    """
    for one in parameters:
        vars(one).pop("process_value", None)
        if one.callback is not None and getattr(one, "is_flag", False) and one.default is None:
            one.default = False  # of Typer's own: None would be converted, a bool is not
        if ctx.resilient_parsing:
            one.process_value = lambda ctx, value: value
        elif not one.required and one.callback is None:
            one.process_value = partial(_converted, one, one.process_value)
    return parameters


def _converted(one: Any, convert: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    """The value of a parameter, as Typer converts it where it has to be; an error of Typer's has it as `value`."""
    from typer import BadParameter

    if value is None:
        return () if one.multiple or one.nargs == -1 else None
    # What the command takes already is not converted: its default, or a text that nothing parses.
    meant = getattr(one, "type_descriptor", None)  # of Typer from 0.26 on
    plain = meant and meant.annotation is str and isinstance(value, str) and not meant.parameter_info.parser
    if plain or (type(value) is type(one.default) and value == one.default):
        return value
    try:
        return convert(ctx, value)
    except BadParameter as error:
        error.value = value  # type: ignore[attr-defined]
        raise


def offer(*known: str) -> Callable[[], list[str]]:
    """Offer these, where others may be given too."""
    return lambda: list(known)


def metrics() -> list[tuple[str, str]]:
    """The metrics, each with its title."""
    from attnscope.metrics.metrics import KNOWN

    return [(one.id, one.title) for one in KNOWN.values()]


def models() -> list[str]:
    """The embedded model and those of the Hub's cache; for folders the shell offers its own."""
    from attnscope.model.sources import HUB_ID

    names = [path.name.removeprefix("models--").replace("--", "/") for path in cached_models()]
    return ["demo", *sorted(filter(HUB_ID.fullmatch, names))]  # of others a shell would print whatever they hold


def cached_models() -> list[Path]:
    """The folders of the models in the Hub's cache; none where it cannot be listed."""
    with suppress(OSError):
        return list(cache_folder().glob("models--*"))
    return []


def cache_folder() -> Path:
    """Where huggingface_hub keeps models, found without its import; as there, `~` stays where there is no home."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")))
