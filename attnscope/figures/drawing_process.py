"""A process that draws while this one goes on: begun before a model is loaded, it has what draws loaded by then.

    begin("attnscope.drawing")                # on two cores the libraries of the model and of the pictures load at once
    process = begun()                         # None where none pays
    for path in process.drawn(partial(draw, folder)): ...

It is forked, which costs a hundredth of a start and needs no script that can be imported again; that is safe while this
process has one thread and no PyTorch.
"""

from __future__ import annotations

import atexit
import multiprocessing
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path

from attnscope import figures
from attnscope.errors import AttnscopeError
from attnscope.figures.pool import cores
from attnscope.signals import begin_worker, busy, held, leaving

Work = Callable[[], Generator[Path, None, None]]

_begun: DrawingProcess | None = None


def begin(*modules: str) -> None:
    """Start a process that loads what draws, and these modules, where it pays and is safe.

    That is on Linux, where a core is free and PyTorch is still to be loaded.
    """
    global _begun
    if sys.platform == "linux" and cores() > 1 and "torch" not in sys.modules and threading.active_count() == 1:
        _begun = DrawingProcess(*modules)


def begun() -> DrawingProcess | None:
    """The process that was begun, for one piece of work; None without one."""
    global _begun
    process, _begun = _begun, None
    return process


class DrawingProcess:
    """A process for one piece of work, which it can be given while it still loads; it ends with this one."""

    def __init__(self, *modules: str) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there, self.connection, modules), daemon=True)
        with held():
            self.process.start()
        there.close()
        atexit.register(self.process.kill)  # one that was never asked has nothing to end

    def drawn(self, work: Work) -> Generator[Path, None, None]:
        """Have the work done from now on; yields each path that it yields.

        Once closed, no further file is begun. An AttnscopeError is raised here as it is, any other error as a
        RuntimeError with its words.
        """
        with suppress(OSError):  # it ended: told where its answer is read
            self.connection.send(work)
        return self._answers()

    def _answers(self) -> Generator[Path, None, None]:
        try:
            while (answer := self._answer()) is not None:
                if isinstance(answer, Exception):
                    raise answer
                yield answer
        finally:
            self.connection.close()
            self.process.terminate()
            self.process.join()

    def _answer(self) -> Path | Exception | None:
        try:
            return self.connection.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError("the process that draws ended early: it was killed") from error


def _serve(connection: Connection, other_end: Connection, modules: tuple[str, ...]) -> None:
    """What the process does; a path per file, then None, or an error."""
    begin_worker()
    other_end.close()
    figures.load_drawing()
    for module in modules:
        import_module(module)
    with suppress(EOFError, OSError), busy:  # nothing to draw after all, or nobody who would hear of it
        connection.send(_done(connection.recv(), connection))


def _done(work: Work, connection: Connection) -> Exception | None:
    try:
        with closing(work()) as paths:
            for path in paths:
                connection.send(path)
                if leaving.is_set():
                    break
    except AttnscopeError as error:
        return error
    except Exception as error:  # not every error survives the way to the other process
        return RuntimeError(f"{type(error).__name__}: {error}")
    return None
