"""The tables of a dataset: their columns, a shard's table as a file, and the summary that is made of written rows.

Columns and the version of each table are written down in docs/schemas.md. A file is written piece by piece; a Parquet
file holds the name of its schema. The summary is the corpus's own table: the mean of every metric over the texts, head
by head, with intervals.

Shapes: S text, N head, or head and pair of spans.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from attnscope._version import __version__
from attnscope.corpus.folder import ALL_TEXT, INTEGER_IDS, SUMMARY, DatasetOutput, Journal, Record
from attnscope.errors import InputError
from attnscope.metrics.metrics import KNOWN, MASS, METRICS, SIGNED
from attnscope.model.selection import STACKS
from attnscope.observe.request import ENTRIES
from attnscope.studies.statistics import means
from attnscope.utils.files import FOREIGN, open_native, open_regular, write_whole
from attnscope.utils.folders import locked
from attnscope.utils.parquet import open_parquet
from attnscope.utils.tables import FORMATS, Pieces, escape_formulas, numbers, texts_at

SCHEMA_VERSIONS = {"texts": 3, "heads": 6, "relations": 3, "spans": 3, "summary": 2, "weights": 3}
BEFORE = SCHEMA_VERSIONS | {"texts": 2, "heads": 5, "relations": 2, "spans": 2, "weights": 1}  # of layout 6
TOKEN = pa.dictionary(pa.int32(), pa.string())
TYPES = {  # by the words of the table below, `int!` where each row has one; a token is a text that many rows have
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "truth": pa.bool_(),
    "text": pa.string(),
    "token": TOKEN,
}
HEAD = "layer:int! head:int kv_head:int"
ABOUT = f"item:long! id:token! {HEAD}"
COLUMNS = {  # of each table, in their order
    "texts": "item:long id:text text:text file:text line:long tokens:int removed_tokens:int sha256:text fields:text",
    "heads": f"{ABOUT} role:token text_role:token atlas_roles:token near_uniform:truth top_key:int top_key_token:token "
    f"top_key_mass:float {' '.join(f'{name}:float' for name in METRICS)}",
    "relations": f"{ABOUT} query:int! query_token:token! key:int! key_token:token! weight:float",
    "spans": f"{ABOUT} query_span:token key_span:token mass:float uniform:float",
    "summary": f"{HEAD} metric:token query_span:token key_span:token texts:long mean:float low:float high:float "
    "uniform:float stack:token",
}
SCHEMAS = {
    table: pa.schema(
        [
            pa.field(name, TYPES[kind.rstrip("!")], nullable=not kind.endswith("!"))
            for name, _, kind in (column.partition(":") for column in columns.split())
        ]
    )
    for table, columns in COLUMNS.items()
}


def schema_of(name: str, output: DatasetOutput) -> pa.Schema:
    """The columns of a table of a run but the summary: those of SCHEMAS, and after them what its options ask for."""
    more: list[tuple[str, pa.DataType] | pa.Field] = []
    if name == "texts":
        named = (*output.chosen, *(("positions",) if output.spans else ()))
        more = [(column, pa.string()) for column in (*named, "note")] if named else []
        more += [("target", pa.string()), ("target_tokens", pa.int32())] * output.targets
        more += [("answer", pa.int32())] * output.answers
    else:
        if name == "heads":
            metrics = (*output.metrics, *(("mass", "uniform") if "key" in output.chosen else ()))
            more = [(metric, pa.float32()) for metric in metrics]
        more.append(pa.field("stack", TOKEN, nullable=False))  # of the layer, last in each row
    fixed = [field for field in SCHEMAS[name] if output.keep_text or field.name != "text"]
    if output.ids == INTEGER_IDS:
        fixed = [field.with_type(pa.int64()) if field.name == "id" else field for field in fixed]
    schema = pa.schema([*fixed, *more])
    if name != "relations":
        return schema
    place = schema.get_field_index("weight")
    return schema.set(place, schema.field(place).with_name(ENTRIES[output.entries]))


def version_of(name: str, output: DatasetOutput) -> str:
    """The schema of a table, as a file of the output says it: `heads/6`."""
    return f"{name}/{(BEFORE if output.layout == ALL_TEXT else SCHEMA_VERSIONS)[name]}"


class _Droppable(io.RawIOBase):
    """A file that swallows what comes after it was dropped: Parquet's writer always writes an end."""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "wb")  # noqa: SIM115
        self.dropped = False

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return len(memoryview(data)) if self.dropped else self.file.write(data)


