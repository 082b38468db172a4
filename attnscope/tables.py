"""Rows -> csv, tsv, jsonl, parquet, arrow: exact numbers, exact text, written whole or not at all."""

from __future__ import annotations

import codecs
import csv
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

FORMATS = ("csv", "tsv", "jsonl", "parquet", "arrow")
CHUNK = 8192


@dataclass(frozen=True)
class Table:
    """Columns of one length: numpy arrays, or lists where a value may be missing (None). NaN is a missing number."""

    columns: Mapping[str, Any]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Python values, row by row; None for a missing one. 32-bit floats keep their shortest exact spelling."""
        names = list(self.columns)
        for start in range(0, len(self), CHUNK):
            yield from zip(*(_plain(self.columns[name][start : start + CHUNK]) for name in names), strict=True)

    def take(self, order: Sequence[int]) -> Table:
        """The rows at these positions, in this order."""
        import numpy as np

        index = np.asarray(order, dtype=np.int64)
        return Table(
            {
                name: column[index] if isinstance(column, np.ndarray) else [column[i] for i in index]
                for name, column in self.columns.items()
            }
        )


def write(table: Table, stream: IO[bytes], format: str) -> None:
    """Write the table to a binary stream, in one of FORMATS; csv quotes as RFC 4180 asks, a null is an empty field."""
    WRITERS[format](table, stream)


def save(table: Table, path: Path, format: str | None = None) -> Path:
    """Write the table to a file, whole or not at all; the format is the suffix's unless given."""
    with whole_file(path) as stream:
        write(table, stream, format or path.suffix.lstrip("."))
    return path


def save_json(value: Any, path: Path) -> Path:
    """Write one JSON document, whole or not at all; numbers that JSON has no word for become null."""
    with whole_file(path) as stream:
        document = json.dumps(_jsonable(value), indent=2, ensure_ascii=False) + "\n"
        stream.write(document.encode(errors="backslashreplace"))  # a path that is not UTF-8: JSON's own escapes
    return path


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A stream whose content becomes `path` when the block ends well, and vanishes when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _plain(values: Any) -> list[Any]:
    """A column's chunk as Python values: NaN is None, a float32 is the shortest number that means it."""
    import numpy as np

    array = np.asarray(values)
    if array.dtype == np.float32:
        array = np.array([float(text) for text in array.astype(str)])
    plain = array.tolist()
    return [None if isinstance(value, float) and math.isnan(value) else value for value in plain]


def _jsonable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return value


def _delimited(delimiter: str) -> Callable[[Table, IO[bytes]], None]:
    def write_rows(table: Table, stream: IO[bytes]) -> None:
        # Not a TextIOWrapper: that one closes the stream when a write fails.
        writer = csv.writer(codecs.getwriter("utf-8")(stream), delimiter=delimiter, lineterminator="\n")
        writer.writerow(table.columns)
        writer.writerows(table.rows())

    return write_rows


def _write_jsonl(table: Table, stream: IO[bytes]) -> None:
    names = list(table.columns)
    for row in table.rows():
        stream.write(
            (json.dumps(dict(zip(names, map(_jsonable, row), strict=True)), ensure_ascii=False) + "\n").encode()
        )


def _arrow_table(table: Table) -> Any:
    import numpy as np
    import pyarrow as pa

    def column(values: Any) -> Any:
        array = np.asarray(values)
        if array.dtype == object:
            return pa.array(list(values))
        return pa.array(array, from_pandas=True)  # NaN is null

    arrays = {name: column(values) for name, values in table.columns.items()}
    tokens = [name for name in arrays if name.endswith("_token") or name == "role"]
    return pa.table({name: array.dictionary_encode() if name in tokens else array for name, array in arrays.items()})


def _write_parquet(table: Table, stream: IO[bytes]) -> None:
    import pyarrow.parquet as pq

    pq.write_table(_arrow_table(table), stream, compression="zstd")


def _write_arrow(table: Table, stream: IO[bytes]) -> None:
    import pyarrow as pa

    arrow = _arrow_table(table)
    with pa.ipc.new_stream(stream, arrow.schema) as writer:
        writer.write_table(arrow)


WRITERS: Mapping[str, Callable[[Table, IO[bytes]], None]] = {
    "csv": _delimited(","),
    "tsv": _delimited("\t"),
    "jsonl": _write_jsonl,
    "parquet": _write_parquet,
    "arrow": _write_arrow,
}
