"""Processes that draw while this one goes on: what they need is loaded while a model is.

    begin("attnscope.drawing")                # on two cores the libraries of the model and of the pictures load at once
    beside = begun()                          # None where it does not pay
    for path in beside.drawn(partial(draw, folder), partial(draw_others, folder)): ...

A server of multiprocessing loads them once, and each process is a fork of it.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import sys
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from attnscope import figures
from attnscope.errors import AttnscopeError
from attnscope.figures.pool import begin_worker, busy, cores, leaving, signals_held

Work = Callable[[], Generator[Path, None, None]]

_begun: Beside | None = None


def begin(*modules: str) -> None:
    """Load what draws, and these modules, where it pays: on Linux, with a core free and PyTorch still to be loaded."""
    global _begun
    if sys.platform == "linux" and cores() > 1 and "torch" not in sys.modules:
        _begun = Beside(*modules)


def begun() -> Beside | None:
    """What was begun, for one set of pictures; None without."""
    global _begun
    beside, _begun = _begun, None
    return beside


class Beside:
    """Processes for pieces of work, each of which may be given while libraries still load; they end with this one."""

    def __init__(self, *modules: str) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.processes: dict[Connection, BaseProcess] = {}
        # the script that a process imports again brings the commands
        self.context.set_forkserver_preload([*figures.modules(), *modules, "attnscope.cli"])
        with signals_held():
            multiprocessing.forkserver.ensure_running()

    def drawn(self, *works: Work) -> Generator[Path, None, None]:
        """Have each piece of work done by a process of its own, from now on; yields each path that one yields.

        Once closed, no further file is begun. An AttnscopeError is raised here as it is, any other error as a
        RuntimeError with its words.
        """
        for work in works:
            self._start(work)
        return self._answers()

    def _start(self, work: Work) -> None:
        connection, there = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(there, work), daemon=True)
        with signals_held():
            process.start()
        there.close()
        self.processes[connection] = process

    def _answers(self) -> Generator[Path, None, None]:
        at_work = list(self.processes)
        try:
            while at_work:
                for connection in [one for one in wait(at_work) if isinstance(one, Connection)]:
                    answer = _answer(connection)
                    if isinstance(answer, Exception):
                        raise answer
                    if answer is None:
                        at_work.remove(connection)
                    else:
                        yield answer
        finally:
            for connection, process in self.processes.items():
                connection.close()
                process.terminate()
            for process in self.processes.values():
                process.join()


def _answer(connection: Connection) -> Path | Exception | None:
    try:
        return connection.recv()
    except (EOFError, OSError) as error:
        raise RuntimeError("a process that draws ended early: it was killed") from error


def _serve(connection: Connection, work: Work) -> None:
    """What a process does; a path per file, then None, or an error."""
    begin_worker()
    with suppress(OSError), busy:  # nobody who would hear of it
        connection.send(_done(work, connection))


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
