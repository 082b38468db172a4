"""Which heads are taken away together, and other questions to the same heads and task than what sets of them cost.

    named = read_sets(Path("sets.jsonl"), loaded.geometry)      # or of a selection, or of the roles of an atlas
    controls_of(named[0], named, loaded.geometry)               # random sets to compare with

`HeadStudy` is what the other questions have in common: which heads, what it would take, one record.

Pairs: synergy = pair - sum of singles. Heads that back each other up have a positive one: alone neither is missed.

Pruning: at every step each head that is left is taken away together with those that are gone, and the one that costs
least stays away (Michel et al. 2019, arXiv 1905.10650, prune by a score instead of by the loss itself).

    for step in pruned(prepared(loaded, task, []), heads):
        print(step.layer, step.head, step.value)

The screen: all heads to first order, and some of them ablated, which says how far it can be trusted.

    screen = screened(prepared(loaded, task, []))
    screen.table(), screen.correlations

Shapes: S sequence, K set, N head of all layers, or pair.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np

from attnscope.errors import InputError, UsageError
from attnscope.interventions.base import LOSS, Intervention, Measure, Replacement
from attnscope.interventions.passes import Advance, Passes, prepared
from attnscope.interventions.patching import BACKWARD, first_order
from attnscope.interventions.spec import HeadSet, Task
from attnscope.model.geometry import Geometry
from attnscope.model.selection import HeadIndex, HeadsByRole, everything, pairs, select_layers, stack_columns
from attnscope.studies.statistics import effect_columns, largest_first, rank_correlation
from attnscope.studies.study import Cost, Study, cost_of, effects_of, learning_cost, task_facts
from attnscope.studies.study_folder import Column, Parts, StudyRecord, head_columns
from attnscope.utils.display import head_name, head_names, layer_name
from attnscope.utils.files import parsed_line, read_text
from attnscope.utils.tables import as_table, integers, save

if TYPE_CHECKING:
    import pyarrow as pa

    from attnscope.model.loaded import LoadedModel

CONTROLS, MOST_SETS = 100, 100_000
DrawnFrom = Literal["unnamed", "all"]  # the heads that random sets are drawn from: those that no set names, or all


def head_set(name: str, selection: Mapping[int, Sequence[int]]) -> HeadSet:
    """A named set of the heads that a selection names."""
    return HeadSet(name, tuple(sorted(pairs(selection))))


def heads_by_layer(sets: Iterable[HeadSet]) -> dict[int, tuple[int, ...]]:
    """The heads that any set has, ascending.

    >>> heads_by_layer([HeadSet("one", ((3, 1),)), HeadSet("both", ((0, 2), (3, 0)))])
    {0: (2,), 3: (0, 1)}
    """
    every = sorted({head for subset in sets for head in subset.heads})
    return {layer: tuple(head for _, head in group) for layer, group in itertools.groupby(every, lambda head: head[0])}


def records_of(path: Path, form: str) -> Iterator[tuple[str, Any]]:
    """Every record of a JSONL file, after its place in words. Raises InputError for a line that is no JSON.

    form: a hint that shows what such a line looks like.
    """
    for number, line in enumerate(read_text(None, str(path)).splitlines(), 1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, parsed_line(line, where, form)


def read_sets(path: Path, geometry: Geometry) -> list[HeadSet]:
    """The sets of a JSONL file, {"set": "induction", "heads": ["L3H0", "L3H1"]} per line.

    Raises InputError, with the line's number, for a line that is no such record and for heads that are not there.
    """
    sets: list[HeadSet] = []
    for where, record in records_of(path, 'write {"set": "name", "heads": ["L3H0"]}'):
        name, heads = (record.get("set"), record.get("heads")) if isinstance(record, dict) else (None, None)
        # Programs write a head as a pair of numbers, too: [3, 0] is L3H0.
        if isinstance(heads, list):
            for place, head in enumerate(heads):
                if isinstance(head, list) and len(head) == 2 and all(type(part) is int and part >= 0 for part in head):
                    heads[place] = f"L{head[0]}H{head[1]}"
        if not isinstance(name, str) or not isinstance(heads, list) or not all(isinstance(head, str) for head in heads):
            hint = 'write "set", a name, and "heads", a list such as ["L3H0"]'
            raise InputError(f"{where} is not a set of heads", hint)
        if not heads:
            raise InputError(f"{where}: the set {name!r} has no heads", "name some, such as L3H0")
        try:
            sets.append(selected(",".join(heads), geometry, name=name))
        except UsageError as error:
            raise InputError(f"{where}: {error.message}", error.hint) from error
    names = [chosen.name for chosen in sets]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{path} has two sets called {twice!r}", "give each a name of its own")
    return sets


def selected(expression: str, geometry: Geometry, named: HeadsByRole | None = None, name: str = "") -> HeadSet:
    """The heads that an expression names, of attention or `linear.3.2`, together in a set, of its name without another.

    named, and what is raised: as of `select`.
    """
    return head_set(name or expression, select_layers(expression, geometry.changeable, geometry.stack, named))


def of_roles(roles: Mapping[tuple[int, int], Sequence[str]], order: Sequence[str]) -> list[HeadSet]:
    """A set per role that any head has, {(3, 0): ("induction",)}; order: of the roles."""
    sets = [HeadSet(role, tuple(sorted(head for head, names in roles.items() if role in names))) for role in order]
    return [subset for subset in sets if subset.heads]


def whole_groups(subset: HeadSet, geometry: Geometry) -> HeadSet:
    """The set with every head that shares a kv head with one of its own: what goes where a kv head goes."""
    shared = _shared(geometry, True)
    groups = {(layer, head // shared[layer]) for layer, head in subset.heads}
    heads = {(layer, group * shared[layer] + part) for layer, group in groups for part in range(shared[layer])}
    return HeadSet(subset.name, tuple(sorted(heads)))


def parts(subset: HeadSet, geometry: Geometry, by_kv: bool = False) -> list[HeadSet]:
    """What of a set can go alone: each head, or each kv group; named as it is spelled."""
    single = [HeadSet("", (head,)) for head in subset.heads]
    groups = dict.fromkeys(whole_groups(part, geometry).heads if by_kv else part.heads for part in single)
    return [HeadSet(str(HeadSet("", heads)), heads) for heads in groups]


class Portion(NamedTuple):
    """What of a set is changed at a time; layer, head: where it is of one."""

    name: str
    heads: tuple[HeadIndex, ...]
    layer: int
    head: int | None = None


def portions(over: str, whole: HeadSet, geometry: Geometry) -> list[Portion]:
    """A set head by head, by kv groups, or by layers, as `over` says."""
    if over == "heads":
        return [Portion(head_name(*head), (head,), *head) for head in whole.heads]
    if over == "kv":
        return [Portion(part.name, part.heads, part.heads[0][0]) for part in parts(whole, geometry, True)]
    by_layer = itertools.groupby(whole.heads, lambda head: head[0])
    return [Portion(layer_name(layer), tuple(heads), layer) for layer, heads in by_layer]


def controls_of(
    subset: HeadSet,
    named: Sequence[HeadSet],
    geometry: Geometry,
    *,
    by_kv: bool = False,
    seed: int = 0,
    count: int = CONTROLS,
) -> list[HeadSet]:
    """So many random sets with as many heads in each layer as `subset`, of heads that no named set has; each once, and
    none is `subset` itself.

    by_kv: of whole kv groups. All combinations where there are no more; none where a layer has too few other heads.
    """
    if count > MOST_SETS:
        raise UsageError(f"expected at most {MOST_SETS:,} random sets, got {count:,}", "use {random=100}")
    # A unit is what goes at once: a head, or a kv group; those with a named head are not drawn.
    taken, shared = {head for other in named for head in other.heads}, _shared(geometry, by_kv)
    free: dict[int, list[Unit]] = {}
    for layer, width in geometry.changeable.items():
        starts = range(0, width, shared[layer])
        units = [tuple((layer, start + part) for part in range(shared[layer])) for start in starts]
        free[layer] = [unit for unit in units if not taken.intersection(unit)]
    wanted = {layer: number // shared[layer] for layer, number in subset.per_layer.items()}
    if math.prod(math.comb(len(free[layer]), number) for layer, number in wanted.items()) <= count:
        chosen = itertools.product(*(itertools.combinations(free[layer], number) for layer, number in wanted.items()))
        drawn: Iterable[tuple[Unit, ...]] = (tuple(itertools.chain(*choice)) for choice in chosen)
    else:
        # Different choices of so many units in each layer; one more than are wanted, since one may be the set itself.
        generator, choices = np.random.default_rng([seed, *subset.name.encode()]), dict[tuple[Unit, ...], None]()
        while len(choices) <= count:
            units_by_layer = (
                free[layer][place]
                for layer, number in wanted.items()
                for place in sorted(generator.choice(len(free[layer]), number, replace=False))
            )
            choices[tuple(units_by_layer)] = None
        drawn = choices
    # The set itself is not compared with itself.
    heads = (tuple(sorted(itertools.chain(*units))) for units in drawn)
    others = itertools.islice((other for other in heads if other != subset.heads), count)
    return [HeadSet(f"{subset.name}, random {number}", other) for number, other in enumerate(others)]


Unit = tuple[tuple[int, int], ...]


def _shared(geometry: Geometry, by_kv: bool) -> dict[int, int]:
    """{layer: heads that go together}: in a linear layer each has values of its own."""
    shared = {layer.index: layer.heads // layer.kv_heads if by_kv else 1 for layer in geometry.attention_layers}
    return {**shared, **dict.fromkeys(geometry.linear_heads, 1)}


class HeadRecord(StudyRecord):
    """What was measured of some heads; its folder holds the table alone."""

    @property
    def line(self) -> str:
        """Which question it is, of what."""
        facts = self.facts
        task = f"{facts['task']['sequences']} {facts['task']['name']}"
        return f"{self.stem} of {len(facts['heads'])} heads of {facts['model']['name']} on {task}"

    def save(self, folder: Path) -> None:
        """Write the table."""
        save(self.table(), folder / f"{self.stem}.parquet")


Record = TypeVar("Record", bound=HeadRecord)


@dataclass(frozen=True)
class HeadStudy(Study[Record]):
    """A question to some heads. named: the heads; all of the model where none are named."""

    model: LoadedModel
    task: Task
    named: Sequence[HeadIndex] = ()
    replacement: Replacement | Intervention = "mean"

    @property
    def stage(self) -> str:
        return self.kind

    @cached_property
    def heads(self) -> Sequence[HeadIndex]:
        """The heads that are asked about."""
        return self.named or pairs(everything(self.model.geometry.unnamed))

    @property
    def facts(self) -> dict[str, Any]:
        names = [head_name(*head) for head in self.heads]
        return task_facts(self.model, self.task, self.replacement) | {"heads": names}

    @abstractmethod
    def token_layers(self, passes: Passes) -> int:
        """Tokens times layers that the answer takes at most."""

    @abstractmethod
    def answer(self, passes: Passes, facts: dict[str, Any], parts: Parts, advance: Advance) -> Record:
        """The answer by passes that were prepared; the rest as of `measure`."""

    def cost(self, of_all: Callable[[int], int] = lambda count: count) -> Cost:
        """As of any study; of_all: what all sequences take, where those of the task are but some of them."""
        passes = Passes.planned(self.model, self.task, self.replacement)
        token_layers = self.token_layers(passes) + learning_cost(passes)
        rows = sum(map(len, self.task.rows)) * token_layers // max(1, passes.token_layers([]))
        what = f"{self.kind} of {len(self.heads)} heads on {of_all(len(self.task))} sequences of {self.task.name}:"
        sets = [HeadSet("", (head,)) for head in self.heads]
        return cost_of(what, of_all(token_layers), of_all(rows), passes, sets)

    def measure(self, facts: dict[str, Any], parts: Parts, advance: Advance) -> Record:
        sets = [HeadSet("", tuple(self.heads))]
        passes = prepared(self.model, self.task, sets, self.replacement, advance=advance)
        return self.answer(passes, facts, parts, advance)


@dataclass(frozen=True, repr=False)
class Pairs(HeadRecord):
    """The pairs; pair_SN: what each costs, sum_SN: what its heads cost alone, in the measure's unit."""

    stem = "pairs"

    pairs: tuple[tuple[HeadIndex, HeadIndex], ...]
    pair_SN: np.ndarray
    sum_SN: np.ndarray
    facts: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def statistics(self) -> Mapping[str, np.ndarray]:
        """Of every synergy the columns of `effect_columns`, (N,) each, NaN for null."""
        return effect_columns(self.pair_SN - self.sum_SN)

    def table(self) -> pa.Table:
        """A row per pair: both heads, what the pair costs, what both cost alone, the synergy and its statistics; the
        largest synergy first."""
        ends = np.array(self.pairs, np.int32).reshape(-1, 4).T
        places: dict[str, Any] = dict(zip(("layer", "head", "other_layer", "other_head"), ends, strict=True))
        places |= stack_columns(self.pairs and list(zip(*self.pairs, strict=True)), ("stack", "other_stack"))
        costs = {"pair": self.pair_SN.mean(0), "sum": self.sum_SN.mean(0)}
        known = {"synergy" if name == "effect" else name: values for name, values in self.statistics.items()}
        return as_table({**places, **costs, **known}).take(integers(largest_first(self.statistics["effect"])))


