"""All things that can be kept. Another one is a file of this folder, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attnscope.keep import heads, maps, operands, per_token, relations, rollout, spans, weights
from attnscope.keep.request import Asked, Request
from attnscope.keep.thing import Thing

HEADS = "heads"
THINGS: Mapping[str, Callable[[Sequence[Asked], Request], Thing | None]] = {
    HEADS: heads.wanted,
    "relations": relations.wanted,
    "maps": maps.wanted,
    "weights": weights.wanted,
    "operands": operands.wanted,
    "rollout": rollout.wanted,
    "per_token": per_token.wanted,
    "spans": spans.wanted,
}


def wanted(asked: Sequence[Asked], request: Request) -> dict[str, Thing]:
    """What is to be kept of one stack over some texts, by its name.

    A thing that a field of the request is named after is kept where that field is set; others are always kept.
    """
    found = {name: of(asked, request) for name, of in THINGS.items() if getattr(request, name, True)}
    return {name: one for name, one in found.items() if one is not None}
