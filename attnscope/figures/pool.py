"""Processes that draw beside the model.

They are started afresh (spawn), not forked: the caller may hold torch's threads and locks. They load this package and
nothing of a model. A script that asks for them must begin its work under `if __name__ == "__main__"`, since each of
them imports the script again.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from attnscope.errors import AttnscopeError

if TYPE_CHECKING:
    from attnscope.figures.style import Style

HEAD_SECONDS, CELL_SECONDS, VECTOR_FACTOR = 0.012, 1e-6, 6  # measured on one core of 2025, to a factor of two
START_SECONDS = 1.5
MOST_WORKERS = 16
STOPS = (signal.SIGINT, signal.SIGTERM)

busy = threading.Lock()  # of a worker: held while it draws what it does not break off
leaving = threading.Event()  # of a worker: it is to end
PoolJob = TypeVar("PoolJob")


def worker_count(cells: Sequence[int], style: Style) -> int:
    """As many workers as pay off for heads of so many cells: each should draw for longer than it takes to start."""
    seconds = sum(HEAD_SECONDS + CELL_SECONDS * count for count in cells)
    seconds *= 1 if style.image == "png" else VECTOR_FACTOR
    return max(1, min(cores(), MOST_WORKERS, int(seconds / (2 * START_SECONDS))))


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def drawing_pool(workers: int) -> AbstractContextManager[Executor | None]:
    """So many processes that draw, or None for 0; when the block ends they finish what they were given, and end.

    They also end when this process dies.

        with drawing_pool(2) as pool:
            pool.submit(save_overview, path, layers, style).result()
    """
    return _Pool(workers) if workers else nullcontext()


def draw_in_workers(
    draw: Callable[[PoolJob], Path], jobs: Sequence[PoolJob], workers: int
) -> Generator[Path, None, None]:
    """Yield each path in the order of the jobs; after an error, or once closed, no further file is begun.

    draw: a picklable function that writes one job's file. An AttnscopeError of a worker is raised here as it is, any
    other error as a RuntimeError with its words.
    """
    with _Pool(workers) as pool:
        try:
            yield from pool.map(partial(_draw, draw), jobs)
        except BrokenProcessPool as error:
            raise RuntimeError(
                "a process that draws ended early: it was killed, or the script that asked for it has no "
                '`if __name__ == "__main__"`; workers=1 draws without processes'
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _draw(draw: Callable[[PoolJob], Path], job: PoolJob) -> Path:
    with busy:
        try:
            return draw(job)
        except AttnscopeError:
            raise
        except Exception as error:  # not every error survives the way to the other process
            raise RuntimeError(f"{type(error).__name__}: {error}") from None


class _Pool(ProcessPoolExecutor):
    """A pool whose workers leave the signals of the terminal to the process that started them."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers, multiprocessing.get_context("spawn"), begin_worker)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        with signals_held():  # a worker starts here, and Ctrl-C before begin_worker would make it print a traceback
            return super().submit(fn, *args, **kwargs)


@contextmanager
def signals_held() -> Iterator[None]:
    """Signals that stop us wait; a process started here waits with them until it says otherwise."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_worker() -> None:
    """A worker's start: it ends with its parent, and on SIGTERM, but never halfway through a file."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal: the parent decides
    told, tells = socket.socketpair()
    tells.setblocking(False)
    signal.set_wakeup_fd(tells.fileno())
    signal.signal(signal.SIGTERM, lambda *_: None)  # a handler runs amid anything, also where this thread holds a lock
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    threading.Thread(target=_end, args=(told, tells), daemon=True).start()


def _end(told: socket.socket, tells: socket.socket) -> None:
    """End once a signal tells so, or the parent has ended: a worker would else wait for work for ever.

    tells: where signals write; kept open here.
    """
    parent = multiprocessing.parent_process()
    wait([told] if parent is None else [told, parent.sentinel])
    leaving.set()
    with busy:
        os._exit(1)
