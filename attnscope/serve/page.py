"""The live page: its server in a thread, `with LivePage(held, port) as address: ...`, who may ask, and what.

Who may ask: a browser of this machine, from the page itself, that has the token. Every user of the machine can connect
to a port of it, so a question needs a token. The token is in the printed address, after the `#`, which a browser sends
to no server, and then in a header of every question.

What the page asks: a command, and values for some of its options. No path is among them. The command runs in a process
of its own, as a person's would: it asks the server for what a model observes, and its page is the one that it writes.
The answer is what it prints, as lines of JSON, and after them its page. Whoever stops listening ends it.
"""

from __future__ import annotations

import asyncio
import html
import json
import logging
import os
import re
import secrets
import signal
import socket
import sys
import threading
from base64 import b64decode, b64encode
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, fields
from functools import cache
from hashlib import sha256
from hmac import compare_digest
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import uvicorn
from anyio import CancelScope
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, request_response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from attnscope._version import __version__
from attnscope.errors import AttnscopeError, InputError, UsageError
from attnscope.model.options import LoadOptions
from attnscope.utils.schema import from_json, to_json
from attnscope.viewer.page import bundle

HERE = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?")  # any port: a tunnel of ssh may have another
OPEN_PATHS = ("/",)  # the page itself, which holds nothing of anyone
MOST_STRANGERS = 32  # connections that have not shown the token
STRANGER_SECONDS = 10.0
Address = tuple[str, int]


class Strangers:
    """Connections that have not shown the token: each for a short time, and only the newest of many."""

    def __init__(self) -> None:
        self._there: dict[Address, asyncio.Transport] = {}

    def came(self, address: Address, transport: asyncio.Transport) -> None:
        """One more; the oldest makes room for it."""
        self._there[address] = transport
        asyncio.get_running_loop().call_later(STRANGER_SECONDS, self._expire, address, transport)
        if len(self._there) > MOST_STRANGERS:
            self._there.pop(next(iter(self._there))).abort()

    def known(self, address: Address | None) -> None:
        """This one has shown the token, or has gone."""
        if address is not None:
            self._there.pop(address, None)

    def _expire(self, address: Address, transport: asyncio.Transport) -> None:
        if self._there.get(address) is transport:
            del self._there[address]
            transport.abort()


