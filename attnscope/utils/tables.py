"""Columns -> Arrow tables -> csv, tsv, jsonl, parquet, arrow: exact text, nulls for what is missing; numbers are exact
in parquet and arrow, and have seven digits or more in the others.

A format is a row of FORMATS, for the tables of runs and of corpora. `TableRecord` is a result with a table, as Python
and notebooks show it.
"""

from __future__ import annotations

import codecs
import csv
import html
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa

from attnscope.utils.display import html_table
from attnscope.utils.files import json_line, jsonable, open_native, whole_file
from attnscope.utils.parquet import numpy_of, read_columns, threads

CHUNK = 8192
SHOWN_ROWS, LETTERS = 12, 60  # of a table in a notebook, and of a cell there
HEADER_BYTES, MOST_COLUMNS = 1 << 16, 1 << 10  # of a table of csv that is read
FEW = 100_000  # rows that are done in less time than `pyarrow.compute` takes to import
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "＝", "＋", "－", "＠")


def as_table(columns: Mapping[str, Any]) -> pa.Table:
    """Columns of one length as an Arrow table: numpy arrays, lists, or Arrow arrays, which stay as they are.

    NaN and None are null. Tokens and roles are dictionary-encoded.

    >>> as_table({"layer": np.array([0, 1], np.int32), "role": ["sink", None]})
    """
    return pa.table({name: _array(name, values) for name, values in columns.items()})


def texts_at(texts: Sequence[str], index: np.ndarray, mask: np.ndarray | None = None) -> pa.DictionaryArray:
    """The text at each index, dictionary-encoded: no string is made twice; null where the mask is True.

    As those below, without `pyarrow.compute`, whose import takes longer than to print the heads of a text.
    """
    code = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    codes = index.astype(np.int32)
    if len(code) < len(texts):
        codes = np.array([code[text] for text in texts], np.int32).take(index)
    return pa.DictionaryArray.from_arrays(numbers(codes, mask), words(list(code)))


def coded(array: pa.StringArray) -> pa.DictionaryArray:
    """The same texts, dictionary-encoded."""
    if len(array) > FEW:
        return array.dictionary_encode()
    texts = array.to_pylist()
    code = {text: number for number, text in enumerate(dict.fromkeys(text for text in texts if text is not None))}
    return pa.DictionaryArray.from_arrays(integers([code.get(text) for text in texts], np.int32), words(list(code)))


def numbers(array: np.ndarray, mask: np.ndarray | None = None) -> pa.Array:
    """Numbers as an Arrow array; null where they are NaN, or where the mask is True.

    As `words`, without `pa.array`, which imports pandas: half a second of every command.
    """
    mask = np.isnan(array) if mask is None and array.dtype.kind == "f" else mask
    data = pa.py_buffer(np.ascontiguousarray(array))
    return pa.Array.from_buffers(pa.from_numpy_dtype(array.dtype), len(array), [_present(mask), data])


def integers(values: Sequence[int | None], dtype: type[np.signedinteger[Any]] = np.int64) -> pa.Array:
    """Whole numbers as an Arrow array; None is null."""
    return numbers(np.array([0 if value is None else value for value in values], dtype), _missing(values))


def flags(values: Sequence[bool | None]) -> pa.BooleanArray:
    """Truths as an Arrow array; None is null."""
    data = pa.py_buffer(np.packbits(np.array(values, bool), bitorder="little"))
    return pa.Array.from_buffers(pa.bool_(), len(values), [_present(_missing(values)), data])


