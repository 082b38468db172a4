"""What the studies show on a terminal: of each its table as a `Sheet`, and what a reader has to know of it as lines.

First what the tables share, effects with their intervals. Then ablate with its screen, pairs and pruning; the budgets
of `budgets`; compare; knockout with the text in colours; patch; scan, also over checkpoints; why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from attnscope.errors import listed
from attnscope.interventions.spec import SHARED
from attnscope.metrics.metrics import METRICS
from attnscope.model.selection import is_linear, stack_of, written_heads
from attnscope.studies.intervals import FEWEST, fewest_for_p
from attnscope.studies.statistics import largest_first
from attnscope.utils import display as cells
from attnscope.utils.display import Column, Row, Sheet, number_of

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

    from attnscope.api.depth import Depth
    from attnscope.api.why import Why
    from attnscope.cli.output import Top
    from attnscope.figures.terminal import Prose
    from attnscope.model.geometry import Geometry
    from attnscope.model.selection import HeadIndex
    from attnscope.studies.ablation import Ablation
    from attnscope.studies.ablation_search import Pairs, Pruning, Screen
    from attnscope.studies.atlas import Atlas, Finding
    from attnscope.studies.budgets import BudgetCosts
    from attnscope.studies.comparison import Comparison
    from attnscope.studies.head_distances import OnTexts
    from attnscope.studies.knockout_records import KnockoutResult, NullKind
    from attnscope.studies.patching import PatchedPairs

MOST_NAMED = 20  # heads that a line names


@dataclass(frozen=True)
class Effect(Column):
    """`+0.250 [0.200, 0.300]`: a mean and its interval, of as many digits; the mean alone of too few texts.

    ends: the names of the interval's ends in a study's table. format: of the mean: nats and logits have three decimals,
    masses and shares two.
    """

    format: Callable[[Any], str] = cells.effect
    name: str = "effect"
    align: Literal["left", "right"] = "left"
    ends: tuple[str, str] = ("low_all", "high_all")

    def cell(self, row: Row) -> str:
        """Mean and interval; a text stays as it is."""
        mean = super().cell(row)
        if isinstance(row.get(self.key, ""), str) or row["n"] < FEWEST:
            return mean
        low, high = (row[end] for end in self.ends)
        return f"{mean} {cells.interval(low, high, self.format)}"


def effects(title: str, count: int, intervals: bool, **how: Any) -> Effect:
    """A column of so many effects; without intervals they are aligned as numbers are."""
    if not intervals:
        return Effect(title, name=title, align="right", **how)
    return Effect(f"{title} [95 %{f', all {count}' * (count > 1)}]", name=title, **how)


def layers_without_attention(geometry: Geometry, what: str) -> list[str]:
    """A line of how many layers have no attention, and what follows for a study; none where all have it."""
    bare = sum(not layer.attention for layer in geometry.layers)
    return [f"{bare} of {len(geometry.layers)} layers have no attention, and {what}"] * bool(bare)


def unshared(facts: Mapping[str, Any]) -> list[str]:
    """A line of why passes could not share their first layers."""
    return [f"the passes were unshared: {facts['unshared']}"] if facts["unshared"] else []


ROUNDING = {"bfloat16": "0.4 %", "float16": "0.05 %"}  # of a number, at most: half of torch.finfo's eps


def rounding_notes(facts: Mapping[str, Any], effects: Iterable[float]) -> list[str]:
    """In half precision a line: how many effects are smaller than what two intact rows of one pass differ by.

    Both go through the same sums, so that they may be equal while an effect is not what float32 gives. facts: of a
    knockout, an ablation or budgets; effects: those of its table, NaN where there is none.
    """
    spread, dtype = facts["spread"], facts["dtype"]
    if spread is None:
        return []
    rounded = f"rounding to {dtype} is up to {ROUNDING[dtype]} of each number: --dtype float32 shows what it is worth"
    if spread == 0:
        return [f"two intact rows of one pass are equal, but {rounded}"]
    unit = facts["measure"]["unit"].partition(" per ")[0]
    known = [abs(effect) for effect in effects if effect == effect]
    below = f"{sum(effect < spread for effect in known)} of {len(known)} effects are smaller"
    return [f"two intact rows of one pass differ by up to {spread:.1g} {unit}, and {below}; {rounded}"]


def interval_notes(statistics: Mapping[str, np.ndarray], units: str = "texts") -> list[str]:
    """A line where several texts are too few for intervals, where ends are open, and where too few texts leave no p.

    statistics: the columns of `effect_columns`. units: what effects were measured on.
    """
    count_N, least = statistics["n"], fewest_for_p(len(statistics["n"]))
    enough_N = count_N >= FEWEST
    if not enough_N.any():
        return [f"no intervals: they need {FEWEST} {units}"] * int(count_N.max(initial=0) > 1)
    rows, ends = f"{int(enough_N.sum())} effects", np.isnan([statistics["low_all"], statistics["high_all"]])
    lines, opened = [], int((ends.any(0) & enough_N).sum())
    if opened:
        lines.append(f"{open_line(opened, rows, units)}; the written table has the median and its interval")
    if (enough_N & (count_N < least) & np.isnan(statistics["p"])).any():
        lines.append(f"no p under {least} {units}: it is of all {len(count_N)} effects at once")
    return lines


def open_line(opened: int, rows: str, units: str = "texts") -> str:
    """How many of some rows, as `24 effects`, have an interval with an open end, and why."""
    have = "has an open end" if opened == 1 else "have an open end"
    return f"{opened} of {rows} {have} ({cells.MISSING}): too few {units} carry the spread to bound the mean there"


words = partial(Column, align="left")  # names, not numbers
SURE = (Column("p", cells.p_value), Column("positive", cells.percentage))  # how sure an effect is
MANY = 8  # heads of a set up to which each one has a row
nats, signed = partial(cells.number, decimals=3), partial(cells.signed, decimals=3)  # of one head or pair


def ablation_notes(result: Ablation) -> list[str]:
    """What a reader of the table of sets has to know."""
    facts = result.facts
    has_random = any(facts["random_sets"].values())
    lines = [
        "effect: what is lost without the heads of the set, or without one alone; positive: in how many sequences; "
        "direct: what a head writes itself"
    ]
    if has_random:
        lines.append(
            "random sets: of as many heads, and where 99 % of them lie; p: (1 + those that cost as much as the set) / "
            "(1 + all)"
        )
    lines += ["other intervals and p: of all sets and heads of the table at once"] * result.has_intervals
    lines.append(f"intact {facts['intact']:.3f} {facts['measure']['unit']}, {len(result.intact_S)} sequences")
    if facts["direct"] is not None:
        lines.append(f"{'direct effects are' if result.direct else 'no direct effects:'} {facts['direct']}")
    if facts["replacement"] == "resample":
        lines.append("resample misinforms the model with another sequence's output: it costs more than zero does")
    lines += unshared(facts)
    lines += interval_notes(result.statistics, "sequences") + rounding_notes(facts, result.statistics["effect"])
    # The random sets are what the table is read against: from which heads they come, and where there were too few.
    if has_random:
        others = (
            "the heads that no set names; --controls all: from all" if facts["controls"] == "unnamed" else "all heads"
        )
        lines.append(f"random sets are drawn from {others}")
    few = [f"{name} {count}" for name, count in facts["random_sets"].items() if count < facts["random_asked"]]
    if few:
        lines.append(f"fewer random sets than {facts['random_asked']}, for lack of other heads: {', '.join(few)}")
    return lines


def sets_sheet(result: Ablation, top: int | None) -> Sheet:
    """A row per set: all its heads together; below it a row per head, alone, and one of the random sets."""
    table, rows = result.table().to_pylist(), list[dict[str, Any]]()
    together = {row["set"]: row for row in table if row["condition"] == "together"}
    names = list(dict.fromkeys(row["set"] for row in table))  # --each gives heads that are in no set
    for name in names[:top]:
        alone = [row for row in table if (row["condition"], row["set"]) == ("alone", name)]
        row, count = together.get(name), result.facts["random_sets"].get(name, 0)
        if row and name == row["heads"] and alone:  # one head, which its own name says
            row, alone = row | {"direct": alone[0]["direct"]}, []
        rows.append({**(row or {}), "name": name})
        # Of a set with many heads the costliest are listed, in the order of the set; the others are one row.
        costliest = sorted(alone, key=lambda row: -row["effect"])[:MANY]
        rows += [{**head, "name": f"  {head['heads']}"} for head in alone if head in costliest]
        if rest := [head["effect"] for head in alone if head not in costliest]:
            rows.append({"name": f"  … {len(rest)} more heads", "effect": _range(rest)})
        if row and count:
            ends = _range([row["random_low"], row["random_high"]])
            rows.append({"name": f"  random sets: {count}", "effect": f"99 %: {ends}", "p": row["p_random"]})
    columns = [
        words("set and its heads", name="name"),
        Column("direct", lambda direct: "" if direct is None else cells.effect(direct)),
        Effect(f"effect [95 %, all {len(result.tested)}]" if result.has_intervals else "effect"),
        *SURE,
    ]
    return Sheet(rows, columns)


def _range(values: Sequence[float]) -> str:
    """The least and the largest: `0.00 to +0.02`."""
    return f"{cells.effect(min(values))} to {cells.effect(max(values))}"


def screen_sheet(screen: Screen, top: int | None) -> Sheet:
    """The heads, largest signed effect first."""
    names = [cells.head_name(*screen.heads[place]) for place in largest_first(screen.signed_N)]
    rows = [{**row, "head": name} for row, name in zip(screen.table().to_pylist(), names, strict=True)]
    columns = [words("head"), Column("signed", signed), Column("|gradient|", nats, "size"), Column("ablated", signed)]
    return Sheet(rows[:top], columns)


def trusted(screen: Screen) -> str:
    """How well the screen orders the heads that were ablated too."""
    tried = int((screen.ablated_N == screen.ablated_N).sum())  # not NaN
    first, second = screen.correlations
    said = f"rank correlation with ablation of {tried} heads, on the same sequences"
    return f"{said}: signed {first:+.2f}, |gradient| {second:+.2f}"


def pairs_sheet(pairs: Pairs, top: int | None) -> Sheet:
    """The pairs, largest synergy first."""
    names = [cells.head_names(pairs.pairs[place]) for place in largest_first(pairs.statistics["effect"])]
    rows = [{**row, "heads": name} for row, name in zip(pairs.table().to_pylist(), names, strict=True)]
    costs = [Column("pair", cells.effect), Column("sum", cells.effect)]
    synergy = Effect(f"synergy [95 %, all {len(pairs.pairs)}]", name="synergy")
    return Sheet(rows[:top], [words("heads"), *costs, synergy, *SURE])


def prune_sheet(pruning: Pruning, top: int | None) -> Sheet:
    """The steps, in their order."""
    names = [cells.head_name(step.layer, step.head) for step in pruning.steps]
    rows = [{**row, "head": name} for row, name in zip(pruning.table().to_pylist(), names, strict=True)]
    columns = [words("step"), Column("head that goes", name="head"), Column("nats", nats, "loss")]
    return Sheet(rows[:top], [*columns, Column("over intact", signed, "effect")])


def budget_notes(result: BudgetCosts, geometry: Geometry) -> list[str]:
    """What a reader of the table has to know, which heads can bear each budget, and what was measured without one."""
    facts = result.facts
    lines = [
        f"effect: what is lost where these heads keep no other keys, in {result.unit}",
        "kept: the share of the keys a row sees that it keeps, mean over rows, heads and texts",
    ]
    if len(result.cases) >= FEWEST:
        positive = "positive: in how many texts something is lost"
        lines.append(f"intervals and p: of all rows at once, of bearable heads apart; {positive}")
    # A budget that chooses by weights does what no cache can, each in its way.
    kinds = {kind.partition(":")[0] for kind in result.kinds}
    lines += ["top:N knows the query of each row: a cache chooses before it, and loses more"] * ("top" in kinds)
    if kinds & {"top", "h2o"} and any(layer.kv_heads < layer.heads for layer in geometry.attention_layers):
        lines.append("top and h2o choose for each head: of a shared kv head a cache stores what any of its heads keeps")
    lines += layers_without_attention(geometry, "keep no keys")
    lines += interval_notes(result.statistics) + rounding_notes(facts, result.statistics["effect"]) + unshared(facts)
    lines += bearable_lines(result) if facts["over"] != "none" else []
    return [*lines, f"intact {facts['intact']:.3f} {result.unit}, {number_of(len(result.cases), 'text')}"]


def bearable_lines(result: BudgetCosts) -> list[str]:
    """The heads that can bear each budget, as --select takes them, which texts chose them, and what they lose together
    on the others."""
    below, first, texts = result.facts["below"], result.facts["choosing_texts"], len(result.cases)
    alone = {"heads": "alone", "kv": "by kv groups alone", "layers": "by layers alone"}[result.facts["over"]]
    by = "upper end of the interval for all at once; where few texts carry the loss, in every text"
    by = f"in every text: intervals take {FEWEST}" if texts < FEWEST else by
    on = f" on the first {first} texts" * bool(first)
    every = {head for case in result.asked for head in case.budget.heads}
    chosen = {case.budget.keep: place for place, case in enumerate(result.asked) if case.condition == "bearable"}
    rows, lines = dict(zip(result.order, result.table().to_pylist(), strict=True)), []
    for kind in result.kinds:
        heads: Sequence[HeadIndex] = () if first else result.bearing(kind, below)
        heads = result.asked[chosen[kind]].budget.heads if kind in chosen else heads
        line = f"{kind}: {len(heads)} of {len(every)} heads, {alone}, lose less than {below:g} {result.unit}{on} ({by})"
        lines.append(line + f": --select {written_heads(heads, result.widths)}" * bool(heads))
        if kind in chosen:
            together, worst = Effect("").cell(rows[chosen[kind]]), float(result.effect_SN[first:, chosen[kind]].max())
            lost = f"{together} on the other {texts - first} texts, {cells.effect(worst)} in the worst of them"
            lines.append(f"{kind}: together these lose {lost}")
    if not first:
        lines.append(f"what they lose together is another question: from {2 * FEWEST} texts on, half of them answer it")
    return lines


def budgets_sheet(result: BudgetCosts, top: int | None) -> Sheet:
    """A row per budget and set."""
    rows, intervals = result.table().to_pylist(), len(result.cases) >= FEWEST
    at_once = sum(row["condition"] != "bearable" for row in rows)
    heads = {case.budget.keep: case.budget.heads for case in result.asked if case.condition == "bearable"}
    # The heads that can bear a budget are many: how many they are says more than their names.
    rows = [
        {**row, "set": f"{len(heads[row['keep']])} bearable"} if row["condition"] == "bearable" else row for row in rows
    ]
    effect = Effect(f"effect [95 %, all {at_once}]" if intervals else "effect")
    columns = [words("keep"), words("set"), Column("kept", cells.share), effect, *SURE * intervals]
    return Sheet(rows[:top], columns)


SHOWN = ("previous_token", "induction", "sink", "entropy")  # metrics whose difference is in the table


def differences_sheet(result: Comparison, places: Sequence[int], width: int) -> Sheet:
    """The heads by divergence: as much of lost mass and of some metrics' differences as so many characters hold."""
    rows = [
        {
            "head": result.name(place),
            **{name: values[place] for name, values in vars(result.js).items()},
            "lost": result.lost_SN[:, place].mean(),
            "lost, other": result.other_lost_SN[:, place].mean(),
            **{name: result.differences[name].effect[place] for name in SHOWN},
        }
        for place in places
    ]
    divergence = Effect(
        "JS bits" + " [95 %]" * (result.texts >= FEWEST), cells.divergence, align="right", ends=("low", "high")
    )
    losses = [Column("lost", cells.number), Column("lost, other", cells.number)]
    apart = [divergence, *losses * bool(result.lost_SN.any() or result.other_lost_SN.any())]
    columns = [words("head"), *apart * result.has_divergence]  # beside a baseline there is none
    columns += [Column(f"Δ {METRICS[name].short}", cells.signed, name) for name in SHOWN]
    ends = accumulate(column.width(rows) for column in columns)
    return Sheet(rows, [column for column, end in zip(columns, ends, strict=True) if end <= width])


