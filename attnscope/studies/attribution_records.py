"""A logit that was taken apart, and who wrote what of it; plain data, without torch.

Shapes: N row, C component, Q query that was asked for, K key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from attnscope.utils.display import head_name

SMALLEST = 0.1  # a sum of contrasts below this has no shares


@dataclass(frozen=True)
class Component:
    """Who writes a part of the residual: `embedding`, a `head`, or the `rest` of a block; layer: of the block.

    position: of the token that a head read, where its output is split by its own keys. stack: of its layer, where that
    is another than the model's own: `encoder`, `cross`.
    """

    kind: str
    layer: int | None = None
    head: int | None = None
    position: int | None = None
    stack: str | None = None

    @property
    def name(self) -> str:
        """As a table names it: `L2H1`, `L2 rest`, `cross L2H1`."""
        own = "" if self.stack is None else f"{self.stack} "
        if self.layer is None:
            return own + self.kind
        return own + (f"L{self.layer} {self.kind}" if self.head is None else head_name(self.layer, self.head))


ALL_KEYS = Component("all keys")


@dataclass(frozen=True)
class LogitQuery:
    """A head, one of its queries and one of that query's keys, None for the one of the largest logit.

    against: another key, None for the mean of all that the query sees. side: `key`, `query`, or `both`, each component
    of the query with each of the key. by_tokens: split what a head wrote by the tokens that it read. verify: so many of
    the components with the largest contrasts are replaced one by one, and the logit is made again. stack: of the layer,
    where it is another than the model's own.
    """

    layer: int
    head: int
    query: int
    key: int | None = None
    against: int | None = None
    side: str = "key"
    by_tokens: bool = False
    verify: int = 0
    stack: str | None = None


@dataclass(frozen=True)
class LogitParts:
    """A logit, taken apart: a row per component, or pair of components.

    side: of `components`; others: the components of the query where they are of the key. base_N: what each gives to
    what the key is compared with. logit, base: of the key, and of what it is compared with, as the model has them,
    before a soft-cap. true_N: what the logit loses where the component is replaced; NaN where that was not tried.
    visible: how many keys the query sees. softcap: what the family caps the logit at. sinks: whether the head has sink
    logits, which see what all keys share; then that is the last row, `all keys`, a contrast without a contribution.
    """

    asked: LogitQuery
    side: str
    components: tuple[Component, ...]
    others: tuple[Component | None, ...]
    contribution_N: np.ndarray
    base_N: np.ndarray
    true_N: np.ndarray
    logit: float
    base: float
    visible: int
    softcap: float | None
    sinks: bool

    @property
    def contrast_N(self) -> np.ndarray:
        """What each component gives to this key rather than to what it is compared with."""
        return self.contribution_N - self.base_N

    @property
    def share_N(self) -> np.ndarray:
        """The contrast over the sum of contrasts; NaN where that is smaller than 0.1, and of what all keys share."""
        own_N = np.array([component != ALL_KEYS for component in self.components])
        whole = self.contrast_N[own_N].sum()
        return (
            np.where(own_N, self.contrast_N / whole, np.nan) if abs(whole) >= SMALLEST else np.full(len(own_N), np.nan)
        )

    @property
    def sum(self) -> float:
        """Of the contributions."""
        return float(self.contribution_N.sum())


@dataclass(frozen=True)
class KeyParts:
    """What each component gives to the logits of one head.

    components: in the model's order, then `bias`, and `position` where positions add to the logits. parts_CQK: float64.
    logit_QK: as the model has them, before a soft-cap; NaN where a query does not see a key. softcap, sinks: as
    `LogitParts` has them.
    """

    layer: int
    head: int
    queries: tuple[int, ...]
    components: tuple[Component, ...]
    parts_CQK: np.ndarray
    logit_QK: np.ndarray
    softcap: float | None
    sinks: bool


LAYER, FINAL = "layer", "final"  # what reads a residual: a layer, or what follows the last
SHARE, WEIGHT = "share", "weight"


class Block(NamedTuple):
    """What writes the residual: the `embedding`, or a part of a layer: `attention`, `mlp`, or as the model calls it."""

    kind: str
    layer: int | None = None

    @property
    def name(self) -> str:
        """As a table names it: `L2 mlp`."""
        return self.kind if self.layer is None else f"L{self.layer} {self.kind}"


@dataclass(frozen=True)
class DepthPoint:
    """What one reader of the residual gets from each earlier block, S streams, Q tokens.

    use: `layer`, `final`, or of a mixture of blocks `q`, `k`, `v`, `attention`, `mlp`. number_CSQ: the share of the
    residual, or the weight. norm_CSQ: of what the block wrote, or of what its weight gives. tokens: the positions, None
    for one mean over all.
    """

    stack: str
    layer: int | None
    use: str
    blocks: tuple[str, ...]
    number_CSQ: np.ndarray
    norm_CSQ: np.ndarray
    tokens: tuple[int, ...] | None


@dataclass(frozen=True)
class DepthParts:
    """All readers of one pass. measure: SHARE or WEIGHT. error: by how much the parts differ from what is read."""

    measure: str
    points: tuple[DepthPoint, ...]
    error: float
