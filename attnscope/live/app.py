"""The addresses of the live page, and its server in a thread: `with LivePage(held, port) as address: ...`."""

from __future__ import annotations

import asyncio
import html
import json
import logging
import secrets
import socket
import threading
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import cache
from hashlib import sha256
from importlib.resources import files

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, request_response
from starlette.types import ASGIApp, Receive, Scope, Send

from attnscope._version import __version__
from attnscope.errors import AttnscopeError, UsageError
from attnscope.live.asking import answer
from attnscope.live.guard import Guard, Strangers, protocol
from attnscope.live.question import LiveQuestion
from attnscope.model.options import LoadOptions
from attnscope.utils.schema import from_json as typed
from attnscope.viewer.page import bundle

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
        """A question; its answer comes as `attnscope.live.asking.answer` says."""
        try:
            question = typed(LiveQuestion, json.loads(await _body(request)), "question")
        except AttnscopeError as error:
            return _refused(400, str(error))
        except (ValueError, RecursionError):
            return _refused(400, "expected a question in JSON")
        except TooLongError:
            return _refused(413, f"a question has at most {MOST_BODY} bytes")
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


class TooLongError(Exception):
    """The body of a request has no end in sight."""


async def _body(request: Request) -> bytes:
    """The body. Raises TooLongError for one that is too long, TimeoutError for one that does not come."""
    if int(request.headers.get("content-length") or 0) > MOST_BODY:
        raise TooLongError
    data = bytearray()
    async with asyncio.timeout(BODY_SECONDS):
        async for part in request.stream():
            data += part
            if len(data) > MOST_BODY:
                raise TooLongError
    return bytes(data)


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
    script, style = (files("attnscope.live").joinpath(name).read_text("utf-8") for name in ("page.js", "page.css"))
    body = files("attnscope.live").joinpath("page.html").read_text("utf-8")
    scripts = [_hash(script.encode()), _hash(bundle("bundle.js"))]
    styles = [_hash(style.encode()), _hash(bundle("bundle.css"))]
    policy = (
        f"default-src 'none'; script-src {' '.join(scripts)}; style-src {' '.join(styles)}; img-src data: blob:; "
        "connect-src 'self'; frame-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    parts = {"{version}": html.escape(__version__), "/*style*/": style, "/*script*/": script}
    for place, part in parts.items():
        body = body.replace(place, part)
    return body, policy


def _hash(text: bytes) -> str:
    return f"'sha256-{b64encode(sha256(text).digest()).decode()}'"