@dataclass(frozen=True)
class PairsStudy(HeadStudy[Pairs]):
    """The synergy of every two heads."""

    kind, readings, schema = "pairs", "pairs", "pairs/1"

    def token_layers(self, passes: Passes) -> int:
        return passes.token_layers(pair_sets(self.heads))

    def answer(self, passes: Passes, facts: dict[str, Any], parts: Parts, advance: Advance) -> Pairs:
        if len(self.heads) < 2:
            raise InputError("a pair takes two heads, and one was named", "name more of them")
        _, effect_SK = effects_of(passes, pair_sets(self.heads), parts, advance)
        return replace(synergies(self.heads, effect_SK), facts=facts)


def pair_sets(heads: Sequence[HeadIndex]) -> list[HeadSet]:
    """What has to be ablated for the synergies of some heads: each alone, then each pair."""
    singles = [HeadSet(head_names([head]), (head,)) for head in sorted(heads)]
    return singles + [HeadSet(head_names(pair), pair) for pair in combinations(sorted(heads), 2)]


def synergies(heads: Sequence[HeadIndex], effect_SK: np.ndarray) -> Pairs:
    """The synergies of some heads; effect_SK: (S, K) over intact, of each set of `pair_sets`, in order."""
    heads, pairs = sorted(heads), tuple(combinations(sorted(heads), 2))
    single = {head: effect_SK[:, place] for place, head in enumerate(heads)}
    sums_SN = np.stack([single[one] + single[other] for one, other in pairs], 1)
    return Pairs(pairs, effect_SK[:, len(heads) :], sums_SN)


