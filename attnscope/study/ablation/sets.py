"""Which heads are taken away together: sets from a file, a selection or an atlas, and random ones to hold them against.

named = read_sets(Path("sets.jsonl"), loaded.geometry)
controls_of(named[0], named, loaded.geometry)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from attnscope.errors import InputError, UsageError
from attnscope.interventions.spec import HeadSet
from attnscope.model.geometry import Geometry
from attnscope.model.selection import HeadIndex, HeadsByRole, pairs, select
from attnscope.utils.display import head_name
from attnscope.utils.files import parsed_line, read_text

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
    every = sorted({head for one in sets for head in one.heads})
    return {layer: tuple(head for _, head in group) for layer, group in itertools.groupby(every, lambda head: head[0])}


def read_sets(path: Path, geometry: Geometry) -> list[HeadSet]:
    """The sets of a JSONL file, {"set": "induction", "heads": ["L3H0", "L3H1"]} per line.

    Raises InputError, with the line's number, for a line that is no such record and for heads that are not there.
    """
    lines = enumerate(read_text(None, str(path)).splitlines(), 1)
    found = [_read_set(line, f"{path}, line {number}", geometry) for number, line in lines if line.strip()]
    names = [one.name for one in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{path} has two sets called {twice!r}", "give each a name of its own")
    return found


def _read_set(line: str, where: str, geometry: Geometry) -> HeadSet:
    record = parsed_line(line, where, 'write {"set": "name", "heads": ["L3H0"]}')
    name, heads = (record.get("set"), record.get("heads")) if isinstance(record, dict) else (None, None)
    if isinstance(heads, list):  # [3, 0] is L3H0
        heads = [f"L{one[0]}H{one[1]}" if _is_pair(one) else one for one in heads]
    if not isinstance(name, str) or not isinstance(heads, list) or not all(isinstance(one, str) for one in heads):
        raise InputError(f"{where} is not a set of heads", 'write "set", a name, and "heads", a list such as ["L3H0"]')
    if not heads:
        raise InputError(f"{where}: the set {name!r} has no heads", "name some, such as L3H0")
    try:
        return head_set(name, select(",".join(heads), geometry.heads_by_layer))
    except UsageError as error:
        raise InputError(f"{where}: {error.message}", error.hint) from error


def _is_pair(one: object) -> bool:
    return isinstance(one, list) and len(one) == 2 and all(type(number) is int and number >= 0 for number in one)


def selected(expression: str, geometry: Geometry, named: HeadsByRole | None = None) -> HeadSet:
    """The heads that an expression names, together in a set of its name; named, and what is raised: as of `select`."""
    return head_set(expression, select(expression, geometry.heads_by_layer, named))


def of_roles(roles: Mapping[tuple[int, int], Sequence[str]], order: Sequence[str]) -> list[HeadSet]:
    """A set per role that any head has, {(3, 0): ("induction",)}; order: of the roles."""
    sets = [HeadSet(role, tuple(sorted(head for head, names in roles.items() if role in names))) for role in order]
    return [one for one in sets if one.heads]


def whole_groups(one: HeadSet, geometry: Geometry) -> HeadSet:
    """The set with every head that shares a kv head with one of its own: what goes where a kv head goes."""
    shared = _shared(geometry, True)
    groups = {(layer, head // shared[layer]) for layer, head in one.heads}
    heads = {(layer, group * shared[layer] + part) for layer, group in groups for part in range(shared[layer])}
    return HeadSet(one.name, tuple(sorted(heads)))


def parts(one: HeadSet, geometry: Geometry, by_kv: bool = False) -> list[HeadSet]:
    """What of a set can go alone: each head, or each kv group; named as it is spelled."""
    single = [HeadSet("", (head,)) for head in one.heads]
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
        return [Portion(one.name, one.heads, one.heads[0][0]) for one in parts(whole, geometry, True)]
    by_layer = itertools.groupby(whole.heads, lambda head: head[0])
    return [Portion(f"L{layer}", tuple(heads), layer) for layer, heads in by_layer]


def controls_of(
    one: HeadSet,
    named: Sequence[HeadSet],
    geometry: Geometry,
    *,
    by_kv: bool = False,
    seed: int = 0,
    count: int = CONTROLS,
) -> list[HeadSet]:
    """So many random sets with as many heads in each layer as `one`, of heads that no named set has; each once, and
    none is `one` itself.

    by_kv: of whole kv groups. All combinations where there are no more; none where a layer has too few other heads.
    """
    if count > MOST_SETS:
        raise UsageError(f"expected at most {MOST_SETS:,} random sets, got {count:,}", "use {random=100}")
    taken, shared = {head for other in named for head in other.heads}, _shared(geometry, by_kv)
    free = {layer: _free(layer, heads, shared[layer], taken) for layer, heads in geometry.heads_by_layer.items()}
    wanted = {layer: heads // shared[layer] for layer, heads in one.per_layer.items()}
    if math.prod(math.comb(len(free[layer]), units) for layer, units in wanted.items()) <= count:
        chosen = itertools.product(*(itertools.combinations(free[layer], units) for layer, units in wanted.items()))
        drawn: Iterator[tuple[Unit, ...]] = (tuple(itertools.chain(*choice)) for choice in chosen)
    else:
        drawn = _draws(free, wanted, np.random.default_rng([seed, *one.name.encode()]))
    heads = (tuple(sorted(itertools.chain(*units))) for units in drawn)
    others = itertools.islice((found for found in heads if found != one.heads), count)
    return [HeadSet(f"{one.name}, random {number}", found) for number, found in enumerate(others)]


Unit = tuple[tuple[int, int], ...]


def _shared(geometry: Geometry, by_kv: bool) -> dict[int, int]:
    """{layer: heads that go together}."""
    return {layer.index: layer.heads // layer.kv_heads if by_kv else 1 for layer in geometry.attention_layers}


def _free(layer: int, heads: int, shared: int, taken: set[tuple[int, int]]) -> list[Unit]:
    """The layer's units of heads, those that somebody has taken left out."""
    units = [tuple((layer, start + part) for part in range(shared)) for start in range(0, heads, shared)]
    return [one for one in units if not taken.intersection(one)]


def _draws(
    free: Mapping[int, Sequence[Unit]], wanted: Mapping[int, int], generator: np.random.Generator
) -> Iterator[tuple[Unit, ...]]:
    """Different choices of so many units in each layer, without end."""
    seen: set[tuple[Unit, ...]] = set()
    while True:
        drawn = tuple(
            free[layer][place]
            for layer, units in wanted.items()
            for place in sorted(generator.choice(len(free[layer]), units, replace=False))
        )
        if drawn not in seen:
            seen.add(drawn)
            yield drawn
