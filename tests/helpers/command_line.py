"""The command line, called in this process or in one of its own: exit code, data and talk."""

import copy
import io
import logging
import os
import pty
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

from rich.style import Style

from attnscope.cli import run
from attnscope.figures import terminal as prose
from attnscope.model import loading
from attnscope.model.options import LoadOptions
from attnscope.model.sources import Source
from helpers.forks import HANGS, Forked
from helpers.rows import csv_rows, json_lines
from helpers.seconds import once

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
SENTENCE = "the financial bank is located on river bank"
ATTNSCOPE = (sys.executable, "-m", "attnscope")
load_model = loading._model


@dataclass(frozen=True)
class Result:
    """How a command ended: exit code, bytes on stdout, text on stderr."""

    code: int
    out: bytes
    err: str

    def ok(self) -> Self:
        """The same result; AssertionError with what stderr says where the exit code is not 0."""
        assert self.code == 0, self.err
        return self

    def silent(self) -> Self:
        """The same result; AssertionError where the exit code is not 0 or stderr has anything."""
        assert (self.code, self.err) == (0, ""), self.err
        return self

    @property
    def refusal(self) -> str:
        """The line that says why it was refused; AssertionError where it ended well or has data on stdout."""
        assert (self.code != 0, self.out) == (True, b""), self.err
        [line] = [line for line in self.err.splitlines() if line.startswith("attnscope:")]
        return line

    @property
    def lines(self) -> list[str]:
        """The lines that a terminal shows of stdout, without their colours."""
        return COLOUR.sub("", self.out.decode()).splitlines()

    @property
    def rows(self) -> list[dict[str, str]]:
        """The rows of CSV on stdout."""
        return csv_rows(self.out)

    @property
    def records(self) -> list[Any]:
        """The objects of JSON lines on stdout."""
        return json_lines(self.out)


class Screen(io.TextIOWrapper):
    """A stream that says it is a terminal; COLUMNS says how wide."""

    def isatty(self) -> bool:
        return True


def call(*arguments: str, stdin: bytes = b"", columns: int | None = None, **environment: str) -> Result:
    """Run one command in this process, and leave warnings and loggers as they were.

    stdout is a pipe, or a terminal of so many columns.
    """
    kind = io.TextIOWrapper if columns is None else Screen
    out, err = kind(io.BytesIO(), encoding="utf-8"), io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    given = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    settings = environment if columns is None else {"COLUMNS": str(columns), "TERM": "xterm-256color"} | environment
    streams = patch.multiple(sys, stdout=out, stderr=err, stdin=given)
    demos = patch.object(loading, "_model", _model)
    for made in (Style._add, prose._ink):  # a style keeps the codes of the first terminal that it was printed on
        made.cache_clear()
    with patch.dict(os.environ, settings), streams, demos, warnings.catch_warnings(), _logger_kept():
        code = run(arguments)
        out.flush()
        err.flush()
    return Result(code, out.buffer.getvalue(), err.buffer.getvalue().decode())


def _model(source: Source, config: Any, options: LoadOptions, device: str, task: str) -> Any:
    """The model as `load` makes it. The demo's is made once, and each command has a copy, in a quarter of the time."""
    elsewhere = device != "cpu" or options.device_map or options.quantize
    if source.folder != loading.DEMO_FOLDER or source.adapter or elsewhere:
        return load_model(source, config, options, device, task)
    return copy.deepcopy(_demo(_ByOptions(options, (source, config, options, device, task))))


@dataclass(frozen=True)
class _ByOptions:
    """What `load_model` takes; of the demo all of it follows from the options."""

    options: LoadOptions
    arguments: tuple[Any, ...] = field(compare=False)


@once
def _demo(asked: _ByOptions) -> Any:
    return load_model(*asked.arguments)


@contextmanager
def _logger_kept() -> Iterator[None]:
    logger = logging.getLogger("attnscope")
    before = logger.handlers, logger.propagate, logger.level
    try:
        yield
    finally:
        logger.handlers, logger.propagate, logger.level = before


def spawn(*arguments: str, cwd: Path | None = None, **environment: str) -> Result:
    """Run one command in a forked process."""
    pipe = subprocess.PIPE
    forked = Forked(arguments, cwd=cwd, env=os.environ | environment, stdout=pipe, stderr=pipe)
    out, err = forked.communicate(HANGS)
    return Result(forked.wait(), out, err.decode())


def start(*arguments: str, **environment: str) -> Result:
    """Run one command in a process that is started, imports and all."""
    command, env = [*ATTNSCOPE, *arguments], os.environ | environment
    done = subprocess.run(command, env=env, capture_output=True, timeout=HANGS)
    return Result(done.returncode, done.stdout, done.stderr.decode())


def on_terminal(arguments: Sequence[str], columns: int, fork: bool = True, **environment: str) -> tuple[int, str]:
    """Run one command with a terminal for all its streams; the exit code, and what was sent to it."""
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    settings = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")}
    settings |= {"TERM": "xterm-256color"} | environment
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    if fork:
        process = Forked(arguments, env=settings, **streams)
    else:
        process = subprocess.Popen([*ATTNSCOPE, *arguments], env=settings, **streams)
    os.close(theirs)
    sent = b""
    while chunk := _read(ours):
        sent += chunk
    os.close(ours)
    return process.wait(HANGS), sent.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the other end is closed
        return b""


def tree(folder: Path) -> list[tuple[str, int]]:
    """Every file and folder below, with its size."""
    return sorted((str(path.relative_to(folder)), path.lstat().st_size) for path in folder.rglob("*"))
