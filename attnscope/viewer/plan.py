"""What fits: whether whole maps go into a page of so many bytes, and what is made of them where they do not.

Plain arithmetic, before a forward pass and after it. Sizes are upper bounds: deflate makes less of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from attnscope.viewer.pack import Bits
from attnscope.viewer.side import MOST_KEYS, Wanted

Heads = Mapping[int, Sequence[int]]  # {layer: heads}
BASE64 = 4 / 3
RELATION_BYTES = 6  # a key and its weight
MOST_ROWS, LEAST_ROWS = 500, 16  # of a binned map
DEFLATED = 1 / 3  # of their bytes, what whole maps may come to: where they could fit, they are packed and seen
STEP_TOKENS = 256  # a page of a longer text holds no steps
SHARE = 1 / 4  # of the page for steps, and for relations


@dataclass(frozen=True)
class Plan:
    """A page of at most `max_mb` megabytes; whole: heads whose maps stay whole whatever they take."""

    max_mb: float = 20.0
    bits: Bits = 8
    whole: Heads = field(default_factory=dict)

    @property
    def room(self) -> float:
        """Bytes of arrays."""
        return self.max_mb * 1e6

    def map_bytes(self, heads: int, rows: int) -> float:
        """What so many causal maps take at most."""
        return heads * rows * (rows + 1) / 2 * self.bits / 8 * BASE64

    def may_be_whole(self, heads: int, tokens: int) -> bool:
        """Whether it is worth packing whole maps, to see whether they fit."""
        return self.map_bytes(heads, tokens) * DEFLATED <= self.room

    def packed_whole(self) -> Wanted:
        """Every map as it was kept."""
        return Wanted(self.bits)

    def shrunk(self, heads: int, tokens: int) -> Wanted:
        """Maps binned to take half of the page, relations a quarter."""
        rows = math.isqrt(int(self.room / (max(heads, 1) * self.bits / 8 * BASE64)))
        rows = min(max(rows, LEAST_ROWS), MOST_ROWS)
        top_k = int(self.room * SHARE / (max(heads, 1) * tokens * RELATION_BYTES * BASE64))
        return Wanted(self.bits, rows, min(top_k, MOST_KEYS, tokens), self.whole)

    def steps(self, widths: Mapping[int, tuple[int, int]], tokens: int) -> Heads:
        """The heads whose q, k and v have room: all, else those that stay whole, else none.

        widths: {layer: (heads, numbers per token of q, k and v of one head)}.
        """
        every = {layer: range(heads) for layer, (heads, _) in widths.items()}
        for chosen in (every, self.whole):
            numbers = sum(len(heads) * widths[layer][1] for layer, heads in chosen.items())
            if tokens <= STEP_TOKENS and 4 * numbers * tokens * BASE64 <= self.room * SHARE:
                return chosen
        return {}