def words(texts: Sequence[str | None]) -> pa.StringArray:
    """Texts as an Arrow array; None is null."""
    encoded = [(text or "").encode() for text in texts]
    ends = np.cumsum([0, *map(len, encoded)])
    if ends[-1] >= 2**31:
        return pa.array(texts, pa.string())
    buffers = [_present(_missing(texts)), pa.py_buffer(ends.astype(np.int32)), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def rows(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    """Python values, row by row: None for null and NaN; 32-bit floats keep their shortest exact spelling."""
    for batch in table.to_batches(max_chunksize=CHUNK):
        yield from zip(*map(python_values, batch.columns), strict=True)


def in_seven_digits(table: pa.Table) -> pa.Table:
    """The table as text formats spell it: 64-bit floats with seven significant digits, about as many as 32-bit ones."""

    def rounded(column: pa.Array) -> pa.Array:
        if not pa.types.is_float64(column.type):
            return column
        values = [np.nan if value is None else float(f"{value:.7g}") for value in python_values(column)]
        return numbers(np.array(values, np.float64))

    return _by_column(table, rounded)


def _by_column(table: pa.Table, change: Callable[[pa.Array], pa.Array]) -> pa.Table:
    arrays = [change(column.combine_chunks()) for column in table.itercolumns()]
    return pa.table(arrays, names=table.column_names)


def write(table: pa.Table, stream: IO[bytes], format: str) -> None:
    """Write the table to a binary stream, in one of FORMATS; csv quotes as RFC 4180 asks, a null is an empty field."""
    FORMATS[format].whole(table, stream)


def save(table: pa.Table, path: Path, format: str | None = None, spreadsheet: bool = False) -> Path:
    """Write the table to a file, whole or not at all; the format is the suffix's unless given.

    spreadsheet: with cells as `escape_formulas` makes them.
    """
    with whole_file(path) as stream:
        write(escape_formulas(table) if spreadsheet else table, stream, format or path.suffix.lstrip(".").lower())
    return path


def escape_formulas(table: pa.Table) -> pa.Table:
    """The table with text that a spreadsheet would run as a formula behind an apostrophe."""

    def quoted(column: pa.Array) -> pa.Array:
        if pa.types.is_dictionary(column.type):
            return pa.DictionaryArray.from_arrays(column.indices, quoted(column.dictionary))
        if not pa.types.is_string(column.type):
            return column
        texts = column.to_pylist()
        return words([f"'{text}" if text and text.lstrip(" \n").startswith(FORMULA_STARTS) else text for text in texts])

    return _by_column(table, quoted)


def _array(name: str, values: Any) -> pa.Array:
    types = set(map(type, values)) if isinstance(values, list) else set()
    if isinstance(values, pa.Array):
        array = values
    elif isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iuf":
        array = numbers(values)
    elif types <= {str, type(None)} and isinstance(values, list) and any(values):
        array = words(values)
    elif types == {int}:
        array = integers(values)
    else:
        array = flags(values) if types == {bool} else pa.array(values, from_pandas=True)
    token = pa.types.is_string(array.type) and name.endswith(("token", "role", "roles"))
    return coded(array) if token else array


def _missing(values: Sequence[Any]) -> np.ndarray:
    return np.array([value is None for value in values], bool)


def _present(mask: np.ndarray | None) -> pa.Buffer | None:
    """Arrow's bitmap of what is not null; None where nothing is."""
    return pa.py_buffer(np.packbits(~mask, bitorder="little")) if mask is not None and mask.any() else None


def python_values(column: pa.Array) -> list[Any]:
    """A column as Python values: null and NaN are None, a float32 is the shortest number that means it.

    From the buffers, since Arrow's `to_numpy` imports pandas and its `to_pylist` takes ten times as long.
    """
    if pa.types.is_dictionary(column.type):
        texts = column.dictionary.to_pylist()
        return [None if place is None else texts[place] for place in python_values(column.indices)]
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        return column.to_pylist()
    array, missing = numpy_of(column)
    if array.dtype == np.float32:
        array = np.array([float(text) for text in array.astype(str)])
    missing = missing | np.isnan(array) if array.dtype.kind == "f" else missing
    values: list[Any] = array.tolist()
    for place in np.flatnonzero(missing).tolist():
        values[place] = None
    return values


class Pieces(NamedTuple):
    """What is written table by table, all of one schema; close writes the end, and leaves the stream open."""

    write: Callable[[pa.Table], object]
    close: Callable[[], object]


class Format(NamedTuple):
    """One way to write tables as bytes, and to read them back.

    whole: one table, as a run writes it. pieces: begins what is written table by table, as a corpus is; it is given the
    schema, and what the file says of itself where the format has a place for that. read: some columns of a file that
    was written in pieces, or that somebody says was; of Parquet texts may be dictionaries.
    """

    whole: Callable[[pa.Table, IO[bytes]], None]
    pieces: Callable[[IO[bytes], pa.Schema, Mapping[str, str]], Pieces]
    read: Callable[[Path, Sequence[str], pa.Schema], pa.Table]


class _Lines:
    """Ends a row of `csv.writer` with a line feed alone.

    The writer quotes the characters that end its rows: with both of them a cell that holds one is quoted, as readers of
    csv expect. Python before 3.13 quotes no others.
    """

    def __init__(self, stream: codecs.StreamWriter) -> None:
        self._stream = stream

    def write(self, row: str) -> None:
        self._stream.write(row.removesuffix("\r\n") + "\n")


def _delimited(delimiter: str) -> Format:
    """A table of a run by Python's csv, which quotes what needs it; of a corpus by Arrow's, which is fast."""

    def whole(table: pa.Table, stream: IO[bytes]) -> None:
        # Not a TextIOWrapper: that one closes the stream when a write fails.
        writer = csv.writer(_Lines(codecs.getwriter("utf-8")(stream)), delimiter=delimiter, lineterminator="\r\n")
        writer.writerow(table.column_names)
        writer.writerows(rows(in_seven_digits(table)))

    def pieces(stream: IO[bytes], schema: pa.Schema, about: Mapping[str, str]) -> Pieces:
        from pyarrow.csv import CSVWriter, WriteOptions

        options = WriteOptions(delimiter=delimiter)
        writer = CSVWriter(stream, as_text(schema.empty_table()).schema, write_options=options)
        return Pieces(lambda table: writer.write_table(as_text(table)), writer.close)

    def read(path: Path, columns: Sequence[str], schema: pa.Schema) -> pa.Table:
        with open_native(path) as source:
            return read_delimited(
                source, schema, delimiter=delimiter, include_columns=columns, include_missing_columns=True
            )

    return Format(whole, pieces, read)


def read_delimited(
    source: pa.NativeFile, types: Any = None, *, delimiter: str = ",", multiline: bool = False, **options: Any
) -> pa.Table:
    """A table of csv or tsv; types: of some of its columns. multiline: whether cells hold line ends, which is slower.

    options: of `pyarrow.csv.ConvertOptions`. Raises ValueError for what is no such table, and for a header that none
    has: for each of its columns Arrow takes 8 KiB, and none needs more than a byte.
    """
    from pyarrow.csv import ConvertOptions, ParseOptions, ReadOptions, read_csv

    line, end, _ = source.read_at(min(HEADER_BYTES, source.size()), 0).partition(b"\n")
    source.seek(0)
    names = next(csv.reader([line.decode("utf-8-sig")], delimiter=delimiter), [])
    if not end or not 0 < len(names) <= MOST_COLUMNS:
        raise ValueError(f"a header of {len(names):,} columns in {len(line):,} bytes")
    try:
        return read_csv(
            source,
            ReadOptions(column_names=names, skip_rows=1, use_threads=threads(source)),
            ParseOptions(delimiter=delimiter, newlines_in_values=multiline),
            ConvertOptions(column_types=types, **options),
        )
    except pa.ArrowException as error:
        raise ValueError(str(error)) from error


def as_text(table: pa.Table) -> pa.Table:
    """The table with text and truths as strings, which Arrow's csv takes: truths as the csv of a run spells them."""

    def strings(column: pa.Array) -> pa.Array:
        dictionary, truth = pa.types.is_dictionary(column.type), pa.types.is_boolean(column.type)
        if not (dictionary or truth):
            return column
        if len(column) <= FEW:
            return words([None if value is None else str(value) for value in python_values(column)])
        import pyarrow.compute as pc

        return column.dictionary_decode() if dictionary else pc.if_else(column, "True", "False")

    return _by_column(table, strings)


def json_rows(table: pa.Table) -> pa.Array:
    """Each row as one JSON object: numbers at their shortest exact spelling, null for what is missing."""
    import pyarrow.compute as pc

    def strings(column: pa.Array) -> pa.Array:
        if pa.types.is_dictionary(column.type):
            return strings(column.dictionary).take(column.indices)
        if pa.types.is_string(column.type):
            texts = column.to_pylist()
            return words([None if text is None else json.dumps(text, ensure_ascii=False) for text in texts])
        if pa.types.is_floating(column.type):
            column = pc.if_else(pc.is_finite(column), column, None)
        return column.cast(pa.string())

    pieces: list[Any] = []
    for place, name in enumerate(table.column_names):
        cells = strings(table[name].combine_chunks()).fill_null("null")
        pieces += [("{" if place == 0 else ",") + json.dumps(name) + ":", cells]
    return pc.binary_join_element_wise(*pieces, "}", "")


def _write_jsonl(table: pa.Table, stream: IO[bytes]) -> None:
    names = table.column_names
    for row in rows(in_seven_digits(table)):
        stream.write(json_line(dict(zip(names, map(jsonable, row), strict=True))))


def _jsonl_pieces(stream: IO[bytes], schema: pa.Schema, about: Mapping[str, str]) -> Pieces:
    def write(table: pa.Table) -> None:
        stream.write("".join(f"{line}\n" for line in json_rows(table).to_pylist()).encode())

    return Pieces(write, lambda: None)


def _read_jsonl(path: Path, columns: Sequence[str], schema: pa.Schema) -> pa.Table:
    from pyarrow.json import ParseOptions, read_json

    options = ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    return read_json(path, parse_options=options).select(columns)


# Parquet is written without Arrow's own schema: tokens are dictionaries on disk and strings to every reader.
def _write_parquet(table: pa.Table, stream: IO[bytes]) -> None:
    import pyarrow.parquet as pq

    pq.write_table(table, stream, compression="zstd", store_schema=False)


def _parquet_pieces(stream: IO[bytes], schema: pa.Schema, about: Mapping[str, str]) -> Pieces:
    from pyarrow.parquet import ParquetWriter

    integers = [field.name for field in schema if pa.types.is_integer(field.type)]
    floats = [field.name for field in schema if pa.types.is_floating(field.type)]
    runs = [name for name in ("layer", "head", "kv_head", "query") if name in integers]  # packed sooner as they are
    deltas = [name for name in integers if name not in runs]
    writer = ParquetWriter(
        stream,
        schema,
        # Floats and differences hardly shrink.
        compression={name: "none" if name in floats + deltas else "zstd" for name in schema.names},
        store_schema=False,
        use_dictionary=[name for name in schema.names if name not in integers + floats],
        column_encoding=dict.fromkeys(deltas, "DELTA_BINARY_PACKED"),
        # A group of rows has every layer, head and token: what it is of tells them apart.
        write_statistics=[name for name in ("item", "id") if name in integers],
    )
    writer.add_key_value_metadata(about)
    return Pieces(writer.write_table, writer.close)


def _read_parquet(path: Path, columns: Sequence[str], schema: pa.Schema) -> pa.Table:
    with open_native(path) as source:
        return read_columns(source, pa.schema([schema.field(name) for name in columns]))


def _write_arrow(table: pa.Table, stream: IO[bytes]) -> None:
    pieces = _arrow_pieces(stream, table.schema, {})
    pieces.write(table)
    pieces.close()


def _arrow_pieces(stream: IO[bytes], schema: pa.Schema, about: Mapping[str, str]) -> Pieces:
    writer = pa.ipc.new_stream(stream, schema.with_metadata(about) if about else schema)
    return Pieces(writer.write_table, writer.close)


def _read_arrow(path: Path, columns: Sequence[str], schema: pa.Schema) -> pa.Table:
    with pa.OSFile(str(path)) as stream:
        return pa.ipc.open_stream(stream).read_all().select(columns)


FORMATS: Mapping[str, Format] = {
    "csv": _delimited(","),
    "tsv": _delimited("\t"),
    "jsonl": Format(_write_jsonl, _jsonl_pieces, _read_jsonl),
    "parquet": Format(_write_parquet, _parquet_pieces, _read_parquet),
    "arrow": Format(_write_arrow, _arrow_pieces, _read_arrow),
}


class TableRecord(ABC):
    """A result with a table.

    >>> attnscope.parity(attnscope.load("demo")).table().to_pandas()
    """

    @property
    @abstractmethod
    def line(self) -> str:
        """The result in a line."""

    @abstractmethod
    def table(self) -> pa.Table:
        """The rows that the command of this name prints in a pipe."""

    def _below(self) -> str:
        """What a notebook shows below the table, as HTML."""
        return ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self.line}"

    def _repr_html_(self) -> str:
        """The first rows of the table, and what is below it."""

        def cell(value: object) -> str:
            text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
            return text if len(text) <= LETTERS else text[: LETTERS - 1] + "…"

        table = self.table()
        rows = [map(cell, row.values()) for row in table.slice(0, SHOWN_ROWS).to_pylist()]
        left = len(table) - SHOWN_ROWS
        more = f"<p>{left} more rows in table()</p>" if left > 0 else ""
        below = f"{html_table(table.column_names, rows)}{more}{self._below()}"
        return f"<div><pre>{html.escape(repr(self))}</pre>{below}</div>"