# What a cut is in a linear layer, by `how`.
WRITES = {
    "mask": "a linear layer has no mask: a cut token writes nothing into its state, and erases nothing of it; no other "
    "token has more weight instead; mass: |w| as a share of its row",
    "zero": "a linear layer has no softmax: the value of a cut token is 0 there; mass: |w| as a share of its row",
}
ALIKE: Mapping[NullKind, str] = {"permuted": "other keys", "heads": "other heads"}
NULLS = {
    "permuted": "other keys: where the same weights lie on other keys and are cut there, 95 % of the effects, and p",
    "heads": "other heads: their own strongest looks of like weight, and p of the effect per weight",
}


def knockout_notes(result: KnockoutResult, geometry: Geometry) -> list[str]:
    """What a reader of the table has to know, and what was measured without a cut."""
    intact = f"intact {result.facts['intact']:.3f} {result.facts['measure']['unit']}"
    return [*cautions(result, geometry), f"{intact}, {number_of(len(result.cases), 'text')}"]


def cautions(result: KnockoutResult, geometry: Geometry) -> list[str]:
    """How the numbers are read, and what they do not say."""
    facts, unit = result.facts, result.facts["measure"]["unit"]
    lines = [f"effect: what the answer loses without these edges, positive where the look helped, in {unit}"]
    at_once = "intervals and p: of all cuts at once; positive: in how many texts the look helped"
    lines += [at_once] * has_intervals(result) + _null_lines(result)
    lines.append("an edge is cut, and not what it carries: later layers and other positions may still bring that")
    if any(0 in case.keys for case in result.cases):
        lines.append("key 0 is often a sink: to cut it harms whatever the head does")
    if facts["emptied"]:
        lines.append(f"rows were left without keys and give 0, in {', '.join(facts['emptied'][:8])}")
    if any(is_linear(stack_of(layer)) for item in result.asked for layer, _ in item.cut.heads):
        lines.append(WRITES[facts["how"]])
    else:
        lines += layers_without_attention(geometry, "nothing is cut in them")
    lines += interval_notes(result.statistics)
    return lines + rounding_notes(facts, result.statistics["effect"]) + unshared(facts)


