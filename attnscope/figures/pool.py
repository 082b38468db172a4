"""Heads drawn in worker processes.

The workers are plain `python -c` processes, not forks: the caller may hold torch's threads and locks, and its
main module may not be safe to import again. They load this package and nothing of a model.
"""

import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from attnscope.errors import AttnscopeError
from attnscope.figures.fonts import Fonts
from attnscope.figures.jobs import Head
from attnscope.figures.style import Style

HEAD_SECONDS, CELL_SECONDS, VECTOR_FACTOR = 0.012, 1e-6, 6  # measured on one core of 2025, to a factor of two
START_SECONDS = 1.5
MOST_WORKERS = 16

_START = (
    "import sys; sys.path[:] = {path!r}; from attnscope.figures.heads import draw_heads; "
    "from attnscope.figures.pool import serve; serve(draw_heads)"
)


@dataclass(frozen=True)
class Worker:
    """A process, the two ends we hold, and the file that its stderr goes to."""

    process: subprocess.Popen[bytes]
    orders: IO[bytes]
    reports: IO[bytes]
    words: IO[bytes]


def worker_count(cells: Sequence[int], style: Style) -> int:
    """As many workers as the work pays for: each should draw for longer than it takes to start."""
    seconds = sum(HEAD_SECONDS + CELL_SECONDS * count for count in cells)
    seconds *= 1 if style.image == "png" else VECTOR_FACTOR
    return max(1, min(_cores(), MOST_WORKERS, int(seconds / (2 * START_SECONDS))))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_in_workers(heads: Sequence[Head], style: Style, fonts: Fonts, count: int) -> Generator[Path, None, None]:
    """Yield each path as its file is written; stops all workers when one fails or the caller does."""
    shares = [share for share in _split(heads, count) if share]
    events: queue.Queue[Any] = queue.Queue()
    workers = [_start() for _ in shares]
    drivers = [
        threading.Thread(target=_drive, args=(worker, (share, style, fonts), events))
        for worker, share in zip(workers, shares, strict=True)
    ]
    try:
        for driver in drivers:
            driver.start()
        for _ in heads:
            event = events.get()
            if isinstance(event, BaseException):
                raise event
            yield event
    finally:
        _stop(workers, drivers)


def _stop(workers: Sequence[Worker], drivers: Sequence[threading.Thread]) -> None:
    for worker in workers:
        worker.process.terminate()
    for driver in drivers:
        if driver.ident is not None:
            driver.join()
    for worker in workers:
        worker.process.wait()
        worker.reports.close()
        worker.words.close()


def _split(heads: Sequence[Head], count: int) -> list[Sequence[Head]]:
    size = -(-len(heads) // count)
    return [heads[start : start + size] for start in range(0, len(heads), size)]


def _start() -> Worker:
    words = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the worker is stopped
    command = [sys.executable, "-c", _START.format(path=sys.path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words)
    return Worker(process, cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout), words)


def _drive(worker: Worker, work: Any, events: queue.Queue[Any]) -> None:
    """Hand a worker its share and pass on what it reports: paths, or the error that ended it."""
    try:
        with worker.orders:
            pickle.dump(work, worker.orders)
        for _ in work[0]:
            events.put(pickle.load(worker.reports))
    except (EOFError, OSError, pickle.UnpicklingError):
        worker.words.seek(0)
        told = worker.words.read().decode(errors="replace").strip().splitlines()
        events.put(RuntimeError(f"a figure worker ended early: {told[-1] if told else 'it said nothing'}"))


def serve(draw: Callable[[Sequence[Head], Style, Fonts], Iterable[Path]]) -> None:
    """A worker's main: one share on stdin, one pickled path (or the error) a file on stdout."""
    # stopped by the parent, it still removes the file it is writing
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    reports = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    heads, style, fonts = pickle.load(sys.stdin.buffer)
    try:
        for path in draw(heads, style, fonts):
            _report(reports, path)
    except Exception as error:
        known = isinstance(error, AttnscopeError)
        _report(reports, error if known else RuntimeError(f"{type(error).__name__}: {error}"))


def _report(reports: IO[bytes], what: object) -> None:
    pickle.dump(what, reports)
    reports.flush()
