"""The stages of long work, and a watch that names the current one after a silence.

Whoever works long opens a `Stage`, in whatever room. A command shows it as a bar on a terminal. `Watch` prints a line
where no bar is: while a library is imported, and in a pipe.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

FIRST_SECONDS = 1.0  # of silence, until the first words of a command: two seconds are the most that a person waits
NEXT_SECONDS = 60.0  # between two lines of one stage in a pipe
LOOK_SECONDS = 0.1
STARTING = "starting attnscope"  # before any stage
SIZES = ("kB", "MB", "GB")
_open: list[Stage] = []
_begun: float | None = None  # when the process of a command began, until a watch has looked at it
lock = threading.RLock()  # held while words go to stderr, and while the process forks
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


class Stage:
    """One part of the work. total: how many steps it has, where that is known; unit: what is counted.

    >>> with stage("forward pass", 4, "layers") as layers:
    ...     layers.advance(1)
    """

    def __init__(self, title: str, total: float | None = None, unit: str = "") -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done: float = 0
        self.start = self.counted = time.monotonic()  # the work; the first step
        self.changed: Callable[[], object] | None = None  # draws its bar; None without one

    def expect(self, total: float, unit: str) -> None:
        """Say how many steps there are, where that is known only now."""
        self.total, self.unit, self.done, self.counted = total, unit, 0, time.monotonic()
        self.advance(0)

    def advance(self, steps: float) -> None:
        """So many steps more were done."""
        self.done += steps
        if self.changed is not None:
            self.changed()

    @property
    def seconds(self) -> float:
        """How long it has taken."""
        return time.monotonic() - self.start

    @property
    def numbers(self) -> tuple[float, float | None, str]:
        """What is done, of how much, and of what; bytes in the unit in which all are at least one."""
        if self.unit != "bytes" or not self.total:
            return self.done, self.total, self.unit
        power = sum(self.total >= 1000**power for power in (2, 3))
        done, total = (round(count / 1000 ** (power + 1), 1) for count in (self.done, self.total))
        return done, total, SIZES[power]

    @property
    def count(self) -> str:
        """`2/4 layers`; empty where it is not known how many there are."""
        done, total, unit = self.numbers
        return f"{done:,}/{total:,} {unit}".rstrip() if total else ""

    @property
    def rate(self) -> str:
        """`1.5/s`, of what is counted; empty before anything is done, and where nothing is counted."""
        done, total, _ = self.numbers
        seconds = time.monotonic() - self.counted
        if not (total and done and seconds > FIRST_SECONDS):
            return ""
        rate = done / seconds
        return f"{rate:,.{0 if rate >= 10 else 1}f}/s"

    @property
    def time(self) -> str:
        """`0:02:10 left`, and until that can be estimated how long it has taken: `0:00:12 so far`."""
        if self.total and self.done:
            return f"{clock((time.monotonic() - self.counted) * max(0.0, self.total / self.done - 1))} left"
        return f"{clock(self.seconds)} so far"

    @property
    def line(self) -> str:
        """One line for a pipe: `forward pass: 2/4 layers, 1.5/s, 0:00:01 left`."""
        numbers = [self.count, self.rate, self.time if self.seconds >= FIRST_SECONDS * 2 else ""]
        return ": ".join(filter(None, (self.doing, ", ".join(filter(None, numbers)))))

    @property
    def doing(self) -> str:
        """Its title, and the library that it imports: `loading demo (importing torch)`."""
        library = "" if self.total else importing()
        return f"{self.title} ({library})" if library else self.title


def clock(seconds: float) -> str:
    """Seconds as 0:02:10."""
    return str(timedelta(seconds=round(seconds)))


@contextmanager
def stage(title: str, total: float | None = None, unit: str = "") -> Iterator[Stage]:
    """A stage while the block runs."""
    with during(Stage(title, total, unit)) as opened:
        yield opened


@contextmanager
def during(opened: Stage) -> Iterator[Stage]:
    """While the block runs, this stage is at hand."""
    _open.append(opened)
    try:
        yield opened
    finally:
        _open.remove(opened)


def at_hand() -> Stage:
    """The stage that was opened last, which a lower room may give a total; one of its own where there is none."""
    return _open[-1] if _open else Stage("")


class Progress:
    """What a call of the library says, and its stages: nothing here; `cli/output.py` has one that talks on stderr.

    >>> with NO_PROGRESS.stage("forward pass", 4, "layers") as advance:
    ...     advance(1)
    """

    def say(self, line: str) -> None:
        """A line for a person."""

    def stage(
        self, title: str, total: int | None = None, unit: str = ""
    ) -> AbstractContextManager[Callable[[int], object]]:
        """A stage of the work while the block runs; yields what is called with the steps that were done."""
        return nullcontext(lambda steps: None)


NO_PROGRESS = Progress()


def threads() -> int:
    """How many threads run, but for a watch, which holds nothing while the process forks."""
    return sum(not isinstance(thread, Watch) for thread in threading.enumerate())


def begin() -> None:
    """A command begins: its imports are part of its silence."""
    global _begun
    _begun = time.monotonic()


class Watch(threading.Thread):
    """Calls `say` with a line after a silence.

    terminal: a line stays until the next words, and comes only while no bar is drawn. Elsewhere there is a line after
    the first silence, and one each minute while a stage runs.
    """

    def __init__(self, say: Callable[[str], object], terminal: bool) -> None:
        super().__init__(name="attnscope-watch", daemon=True)
        self._say, self._terminal = say, terminal
        self._heard: float | None = None
        # Of the first watch of a process, when its command began: imports are part of the silence.
        global _begun
        self._start, _begun = time.monotonic() if _begun is None else _begun, None
        self._over = threading.Event()

    def heard(self) -> None:
        """A line went to stderr."""
        self._heard = time.monotonic()

    def stop(self) -> None:
        """Say no more; waits for the line at hand."""
        self._over.set()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            with lock:
                line = self.due(time.monotonic())
                if line and not self._over.is_set():
                    self._say(line)
                    self._heard = time.monotonic()

    def due(self, now: float) -> str:
        """The line for this moment; empty for none."""
        current = _open[-1] if _open else None
        silent = now - (self._start if self._heard is None else self._heard)
        if silent < FIRST_SECONDS or (current is not None and current.changed is not None):
            return ""
        if self._terminal:
            return current.doing if current else importing() or STARTING * (self._heard is None)
        if self._heard is None:
            return current.line if current else importing() or STARTING
        return current.line if current and silent >= NEXT_SECONDS else ""


def importing() -> str:
    """The import under way: `importing torch`; empty for none."""
    for name, module in [*sys.modules.items()]:
        top = name.partition(".")[0]
        if top not in ("attnscope", "__main__") and getattr(getattr(module, "__spec__", None), "_initializing", False):
            return f"importing {top}"
    return ""
