"""What a knockout is asked: texts with their answers, and what is cut in them; without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from attnscope.errors import UsageError

if TYPE_CHECKING:
    from attnscope.attention.rows import CutHow
    from attnscope.inputs.prompt import Side

DRAWS = 40  # with which p can be below 0.05: at least 2 / 41
Selection = Mapping[int, Sequence[int]]
Texts = str | Sequence[int] | Sequence[Mapping[str, Any]]  # one text, its token ids, or records of texts
EXPRESSIONS = ("query", "key", "at")


@dataclass(frozen=True)
class AskedText:
    """What is asked of one text. Expressions speak of the text: `last` is its last token, `made` the rows that make
    the answer.

    text: the text, or its token ids. query: the rows. key: the keys, None for all tokens of the text. answer: what the
    text is followed by, as the text is given; None for the model's own next token. foil: what it is not followed by.
    where: the place of its record, of several. FIELDS: what a record of texts may say of each.
    """

    FIELDS: ClassVar[tuple[str, ...]] = ("query", "key", "answer", "foil")

    text: str | Sequence[int]
    query: str = "last"
    key: str | None = None
    answer: str | Sequence[int] | None = None
    foil: str | Sequence[int] | None = None
    define: Mapping[str, str] = field(default_factory=dict)
    chat: bool = False
    truncate: Side | None = None
    where: str = ""

    @classmethod
    def of(cls, text: Texts, shared: Mapping[str, Any]) -> list[Self]:
        """What is asked of a text, or of each record of texts; shared: the fields of all that leave them out.

        Raises UsageError for a record that is none, and for what no text makes right.
        """
        records = text
        if isinstance(text, str) or not any(isinstance(one, Mapping) for one in text):
            records = [{"text": text}]
        questions = []
        for number, record in enumerate(records, 1):
            where = f"text {number}" if len(records) > 1 else ""
            if not isinstance(record, Mapping) or "text" not in record or set(record) - {"text", *cls.FIELDS}:
                names = ", ".join(cls.FIELDS)
                raise UsageError(f"{where or 'text'} is not a record of text, {names}", "leave out the rest")
            own = {**shared, **{name: value for name, value in record.items() if value is not None}, "where": where}
            own |= {name: str(own[name]) for name in EXPRESSIONS if own.get(name) is not None}
            questions.append(cls(**own))
        return questions

    def refused(self, message: str, hint: str) -> UsageError:
        """An error that says where the question was written."""
        return UsageError(f"{self.where}: {message}".removeprefix(": "), hint)


def asked_of(text: Texts, shared: Mapping[str, Any], *, each_key: bool) -> list[AskedText]:
    """As `AskedText.of`. Raises UsageError where no key is named and each is not cut alone."""
    questions = AskedText.of(text, shared)
    for one in questions:
        if one.key is None and not each_key:
            raise one.refused("no key was named", "name it with {key}, or use {over=keys}")
    return questions


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
