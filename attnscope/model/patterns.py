"""Patterns in the configs of adapters and quantised models: libraries match them with `re`, which has no deadline."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from attnscope.errors import ModelError
from attnscope.model.checkpoint import read_json
from attnscope.model.geometry import empty_model
from attnscope.utils.isolation import IsolatedCall as Apart

REPEATS = re.compile(r"[*+?{|]")  # a pattern without any of these is as quick as it is short
# How PEFT and transformers put a pattern together, to match it from the beginning of a module's name.
FORMS = (
    r"(?:{})$",
    r"(.*\.)?({})$",
    r"(?:^|.*?\.){}\.(?P<idx>\d+)\.",
    r"(^|.*\.){}($|\..*)",
    r"(?:{})(?:(?<=\.)|(?=\.|$))",
)


def check_patterns(config: Any, names: Iterable[str], path: Path) -> None:
    """Raise ModelError where a text of a config, taken as a pattern, does not end in time over the names of modules.

    They are tried by `re` itself, in a process of its own, which can be ended. config: what a JSON file says, of which
    any text may be a pattern. path: that file.

    >>> check_patterns({"target_modules": r".*\\.(q|k)_proj"}, ["layers.0.q_proj"], Path("adapter_config.json"))
    """
    patterns = {text for text in _texts(config) if REPEATS.search(text)}
    if not patterns:
        return
    names = list(names)
    with Apart(_match, "process") as matched:
        try:
            matched(patterns, names)
        except ModelError as error:
            raise ModelError(
                f"{path} has a pattern that takes more than {matched.seconds} seconds over the names of modules",
                "name the modules in its place",
            ) from error


def check_quantised(config: Any, path: Path) -> None:
    """The same of what a model's config says of quantised weights, of the whole and of its parts.

    config: as transformers read it. path: its file.
    """
    raw = read_json(path)
    parts = [part.get("quantization_config") for part in (raw, *raw.values()) if isinstance(part, dict)]
    check_patterns(parts, _modules(config), path)


def _modules(config: Any) -> Iterator[str]:
    """The names of the modules that the model of a config has, which is built for them."""
    yield from dict(empty_model(config).named_modules())


def _match(patterns: Iterable[str], names: Iterable[str]) -> None:
    for pattern in patterns:
        for form in FORMS:
            with suppress(re.error, OverflowError, RecursionError):  # no pattern, then
                compiled = re.compile(form.replace("{}", pattern))
                for name in names:
                    compiled.match(name)


def _texts(value: Any) -> Iterator[str]:
    """Every text in what a JSON file says, keys of objects too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in [*value, *(value.values() if isinstance(value, dict) else ())]:
            yield from _texts(part)