def protocol(strangers: Strangers) -> type[H11Protocol]:
    """Uvicorn's protocol, with its connections counted."""

    class Counted(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.address = tuple(transport.get_extra_info("peername")[:2])
            strangers.came(self.address, transport)

        def connection_lost(self, exc: Exception | None) -> None:
            strangers.known(self.address)
            super().connection_lost(exc)

    return Counted


class Guard:
    """The application, with a door before it."""

    def __init__(self, app: ASGIApp, token: str, strangers: Strangers) -> None:
        self.app, self.token, self.strangers = app, token, strangers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand on what may pass."""
        if scope["type"] != "http":
            return
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        refusal = self.refusal(scope["path"], headers)
        if refusal is not None:
            code, why = refusal
            await PlainTextResponse(why, code, {"Connection": "close"})(scope, receive, send)
            return
        if scope["path"] not in OPEN_PATHS:
            self.strangers.known(scope["client"] and tuple(scope["client"]))
        await self.app(scope, receive, send)

    def refusal(self, path: str, headers: Mapping[str, list[str]]) -> tuple[int, str] | None:
        """Why a request is refused, and its code; None where it may pass."""
        # A Host header has to name this machine: any other name may have been made to lead here.
        host = headers.get("host", [])
        if len(host) != 1 or not HERE.fullmatch(host[0]):
            return 421, "this page is for this machine alone"
        same = headers.get("origin", [f"http://{host[0]}"]) == [f"http://{host[0]}"]
        if not same or headers.get("sec-fetch-site", ["none"])[0] not in ("same-origin", "none"):
            return 403, "another page asks"
        token = headers.get("authorization", [""])[0].encode()
        if path not in OPEN_PATHS and not compare_digest(token, f"Bearer {self.token}".encode()):
            return 401, "the token is missing: open the address that attnscope serve printed"
        return None


MOST_LETTERS = 2_000_000  # of the text
MOST_IN_FILE = 50_000  # letters of all else together: a file of options holds a million bytes
MOST_PICTURE = 2**24  # bytes
WRITES = {"view": "--out", "knockout": "--html"}  # the option that names the page's file
CONFIG, PICTURE, PAGE = "question.yaml", "picture", "page.html"  # in a folder of the question's own


@dataclass(frozen=True)
class LiveQuestion:
    """A command with the options that the page offers, as the command line has them; picture: a file's bytes, base64.

    model, compare_model: names of models that are held. Raises InputError for one that is too long.
    """

    command: Literal["view", "knockout"]
    model: str
    text: str
    target: str | None = None
    chat: bool = False
    generate: int | None = None
    picture: str | None = None
    query: str | None = None
    key: str | None = None
    select: str | None = None
    engine: str | None = None
    why: str | None = None
    compare_text: str | None = None
    compare_model: str | None = None

    def __post_init__(self) -> None:
        words = [getattr(self, item.name) for item in fields(self) if item.name not in ("text", "picture")]
        if len(self.text) > MOST_LETTERS or sum(len(item) for item in words if isinstance(item, str)) > MOST_IN_FILE:
            raise InputError("this is too long for the page", "ask with the command, and name a file")
        if len(self.picture or "") > MOST_PICTURE * 4 // 3 + 4:
            raise InputError(f"the picture has over {MOST_PICTURE >> 20} MB", "ask with the command, and name the file")

    def arguments(self, held: Sequence[LoadOptions], folder: Path) -> list[str]:
        """The words of the command, without `attnscope`. Its options are a file of the folder, its text is for stdin.

        Raises UsageError for a model that is not held, InputError for a picture that is no base64.
        """
        import yaml

        named = {options.model: options for options in held}
        for name in (self.model, self.compare_model):
            if name is not None and name not in named:
                raise UsageError(f"the model {name!r} is not held", f"one of {', '.join(named)}")
        # The options that were given, and those by which the model was loaded.
        options = {
            field.name: to_json(value)
            for record in (named[self.model], self)
            for field in fields(record)
            if field.name not in ("command", "text", "picture")
            and (value := getattr(record, field.name)) != field.default
        }
        if self.picture is not None:
            options["picture"] = [str(folder / PICTURE)]
            try:
                (folder / PICTURE).write_bytes(b64decode(self.picture, validate=True))
            except ValueError as error:
                raise InputError("the picture is no base64", "choose the file again") from error
        (folder / CONFIG).write_text(yaml.safe_dump(options), encoding="utf-8")
        files = ["--config", str(folder / CONFIG), "--file", "-", WRITES[self.command], str(folder / PAGE)]
        return [self.command, *files]


COMMAND = (sys.executable, "-P", "-m", "attnscope")
MOST_SECONDS = 3600.0
MOST_LINE = 2**20
MOST_PAGE = 2**28
GOING_SECONDS = 3.0  # from Ctrl-C to the end
SAID = {"ATTNSCOPE_STAGES": "json", "NO_COLOR": "1"}


async def answer(
    question: LiveQuestion, held: Sequence[LoadOptions], where: str | None = None
) -> AsyncGenerator[bytes, None]:
    """Lines of JSON: `said`, or `stage`; the last is `failed`, or `page` with so many bytes, which follow.

    where: the folder that its command runs in, if not this one. No line names the folder of the question, which is gone
    with the answer.
    """
    with TemporaryDirectory(prefix="attnscope-page-") as place:
        folder = Path(place)
        try:
            process = await asyncio.create_subprocess_exec(
                *COMMAND,
                *question.arguments(held, folder),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                cwd=where,
                env=os.environ | SAID,
                limit=MOST_LINE,
            )
        except (AttnscopeError, OSError) as error:
            yield _line(failed=str(error))
            return

        async def send() -> None:
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.write(question.text.encode(errors="surrogatepass"))
                await process.stdin.drain()
                process.stdin.close()

        # The command reads its text while it prints: sending it first could wait for ever, with both pipes full.
        last_line = ""
        sending = asyncio.create_task(send())
        try:
            async with asyncio.timeout(MOST_SECONDS):
                while line := (await _next(process)).replace(f"{folder}{os.sep}", ""):
                    last_line = line if not line.startswith("{") else last_line
                    yield line.encode() + b"\n" if line.startswith("{") else _line(said=line)
                code = await process.wait()
        except TimeoutError:
            yield _line(failed=f"stopped: it took over {MOST_SECONDS:.0f} seconds")
            return
        finally:  # also where whoever asked stops listening
            sending.cancel()
            with CancelScope(shield=True):
                await _ended(process)
        # A command that failed has written no page; the last line that it printed says why.
        page = folder / PAGE
        if not page.is_file() or page.stat().st_size > MOST_PAGE:
            nothing = f"the command ended with the code {code} and printed nothing"
            yield _line(failed=last_line.removeprefix("attnscope: ") or nothing)
            return
        data = page.read_bytes()
        yield _line(page=len(data), code=code)
        yield data


async def _next(process: asyncio.subprocess.Process) -> str:
    """The next line that it says, empty at the end; one that is too long is left out."""
    assert process.stderr is not None
    while True:
        try:
            line = await process.stderr.readline()
        except ValueError:
            continue
        text = line.decode(errors="replace").rstrip("\n")
        if text or not line:
            return text


async def _ended(process: asyncio.subprocess.Process) -> None:
    """End it: as Ctrl-C does, then at once."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.send_signal(number)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), GOING_SECONDS)


def _line(**said: Any) -> bytes:
    return json.dumps(said).encode() + b"\n"


LOOPBACK = "127.0.0.1"
MOST_BODY = 2**25  # bytes of a question, its picture among them
BODY_SECONDS = 20.0
MOST_AT_ONCE, MOST_WAITING = 2, 16  # commands that run, and questions that wait for their turn
CLOSING_SECONDS = 5
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class LivePage:
    """A port of this machine's own, answered by a thread.

    held: the options of the models, as they are now. folder: where its commands run, if not here; names of models may
    be paths from there.
    """

    def __init__(self, held: Callable[[], Sequence[LoadOptions]], port: int = 0, folder: str | None = None) -> None:
        self.held, self.folder, self.token = held, folder, secrets.token_urlsafe(32)
        self._socket = _listening(port)
        self.port = int(self._socket.getsockname()[1])
        strangers = Strangers()
        routes = [
            Route("/", self._page),
            Route("/models", self._models),
            Route("/ask", AtOnce(request_response(self._ask)), methods=["POST"]),
        ]
        self._turn = asyncio.Semaphore(MOST_AT_ONCE)
        self._server = _Server(
            uvicorn.Config(
                Guard(Starlette(routes=routes), self.token, strangers),
                http=protocol(strangers),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level=logging.CRITICAL + 1,  # none: any user of the machine would write to this terminal
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=CLOSING_SECONDS,
            )
        )
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)

    @property
    def address(self) -> str:
        """What is to be opened in a browser: the token follows the `#`."""
        return f"http://{LOOPBACK}:{self.port}/#{self.token}"

    def __enter__(self) -> str:
        self._thread.start()
        return self.address

    def __exit__(self, *error: object) -> None:
        self._server.should_exit = True
        self._thread.join()

    async def _page(self, request: Request) -> Response:
        text, policy = live_document()
        return Response(text, headers=HEADERS | {"Content-Security-Policy": policy}, media_type="text/html")

    async def _models(self, request: Request) -> Response:
        models = [options.model for options in self.held()]
        return JSONResponse({"version": __version__, "models": models}, headers=HEADERS)

    async def _ask(self, request: Request) -> Response:
        """A question; its answer comes as `attnscope.serve.page.answer` says."""
        too_long = _refused(413, f"a question has at most {MOST_BODY} bytes")
        data = bytearray()
        try:
            if int(request.headers.get("content-length") or 0) > MOST_BODY:
                return too_long
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    data += part
                    if len(data) > MOST_BODY:  # as many as it likes may follow without a length in the header
                        return too_long
            question = from_json(LiveQuestion, json.loads(bytes(data)), "question")
        except AttnscopeError as error:
            return _refused(400, str(error))
        except (ValueError, RecursionError):
            return _refused(400, 'expected a question in JSON; write {"command": "view", "model": ..., "text": ...}')
        except (TimeoutError, ClientDisconnect):
            return _refused(408, f"a question comes within {BODY_SECONDS:.0f} seconds")
        return StreamingResponse(self._answer(question), media_type="application/octet-stream", headers=HEADERS)

    async def _answer(self, question: LiveQuestion) -> AsyncGenerator[bytes, None]:
        async with self._turn, aclosing(answer(question, self.held(), self.folder)) as parts:
            async for part in parts:
                yield part