@dataclass(frozen=True)
class Step:
    """A head that goes: which, and the mean of the measure without it and all before, as nats per token."""

    layer: int
    head: int
    value: float


@dataclass(frozen=True, repr=False)
class Pruning(HeadRecord):
    """The steps in their order. intact: the mean of the measure without any; guess: its value for a uniform guess."""

    stem = "prune"

    steps: Sequence[Step]
    intact: float
    guess: float
    facts: Mapping[str, Any]

    def table(self) -> pa.Table:
        """A row per step, see `curve`."""
        return curve(self.steps, self.intact)


@dataclass(frozen=True)
class PruneStudy(HeadStudy[Pruning]):
    """The heads in the order in which they are missed least, and what is lost with each."""

    kind, readings, schema = "prune", "prune", "prune/1"

    def token_layers(self, passes: Passes) -> int:
        return passes.token_layers([]) + prune_cost(passes, len(self.heads))

    def answer(self, passes: Passes, facts: dict[str, Any], parts: Parts, advance: Advance) -> Pruning:
        intact = float(passes.measured([], advance)[:, 0].mean())
        steps = list(pruned(passes, self.heads, parts, advance))
        return Pruning(steps, intact, math.log(self.model.geometry.vocab_size), facts)


def pruned(
    passes: Passes,
    heads: Sequence[HeadIndex],
    parts: Parts = Parts(),
    advance: Advance = lambda token_layers: None,
) -> Iterator[Step]:
    """The steps until no head is left; parts: where each is kept, and where a stopped pruning resumes."""
    away: list[HeadIndex] = []
    parts.expect(len(heads), "steps")
    while len(away) < len(heads):
        left = [head for head in heads if head not in away]
        step = _step(parts, passes, away, left)
        away.append((step.layer, step.head))
        advance(_cost(passes, len(left)))
        yield step


