"""What a budget is measured on: texts with the end of their prompt, and the rows that count.

    cases = budget_cases(loaded, [AskedCache("Mary and John went out. John gave a book to", answer=" Mary")], budgets)

Without an answer the rows of the whole text count, with `at` those from the end of the prompt on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attnscope.errors import InputError, UsageError
from attnscope.hooks.engines import UNCHECKED
from attnscope.hooks.generation import check_causal, continuation, say_ignored
from attnscope.inputs.answers import check_answer, check_room
from attnscope.inputs.prompt import Prompt
from attnscope.inputs.tokens import find
from attnscope.interventions.base import LOSS, AnswerLoss, LogitDifference, Measure
from attnscope.interventions.spec import AskedText, Task, written_budgets
from attnscope.study.knockout.cases import CaseReader, naming, text_of_ids

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel

FOLLOW = "give {answer} of several tokens, {generate=32}, or {at=TOKEN}, where the prompt ends"


@dataclass(frozen=True)
class AskedCache(AskedText):
    """What is asked of one text. at: the last token of the prompt, None for the end of the text. generate: how many
    tokens of its own the model is to give as the answer."""

    FIELDS = ("at", "answer", "foil")

    at: str | None = None
    generate: int | None = None


@dataclass(frozen=True)
class CacheCase:
    """A text as it is read. prompt: the text alone. end: the tokens of the prompt. start: the first row that counts.
    answer: its ids, empty for none; answer_text: as text. foil: an id; foil_text: as text."""

    prompt: Prompt
    end: int
    start: int
    answer: tuple[int, ...] = ()
    answer_text: str = ""
    foil: int | None = None
    foil_text: str = ""

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt.ids + self.answer

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows whose next tokens are measured."""
        return tuple(range(self.start, self.stop))

    @property
    def stop(self) -> int:
        """The rows that anything depends on: all but the last."""
        return len(self.ids) - 1


def budget_cases(loaded: LoadedModel, questions: Sequence[AskedCache], keep: str) -> list[CacheCase]:
    """The cases of some questions; keep: the budgets, as they are written.

    Raises InputError for what cannot be one, with the line where there are several; UsageError where a budget chooses
    at the end of the prompt and no row follows it.
    """
    check_causal(loaded, "a budget of a cache")
    loaded.check_logits("a budget of a cache")
    once = [name for name, one in written_budgets(keep).items() if one.once]
    if any(one.generate for one in questions):
        say_ignored(loaded)
    with CaseReader(loaded, any(one.chat for one in questions)) as read:
        found = []
        for one in questions:
            with naming(one.where):
                found.append(_case(loaded, one, read))
                for name in once:
                    _check_follows(found[-1], name)
        return found


def _case(loaded: LoadedModel, question: AskedCache, read: CaseReader) -> CacheCase:
    prompt = read.prompt(question)
    last = len(prompt) - 1
    end = 1 + (last if question.at is None else max(find(prompt, question.at, question.define).positions))
    check_answer(question.generate, question.answer, question.truncate)
    answer = _answer(loaded, question, read, prompt)
    start = last if answer else 0 if question.at is None else end
    foil = None
    if question.foil is not None:
        foil = read.answer(question, prompt, question.foil)[0]
        if not answer:
            raise UsageError(
                "a foil is compared with an answer, and there is none", "give {answer}, or leave out {foil}"
            )
        if foil == answer[0]:
            raise InputError("the answer and its foil begin with the same token", "choose another foil")
    case = CacheCase(prompt, end, start, answer, text_of_ids(loaded, answer), foil)
    if not case.rows:
        said = f"no token follows token {start}" if start else "the text is one token, and no token follows it"
        raise InputError(said, "give a longer text")
    return case if foil is None else replace(case, foil_text=text_of_ids(loaded, (foil,)))


def _answer(loaded: LoadedModel, question: AskedCache, read: CaseReader, prompt: Prompt) -> tuple[int, ...]:
    """The ids of the answer: as it is given, or what the model itself puts after the text; empty for none."""
    if question.answer is not None:
        return read.answer(question, prompt, question.answer)
    if question.generate is None:
        return ()
    check_room(replace(prompt, answer=len(prompt)), question.generate, loaded.geometry.max_positions)
    return tuple(continuation(loaded, prompt.ids, question.generate, UNCHECKED).ids)


def _check_follows(case: CacheCase, name: str) -> None:
    """Raise UsageError where no row that is measured, or that one depends on, is after the prompt."""
    last = case.rows[0] if case.foil is not None else case.rows[-1]
    if last < case.end:
        how = "its one token is made by the prompt's last row" if case.answer else "the prompt is the whole text"
        raise UsageError(f"{name} cuts rows after the prompt, and none counts: {how}", FOLLOW)


def budget_task(cases: Sequence[CacheCase]) -> tuple[Task, Measure]:
    """The passes' task, and what it is measured by: nats per token of a text, nats of an answer, or logits with a foil.

    Raises InputError where some have an answer or a foil and others none.
    """
    for what, given in (
        ("an answer", [bool(one.answer) for one in cases]),
        ("a foil", [one.foil is not None for one in cases]),
    ):
        if any(given) and not all(given):
            raise InputError(f"some texts have {what} and others have none", "give each one, or none")
    task = Task(
        "answers" if cases[0].answer else "texts", tuple(one.ids for one in cases), tuple(one.rows for one in cases)
    )
    foils = [one.foil for one in cases if one.foil is not None]
    if foils:
        return task, LogitDifference([one.answer[0] for one in cases], foils, [one.start for one in cases])
    return task, AnswerLoss() if cases[0].answer else LOSS
