"""Calls of what somebody else wrote: within a deadline, off the terminal, and a panic of theirs is an error of ours.

A template of a chat may hold the interpreter: no signal is delivered and no thread gets a turn. So it runs in a fork,
which the kernel ends by an alarm. The pattern of a fast tokenizer lets go of it: there a thread will do, and costs
nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from attnscope.errors import AttnscopeError, ModelError, UsageError, first_line, is_panic
from attnscope.utils.signals import begin_helper

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

SECONDS, VARIABLE = 30, "ATTNSCOPE_READING_SECONDS"
ROOM_BYTES = 4 * 2**30  # of addresses that one process may take beyond those it was forked with
DEATH_OF_PARENT = 1  # of <sys/prctl.h>
T = TypeVar("T")
Where = Literal["here", "thread", "process"]
_turn = threading.RLock()  # at stderr: two threads that replace it would each give the other's back
Answer = tuple[T | None, AttnscopeError | None]
Elsewhere = Callable[[Callable[..., Any], tuple[Any, ...]], Answer[Any]]
_elsewhere: list[Elsewhere] = []  # who is asked in place of a fork


def call_elsewhere(by: Elsewhere) -> None:
    """From now on this process forks no more, as one that used torch must not: another calls functions apart for it."""
    _elsewhere[:] = [by]


def seconds() -> int:
    """How long one text may take: 30, or what the environment says. Raises UsageError where that is no number."""
    value = os.environ.get(VARIABLE) or str(SECONDS)
    if not (value.isascii() and value.isdecimal() and 0 < len(value) < 9 and int(value)):
        raise UsageError(f"{VARIABLE} takes whole seconds from 1, got {value!r}", f"leave it out for {SECONDS}")
    return int(value)


def within(seconds: float, call: Callable[[], T]) -> T:
    """The result of a call that lets other threads run, or TimeoutError; the call itself continues, unheard."""
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = call()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if "error" in outcome:
        raise outcome["error"]
    if "value" not in outcome:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return outcome["value"]


@contextmanager
def without_stderr() -> Iterator[None]:
    """Nothing on stderr while the block runs, from libraries in C and Rust either, which know no `sys.stderr`."""
    with _turn:
        stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            os.close(nowhere)


class IsolatedCall(Generic[T]):
    """A function of somebody's code, each call of which has so many seconds.

    where: "process" forks one at the first call, so that the function may be a closure over what cannot be pickled; its
    arguments and results are. Where a process with threads cannot fork safely, and with "thread", a call that never
    lets go of the interpreter does not end; "here" has no deadline. A call raises what is an AttnscopeError; all else
    that goes wrong, a panic of Rust included, is a ModelError. work: what a call is, as its message says. otherwise:
    what to do where one takes too long.

        >>> with IsolatedCall(lambda text: len(tokenizer(text).input_ids), "process") as count:
        ...     count("the bank")
    """

    def __init__(
        self,
        function: Callable[..., T],
        where: Where,
        work: str = "one text",
        otherwise: str = "shorten the text, choose another model",
    ) -> None:
        self.function, self.seconds, self.work, self.otherwise = function, seconds(), work, otherwise
        self.where = "thread" if where == "process" and sys.platform != "linux" else where
        self._pipe: Connection | None = None
        self._child = 0

    def __enter__(self) -> IsolatedCall[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __call__(self, *arguments: Any) -> T:
        if self.where == "process":
            result, error = _elsewhere[0](self.function, arguments) if _elsewhere else self._ask(arguments)
        else:

            def in_thread(*arguments: Any) -> T:
                try:
                    with without_stderr():
                        return within(self.seconds, lambda: self.function(*arguments))
                except TimeoutError:
                    raise self._too_long() from None

            result, error = answer_of(in_thread if self.where == "thread" else self.function, arguments)
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def _ask(self, arguments: tuple[Any, ...]) -> Answer[T]:
        if self._pipe is None:
            self._pipe, self._child = forked(lambda pipe: _serve(pipe, self.function, self.seconds))
        try:
            self._pipe.send(arguments)
            return self._pipe.recv()
        except (EOFError, OSError):
            return None, self._ended()

    def close(self) -> None:
        """End the process; the next call forks again."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._child, signal.SIGKILL)  # it may be at work, and knows nothing worth keeping
                os.waitpid(self._child, 0)

    def _ended(self) -> ModelError:
        """Why the process ended without an answer."""
        assert self._pipe is not None
        self._pipe.close()
        self._pipe = None
        ended = int(signal.SIGALRM)
        with suppress(ChildProcessError):
            ended = -os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        if ended == signal.SIGALRM:
            return self._too_long()
        message = f"the model's tokenizer or chat template ended its process (signal {ended})"
        return ModelError(message, "choose another model")

    def _too_long(self) -> ModelError:
        message = f"the model's tokenizer or chat template took more than {self.seconds} seconds for {self.work}"
        return ModelError(message, f"{self.otherwise}, or set {VARIABLE}")


def forked(serve: Callable[[Connection], object]) -> tuple[Connection, int]:
    """A pipe to a fork that serves its other end, with no file, terminal, handler or lock of ours; and its number."""
    from multiprocessing.connection import Connection, Pipe

    ours, theirs = Pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the fork uses none of their locks
        child = os.fork()
    if not child:
        try:
            _keep_alone(theirs)
            serve(Connection(3))
        finally:  # the other end has gone
            os._exit(0)
    theirs.close()
    return ours, child


def _serve(pipe: Connection, function: Callable[..., Any], seconds: int) -> None:
    """In the fork: answer until the pipe is closed."""
    import resource

    # A template of one line that asks for gigabytes is to fail, and not the machine.
    with suppress(OSError, ValueError):  # /proc is not mounted
        with open("/proc/self/statm", "rb") as stream:
            used = int(stream.read().split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        bounds = [used + ROOM_BYTES, *(bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY)]
        resource.setrlimit(resource.RLIMIT_AS, (min(bounds), hard))
    while True:
        arguments = pipe.recv()
        signal.alarm(seconds)
        answer = answer_of(function, arguments)
        signal.alarm(0)
        pipe.send(answer)


def _keep_alone(pipe: Connection) -> None:
    """Keep the pipe alone, as file 3, and no signal: no lock, no terminal and no handler of ours is in the fork."""
    begin_helper()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    copy = os.dup(pipe.fileno())
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    os.dup2(copy, 3)
    numbers: Iterable[int] = range(1 << 16)
    with suppress(OSError):  # /proc is not mounted; where it is: a container may allow a billion, which take minutes
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    for number in numbers:
        if number > 3:
            with suppress(OSError):
                os.close(number)
    import ctypes

    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).prctl(DEATH_OF_PARENT, signal.SIGKILL)


def answer_of(function: Callable[..., T], arguments: tuple[Any, ...]) -> Answer[T]:
    """What a call returns, or the AttnscopeError that it raises or that its own error becomes."""
    try:
        return function(*arguments), None
    except AttnscopeError as error:
        return None, error
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        why = f"{type(error).__name__}: {first_line(error)}"
        if isinstance(error, MemoryError):
            why = "it asked for more memory than one text may take"
        refusal = ModelError(f"the model's tokenizer cannot read the text: {why}", "choose another model")
        refusal.__cause__ = error
        return None, refusal