def prune_cost(passes: Passes, heads: int) -> int:
    """Token-layers that so many steps take at the most: sets that begin late take less."""
    return sum(_cost(passes, left) for left in range(1, heads + 1))


def curve(steps: Sequence[Step], intact: float, measure: Measure = LOSS) -> pa.Table:
    """A row per step: its number, the head that goes, the measure without it and all before, and what that costs."""
    values = np.array([step.value for step in steps], np.float64)
    return as_table(
        {
            "step": np.arange(1, len(steps) + 1, dtype=np.int32),
            **head_columns([(step.layer, step.head) for step in steps]),
            measure.name: values,
            "effect": measure.worse * (values - intact),
        }
    )


def _cost(passes: Passes, left: int) -> int:
    return passes.task.tokens * len(passes.loaded.geometry.layers) * (1 + left)


def _step(parts: Parts, passes: Passes, away: Sequence[HeadIndex], left: Sequence[HeadIndex]) -> Step:
    """The next step, from the folder where an earlier run left it."""

    def cheapest() -> dict[str, np.ndarray]:
        sets = [HeadSet(f"and {head_name(*head)}", tuple(sorted([*away, head]))) for head in left]
        value_K = passes.measured(sets)[:, 1:].mean(0)
        place = int(np.argmin(passes.measure.worse * value_K))
        return {"place": np.array(place), "value": np.array(value_K[place])}

    step = parts.kept(
        f"step-{len(away) + 1:05}",
        {"place": Column((), "i"), "value": Column(())},
        cheapest,
        fits=lambda columns: 0 <= int(columns["place"]) < len(left),
    )
    return Step(*left[int(step["place"])], float(step["value"]))


