"""Ctrl-C and SIGTERM: leave at once while nothing is being written, unwind while something is.

Leaving at once is the rule because an exception raised inside an import of PyTorch can abort the process, and one
raised inside a weakref's callback is swallowed. Compiled code may make another error of it (matplotlib does, "Invalid
affine transformation matrix"), so what came is kept: `came()` says whether an error is a signal's.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

CODES: dict[int, int] = {signal.SIGINT: 130, signal.SIGTERM: 143}
WORDS: dict[int, str] = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
ERASE_LINE, SHOW_CURSOR = "\r\x1b[2K", "\x1b[?25h"
AGAIN_SECONDS = 0.02

_writing = False
_came: int | None = None


class Stopped(BaseException):
    """A signal came while files were being written: unwind, so that no half file and no worker stays."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def listen() -> None:
    """Take over SIGINT and SIGTERM; what the parent process has us ignore stays ignored."""
    for number in CODES:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)


@contextmanager
def unwinding() -> Iterator[None]:
    """While the block runs, a signal raises `Stopped` in it, so that its files and processes are tidied.

    Where something on the way up swallowed that, it is raised again by `again`, at the latest when the block ends.
    """
    global _writing, _came
    before = _writing, sys.unraisablehook
    _writing, sys.unraisablehook = True, _deliver_again
    _came = _came if before[0] else None
    try:
        yield
        again()
    finally:
        _writing, sys.unraisablehook = before


def again() -> None:
    """Raise `Stopped` for a signal that came and was swallowed; called between the steps of long work."""
    if _writing and _came is not None:
        raise Stopped(_came)


def came() -> int | None:
    """The signal that was raised as `Stopped`, whatever became of it on the way up."""
    return _came


def _leave(number: int) -> None:
    bar = ERASE_LINE + SHOW_CURSOR if os.isatty(2) else ""  # a progress bar may stand there
    with suppress(OSError):
        os.write(2, f"{bar}attnscope: {WORDS[number]}\n".encode())
    os._exit(CODES[number])


def _stop(number: int, frame: FrameType | None) -> None:
    global _came
    if _writing:
        _came = number
        raise Stopped(number)
    _leave(number)


def _deliver_again(unraisable: Any) -> None:
    """In a weakref's callback an exception is swallowed, and the signal with it: send it once more, from outside."""
    if isinstance(unraisable.exc_value, Stopped):
        again = (threading.main_thread().ident, unraisable.exc_value.number)
        threading.Timer(AGAIN_SECONDS, signal.pthread_kill, again).start()
    else:
        sys.__unraisablehook__(unraisable)
