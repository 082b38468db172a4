"""What a knockout is asked: texts with their answers, and what is cut in them; without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attnscope.errors import UsageError

if TYPE_CHECKING:
    from attnscope.attention.again import CutHow
    from attnscope.text.prompt import Side

FIELDS = ("query", "key", "answer", "foil")
DRAWS = 40  # with which p can be below 0.05: at least 2 / 41
Selection = Mapping[int, Sequence[int]]


@dataclass(frozen=True)
class AskedText:
    """What is asked of one text. Expressions speak of the text: `last` is its last token, `made` the rows that make
    the answer.

    text: the text, or its token ids. query: the rows. key: the keys, None for all tokens of the text. answer: what the
    text is followed by, as the text is given; None for the model's own next token. foil: what it is not followed by.
    """

    text: str | Sequence[int]
    query: str = "last"
    key: str | None = None
    answer: str | Sequence[int] | None = None
    foil: str | Sequence[int] | None = None
    define: Mapping[str, str] = field(default_factory=dict)
    chat: bool = False
    truncate: Side | None = None
    where: str = ""


def asked_of(
    text: str | Sequence[int] | Sequence[Mapping[str, Any]], shared: Mapping[str, Any], *, each_key: bool
) -> list[AskedText]:
    """What is asked of a text, or of records of texts; shared: the fields of all. Raises UsageError for a record that
    is none, and where no key is named and each is not cut alone."""
    found = []
    for own in records_of(text, shared, FIELDS):
        own |= {name: str(own[name]) for name in ("query", "key") if own[name] is not None}
        if own["key"] is None and not each_key:
            where = own["where"]
            raise UsageError(f"{where}: no key was named".removeprefix(": "), "name it with {key}, or use {over=keys}")
        found.append(AskedText(**own))
    return found


def records_of(
    text: str | Sequence[int] | Sequence[Mapping[str, Any]], shared: Mapping[str, Any], names: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """What is given of a text, or of each record of texts: the fields of all, its own, and `where` it was written.

    names: what a record may say beside its text. Raises UsageError for a record that is none.
    """
    records = [{"text": text}] if isinstance(text, str) or not any(isinstance(one, Mapping) for one in text) else text
    for number, record in enumerate(records, 1):
        where = f"text {number}" if len(records) > 1 else ""
        if not isinstance(record, Mapping) or "text" not in record or set(record) - {"text", *names}:
            raise UsageError(f"{where or 'text'} is not a record of text, {', '.join(names)}", "leave out the rest")
        yield {**shared, **{name: value for name, value in record.items() if value is not None}, "where": where}


@dataclass(frozen=True)
class CutPlan:
    """What is cut, and what it is compared with.

    over: what is cut one at a time, see `cuts`. select: the heads, by layer, None for all; name: what they are called
    together. how: `mask` or `zero`, see `attention.again`. random: draws of each null, 0 for none.
    """

    over: str = "none"
    select: Selection | None = None
    name: str = "all heads"
    how: CutHow = "mask"
    random: int = DRAWS
    seed: int = 0
