"""Commands in processes of their own, forked from a server that has imported everything: a fork for 4 s of imports.

A forked command has its own session, streams, environment, folder and signal handlers, and ends as Python ends; only
what importing itself does cannot be seen in it. The server (`fork_server.py`) starts with the first command of a test
session and ends with it, however that ends.
"""

import atexit
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import IO, Any

from helpers.environment import pin

HANGS = 900  # seconds after which a process is taken to hang; nothing is expected to be this quick
TESTS = Path(__file__).parents[1]
SHIM = """#!{python} -IS
import sys
sys.path.insert(0, {tests!r})
from helpers.forks import stand_in
stand_in({address!r})
"""


def until(holds: Callable[[], object]) -> None:
    """Wait until something holds, which another process or thread is about to bring about."""
    end = time.monotonic() + HANGS
    while not holds():
        assert time.monotonic() < end, "it never held"
        time.sleep(0.01)


class Forked:
    """`attnscope ARGUMENTS` in a forked process, in the manner of `subprocess.Popen`; its pid is its process group.

    stdin, stdout and stderr are file descriptors; stdout and stderr may be subprocess.PIPE. script: a file of Python
    that runs in the place of attnscope.
    """

    def __init__(
        self,
        arguments: Iterable[object],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int = 0,
        stdout: int = 1,
        stderr: int = 2,
        address: str | None = None,
        script: Path | str | None = None,
    ) -> None:
        self.returncode: int | None = None
        out, self.stdout = _ends(stdout)
        err, self.stderr = _ends(stderr)
        request = {"script": None if script is None else str(script), "arguments": [*map(str, arguments)]}
        request |= {"cwd": str(cwd or os.getcwd()), "env": dict(env or os.environ)}
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(address or server())
        body = json.dumps(request).encode()
        socket.send_fds(self._server, [struct.pack("I", len(body))], [stdin, out, err])
        self._server.sendall(body)
        for end, pipe in ((out, self.stdout), (err, self.stderr)):
            if pipe is not None:
                os.close(end)
        [self.pid] = struct.unpack("i", self._server.recv(4, socket.MSG_WAITALL))

    def poll(self) -> int | None:
        """The exit code, minus the signal that killed it; None while it runs."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code."""
        code = self._ended(timeout)
        if code is None:
            self.send_signal(signal.SIGKILL)
            raise subprocess.TimeoutExpired("attnscope", timeout or 0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[bytes, bytes]:
        """What comes out of the pipes until the command has ended."""
        with ThreadPoolExecutor(2) as reading:
            out, err = (reading.submit(pipe.read if pipe else bytes) for pipe in (self.stdout, self.stderr))
            self.wait(timeout)
        return out.result(), err.result()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the command has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._server], [], [], timeout)[0]:
            [self.returncode] = struct.unpack("i", self._server.recv(4, socket.MSG_WAITALL))
            self._server.close()
        return self.returncode


def forked(script: Path | str, *arguments: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """`python SCRIPT ARGUMENTS` in a forked process, in the manner of `subprocess.run`."""
    process = Forked(arguments, script=script, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how)
    out, err = process.communicate(HANGS)
    return subprocess.CompletedProcess([script, *arguments], process.wait(), out.decode(), err.decode())


def _ends(stream: int) -> tuple[int, IO[bytes] | None]:
    """What the command writes to, and what we read from if that is a pipe of ours."""
    if stream != subprocess.PIPE:
        return stream, None
    reading, writing = os.pipe()
    return writing, os.fdopen(reading, "rb")


def shim() -> Path:
    """A folder with an `attnscope` that asks the server: the first on the PATH of a shell."""
    path = Path(server()).with_name("attnscope")
    path.write_text(SHIM.format(python=sys.executable, tests=str(TESTS), address=server()))
    path.chmod(0o755)
    return path.parent


def stand_in(address: str) -> None:
    """Be a forked command: its signals, its exit code."""
    command = Forked(sys.argv[1:], address=address)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: command.send_signal(number))
    code = command.wait()
    sys.exit(code if code >= 0 else 128 - code)


def server() -> str:
    """The address of this session's server."""
    return _kept()()


@cache
def _kept() -> Callable[[], str]:
    from helpers.seconds import once  # which needs pytest: a shell's `attnscope` has Python's own library alone

    return once(_started)


def _started() -> str:
    """The address of a new server. It lives as long as the pipe that is its stdin."""
    folder = tempfile.TemporaryDirectory(prefix="attnscope-")
    address = f"{folder.name}/server"
    environment = dict(os.environ)
    pin(environment)  # libraries read it once, and a command in this process may have changed it for its time
    process = subprocess.Popen(
        [sys.executable, TESTS / "helpers" / "fork_server.py", address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # an interrupt of the tests is not for it
        env=environment,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    for last_first in (folder.cleanup, process.wait, process.stdin.close):
        atexit.register(last_first)
    assert process.stdout.readline() == b"ready\n", "the server of forked commands did not start"
    return address