def _null_lines(result: KnockoutResult) -> list[str]:
    """What each null is, the least p that its draws can give, and why some cuts have none."""
    if not result.facts["random"]:
        return []
    from attnscope.studies.knockout import SEVERAL

    lines = []
    for kind, name in ALIKE.items():
        counts = [len(null.draws) for null in result.nulls[kind]]
        if any(counts):
            least = cells.p_value((2 if kind == "permuted" else 1) / (1 + max(counts)))
            lines.append(f"{NULLS[kind]}, at least {least} with {number_of(max(counts), 'draw')}")
        of, texts = f"of {number_of(len(result.asked), 'cut')}", ", in some texts or all" * (len(result.cases) > 1)
        lines += [
            f"no {name} to compare {count} {of} with{texts}: {why}"
            for why, count in result.facts["without_null"][kind].items()
            if why != SEVERAL
        ]
        if rounded := sum(map(bool, counts)) - result.table()[f"p_{kind}"].is_valid().to_numpy().sum():
            lines.append(f"no p against {name}, {rounded} {of}: all effects are within rounding")
    return lines


def knockout_sheet(result: KnockoutResult, top: int | None) -> RenderableType:
    """The table; above it, where keys were cut one by one, the text in the colours of their effects."""
    from rich.console import Group

    table = cuts_sheet(result, top)
    return Group(coloured(result), table) if result.facts["over"] == "keys" else table


