"""What `ablate` shows on a terminal: of sets, of a screen, of pairs and of a pruning."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from attnscope import cells
from attnscope.cli import output
from attnscope.cli.intervals import interval_notes, with_interval
from attnscope.cli.rounding import rounding_notes
from attnscope.study.statistics import largest_first

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from rich.table import Table as RichTable

    from attnscope.study.ablation.effects import Ablation
    from attnscope.study.ablation.pairs import Pairs
    from attnscope.study.ablation.prune import Step
    from attnscope.study.ablation.screen import Screen

MANY = 8  # heads of a set up to which each one has a row
nats, signed = partial(cells.number, decimals=3), partial(cells.signed, decimals=3)  # of one head or pair
EFFECT = (
    "effect: what is lost without the heads of the set, or without one alone; positive: in how many sequences; direct: "
    "what a head writes itself"
)
RANDOM = (
    "random sets: of as many heads, and where 99 % of them lie; p: (1 + those that cost as much as the set) / (1 + all)"
)
AT_ONCE = "other intervals and p: of all sets and heads of the table at once"
DRAWN = {
    "unnamed": "random sets are drawn from the heads that no set names; --controls all: from all",
    "all": "random sets are drawn from all heads",
}


def notes(found: Ablation) -> list[str]:
    """What a reader of the table has to know beside it."""
    facts = found.facts
    lines = [EFFECT] + [RANDOM] * any(facts["random_sets"].values()) + [AT_ONCE] * found.has_intervals
    lines += [f"intact {facts['intact']:.3f} {facts['measure']['unit']}, {len(found.intact_S)} sequences"]
    if facts["direct"] is not None:
        lines.append(f"{'direct effects are' if found.direct else 'no direct effects:'} {facts['direct']}")
    if facts["replacement"] == "resample":
        lines.append("resample misinforms the model with another sequence's output: it costs more than zero does")
    if facts["unshared"]:
        lines.append(f"the passes were unshared: {facts['unshared']}")
    lines += interval_notes(found.statistics, "sequences") + rounding_notes(facts, found.statistics["effect"])
    if any(facts["random_sets"].values()):
        lines.append(DRAWN[facts["controls"]])
    few = [f"{name} {count}" for name, count in facts["random_sets"].items() if count < facts["random_asked"]]
    if few:
        lines.append(f"fewer random sets than {facts['random_asked']}, for lack of other heads: {', '.join(few)}")
    return lines


def first_sets(table: pa.Table, limit: int | None) -> pa.Table:
    """The rows of so many sets, the first ones; of all where limit is None."""
    names = table["set"].to_pylist()
    kept = list(dict.fromkeys(names))[:limit]
    return table.slice(0, sum(name in kept for name in names))


def sets_sheet(found: Ablation, top: int | None) -> RichTable:
    """A row per set: all its heads together; below it a row per head, alone, and one of the random sets."""
    sheet, rows = output.sheet(), found.table().to_pylist()
    effect = f"effect [95 %, all {len(found.tested)}]" if found.has_intervals else "effect"
    for title in ("set and its heads", "direct", effect, "p", "positive"):
        sheet.add_column(title, no_wrap=True, justify="left" if title in ("set and its heads", effect) else "right")
    together = {row["set"]: row for row in rows if row["condition"] == "together"}
    names = list(dict.fromkeys(row["set"] for row in rows))  # --each gives heads that are in no set
    for name in names[:top]:
        alone = [one for one in rows if (one["condition"], one["set"]) == ("alone", name)]
        row, count = together.get(name), found.facts["random_sets"].get(name, 0)
        if row and name == row["heads"] and alone:  # one head, which its own name says
            row, alone = row | {"direct": alone[0]["direct"]}, []
        _add(sheet, name, row)
        shown = _costliest(alone)
        for one in shown:
            _add(sheet, f"  {one['heads']}", one)
        if rest := [one["effect"] for one in alone if one not in shown]:
            sheet.add_row(f"  … {len(rest)} more heads", "", _range(rest))
        if row and count:
            ends = _range([row["random_low"], row["random_high"]])
            sheet.add_row(f"  random sets: {count}", "", f"99 %: {ends}", cells.p_value(row["p_random"]))
    return sheet


def _add(sheet: RichTable, name: str, row: dict[str, Any] | None) -> None:
    """What a set costs, or a head alone, with its interval, an open end of it a dash; the name alone of what has no
    row."""
    if row is None:
        sheet.add_row(output.one_line(name))
        return
    direct = "" if row["direct"] is None else cells.effect(row["direct"])
    sheet.add_row(
        output.one_line(name), direct, with_interval(row), cells.p_value(row["p"]), cells.percentage(row["positive"])
    )


def _costliest(alone: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The heads of a set in their order; of many the costliest."""
    if len(alone) <= MANY:
        return alone
    kept = sorted(alone, key=lambda row: -row["effect"])[:MANY]
    return [row for row in alone if row in kept]


def _range(values: Sequence[float]) -> str:
    """The least and the largest: `0.00 to +0.02`."""
    return f"{cells.effect(min(values))} to {cells.effect(max(values))}"


def screen_sheet(screen: Screen, top: int | None) -> RichTable:
    """The heads, largest signed effect first."""
    sheet = _sheet("head", "signed", "|gradient|", "ablated")
    for place in largest_first(screen.signed_N)[:top]:
        values = signed(screen.signed_N[place]), nats(screen.size_N[place]), signed(screen.ablated_N[place])
        sheet.add_row(cells.head_name(*screen.heads[place]), *values)
    return sheet


def trusted(screen: Screen) -> str:
    """How well the screen orders the heads that were ablated too."""
    tried = int((screen.ablated_N == screen.ablated_N).sum())  # not NaN
    first, second = screen.correlations
    said = f"rank correlation with ablation of {tried} heads, on the same sequences"
    return f"{said}: signed {first:+.2f}, |gradient| {second:+.2f}"


def pairs_sheet(pairs: Pairs, top: int | None) -> RichTable:
    """The pairs, largest synergy first."""
    count, found = len(pairs.pairs), pairs.statistics
    sheet = _sheet("heads", "pair", "sum", f"synergy [95 %, all {count}]", "p", "positive")
    for place in largest_first(found["effect"])[:top]:
        row = {name: values[place] for name, values in found.items()}
        costs = (cells.effect(of_SN[:, place].mean()) for of_SN in (pairs.pair_SN, pairs.sum_SN))
        shown = cells.p_value(row["p"]), cells.percentage(row["positive"])
        sheet.add_row(cells.head_names(pairs.pairs[place]), *costs, with_interval(row), *shown)
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
