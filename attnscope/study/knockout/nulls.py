"""Other keys that are cut in the same rows and heads, for comparison: at like distances, and of like mass.

Shapes: K key.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from attnscope.intervene.sets import Cut
from attnscope.study.knockout.asked import DRAWS
from attnscope.study.knockout.records import KINDS, Masses, Null, NullKind

NEAREST = 100
ALIKE = 2.0  # the factor within which a key's mass has to lie for the masses to be alike


def null_of(cut: Cut, kind: NullKind, masses: Masses, most: int = DRAWS, seed: int = 0) -> Null:
    """As many other keys in the same rows and heads, drawn from the nearest of all that are seen; at most so many
    draws, or all there are. Neither the cut ones, nor key 0, nor a head's sink."""
    drawn = {text: _draws(cut, text, kind, masses, most, seed) for text in range(len(cut.keys)) if most}
    drawn = {text: found for text, found in drawn.items() if found}
    count = max(map(len, drawn.values()), default=0)
    cuts = []
    for number in range(count):
        keys = tuple(drawn[text][number % len(drawn[text])] if text in drawn else () for text in range(len(cut.keys)))
        cuts.append(replace(cut, name=f"{cut.name}, {kind} {number}", keys=keys))
    return Null(tuple(cuts), tuple(drawn))


def _draws(cut: Cut, text: int, kind: NullKind, masses: Masses, most: int, seed: int) -> list[tuple[int, ...]]:
    """The keys of every draw in one text."""
    own = [key for key in cut.keys[text] if key < masses.lengths[text]]
    mass_K, seen_K, rests = masses.per_key(cut, text)
    own = [key for key in own if seen_K[key]]
    if not own or masses.of(cut, text) == 0:
        return []
    there = np.array([key for key in np.flatnonzero(seen_K) if key not in {*cut.keys[text], 0, *rests}], int)
    nearest = _by_distance(there, own) if kind == "distance" else _by_mass(there, own, mass_K)
    if len(nearest) < len(own):
        return []
    if math.comb(len(nearest), len(own)) <= most:
        return [tuple(sorted(one)) for one in itertools.combinations(nearest, len(own))]
    generator = np.random.default_rng([seed, text, KINDS.index(kind), *cut.name.encode()])
    return list(itertools.islice(_sampled(nearest, len(own), generator), most))


def _by_distance(there: np.ndarray, own: Sequence[int]) -> list[int]:
    """The keys that stand nearest to those that are cut."""
    if not len(there):
        return []
    apart = np.abs(there[:, None] - np.array(own)).min(1)
    return [int(key) for key in there[np.argsort(apart, kind="stable")[:NEAREST]]]


def _by_mass(there: np.ndarray, own: Sequence[int], mass_K: np.ndarray) -> list[int]:
    """The keys whose mass is nearest to the mean of those that are cut; none where no key's is alike."""
    there = there[mass_K[there] > 0] if len(there) else there
    if not len(there):
        return []
    apart = np.abs(np.log(mass_K[there]) - math.log(mass_K[list(own)].mean()))
    if apart.min() > math.log(ALIKE):
        return []
    return [int(key) for key in there[np.argsort(apart, kind="stable")[:NEAREST]]]


def _sampled(nearest: Sequence[int], count: int, generator: np.random.Generator) -> Iterator[tuple[int, ...]]:
    """Different choices of so many keys, without end."""
    seen: set[tuple[int, ...]] = set()
    while True:
        drawn = tuple(sorted(int(key) for key in generator.choice(nearest, count, replace=False)))
        if drawn not in seen:
            seen.add(drawn)
            yield drawn
