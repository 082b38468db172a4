"""`attnscope scan --texts`: what a head looks like on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnscope import cells

if TYPE_CHECKING:
    from attnscope.study.atlas.texts import OnTexts


def looked(found: OnTexts, head: tuple[int, int]) -> str:
    """`sink 82 %`: the role that a head has on most texts that show one."""
    shares = {look: share for look, share in found.shares.get(head, {}).items() if look != "-"}
    return next((f"{look} {cells.percent(100 * share)}" for look, share in shares.items()), cells.MISSING)
