"""Texts that a model's own code reads, read in this process: to fork for each takes longer than the rest of a test."""

from typing import Any

import pytest

from attnscope import apart


def read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call in this process what would be called in a fork, without its deadline and its bound on memory."""
    asked: list[Any] = [apart.answer_of]
    monkeypatch.setattr(apart, "_elsewhere", asked)
