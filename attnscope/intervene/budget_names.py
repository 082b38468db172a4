"""Budgets of a KV cache as they are written: `stream:4+64`, `top:64`, `h2o:64`, `received:64`, `snap:64@16`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from attnscope.errors import UsageError

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
