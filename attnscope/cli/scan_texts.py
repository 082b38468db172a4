"""`attnscope scan --texts`: what they take, and what a head looks like on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnscope import cells

if TYPE_CHECKING:
    from attnscope.study.atlas.texts import OnTexts
    from attnscope.text.prompt import Prompt


def texts_cost(prompts: Sequence[Prompt], layers: int) -> str:
    """What reading them takes, and how many were cut."""
    cut = sum(prompt.removed > 0 for prompt in prompts)
    longest = max(map(len, prompts))
    said = f" ({cut} cut to {longest})" if cut else ""
    return f"{len(prompts)} texts{said}: {sum(map(len, prompts))} tokens x {layers} layers"


def looked(found: OnTexts, head: tuple[int, int]) -> str:
    """`sink 82 %`: the role that a head has on most texts that show one."""
    shares = {look: share for look, share in found.shares.get(head, {}).items() if look != "-"}
    return next((f"{look} {cells.percent(100 * share)}" for look, share in shares.items()), cells.MISSING)
