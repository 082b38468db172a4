"""What fits: whether whole maps go into a page of so many bytes, and what is made of them where they do not.

Plain arithmetic, before a forward pass and after it. Sizes are upper bounds: deflate makes less of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from attnscope.model.selection import HeadsByLayer
from attnscope.viewer.pack import Bits
from attnscope.viewer.side import MOST_KEYS, Wanted

BASE64 = 4 / 3
ALL_KEYS = 1 << 31  # of a query: no limit
RELATION_BYTES = 6  # a key and its weight
MOST_ROWS, LEAST_ROWS = 500, 16  # of a binned map
DEFLATED = 1 / 3  # of their bytes, what whole maps may come to: where they could fit, they are packed and seen
STEP_TOKENS = 256  # a page of a longer text holds no steps
STEPS, RELATIONS, MAPS = 0.25, 0.4, 0.5  # shares of the page; only short texts have steps
WHY = 0.25  # the most that logits taken apart may take of it


class Shape(Protocol):
    """A layer, as the model's geometry has it."""

    @property
    def index(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...


@dataclass(frozen=True)
class Plan:
    """A page of at most `max_mb` megabytes; whole: heads whose maps stay whole whatever they take.

    listed: of tables, with every key that they list; where that is too much, with fewer keys and without maps.
    """

    max_mb: float = 20.0
    bits: Bits = 8
    whole: HeadsByLayer = field(default_factory=dict)
    listed: bool = False

    @property
    def room(self) -> float:
        """Bytes of arrays."""
        return self.max_mb * 1e6

    @property
    def why_room(self) -> float:
        """Bytes that logits taken apart may take."""
        return self.room * WHY

    def why_bytes(self, components: int, queries: int, tokens: int) -> float:
        """What so many components of so many queries take at most, over all heads."""
        return 4 * components * queries * tokens * BASE64

    def map_bytes(self, heads: int, rows: int) -> float:
        """What so many causal maps take at most."""
        return heads * rows * (rows + 1) / 2 * self.bits / 8 * BASE64

    def may_be_whole(self, heads: int, tokens: int) -> bool:
        """Whether it is worth packing whole maps, to see whether they fit."""
        return self.map_bytes(heads, tokens) * DEFLATED <= self.room

    def packed_whole(self) -> Wanted:
        """Every map as it was kept."""
        return Wanted(self.bits, top_k=ALL_KEYS if self.listed else MOST_KEYS)

    def shrunk(self, heads: int, tokens: int) -> Wanted:
        """Binned maps and relations, each within its share of the page."""
        rows = math.isqrt(int(2 * MAPS * self.room / (max(heads, 1) * self.bits / 8 * BASE64)))
        rows = min(max(rows, LEAST_ROWS), MOST_ROWS)
        top_k = int(self.room * RELATIONS / (max(heads, 1) * tokens * RELATION_BYTES * BASE64))
        return Wanted(self.bits, rows, min(top_k, MOST_KEYS, tokens), self.whole, bins=not self.listed)

    def request(self, layers: Sequence[Shape], tokens: int) -> dict[str, Any]:
        """What to keep of a pass, as fields of `Request`: whole matrices if they may fit, else bins and relations."""
        heads = sum(layer.heads for layer in layers)
        kept = {"operands": self._steps({layer.index: layer for layer in layers}, tokens)}
        if self.may_be_whole(heads, tokens):
            return {**kept, "weights": True}
        less = self.shrunk(heads, tokens)
        relations = {"relations": less.top_k > 0, "top_k": less.top_k or None}
        return {**kept, **relations, "maps": "all", "map_side": less.rows, "weights": self.whole or False}

    def _steps(self, layers: Mapping[int, Shape], tokens: int) -> HeadsByLayer:
        """The heads whose q, k and v have room: all, else those that stay whole, else none."""
        for chosen in ({index: range(layer.heads) for index, layer in layers.items()}, self.whole):
            widths = {index: 2 * layers[index].head_dim + layers[index].value_dim for index in chosen}
            numbers = sum(len(heads) * widths[index] for index, heads in chosen.items())
            if tokens <= STEP_TOKENS and 4 * numbers * tokens * BASE64 <= self.room * STEPS:
                return chosen
        return {}