class AtOnce:
    """An endpoint that takes MOST_AT_ONCE and MOST_WAITING requests at once, each from its first byte to its last."""

    def __init__(self, app: ASGIApp) -> None:
        self.app, self.requests = app, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse where so many are answered already."""
        if self.requests >= MOST_AT_ONCE + MOST_WAITING:
            await _refused(503, f"{MOST_WAITING} questions wait already")(scope, receive, send)
            return
        self.requests += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.requests -= 1


class _Server(uvicorn.Server):
    """Uvicorn's server, whose end ends the questions under way; its own waits for them."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self.server_state.tasks:
            task.cancel()
        await super().shutdown(sockets)


def _refused(code: int, why: str) -> Response:
    return PlainTextResponse(why, code, HEADERS | {"Connection": "close"})


def _listening(port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((LOOPBACK, port))
        listening.listen()
    except OSError as error:
        listening.close()
        raise UsageError(f"cannot listen on port {port}: {error.strerror}", "name another with {port}") from None
    return listening


@cache
def live_document() -> tuple[str, str]:
    """The page as HTML, and its policy: its own script and style, those of the pages in its frame, and this server."""
    names = ("page.html", "page.js", "page.css")
    body, script, style = (files("attnscope.serve").joinpath(name).read_text("utf-8") for name in names)
    sources = (script.encode(), bundle("bundle.js"), style.encode(), bundle("bundle.css"))
    hashes = [f"'sha256-{b64encode(sha256(source).digest()).decode()}'" for source in sources]
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes[:2])}; style-src {' '.join(hashes[2:])}; "
        "img-src data: blob:; connect-src 'self'; frame-src blob:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    for place, part in (("{version}", html.escape(__version__)), ("/*style*/", style), ("/*script*/", script)):
        body = body.replace(place, part)
    return body, policy
