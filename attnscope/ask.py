"""What is asked of a text, in one record: for the command line, the library, a corpus, a manifest.

ask = Ask("the financial bank", keep=Request(relations=True), engine="fused")
read(loaded, ask)
Ask.of_json(ask.as_json()) == ask
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from attnscope.errors import InputError, UsageError
from attnscope.keep.request import Request
from attnscope.utils.schema import from_json as typed
from attnscope.utils.schema import to_json as plain

if TYPE_CHECKING:
    from attnscope.inputs.pictures import PictureSource
    from attnscope.inputs.prompt import Prompt, Side
    from attnscope.inputs.sound import Sound
    from attnscope.keep.atlas import HeadNames

    Text = str | Prompt | Sequence[int] | Sound

EngineWord = Literal["auto", "eager", "fused", "tiles", "numba", "triton"]
WHAT = {"chat": "a chat", "picture": "a picture", "answer": "an answer"}
SCHEMA = "ask/1"  # goes up when a field is renamed, or means something else


class How(TypedDict, total=False):
    """How a text is read: the fields of `Ask` beside the text and what is kept of it."""

    engine: EngineWord
    memory: str | None
    listen: bool
    verify: bool
    select: str | None
    atlas: HeadNames | Path | str | None
    chat: bool
    truncate: Side | None
    generate: int | None
    answer: str | Sequence[int] | None
    target: str | Sequence[int] | None
    picture: PictureSource | Sequence[PictureSource] | None
    pair: str | None
    global_tokens: str | None


@dataclass(frozen=True)
class Ask:
    """A text, what is kept of it, and how it is read.

    text: the text, its tokens as a Prompt, token ids, or a sound. keep: what is kept, and of which tokens.

    engine: "eager" reads the model's own matrices, "fused" makes none ("tiles", "numba", "triton": that way of it),
    "auto" takes the faster one that gives what is asked and fits the memory. memory: what a layer's matrices may take,
    such as "4GB". listen: with the fused engine, leave the layers' outputs to the model. verify: hold every layer
    against the oracle.

    select: heads to keep, as "27.3,last"; over the view's own. atlas: what `scan` found, or its folder; without one
    what lies in atlas/ of the model's own folder, where it is of these weights.

    chat: apply the chat template. truncate: cut a text that is too long, on this side. generate: let the model add up
    to so many tokens after the text, which are read with it. answer: put this after it, as text where the text is
    one, else as ids. target: what an encoder-decoder's decoder reads, as text or as ids; without it what the model
    makes of the text, greedily, in at most `generate` tokens. picture: one or several, files or pictures of Pillow,
    that a vision-language model reads with the text. pair: a second text, read with the first as its tokenizer writes
    a pair: special tokens between them, and token types where the model has some. global_tokens: those with global
    attention, of Longformer and LED, as an expression; "none" for none; without it what the model's class chooses.
    """

    text: Text
    keep: Request = Request()
    engine: str = "auto"
    memory: str | None = None
    listen: bool = False
    verify: bool = False
    select: str | None = None
    atlas: HeadNames | Path | str | None = None
    chat: bool = False
    truncate: Side | None = None
    generate: int | None = None
    answer: str | Sequence[int] | None = None
    target: str | Sequence[int] | None = None
    picture: PictureSource | Sequence[PictureSource] | None = None
    pair: str | None = None
    global_tokens: str | None = None

    def check_pair(self) -> None:
        """Raise UsageError or InputError for a second text that cannot be meant."""
        if self.pair is None:
            return
        if not (isinstance(self.text, str) and isinstance(self.pair, str)):
            raise UsageError(
                "a pair needs two texts, and one of these is not text", "give both as text, or leave out {pair}"
            )
        for name in ("chat", "picture", "answer"):
            if getattr(self, name):
                raise UsageError(f"a pair of texts is read alone, and there is {WHAT[name]}", f"leave out {{{name}}}")
        if not self.pair.strip():
            raise InputError("the second text of the pair is empty", "give it at least one word, or leave out {pair}")

    def as_json(self) -> dict[str, Any]:
        """The ask as JSON has it. Raises UsageError for what lies in memory alone: a sound, a picture, an atlas."""
        said = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "keep"}
        said |= {"text": _text(self.text), "atlas": _path("an atlas", self.atlas), "picture": _pictures(self.picture)}
        return {"schema": SCHEMA, **said, "keep": plain(self.keep)}

    @classmethod
    def of_json(cls, said: Any) -> Ask:
        """The ask that JSON holds. Raises UsageError for another schema, an unknown field, and another type."""
        if not isinstance(said, Mapping) or said.get("schema") != SCHEMA:
            raise UsageError(f"expected an ask of the form {SCHEMA}", "write one with Ask.as_json")
        form = typed(_Form, {name: value for name, value in said.items() if name != "schema"}, "ask")
        return cls(**{one.name: getattr(form, one.name) for one in fields(form)})


@dataclass(frozen=True)
class _Form:
    """The fields of an ask, as JSON can have them."""

    text: str | tuple[int, ...]
    keep: Request = Request()
    engine: str = "auto"
    memory: str | None = None
    listen: bool = False
    verify: bool = False
    select: str | None = None
    atlas: str | None = None
    chat: bool = False
    truncate: Literal["left", "right"] | None = None
    generate: int | None = None
    answer: str | tuple[int, ...] | None = None
    target: str | tuple[int, ...] | None = None
    picture: tuple[str, ...] | None = None
    pair: str | None = None
    global_tokens: str | None = None


def _text(text: Text) -> str | list[int]:
    if isinstance(text, str):
        return text
    ids = getattr(text, "ids", text)  # of a Prompt
    if not isinstance(ids, Sequence):
        raise UsageError("a sound in memory has no form in JSON", "give token ids or a text")
    return [int(one) for one in ids]


def _pictures(given: PictureSource | Sequence[PictureSource] | None) -> list[str] | None:
    if given is None:
        return None
    found = given if isinstance(given, list | tuple) else [given]
    return [str(_path("a picture", one)) for one in found]


def _path(what: str, given: Any) -> str | None:
    if given is None or isinstance(given, str | os.PathLike):
        return None if given is None else os.fspath(given)
    raise UsageError(f"{what} in memory has no form in JSON", "save it to a file and name that")
