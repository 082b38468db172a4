"""The tables of a dataset: their columns, and the version of each; written down in docs/schemas.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from attnscope.metrics.metrics import METRICS
from attnscope.observe.layers import ENTRIES

if TYPE_CHECKING:
    from attnscope.batch.job import DatasetOutput

SCHEMA_VERSIONS = {"texts": 2, "heads": 5, "relations": 2, "spans": 2, "summary": 2, "weights": 1}
TOKEN = pa.dictionary(pa.int32(), pa.string())
ABOUT = [("item", pa.int64()), ("id", TOKEN)]
SCHEMAS = {
    "texts": pa.schema(
        [
            ("item", pa.int64()),
            ("id", pa.string()),
            ("file", pa.string()),
            ("line", pa.int64()),
            ("tokens", pa.int32()),
            ("removed_tokens", pa.int32()),
            ("sha256", pa.string()),
            ("fields", pa.string()),
        ]
    ),
    "heads": pa.schema(
        [
            *ABOUT,
            ("layer", pa.int32()),
            ("head", pa.int32()),
            ("kv_head", pa.int32()),
            ("role", TOKEN),
            ("text_role", TOKEN),
            ("atlas_roles", TOKEN),
            ("near_uniform", pa.bool_()),
            ("top_key", pa.int32()),
            ("top_key_token", TOKEN),
            ("top_key_mass", pa.float32()),
            *((name, pa.float32()) for name in METRICS),
        ]
    ),
    "relations": pa.schema(
        [
            *ABOUT,
            ("layer", pa.int32()),
            ("head", pa.int32()),
            ("kv_head", pa.int32()),
            ("query", pa.int32()),
            ("query_token", TOKEN),
            ("key", pa.int32()),
            ("key_token", TOKEN),
            ("weight", pa.float32()),
        ]
    ),
    "spans": pa.schema(
        [
            *ABOUT,
            ("layer", pa.int32()),
            ("head", pa.int32()),
            ("kv_head", pa.int32()),
            ("query_span", TOKEN),
            ("key_span", TOKEN),
            ("mass", pa.float32()),
            ("uniform", pa.float32()),
        ]
    ),
    "summary": pa.schema(
        [
            ("layer", pa.int32()),
            ("head", pa.int32()),
            ("kv_head", pa.int32()),
            ("metric", TOKEN),
            ("query_span", TOKEN),
            ("key_span", TOKEN),
            ("texts", pa.int64()),
            ("mean", pa.float32()),
            ("low", pa.float32()),
            ("high", pa.float32()),
            ("uniform", pa.float32()),
            ("stack", TOKEN),
        ]
    ),
}
OF_LAYERS = ("heads", "relations", "spans")  # whose rows end with the stack of the layer


def schema_of(name: str, output: DatasetOutput) -> pa.Schema:
    """The columns of a table of this run: those of SCHEMAS, and after them those that its options ask for."""
    more: list[tuple[str, pa.DataType]] = []
    named = (*output.chosen, *(("positions",) if output.spans else ()))
    if name == "texts" and named:
        more = [(one, pa.string()) for one in (*named, "note")]
    if name == "texts" and output.targets:
        more += [("target", pa.string()), ("target_tokens", pa.int32())]
    if name == "texts" and output.answers:
        more += [("answer", pa.int32())]
    if name == "heads":
        metrics = (*output.metrics, *(("mass", "uniform") if "key" in output.chosen else ()))
        more = [(one, pa.float32()) for one in metrics]
    last = [("stack", TOKEN)] if name in OF_LAYERS else []
    fields = [*SCHEMAS[name], *(pa.field(*one) for one in (*more, *last))]
    entry = ENTRIES[output.entries]
    return pa.schema([one.with_name(entry) if (name, one.name) == ("relations", "weight") else one for one in fields])
