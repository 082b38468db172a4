"""What `ablate` shows on a terminal of a screen, of pairs and of a pruning."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attnscope.cli import output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table as RichTable

    from attnscope.study.ablation.gradient import Screen
    from attnscope.study.ablation.pairs import Pairs
    from attnscope.study.ablation.prune import Step


def screen_sheet(screen: Screen, top: int | None) -> RichTable:
    """The heads, largest signed effect first."""
    sheet = _sheet("head", "signed", "|gradient|", "ablated")
    for place in np.argsort(-screen.signed_N, kind="stable")[:top]:
        values = (screen.signed_N[place], screen.size_N[place], screen.ablated_N[place])
        sheet.add_row(_named(screen.heads[place]), signed(values[0]), nats(values[1]), signed(values[2]))
    return sheet


def trusted(screen: Screen) -> str:
    """How well the screen orders the heads that were ablated too."""
    tried = int(np.isfinite(screen.ablated_N).sum())
    first, second = screen.correlations
    return f"rank correlation with ablation of {tried} heads: signed {first:+.2f}, |gradient| {second:+.2f}"


def pairs_sheet(pairs: Pairs, top: int | None) -> RichTable:
    """The pairs, largest synergy first."""
    count, found = len(pairs.pairs), pairs.effects
    sheet = _sheet("heads", "pair", "sum", f"synergy [95 %, all {count}]", "p")
    for place in np.argsort(-found.effect, kind="stable")[:top]:
        interval = f"{signed(found.effect[place])} [{nats(found.low_all[place])}, {nats(found.high_all[place])}]"
        heads = " ".join(map(_named, pairs.pairs[place]))
        p = found.p[place]
        shown = "<.001" if p < 0.001 else f"{p:.3f}".lstrip("0")
        sheet.add_row(heads, signed(found.score[place]), signed(found.null[place]), interval, shown)
    return sheet


def prune_sheet(steps: Sequence[Step], intact: float, top: int | None) -> RichTable:
    """The steps, in their order."""
    sheet = _sheet("step", "head that goes", "nats", "over intact")
    for number, step in enumerate(steps[:top], start=1):
        sheet.add_row(str(number), _named((step.layer, step.head)), nats(step.loss), signed(step.loss - intact))
    return sheet


def nats(value: float) -> str:
    """Three decimals, or a dash where there is nothing."""
    return f"{value:.3f}" if value == value else "-"


def signed(value: float) -> str:
    """The same with its sign."""
    return f"{value:+.3f}" if value == value else "-"


def _named(head: tuple[int, int]) -> str:
    return f"L{head[0]}H{head[1]}"


def _sheet(*titles: str) -> RichTable:
    sheet = output.sheet()
    for place, title in enumerate(titles):
        sheet.add_column(title, justify="left" if place == 0 or "[" in title else "right", no_wrap=True)
    return sheet
