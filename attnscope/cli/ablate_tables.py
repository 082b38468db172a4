"""What `ablate` shows on a terminal: of sets, of a screen, of pairs and of a pruning."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from attnscope.cli.intervals import Effect, interval_notes
from attnscope.cli.rounding import rounding_notes
from attnscope.studies.statistics import largest_first
from attnscope.utils import display as cells
from attnscope.utils.display import Column, Sheet

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from attnscope.studies.ablation import Ablation
    from attnscope.studies.ablation_search import Pairs, Screen, Step

SURE = (Column("p", cells.p_value), Column("positive", cells.percentage))  # how sure an effect is
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
    """What a reader of the table has to know."""
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


def sets_sheet(found: Ablation, top: int | None) -> Sheet:
    """A row per set: all its heads together; below it a row per head, alone, and one of the random sets."""
    table, rows = found.table().to_pylist(), list[dict[str, Any]]()
    together = {row["set"]: row for row in table if row["condition"] == "together"}
    names = list(dict.fromkeys(row["set"] for row in table))  # --each gives heads that are in no set
    for name in names[:top]:
        alone = [row for row in table if (row["condition"], row["set"]) == ("alone", name)]
        row, count = together.get(name), found.facts["random_sets"].get(name, 0)
        if row and name == row["heads"] and alone:  # one head, which its own name says
            row, alone = row | {"direct": alone[0]["direct"]}, []
        rows.append({**(row or {}), "name": name})
        costliest = _costliest(alone)
        rows += [{**head, "name": f"  {head['heads']}"} for head in costliest]
        if rest := [head["effect"] for head in alone if head not in costliest]:
            rows.append({"name": f"  … {len(rest)} more heads", "effect": _range(rest)})
        if row and count:
            ends = _range([row["random_low"], row["random_high"]])
            rows.append({"name": f"  random sets: {count}", "effect": f"99 %: {ends}", "p": row["p_random"]})
    columns = [
        Column("set and its heads", name="name", align="left"),
        Column("direct", lambda direct: "" if direct is None else cells.effect(direct)),
        Effect(f"effect [95 %, all {len(found.tested)}]" if found.has_intervals else "effect"),
        *SURE,
    ]
    return Sheet(rows, columns)


def _costliest(alone: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The heads of a set in their order; of many the costliest."""
    if len(alone) <= MANY:
        return alone
    kept = sorted(alone, key=lambda row: -row["effect"])[:MANY]
    return [row for row in alone if row in kept]


def _range(values: Sequence[float]) -> str:
    """The least and the largest: `0.00 to +0.02`."""
    return f"{cells.effect(min(values))} to {cells.effect(max(values))}"


def screen_sheet(screen: Screen, top: int | None) -> Sheet:
    """The heads, largest signed effect first."""
    rows = [
        {
            "head": cells.head_name(*screen.heads[place]),
            "signed": screen.signed_N[place],
            "|gradient|": screen.size_N[place],
            "ablated": screen.ablated_N[place],
        }
        for place in largest_first(screen.signed_N)[:top]
    ]
    columns = [Column("signed", signed), Column("|gradient|", nats), Column("ablated", signed)]
    return Sheet(rows, [Column("head", align="left"), *columns])


def trusted(screen: Screen) -> str:
    """How well the screen orders the heads that were ablated too."""
    tried = int((screen.ablated_N == screen.ablated_N).sum())  # not NaN
    first, second = screen.correlations
    said = f"rank correlation with ablation of {tried} heads, on the same sequences"
    return f"{said}: signed {first:+.2f}, |gradient| {second:+.2f}"


def pairs_sheet(pairs: Pairs, top: int | None) -> Sheet:
    """The pairs, largest synergy first."""
    rows = [
        {
            "heads": cells.head_names(pairs.pairs[place]),
            "pair": pairs.pair_SN[:, place].mean(),
            "sum": pairs.sum_SN[:, place].mean(),
            **{name: values[place] for name, values in pairs.statistics.items()},
        }
        for place in largest_first(pairs.statistics["effect"])[:top]
    ]
    costs = [Column("pair", cells.effect), Column("sum", cells.effect)]
    synergy = Effect(f"synergy [95 %, all {len(pairs.pairs)}]")
    return Sheet(rows, [Column("heads", align="left"), *costs, synergy, *SURE])


def prune_sheet(steps: Sequence[Step], intact: float, top: int | None) -> Sheet:
    """The steps, in their order."""
    rows = [
        {
            "step": str(number),
            "head": cells.head_name(step.layer, step.head),
            "nats": step.value,
            "over": step.value - intact,
        }
        for number, step in enumerate(steps[:top], start=1)
    ]
    columns = [Column("step", align="left"), Column("head that goes", name="head"), Column("nats", nats)]
    return Sheet(rows, [*columns, Column("over intact", signed, "over")])
