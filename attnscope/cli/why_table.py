"""What `why` shows on a terminal: a row per component, and what to know."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from attnscope.utils import display as cells
from attnscope.utils.display import Column, Sheet

if TYPE_CHECKING:
    from attnscope.api.why_record import Why

nats = partial(cells.signed, decimals=3)
CONTRIBUTION = "contribution: what it gives to the logit, each norm with the scale that it has"
SHARE = "share: of the sum of contrasts"
REST = "rest: what else a block writes, its MLP and biases; bias: of the layer itself"
SINKS = "this head has a sink logit, which what all keys share competes with: the row `all keys`"
SINKS_UNSEEN = "this head has a sink logit: what all keys share matters, too, and no contrast of two keys shows it"
TRUE = "true: what the logit loses where the component is its mean over the same keys, norms as they are"


def to_know(found: Why) -> list[str]:
    """What a reader of the table has to know, and how exact it is."""
    parts = found.parts
    compared = (
        f"its mean over {parts.visible} visible key{'s' * (parts.visible > 1)}"
        if parts.asked.against is None
        else f"that of {found.others}"
    )
    lines = [CONTRIBUTION, f"contrast: the contribution less {compared}"]
    shares = bool((parts.share_N == parts.share_N).any())
    lines.append(SHARE if shares else "there is no share: the contrasts sum to less than 0.1")
    lines.append(REST)
    if parts.asked.verify:
        rank = found.rank_correlation
        lines.append(f"{TRUE}; rank correlation with the contrast {'-' if rank is None else cells.number(rank)}")
    if parts.softcap is not None:
        lines.append(f"the logit is taken before its cap at {parts.softcap:g}")
    if parts.sinks:
        lines.append(SINKS if parts.asked.against is None else SINKS_UNSEEN)
    difference = cells.power(abs(parts.sum - parts.logit))
    lines.append(f"the contributions sum to {parts.sum:.4f}, the logit is {parts.logit:.4f}: {difference} apart")
    return [*lines, found.line]


def logit_sheet(found: Why, top: int | None) -> Sheet:
    """A row per component or pair, the largest contrasts first."""
    rows = found.table().to_pylist()
    read, pairs, tried = (any(row[name] is not None for row in rows) for name in ("position", "other", "true"))
    # The table of data has positions alone: here a token is named by its words, too.
    tokens = [found.read_by(found.parts.components[row]) for row in found.order]
    rows = [{**row, "from": token} for row, token in zip(rows, tokens, strict=True)]
    columns = [
        Column("component", align="left"),
        *[Column("from", align="left")] * read,
        *[Column("query", name="other", align="left")] * pairs,
        Column("contribution", nats),
        Column("contrast", nats),
        Column("share", partial(cells.number, decimals=3)),
        *[Column("true", nats)] * tried,
    ]
    return Sheet(rows[:top], columns)
