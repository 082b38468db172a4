"""Deadlines that ring early: what never ends is given up after a twentieth of the time that it is allowed."""

import signal

import pytest


def short_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """One second for what is read apart, of which a twentieth goes by."""
    monkeypatch.setenv("ATTNSCOPE_READING_SECONDS", "1")
    monkeypatch.setattr(signal, "alarm", lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds / 20))
