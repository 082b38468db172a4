"""Both ends of a question, without torch: who asks a server, and how that server hands it to its worker.

`connect` is the first for Python: captures of a model that a server holds.

A command sends an ask and its purpose, hears lines and stages, and at last a record:

try:
    seen = ask_server(options, ask, tell, check, purpose=Observe())
except UnansweredError as why:
    ...  # as if there were no server

`relay` brings one question to the worker, and its answer back. No end that stopped holds up another question: who asked
may be suspended (Ctrl-Z) or read slowly, and up to MOST_KEPT bytes of an answer wait for it here, while the worker
turns to the next question. A worker that was suspended is ended. Each end that waits hears `here` from this server
every second, so that it can tell work from silence.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import attnscope.errors
from attnscope.errors import AttnscopeError, ModelError, UsageError, hints_of
from attnscope.inputs.prompt import Prompt
from attnscope.model.options import DEMO, LoadOptions
from attnscope.observe.request import CaptureOptions, CaptureSpec, Request, View
from attnscope.serve import wire
from attnscope.serve.questions import Check, Observe, Purpose
from attnscope.serve.records import packed, type_of, unpacked
from attnscope.serve.wire import Frame, Status, UnansweredError, WireError, framed, is_readable, receive, send
from attnscope.utils.schema import from_json, takes_fields, to_json
from attnscope.utils.stages import NO_PROGRESS, Progress

if TYPE_CHECKING:
    import numpy as np

    from attnscope.api.captured import Capture

logger = logging.getLogger("attnscope")
VARIABLE = "ATTNSCOPE_NO_SERVER"
CONNECT_SECONDS = 2.0
SILENT_SECONDS = 5.0  # a server that is there says something every second
WORD_SECONDS = 2.0  # of waiting, until a stage is shown
WAITING = "waiting for attnscope serve"
OBSERVE = Observe()
START = "start one: attnscope serve --model "


def ask_server(
    options: LoadOptions,
    ask: CaptureSpec,
    tell: Progress,
    check: Check = lambda info: None,
    tensor: Callable[[np.ndarray], Any] = lambda array: array,
    purpose: Purpose = OBSERVE,
) -> Any:
    """What a server answers; see `Purpose.answer`. tensor: what arrays that were tensors become.

    Raises UnansweredError where none does, or it ended amid the answer; else what the question raises.
    """
    question, blobs = _question(options, ask, purpose)
    with connected() as link:
        try:
            _ask(link, question, blobs)
            type_of(purpose.record)  # imported while the server works
            frame = _Answer(link, tell, check).last()
            kind, value = _message(frame)
            if kind == "answer":
                record = unpacked(value, frame.blobs, tensor)
                if type(record).__name__ != purpose.record:
                    raise WireError(f"expected {purpose.record}, got another record")
                return record
        except TimeoutError:
            raise UnansweredError(f"the server says nothing for {SILENT_SECONDS:.0f} seconds") from None
        except (OSError, WireError) as error:
            raise UnansweredError(f"the server ended amid the answer ({error})") from error
    if kind == "error":  # of ours, as the other end raised it
        name, message, hint = value
        error_type = getattr(attnscope.errors, name, AttnscopeError)
        known = isinstance(error_type, type) and issubclass(error_type, AttnscopeError)
        raise (error_type if known else AttnscopeError)(message, hint)
    raise UnansweredError(str(value))


def connected() -> socket.socket:
    """A socket to the server of this user. Raises UnansweredError where there is none."""
    if not wire.supported():
        raise UnansweredError("this system has no sockets that say who asks")
    with ExitStack() as on_failure:  # where it is, the socket is closed
        link = on_failure.enter_context(socket.socket(socket.AF_UNIX))
        link.settimeout(CONNECT_SECONDS)
        try:
            link.connect(str(wire.address()))
            own = wire.is_own(link)
        except FileNotFoundError:
            raise UnansweredError("no server is there") from None
        except ConnectionRefusedError:
            raise UnansweredError("a server was there, and has ended") from None
        except (OSError, UsageError) as error:
            raise UnansweredError(f"the server cannot be reached: {error}") from error
        if not own:
            raise UnansweredError("the server is another user's")
        link.settimeout(SILENT_SECONDS)
        on_failure.pop_all()
        return link


def _ask(link: socket.socket, question: Mapping[str, Any], blobs: Sequence[memoryview] = ()) -> None:
    """Send a question. A server that is full hangs up before it reads, and why is read next."""
    with suppress(ConnectionError):
        send(link, question, blobs)


def request_status(request: str) -> Status:
    """What a server answers to `status` or `stop`. UnansweredError: there is none. SilentServerError: it is silent."""
    with connected() as link:
        try:
            _ask(link, {"what": request})
            header = receive(link, wire.REQUEST_BYTES, CONNECT_SECONDS).header
            if isinstance(header, list):  # no link is left
                message = f"the server has no time: {_message(Frame(header, []))[1]}; ask again"
                raise wire.SilentServerError(message, None)
            status: Status = from_json(Status, header, "status")
        except (OSError, WireError, UsageError) as error:
            raise wire.SilentServerError(f"the server does not answer ({error})", wire.peer(link)[0]) from error
        return status


def join_server() -> tuple[socket.socket, wire.Holdings]:
    """What a server holds, for a page of this process, and a link on which it says nothing more until it ends.

    Raises UnansweredError without a server, and for one that runs other code or in another environment.
    """
    with ExitStack() as on_failure:  # where it is, the link is closed
        link = on_failure.enter_context(connected())
        try:
            _ask(link, {"what": "page", "code": wire.code(), "environment": wire.environment()})
            header = receive(link).header
            if isinstance(header, list):
                raise UnansweredError(_message(Frame(header, []))[1])
            holdings: wire.Holdings = from_json(wire.Holdings, header, "holdings")
        except (OSError, WireError, UsageError) as error:
            raise UnansweredError(f"the server does not answer ({error})") from error
        on_failure.pop_all()
        return link, holdings


def _question(
    options: LoadOptions, ask: CaptureSpec, purpose: Purpose = OBSERVE
) -> tuple[dict[str, Any], list[memoryview]]:
    """What is sent for a question. Raises UnansweredError for one that no server answers."""
    if os.environ.get(VARIABLE):
        raise UnansweredError(f"{VARIABLE} is set")
    if options.trust_remote_code or options.allow_pickle:
        raise UnansweredError("a server runs no code of a model, and reads no pickle")
    if ask.picture is not None:
        raise UnansweredError("pictures are read without a server")
    # What lies in this process alone has no form: the question is then answered here.
    try:
        prompt, blobs = packed(ask.text if isinstance(ask.text, Prompt) else None)
        document = ask.as_json()
    except (UsageError, TypeError) as error:
        raise UnansweredError(f"this has no form on the wire: {error}") from error
    # The server may run in another folder: a path is sent whole, and the name as it was typed next to it.
    model = options.model
    if model != DEMO and os.path.exists(os.path.expanduser(model)):
        model = str(Path(model).expanduser().absolute())
    return {
        "what": "question",
        "purpose": purpose.name,
        "how": to_json(purpose),
        "ask": document,
        "prompt": prompt,
        "options": to_json(replace(options, model=model)),
        "name": options.model,
        "folder": os.getcwd(),
        "code": wire.code(),
        "environment": wire.environment(),
    }, blobs


class _Answer:
    """The frames of one answer, in their order."""

    def __init__(self, link: socket.socket, tell: Progress, check: Check) -> None:
        self.link, self.tell, self.check = link, tell, check
        self._stage = ExitStack()
        self._advance: Callable[[int], object] = lambda steps: None
        self._shows = self._waits = False  # a stage; that it waits
        self._since = time.monotonic()  # nothing of the answer has come

    def last(self) -> Frame:
        """The frame that ends the answer. Raises TimeoutError where the server says nothing more."""
        with self._stage:
            while not (frame := self._next()).last:
                kind, value = _message(frame)
                if kind == "here":
                    self._wait(value)
                    continue
                self._since = time.monotonic()
                if kind == "step":
                    self._advance(value)
                    continue
                if self._waits or kind in ("stage", "over"):
                    self._stage.close()
                    self._shows = self._waits = False
                if kind == "stage":
                    self._show(*value)
                elif kind != "over":
                    self._pass_on(kind, frame)
        return frame

    def _next(self) -> Frame:
        """The next frame; a stage is shown where it takes long."""
        if not is_readable(self.link, WORD_SECONDS):
            self._wait(WAITING)
            if not is_readable(self.link, SILENT_SECONDS - WORD_SECONDS):
                raise TimeoutError
        return receive(self.link)

    def _wait(self, why: str) -> None:
        """Show what is waited for, where that takes long and nothing else is shown; why: empty for the pass itself."""
        if why and not self._shows and time.monotonic() - self._since >= WORD_SECONDS:
            self._waits = True
            self._show(why)

    def _show(self, title: str, total: int | None = None, unit: str = "") -> None:
        self._advance = self._stage.enter_context(self.tell.stage(title, total, unit))
        self._shows = True

    def _pass_on(self, kind: str, frame: Frame) -> None:
        if kind == "said":
            self.tell.say(frame.header[1])
        elif kind == "warned":
            logger.warning("%s", frame.header[1])
        elif kind == "prepared":
            self.check(unpacked(frame.header[1], frame.blobs))
            send(self.link, "go")
        else:
            raise WireError(f"expected a part of an answer, got another thing: {kind!r}")


FORMS: dict[str, tuple[Any, ...]] = {  # of what an answer says, by its kind: types, or lists of the types of items
    "stage": ([str, int, str], [str, type(None), str]),
    "step": (int,),
    "error": ([str, str, str],),
    **dict.fromkeys(("here", "said", "warned", "no"), (str,)),
}


def _message(frame: Frame) -> tuple[str, Any]:
    """The kind of a part of an answer, and what it says. Raises WireError for what is none."""
    header = frame.header
    if not (isinstance(header, list) and len(header) == 2 and isinstance(header[0], str)):
        raise WireError("expected a part of an answer, got another thing")
    kind, value = header
    form = [type(item) for item in value] if isinstance(value, list) else type(value)
    if form not in FORMS.get(kind, (form,)):
        raise WireError(f"expected a part of an answer, got another thing: {kind}")
    return kind, value


HERE_SECONDS = 1.0  # between two words of a server that is there
STALLED_SECONDS = 10.0  # who took nothing of its answer for so long has gone
STOPPED_SECONDS = 2.0  # a worker that was suspended for so long is ended
MOST_KEPT = 2**25  # bytes
MOST_WORD = 2**10  # bytes of the word to continue


class Worker:
    """The process with the models, and a socket to it."""

    def __init__(self) -> None:
        self.link, theirs = socket.socketpair()
        self.link.settimeout(STOPPED_SECONDS)
        command = [sys.executable, "-P", "-m", "attnscope.serve.worker", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._unseen = self._suspended = 0.0  # seconds since the last look at its state; in which it was suspended

    def send(self, header: Any, blobs: Sequence[bytes] = ()) -> None:
        """Send one frame to it. Raises WireError where it has ended, or takes nothing."""
        try:
            send(self.link, header, blobs)
        except OSError as error:
            raise WireError("the worker takes nothing") from error

    def is_suspended(self) -> bool:
        """Whether someone stopped the process, so that it neither works nor ends."""
        return is_suspended(self.process.pid)

    def check(self, passed: float) -> None:
        """Raise WireError where the process has been suspended for too long. passed: seconds since the last look."""
        self._unseen += passed
        if self._unseen >= HERE_SECONDS:
            self._suspended = self._suspended + self._unseen if self.is_suspended() else 0.0
            self._unseen = 0.0
        if self._suspended >= STOPPED_SECONDS:
            raise WireError("the worker was suspended")

    def end(self) -> None:
        """End it at once."""
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):  # amid a read that the system does not give up
            self.process.wait(STALLED_SECONDS)
        self.link.close()


class Asker:
    """Who asked, at the other end of a socket. What is sent waits here until it is taken.

    has_gone: it has closed its end, or took nothing for too long.
    """

    def __init__(self, link: socket.socket) -> None:
        link.settimeout(0)
        self.link, self.has_gone = link, False
        self.kept = 0  # bytes that wait
        self._parts = deque[memoryview]()
        self._stalled = self._quiet = 0.0

    def put(self, data: bytes) -> None:
        """Send this after what waits."""
        if not self.has_gone:
            self._parts.append(memoryview(data))
            self.kept += len(data)
            self._quiet = 0.0
            self.push()

    def push(self) -> None:
        """Send as much as is taken at once."""
        try:
            while self._parts:
                count = self.link.send(self._parts[0])
                self.kept, self._stalled = self.kept - count, 0.0
                rest = self._parts.popleft()[count:]
                if rest:
                    self._parts.appendleft(rest)
        except BlockingIOError:
            pass
        except OSError:
            self.leave()

    def leave(self) -> None:
        """No one takes what waits."""
        self._parts.clear()
        self.has_gone, self.kept = True, 0

    def check(self, passed: float) -> None:
        """See whether it still takes what is sent. passed: seconds since the last look."""
        self._quiet += passed
        self._stalled = self._stalled + passed if self.kept else 0.0
        if self._stalled >= STALLED_SECONDS:
            self.leave()

    def here(self, why: str = "") -> None:
        """Say that this server is there, after a second without a word, between frames. why: what is waited for."""
        if self._quiet >= HERE_SECONDS and not self.kept:
            self.put(framed(["here", why]))

    def goes_on(self) -> bool:
        """Whether what it says is the word to continue: nothing more of it is read otherwise."""
        try:
            word = receive(self.link, MOST_WORD, HERE_SECONDS).header
        except WireError:
            return False
        finally:
            with suppress(OSError):
                self.link.settimeout(0)
        return bool(word == "go")

    def flush(self) -> None:
        """Wait until all is taken, or nothing for too long."""
        clock = Clock()
        with selectors.DefaultSelector() as selector:
            selector.register(self.link, selectors.EVENT_WRITE)
            while self.kept:
                if selector.select(HERE_SECONDS):
                    self.push()
                self.check(clock.passed())


def is_suspended(process: int | None) -> bool:
    """Whether a process was stopped by a signal or a debugger; False where the system does not say."""
    try:
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False


class Clock:
    """Seconds between two looks. A stop of this process itself does not count: all ends were stopped then, maybe."""

    def __init__(self) -> None:
        self._before = time.monotonic()

    def passed(self) -> float:
        """Since the last look."""
        before, self._before = self._before, time.monotonic()
        return min(self._before - before, 2 * HERE_SECONDS)


def relay(
    asker: Asker, worker: Worker, question: dict[str, Any], blobs: Sequence[bytes], finish: Callable[[], object]
) -> None:
    """Hand a question to the worker, and its answer to who asked, until the worker is free again.

    question: with its `number`. finish: called before the end of the answer is sent. Raises WireError where the worker
    has ended, was suspended, or says what is no answer.
    """
    answer, clock, listens = wire.Passing(), Clock(), True
    with selectors.DefaultSelector() as selector:
        worker.send(question, blobs)
        while not answer.ended:
            # Where too much of the answer waits here already, the worker waits until some of it is taken.
            _watch(selector, worker.link, selectors.EVENT_READ if asker.kept < MOST_KEPT else 0)
            events = selectors.EVENT_READ * listens | selectors.EVENT_WRITE * bool(asker.kept)
            _watch(selector, asker.link, 0 if asker.has_gone else events)
            ready = {key.fileobj: events for key, events in selector.select(HERE_SECONDS)}
            if worker.link in ready:
                piece = answer.piece(worker.link)
                if answer.ended:
                    finish()
                asker.put(piece)
            if ready.get(asker.link, 0) & selectors.EVENT_WRITE:
                asker.push()
            # Neither end may hold up the other: who was suspended is found out by the time that has passed.
            passed = clock.passed()
            worker.check(passed)
            asker.check(passed)
            if answer.between:
                asker.here()
            # A worker whose asker has gone is told so, and ends its pass at the next layer.
            if listens and (asker.has_gone or ready.get(asker.link, 0) & selectors.EVENT_READ):
                listens = not asker.has_gone and asker.goes_on()
                if not listens:
                    asker.leave()
                worker.send({"what": "go" if listens else "cancel", "number": question["number"]})


def _watch(selector: selectors.BaseSelector, link: socket.socket, events: int) -> None:
    """Wait for these events of a socket from now on, for none with 0."""
    key = selector.get_map().get(link)
    if key is None and events:
        selector.register(link, events)
    elif key is not None and not events:
        selector.unregister(link)
    elif key is not None and key.events != events:
        selector.modify(link, events)


@hints_of(LoadOptions)
@takes_fields(LoadOptions)
def connect(options: LoadOptions) -> Session:
    """A session with the model that a server of this user's holds; options: how it was loaded, as for `load`.

    Raises ModelError without a server, UsageError for an option that does not exist.

        >>> session = attnscope.connect()
        >>> session.capture("the financial bank").weights[0].shape
    """
    try:
        request_status("status")
    except UnansweredError as why:
        raise ModelError(str(why), START + options.model) from None
    return Session(options)


@dataclass(frozen=True)
class Session:
    """A model that a server holds."""

    options: LoadOptions

    @hints_of(CaptureOptions, Request, View, LoadOptions)
    def capture(
        self,
        text: Any,
        layers: Sequence[int] | None = None,
        *,
        request: Request | None = None,
        query: str | int | None = None,
        key: str | int | None = None,
        define: Mapping[str, str] | None = None,
        **how: Unpack[CaptureOptions],
    ) -> Any:
        """As `attnscope.capture` of that model: a Capture, or of a list of texts a list of them.

        Raises what that raises, and ModelError where the server does not answer: it does not hold the model with these
        options and files, it runs other code, or it has ended.
        """
        from attnscope.api.capture import is_several, kept

        if how.get("verify"):
            raise UsageError("a server does not verify", "load the model with attnscope.load")
        if layers is not None and request is None and how.get("select") is None:
            how["select"] = ",".join(f"{layer}.*" for layer in layers)
        elif layers is not None:
            raise UsageError("layers and request or select were both given", "choose heads with {select=1.*} alone")
        keep = kept(None, request, (query, key, define), how)
        if is_several(text):
            return [self._captured(CaptureSpec(item, keep, **how)) for item in text]
        return self._captured(CaptureSpec(text, keep, **how))

    def _captured(self, ask: CaptureSpec) -> Capture:
        import torch

        from attnscope.api.captured import Capture

        try:
            return Capture.made_of(ask_server(self.options, ask, NO_PROGRESS, tensor=torch.from_numpy))
        except UnansweredError as why:
            raise ModelError(f"the server does not answer: {why}", "see attnscope serve status") from why
