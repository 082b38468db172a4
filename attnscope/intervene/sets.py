"""Heads that are changed together, and the keys that are cut from them; plain data, without torch."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass

from attnscope.utils.display import head_names


@dataclass(frozen=True)
class HeadSet:
    """Heads that go together, as (layer, head), ascending.

    >>> str(HeadSet("induction", ((3, 0), (3, 1))))
    'L3H0 L3H1'
    """

    name: str
    heads: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return head_names(self.heads)

    @property
    def identity(self) -> Hashable:
        """What tells it from another: equal ones are run once."""
        return self.heads

    @property
    def per_layer(self) -> dict[int, int]:
        """{layer: how many of its heads}."""
        return {layer: len(list(group)) for layer, group in itertools.groupby(self.heads, lambda head: head[0])}


@dataclass(frozen=True)
class Cut(HeadSet):
    """Heads, and the keys of each text of the task that are cut from them in the rows that are asked.

    moves: of each text (key, other key) pairs. In these rows and heads the weight of the first goes to the second,
    before keys are cut.
    """

    keys: tuple[tuple[int, ...], ...] = ()
    moves: tuple[tuple[tuple[int, int], ...], ...] = ()

    @property
    def identity(self) -> Hashable:
        return (self.heads, self.keys, self.moves) if any(self.moves) else (self.heads, self.keys)
