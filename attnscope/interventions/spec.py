"""What interventions are asked for, as plain data without torch.

Heads that are changed together, and the keys that are cut from them; what passes are run on: token sequences, and their
rows whose next-token loss counts; and, as it is written, what of a head is patched, in what portions, how that is
measured, and budgets of a KV cache: `stream:4+64`, `top:64`, `h2o:64`, `received:64`, `snap:64@16`. Last, what a
knockout is asked: texts with their answers, and what is cut in them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from attnscope.errors import UsageError
from attnscope.utils.display import head_names

if TYPE_CHECKING:
    from attnscope.attention.rows import CutHow
    from attnscope.inputs.prompt import Side


@dataclass(frozen=True)
class HeadSet:
    """Heads that go together, as (layer, head), ascending.

    >>> str(HeadSet("induction", ((3, 0), (3, 1))))
    'L3H0 L3H1'
    """

    name: str
    heads: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return head_names(self.heads)

    @property
    def identity(self) -> Hashable:
        """What tells it from another: equal ones are run once."""
        return self.heads

    @property
    def per_layer(self) -> dict[int, int]:
        """{layer: how many of its heads}."""
        return {layer: len(list(group)) for layer, group in itertools.groupby(self.heads, lambda head: head[0])}


@dataclass(frozen=True)
class Cut(HeadSet):
    """Heads, and the keys of each text of the task that are cut from them in the rows that are asked.

    moves: of each text (key, other key) pairs. In these rows and heads the weight of the first goes to the second,
    before keys are cut.
    """

    keys: tuple[tuple[int, ...], ...] = ()
    moves: tuple[tuple[tuple[int, int], ...], ...] = ()

    @property
    def identity(self) -> Hashable:
        return (self.heads, self.keys, self.moves) if any(self.moves) else (self.heads, self.keys)


@dataclass(frozen=True)
class Task:
    """Sequences and what counts in them.

    ids: of every sequence. rows: of every sequence the positions whose next token's loss counts, ascending. facts: what
    it was made of. together: so many sequences that follow each other are read in one pass: 2 for pairs.
    """

    name: str
    ids: tuple[tuple[int, ...], ...]
    rows: tuple[tuple[int, ...], ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    together: int = 1

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.ids]

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return sum(self.lengths)

    @property
    def one_length(self) -> bool:
        return len(set(self.lengths)) == 1

    @property
    def sha256(self) -> str:
        """Of all ids and rows."""
        return hashlib.sha256(json.dumps([self.ids, self.rows]).encode()).hexdigest()


PatchTarget = Literal["output", "pattern", "key", "value"]
WHAT: tuple[PatchTarget, ...] = get_args(PatchTarget)
SHARED: tuple[PatchTarget, ...] = ("key", "value")  # what the heads of a kv group have in common
Over = Literal["none", "heads", "kv", "layers", "positions", "layers,positions"]
OVER: tuple[Over, ...] = get_args(Over)
BUDGETS_OVER = ("none", "layers", "kv", "heads")
Method = Literal["measure", "gradient"]
METHODS: tuple[Method, ...] = get_args(Method)

_NUMBER = "([1-9][0-9]{0,8})"
FORMS = {
    "stream": re.compile(rf"(0|[1-9][0-9]{{0,8}})\+{_NUMBER}"),
    "top": re.compile(_NUMBER),
    "h2o": re.compile(_NUMBER),
    "received": re.compile(_NUMBER),
    "snap": re.compile(rf"{_NUMBER}@{_NUMBER}"),
}
ONCE = ("received", "snap")  # choose once, at the end of the prompt
WRITTEN = "stream:A+N, top:N, h2o:N, received:N or snap:N@W"


@dataclass(frozen=True)
class WrittenBudget:
    """A budget by its kind and its numbers: of `snap:64@16` snap and 64, 16."""

    kind: str
    numbers: tuple[int, ...]

    @property
    def once(self) -> bool:
        """Whether its keys are chosen once, at the end of the prompt."""
        return self.kind in ONCE


def written_budget(text: str) -> WrittenBudget:
    """The budget that a text names. Raises UsageError for a text that names none.

    >>> written_budget("snap:64@16")
    WrittenBudget(kind='snap', numbers=(64, 16))
    """
    kind, _, numbers = text.partition(":")
    match = FORMS[kind].fullmatch(numbers) if kind in FORMS else None
    if match is None:
        raise UsageError(f"expected a budget {WRITTEN}, got {text[:30]!r}", "write {keep=stream:4+64}")
    budget = WrittenBudget(kind, tuple(map(int, match.groups())))
    if kind == "snap" and budget.numbers[0] < budget.numbers[1]:
        size, window = budget.numbers
        raise UsageError(
            f"{text}: the window of {window} keys is always kept, and the budget is {size}",
            f"write {{keep=snap:{window}@{window}}}, or a larger budget",
        )
    return budget


def written_budgets(text: str) -> dict[str, WrittenBudget]:
    """The budgets of a list by commas, each once, by how it is written. Raises as `written_budget`.

    >>> list(written_budgets("stream:4+64, top:64"))
    ['stream:4+64', 'top:64']
    """
    return {part: written_budget(part) for part in map(str.strip, text.split(","))}


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
    for question in questions:
        if question.key is None and not each_key:
            raise question.refused("no key was named", "name it with {key}, or use {over=keys}")
    return questions


@dataclass(frozen=True, kw_only=True)
class HeadPlan:
    """Which heads are changed. over: what is changed one at a time. select: the heads, by layer, None for all; name:
    what they are called together."""

    over: str = "none"
    select: Selection | None = None
    name: str = "all heads"


@dataclass(frozen=True, kw_only=True)
class CutPlan(HeadPlan):
    """What is cut, one at a time as `cuts_over` says, and what it is compared with.

    how: `mask` or `zero`, see `attention.again`. random: draws of each null, 0 for none.
    """

    how: CutHow = "mask"
    random: int = DRAWS
    seed: int = 0


def check_budgets(
    keep: str, over: str = "none", *, query: str | None = None, key: str | None = None, how: str = "mask"
) -> None:
    """Raise UsageError for what is no budget, and for what only a knockout of named keys is asked."""
    written_budgets(keep)
    for name, expression in (("query", query), ("key", key)):
        if expression is not None:
            raise UsageError(
                f"{name} does not apply to a budget, which chooses its keys itself", f"leave out {{{name}}} or {{keep}}"
            )
    if how != "mask":
        raise UsageError(
            "a budget gives the weight of lost keys to the rest of the row",
            f"leave out {{how={how}}} or {{keep}}",
        )
    if over not in BUDGETS_OVER:
        raise UsageError(
            f"expected a budget over {', '.join(BUDGETS_OVER[:-1])} or {BUDGETS_OVER[-1]}, got {over[:20]!r}",
            "write {over=heads}",
        )


def check_no_budget(at: str | int | None, generate: int | None) -> None:
    """Raise UsageError where there is no budget, for what only a budget is asked."""
    for name, option in (("at", at), ("generate", generate)):
        if option is not None:
            raise UsageError(f"{name} needs a budget", f"leave out {{{name}}}, or add {{keep=top:64}}")


def check_below(below: float) -> None:
    """Raise UsageError for a limit that is no number above 0."""
    if not 0 < below < float("inf"):
        raise UsageError(f"expected a limit above 0 for what a head may lose, got {below}", "write 0.01")
