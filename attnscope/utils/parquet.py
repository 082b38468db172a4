"""Parquet that anybody may have written: each page is judged by its own header before anything is decoded.

    read_columns(pa.BufferReader(data), pa.schema([("layer", pa.int32()), ("probe", pa.string())]), 1 << 19)

Few bytes may decode to any amount of memory: a page unpacks to two gigabytes, one run of a bit is a billion rows, a
row repeats a text of a mebibyte by its number in a dictionary. The footer may lie about all of them, and the decoder
goes by the header of each page; so those are what is read here. Texts stay numbers in a dictionary, as they are stored.

Source: the Apache Parquet format, parquet.thrift, and Thrift's compact protocol.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from attnscope.utils.files import varint

if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData, ParquetFile

MAGIC = b"PAR1"
FOOTER_BYTES, LARGEST_FOOTER = 1 << 18, 1 << 24  # pyarrow takes up to 240 bytes of memory for each byte of a footer
CORPUS_FOOTER_BYTES = 5 << 18  # of rows that others wrote, some to a group: 300 MiB of memory
FOOTER_SHARE = 4  # of a file of ours, a footer beyond FOOTER_BYTES is less than this part
PAGE_BYTES = 1 << 26  # of a page, unpacked; a page of ours has 1 MiB
ROWS_PER_BYTE = 64  # of a file beyond FEW_ROWS rows; a row of ours takes some bytes
FEW_ROWS = 1 << 20
# Of a column's texts, each counted as often as it occurs, and of its pages; and so many more per row, and per byte of
# the file.
TEXT_BYTES, TEXT_BYTES_PER_ROW, TEXT_BYTES_PER_BYTE = 1 << 26, 64, 16
HEADER_BYTES = (1 << 10, 1 << 16)  # of a page's header: those of most, and of one with long statistics
PADDING = 100  # bytes by which some old writers understate a column, and readers read on

ROWS, ROOM = 64, 1 << 28  # of a corpus that are read at a time, and bytes for them
RATIO = 1000  # of a page's bytes, unpacked and packed: text shrinks to a tenth, and its repetition to a hundredth
MOST_VALUES = 1 << 27  # of a column of lists in a group of rows

DATA, INDEX, DICTIONARY, DATA_V2 = range(4)  # of PageType
VALUES = {DATA: 5, DICTIONARY: 7, DATA_V2: 8}  # the field of a page's header that holds its number of values
PLAIN, PLAIN_DICTIONARY, RLE, DELTA_BINARY, DELTA_LENGTH, DELTA_TEXT, RLE_DICTIONARY, SPLIT = 0, 2, 3, 5, 6, 7, 8, 9
PROPORTIONAL = {PLAIN, PLAIN_DICTIONARY, RLE, DELTA_BINARY, DELTA_LENGTH, RLE_DICTIONARY, SPLIT}
LEAST_BYTES = {"BYTE_ARRAY": 4, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}  # of a plain value
STORED = {  # the physical types of what Arrow calls by these names
    "int": ("INT32", "INT64"),
    "uint": ("INT32", "INT64"),
    "float": ("FLOAT", "DOUBLE"),
    "double": ("DOUBLE", "FLOAT"),
    "bool": ("BOOLEAN",),
    "string": ("BYTE_ARRAY",),
}
OTHER_TEXTS = ("large_string", "string_view", "null")  # Arrow's types of what other writers kept as texts


class Page(NamedTuple):
    """What the header of a page says: its PageType, bytes unpacked and packed, values (0 of an index) and Encoding."""

    kind: int
    unpacked: int
    packed: int
    values: int
    encoding: int


class Chunk(NamedTuple):
    """A column in a group of rows, as the footer has it: its physical type, values, bytes and where its pages begin.

    dictionary: where that begins, 0 where there is none.
    """

    physical_type: str
    rows: int
    values: int
    packed: int
    data: int
    dictionary: int


def open_parquet(source: pa.NativeFile, footer_bytes: int | None = None) -> ParquetFile:
    """The file, nothing of it decoded but a footer that is no larger than those of such files.

    footer_bytes: of a file of any size (default: FOOTER_BYTES). Raises ValueError for one that is larger, and for what
    is no Parquet.
    """
    import pyarrow.parquet as pq

    size = source.size()
    end = source.read_at(8, max(0, size - 8))
    if end[4:] != MAGIC:
        raise ValueError("no Parquet file")
    footer = int.from_bytes(end[:4], "little")
    if footer > min(LARGEST_FOOTER, max(footer_bytes or FOOTER_BYTES, size // FOOTER_SHARE)):
        raise ValueError(f"a footer of {footer:,} bytes in a file of {size:,}: write larger row groups")
    try:
        return pq.ParquetFile(source)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(str(error)) from error


def read_columns(source: pa.NativeFile, schema: pa.Schema | None = None, most_rows: int | None = None) -> pa.Table:
    """The columns of a schema that the file has, as the schema's types; schema: None for all that it has.

    Texts that are stored as dictionaries stay so.

    Raises ValueError for a file that is damaged, has columns of other types, more rows, or takes more memory than its
    bytes account for.
    """
    import pyarrow.parquet as pq

    file = open_parquet(source)
    # A row takes some bytes: a footer that tells of many more rows than bytes lies.
    meta, most = file.metadata, max(FEW_ROWS, ROWS_PER_BYTE * source.size())
    if meta.num_rows > (most if most_rows is None else min(most, most_rows)):
        raise ValueError(f"{meta.num_rows:,} rows")
    # What the pages unpack to is known by their headers before any of them is decoded.
    places = {path: place for place, path in enumerate(_paths(file))}
    groups = chunks_of(meta)
    room = TEXT_BYTES + TEXT_BYTES_PER_ROW * meta.num_rows + TEXT_BYTES_PER_BYTE * source.size()
    present, coded = [field for field in schema or file.schema_arrow if field.name in places], list[str]()
    for field in present:
        _check_type(meta, places[field.name], field)
        pages = list[Page]()
        for chunk in (chunks[places[field.name]] for chunks in groups):
            of_chunk = list(pages_of(source, chunk))
            # Of those that no run writes few bytes may unpack to any amount, or to other rows than the footer says.
            for page in of_chunk:
                if page.unpacked > PAGE_BYTES or page.encoding not in PROPORTIONAL:
                    raise ValueError(f"a page of {page.unpacked:,} bytes in encoding {page.encoding}")
            read = sum(page.values for page in of_chunk if page.kind != DICTIONARY)
            if not read == chunk.values == chunk.rows:
                raise ValueError(f"{read:,} values of {chunk.rows:,} rows")
            pages += of_chunk
        unpacked = sum(page.unpacked for page in pages)
        if unpacked > room:
            raise ValueError(f"{field.name} takes {unpacked:,} bytes for {meta.num_rows:,} rows")
        if pa.types.is_string(field.type) and any(page.kind == DICTIONARY for page in pages):
            coded.append(field.name)  # as whole texts they may take any room
    # Texts in dictionaries are counted as they are read: each may be long, and in every row.
    names = [field.name for field in present]
    try:
        table = pq.ParquetFile(source, metadata=meta, read_dictionary=coded).read(names, use_threads=threads(source))
        return pa.table([_as_type(table[field.name], field.type, room) for field in present], names=names)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(str(error)) from error


def row_batches(source: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    """The rows of a file of any columns, ROWS at a time or fewer; texts that may be long stay in dictionaries.

    Those that unpack to more than ROOM come one by one, since a row may take any room. Raises ValueError for a file
    that takes far more memory than its bytes, whatever its size, and for what is no Parquet.
    """
    import pyarrow.parquet as pq

    meta = open_parquet(source, CORPUS_FOOTER_BYTES).metadata
    for group, chunks in enumerate(chunks_of(meta)):
        # How many rows may be decoded at a time is found by the headers of the group's pages.
        rows, coded = ROWS, list[str]()
        for place, chunk in enumerate(chunks):
            column = meta.schema.column(place)
            pages = list(pages_of(source, chunk))
            values = sum(page.values for page in pages if page.kind != DICTIONARY)
            nested = column.max_repetition_level > 0  # a row may have all values of its group
            too_large = any(page.unpacked > max(PAGE_BYTES, RATIO * page.packed) for page in pages)
            if too_large or (nested and values > MOST_VALUES):
                raise ValueError(f"{column.path} takes far more memory than its bytes: write smaller row groups")
            # A text of a dictionary, or one that begins as the last did, may be in every row and take few bytes.
            texts = [page for page in pages if column.physical_type.endswith("BYTE_ARRAY")]
            repeated = max((page.unpacked for page in texts if page.kind == DICTIONARY), default=0)
            prefixed = max((page.unpacked for page in texts if page.encoding == DELTA_TEXT), default=0)
            count = values if nested else ROWS
            # As numbers in their dictionary such texts take no room; Arrow leaves them so where they are of any length.
            if repeated * count > ROOM and column.physical_type == "BYTE_ARRAY":
                coded.append(column.path)
                repeated = 0
            if nested and (repeated + prefixed) * count > ROOM:
                raise ValueError(f"{column.path} repeats long texts in lists: write it without an encoding")
            rows = min(rows, max(1, ROOM // max(1, repeated + prefixed)))
        # Numbers in a dictionary are decoded for whole batches; what they mean may need a batch for each row.
        file = pq.ParquetFile(source, metadata=meta, read_dictionary=coded)
        for batch in file.iter_batches(batch_size=rows, row_groups=[group], use_threads=False):
            alone = coded and sum(map(unpacked_bytes, batch.columns)) > ROOM
            yield from (batch.slice(row, 1) for row in range(len(batch))) if alone else [batch]


def unpacked_bytes(array: pa.Array) -> int:
    """The bytes of an array's values, a text as often as it occurs.

    >>> unpacked_bytes(pa.array(["ab", "ab"]).dictionary_encode())
    4
    """
    if pa.types.is_dictionary(array.type):
        return _text_bytes(array)
    if pa.types.is_map(array.type):  # which Arrow does not flatten
        first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
        return sum(unpacked_bytes(inner.slice(first, last - first)) for inner in (array.keys, array.items))
    if pa.types.is_nested(array.type):
        inner = array.flatten()
        return sum(map(unpacked_bytes, inner if isinstance(inner, list) else [inner]))
    return int(array.nbytes)


def threads(source: pa.NativeFile) -> bool:
    """Whether Arrow may read it with threads of its own: not bytes of Python's.

    One that lets go of them last, while the interpreter ends, aborts the process.
    """
    return not isinstance(source, pa.BufferReader)


def _paths(file: ParquetFile) -> list[str]:
    """The path of each column. Raises ValueError where two have one, or one name: Arrow reads all of a name."""
    meta, names = file.metadata, file.schema_arrow.names
    paths = [meta.schema.column(place).path for place in range(meta.num_columns)]
    if len(set(paths)) < len(paths) or len(set(names)) < len(names):
        raise ValueError("two columns of one name")
    return paths


def _check_type(meta: FileMetaData, place: int, field: pa.Field) -> None:
    """Raise ValueError for a column that holds lists, or something else than the field; nulls alone have no type."""
    column = meta.schema.column(place)
    kind, logical = str(field.type).rstrip("0123456789"), str(column.logical_type)
    flat = column.max_repetition_level == 0 and column.max_definition_level <= 1
    fits = column.physical_type in STORED.get(kind, ()) and (logical == "String" or kind != "string")
    if not (flat and (fits or logical == "Null")):
        raise ValueError(f"{field.name} is {column.physical_type} {column.logical_type}, expected {field.type}")


def chunks_of(meta: FileMetaData) -> list[list[Chunk]]:
    """The columns of each group of rows, read from the footer as Arrow writes what it has read of it.

    Its own `RowGroupMetaData.column` ends the process over some footers: it lets exceptions of C++ through.
    Raises ValueError for a group that lacks columns, or whose columns lack a count.
    """
    types = [meta.schema.column(place).physical_type for place in range(meta.num_columns)]
    stream = pa.BufferOutputStream()
    meta.write_metadata_file(stream)
    data = stream.getvalue().to_pybytes()
    try:
        groups = _struct(data, len(data) - 8 - int.from_bytes(data[-8:-4], "little"), ours=True)[0][4]
        columns = [(_int(group, 3, INT64), [column[3] for column in group[1]]) for group in groups]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError("a damaged footer") from error
    chunks = []
    for rows, of_group in columns:
        if len(of_group) != len(types):
            raise ValueError("a group of rows lacks columns")
        counts = [[_int({11: (INT64, 0)} | fields, number, INT64) for number in (5, 7, 9, 11)] for fields in of_group]
        chunks.append([Chunk(kind, rows, *count) for kind, count in zip(types, counts, strict=True)])
    return chunks


def pages_of(source: pa.NativeFile, chunk: Chunk) -> Iterator[Page]:
    """The pages that a reader decodes of a column of a group of rows. Raises ValueError for a header that is damaged.

    A dictionary that says of more values than its bytes may hold is damage: room is taken for them first.
    """
    at, read = min(chunk.data, chunk.dictionary or chunk.data), 0
    stop = min(at + chunk.packed + PADDING, source.size())
    while read < chunk.values:
        if not 0 <= at < stop:
            raise ValueError(f"its pages hold {read:,} of {chunk.values:,} values")
        page, start = _page(source, at, stop)
        if page.kind == DICTIONARY and page.values * LEAST_BYTES.get(chunk.physical_type, 1) > page.unpacked:
            raise ValueError(f"a dictionary of {page.values:,} values in {page.unpacked:,} bytes")
        read += page.values * (page.kind in (DATA, DATA_V2))
        at = start + page.packed
        yield page


def _page(source: pa.NativeFile, at: int, stop: int) -> tuple[Page, int]:
    """The page whose header begins there, and where what it heads begins."""
    for most in HEADER_BYTES:
        data = source.read_at(min(most, stop - at), at)
        try:
            fields, end = _struct(data, 0)
        except IndexError:  # it is longer than these bytes
            continue
        kind, unpacked, packed = (_int(fields, number) for number in (1, 2, 3))
        of_kind = fields.get(VALUES[kind]) if kind in VALUES else {1: (INT32, 0)}
        if not isinstance(of_kind, dict):
            raise ValueError("a page without a header of its kind")
        encoding = _int({2: (INT32, PLAIN)} | of_kind, 4 if kind == DATA_V2 else 2)
        return Page(kind, unpacked, packed, _int(of_kind, 1), encoding), at + end
    raise ValueError("the header of a page is cut short")


TRUE, FALSE, BYTE, INT16, INT32, INT64, _, BINARY, LIST, _, _, STRUCT = range(1, 13)  # of Thrift's compact protocol
DEEPEST = 4  # structs in each other


def _int(fields: dict[int, Any], number: int, expected: int = INT32) -> int:
    """A count of this type. Raises ValueError where it is none: a reader would take it for another."""
    kind, value = fields.get(number) or (expected, -1)
    if kind != expected or not 0 <= value < 1 << (31 if expected == INT32 else 63):
        raise ValueError("a header or footer that lacks a count")
    return int(value)


def _struct(data: bytes, at: int, ours: bool = False, depth: int = 0) -> tuple[dict[int, Any], int]:
    """{field: (type, number), a struct or a list}, and where it ends. Raises IndexError where the data does before.

    ours: Arrow wrote it in this process. Raises ValueError for what no header of a page has: a list, of whose types two
    readers may think otherwise, or a field that comes twice.
    """
    fields, number = dict[int, Any](), 0
    while head := data[at]:
        at, kind, step = at + 1, head & 15, head >> 4
        number, at = (number + step, at) if step else _zigzag(data, at)
        if number in fields or (depth > DEEPEST and not ours):
            raise ValueError("a page with a damaged header")
        if kind in (TRUE, FALSE):
            fields[number] = None
        elif kind == LIST and ours:
            count, inner, values = data[at] >> 4, data[at] & 15, list[Any]()
            count, at = varint(data, at + 1) if count == 15 else (count, at + 1)
            for _ in range(count):
                value, at = _value(data, at, inner, True, 0)
                values.append(value)
            fields[number] = values
        else:
            fields[number], at = _value(data, at, kind, ours, depth)
    return fields, at + 1


def _value(data: bytes, at: int, kind: int, ours: bool, depth: int) -> tuple[Any, int]:
    """(type, number) of a whole number, a struct, else None; and where it ends."""
    if kind == STRUCT:
        return _struct(data, at, ours, depth + 1)
    if kind == BINARY:
        length, at = varint(data, at)
        return None, at + length
    if kind in (INT16, INT32, INT64):
        value, at = _zigzag(data, at)
        return (kind, value), at
    if kind in (TRUE, FALSE, BYTE):  # a truth takes a byte in a list alone
        return None, at + 1
    raise ValueError("a page with a damaged header")


def _zigzag(data: bytes, at: int) -> tuple[int, int]:
    """A whole number with a sign, which is its lowest bit, and where it ends."""
    value, at = varint(data, at)
    return value >> 1 ^ -(value & 1), at


def as_plain(table: pa.Table) -> pa.Table:
    """The table with its texts as they are read by everybody: `read_columns` has bounded what they take."""
    columns = dict(zip(table.column_names, table.itercolumns(), strict=True))
    for name, column in columns.items():
        if pa.types.is_dictionary(column.type):
            texts = [chunk.dictionary_decode() for chunk in column.chunks]
            columns[name] = pa.chunked_array(texts, column.type.value_type)
    return pa.table(columns)


def _as_type(column: pa.ChunkedArray, expected: pa.DataType, room: int) -> pa.ChunkedArray:
    """The column as a type; texts stay dictionaries. Raises ValueError for texts that take more room."""
    if column.type == expected:
        return column
    if not pa.types.is_string(expected) or str(column.type) in OTHER_TEXTS:
        return column.cast(expected)
    if not (pa.types.is_dictionary(column.type) and column.type.value_type == expected):
        raise ValueError(f"{column.type}, expected texts")
    if sum(map(_text_bytes, column.chunks)) > room:
        raise ValueError("texts that are too long for so many rows")
    return column


def _text_bytes(array: pa.DictionaryArray) -> int:
    """The bytes of its texts, each as often as it occurs."""
    texts = array.dictionary
    if not len(texts):
        return 0
    wide = np.int64 if str(texts.type).startswith("large") else np.int32
    ends = np.frombuffer(texts.buffers()[1], wide)[texts.offset : texts.offset + len(texts) + 1]
    code, missing = numpy_of(array.indices)
    return int(np.diff(ends)[code[~missing]].sum(dtype=np.int64))


def numpy_of(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Its numbers, and which are null: from the buffers, since Arrow's functions import pandas."""
    present, data = column.buffers()
    part = slice(column.offset, column.offset + len(column))
    array = np.frombuffer(data, column.type.to_pandas_dtype())[part]
    if present is None:
        return array, np.zeros(len(array), bool)
    return array, np.unpackbits(np.frombuffer(present, np.uint8), bitorder="little")[part] == 0
