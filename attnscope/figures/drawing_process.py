"""A process that draws while this one runs: started before a model is loaded, it has what draws loaded by then.

    begin(load_drawing, "attnscope.export.drawing")    # on two cores the model's library loads at the same time
    process = take_process()                           # None where none pays
    for path in process.drawn(partial(draw, folder), partial(draw_others, folder)): ...

It is forked, which costs a hundredth of a start and needs no script that can be imported again; that is safe while this
process has one thread and no PyTorch. Once it has loaded what draws it forks a second one, which has that too: two
cores are free after the pass.

The processes of a pool are started afresh (spawn), not forked: the caller may hold torch's threads and locks. They load
this package and nothing of a model. A script that asks for them must begin its work under `if __name__ == "__main__"`,
since each of them imports the script again.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from attnscope.errors import AttnscopeError
from attnscope.utils import stages
from attnscope.utils.signals import begin_worker, busy, held, leaving

if TYPE_CHECKING:
    from attnscope.figures.style import Style

log = logging.getLogger("attnscope")

PROCESSES = 2

Work = Callable[[], Generator[Path, None, None]]

_started: DrawingProcess | None = None


def begin(load: Callable[[], object], *modules: str) -> None:
    """Start a process that loads what draws, by `load`, and these modules, where it pays and is safe.

    That is on Linux, where a core is free and PyTorch is still to be loaded.
    """
    global _started
    if sys.platform == "linux" and cores() > 1 and "torch" not in sys.modules and stages.threads() == 1:
        _started = DrawingProcess(load, *modules)


def take_process() -> DrawingProcess | None:
    """The process that was started, for one drawing; None without one."""
    global _started
    process, _started = _started, None
    return process


class DrawingProcess:
    """A process for one drawing, which it can be given while it still loads; it ends with this one."""

    def __init__(self, load: Callable[[], object], *modules: str) -> None:
        context = multiprocessing.get_context("fork")
        self.connections, there = zip(*(context.Pipe() for _ in range(PROCESSES)), strict=True)
        self.process = context.Process(target=_serve, args=(there, self.connections, load, modules))
        with held():
            self.process.start()
        for connection in there:
            connection.close()
        atexit.register(self.process.kill)  # one that was never asked has nothing to end

    def drawn(self, *works: Work) -> Generator[Path, None, None]:
        """Have the works done from now on, at most two, side by side; yields each path that they yield.

        Once closed, no further file is started. An AttnscopeError is raised here as it is, any other error as a
        RuntimeError with its words.
        """
        working = list(self.connections[: len(works)])
        for connection, work in zip(working, works, strict=True):
            with suppress(OSError):  # it ended: reading its answer says so
                connection.send(work)
        return self._answers(working)

    def _answers(self, working: list[Connection]) -> Generator[Path, None, None]:
        warned = set[str]()
        try:
            while working:
                ready = wait(working)
                for connection in [connection for connection in working if connection in ready]:
                    try:
                        answer = connection.recv()
                    except (EOFError, OSError) as error:
                        raise RuntimeError("the process that draws ended early: it was killed") from error
                    if isinstance(answer, Exception):
                        raise answer
                    if answer is None:
                        working.remove(connection)
                    elif isinstance(answer, Path):
                        yield answer
                    elif answer not in warned:
                        warned.add(answer)
                        log.warning("%s", answer)
        finally:
            self._end()

    def _end(self) -> None:
        """Have both processes end after the file at hand, and wait for it."""
        self.process.terminate()
        for connection in self.connections:
            with suppress(EOFError, OSError):  # which say that it ended
                while True:
                    connection.recv()
            connection.close()
        self.process.join()


def _serve(
    connections: Sequence[Connection],
    other_ends: Sequence[Connection],
    load: Callable[[], object],
    modules: tuple[str, ...],
) -> None:
    """What the first process does: load, fork the second one, and answer."""
    for connection in other_ends:
        connection.close()
    load()
    for module in modules:
        import_module(module)
    first, second = connections
    multiprocessing.get_context("fork").Process(target=_serve_one, args=(second, first)).start()
    _serve_one(first, second)


def _serve_one(connection: Connection, others: Connection) -> None:
    """What each does: a path per file and the words of each warning, then None, or an error."""
    begin_worker()
    others.close()
    log.handlers, log.propagate = [_Sent(connection)], False
    with suppress(EOFError, OSError):  # nothing to draw after all, or the parent has ended
        work = connection.recv()
        answer: Exception | None = None
        with busy:
            try:
                with closing(work()) as paths:
                    for path in paths:
                        connection.send(path)
                        if leaving.is_set():
                            break
            except AttnscopeError as error:
                answer = error
            except Exception as error:  # not every error survives the way to the other process
                answer = RuntimeError(f"{type(error).__name__}: {error}")
            connection.send(answer)


class _Sent(logging.Handler):
    """Warnings to the other end, for both processes may have the same one."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        self.connection.send(record.getMessage())


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
