"""What was kept of a pass, as records: who prints, draws or sends them knows neither a model nor torch.

What is kept of layers, then all heads of a text as columns and as a table, one head, and relations as numbers. Arrow is
imported for a table alone: it takes 25 MiB, and a pass needs none.

Shapes: B text, H head (or kv head, where a view averages them), N heads of all layers, Q query, K key, k kept keys,
T token, S span, G unit, D width of q and k, V width of v.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attnscope.errors import UsageError
from attnscope.inputs.prompt import Span
from attnscope.metrics.metrics import COLUMNS, KEPT_FIRST, MASS, order_of
from attnscope.metrics.roles import NONE
from attnscope.metrics.texts import MAP_SIDE, Cells
from attnscope.model.selection import STACKS, StackLayer, has_decoder_heads, is_linear
from attnscope.observe.request import PerLayer, codes
from attnscope.utils.display import head_name

if TYPE_CHECKING:
    import pyarrow as pa
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
    rows: the units with a query that was asked about, which tables and pictures show; None for all.
    """

    units: tuple[Span, ...]
    share_GG: np.ndarray
    layers: tuple[int, ...]
    group: str = "tokens"
    rows: tuple[int, ...] | None = None

    @property
    def shown(self) -> np.ndarray:
        """The units that tables and pictures show, in order."""
        return np.arange(len(self.units)) if self.rows is None else np.array(self.rows, np.intp)

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
        from attnscope.utils.tables import as_table, texts_at

        share_RG = self.share_GG[self.shown]
        order_Rk = np.argsort(-share_RG, axis=-1, kind="stable")[:, :top_k]
        share_Rk = np.take_along_axis(share_RG, order_Rk, -1)
        row, place = np.nonzero((share_Rk > 0) & (share_Rk >= (min_weight or 0)))
        query, key = self.shown[row], order_Rk[row, place]
        names = [unit.name for unit in self.units]
        return as_table(
            {
                "query": query.astype(np.int32),
                "query_token": texts_at(names, query),
                "key": key.astype(np.int32),
                "key_token": texts_at(names, key),
                "weight": share_Rk[row, place],
            }
        )

    def binned(self, side: int = MAP_SIDE) -> tuple[np.ndarray, int, int]:
        """The rows that are shown with neighbouring units put together, at most `side` a side, and how many a row and
        a column hold.

        Sum over keys, mean over query tokens; NaN where nothing is attributed.
        """
        by_row, by_column = (max(1, -(-count // side)) for count in (len(self.shown), len(self.units)))
        starts = np.arange(0, len(self.shown), by_row)
        tokens_R1 = np.array([[unit.stop - unit.start] for unit in self.units])[self.shown]
        columns = np.add.reduceat(self.share_GG[self.shown], np.arange(0, len(self.units), by_column), axis=1)
        rows = np.add.reduceat(columns * tokens_R1, starts, axis=0) / np.add.reduceat(tokens_R1, starts, axis=0)
        return np.where(rows > 0, rows, np.nan).astype(np.float32), by_row, by_column


@dataclass(frozen=True)
class Score:
    """One metric of all heads, (N,) each, NaN for null: its value, and what uniform attention would score.

    low, high: the ends of an interval of the value, None where none was measured.
    """

    value: np.ndarray
    null: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


@dataclass(frozen=True)
class HeadColumns:
    """All heads (with by_kv, the means over the heads of each kv head) of all layers, one entry each, in model order.

    layer, stack, head, kv_head: which head; head is -1 for the mean over a kv head's group, kv_head where it is not
    known. role: what it is called,
    one word or `-`: the first role that an atlas names where there is one, else text_role. text_role: the role that it
    has on this text. atlas_roles: all that the atlas names, joined by blanks; None without an atlas. near_uniform:
    True, False, or None where the text cannot tell. scores: {metric id: Score}. top_key, top_key_mass: the key that
    receives most, and its mean mass. relation_*: its strongest relation; the weight is NaN where it has none. kept:
    whether the view keeps it.
    """

    layer: np.ndarray
    stack: np.ndarray
    head: np.ndarray
    kv_head: np.ndarray
    role: np.ndarray
    text_role: np.ndarray
    atlas_roles: np.ndarray
    near_uniform: np.ndarray
    scores: Mapping[str, Score]
    top_key: np.ndarray
    top_key_mass: np.ndarray
    relation_weight: np.ndarray
    relation_query: np.ndarray
    relation_key: np.ndarray
    kept: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence[HeadColumns]) -> HeadColumns:
        """Those of several stacks as one; a metric without an interval in one of them has none.

        One that was not measured in a stack is null there.
        """
        if len(parts) == 1:
            return parts[0]
        of_heads = [part.name for part in fields(cls) if part.name != "scores"]
        missing = [Score(*[np.full(len(part.layer), np.nan, np.float32)] * 2) for part in parts]
        scores = {}
        for name in dict.fromkeys(name for part in parts for name in part.scores):
            of_parts = [part.scores.get(name, null) for part, null in zip(parts, missing, strict=True)]
            ends = ([getattr(score, end) for score in of_parts] for end in ("value", "null"))
            scores[name] = Score(*map(np.concatenate, ends))
        joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in of_heads}
        return cls(**joined, scores=scores)

    def named(self, roles: Mapping[tuple[int, int], Sequence[str]]) -> HeadColumns:
        """The same with the roles of an atlas, {(layer, head): names}.

        An atlas is of the heads of decoders and of linear layers: those of other stacks have none of its roles, and the
        mean over a kv head's group is nothing that it could name.
        """
        places = zip(self.layer.tolist(), self.head.tolist(), self.stack.tolist(), strict=True)
        of_heads = [
            roles.get((StackLayer(layer, stack) if is_linear(stack) else layer, head), ())
            if has_decoder_heads(stack) or is_linear(stack)
            else ()
            for layer, head, stack in places
        ]
        role, atlas_roles = np.empty_like(self.role), np.full(len(self.head), None)
        role[:] = [next(iter(names), NONE) for names in of_heads]
        single = self.head >= 0
        atlas_roles[single] = np.array([" ".join(names) for names in of_heads], object)[single]
        return replace(self, role=role, atlas_roles=atlas_roles)

    def order(self, sort: str | None) -> np.ndarray:
        """Places of the kept heads, in model order or by score; nulls last, ties in the model's order.

        Raises UsageError for a metric that was not measured.
        """
        kept = np.flatnonzero(self.kept)
        if sort is None:
            return kept
        return ranked(kept, sort, self.scores, {name: getattr(self, name) for name in COLUMNS})

    def table(self, order: np.ndarray, tokens: Sequence[str], top_key: np.ndarray) -> pa.Table:
        """The heads of some places as rows: which, roles, top key, then a column per metric, and the stack.

        tokens: of all stacks; top_key: where among them the top key of each head is.
        """
        from attnscope.utils.tables import as_table, flags, numbers, texts_at, words

        head, mass, unasked = self.head[order], self.scores.get(MASS.id), np.isnan(self.top_key_mass[order])
        return as_table(
            {
                "layer": self.layer[order],
                "head": numbers(head, head < 0),
                "kv_head": numbers(self.kv_head[order], self.kv_head[order] < 0),
                "role": words(self.role[order].tolist()),
                "text_role": words(self.text_role[order].tolist()),
                "atlas_roles": words(self.atlas_roles[order].tolist()),
                "near_uniform": flags(self.near_uniform[order].tolist()),
                "top_key": numbers(self.top_key[order], unasked),
                "top_key_token": texts_at(tokens, top_key[order], unasked),
                "top_key_mass": self.top_key_mass[order],
                **{name: score.value[order].astype(np.float32) for name, score in self.scores.items()},
                **({"uniform": mass.null[order].astype(np.float32)} if mass else {}),
                "stack": texts_at(STACKS, codes(self.stack[order])),
            }
        )


def ranked(
    kept: np.ndarray, sort: str, scores: Mapping[str, Score], others: Mapping[str, np.ndarray], of: str = "observation"
) -> np.ndarray:
    """Some places in the order of a score, or of another column; nulls last, ties in their own order.

    Raises UsageError for what was not measured; of: what did not measure it.
    """
    name, ascending = order_of(sort)
    if name in others:
        score = others[name][kept]
    elif name in scores:
        metric = scores[name]
        score = (metric.value - metric.null if name == MASS.id else metric.value)[kept]
    else:
        raise UsageError(f"this {of} did not measure {name}", f"it has {', '.join(scores)}")
    return kept[np.lexsort((np.nan_to_num(score) * (1 if ascending else -1), np.isnan(score)))]


def first_ranked(scores: Mapping[str, Score], places: np.ndarray) -> str | None:
    """What heads of some places are sorted by where no order is named: the first metric that one of them has.

    `mass` comes first, then metrics as tables list them. None where nothing was measured.
    """
    order = [name for name in dict.fromkeys((MASS.id, *KEPT_FIRST, *scores)) if name in scores]
    return next((name for name in order if np.isfinite(scores[name].value[places]).any()), next(iter(order), None))


def unranked(scores: Mapping[str, Score], places: np.ndarray, sort: str | None) -> list[str]:
    """A line where no head of some places has the metric that they are to be sorted by."""
    name = "" if sort is None else order_of(sort)[0]
    if name not in scores or name == MASS.id or np.isfinite(scores[name].value[places]).any():
        return []
    how = f"`attnscope metrics {name}` says which heads can have it"
    return [f"no head here has {name}: heads are in the model's order; {how}"]


def with_others(listed: pa.Table, others: Sequence[tuple[str, int, str]], sort: str | None) -> pa.Table:
    """A table of heads with a last column `type`, and a row of nulls for each (stack, layer, type) that is no softmax
    attention."""
    from attnscope.utils.tables import numbers, texts_at, words

    if not others:
        return listed.append_column("type", texts_at([""], np.zeros(len(listed), np.int32), np.ones(len(listed), bool)))
    stacks, layers, types = zip(*others, strict=True)
    place = np.arange(len(listed) + len(types), dtype=np.int32)
    layer = np.concatenate([listed["layer"].to_numpy(), np.array(layers, np.int32)])
    stack = [*listed["stack"].to_pylist(), *stacks]
    whole = listed.take(numbers(place, place >= len(listed)))
    whole = whole.set_column(whole.column_names.index("layer"), "layer", numbers(layer))
    whole = whole.set_column(whole.num_columns - 1, "stack", words(stack).dictionary_encode())
    whole = whole.append_column("type", words([*[None] * len(listed), *types]).dictionary_encode())
    if sort is not None and order_of(sort)[0] != "layer":
        return whole
    return whole.take(numbers(np.lexsort((layer, codes(stack)) if sort is None else (layer,))))


@dataclass(frozen=True)
class Relation:
    """One query looking at one key: token positions and the weight."""

    query: int
    key: int
    weight: float


@dataclass(frozen=True)
class Head:
    """What one head (with by_kv, the mean of the heads of one kv head) does with a text; scores are NaN for null.

    role: what it is called, one word or `-`: the first of atlas_roles where there is an atlas, else text_role.
    text_role: its role on this text. atlas_roles: all that the atlas names it, none without one. kv_head: None where
    weights alone were read, which do not tell. uniform: the `mass`
    that uniform attention would have, None where no keys were chosen. stack: its layer's. in_other_stack: whether a
    number alone means a layer of another stack.
    """

    layer: int
    head: int | None
    kv_head: int | None
    role: str
    score: Mapping[str, float]
    strongest: Relation | None
    stack: str = "decoder"
    near_uniform: bool | None = None
    top_key: int = 0
    top_key_mass: float = float("nan")
    uniform: float | None = None
    text_role: str = NONE
    atlas_roles: tuple[str, ...] = ()
    in_other_stack: bool = False

    @property
    def mass(self) -> float | None:
        """What the chosen queries give the chosen keys; NaN where none sees one, None where no keys were chosen."""
        return self.score.get("mass")

    @property
    def name(self) -> str:
        """`L27H3`, `L27KV1` for the mean over a kv head's group, `cross L3H2` in another stack than the decoder's."""
        return f"{self.stack} " * self.in_other_stack + head_name(self.layer, self.number, self.head is None)

    @property
    def number(self) -> int:
        """Its place in the layer: of the mean over a kv head's group that of the kv head, which is known then."""
        number = self.kv_head if self.head is None else self.head
        assert number is not None
        return number


class RelationRows(NamedTuple):
    """Relations as numbers, head after head: which head and how many rows it has, and query, key and weight of each.

    which: layer, head (-1 where kv heads were averaged), kv head, and the stack's place in STACKS, (N, 4) int32. rows:
    how many each head has, (N,).
    """

    which: np.ndarray
    rows: np.ndarray
    query: np.ndarray
    key: np.ndarray
    weight: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence[RelationRows]) -> RelationRows:
        """Those of several stacks or texts, one after the other."""
        if len(parts) == 1:
            return parts[0]
        columns = zip(*parts, NO_RELATIONS, strict=True)
        return cls(*(np.concatenate(of, dtype=of[-1].dtype, casting="same_kind") for of in columns))

    @property
    def stack(self) -> np.ndarray:
        """The stack of each row, a place in STACKS."""
        return np.repeat(self.which[:, 3].astype(np.int8), self.rows)

    def columns(self) -> dict[str, np.ndarray]:
        """A number for each row: layer, head, kv_head, query, key, weight and stack."""
        layer, head, kv_head = (np.repeat(number, self.rows) for number in np.ascontiguousarray(self.which[:, :3].T))
        names = {"query": self.query, "key": self.key, "weight": self.weight}
        return {"layer": layer, "head": head, "kv_head": kv_head, **names, "stack": self.stack}


NO_RELATIONS = RelationRows(
    np.empty((0, 4), np.int32), np.empty(0, np.int64), *(np.empty(0, kind) for kind in (np.int32, np.int32, np.float32))
)
