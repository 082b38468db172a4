"""Who may ask the live page: a browser of this machine, from the page itself, that has the token.

Every user of the machine can connect to a port of it, so a question needs a token. The token is in the printed address,
after the `#`, which a browser sends to no server, and then in a header of every question.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from hmac import compare_digest
from typing import TYPE_CHECKING, Any

from starlette.responses import PlainTextResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

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
        refusal = self.refusal(scope["path"], _headers(scope))
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
        if headers.get("origin", [f"http://{host[0]}"]) != [f"http://{host[0]}"]:
            return 403, "another page asks"
        if headers.get("sec-fetch-site", ["same-origin"])[0] not in ("same-origin", "none"):
            return 403, "another page asks"
        token = headers.get("authorization", [""])[0].encode()
        if path not in OPEN_PATHS and not compare_digest(token, f"Bearer {self.token}".encode()):
            return 401, "the token is missing: open the address that attnscope serve printed"
        return None


def _headers(scope: Scope) -> dict[str, list[str]]:
    headers: dict[str, list[Any]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    return headers