def cuts_sheet(result: KnockoutResult, top: int | None) -> Sheet:
    """A row per cut."""
    rows, intervals = result.table().to_pylist(), has_intervals(result)
    columns = [words("cut", name="set"), Column("mass", nats), effects("effect", len(rows), intervals)]
    columns += SURE * intervals
    kinds = [kind for kind in ALIKE if any(row[f"n_{kind}"] for row in rows)]
    if intervals:  # they leave room for p alone
        columns += [Column(f"{ALIKE[kind].removeprefix('other ')}: p", cells.p_value, f"p_{kind}") for kind in kinds]
        return Sheet(rows[:top], columns)
    # The effects of other heads are per weight, which no interval of the table is.
    titles = {"permuted": "other keys: 95 %, p", "heads": "other heads: p"}
    for row in rows:
        row |= {"permuted": cells.p_value(row["p_permuted"]), "heads": cells.p_value(row["p_heads"])}
        if row["null_permuted"] is not None:  # else there are no such keys, and p alone
            row["permuted"] = f"{cells.interval(row['low_permuted'], row['high_permuted'])} {row['permuted']}"
    return Sheet(rows[:top], [*columns, *(Column(titles[kind], name=kind) for kind in kinds)])


def has_intervals(result: KnockoutResult) -> bool:
    """Whether there are texts enough for an interval of any effect."""
    return bool((result.statistics["n"] >= FEWEST).any())


