"""What `ablate` shows on a terminal: of sets, of a screen, of pairs and of a pruning."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from attnscope import cells
from attnscope.cli import output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table as RichTable

    from attnscope.study.ablation.effects import Ablation
    from attnscope.study.ablation.pairs import Pairs
    from attnscope.study.ablation.prune import Step
    from attnscope.study.ablation.screen import Screen

MANY = 4  # heads of a set up to which each one's numbers are shown
nats, signed = partial(cells.number, decimals=3), partial(cells.signed, decimals=3)  # of one head or pair
DRAWN = {
    "unnamed": "random sets are drawn from the heads that no set names; --controls all: from all",
    "all": "random sets are drawn from all heads",
}


def notes(found: Ablation) -> list[str]:
    """What a reader of the table has to know beside it."""
    facts = found.facts
    lines = [f"intact {facts['intact']:.3f} {facts['measure']['unit']}, {len(found.intact_S)} sequences"]
    if facts["direct"] is not None:
        lines.append(f"{'direct effects are' if found.direct else 'no direct effects:'} {facts['direct']}")
    if facts["replacement"] == "resample":
        lines.append("resample misinforms the model with another sequence's output: it costs more than zero does")
    if facts["unshared"]:
        lines.append(f"the passes were unshared: {facts['unshared']}")
    if facts["spread"] is not None:
        unit = facts["measure"]["unit"].partition(" per ")[0]
        lines.append(f"two intact rows of one pass differ by up to {facts['spread']:.1g} {unit}: less is noise")
    if any(facts["random_sets"].values()):
        lines.append(DRAWN[facts["controls"]])
    few = [f"{name} {count}" for name, count in facts["random_sets"].items() if count < facts["random_asked"]]
    if few:
        lines.append(f"fewer random sets than {facts['random_asked']}, for lack of other heads: {', '.join(few)}")
    return lines


def sets_sheet(found: Ablation, top: int | None) -> RichTable:
    """A row per set: each of its heads alone, all together, and where random sets lie."""
    sheet, rows = output.sheet(), found.table().to_pylist()
    for title in ("set", "heads", "direct", "alone", "together [95 %]", "p", "random sets: 99 %", "above"):
        sheet.add_column(title, no_wrap=True, justify="right" if title in ("p", "above") else "left")
    together = [row for row in rows if row["condition"] == "together"]
    for row in together[:top]:
        alone = [one for one in rows if (one["condition"], one["set"]) == ("alone", row["set"])]
        heads = row["heads"].split()
        sheet.add_row(
            output.one_line(row["set"]),
            row["heads"] if len(heads) <= MANY else f"{len(heads)} heads",
            _each([one["direct"] for one in alone]),
            _each([one["effect"] for one in alone]),
            f"{cells.effect(row['effect'])} [{cells.number(row['low'])}, {cells.number(row['high'])}]",
            cells.p_value(row["p"]),
            _range_of(row, found.facts["random_sets"][row["set"]]),
            cells.percent(row["percentile"]),
        )
    return sheet


def screen_sheet(screen: Screen, top: int | None) -> RichTable:
    """The heads, largest signed effect first."""
    sheet = _sheet("head", "signed", "|gradient|", "ablated")
    for place in (-screen.signed_N).argsort(kind="stable")[:top]:
        values = signed(screen.signed_N[place]), nats(screen.size_N[place]), signed(screen.ablated_N[place])
        sheet.add_row(cells.head_name(*screen.heads[place]), *values)
    return sheet


def trusted(screen: Screen) -> str:
    """How well the screen orders the heads that were ablated too."""
    tried = int((screen.ablated_N == screen.ablated_N).sum())  # not NaN
    first, second = screen.correlations
    return f"rank correlation with ablation of {tried} heads: signed {first:+.2f}, |gradient| {second:+.2f}"


def pairs_sheet(pairs: Pairs, top: int | None) -> RichTable:
    """The pairs, largest synergy first."""
    count, found = len(pairs.pairs), pairs.effects
    sheet = _sheet("heads", "pair", "sum", f"synergy [95 %, all {count}]", "p")
    for place in (-found.effect).argsort(kind="stable")[:top]:
        interval = f"{signed(found.effect[place])} [{nats(found.low_all[place])}, {nats(found.high_all[place])}]"
        heads, p = cells.head_names(pairs.pairs[place]), cells.p_value(found.p[place])
        sheet.add_row(heads, signed(found.score[place]), signed(found.null[place]), interval, p)
    return sheet


def prune_sheet(steps: Sequence[Step], intact: float, top: int | None) -> RichTable:
    """The steps, in their order."""
    sheet = _sheet("step", "head that goes", "nats", "over intact")
    for number, step in enumerate(steps[:top], start=1):
        name = cells.head_name(step.layer, step.head)
        sheet.add_row(str(number), name, nats(step.value), signed(step.value - intact))
    return sheet


def _sheet(*titles: str) -> RichTable:
    sheet = output.sheet()
    for place, title in enumerate(titles):
        sheet.add_column(title, justify="left" if place == 0 or "[" in title else "right", no_wrap=True)
    return sheet


def _each(values: list[float | None]) -> str:
    """The values of a few heads, or the least and the largest of many."""
    known = [value for value in values if value is not None]
    if len(known) <= MANY:
        return " ".join(map(cells.effect, known)) or cells.MISSING
    return f"{cells.effect(min(known))} to {cells.effect(max(known))}"


def _range_of(row: dict[str, Any], count: int) -> str:
    """How many random sets there are, and where 99 % of them lie: `6: 0.00 to +0.02`."""
    ends = cells.effect(row["random_low"]), cells.effect(row["random_high"])
    return f"{count}: {' to '.join(ends)}" if count else cells.MISSING
