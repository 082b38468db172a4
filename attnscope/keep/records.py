"""What was kept of a pass, as records: who prints, draws or sends them knows neither a model nor torch.

Shapes: B text, H head (or kv head, where a view averages them), Q query, K key, T token, S span, G unit, k kept keys,
D width of q and k, V width of v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from attnscope.inputs.prompt import Span
from attnscope.keep.layers import PerLayer
from attnscope.metrics.binned import MAP_SIDE, Cells
from attnscope.utils.tables import as_table, texts_at

if TYPE_CHECKING:
    from torch import Tensor


class KeptKeys(NamedTuple):
    """The kept keys of a text's queries: heads (H numbers), weight (H, Q, k), NaN where there is none, and key.

    query: which queries, Q numbers.
    """

    heads: list[int]
    weight: Tensor
    key: Tensor
    query: Sequence[int]


class TokenWeights(NamedTuple):
    """Of a layer's kept heads (H numbers) every token's weight, and what uniform attention gives it, (B, H, T) each.

    NaN where the mask hides all that is asked about from it, or it from them, and where it has no query to ask with.
    """

    heads: list[int]
    weight: Tensor
    uniform: Tensor


class SpanPairs(NamedTuple):
    """Of a layer's kept heads (H numbers) the mass of every pair of spans, and that of uniform attention, (B, H, S, S).

    Query spans before key spans; NaN where no query of the one sees a key of the other.
    """

    heads: list[int]
    mass: Tensor
    uniform: Tensor


class Matrices(NamedTuple):
    """Of a layer: which heads (H numbers), and their weights, (B, H, Q, K) fp32, of one text (H, Q, K)."""

    heads: list[int]
    weights: Tensor


class KeptOperands(NamedTuple):
    """Logits are scale * q.k, capped, + bias; a softmax over the keys that a query sees, and the sink, is the weights.

    q_BHTD, k_BHTD, v_BHTV: fp32, the kv heads' as often as heads read them. bias_BHTT: what is added to the logits,
    -inf for keys that are hidden though they come before the query; None where there is nothing to add.
    sinks_H: sink logits, None without.
    """

    heads: list[int]
    q_BHTD: Tensor
    k_BHTD: Tensor
    v_BHTV: Tensor
    scale: float
    cap: float | None
    bias_BHTT: Tensor | None
    sinks_H: Tensor | None


@dataclass(frozen=True)
class LayerMaps:
    """What can be drawn: values[layer] is (H, rows, columns) float32, NaN where nothing is visible; heads[layer] (H,).

    rows, columns: the queries and the keys, and how many of them each row and column holds. rule: "sum" over keys
    and mean over queries, or "max". key0: the mean mass on key 0 where it was split off binned weights, (H,).
    """

    values: PerLayer[np.ndarray]
    heads: PerLayer[Sequence[int]]
    rows: Cells
    columns: Cells
    rule: str
    key0: PerLayer[np.ndarray] = field(default_factory=PerLayer)

    @property
    def bin_size(self) -> int:
        """How many keys a column holds."""
        return self.columns.size


@dataclass(frozen=True)
class Rollout:
    """One text, rolled out through `layers`.

    share_GG: how much of each unit (row: mean over its tokens) is attributed to each (column: sum over its tokens).
    Rows sum to 1, whatever sink logits take: every layer's rows were divided by their sum. group: what the units are.
    """

    units: tuple[Span, ...]
    share_GG: np.ndarray
    layers: tuple[int, ...]
    group: str = "tokens"

    @property
    def longest(self) -> int:
        """Tokens of the longest unit."""
        return max(unit.stop - unit.start for unit in self.units)

    def facts(self, layers: Sequence[int]) -> dict[str, Any]:
        """What a manifest says of it; layers: all of the model's."""
        return {
            "layers": list(self.layers),
            "passed_over": [layer for layer in layers if layer not in self.layers],
            "units": len(self.units),
            "row_sum_error": self.row_sum_error,
        }

    @property
    def row_sum_error(self) -> float:
        """The largest |row sum - 1|."""
        return float(np.abs(self.share_GG.sum(-1, dtype=np.float64) - 1).max())

    def table(self, top_k: int | None = None, min_weight: float | None = None) -> pa.Table:
        """What each unit is attributed to: the `top_k` largest shares of a row (None: all but 0), largest first.

        Columns query, query_token, key, key_token, weight; shares under min_weight are left out.
        """
        order_Gk = np.argsort(-self.share_GG, axis=-1, kind="stable")[:, :top_k]
        share_Gk = np.take_along_axis(self.share_GG, order_Gk, -1)
        query, place = np.nonzero((share_Gk > 0) & (share_Gk >= (min_weight or 0)))
        key = order_Gk[query, place]
        names = [unit.name for unit in self.units]
        return as_table(
            {
                "query": query.astype(np.int32),
                "query_token": texts_at(names, query),
                "key": key.astype(np.int32),
                "key_token": texts_at(names, key),
                "weight": share_Gk[query, place],
            }
        )

    def binned(self, side: int = MAP_SIDE) -> tuple[np.ndarray, int]:
        """The shares with neighbouring units put together, at most `side` a side, and how many one row stands for.

        Sum over keys, mean over query tokens; NaN where nothing is attributed.
        """
        step = max(1, -(-len(self.units) // side))
        starts = np.arange(0, len(self.units), step)
        tokens_G1 = np.array([[unit.stop - unit.start] for unit in self.units])
        columns = np.add.reduceat(self.share_GG, starts, axis=1)
        rows = np.add.reduceat(columns * tokens_G1, starts, axis=0) / np.add.reduceat(tokens_G1, starts, axis=0)
        return np.where(rows > 0, rows, np.nan).astype(np.float32), step