class TableFile:
    """One table of one shard, written piece by piece."""

    def __init__(self, path: Path, name: str, output: DatasetOutput) -> None:
        self.name, self.output, self.rows = name, output, 0
        self.stream = _Droppable(path)
        self._pieces: Pieces | None = None

    def write(self, table: pa.Table) -> None:
        self.rows += len(table)
        table = escape_formulas(table) if self.output.spreadsheet else table
        if self._pieces is None:
            about = {  # what a Parquet file says of itself
                "attnscope.schema": version_of(self.name, self.output),
                "attnscope.version": __version__,
                "attnscope.run": json.dumps(self.output.about, sort_keys=True, default=str),
            }
            self._pieces = FORMATS[self.output.format].pieces(cast(IO[bytes], self.stream), table.schema, about)
        self._pieces.write(table)

    def close(self) -> None:
        """Whole and on the disk."""
        if self._pieces is not None:
            self._pieces.close()
        self.stream.file.flush()
        os.fsync(self.stream.file.fileno())
        self.stream.file.close()

    def drop(self) -> None:
        """Let go of the file; nothing more is written."""
        self.stream.dropped = True
        if self._pieces is not None:
            self._pieces.close()
        with suppress(OSError):  # what was buffered may have no room
            self.stream.file.close()


FIRST_LINE_BYTES = 1 << 20  # of a table, which names its columns
HELD = 1 << 27  # numbers that are held at a time: 512 MiB; one metric is held in any case
MOST_SPARSE = 16  # entries that are held for each number: some layers are not heard in long texts
DAMAGED = "make the dataset again with attnscope batch"
WHICH, BITS = ("layer", "kv_head", "head"), 16  # a head's key is its stack, then these, of so many bits each
LARGEST = (1 << BITS) - 1


@contextmanager
def damage(folder: Path) -> Iterator[None]:
    """What libraries raise of files that are none of ours is an InputError: they are what anybody may write."""
    try:
        yield
    except (pa.ArrowException, csv.Error, *FOREIGN) as error:
        raise InputError(f"the tables of {folder} are damaged, or of another kind", DAMAGED) from error


def summarised(output: DatasetOutput) -> list[tuple[str, str]]:
    """What means are taken of, (table, column) each."""
    heads = [*METRICS, *output.metrics, *([MASS.id] if "key" in output.chosen else [])]
    of_heads = [("heads", name) for name in heads] if "heads" in output.tables else []
    return [*of_heads, *([("spans", MASS.id)] if output.spans else [])]


def columns_of(path: Path, format: str) -> list[str]:
    """The names of a file's columns."""
    if format == "parquet":
        with open_native(path) as source:
            return list(open_parquet(source).schema_arrow.names)
    with open_regular(path) as stream:
        line = stream.readline(FIRST_LINE_BYTES).decode()
    return next(csv.reader([line]), []) if format == "csv" else list(json.loads(line))


def with_signed(folder: Path, shards: Sequence[Record], output: DatasetOutput) -> DatasetOutput:
    """The output with metrics of linear layers, where the model has some: the tables of heads have columns of them."""
    if "heads" not in output.tables or SIGNED.keys() <= set(output.metrics):
        return output
    names = (name for shard in shards for name in shard.files if name.startswith("heads/"))
    first = next(names, None)
    columns = () if first is None else columns_of(folder / first, output.format)
    return replace(output, metrics=(*output.metrics, *(name for name in SIGNED if name in columns)))


