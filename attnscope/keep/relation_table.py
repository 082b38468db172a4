"""Relations as columns of numbers, and as a table: of every stack, filtered, in their order.

Shapes: H head (or kv head, where a view averages them), Q query, k kept keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import pyarrow as pa

from attnscope.keep.layers import LayerKey, PerLayer
from attnscope.keep.records import KeptKeys
from attnscope.keep.view import ENTRIES, View
from attnscope.model.selection import CROSS, STACKS
from attnscope.utils.tables import as_table, numbers, texts_at

COLUMNS = ("layer", "head", "kv_head", "query", "key", "weight", "stack")


def numbers_of(
    kept: PerLayer[KeptKeys],
    units: tuple[int, int],
    kv_of: PerLayer[tuple[int, int]],
    view: View,
    stack: str,
    min_weight: float | None,
) -> Iterator[dict[str, np.ndarray]]:
    """The relations of a stack as columns of numbers, layers of one shape together; see `joined`.

    units: how many queries and keys there are. kv_of: {layer: (heads, kv heads)}. Those under min_weight are left out,
    by their size where the view ranks by size.
    """
    by_kv = view.by_kv
    for _, alike in groupby(kept.items(), lambda one: one[1].weight.shape[1:]):
        layers = list(alike)
        weight_HQk = np.concatenate([np.asarray(one.weight[:, : units[0]]) for _, one in layers])
        key_HQk = np.concatenate([np.asarray(one.key[:, : units[0]]) for _, one in layers], dtype=np.int32)
        keep = ~np.isnan(weight_HQk) & (key_HQk < units[1])
        if min_weight is not None:
            keep &= (np.abs(weight_HQk) if view.by_size else weight_HQk) >= min_weight
        which = [_which(key, head, kv_of[key], by_kv) for key, one in layers for head in one.heads]
        kept_HQ = keep @ np.ones(keep.shape[-1], np.int32)
        of_heads = np.array(which, np.int32).reshape(-1, 3).T
        layer, head, kv_head = (np.repeat(number, kept_HQ.sum(-1)) for number in of_heads)
        query_Q = np.array(layers[0][1].query[: units[0]], np.int32)
        yield {
            "layer": layer,
            "head": np.full_like(head, -1) if by_kv else head,
            "kv_head": kv_head,
            "query": np.repeat(np.broadcast_to(query_Q, kept_HQ.shape), kept_HQ.ravel()),
            "key": key_HQk[keep],
            "weight": weight_HQk[keep],
            "stack": np.full(len(layer), STACKS.index(stack), np.int8),
        }


def _which(key: LayerKey, head: int, heads: tuple[int, int], by_kv: bool) -> tuple[int, int, int]:
    """Layer, head and kv head."""
    return key.layer, head, head if by_kv else head * heads[1] // heads[0]


def joined(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Columns of numbers as one: head is -1 where kv heads were averaged, stack a place in STACKS."""
    if len(parts) == 1:
        return parts[0]
    dtypes = dict.fromkeys(COLUMNS, np.int32) | {"weight": np.float32, "stack": np.int8}
    return {
        name: np.concatenate([part[name] for part in parts], dtype=dtype, casting="same_kind")
        if parts
        else np.empty(0, dtype)
        for name, dtype in dtypes.items()
    }


def listed(
    found: dict[str, np.ndarray], over: str | None, others: bool, of_queries: bool, by_size: bool = False
) -> dict[str, np.ndarray]:
    """Those that are listed, in their order: strongest first over "heads", of either sign where it is by size.

    others: without key 0 and each query's own key. of_queries: queries were named, and query 0 keeps the one that it
    sees.
    """
    order = np.arange(len(found["weight"]))
    if others:
        own = (found["key"] == found["query"]) & (found["stack"] != STACKS.index(CROSS))
        order = order[(found["key"] != 0) & ~own | (found["query"] == 0) & of_queries]
    if over == "heads":
        weight = found["weight"][order]
        order = order[np.argsort(-np.abs(weight) if by_size else -weight, kind="stable")]
    return {name: column[order] for name, column in found.items()}


def table(found: dict[str, np.ndarray], query: pa.DictionaryArray, key: pa.DictionaryArray, view: View) -> pa.Table:
    """A row per relation; query, key: the tokens. The weight's column is named for what the view reads."""
    return as_table(
        {
            "layer": found["layer"],
            "head": numbers(found["head"], found["head"] < 0),
            "kv_head": found["kv_head"],
            "query": found["query"],
            "query_token": query,
            "key": found["key"],
            "key_token": key,
            ENTRIES[view.weights]: found["weight"],
            "stack": texts_at(STACKS, found["stack"]),
        }
    )
