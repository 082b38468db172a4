"""One command in a fork of this process: its streams, its limits, and what is heard of it."""

from __future__ import annotations

import ctypes
import errno
import io
import os
import pty
import random
import re
import resource
import selectors
import signal
import sys
import tempfile
import time
import tty
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnscope.utils.isolation import DEATH_OF_PARENT
from fuzzing.words import TEXT

DEADLINE, PROCESSOR = 60.0, 40  # seconds of one try: by the clock, and of the processor
ROOM = 9 * 2**30  # address space that a try may take beyond what this process has
STATM = Path("/proc/self/statm")
HEARD = 9  # the file that hooks write to
NETWORK = 98  # the exit code of a try that asked the network, which ends it
YES = b"y\n" * 4096  # agrees to all that a library asks
PICKLE = re.compile(r"(pytorch_model|adapter_model|model)[^/]*\.(bin|pt|pth|pkl)$")


@dataclass(frozen=True)
class Ended:
    """How a try ended; code is None where it had to be killed.

    memory: bytes beyond what a fork of this process has at once. read: bytes of its standard input. heard: what Python
    says of it.
    """

    code: int | None
    out: bytes = b""
    err: bytes = b""
    memory: int = 0
    read: int = 0
    heard: tuple[str, ...] = ()


def nothing() -> None:
    """Leave the process as it is."""


def no_faults(ended: Ended) -> Iterable[str]:
    """Find nothing."""
    return ()


@dataclass(frozen=True)
class Try:
    """One command: its arguments, its standard input (None: closed), whether its stdout is a terminal.

    closed: the numbers of streams that are closed. before: what is done in its process first. after: what is wrong with
    it that only its kind can know.
    """

    arguments: list[str]
    stdin: bytes | Path | None = YES
    terminal: bool = False
    closed: tuple[int, ...] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)
    before: Callable[[], Any] = nothing
    after: Callable[[Ended], Iterable[str]] = no_faults


Kind = Callable[[random.Random, Path], Try]
KINDS: dict[str, Kind] = {}


def kind(make: Kind) -> Kind:
    """A kind of hostile input, by its name."""
    KINDS[make.__name__] = make
    return make


def heads(*arguments: str, **how: Any) -> Try:
    """`attnscope heads` of a short text."""
    return Try(["heads", "-q", *arguments, *([] if {"--text", "--file"} & set(arguments) else ["--text", TEXT])], **how)


def outside(folder: Path) -> Path:
    """The folder beside that of a try, with files that no command may touch."""
    return folder.with_name("outside")


def fork(one: Try, folder: Path) -> Ended:
    """Run a command in a fork of this process, in that folder; its home and its temporary folder are beside it."""
    given = _given(one.stdin)
    pipes = [_terminal() if one.terminal else os.pipe(), os.pipe(), os.pipe()]
    resident = _pages()[1]
    child = os.fork()
    if not child:
        _run(one, folder, [given, *(writing for _, writing in pipes)])
    for _, writing in pipes:
        os.close(writing)
    code, memory, (out, err, heard) = _watched(child, [reading for reading, _ in pipes])
    read = os.lseek(given, 0, os.SEEK_CUR) if isinstance(one.stdin, bytes) else 0  # the fork moves what we hold, too
    os.close(given)
    lines = sorted({*heard.decode(errors="replace").split("\n")} - {""})
    return Ended(code, out, err, memory - resident, read, tuple(lines))


def _given(stdin: bytes | Path | None) -> int:
    """A file that can be read: these bytes, or that path."""
    if not isinstance(stdin, bytes):
        return os.open(stdin or os.devnull, os.O_RDONLY)
    file = os.memfd_create("stdin")
    os.write(file, stdin)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _watched(child: int, streams: list[int]) -> tuple[int | None, int, list[bytes]]:
    """The exit code, the most memory and the streams of a process, which is killed when its time is over."""
    found, ended, until = [b""] * len(streams), (0, 0, None), time.monotonic() + DEADLINE
    with selectors.DefaultSelector() as waiting:
        for at, stream in enumerate(streams):
            waiting.register(stream, selectors.EVENT_READ, at)
        while not ended[0] and time.monotonic() < until:
            _hear(waiting, found, 0.005)
            ended = os.wait4(child, os.WNOHANG)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what it has left behind, too
        if late := not ended[0]:
            os.kill(child, signal.SIGKILL)  # where it was too slow to have a group of its own
        ended = os.wait4(child, 0) if late else ended
        while _hear(waiting, found, 0):
            pass
    for stream in streams:
        os.close(stream)
    code = os.waitstatus_to_exitcode(ended[1])
    return None if late or code == -signal.SIGXCPU else code, ended[2].ru_maxrss * 1024, found