def write_summary(folder: Path, output: DatasetOutput, advance: Callable[[int], object] = lambda done: None) -> Path:
    """Write the summary of a folder's committed shards next to them; the path. advance: called for every metric.

    Whatever the batches, shards and runs that made the rows, equal rows make an equal file. Raises UsageError for a
    folder that a run is writing to, InputError for a damaged one.

        >>> write_summary(Path("runs/corpus"), job.output)
    """
    with locked(folder):
        records = Journal(folder).records
    shards = [records[first] for first in sorted(records)]
    with damage(folder):
        output = with_signed(folder, shards, output)
    whole = summary_table(folder, shards, output, advance)

    def write(path: Path) -> None:
        file = TableFile(path, "summary", output)
        file.write(whole)
        file.close()

    return write_whole(folder / f"{SUMMARY}.{output.format}", write)


def summary_table(
    folder: Path, shards: Sequence[Record], output: DatasetOutput, advance: Callable[[int], object] = lambda done: None
) -> pa.Table:
    """The rows of the summary of some shards; advance: called for every metric. Raises InputError for damaged tables.

    >>> summary_table(dataset.folder, dataset.shards, dataset.output)["metric"]
    """
    parts, entries = [], summarised(output)
    for table in dict.fromkeys(table for table, _ in entries):
        rows = WrittenRows(folder, shards, table, output)
        columns = [name for of, name in entries if of == table]
        # As many columns are read at a time as may be held.
        most = max(1, HELD // max(1, sum(shard.rows.get(table, 0) for shard in shards)))
        for start in range(0, len(columns), most):
            names = columns[start : start + most]
            with damage(folder):
                keys_N, values = rows.read([*names, *(["uniform"] if MASS.id in names else [])])
            for name in names:
                parts.append(rows.means(name, keys_N, values))
                advance(1)
    return pa.concat_tables([SCHEMAS["summary"].empty_table(), *parts]).unify_dictionaries()


@dataclass(frozen=True)
class WrittenRows:
    """The written rows of a table, heads or spans."""

    folder: Path
    shards: Sequence[Record]
    table: str
    output: DatasetOutput

    def read(self, columns: Sequence[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Which head (and pair of spans) each number is of, ascending (N,), and the columns, (S, N) float32 each."""
        counts = {name: shard.rows.get(self.table) or 0 for shard in self.shards for name in shard.files}
        files = {name: count for name, count in counts.items() if count and name.startswith(f"{self.table}/")}
        parts = [self._part(self.folder / name, count, columns) for name, count in files.items()]
        keys_N = np.unique(np.concatenate([keys for keys, _ in parts])) if parts else np.empty(0, np.int64)
        self._check_room(sum(len(next(iter(part.values()))) for _, part in parts) * len(keys_N))
        return keys_N, {name: _stacked(keys_N, [(keys, part.pop(name)) for keys, part in parts]) for name in columns}

    def _part(self, path: Path, count: int, columns: Sequence[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        names = ["item", "stack", *WHICH, *self._spans, *columns]
        rows = FORMATS[self.output.format].read(path, names, plain_schema(schema_of(self.table, self.output)))
        if len(rows) != count:
            raise ValueError(f"{path} has another number of rows")
        key = head_keys(rows)
        for name in self._spans:
            key = key * len(self.output.spans) + _places(rows[name], self.output.spans)
        texts, text = np.unique(_numpy(rows["item"], 0), return_inverse=True)
        keys, place = np.unique(key, return_inverse=True)
        self._check_room(len(texts) * len(keys))
        part = {name: np.full((len(texts), len(keys)), np.nan, np.float32) for name in columns}
        for name, value_SN in part.items():
            value = _numpy(rows[name], np.nan)
            present = np.isfinite(value)  # a difference of heads has their numbers, and no metrics
            value_SN[text[present], place[present]] = value[present]
            if np.count_nonzero(np.isfinite(value_SN)) < np.count_nonzero(present):
                raise ValueError(f"{path} has two rows of a head and a text")
        return keys, part

    @property
    def _spans(self) -> tuple[str, ...]:
        return ("query_span", "key_span") if self.table == "spans" else ()

    def _check_room(self, entries: int) -> None:
        """Raise InputError for rows whose texts hardly share a head: few bytes would ask for any amount of memory."""
        rows = sum(shard.rows.get(self.table, 0) for shard in self.shards)
        if entries > MOST_SPARSE * rows + HELD // MOST_SPARSE:
            raise InputError(f"{self.folder} is damaged: its texts do not have the same heads", DAMAGED)

    def means(self, name: str, keys_N: np.ndarray, values: dict[str, np.ndarray]) -> pa.Table:
        """The rows of the summary for one column."""
        result, names = means(values[name], within=KNOWN[name].within), self.output.spans
        which_N, pair_N = np.divmod(keys_N, len(names) ** 2) if self._spans else (keys_N, None)
        which = head_numbers(which_N)
        columns = {
            "layer": numbers(which["layer"]),
            "head": numbers(which["head"], which["head"] < 0),
            "kv_head": numbers(which["kv_head"]),
            "metric": _coded(np.zeros_like(keys_N), [name]),
            "query_span": pa.nulls(len(keys_N), TOKEN) if pair_N is None else _coded(pair_N // len(names), names),
            "key_span": pa.nulls(len(keys_N), TOKEN) if pair_N is None else _coded(pair_N % len(names), names),
            "texts": numbers(result.n),
            **{end: numbers(getattr(result, end).astype(np.float32)) for end in ("mean", "low", "high")},
            "uniform": numbers(_uniform(values, name).astype(np.float32)),
            "stack": texts_at(STACKS, which["stack"]),
        }
        return pa.table(columns, schema=SCHEMAS["summary"])


def head_keys(rows: pa.Table) -> np.ndarray:
    """Which head each row is of, as one number. Raises ValueError for numbers that no model has."""
    key = _places(rows["stack"], STACKS).astype(np.int64)
    for name in WHICH:
        number = _numpy(rows[name], -1) + (name == "head")  # no head, of a kv head's mean, is 0
        if not ((number >= 0) & (number <= LARGEST)).all():  # NaN is neither
            raise ValueError(f"{name} is none of a model")
        key = key << BITS | number.astype(np.int64)
    return key


def head_numbers(key_N: np.ndarray) -> dict[str, np.ndarray]:
    """layer, head (-1 for the mean over a kv head's), kv_head and stack, a place in STACKS, of such numbers."""
    numbers = {name: (key_N >> BITS * place & LARGEST).astype(np.int32) for place, name in enumerate(reversed(WHICH))}
    return {**numbers, "head": numbers["head"] - 1, "stack": (key_N >> BITS * len(WHICH)).astype(np.int8)}


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """The columns as they are read: text is text."""
    return pa.schema([(column.name, pa.string() if column.type == TOKEN else column.type) for column in schema])


def _coded(code: np.ndarray, names: Sequence[str]) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(numbers(code.astype(np.int32)), pa.array(names, pa.string()))


def _uniform(values: dict[str, np.ndarray], name: str) -> np.ndarray:
    """The mean of what uniform attention gives, over the texts that have it; NaN for a metric that no one names."""
    if name != MASS.id:
        return np.full(values[name].shape[1], np.nan)
    there_SN = np.logical_not(np.isnan(values["uniform"]))
    with np.errstate(invalid="ignore"):
        return np.nansum(values["uniform"], 0, dtype=np.float64) / there_SN.sum(0)


def _stacked(keys_N: np.ndarray, parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Texts below each other, NaN where one has not got a head: some layers are not heard in long texts."""
    values_SN = np.full((sum(len(part) for _, part in parts), len(keys_N)), np.nan, np.float32)
    start = 0
    for keys, part in parts:
        values_SN[start : start + len(part), np.searchsorted(keys_N, keys)] = part
        start += len(part)
    return values_SN


def _places(column: pa.ChunkedArray, texts: Sequence[str]) -> np.ndarray:
    """The place of each cell's text among some; 0 for null, and for a text that is none of them."""
    array = pa.array(texts, pa.string())
    if not pa.types.is_dictionary(column.type):
        return _numpy(pc.index_in(column, array), 0)
    parts = [pc.index_in(part.dictionary, array).take(part.indices) for part in column.chunks]
    return _numpy(pa.chunked_array(parts, pa.int32()), 0)


def _numpy(column: Any, null: float) -> np.ndarray:
    return column.fill_null(null).to_numpy()
