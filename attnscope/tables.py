"""Columns -> Arrow tables -> csv, tsv, jsonl, parquet, arrow: exact numbers, exact text, nulls for what is missing."""

from __future__ import annotations

import codecs
import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa

from attnscope.files import json_line, jsonable, whole_file

FORMATS = ("csv", "tsv", "jsonl", "parquet", "arrow")
CHUNK = 8192


def as_table(columns: Mapping[str, Any]) -> pa.Table:
    """Columns of one length as an Arrow table: numpy arrays, lists, or Arrow arrays, which stay as they are.

    NaN and None are null. Tokens and roles are dictionary-encoded.

    >>> as_table({"layer": np.array([0, 1], np.int32), "role": ["sink", None]})
    """
    return pa.table({name: _array(name, values) for name, values in columns.items()})


def texts_at(texts: Sequence[str], index: np.ndarray) -> pa.DictionaryArray:
    """The text at each index, dictionary-encoded: no string is made twice."""
    return pa.array(texts, pa.string()).dictionary_encode().take(pa.array(index))


def rows(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    """Python values, row by row: None for null and NaN; 32-bit floats keep their shortest exact spelling."""
    for batch in table.to_batches(max_chunksize=CHUNK):
        yield from zip(*map(_plain, batch.columns), strict=True)


def write(table: pa.Table, stream: IO[bytes], format: str) -> None:
    """Write the table to a binary stream, in one of FORMATS; csv quotes as RFC 4180 asks, a null is an empty field."""
    WRITERS[format](table, stream)


def save(table: pa.Table, path: Path, format: str | None = None) -> Path:
    """Write the table to a file, whole or not at all; the format is the suffix's unless given."""
    with whole_file(path) as stream:
        write(table, stream, format or path.suffix.lstrip("."))
    return path


def _array(name: str, values: Any) -> pa.Array:
    array = values if isinstance(values, pa.Array) else pa.array(values, from_pandas=True)
    token = pa.types.is_string(array.type) and (name.endswith("_token") or name == "role")  # first_token is a metric
    return array.dictionary_encode() if token else array


def _plain(column: pa.Array) -> list[Any]:
    """A column as Python values: NaN is None, a float32 is the shortest number that means it."""
    if pa.types.is_integer(column.type) and column.null_count:  # numpy would make floats of them
        return column.to_pylist()
    if pa.types.is_dictionary(column.type):  # ten times as fast as its own to_pylist
        column = column.dictionary_decode()
    array = column.to_numpy(zero_copy_only=False)
    if array.dtype == np.float32:
        array = np.array([float(text) for text in array.astype(str)])
    return [None if isinstance(value, float) and math.isnan(value) else value for value in array.tolist()]


def _delimited(delimiter: str) -> Callable[[pa.Table, IO[bytes]], None]:
    def write_rows(table: pa.Table, stream: IO[bytes]) -> None:
        # Python's csv: pyarrow's quotes every text. Not a TextIOWrapper: that one closes the stream when a write fails.
        writer = csv.writer(codecs.getwriter("utf-8")(stream), delimiter=delimiter, lineterminator="\n")
        writer.writerow(table.column_names)
        writer.writerows(rows(table))

    return write_rows


def _write_jsonl(table: pa.Table, stream: IO[bytes]) -> None:
    names = table.column_names
    for row in rows(table):
        stream.write(json_line(dict(zip(names, map(jsonable, row), strict=True))))


def _write_parquet(table: pa.Table, stream: IO[bytes]) -> None:
    import pyarrow.parquet as pq

    pq.write_table(table, stream, compression="zstd")


def _write_arrow(table: pa.Table, stream: IO[bytes]) -> None:
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)


WRITERS: Mapping[str, Callable[[pa.Table, IO[bytes]], None]] = {
    "csv": _delimited(","),
    "tsv": _delimited("\t"),
    "jsonl": _write_jsonl,
    "parquet": _write_parquet,
    "arrow": _write_arrow,
}