def coloured(result: KnockoutResult) -> Prose:
    """The text, each key by what its cut costs; keys that were not cut, or that no row sees, have no colour."""
    from attnscope.figures.colours import Limits
    from attnscope.figures.terminal import Prose
    from attnscope.studies.knockout_records import key_name

    case = result.cases[0]
    effect_T = result.by_token()
    largest = int(np.nan_to_num(effect_T, nan=-np.inf).argmax())
    legend = f"largest {cells.effect(effect_T[largest])} {key_name(case, largest)}, »query«"
    marked = {place: "query" for place in case.queries if place < len(case.prompt)}
    limits = Limits(0.0, max(float(np.nanmax(effect_T)), 1e-9))
    title = f"{result.facts['measure']['unit']} lost without each key in {result.where}"
    return Prose(case.prompt.plain, effect_T, limits, marked=marked, summed=False, title=title, legend=legend)


def patch_notes(result: PatchedPairs) -> list[str]:
    """What a reader of the table has to know, and what was measured without a patch."""
    facts, unit, intervals = result.facts, result.facts["measure"]["unit"], has_ends(result)
    # What each column is, those alone that the table has.
    lines = [
        f"effect: what the answer loses where the heads are as in the corrupted text, in {unit}",
        "restored: what the answer of the corrupted text gains where they are as in TEXT",
    ]
    if result.gap is not None:
        lines.append("share: of the gap between the two texts, 0 as the text that is patched, 1 as the other")
    else:
        lines.append(f"there is no share: {result.no_share}")
    lines += ["intervals of effects and p hold for all patches at once, those of shares for each alone"] * intervals
    lines += ["positive: in how many pairs the effect is above 0"] * (intervals and result.gap is None)
    if result.gap is not None and result.gap < 0:
        lines.append("the corrupted text makes the answer better: there is nothing to lose by it")
    shares = facts["what"] in SHARED and not is_linear(facts["stack"])  # in a linear layer each has values of its own
    lines += ["the heads of a kv group share keys and values, and are patched together"] * shares
    if result.random:
        row = result.table().to_pylist()[0]
        p = f"p {cells.p_value(row['p_random'])}, (1 + those that cost as much) / (1 + all)"
        lines.append(f"{number_of(row['n_random'], 'set')} of as many other heads: {p}")
    if result.estimates is not None:
        rank = facts["rank_correlation"]
        order = "they are equal, or too few for an order"
        order = order if rank is None else f"rank correlation with what was measured {rank:.2f}"
        lines.append(f"estimate: to first order, from one backward pass; {facts['tried']} patches were run: {order}")
    # What the numbers do not say.
    if any(pair.alike for pair in result.pairs):
        lines.append("a text that is patched from itself loses 0, and was not run")
    lines += rounding_notes(facts, result.statistics["effect"]) + interval_notes(result.statistics, "pairs")
    lines += unshared(facts)
    intact, corrupted = f"intact {facts['intact']:.3f}", f"corrupted {facts['corrupted']:.3f} {unit}"
    return [*lines, f"{intact}, {corrupted}, {number_of(len(result.pairs), 'pair')}"]


