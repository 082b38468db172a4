"""How a process answers Ctrl-C and SIGTERM.

A command leaves at once while nothing is being written, and unwinds while something is (`listen`, `unwinding`). Work in
parts finishes the part at hand at the first signal, and ends at once at the second (`GracefulStop`). A process that was
started to help leaves Ctrl-C to its parent, which the terminal signals too (`begin_worker`, `begin_helper`).

Leaving at once is the rule because an exception raised inside an import of PyTorch can abort the process, and one
raised inside a weakref's callback is swallowed. Compiled code may make another error of it (matplotlib does, "Invalid
affine transformation matrix"), so the signal's number is kept: `arrived()` says whether an error is a signal's.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket

CODES: dict[int, int] = {signal.SIGINT: 130, signal.SIGTERM: 143}
WORDS: dict[int, str] = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
ERASE_LINE, SHOW_CURSOR = "\r\x1b[2K", "\x1b[?25h"
AGAIN_SECONDS = 0.02

busy = threading.Lock()  # of a worker: held while it writes what it does not break off
leaving = threading.Event()  # of a worker: it is to end
_writing = False
_arrived: int | None = None
_sent_again = False  # a signal is under way that we sent ourselves


class Stopped(BaseException):
    """A signal arrived while files were being written: unwind, so that no half file and no worker stays."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.kept = ""  # what of long work is kept, in words


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
    global _writing, _arrived
    before = _writing, sys.unraisablehook
    _writing, sys.unraisablehook = True, _deliver_again
    _arrived = _arrived if before[0] else None
    try:
        yield
        again()
    finally:
        _writing, sys.unraisablehook = before


def again() -> None:
    """Raise `Stopped` for a signal that arrived and was swallowed; called between the steps of long work."""
    if _writing and _arrived is not None:
        raise Stopped(_arrived)


def arrived() -> int | None:
    """The signal that was raised as `Stopped`, whatever became of it on the way up."""
    return _arrived


def _leave(number: int) -> None:
    bar = ERASE_LINE + SHOW_CURSOR if os.isatty(2) else ""  # a progress bar may stand there
    with suppress(OSError):
        os.write(2, f"{bar}attnscope: {WORDS[number]}\n".encode())
    os._exit(CODES[number])


def _stop(number: int, frame: FrameType | None) -> None:
    global _arrived, _sent_again
    ours, _sent_again = _sent_again, False
    if _writing:
        _arrived = number
        raise Stopped(number)
    if not ours:  # else the block has ended by it meanwhile, and who is above it says so
        _leave(number)


def _deliver_again(unraisable: Any) -> None:
    """In a weakref's callback an exception is swallowed, and the signal with it: send it once more, from outside."""
    if isinstance(unraisable.exc_value, Stopped):
        threading.Timer(AGAIN_SECONDS, _send_again, [unraisable.exc_value.number]).start()
    else:
        sys.__unraisablehook__(unraisable)


def _send_again(number: int) -> None:
    global _sent_again
    if _writing:
        _sent_again = True
        _signal_main(number)


def _signal_main(number: int) -> None:
    """Send the main thread a signal, from another one."""
    ident = threading.main_thread().ident
    if hasattr(signal, "pthread_kill") and ident is not None:
        signal.pthread_kill(ident, number)
    else:  # Windows
        _thread.interrupt_main(signal.Signals(number))


class GracefulStop:
    """While open, the first SIGINT or SIGTERM asks for an end after the part at hand; the second ends at once.

    Called, it says whether an end was asked for. Until it is first called nothing is under way, and a signal ends the
    run as it would any command. tell: called at the first signal, amid anything.
    """

    def __init__(self, tell: Callable[[], object]) -> None:
        self.signal: int | None = None
        self._tell, self._armed = tell, False
        self._before: dict[int, Any] = {}

    @property
    def code(self) -> int:
        """The exit code that the signal asks for."""
        assert self.signal is not None
        return CODES[self.signal]

    def __call__(self) -> bool:
        self._armed = True
        return self.signal is not None

    def __enter__(self) -> GracefulStop:
        for number in CODES:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._armed and self.signal is None:
            self.signal = number
            with suppress(RuntimeError):  # it arrived amid a line to stderr, which takes no second
                self._tell()
            return
        before = self._before[number]
        if callable(before):
            before(number, frame)


@contextmanager
def given_back(number: int) -> Iterator[None]:
    """After the block the signal has its handler again, which a library may have replaced by its own."""
    handler = signal.getsignal(number)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(number, handler)


@contextmanager
def held() -> Iterator[None]:
    """Signals that stop us wait; a process started here waits with them until it says otherwise."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, CODES)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_helper() -> None:
    """A helper's start: SIGTERM ends it at once. Ctrl-C reaches every process of a terminal: the parent decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def begin_worker() -> None:
    """A worker's start: it ends with its parent, and on SIGTERM, but never while it is `busy` with a file."""
    import socket

    begin_helper()
    receiving, sending = socket.socketpair()
    sending.setblocking(False)
    signal.set_wakeup_fd(sending.fileno())
    signal.signal(signal.SIGTERM, lambda *_: None)  # a handler runs amid anything, also where this thread holds a lock
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, CODES)
    threading.Thread(target=_end, args=(receiving, sending), daemon=True).start()


def _end(receiving: socket.socket, sending: socket.socket) -> None:
    """End once a signal tells so, or the parent has ended: a worker would else wait for work for ever.

    tells: where signals write; kept open here.
    """
    import multiprocessing
    from multiprocessing.connection import wait

    parent = multiprocessing.parent_process()
    wait([receiving] if parent is None else [receiving, parent.sentinel])
    leaving.set()
    with busy:
        os._exit(1)
