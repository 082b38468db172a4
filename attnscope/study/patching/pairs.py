"""What is patched: pairs of a clean and a corrupted text with one answer, and which of their tokens belong together.

pairs = pairs_of(loaded, [AskedPair("Mary and John. John saw", corrupted="Mary and John. Mary saw", answer=" Mary")])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attnscope.errors import InputError
from attnscope.hooks.generation import check_causal
from attnscope.inputs.spans import alignment, units
from attnscope.inputs.tokens import find
from attnscope.interventions.base import Measure
from attnscope.interventions.spec import AskedText, Task
from attnscope.interventions.spec import PatchTarget as What
from attnscope.study.knockout.cases import CaseReader, case_of, naming, task_of
from attnscope.study.knockout.records import Case, key_name

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel

AS_MANY = "use texts with the same number of tokens"


@dataclass(frozen=True)
class AskedPair(AskedText):
    """What is asked of one pair, of which the text itself is the clean one. corrupted: the other, or its token ids. at:
    the tokens of the clean text that are patched, None for all that have a partner. answer, foil: behind either text.

    Raises UsageError where there is no corrupted text.
    """

    FIELDS = ("corrupted", "at", "answer", "foil")

    corrupted: str | Sequence[int] = None  # type: ignore[assignment]  # which is refused
    at: str | None = None

    def __post_init__(self) -> None:
        if self.corrupted is None:
            raise self.refused("no corrupted text was given", "give one with {corrupted}")


@dataclass(frozen=True)
class TextPair:
    """A pair as it is read. at: positions of the clean text; partners: those of the corrupted text, in the same places.
    without: how many tokens of the clean text have no partner."""

    clean: Case
    corrupted: Case
    at: tuple[int, ...]
    partners: tuple[int, ...]
    without: int = 0

    @property
    def alike(self) -> bool:
        """Whether both texts are the same, so that no patch changes anything."""
        return self.clean.ids == self.corrupted.ids


def pairs_of(loaded: LoadedModel, questions: Sequence[AskedPair], what: What = "output") -> list[TextPair]:
    """The pairs of some questions. Raises InputError for what cannot be one, with the line where there are several."""
    check_causal(loaded, "patching")
    loaded.check_logits("patching")
    with CaseReader(loaded, any(one.chat for one in questions)) as read:
        found = []
        for one in questions:
            with naming(one.where):
                found.append(_pair(loaded, one, what, read))
        return found


def _pair(loaded: LoadedModel, question: AskedPair, what: What, read: CaseReader) -> TextPair:
    clean = case_of(loaded, question, read)
    corrupted = _corrupted(question, clean, read)
    partner = partners(clean, corrupted)
    if question.at is None:
        at = tuple(sorted(partner))
        if not at:
            raise InputError("the two texts have no token in common", "name texts that differ in some words alone")
    else:
        at = find(clean.prompt, question.at, question.define).positions
        alone = next((place for place in at if place not in partner), None)
        if alone is not None:
            raise InputError(f"{key_name(clean, alone)} has no partner in the corrupted text", "choose other tokens")
    pair = TextPair(clean, corrupted, at, tuple(partner[place] for place in at), len(clean.prompt) - len(partner))
    _check_places(pair, what)
    return pair


def _corrupted(question: AskedPair, clean: Case, read: CaseReader) -> Case:
    """The corrupted text with the answer of the clean one behind it."""
    asked = replace(question, text=question.corrupted)
    prompt = read.prompt(asked)
    if isinstance(question.answer, str) and read.answer(asked, prompt, question.answer) != clean.answer:
        raise InputError(
            "the answer is tokenised otherwise after the corrupted text", "end both texts with the same word"
        )
    tokens, room = len(prompt) + len(clean.answer), read.loaded.geometry.max_positions
    if room is not None and tokens > room:
        raise InputError(f"the corrupted text has {tokens} tokens with its answer, the model reads {room}", "cut it")
    last = len(prompt) - 1
    return replace(clean, prompt=prompt, queries=(last,), keys=tuple(range(len(prompt))))


def partners(clean: Case, corrupted: Case) -> dict[int, int]:
    """Which token of the corrupted text each token of the clean one belongs to, one to one; some belong to none."""
    a, b = clean.prompt.plain, corrupted.prompt.plain
    of_clean, of_corrupted = units(a, b, alignment(a, b)).members
    both = zip(of_clean, of_corrupted, strict=True)
    return {one[0]: other[0] for one, other in both if len(one) == len(other) == 1}


def _check_places(pair: TextPair, what: What) -> None:
    """Raise InputError where what is patched cannot be moved to another position."""
    lengths = len(pair.clean.prompt), len(pair.corrupted.prompt)
    if what == "pattern" and lengths[0] != lengths[1]:
        raise InputError(
            f"patterns are patched between texts of equal length, got {lengths[0]} and {lengths[1]} tokens",
            f"{AS_MANY}, or {{what=output}}",
        )
    moved = next((both for both in zip(pair.at, pair.partners, strict=True) if both[0] != both[1]), None)
    if what == "key" and moved is not None:
        raise InputError(
            f"keys are patched at equal positions: {key_name(pair.clean, moved[0])} is token {moved[1]} there",
            f"{AS_MANY}, or {{what=value}}",
        )


def pairs_task(pairs: Sequence[TextPair]) -> tuple[Task, Measure]:
    """The passes' task, clean and corrupted texts in turn, and what the answer is measured by."""
    task, measure = task_of([case for pair in pairs for case in (pair.clean, pair.corrupted)])
    return replace(task, name="pairs", facts={}, together=2), measure