def patch_sheet(result: PatchedPairs, top: int | None) -> Sheet:
    """A row per patch."""
    rows = result.table().to_pylist()
    intervals, shares, estimates = has_ends(result), result.gap is not None, result.estimates is not None
    columns: list[Column] = [words("patch", name="set"), effects("effect", len(rows), intervals)]
    columns += [Column("p", cells.p_value)] * intervals
    if shares:
        lost = Column("share", cells.number, "normalised")
        if not estimates:  # which take the room of the interval
            lost = effects("share", 1, intervals, ends=("normalised_low", "normalised_high"))
            lost = replace(lost, format=cells.number, name="normalised")
        columns.append(lost)
        columns += [Column("restored", cells.effect), Column("share", cells.number, "restored_normalised")]
    else:
        columns += [Column("positive", cells.percentage)] * intervals
        columns.append(effects("restored", len(rows), intervals, ends=("restored_low_all", "restored_high_all")))
    columns += [Column("estimate", cells.effect)] * estimates
    return Sheet(rows[:top], columns)


def has_ends(result: PatchedPairs) -> bool:
    """Whether an effect has an end of an interval."""
    return not np.isnan([result.statistics["low_all"], result.statistics["high_all"]]).all()


WIDE = 108  # a narrower screen shows one null alone, and roles below each other


def scanned_sheet(atlas: Atlas, probe: str | None, top: int | None, read: OnTexts | None, width: int) -> Group:
    """The heads as was asked; below them what each looks like on texts, where some were read."""
    from rich.console import Group

    heads = named_sheet(atlas, top) if probe is None else probe_sheet(atlas, contrasts(atlas, probe), top, width)
    if read is None:
        return Group(heads)
    # A second table, since a text may show a head in another role than the probes that named it.
    rows = [
        {"head": cells.head_name(*head), "roles": _roles(atlas, head), "text role": looked(read, head)}
        for head in atlas.heads[:top]
    ]
    return Group(heads, Sheet(rows, [*map(words, ("head", "roles", "text role"))]))


def _roles(atlas: Atlas, head: HeadIndex, between: str = " ") -> str:
    """The roles that probes gave a head."""
    return between.join(atlas.roles[head]) or cells.MISSING


def named_sheet(atlas: Atlas, top: int | None) -> Sheet:
    """A row per head and role: the probe that named it, its score and null, and the effect's interval."""
    from attnscope.studies.atlas import MARK, named_by

    rows: list[Row] = []
    uniform = _near_uniform(atlas)
    for place in _named(atlas)[:top]:
        head = atlas.heads[place]
        name = cells.head_name(*head)
        for role in atlas.roles[head]:
            finding = named_by(role, atlas.findings, place)
            rows.append({"head": name, "role": role, "named by": finding.probe, **_numbers(finding, place)})
        if name in uniform:
            rows.append({"head": name, "role": MARK.role, "named by": "JS to uniform", "score": uniform[name]})
    columns = [*map(words, ("head", "role", "named by")), Column("score", cells.number), Column("null", cells.number)]
    return Sheet(rows, [*columns, Effect(f"effect\n[95 %, all {len(atlas.heads)}]", cells.signed)])


