"""What a page's "Copy" begins with: the words of each command, and the lines of a program, that read the same again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from attnscope.cli.option_groups import changed
from attnscope.cli.options import ModelText, OtherSide, PairedText, TextRun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnscope.cli.knockout_options import Answered, Compared, Edges
    from attnscope.observe.request import CaptureSpec
    from attnscope.viewer.page import Copied

RUNS = ("view", "heads", "draw", "text", "relations")  # commands that take whatever a page takes
NO_ROOM = 2_000  # letters of a text that was piped in: a longer one does not go into a command
STDIN = "-"


def reproduce(asked: TextRun, other: OtherSide, ask: CaptureSpec) -> Copied:
    """The words that name text and model, by command; ask: what the first side of the page was asked."""
    from attnscope.viewer.page import Copied

    run = shlex.join(words_of(asked, ask.text, TextRun))
    commands = dict.fromkeys(RUNS, run)
    if other.of_two:
        beside = shlex.join(_given_words(other, None, OtherSide))
        commands["view"] = commands["compare"] = f"{run} {beside}"
    elif not asked.answered and asked.from_ is None and asked.tensors_file is None and asked.module is None:
        commands |= dict.fromkeys(("explain", "why"), shlex.join(words_of(asked, ask.text, PairedText)))
    return Copied(commands, python(asked, ask))


def words_of(asked: ModelText, text: Any, group: type) -> list[str]:
    """The options of a group that were given, the text among them, from whatever source.

    The model's name too, though it is the default: a command says what it reads.
    """
    words = [*_given_words(asked, text, group)]
    if any(getattr(asked, name, None) is not None for name in ("tensors_file", "module")):
        return words
    return words if "--model" in words else ["--model", str(asked.model), *words]


def _given_words(asked: Any, text: Any, group: type) -> Iterator[str]:
    """The words of the options of a group that have another value than their default; text: what was read."""
    for option, value in changed(asked, group):
        if option.name in ("given", "text", "file") and str(value) == STDIN and isinstance(text, str):
            yield from ("--text", text if len(text) <= NO_ROOM else STDIN)
        else:
            yield from ("--text", str(value)) if option.name == "given" else option.words(value)


def study_command(name: str, text: Any, asked: ModelText, *others: Any) -> str:
    """The command of a study with its text, or the file of its texts; others: its further groups."""
    words = words_of(asked, text, type(asked))
    words += (word for group in others for word in _given_words(group, text, type(group)))
    if isinstance(text, str) and not any((asked.given, asked.text, asked.file)):  # it was piped in
        words += ["--text", text if len(text) <= NO_ROOM else STDIN]
    return f"attnscope {name} {shlex.join(words)}"


def knockout_python(
    answered: Answered, edges: Edges, compared: Compared, text: str | Sequence[int] | None
) -> list[str]:
    """The lines of a program that cuts the same; none for a corpus."""
    if text is None:
        return []
    asks = edges.asks()
    given: dict[str, Any] = {"query": asks["query"], "key": asks["key"], "answer": answered.answer}
    given |= {"foil": answered.foil, "over": edges.over, "select": edges.select, "how": edges.how}
    given |= {"random": compared.random, "seed": compared.seed, "define": asks["define"], "chat": answered.chat}
    given |= {"atlas": edges.atlas and str(edges.atlas)}
    usual = {"over": "none", "how": "mask", "random": 100}
    how = [f"{name}={value!r}" for name, value in given.items() if value and value != usual.get(name)]
    how += ["random=0"] if not compared.random else []
    cut = ", ".join(["model", repr(text if isinstance(text, str) else list(text)), *how])
    return ["import attnscope", "", _load(answered), f"found = attnscope.knockout({cut})", "found.table()"]


def _load(asked: ModelText) -> str:
    options = asked.load_options()
    return f"model = attnscope.load({', '.join([repr(str(options.model)), *_given(options, 'model')])})"


def python(asked: TextRun, ask: CaptureSpec) -> list[str]:
    """The lines of a program that ends with the observation of the page, as `seen`."""
    from attnscope.inputs.tensors import GivenTensors

    if isinstance(ask.text, GivenTensors):
        return ["import attnscope", "", f"seen = attnscope.from_tensors({str(ask.text.file)!r})"]
    text = ask.text if isinstance(ask.text, str) else getattr(ask.text, "ids", ask.text)
    lines, first = ["import attnscope", ""], repr(list(text) if isinstance(text, tuple) else text)
    if asked.file not in (None, STDIN):
        lines, first = ["from pathlib import Path", "", *lines], f'Path({asked.file!r}).read_text(encoding="utf-8")'
    if asked.audio is not None:
        first = f"audio={asked.audio!r}"
    how = _given(ask, "text", "keep", "select", "memory", "listen", "verify")
    load = _load(asked)
    if asked.module is not None:
        lines[-1:] = ["from attnscope.model.loading import load_module", ""]
        load = f"model = load_module({asked.module!r}, trusted=True)"
    return [*lines, load, f"seen = attnscope.capture({', '.join(['model', first, *how])})"]


def _given(record: Any, *without: str) -> Iterator[str]:
    """The fields of a record that have another value than their default, as keywords."""
    for option in fields(record):
        value = getattr(record, option.name)
        if option.name not in without and value != option.default:
            plain = value if isinstance(value, bool | int | list | tuple) else str(value)
            yield f"{option.name}={plain!r}"
