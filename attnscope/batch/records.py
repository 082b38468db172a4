"""One record of a corpus: which of its fields is the text, and fields inside fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attnscope.batch.corpus import Corpus

CHATS = ("messages", "conversations")  # fields that hold one, where none is named
ABSENT = object()  # what a record does not have


def value_at(record: Any, name: str) -> Any:
    """The value at a name, or at names and indices joined by points; ABSENT where there is none.

    >>> value_at({"doc": {"choices": ["a", "b"]}}, "doc.choices.1")
    'b'
    """
    if isinstance(record, Mapping) and name in record:
        return record[name]
    if isinstance(record, list) and name.isdecimal():
        return record[int(name)] if int(name) < len(record) else ABSENT
    for point in (at for at, char in enumerate(name) if char == "."):
        inner = value_at(record, name[:point])
        if isinstance(inner, Mapping | list) and (value := value_at(inner, name[point + 1 :])) is not ABSENT:
            return value
    return ABSENT


def as_text(value: Any) -> Any:
    """A text that was cut into words already, as one; anything else as it is.

    >>> as_text(["the", "bank"])
    'the bank'
    """
    words = isinstance(value, list) and value and all(isinstance(word, str) for word in value)
    return " ".join(value) if words else value


def no_field(record: Mapping[str, Any], name: str) -> str:
    """That a record has no such field, and which it has there."""
    outer, _, rest = name.partition(".")
    inside = record.get(outer) if rest else None
    place = inside if isinstance(inside, Mapping) else record
    names = ", ".join(map(repr, list(place)[:8])) or "none"
    return f"no field {name!r}; there are {names}" + f" in {outer!r}" * (place is inside)


@dataclass(frozen=True)
class Record:
    """A record, read as the corpus says; it has a `text` where it has no `problem`."""

    values: Mapping[str, Any]
    corpus: Corpus

    @property
    def _names(self) -> tuple[str, str]:
        """The fields of the text and of the id."""
        chats = [name for name in CHATS if self.corpus.chat and name in self.values]
        return self.corpus.text_field or next(iter(chats), "text"), self.corpus.id_field or "id"

    @property
    def id(self) -> str | None:
        value = value_at(self.values, self._names[1])
        if value is None or value is ABSENT:
            return None
        return value if isinstance(value, str) else json.dumps(value, default=str)

    @property
    def _value(self) -> Any:
        """What the field of the text says: messages as they are, words as one text."""
        value = value_at(self.values, self._names[0])
        return value if self.corpus.chat else as_text(value)

    @property
    def fields(self) -> dict[str, Any]:
        """All fields but the text and the id; with a sound the text is a field like others, such as its transcript."""
        names = self._names[self.corpus.audio_field is not None :]
        return {key: value for key, value in self.values.items() if key not in names}

    @property
    def text(self) -> str:
        """The text, messages as JSON; empty where the record has a sound instead."""
        if self.corpus.audio_field is not None:
            return ""
        value = self._value
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

    @property
    def is_whole(self) -> bool:
        """Whether the record has what is read of it: its text, or the name of its sound."""
        if self.corpus.audio_field is not None:
            return isinstance(value_at(self.values, self.corpus.audio_field), str)
        return self.problem is None

    @property
    def problem(self) -> str | None:
        """Why there is no text, or not the id that was asked for."""
        (name, id), value = self._names, self._value
        if self.corpus.id_field and self.id is None:
            return f"no field {id!r}"
        if self.corpus.audio_field is not None:
            return None
        if value is ABSENT:
            return no_field(self.values, name)
        if value is None:
            return f"field {name!r} is null"
        if isinstance(value, str) or (self.corpus.chat and isinstance(value, list)):
            return None
        return f"field {name!r}: expected text, got {type(value).__name__}"