def probe_sheet(atlas: Atlas, shown: Sequence[Finding], top: int | None, width: int) -> Sheet:
    """Every head, those with a role first, then by effect: the probe's score, its nulls, and the effect's interval."""
    first, wide = shown[0], width >= WIDE
    nulls = shown if wide else shown[:1]
    copying, uniform = (_copying(atlas, first), _near_uniform(atlas)) if wide else (None, {})
    rows: list[Row] = []
    for place in atlas.order(first.probe)[:top]:
        head = atlas.heads[place]
        name = cells.head_name(*head)
        row = {"head": name, "roles": _roles(atlas, head, " " if wide else "\n")}
        row |= {f"null {null.against}": null.effects.null[place] for null in nulls}
        row |= {"copying": copying.effects.score[place]} if copying else {}
        rows.append({**row, "JS": uniform.get(name), **_numbers(first, place)})
    columns = [
        words("head"),
        words("roles"),
        Column(first.probe, cells.number, "score", fit="wrap"),
        *(Column(null.against, cells.number, f"null {null.against}", fit="wrap") for null in nulls),
        Effect(f"effect\n[95 %, all {len(atlas.heads)}]", cells.signed),
        Column("p", cells.p_value),
        *[Column("copying", cells.number)] * (copying is not None),
        *[Column("JS", cells.number)] * bool(uniform),
    ]
    return Sheet(rows, columns)


def left_out(atlas: Atlas, probe: str | None, top: Top, width: int) -> list[str]:
    """What the table does not show, and how to see it."""
    heads, narrow = len(atlas.heads), width < WIDE
    probes = f"probes: {'; '.join(atlas.probes())}"  # some names have a comma
    if probe is None:
        named = len(_named(atlas))
        few = top.rest(len(_named(atlas)[: top.shown]), named, "named heads shown")
        lines = [f"{named} of {heads} heads have a role or a mark; --probe NAME shows every head on one probe"]
        return [*few, *lines, probes, "a pipe without --probe gets every head on each probe"]
    shown = contrasts(atlas, probe)
    missing = [finding.against for finding in shown[1:]] + ["copying"] * (_copying(atlas, shown[0]) is not None)
    missing += ["JS"] * bool(_near_uniform(atlas))
    lines = interval_notes(vars(shown[0].effects), "sequences")
    lines += [f"not shown on a narrow terminal: {', '.join(missing)}"] * (narrow and bool(missing))
    few = top.rest(len(atlas.heads[: top.shown]), heads, "heads shown")
    return [*lines, *few, probes, "--probe NAME shows another"]


def probe_answers(atlas: Atlas, probe: str) -> list[str]:
    """A line for each role that a probe names: its heads, or that there is none, with the largest effect."""
    from attnscope.studies.atlas import NAMED_BY, RULES

    named = {probe, probe.partition(" p")[0]}  # of several periods without the period
    lines = []
    for rule in RULES:
        by, against = NAMED_BY[rule.role]
        heads = [cells.head_name(*head) for head in atlas.heads if rule.role in atlas.roles[head]]
        if by not in named or (rule.role == "prefix-matching" and not heads):  # it is induction but for the copying
            continue
        shown = next(finding for finding in contrasts(atlas, probe) if finding.against == against).effects
        # No head: how far the best one is from the role.
        best = largest_first(shown.effect)[0]
        effect = Effect("", cells.signed).cell({name: values[best] for name, values in vars(shown).items()})
        largest = (
            f"no head: largest effect {cells.head_name(*atlas.heads[best])} {effect}; the rule is {rule.condition}"
        )
        lines.append(f"{rule.role}: {listed(heads, MOST_NAMED) or largest}")
    return lines or [f"{probe} names no role: see its effects"]


