"""What the live page asks: a command, and values for some of its options. No path is among them."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from attnscope.errors import InputError, UsageError
from attnscope.model.options import LoadOptions
from attnscope.utils.schema import to_json as plain

MOST_LETTERS = 2_000_000  # of the text
MOST_IN_FILE = 50_000  # letters of all else together: a file of options holds a million bytes
MOST_PICTURE = 2**24  # bytes
WRITES = {"view": "--out", "knockout": "--html"}  # the option that names the page's file
CONFIG, PICTURE, PAGE = "question.yaml", "picture", "page.html"  # in a folder of the question's own


@dataclass(frozen=True)
class LiveQuestion:
    """A command with the options that the page offers, as the command line has them; picture: a file's bytes, base64.

    model, compare_model: names of models that are held. Raises InputError for one that is too long.
    """

    command: Literal["view", "knockout"]
    model: str
    text: str
    target: str | None = None
    chat: bool = False
    generate: int | None = None
    picture: str | None = None
    query: str | None = None
    key: str | None = None
    select: str | None = None
    engine: str | None = None
    why: str | None = None
    compare_text: str | None = None
    compare_model: str | None = None

    def __post_init__(self) -> None:
        words = [getattr(self, item.name) for item in fields(self) if item.name not in ("text", "picture")]
        if len(self.text) > MOST_LETTERS or sum(len(item) for item in words if isinstance(item, str)) > MOST_IN_FILE:
            raise InputError("this is too long for the page", "ask with the command, and name a file")
        if len(self.picture or "") > MOST_PICTURE * 4 // 3 + 4:
            raise InputError(f"the picture has over {MOST_PICTURE >> 20} MB", "ask with the command, and name the file")

    def arguments(self, held: Sequence[LoadOptions], folder: Path) -> list[str]:
        """The words of the command, without `attnscope`. Its options are a file of the folder, its text is for stdin.

        Raises UsageError for a model that is not held, InputError for a picture that is no base64.
        """
        import yaml

        named = {options.model: options for options in held}
        for name in (self.model, self.compare_model):
            if name is not None and name not in named:
                raise UsageError(f"the model {name!r} is not held", f"one of {', '.join(named)}")
        # The options that were given, and those by which the model was loaded.
        options = _given(named[self.model]) | _given(self, "command", "text", "picture")
        if self.picture is not None:
            options["picture"] = [str(folder / PICTURE)]
            try:
                (folder / PICTURE).write_bytes(b64decode(self.picture, validate=True))
            except ValueError as error:
                raise InputError("the picture is no base64", "choose the file again") from error
        (folder / CONFIG).write_text(yaml.safe_dump(options), encoding="utf-8")
        files = ["--config", str(folder / CONFIG), "--file", "-", WRITES[self.command], str(folder / PAGE)]
        return [self.command, *files]


def _given(record: Any, *without: str) -> dict[str, Any]:
    """The fields of a record that have another value than their default, as a file of options has them."""
    values = {field.name: (plain(getattr(record, field.name)), field.default) for field in fields(record)}
    return {name: value for name, (value, usual) in values.items() if value != usual and name not in without}
