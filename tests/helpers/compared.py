"""What two texts' heads differ in, by loops over a family's own matrices.

Shapes: Q query, K key, U unit.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from attnscope.inputs.spans import alignment, units


class Difference(NamedTuple):
    """One head on both sides: bits, the mass on either side's own tokens, and the map between units."""

    js: float
    lost: float
    other_lost: float
    map: np.ndarray


def by_loops(weights_QK, queries, keys, alone):
    """(U, U) mass of one head between units, and (U,) on the tokens that the other text lacks."""
    mass = [[sum(weights_QK[i][j] for i in unit for j in of) / len(unit) for of in keys] for unit in queries]
    lost = [sum(weights_QK[i][j] for i in unit for j in alone) / len(unit) for unit in queries]
    return mass, lost


def divergence(p, q):
    """Jensen-Shannon divergence in bits of two rows, each divided by its sum."""
    p, q = ([one / sum(row) for one in row] for row in (p, q))
    return sum(one * math.log2(2 * one / (a + b)) / 2 for a, b in zip(p, q, strict=True) for one in (a, b) if one > 0)


def differences(first, other, queries: Sequence, keys: Sequence) -> list[Difference]:
    """Every head of a layer; first, other: (H, Q, K) matrices; queries, keys: the prompt on either side."""
    of_queries, of_keys = (
        units(*(plain := [prompt.plain for prompt in both]), alignment(*plain)) for both in (queries, keys)
    )
    found = []
    for weights in zip(first, other, strict=True):
        sides = zip(weights, of_queries.members, of_keys.members, of_keys.alone, strict=True)
        (a, lost), (b, other_lost) = (by_loops(*side) for side in sides)
        rows = [divergence(p, q) for p, q in zip(a, b, strict=True) if sum(p) and sum(q)]
        found.append(Difference(np.mean(rows), np.mean(lost), np.mean(other_lost), np.array(b) - np.array(a)))
    return found
