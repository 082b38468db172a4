"""Asking a server: an ask and its purpose go, lines and stages come, and at last a record. Without torch.

try:
    seen = answered(options, ask, tell, check, purpose=Observe())
except UnansweredError as why:
    ...  # as if there were no server
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attnscope.errors
from attnscope.errors import AttnscopeError, UsageError
from attnscope.inputs.prompt import Prompt
from attnscope.model.options import DEMO
from attnscope.observe.progress import Progress as Teller
from attnscope.observe.progress import RunInfo as Prepared
from attnscope.purposes.observe import Observe
from attnscope.purposes.purpose import Purpose
from attnscope.serve import identity, place, wire
from attnscope.serve.records import packed, type_of, unpacked
from attnscope.serve.status import Holdings, Status
from attnscope.serve.wire import Frame, SilentServerError, UnansweredError, WireError, is_readable, receive, send
from attnscope.utils.schema import from_json as typed
from attnscope.utils.schema import to_json as plain

if TYPE_CHECKING:
    import numpy as np

    from attnscope.model.options import LoadOptions
    from attnscope.observe.request import CaptureSpec as Ask

logger = logging.getLogger("attnscope")
VARIABLE = "ATTNSCOPE_NO_SERVER"
CONNECT_SECONDS = 2.0
SILENT_SECONDS = 5.0  # a server that is there says something every second
WORD_SECONDS = 2.0  # of waiting, until a stage is shown
WAITING = "waiting for attnscope serve"
OBSERVE = Observe()


def answered(
    options: LoadOptions,
    ask: Ask,
    tell: Teller,
    check: Callable[[Prepared], object] = lambda prepared: None,
    tensor: Callable[[np.ndarray], Any] = lambda array: array,
    purpose: Purpose = OBSERVE,
) -> Any:
    """What a server answers; see `Purpose.answer`. tensor: what arrays that were tensors become.

    Raises UnansweredError where none does, or it ended amid the answer; else what the question raises.
    """
    question, blobs = _question(options, ask, purpose)
    with connected() as link:
        try:
            send(link, question, blobs)
            type_of(purpose.record)  # imported while the server works
            return _Answer(link, tell, check, tensor, purpose.record).last()
        except TimeoutError:
            raise UnansweredError(f"the server says nothing for {SILENT_SECONDS:.0f} seconds") from None
        except (OSError, WireError) as error:
            raise UnansweredError(f"the server ended amid the answer ({error})") from error


def connected() -> socket.socket:
    """A socket to the server of this user. Raises UnansweredError where there is none."""
    if not place.supported():
        raise UnansweredError("this system has no sockets that say who asks")
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(CONNECT_SECONDS)
    try:
        link.connect(str(place.address()))
        if not place.is_own(link):
            raise UnansweredError("the server is another user's")
    except FileNotFoundError:
        link.close()
        raise UnansweredError("no server is there") from None
    except ConnectionRefusedError:
        link.close()
        raise UnansweredError("a server was there, and has ended") from None
    except (OSError, UsageError) as error:
        link.close()
        raise UnansweredError(f"the server cannot be reached: {error}") from error
    except UnansweredError:
        link.close()
        raise
    link.settimeout(SILENT_SECONDS)
    return link


def asked(request: str) -> Status:
    """What a server answers to `status` or `stop`. UnansweredError: there is none. SilentServerError: it is silent."""
    with connected() as link:
        try:
            with suppress(ConnectionError):  # it has refused this link, and said why
                send(link, {"what": request})
            header = receive(link, wire.REQUEST_BYTES, CONNECT_SECONDS).header
            if isinstance(header, list):  # no link is left
                raise SilentServerError(f"the server has no time: {_said(Frame(header, []))[1]}; ask again", None)
            status: Status = typed(Status, header, "status")
        except (OSError, WireError, UsageError) as error:
            raise SilentServerError(f"the server does not answer ({error})", place.process_of(link)) from error
        return status


def joined() -> tuple[socket.socket, Holdings]:
    """What a server holds, for a page of this process, and a link on which it says nothing more until it ends.

    Raises UnansweredError without a server, and for one that runs other code or in another environment.
    """
    link = connected()
    try:
        send(link, {"what": "page", "code": identity.code(), "environment": identity.environment()})
        header = receive(link).header
        if isinstance(header, list):
            raise UnansweredError(_said(Frame(header, []))[1])
        holdings: Holdings = typed(Holdings, header, "holdings")
    except (OSError, WireError, UsageError) as error:
        link.close()
        raise UnansweredError(f"the server does not answer ({error})") from error
    except UnansweredError:
        link.close()
        raise
    return link, holdings


def _question(options: LoadOptions, ask: Ask, purpose: Purpose = OBSERVE) -> tuple[dict[str, Any], list[memoryview]]:
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
        "how": plain(purpose),
        "ask": document,
        "prompt": prompt,
        "options": plain(replace(options, model=model)),
        "name": options.model,
        "folder": os.getcwd(),
        "code": identity.code(),
        "environment": identity.environment(),
    }, blobs


class _Answer:
    """The frames of one answer, in their order."""

    def __init__(
        self,
        link: socket.socket,
        tell: Teller,
        check: Callable[[Prepared], object],
        tensor: Callable[[np.ndarray], Any],
        record: str,
    ) -> None:
        self.link, self.tell, self.check, self.tensor, self.record = link, tell, check, tensor, record
        self._stage = ExitStack()
        self._advance: Callable[[int], object] = lambda steps: None
        self._shows = self._waits = False  # a stage; that it waits
        self._since = time.monotonic()  # nothing of the answer has come

    def last(self) -> Any:
        """The record that ends the answer. Raises TimeoutError where the server says nothing more."""
        with self._stage:
            while not (frame := self._next()).last:
                kind, value = _said(frame)
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
                    self._heard(kind, frame)
        return self._last(frame)

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

    def _heard(self, kind: str, frame: Frame) -> None:
        if kind == "said":
            self.tell.say(frame.header[1])
        elif kind == "warned":
            logger.warning("%s", frame.header[1])
        elif kind == "prepared":
            self.check(unpacked(frame.header[1], frame.blobs))
            send(self.link, "go")
        else:
            raise WireError(f"expected a part of an answer, got another thing: {kind!r}")

    def _last(self, frame: Frame) -> Any:
        kind, value = _said(frame)
        if kind == "answer":
            record = unpacked(value, frame.blobs, self.tensor)
            if type(record).__name__ != self.record:
                raise WireError(f"expected {self.record}, got another record")
            return record
        if kind == "error":  # of ours, as the other end raised it
            name, message, hint = value
            error = getattr(attnscope.errors, name, AttnscopeError)
            known = isinstance(error, type) and issubclass(error, AttnscopeError)
            raise (error if known else AttnscopeError)(message, hint)
        raise UnansweredError(str(value))


STAGES = [[str, int, str], [str, type(None), str]]
FORMS: dict[str, Callable[[Any], bool]] = {  # of what an answer says, by its kind
    "stage": lambda value: isinstance(value, list) and [type(one) for one in value] in STAGES,
    "step": lambda value: type(value) is int,
    "error": lambda value: isinstance(value, list) and [type(one) for one in value] == [str, str, str],
    **dict.fromkeys(("here", "said", "warned", "no"), lambda value: isinstance(value, str)),
}


def _said(frame: Frame) -> tuple[str, Any]:
    """The kind of a part of an answer, and what it says. Raises WireError for what is none."""
    header = frame.header
    if not (isinstance(header, list) and len(header) == 2 and isinstance(header[0], str)):
        raise WireError("expected a part of an answer, got another thing")
    if header[0] in FORMS and not FORMS[header[0]](header[1]):
        raise WireError(f"expected a part of an answer, got another thing: {header[0]}")
    return header[0], header[1]
