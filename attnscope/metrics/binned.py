"""A side of a map with its tokens put together, so that it can be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

MAP_SIDE = 200  # the most rows and columns of a drawn map; longer texts are binned


class Cells(NamedTuple):
    """One side of a map: its tokens in their order, and how many of them each row (or column) holds.

    size: how many a whole one holds.
    """

    tokens: Sequence[int]
    sizes: Sequence[int]
    size: int

    @classmethod
    def of(cls, tokens: Sequence[int], side: int, split_key0: bool = False) -> Cells:
        """At most `side` of one size, but for the last; split_key0: token 0 has one more, of its own."""
        size = max(1, -(-len(tokens) // side))
        sizes = [min(size, len(tokens) - start) for start in range(0, len(tokens), size)]
        if split_key0 and tokens[0] == 0 and sizes[0] > 1:
            sizes[:1] = [1, sizes[0] - 1]
        return cls(tokens, sizes, size)

    @property
    def starts(self) -> list[int]:
        """The first token of each."""
        return [self.tokens[place] for place in accumulate(self.sizes[:-1], initial=0)]

    def coarser(self, side: int, key0_apart: bool = False) -> tuple[np.ndarray, Cells]:
        """At most about `side` of them, neighbours put together: where each begins among these, and what it is.

        key0_apart: token 0 stays, or gets, one of its own.
        """
        apart = key0_apart and self.tokens[0] == 0
        own = int(apart and self.size > 1 and self.sizes[0] == 1)
        step = max(1, -(-(len(self.sizes) - own) // side))
        if step == 1:
            return np.arange(len(self.sizes)), self
        starts = np.arange(0, len(self.sizes) - own, step) + own  # where rows begin, that is: the axes stay in step
        starts = np.concatenate([[0], np.maximum(starts, 1)]) if apart else starts
        return starts, Cells(self.tokens, np.add.reduceat(self.sizes, starts).tolist(), self.size * step)

    def groups(self, count: int) -> Tensor:
        """The number of the row or column that each of so many tokens is in, -1 for none."""
        import torch

        groups_T = torch.full((count,), -1)
        groups_T[torch.tensor(self.tokens)] = torch.repeat_interleave(
            torch.arange(len(self.sizes)), torch.tensor(self.sizes)
        )
        return groups_T
