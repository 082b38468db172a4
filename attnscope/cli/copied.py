"""What a page's "Copy" begins with: the words of each command, and the lines of a program, that read the same again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from attnscope.cli.groups import Parameter, default_of, parameters
from attnscope.cli.options import ModelText, OtherSide, TextRun

if TYPE_CHECKING:
    from attnscope.ask import Ask
    from attnscope.viewer.page import Copied

RUNS = ("view", "heads", "heatmap", "text", "relations")  # commands that take whatever a page takes
NO_ROOM = 2_000  # letters of a text that was piped in: a longer one does not go into a command
STDIN = "-"


def copied(asked: TextRun, other: OtherSide, ask: Ask) -> Copied:
    """The words that name text and model, by command; ask: what the first side of the page was asked."""
    from attnscope.viewer.page import Copied

    run = shlex.join(words_of(asked, ask))
    commands = dict.fromkeys(RUNS, run)
    beside = [*of_group(other)] if any((other.compare_text, other.compare_model)) else []
    if beside:
        commands["view"] = commands["compare"] = f"{run} {shlex.join(beside)}"
    elif not asked.answered and asked.from_ is None:
        commands["explain"] = shlex.join(words_of(asked, ask, ModelText))
    return Copied(commands, python(asked, ask))


def words_of(asked: TextRun, ask: Ask, group: type = TextRun) -> list[str]:
    """The options of a group that were given, the text among them, from whatever source."""
    taken = parameters(group)
    found = [word for name, one in taken.items() for word in _words(asked, ask, name, one)]
    model = ["--model", str(asked.model)]  # named, though it is the default: a command says what it reads
    return found if "--model" in found else [*model, *found]


def of_group(group: Any) -> Iterator[str]:
    """The words of the options of `OtherSide` that were given."""
    for name, one in parameters(OtherSide).items():
        if getattr(group, name) is not None:
            yield from one.words(getattr(group, name))


def _words(asked: TextRun, ask: Ask, name: str, one: Parameter) -> list[str]:
    value = getattr(asked, name)
    if value == default_of(type(asked), name):
        return []
    if name in ("given", "text", "file") and str(value) == STDIN and isinstance(ask.text, str):
        return ["--text", ask.text if len(ask.text) <= NO_ROOM else STDIN]
    if name == "given":
        return ["--text", str(value)]
    return [word for part in (value if isinstance(value, list) else [value]) for word in one.words(part)]


def python(asked: TextRun, ask: Ask) -> list[str]:
    """The lines of a program that ends with the observation of the page, as `seen`."""
    options = asked.load_options()
    load = [repr(str(options.model)), *_given(options, "model")]
    text = ask.text if isinstance(ask.text, str) else getattr(ask.text, "ids", ask.text)
    lines, first = ["import attnscope", ""], repr(list(text) if isinstance(text, tuple) else text)
    if asked.file not in (None, STDIN):
        lines, first = ["from pathlib import Path", "", *lines], f'Path({asked.file!r}).read_text(encoding="utf-8")'
    if asked.audio is not None:
        first = f"audio={asked.audio!r}"
    how = _given(ask, "text", "keep", "select", "memory", "listen", "verify")
    lines.append(f"model = attnscope.load({', '.join(load)})")
    return [*lines, f"seen = attnscope.capture({', '.join(['model', first, *how])})"]


def _given(record: Any, *without: str) -> Iterator[str]:
    """The fields of a record that have another value than their default, as keywords."""
    for one in fields(record):
        value = getattr(record, one.name)
        if one.name not in without and value != one.default:
            plain = value if isinstance(value, bool | int | list | tuple) else str(value)
            yield f"{one.name}={plain!r}"
