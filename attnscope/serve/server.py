"""The server: sockets, turns and what may be answered, in a process that loads no torch; a worker holds the models.

One question is answered after the other (`relay.py`); threads are for sockets alone, and one accepts while models are
loaded. A worker that ended is started again.
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from attnscope import errors
from attnscope.errors import AttnscopeError, ModelError, UsageError
from attnscope.model.loading import locate
from attnscope.model.options import DEMO, LoadOptions
from attnscope.model.sources import Source
from attnscope.serve import wire
from attnscope.serve.client import HERE_SECONDS, Asker, Clock, Worker, is_suspended, relay
from attnscope.serve.wire import Holdings, Status, UnansweredError, WireError, framed, is_readable, receive, send
from attnscope.utils.files import open_regular
from attnscope.utils.schema import from_json, to_json

MOST_LINKS = 64  # at once: asked, or waiting for their turn
SPARE_LINKS = 8  # beyond those, for `--status` and `--stop`
SPARE_SECONDS = 1.0  # as ASKING_SECONDS, of a spare link
ASKING_SECONDS = 10.0  # from the first byte of a question to its last
POLL_SECONDS = 0.5
FULL = ["no", f"{MOST_LINKS} questions wait already"]


@dataclass
class Model:
    """A model that is held: how it was loaded, from which files. asked: the options by which it is found."""

    options: LoadOptions
    asked: LoadOptions
    files: wire.Contents
    facts: dict[str, Any]


@dataclass(frozen=True)
class Loading:
    """A model that is about to be held. began: when, by the monotonic clock."""

    name: str
    asked: LoadOptions
    began: float


class StoppedError(Exception):
    """The server was asked to stop while it loaded a model."""


class Server:
    """A socket, and a worker with models: `with Server(models) as server: server.serve()`."""

    def __init__(self, idle: float | None = None, say: Callable[[str], object] = lambda line: None) -> None:
        self.idle, self.say = idle, say
        self._code_files = wire.Contents(wire.code_files())
        self.code, self.environment = wire.code_of(self._code_files.files), wire.environment()
        self.models: list[Model] = []
        self.started = self.used = time.monotonic()
        self.answered = 0
        self.pages = 0
        self.ready = False
        self.loading: Loading | None = None
        self._number = 0
        self._turn = threading.Lock()  # of the worker
        self._counting = threading.Lock()  # of pages
        self._links, self._spare = threading.BoundedSemaphore(MOST_LINKS), threading.BoundedSemaphore(SPARE_LINKS)
        self._stop = threading.Event()
        self._lock: IO[bytes] | None = None
        self._socket: socket.socket | None = None
        self._accepting = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Server:
        self._socket = self._listening()
        self._worker = Worker()  # after the socket: where that is refused, no worker may be left running
        self._accepting.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._accepting.join()
        self._worker.end()
        if self._socket is not None:
            self._socket.close()
            with suppress(OSError):
                os.unlink(wire.folder() / wire.SOCKET)

    def hold(self, options: LoadOptions) -> bool:
        """Load a model. Returns whether it is held: not where `stop` was called meanwhile.

        Raises what loading it raises, MemoryLimitError where it does not fit next to the others.
        """
        if options.trust_remote_code or options.allow_pickle:
            raise UsageError("a server runs no code of a model, and reads no pickle", "leave out that option")
        with self._turn:
            try:
                self.models.append(self._load(options, len(self.models)))
            except StoppedError:
                return False
            except WireError as error:
                why = f"{options.model} was not loaded: the process that loads it has ended ({error})"
                raise ModelError(why, "free memory, or name another model") from None
        return True

    @property
    def options(self) -> list[LoadOptions]:
        """How the models that are held were asked for."""
        return [model.options for model in self.models]

    def serve(self) -> None:
        """Answer until `stop` is called, or there was no question for `idle` seconds."""
        self.ready, self.used = True, time.monotonic()
        while not self._stop.wait(POLL_SECONDS):
            waits = self._turn.locked()  # one that is being answered is no idle time
            if self.idle is not None and not waits and time.monotonic() - self.used > self.idle:
                return

    def stop(self) -> None:
        """End `serve` soon."""
        self._stop.set()

    def _listening(self) -> socket.socket:
        """The socket, of which no other server holds the lock; what one left that was killed is removed."""
        wire.make_folder()
        address = wire.address()
        lock = address.with_suffix(".lock")
        try:
            self._lock = open_regular(lock, "ab", follow=False)  # held until this process ends
        except OSError as error:
            raise UsageError(f"cannot open {lock}: {error.strerror}", "remove it") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError("a server of yours is there already", "stop it: attnscope serve stop") from None
        try:
            os.unlink(address)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise UsageError(f"cannot remove {address}: {error.strerror}", "remove it") from None
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(address))
        listening.listen(MOST_LINKS)
        return listening

    def _accept(self) -> None:
        """Answer each connection in a thread of its own, where there is room for one."""
        assert self._socket is not None
        self._socket.settimeout(POLL_SECONDS)
        while not self._stop.is_set():
            try:
                link = self._socket.accept()[0]
            except TimeoutError:
                continue
            except OSError:  # no file is left, for a while
                self._stop.wait(POLL_SECONDS)
                continue
            links = next((each for each in (self._links, self._spare) if each.acquire(blocking=False)), None)
            if links is None:
                with link, suppress(OSError):
                    send(link, FULL, last=True)
                continue
            try:
                threading.Thread(target=self._converse, args=(link, links), daemon=True).start()
            except RuntimeError:  # the system has no more
                link.close()
                links.release()

    def _converse(self, link: socket.socket, links: threading.Semaphore) -> None:
        """One connection: a question, and its answer. links: those that it is one of."""
        spare = links is self._spare
        try:
            with link:
                if wire.is_own(link):
                    frame = receive(link, wire.REQUEST_BYTES, SPARE_SECONDS if spare else ASKING_SECONDS)
                    self._answer(link, frame, spare)
        except (WireError, OSError):
            pass  # who asked has gone, or said nothing that is a question; or the worker has ended
        finally:
            links.release()

    def _answer(self, link: socket.socket, frame: wire.Frame, spare: bool) -> None:
        question = frame.header if isinstance(frame.header, dict) else {}
        if question.get("what") in ("status", "stop"):
            send(link, to_json(self.status()), last=True)
            if question["what"] == "stop":
                self._stop.set()
        elif spare:
            send(link, FULL, last=True)
        elif question.get("what") == "page":
            try:
                self._check_same(question)
            except UnansweredError as why:
                send(link, ["no", str(why)], last=True)
                return
            # A page of another process keeps its link until one of both ends.
            send(link, to_json(Holdings(os.getcwd(), tuple(self.options))))
            with self.page():
                while not self._stop.is_set() and not is_readable(link, POLL_SECONDS):
                    pass
        elif question.get("what") == "question":
            asker = Asker(link)
            try:
                self._answer_question(asker, question, frame.blobs)
            except UnansweredError as why:
                asker.put(framed(["no", str(why)], last=True))
            asker.flush()
        else:
            raise WireError("expected a question, got another thing")

    @contextmanager
    def page(self) -> Iterator[None]:
        """A block in which a page asks this server, which `status` counts."""
        with self._counting:
            self.pages += 1
        try:
            yield
        finally:
            with self._counting:
                self.pages -= 1

    def _answer_question(self, asker: Asker, question: dict[str, Any], blobs: Sequence[bytes]) -> None:
        """Have a question answered when its turn comes. Raises UnansweredError where this server cannot."""
        self._check_same(question)
        worker, index = self._worker, self._index_of(question)  # what can be refused waits for no turn
        # While it waits for its turn, models may be loaded or lost: which is meant is found again then.
        self.used = time.monotonic()
        if not self._turn.acquire(blocking=False):
            index = None
            clock = Clock()
            while not self._turn.acquire(timeout=HERE_SECONDS):
                asker.check(clock.passed())
                asker.here(self._busy_with())
                if asker.has_gone:
                    return
        try:
            if index is None and is_suspended(wire.peer(asker.link)[0]):
                return  # it waited, and its command begins again by itself when it is continued
            if self._worker.process.poll() is not None:
                self._again(asker)
            if index is None or self._worker is not worker:
                index = self._index_of(question)
            self._number += 1
            numbered = question | {"model": str(index), "number": self._number}
            relay(asker, self._worker, numbered, blobs, self._count)
        except UnansweredError:
            raise
        except StoppedError:
            raise UnansweredError("the server was stopped") from None
        except BaseException:
            self._worker.end()  # what it says next would be of this answer
            raise
        finally:
            self._turn.release()
        self.used = time.monotonic()

    def _count(self) -> None:
        self.answered += 1  # before who asked can ask for it

    def _busy_with(self) -> str:
        """What others wait for, in words."""
        loading = self.loading
        return f"waiting for attnscope serve: {f'it loads {loading.name}' if loading else 'another question is first'}"

    def _check_same(self, question: dict[str, Any]) -> None:
        """Raise UnansweredError where who asks runs other code, or in another environment."""
        # Code whose files only had their times of change moved, as by chmod, is the same: it is taken over.
        if question.get("code") != self.code:
            now = wire.code_files()
            if question.get("code") != wire.code_of(now) or not self._code_files.same(now):
                raise UnansweredError("the server runs other code")
            self.code = wire.code_of(now)
        if question.get("environment") != self.environment:
            raise UnansweredError("the server runs in another environment")

    def _index_of(self, question: dict[str, Any]) -> int | None:
        """Which of the models a question is about, None while that is loaded.

        Raises UnansweredError where this server cannot answer as a process would, or not before another is loaded.
        """
        try:
            options: LoadOptions = from_json(LoadOptions, question.get("options"), "options")
            source = locate(replace(options, offline=True))
            key = pinned(options, source)
            files = files_of(source)
        except AttnscopeError as error:
            raise UnansweredError(str(error)) from error
        loading = self.loading
        if loading is not None:
            if replace(loading.asked, offline=key.offline) == key:
                return None
            raise UnansweredError(f"the server loads {loading.name}")
        for index, model in enumerate(self.models):
            if replace(model.asked, offline=key.offline) == key:
                if not model.files.same(files):
                    raise UnansweredError("the files of the model have changed since the server loaded them")
                return index
        raise UnansweredError(f"the server does not hold {question.get('name')} as it is asked for")

    def _again(self, asker: Asker) -> None:
        """Start another worker, with the models that the one that ended had, while who asked waits."""
        self._worker.end()
        self._worker = Worker()
        clock = Clock()

        def wait() -> None:
            asker.check(clock.passed())
            asker.here(self._busy_with())

        try:
            for index, model in enumerate(self.models):
                self.models[index] = self._load(model.options, index, wait)
        except AttnscopeError as error:
            self._worker.end()  # the next question tries again
            raise UnansweredError(f"the server cannot load its models again: {error}") from error

    def _load(self, options: LoadOptions, index: int, wait: Callable[[], object] = lambda: None) -> Model:
        """Have the worker load a model. wait: called while it does.

        Raises what loading raises, StoppedError where `stop` was called, WireError where the worker ended.
        """
        source = locate(options)
        key, before = pinned(options, source), files_of(source)
        self.loading = Loading(options.model, key, time.monotonic())
        try:
            self._number += 1
            question = {"what": "load", "options": to_json(options), "model": str(index), "number": self._number}
            self._worker.send(question)
            while not (frame := self._heard(wait)).last:
                if frame.header[0] == "warned":
                    self.say(f"attnscope: {frame.header[1]}")
        finally:
            self.loading = None
        kind, value = frame.header
        if kind == "error":
            raise getattr(errors, value[0])(*value[1:])
        if kind == "no":
            raise ModelError(f"{options.model} was not loaded: {value}", "name another model, or free memory")
        files = wire.Contents(files_of(source) | before)  # those too that loading has downloaded
        return Model(options, key, files, value)

    def _heard(self, wait: Callable[[], object]) -> wire.Frame:
        """The next that the worker says."""
        clock = Clock()
        while not is_readable(self._worker.link, POLL_SECONDS):
            wait()
            self._worker.check(clock.passed())
            if self._stop.is_set():
                raise StoppedError
        return receive(self._worker.link)

    def status(self) -> Status:
        """What `serve status` tells."""
        now, loading, memory = time.monotonic(), self.loading, None
        with suppress(OSError, ValueError, IndexError):  # the system does not say
            words = Path(f"/proc/{self._worker.process.pid}/statm").read_text(encoding="ascii").split()
            memory = int(words[1]) * os.sysconf("SC_PAGE_SIZE")
        return Status(
            os.getpid(),
            round(now - self.started),
            self.answered,
            self._turn.locked(),
            memory,
            tuple(wire.HeldModel(model.options.model, **model.facts) for model in self.models),
            self.ready,
            loading.name if loading else "",
            round(now - loading.began) if loading else 0,
            self.pages,
        )


def pinned(options: LoadOptions, source: Source) -> LoadOptions:
    """The options with the model's own folder as its name, so that two spellings of one are the same."""
    if options.model == DEMO:  # whose tokenizer is known, which no folder's is
        return options
    folder = source.adapter.folder if source.adapter else source.gguf or source.folder
    base = None if source.adapter is None else os.path.realpath(source.gguf or source.folder)
    return replace(options, model=os.path.realpath(folder), base=base, revision=source.revision)


def files_of(source: Source) -> wire.Files:
    """The files of a model, of its base too."""
    return wire.files(source.source_folder, source.base_folder, source.tokenizer_folder)
