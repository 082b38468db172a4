"""Deadlines that ring early: what never ends is given up after a fifth of the time that it is allowed."""

import signal

import pytest


def short_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """One second for what is read apart, of which a fifth goes by."""
    monkeypatch.setenv("ATTNSCOPE_READING_SECONDS", "1")
    monkeypatch.setattr(signal, "alarm", lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds / 5))
