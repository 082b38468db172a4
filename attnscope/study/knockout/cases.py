"""What a knockout is of: texts with their answers, the rows that are cut in each and the keys that are cut from them.

cases = cases_of(loaded, [AskedText("Mary and John went out. John gave a book to", key="Mary", answer=" Mary")])
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from attnscope.errors import InputError, UsageError
from attnscope.hooks.engines import UNCHECKED
from attnscope.hooks.generation import check_causal
from attnscope.hooks.listen import listen
from attnscope.inputs.answers import check_answer, check_room
from attnscope.inputs.labels import visible_blanks
from attnscope.inputs.prompt import Prompt, from_ids, place, reading
from attnscope.inputs.tokens import find
from attnscope.interventions.base import AnswerLoss, LogitDifference, Measure
from attnscope.interventions.spec import AskedText, Task
from attnscope.study.knockout.records import Case

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel

DIVIDE = "end the text without a space, and begin the answer with one"


def cases_of(loaded: LoadedModel, questions: Sequence[AskedText]) -> list[Case]:
    """The cases of some questions. Raises InputError for what cannot be one, with the line where there are several."""
    check_causal(loaded, "a knockout")
    loaded.check_logits("a knockout")
    with CaseReader(loaded, any(one.chat for one in questions)) as read:
        found = []
        for one in questions:
            with naming(one.where):
                found.append(case_of(loaded, one, read))
        return found


@contextmanager
def naming(where: str) -> Iterator[None]:
    """An error in the block says where the question was written."""
    try:
        yield
    except (InputError, UsageError) as error:
        if not where:
            raise
        raise InputError(f"{where}: {error.message}", error.hint) from error


class CaseReader:
    """Texts and ids -> prompts, whose `answer` says where an answer begins."""

    def __init__(self, loaded: LoadedModel, chat: bool) -> None:
        self.loaded = loaded
        self.apart = reading(loaded.tokenizer, place(loaded.tokenizer, loaded.brought, chat))

    def __enter__(self) -> CaseReader:
        self.tokenised = self.apart.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.apart.__exit__(*error)

    @property
    def _room(self) -> int | None:
        return self.loaded.geometry.max_positions

    def prompt(self, question: AskedText) -> Prompt:
        """The text alone."""
        text = question.text
        if isinstance(text, str):
            if not text.strip():
                raise InputError("the text is empty", "give a text with at least one word")
            found = self.tokenised(text, question.chat, self._room, question.truncate, "")
        else:
            found = from_ids(self.loaded.tokenizer, text, max_tokens=self._room, truncate=question.truncate)
        self.loaded.check_ids(found.ids)
        return found

    def answer(self, question: AskedText, prompt: Prompt, answer: str | Sequence[int]) -> tuple[int, ...]:
        """The ids of an answer behind the text, which is tokenised with it."""
        check_answer(None, answer, question.truncate)
        if not isinstance(answer, str):
            self.loaded.check_ids(answer)
            return tuple(answer)
        if not isinstance(question.text, str):
            raise UsageError(
                "the text is token ids, and its answer is words", "give both as text, or both as token ids"
            )
        whole = self.tokenised(question.text, question.chat, None, None, answer)
        assert whole.answer is not None
        check_room(whole, None, self.loaded.geometry.max_positions)
        if whole.ids[: whole.answer] != prompt.ids:
            raise InputError("the text is tokenised otherwise with its answer after it", DIVIDE)
        return whole.ids[whole.answer :]


def case_of(loaded: LoadedModel, question: AskedText, read: CaseReader) -> Case:
    """The case of one question."""
    prompt = read.prompt(question)
    answer = question.answer
    ids = own_next(loaded, prompt.ids) if answer is None else read.answer(question, prompt, answer)
    foil = None
    if question.foil is not None:
        foil = read.answer(question, prompt, question.foil)[0]
        if foil == ids[0]:
            raise InputError("the answer and its foil begin with the same token", "choose another foil")
    last = len(prompt) - 1
    parts = {"made": range(last, last + len(ids))}
    queries = find(prompt, question.query, question.define, parts).positions
    keys = tuple(range(len(prompt)))
    if question.key is not None:
        keys = find(prompt, question.key, question.define, parts).positions
    if not any(key <= max(queries) for key in keys):
        raise InputError(
            f"no query sees the key {question.key}: its first token is {keys[0]}, and the last query {max(queries)}",
            "name keys that come before a query",
        )
    said, foil_text = (text_of_ids(loaded, one) for one in (ids, () if foil is None else (foil,)))
    return Case(prompt, queries, keys, ids, said, foil, foil_text, own=answer is None)


def text_of_ids(loaded: LoadedModel, ids: Sequence[int]) -> str:
    """Some ids as text, with blanks that are seen."""
    return visible_blanks("".join(from_ids(loaded.tokenizer, ids).plain)) if ids else ""


def own_next(loaded: LoadedModel, ids: Sequence[int]) -> tuple[int, ...]:
    """The token that the model itself puts behind some ids."""
    ids_BT = torch.tensor([list(ids)], device=loaded.device)
    report = listen(loaded.model, ids_BT, lambda call: None, engine=UNCHECKED, logits_at=[-1])
    assert report.logits is not None
    return (int(report.logits[0, -1].argmax()),)


def task_of(cases: Sequence[Case]) -> tuple[Task, Measure]:
    """The passes' task, and what the answer is measured by: nats, or against a foil logits.

    Raises InputError where some have a foil and others none.
    """
    task = Task(
        "answers",
        tuple(one.ids for one in cases),
        tuple(one.rows for one in cases),
        {"keys": [list(one.keys) for one in cases]} if len(cases) == 1 else {},
    )
    foils = [one.foil for one in cases if one.foil is not None]
    if not foils:
        return task, AnswerLoss()
    if len(foils) < len(cases):
        raise InputError("some texts have a foil and others have none", "give each one, or none")
    last = [len(one.prompt) - 1 for one in cases]
    return task, LogitDifference([one.answer[0] for one in cases], foils, last)
