"""Which logit `attnscope.why` takes apart, and how the text is read; without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from attnscope.errors import UsageError
from attnscope.inputs.tokens import check_expression
from attnscope.observe.request import CaptureSpec as Ask
from attnscope.observe.request import Request

if TYPE_CHECKING:
    from attnscope.inputs.pictures import PictureSource
    from attnscope.inputs.prompt import Side
    from attnscope.observe.request import Text

MEAN = "mean"
SIDES, ROWS = ("key", "query", "both"), ("component", "tokens")


@dataclass(frozen=True, kw_only=True)
class WhyOptions:
    """Which logit is taken apart, and how.

    query, key: one token each, as `5`, `last` or `bank#2`; without a key the one that gets most weight. against:
    `mean`, of all keys that the query sees, or another key. side: what the components wrote into: the key, the query,
    or both, in pairs. by: `tokens` splits what a head wrote by the tokens that it read. verify: replace the components
    with the largest contrasts one by one, and make the logit again. define: names for tokens. chat, truncate, target,
    picture, generate, pair: how the text is read, as of `attnscope.observe.request.Ask`.
    """

    query: str | int = "last"
    key: str | int | None = None
    against: str | int = MEAN
    side: Literal["key", "query", "both"] = "key"
    by: Literal["component", "tokens"] = "component"
    verify: bool = False
    define: Mapping[str, str] | None = None
    chat: bool = False
    truncate: Side | None = None
    target: str | Sequence[int] | None = None
    picture: PictureSource | Sequence[PictureSource] | None = None
    generate: int | None = None
    pair: str | None = None

    def check(self) -> None:
        """Raise UsageError for what no text makes right."""
        for name, value, known in (("side", self.side, SIDES), ("by", self.by, ROWS)):
            if value not in known:
                raise UsageError(f"expected {name} {', '.join(known)}, got {value!r}", f"use {{{name}={known[0]}}}")
        if self.side == "both" and (self.by == "tokens" or self.verify):
            raise UsageError("side=both goes neither with by=tokens nor with verify", "use {side=key}")
        if self.by == "tokens" and self.verify:
            raise UsageError("by=tokens does not go with verify", "leave out {by=tokens}")
        for expression in (self.query, self.key, self.against):
            if expression is not None and expression != MEAN:
                check_expression(str(expression), self.define or {})


def ask_of(text: Text, asked: WhyOptions) -> Ask:
    """How the text is read, and which of its tokens are meant."""
    how = {name: getattr(asked, name) for name in ("chat", "truncate", "target", "picture", "generate", "pair")}
    return Ask(text, request(asked), **how)


def request(asked: WhyOptions) -> Request:
    """Which tokens are meant."""
    key = None if asked.key is None else str(asked.key)
    return Request(query=str(asked.query), key=key, define=asked.define or {})
