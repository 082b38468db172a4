"""Processes that draw while the model runs.

They are started afresh (spawn), not forked: the caller may hold torch's threads and locks. They load this package and
nothing of a model. A script that asks for them must begin its work under `if __name__ == "__main__"`, since each of
them imports the script again.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from attnscope.errors import AttnscopeError
from attnscope.utils.signals import begin_worker, busy, held

if TYPE_CHECKING:
    from attnscope.figures.style import Style

HEAD_SECONDS, CELL_SECONDS, VECTOR_FACTOR = 0.012, 1e-6, 6  # measured on one core of 2025, to a factor of two
START_SECONDS = 1.5
MOST_WORKERS = 16

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
    """Yield each path in the order of the jobs; after an error, or once closed, no further file is started.

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
        with held():  # a worker starts here, and Ctrl-C before begin_worker would make it print a traceback
            return super().submit(fn, *args, **kwargs)
