"""Average linkage (UPGMA; Sokal & Michener 1958): which of N things are alike, as a tree with its leaves in a row.

    tree = clustered(distance_NN)
    tree.leaves       # neighbours are alike

scipy has it too, but seaborn imports scipy where it is there, and every picture would begin half as late again.

N thing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np


@dataclass(frozen=True)
class Tree:
    """leaves: the N things in their order. merges: (one, two, height) of things 0 to N-1, N + k of merge k."""

    leaves: tuple[int, ...]
    merges: tuple[tuple[int, int, float], ...]


def clustered(distance_NN: np.ndarray) -> Tree:
    """The tree of a symmetric matrix of distances; of two clusters' four joints the shortest is in the row."""
    apart_NN = distance_NN.astype(np.float64)
    np.fill_diagonal(apart_NN, np.inf)
    count = len(apart_NN)
    number = list(range(count))
    rows: list[tuple[int, ...]] = [(leaf,) for leaf in range(count)]
    merges: list[tuple[int, int, float]] = []
    for step in range(count - 1):
        one, two = sorted(divmod(int(apart_NN.argmin()), count))
        merges.append((number[one], number[two], float(apart_NN[one, two])))
        sizes = len(rows[one]), len(rows[two])
        mean_N = (sizes[0] * apart_NN[one] + sizes[1] * apart_NN[two]) / sum(sizes)
        apart_NN[one], apart_NN[:, one] = mean_N, mean_N
        apart_NN[two], apart_NN[:, two], apart_NN[one, one] = np.inf, np.inf, np.inf
        number[one], rows[one] = count + step, _joined(rows[one], rows[two], distance_NN)
    return Tree(rows[0], tuple(merges))


def _joined(one: tuple[int, ...], two: tuple[int, ...], distance_NN: np.ndarray) -> tuple[int, ...]:
    """Both rows as one, each forward or backward, so that those which meet are nearest."""
    pairs = product((one, one[::-1]), (two, two[::-1]))
    first, second = min(pairs, key=lambda pair: distance_NN[pair[0][-1], pair[1][0]])
    return first + second
