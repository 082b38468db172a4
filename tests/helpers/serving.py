"""A server of its own for tests: a process, and the environment in which commands find it."""

import os
import signal
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

from attnscope.serve import client
from attnscope.typed import plain
from helpers.command_line import ATTNSCOPE, HANGS, call


class Serving:
    """A server that runs."""

    def __init__(self, process, environment):
        self.process, self.environment = process, environment

    def call(self, *arguments, **how):
        """A command in this process, which finds the server."""
        return call(*arguments, **how, **self.environment)

    @property
    def status(self):
        """What it says of itself."""
        with self.found():
            return plain(client.asked("status"))

    @contextmanager
    def found(self):
        """A block in which this process finds it."""
        before = {name: os.environ.get(name) for name in self.environment}
        os.environ |= self.environment
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})

    def worker(self):
        """The process that holds its models."""
        found = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True, check=True)
        return int(found.stdout.split()[0])


@contextmanager
def serving(folder, *arguments, **more):
    """A server of these models; folder: for its socket. more: variables of its environment."""
    with tempfile.TemporaryDirectory() as short:
        yield from _served(runtime(folder, Path(short)), arguments, more)


def runtime(folder, short):
    """The environment in which a socket lies in a folder; its path, which must not be long, leads through a link."""
    folder.mkdir(mode=0o700, exist_ok=True)
    (short / "run").symlink_to(folder)
    return {"XDG_RUNTIME_DIR": str(short / "run"), "ATTNSCOPE_NO_SERVER": ""}


def _served(environment, arguments, more):
    command = [*ATTNSCOPE, "serve", *arguments]
    said = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=os.environ | environment | more, **said)
    try:
        lines = []
        while not (lines and lines[-1].startswith("answering")):
            lines.append(process.stderr.readline())
            assert lines[-1], "".join(lines)
        yield Serving(process, environment)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(HANGS)
        process.stdout.close()
        process.stderr.close()