def _hear(waiting: selectors.BaseSelector, found: list[bytes], seconds: float) -> bool:
    """Add what has come to the streams; whether there was any."""
    heard = False
    for key, _ in waiting.select(seconds) if waiting.get_map() else []:
        try:
            piece = os.read(key.fd, 1 << 20)
        except OSError:  # a terminal without a process
            piece = b""
        if piece:
            found[key.data] += piece
            heard = True
        else:
            waiting.unregister(key.fd)
    if not waiting.get_map():
        time.sleep(seconds)
    return heard


def _terminal() -> tuple[int, int]:
    """A pseudo-terminal that changes nothing of what is written to it."""
    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    return ours, theirs


def _pages() -> tuple[int, int]:
    """Address space of this process and the memory that a fork of it has at once, in bytes.

    Pages of files are not among that memory: a fork has them only when it reads them.
    """
    size, resident, of_files = (int(pages) * resource.getpagesize() for pages in STATM.read_text().split()[:3])
    return size, resident - of_files


def _run(one: Try, folder: Path, streams: list[int]) -> None:
    """In the fork: be `attnscope ARGUMENTS`. Never returns."""
    import torch

    from attnscope.cli import main

    code: int = 99
    try:
        torch.set_num_threads(1)  # makes a new pool, before two threads do so at once: PyTorch's assertion fails then
        os.setsid()
        ctypes.CDLL(None).prctl(DEATH_OF_PARENT, signal.SIGKILL)
        os.chdir(folder)
        _limit()
        for number, stream in enumerate(streams):
            os.dup2(stream, (0, 1, 2, HEARD)[number])
        sys.addaudithook(_listening(allowed="allow_pickle=true" in one.arguments))
        _environment(one, folder)
        stdin = io.TextIOWrapper(io.BufferedReader(_Folder() if _is_folder(0) else io.FileIO(0, closefd=False)))
        sys.stdin = sys.__stdin__ = None if one.stdin is None else stdin  # so Python has it where it was closed
        out, err = (io.BufferedWriter(io.FileIO(number, "w", closefd=False)) for number in (1, 2))
        sys.stdout = io.TextIOWrapper(out, encoding="utf-8")
        sys.stderr = io.TextIOWrapper(err, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        for number in one.closed:
            os.close(number)
            setattr(sys, ("stdin", "stdout", "stderr")[number], None)
        one.before()
        main(one.arguments)
    except SystemExit as left:
        with suppress(OSError):
            sys.stdout.flush()
        code = int(left.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    os._exit(code)


def _limit() -> None:
    """No try takes the machine's memory or its processor for itself."""
    most = _pages()[0] + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR, PROCESSOR + 9))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def full_disk(most: int) -> None:
    """No file takes more bytes than that from now on."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def _environment(one: Try, folder: Path) -> None:
    tempfile.tempdir = str(folder.with_name("tmp"))
    values: dict[str, str | None] = {"NO_COLOR": "1", "COLUMNS": "200", "ATTNSCOPE_READING_SECONDS": "2"}
    values |= {"HOME": str(folder.with_name("home")), "TMPDIR": tempfile.tempdir}
    for name, value in (values | {"XDG_CACHE_HOME": None, "HF_HOME": None} | dict(one.environment)).items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _listening(allowed: bool) -> Callable[[str, tuple[Any, ...]], None]:
    """A hook that writes down that a pickle was opened, and ends a process that asks the network."""

    def hear(event: str, about: tuple[Any, ...]) -> None:
        if event == "socket.getaddrinfo" or (event == "socket.connect" and isinstance(about[1], tuple)):
            _note(b"asked the network\n")
            os._exit(NETWORK)
        if event == "open" and not allowed and isinstance(about[0], str) and PICKLE.search(about[0]):
            _note(b"opened a pickle\n")

    return hear


def _note(what: bytes) -> None:
    with suppress(OSError):  # a fork of theirs that has closed all files
        os.write(HEARD, what)


def _is_folder(number: int) -> bool:
    import stat

    return stat.S_ISDIR(os.fstat(number).st_mode)


class _Folder(io.RawIOBase):
    """Standard input where it is a folder: every read fails."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
