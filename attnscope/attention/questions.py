"""What can be asked of every row of an attention operator, as plain data.

    answers = P.together([Entropy(), TopK(5)])     # one pass over the rows, or over the tiles
    answers[Entropy()]

`rows.py` says how a dense block of rows answers each of them; an engine with a faster way has a table of its own
(`tile_readers.py`, `operator.UniformAttention`) and leaves what it does not know to the rows. Torch is not imported.

Shapes: B text, H head, Q query, K key, M feature, G group of tokens, k kept keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor


class Question:
    """Something asked of every row. Two with the same values (tensors: the same objects) are one question."""

    __match_args__: ClassVar[tuple[str, ...]] = ()

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        plain = (int, bool, tuple, type(None))
        values = (getattr(self, name) for name in self.__match_args__)  # the names of its fields, in order
        return type(self), *(value if isinstance(value, plain) else id(value) for value in values)

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Question) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, eq=False)
class RowSum(Question):
    """(B, H, Q): what each row sums to; less than 1 where a sink logit takes a share."""


@dataclass(frozen=True, eq=False)
class SizeSum(Question):
    """(B, H, Q): the sum of |w| of each row; of weights without a sign it is the row's sum."""


@dataclass(frozen=True, eq=False)
class Entropy(Question):
    """(B, H, Q) nats: -sum p ln p of the row divided by its sum; with `skip_key0`, of the row without key 0."""

    skip_key0: bool = False


@dataclass(frozen=True, eq=False)
class SumOfSquares(Question):
    """(B, H, Q): the sum of the squared weights of the row divided by its sum."""


@dataclass(frozen=True, eq=False)
class MaxWeight(Question):
    """(B, H, Q): the largest weight of each row; with `skip_key0`, of the others, NaN where a row sees no other key."""

    skip_key0: bool = False


@dataclass(frozen=True, eq=False)
class Holding(Question):
    """(B, H, Q): the smallest number of keys that hold `percent` of what the row sums to; 0 in a row of zeros.

    Where rounding decides which key is the last, engines differ by one.
    """

    percent: int


@dataclass(frozen=True, eq=False)
class Distance(Question):
    """(B, H, Q) tokens: sum A[i,j] (i - j) of the row divided by its sum."""


@dataclass(frozen=True, eq=False)
class AbsoluteDistance(Question):
    """(B, H, Q) tokens: sum A[i,j] |i - j| of the row divided by its sum, for queries that see keys on both sides."""


@dataclass(frozen=True, eq=False)
class At(Question):
    """(B, H, Q): the weight of query i on key `key_BQ[b, i]`, (B or 1, Q); 0 where that key does not exist.

    Key -1 says that nothing is asked of the query.
    """

    key_BQ: Tensor


@dataclass(frozen=True, eq=False)
class Back(Question):
    """(B, H, Q): the weight on the key `steps` tokens back; 0 is the query's own, 1 the previous token."""

    steps: int


@dataclass(frozen=True, eq=False)
class Key(Question):
    """(B, H, Q): the weight on the same key of every row, such as key 0."""

    position: int


@dataclass(frozen=True, eq=False)
class EqualLabels(Question):
    """(B, H, Q): the mass on the keys j <= i - gap whose label (B, K) equals the query's (B, Q)."""

    query_label_BQ: Tensor
    key_label_BK: Tensor
    gap: int


@dataclass(frozen=True, eq=False)
class Window(Question):
    """(B, H, Q): the mass on the last `width` keys, the query's own included."""

    width: int


@dataclass(frozen=True, eq=False)
class Features(Question):
    """(B, H, Q, M): P @ F for features of the keys, (K, M) or (B, K, M).

    of_size: of a signed map, P is |w| as a share of the row's sum of |w|.
    """

    features: Tensor
    of_size: bool = False


@dataclass(frozen=True, eq=False)
class GroupMass(Question):
    """(B, H, query groups, key groups): the mass between groups, summed over the queries and the keys of each.

    Groups are numbered from 0, (B, Q) and (B, K); a token of group -1 is in none. sizes: how many there are, where
    that is known: a count of what lies on a device makes the host wait.
    """

    query_group_BQ: Tensor
    key_group_BK: Tensor
    sizes: tuple[int, int] | None = None

    @cached_property
    def counts(self) -> tuple[int, int]:
        """How many groups of queries and of keys there are; without `sizes` they are counted."""
        return self.sizes or (int(self.query_group_BQ.max()) + 1, int(self.key_group_BK.max()) + 1)


@dataclass(frozen=True, eq=False)
class Received(Question):
    """(B, H, K): what each key receives, the sum over the queries of `query_share_BQ` (B or 1, Q) times their weight.

    With 1 / n for each of n queries, and 0 for padding, it is the mean over a text's own rows.
    """

    query_share_BQ: Tensor


@dataclass(frozen=True, eq=False)
class TopK(Question):
    """The k largest weights of every row, largest first, and their keys: a pair of (B, heads, Q, k).

    heads: of which heads, None for all. With `skip_key0`, key 0 is not counted. Weights are NaN where a row sees fewer
    keys.
    """

    k: int
    heads: tuple[int, ...] | None = None
    skip_key0: bool = False


@dataclass(frozen=True, eq=False)
class Strongest(Question):
    """The k largest weights of some queries on some keys, largest first, and those keys: per text a pair of (h, q, k).

    heads: of which heads. query, key: the positions per text, ascending; of fewer than k keys all are given.
    Weights are NaN where a row sees fewer of them.
    """

    k: int
    heads: tuple[int, ...]
    query: tuple[Sequence[int], ...]
    key: tuple[Sequence[int], ...]
