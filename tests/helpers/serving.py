"""A server of its own for tests: a process, and the environment in which commands find it; and a worker's stub."""

import os
import signal
import socket
import subprocess
import tempfile
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from attnscope.model.options import LoadOptions
from attnscope.observe.request import CaptureSpec
from attnscope.serve import client, wire
from attnscope.serve import client as relay
from attnscope.serve.wire import UnansweredError
from attnscope.utils.schema import to_json
from attnscope.utils.stages import NO_PROGRESS
from helpers.command_line import ATTNSCOPE, HANGS, SENTENCE, call


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
            return to_json(client.request_status("status"))

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


class Stub(relay.Worker):
    """A worker in a thread of this process, which runs no model: it answers each question with its own number."""

    made: ClassVar[list] = []

    def __init__(self):
        self.made.append(self)
        self.link, self.theirs = socket.socketpair()
        self.said, self.code, self.suspended = [], None, False
        self._unseen = self._suspended = 0.0
        self.process = SimpleNamespace(pid=os.getpid(), poll=lambda: self.code)
        threading.Thread(target=self.work, args=(len(self.made),), daemon=True).start()

    def work(self, number):
        with suppress(wire.WireError, OSError):
            while frame := wire.receive(self.theirs):
                self.said.append(frame.header)
                if frame.header["what"] == "load":
                    self.loading(frame.header["options"]["model"])
                    wire.send(self.theirs, ["loaded", {"device": "cpu", "dtype": "float32", "bytes": 2048}], last=True)
                elif frame.header["what"] == "question" and self.code is None:
                    self.answering()
                    wire.send(self.theirs, ["no", f"answered by {number}"], last=True)

    def loading(self, model):
        """What happens while a model is loaded."""

    def answering(self):
        """What happens before a question is answered."""

    def killed(self):
        """As a process that was killed."""
        self.code = -9
        self.theirs.shutdown(socket.SHUT_RDWR)

    def is_suspended(self):
        return self.suspended

    def end(self):
        self.code = -9
        self.link.close()


def why_unanswered(model="demo"):
    """What the server of this environment says in the place of an answer."""
    with pytest.raises(UnansweredError) as found:
        client.ask_server(LoadOptions(model), CaptureSpec(SENTENCE), NO_PROGRESS)
    return str(found.value)
