"""One question on its way to the worker, and its answer back, where no end that stopped holds up another question.

Who asked may be suspended (Ctrl-Z) or read slowly: up to MOST_KEPT bytes of an answer wait for it here, and the worker
turns to the next question meanwhile. A worker that was suspended is ended. Each end that waits hears `here` from this
server every second, so that it can tell work from silence.
"""

from __future__ import annotations

import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attnscope.serve.wire import Passing, WireError, framed, receive, send

HERE_SECONDS = 1.0  # between two words of a server that is there
STALLED_SECONDS = 10.0  # who took nothing of its answer for so long has gone
STOPPED_SECONDS = 2.0  # a worker that was suspended for so long is ended
MOST_KEPT = 2**25  # bytes
MOST_WORD = 2**10  # bytes of the word to continue


class Worker:
    """The process with the models, and a socket to it."""

    def __init__(self) -> None:
        self.link, theirs = socket.socketpair()
        self.link.settimeout(STOPPED_SECONDS)
        command = [sys.executable, "-P", "-m", "attnscope.serve.worker", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._unseen = self._suspended = 0.0  # seconds since the last look at its state; in which it was suspended

    def send(self, header: Any, blobs: Sequence[bytes] = ()) -> None:
        """Send one frame to it. Raises WireError where it has ended, or takes nothing."""
        try:
            send(self.link, header, blobs)
        except OSError as error:
            raise WireError("the worker takes nothing") from error

    def is_suspended(self) -> bool:
        """Whether someone stopped the process, so that it neither works nor ends."""
        return is_suspended(self.process.pid)

    def check(self, passed: float) -> None:
        """Raise WireError where the process has been suspended for too long. passed: seconds since the last look."""
        self._unseen += passed
        if self._unseen >= HERE_SECONDS:
            self._suspended = self._suspended + self._unseen if self.is_suspended() else 0.0
            self._unseen = 0.0
        if self._suspended >= STOPPED_SECONDS:
            raise WireError("the worker was suspended")

    def end(self) -> None:
        """End it at once."""
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):  # amid a read that the system does not give up
            self.process.wait(STALLED_SECONDS)
        self.link.close()


class Asker:
    """Who asked, at the other end of a socket. What is sent waits here until it is taken.

    has_gone: it has closed its end, or took nothing for too long.
    """

    def __init__(self, link: socket.socket) -> None:
        link.settimeout(0)
        self.link, self.has_gone = link, False
        self.kept = 0  # bytes that wait
        self._parts = deque[memoryview]()
        self._stalled = self._quiet = 0.0

    def put(self, data: bytes) -> None:
        """Send this after what waits."""
        if not self.has_gone:
            self._parts.append(memoryview(data))
            self.kept += len(data)
            self._quiet = 0.0
            self.push()

    def push(self) -> None:
        """Send as much as is taken at once."""
        try:
            while self._parts:
                count = self.link.send(self._parts[0])
                self.kept, self._stalled = self.kept - count, 0.0
                rest = self._parts.popleft()[count:]
                if rest:
                    self._parts.appendleft(rest)
        except BlockingIOError:
            pass
        except OSError:
            self.leave()

    def leave(self) -> None:
        """No one takes what waits."""
        self._parts.clear()
        self.has_gone, self.kept = True, 0

    def check(self, passed: float) -> None:
        """See whether it still takes what is sent. passed: seconds since the last look."""
        self._quiet += passed
        self._stalled = self._stalled + passed if self.kept else 0.0
        if self._stalled >= STALLED_SECONDS:
            self.leave()

    def here(self, why: str = "") -> None:
        """Say that this server is there, after a second without a word, between frames. why: what is waited for."""
        if self._quiet >= HERE_SECONDS and not self.kept:
            self.put(framed(["here", why]))

    def goes_on(self) -> bool:
        """Whether what it says is the word to continue: nothing more of it is read otherwise."""
        try:
            word = receive(self.link, MOST_WORD, HERE_SECONDS).header
        except WireError:
            return False
        finally:
            with suppress(OSError):
                self.link.settimeout(0)
        return bool(word == "go")

    def flush(self) -> None:
        """Wait until all is taken, or nothing for too long."""
        clock = Clock()
        with selectors.DefaultSelector() as selector:
            selector.register(self.link, selectors.EVENT_WRITE)
            while self.kept:
                if selector.select(HERE_SECONDS):
                    self.push()
                self.check(clock.passed())


def is_suspended(process: int | None) -> bool:
    """Whether a process was stopped by a signal or a debugger; False where the system does not say."""
    try:
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False


class Clock:
    """Seconds between two looks. A stop of this process itself does not count: all ends were stopped then, maybe."""

    def __init__(self) -> None:
        self._before = time.monotonic()

    def passed(self) -> float:
        """Since the last look."""
        before, self._before = self._before, time.monotonic()
        return min(self._before - before, 2 * HERE_SECONDS)


def relay(
    asker: Asker, worker: Worker, question: dict[str, Any], blobs: Sequence[bytes], finish: Callable[[], object]
) -> None:
    """Hand a question to the worker, and its answer to who asked, until the worker is free again.

    question: with its `number`. finish: called before the end of the answer is sent. Raises WireError where the worker
    has ended, was suspended, or says what is no answer.
    """
    answer, clock, listens = Passing(), Clock(), True
    with selectors.DefaultSelector() as selector:
        worker.send(question, blobs)
        while not answer.ended:
            # Where too much of the answer waits here already, the worker waits until some of it is taken.
            _watch(selector, worker.link, selectors.EVENT_READ if asker.kept < MOST_KEPT else 0)
            events = selectors.EVENT_READ * listens | selectors.EVENT_WRITE * bool(asker.kept)
            _watch(selector, asker.link, 0 if asker.has_gone else events)
            ready = {key.fileobj: events for key, events in selector.select(HERE_SECONDS)}
            if worker.link in ready:
                piece = answer.piece(worker.link)
                if answer.ended:
                    finish()
                asker.put(piece)
            if ready.get(asker.link, 0) & selectors.EVENT_WRITE:
                asker.push()
            # Neither end may hold up the other: who was suspended is found out by the time that has passed.
            passed = clock.passed()
            worker.check(passed)
            asker.check(passed)
            if answer.between:
                asker.here()
            # A worker whose asker has gone is told so, and ends its pass at the next layer.
            if listens and (asker.has_gone or ready.get(asker.link, 0) & selectors.EVENT_READ):
                listens = not asker.has_gone and asker.goes_on()
                if not listens:
                    asker.leave()
                worker.send({"what": "go" if listens else "cancel", "number": question["number"]})


def _watch(selector: selectors.BaseSelector, link: socket.socket, events: int) -> None:
    """Wait for these events of a socket from now on, for none with 0."""
    key = selector.get_map().get(link)
    if key is None and events:
        selector.register(link, events)
    elif key is not None and not events:
        selector.unregister(link)
    elif key is not None and key.events != events:
        selector.modify(link, events)