TRIED = 8  # heads that are ablated to see how far the screen can be trusted


@dataclass(frozen=True, repr=False)
class Screen(HeadRecord):
    """The screen of every head (means over the sequences), and what ablation costs where it was tried, else NaN."""

    stem = "gradient"

    heads: tuple[tuple[int, int], ...]
    signed_N: np.ndarray
    size_N: np.ndarray
    ablated_N: np.ndarray
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def correlations(self) -> tuple[float, float]:
        """Spearman's with ablation, over the heads that were tried: of the signed effect, and of both sizes."""
        tried_N = np.isfinite(self.ablated_N)
        true = self.ablated_N[tried_N]
        return rank_correlation(self.signed_N[tried_N], true), rank_correlation(self.size_N[tried_N], np.abs(true))

    def table(self) -> pa.Table:
        """A row per head: layer, head, signed, size, ablated, in the measure's unit; the largest `signed` first."""
        columns = {"signed": self.signed_N, "size": self.size_N, "ablated": self.ablated_N}
        return as_table(head_columns(self.heads) | columns).take(integers(largest_first(self.signed_N)))


@dataclass(frozen=True)
class ScreenStudy(HeadStudy[Screen]):
    """All heads to first order, and some of them ablated."""

    kind, readings, schema = "gradient", "gradient", "gradient/1"

    def token_layers(self, passes: Passes) -> int:
        return (BACKWARD + 1 + TRIED) * passes.token_layers([])

    def answer(self, passes: Passes, facts: dict[str, Any], parts: Parts, advance: Advance) -> Screen:
        return replace(screened(passes, advance), facts=facts)


def screened(passes: Passes, advance: Advance = lambda token_layers: None) -> Screen:
    """Screen all heads, and ablate the few that say how far the screen can be trusted."""
    screen = first_order(passes, advance)
    signed_N, tried = screen.signed_SN.mean(0), tried_of(screen.signed_SN.mean(0))
    sets = [HeadSet(head_name(*screen.heads[place]), (screen.heads[place],)) for place in tried]
    ablated_N = np.full(len(screen.heads), np.nan)
    ablated_N[tried] = passes.effects(passes.measured(sets, advance)).mean(0)
    return Screen(screen.heads, signed_N, screen.size_SN.mean(0), ablated_N)


def tried_of(values_N: np.ndarray) -> list[int]:
    """The places of TRIED numbers from the largest to the smallest, equally far apart in that order."""
    order = np.argsort(-values_N, kind="stable")
    places: list[int] = order[np.unique(np.linspace(0, len(order) - 1, TRIED).round().astype(int))].tolist()
    return places
