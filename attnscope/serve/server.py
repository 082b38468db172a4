"""The server: sockets, turns and what may be answered, in a process that loads no torch; a worker holds the models.

One question is answered after the other; threads are for sockets alone. A worker that ended is started again.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from attnscope import errors
from attnscope.errors import AttnscopeError, ModelError, UsageError
from attnscope.model.loading import locate
from attnscope.model.options import DEMO, LoadOptions
from attnscope.model.sources import Source
from attnscope.serve import identity, place, wire
from attnscope.serve.status import HeldModel, Status
from attnscope.serve.wire import UnansweredError, WireError, receive, receive_raw, send
from attnscope.typed import plain, typed

MOST_LINKS = 64  # at once: asked, or waiting for their turn
ASKING_SECONDS = 10.0  # from the first byte of a question to its last
POLL_SECONDS = 0.5


@dataclass
class Model:
    """A model that is held: how it was loaded, from which files. asked: the options by which it is found."""

    options: LoadOptions
    asked: LoadOptions
    files: identity.Contents
    facts: dict[str, Any]


class Worker:
    """The process with the models, and a socket to it."""

    def __init__(self) -> None:
        self.link, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "attnscope.serve.worker", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self.lock = threading.Lock()  # of what is sent to it

    def send(self, header: Any, blobs: Sequence[bytes] = ()) -> None:
        """Send one frame to it."""
        with self.lock:
            send(self.link, header, blobs)

    def end(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()
        self.link.close()


class Server:
    """A socket, and a worker with models: `with Server(models) as server: server.serve()`."""

    def __init__(self, idle: float | None = None, say: Callable[[str], object] = lambda line: None) -> None:
        self.idle, self.say = idle, say
        self._code_files = identity.Contents(identity.code_files())
        self.code, self.environment = identity.code_of(self._code_files.files), identity.environment()
        self.models: list[Model] = []
        self.started = self.used = time.monotonic()
        self.answered = 0
        self._number = 0
        self._turn = threading.Lock()  # of the worker
        self._links = threading.BoundedSemaphore(MOST_LINKS)
        self._stop = threading.Event()
        self._lock: IO[str] | None = None
        self._socket: socket.socket | None = None

    def __enter__(self) -> Server:
        self._socket = self._listening()
        self._worker = Worker()  # after the socket: where that is refused, no worker may be left running
        return self

    def __exit__(self, *error: object) -> None:
        self._worker.end()
        if self._socket is not None:
            self._socket.close()
            with suppress(OSError):
                os.unlink(place.folder() / place.SOCKET)

    def hold(self, options: LoadOptions) -> None:
        """Load a model. Raises what loading it raises, MemoryLimitError where it does not fit beside the others."""
        if options.trust_remote_code or options.allow_pickle:
            raise UsageError("a server runs no code of a model, and reads no pickle", "leave out that option")
        self.models.append(self._load(options, len(self.models)))

    @property
    def options(self) -> list[LoadOptions]:
        """How the models that are held were asked for."""
        return [one.options for one in self.models]

    @property
    def names(self) -> list[str]:
        """The models that are held, as they were named."""
        return [one.options.model for one in self.models]

    def serve(self) -> None:
        """Answer until `stop` is called, or no question came for `idle` seconds."""
        assert self._socket is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while not self._stop.is_set() and not self._is_idle():
                if selector.select(POLL_SECONDS):
                    with suppress(OSError):
                        self._accept(self._socket.accept()[0])

    def stop(self) -> None:
        """End `serve` soon."""
        self._stop.set()

    def _is_idle(self) -> bool:
        waits = self._turn.locked()
        return self.idle is not None and not waits and time.monotonic() - self.used > self.idle

    def _listening(self) -> socket.socket:
        """The socket, of which no other server holds the lock; what one left that was killed is removed."""
        place.make_folder()
        address = place.address()
        self._lock = open(address.with_suffix(".lock"), "w")  # noqa: SIM115  # held until this process ends
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError("a server of yours is there already", "stop it: attnscope serve --stop") from None
        with suppress(FileNotFoundError):
            os.unlink(address)
        found = socket.socket(socket.AF_UNIX)
        found.bind(str(address))
        found.listen(MOST_LINKS)
        return found

    def _accept(self, link: socket.socket) -> None:
        if not self._links.acquire(blocking=False):
            with link, suppress(OSError):
                send(link, ["no", f"{MOST_LINKS} questions wait already"], last=True)
            return
        threading.Thread(target=self._talk, args=(link,), daemon=True).start()

    def _talk(self, link: socket.socket) -> None:
        """One connection: a question, and its answer."""
        try:
            with link:
                if not place.is_own(link):
                    return
                link.settimeout(ASKING_SECONDS)
                frame = receive(link, wire.REQUEST_BYTES)
                link.settimeout(None)
                self._answer(link, frame)
        except (WireError, OSError):
            pass  # who asked has gone, or said nothing that is a question
        finally:
            self._links.release()

    def _answer(self, link: socket.socket, frame: wire.Frame) -> None:
        said = frame.header if isinstance(frame.header, dict) else {}
        if said.get("what") == "status":
            send(link, plain(self.status()), last=True)
        elif said.get("what") == "stop":
            send(link, plain(self.status()), last=True)
            self._stop.set()
        elif said.get("what") == "question":
            try:
                model = self._model_for(said)
            except UnansweredError as why:
                send(link, ["no", str(why)], last=True)
                return
            self.used = time.monotonic()
            with self._turn:
                self._relay(link, said | {"model": str(self.models.index(model))}, frame.blobs)
            self.used = time.monotonic()
        else:
            raise WireError("expected a question, got another thing")

    def _model_for(self, said: dict[str, Any]) -> Model:
        """The model of a question. Raises UnansweredError where this server cannot answer as a process would."""
        if said.get("code") != self.code and not self._is_code(said.get("code")):
            raise UnansweredError("the server runs other code")
        if said.get("environment") != self.environment:
            raise UnansweredError("the server runs in another environment")
        try:
            options: LoadOptions = typed(LoadOptions, said.get("options"), "options")
            source = locate(replace(options, offline=True))
            asked = pinned(options, source)
        except AttnscopeError as error:
            raise UnansweredError(str(error)) from error
        for model in self.models:
            if replace(model.asked, offline=asked.offline) == asked:
                if not model.files.same(files_of(source)):
                    raise UnansweredError("the files of the model have changed since the server loaded them")
                return model
        raise UnansweredError(f"the server does not hold {said.get('name')} as it is asked for")

    def _is_code(self, said: object) -> bool:
        """Whether a digest is that of this code, whose files had their times of change moved."""
        now = identity.code_files()
        if said == identity.code_of(now) and self._code_files.same(now):
            self.code = identity.code_of(now)
        return said == self.code

    def _relay(self, link: socket.socket, question: dict[str, Any], blobs: Sequence[bytes]) -> None:
        """Hand a question to the worker, and what it says to who asked."""
        if self._worker.process.poll() is not None:
            self._again()
        self._number += 1
        number = self._number
        self._worker.send(question | {"number": number}, blobs)
        threading.Thread(target=self._hear, args=(link, self._worker, number), daemon=True).start()
        gone = False
        while True:
            try:
                frame = receive_raw(self._worker.link)
            except WireError:
                with suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)  # the thread that listens there keeps it open
                raise WireError("the worker ended amid an answer") from None
            last = wire.is_last(frame[0])
            self.answered += last  # before who asked can ask for it
            if not gone:
                try:
                    link.sendall(b"".join(frame))
                except OSError:
                    gone = True
            if last:
                return

    def _hear(self, link: socket.socket, worker: Worker, number: int) -> None:
        """What who asked says while the worker works: to go on, or nothing more, which cancels the question."""
        with suppress(OSError, WireError):
            while receive(link, wire.REQUEST_BYTES).header == "go":
                worker.send({"what": "go", "number": number})
        with suppress(OSError):
            worker.send({"what": "cancel", "number": number})

    def _again(self) -> None:
        """Start another worker, with the models that the one that ended had."""
        self._worker.end()
        self._worker = Worker()
        for index, model in enumerate(self.models):
            self.models[index] = self._load(model.options, index)

    def _load(self, options: LoadOptions, index: int) -> Model:
        source = locate(options)
        before = files_of(source)
        self._number += 1
        said = {"what": "load", "options": plain(options), "model": str(index), "number": self._number}
        self._worker.send(said)
        while not (frame := receive(self._worker.link)).last:
            if frame.header[0] == "warned":
                self.say(f"attnscope: {frame.header[1]}")
        kind, value = frame.header
        if kind == "error":
            raise getattr(errors, value[0])(*value[1:])
        if kind == "no":
            raise ModelError(f"{options.model} was not loaded: {value}", "name another model, or free memory")
        files = identity.Contents(files_of(source) | before)  # those too that loading has downloaded
        return Model(options, pinned(options, source), files, value)

    def status(self) -> Status:
        """What `serve --status` tells."""
        return Status(
            os.getpid(),
            round(time.monotonic() - self.started),
            self.answered,
            self._turn.locked(),
            _resident(self._worker.process.pid),
            tuple(HeldModel(one.options.model, **one.facts) for one in self.models),
        )


def pinned(options: LoadOptions, source: Source) -> LoadOptions:
    """The options with the model's own folder as its name, so that two spellings of one are the same."""
    if options.model == DEMO:  # whose tokenizer is known, which no folder's is
        return options
    folder = source.adapter.folder if source.adapter else source.gguf or source.folder
    base = None if source.adapter is None else str(_real(source.gguf or source.folder))
    return replace(options, model=str(_real(folder)), base=base, revision=source.revision)


def files_of(source: Source) -> identity.Files:
    """The files of a model, of its base too."""
    return identity.files(source.source_folder, source.base_folder, source.tokenizer_folder)


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _resident(pid: int) -> int | None:
    """Bytes of memory that a process has; None where the system does not say."""
    try:
        words = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
        return int(words[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
