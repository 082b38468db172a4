"""A process that draws while this one runs: started before a model is loaded, it has what draws loaded by then.

    begin("attnscope.export.drawing")         # on two cores both libraries load at once, the model's and this one's
    process = take_process()                  # None where none pays
    for path in process.drawn(partial(draw, folder), partial(draw_others, folder)): ...

It is forked, which costs a hundredth of a start and needs no script that can be imported again; that is safe while this
process has one thread and no PyTorch. Once it has loaded what draws it forks a second one, which has that too: two
cores are free after the pass.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path

from attnscope import figures
from attnscope.errors import AttnscopeError
from attnscope.figures.drawing_pool import cores
from attnscope.utils import stages
from attnscope.utils.signals import begin_worker, busy, held, leaving

log = logging.getLogger("attnscope")

PROCESSES = 2

Work = Callable[[], Generator[Path, None, None]]

_started: DrawingProcess | None = None


def begin(*modules: str) -> None:
    """Start a process that loads what draws, and these modules, where it pays and is safe.

    That is on Linux, where a core is free and PyTorch is still to be loaded.
    """
    global _started
    if sys.platform == "linux" and cores() > 1 and "torch" not in sys.modules and stages.threads() == 1:
        _started = DrawingProcess(*modules)


def take_process() -> DrawingProcess | None:
    """The process that was started, for one drawing; None without one."""
    global _started
    process, _started = _started, None
    return process


class DrawingProcess:
    """A process for one drawing, which it can be given while it still loads; it ends with this one."""

    def __init__(self, *modules: str) -> None:
        context = multiprocessing.get_context("fork")
        self.connections, there = zip(*(context.Pipe() for _ in range(PROCESSES)), strict=True)
        self.process = context.Process(target=_serve, args=(there, self.connections, modules))
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


def _serve(connections: Sequence[Connection], other_ends: Sequence[Connection], modules: tuple[str, ...]) -> None:
    """What the first process does: load, fork the second one, and answer."""
    for connection in other_ends:
        connection.close()
    figures.load_drawing()
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