def contrasts(atlas: Atlas, asked: str | None) -> list[Finding]:
    """The contrasts of a probe; where none was named, those of induction's middle period."""
    names = atlas.probes()
    periods = [name for name in names if name.startswith("induction")]
    name = asked or (periods[len(periods) // 2] if periods else names[0])
    return [finding for finding in atlas.findings if finding.probe == name]


def _numbers(finding: Finding, place: int) -> dict[str, float]:
    """What a probe shows of a head, by the names of `Effects`."""
    return {name: values[place] for name, values in vars(finding.effects).items()}


def _named(atlas: Atlas) -> list[int]:
    """The places of the heads that have a role or the mark, in the model's order."""
    marked = _near_uniform(atlas)
    heads = enumerate(atlas.heads)
    return [place for place, head in heads if atlas.roles[head] or cells.head_name(*head) in marked]


def _near_uniform(atlas: Atlas) -> dict[str, float]:
    """The divergence from uniform attention of the heads that have the mark, by name."""
    return dict(atlas.facts.get("near_uniform", {}))


def _copying(atlas: Atlas, shown: Finding) -> Finding | None:
    """What belongs to induction: a head that finds the place may still not write the token there."""
    copying = [finding for finding in atlas.findings if finding.probe == "copying"]
    return copying[0] if copying and shown.probe.startswith("induction") else None


def looked(result: OnTexts, head: tuple[int, int]) -> str:
    """`sink 82 %`: the role that a head has on most texts that show one."""
    shares = {look: share for look, share in result.shares.get(head, {}).items() if look != "-"}
    return next((f"{look} {cells.percentage(share)}" for look, share in shares.items()), cells.MISSING)


def effects_at(atlases: Mapping[str, Atlas], probe: str, heads: Sequence[HeadIndex]) -> Sheet:
    """The effect of one probe at every checkpoint, a row per head."""
    from attnscope.export.study_figures import courses

    last = list(atlases.values())[-1]
    [course] = [course for course in courses(atlases, list(last.heads)) if course.name == probe]
    rows = [
        {
            "head": cells.head_name(*head),
            "roles": _roles(last, head),
            **{f"at {name}": value for name, value in zip(atlases, values, strict=True)},
        }
        for head in heads
        for values in [course.values_RN[:, last.heads.index(head)].tolist()]
    ]
    columns = [words("head"), words("roles at the last", name="roles")]
    return Sheet(rows, [*columns, *(Column(name, cells.signed, f"at {name}") for name in atlases)])


def why_notes(result: Why) -> list[str]:
    """What a reader of the table has to know, and how exact it is."""
    parts = result.parts
    mean = f"its mean over {parts.visible} visible key{'s' * (parts.visible > 1)}"
    lines = [
        "contribution: what it gives to the logit, each norm with the scale that it has",
        f"contrast: the contribution less {mean if parts.asked.against is None else f'that of {result.others}'}",
    ]
    shares = (parts.share_N == parts.share_N).any()  # not NaN
    lines.append(
        "share: of the sum of contrasts" if shares else "there is no share: the contrasts sum to less than 0.1"
    )
    lines.append("rest: what else a block writes, its MLP and biases; bias: of the layer itself")
    if parts.asked.verify:
        rank = result.rank_correlation
        true = "true: what the logit loses where the component is its mean over the same keys, norms as they are"
        lines.append(f"{true}; rank correlation with the contrast {'-' if rank is None else cells.number(rank)}")
    if parts.softcap is not None:
        lines.append(f"the logit is taken before its cap at {parts.softcap:g}")
    # A sink logit takes weight from every key alike, which a contrast of two keys cannot show.
    if parts.sinks and parts.asked.against is None:
        lines.append("this head has a sink logit, which what all keys share competes with: the row `all keys`")
    elif parts.sinks:
        why = "what all keys share matters, too, and no contrast of two keys shows it"
        lines.append(f"this head has a sink logit: {why}")
    difference = cells.power(abs(parts.sum - parts.logit))
    lines.append(f"the contributions sum to {parts.sum:.4f}, the logit is {parts.logit:.4f}: {difference} apart")
    return [*lines, result.line]


def logit_sheet(result: Why, top: int | None) -> Sheet:
    """A row per component or pair, the largest contrasts first."""
    rows = result.table().to_pylist()
    read, pairs, tried = (any(row[name] is not None for row in rows) for name in ("position", "other", "true"))
    # The table of data has positions alone: here a token is named by its words, too.
    tokens = [result.read_by(result.parts.components[row]) for row in result.order]
    rows = [{**row, "from": token} for row, token in zip(rows, tokens, strict=True)]
    columns = [
        words("component"),
        *[words("from")] * read,
        *[words("query", name="other")] * pairs,
        Column("contribution", signed),
        Column("contrast", signed),
        Column("share", nats),
        *[Column("true", signed)] * tried,
    ]
    return Sheet(rows[:top], columns)


LARGEST = 4  # blocks of a row


def depth_sheet(result: Depth, top: int | None) -> Sheet:
    """A row per reader with its largest blocks; the table of data has all of them."""
    rows = []
    for parts in islice(result.readers(), top):
        largest = sorted(parts, key=lambda row: -abs(row.number))[:LARGEST]
        one = parts[0]
        rows.append(
            {
                "reader": result.reader(one.point),
                "token": None if one.token is None else result.texts[one.point.stack].prompt.named(one.token),
                "stream": one.stream,
                "largest": ", ".join(f"{row.block} {signed(row.number)}" for row in largest),
            }
        )
    columns = [words(name) for name in ("reader", "token") if any(row[name] is not None for row in rows)]
    columns += [Column("stream", cells.plain)] * any(row["stream"] is not None for row in rows)
    return Sheet(rows, [*columns, words("largest")])
