"""Parquet that anybody may have written: what no run writes is refused before it is decoded."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from attnscope.utils import parquet
from attnscope.utils.parquet import (
    as_plain,
    chunks_of,
    open_parquet,
    pages_of,
    read_columns,
    row_batches,
    unpacked_bytes,
)
from attnscope.utils.tables import FORMATS

SCHEMA = pa.schema([("layer", pa.int32()), ("probe", pa.string()), ("score", pa.float64())])


def made(rows: int, probes: list[str], **others: pa.Array) -> pa.Table:
    """A table of SCHEMA whose rows name the probes in turn."""
    code = pa.array(np.arange(rows, dtype=np.int32) % len(probes))
    probe = pa.DictionaryArray.from_arrays(code, pa.array(probes, pa.string()))
    zeros = np.zeros(rows)
    columns = {"layer": pa.array(zeros.astype(np.int32)), "probe": probe, "score": pa.array(zeros)}
    return pa.table({**columns, **others})


def packed(table: pa.Table, **options: object) -> bytes:
    stream = pa.BufferOutputStream()
    pq.write_table(table, stream, **{"compression": "zstd", "store_schema": False, **options})
    return stream.getvalue().to_pybytes()


def read(data: bytes, most_rows: int | None = None) -> pa.Table:
    return read_columns(pa.BufferReader(data), SCHEMA, most_rows)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"row_group_size": 7},
        {"data_page_size": 1, "write_batch_size": 5, "dictionary_pagesize_limit": 8},
        {"data_page_version": "2.0", "use_dictionary": False},
        {
            "column_encoding": {"layer": "DELTA_BINARY_PACKED", "probe": "DELTA_LENGTH_BYTE_ARRAY"},
            "use_dictionary": False,
        },
        {"column_encoding": {"score": "BYTE_STREAM_SPLIT"}, "use_dictionary": ["probe"]},
    ],
    ids=str,
)
def test_what_arrow_writes_is_read_as_arrow_reads_it(options: dict[str, object]) -> None:
    table = made(50, ["sink", "induction p10", "", "größer"])
    table = table.set_column(2, "score", pa.array([None, *np.linspace(0, 1, 49)]))
    data = packed(table, **options)
    assert as_plain(read(data)).equals(pq.read_table(pa.BufferReader(data)))
    assert pa.types.is_dictionary(read(data)["probe"].type) == (options.get("use_dictionary") is not False)


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view()], ids=str)
def test_texts_of_other_writers_are_texts(kind: pa.DataType) -> None:
    table = made(9, ["ab", ""]).set_column(1, "probe", pa.array(["ab", None, ""] * 3, kind))
    data = packed(table, use_dictionary=False, store_schema=True)
    assert as_plain(read(data))["probe"].to_pylist() == ["ab", None, ""] * 3
    assert as_plain(read(data)).schema.field("probe").type == pa.string()


def test_a_column_of_nulls_alone_has_the_type_that_is_expected() -> None:
    table = made(9, ["ab"]).set_column(1, "probe", pa.nulls(9)).set_column(2, "score", pa.nulls(9))
    nulls = as_plain(read(packed(table)))
    assert nulls.schema.equals(SCHEMA)
    assert nulls["probe"].null_count == nulls["score"].null_count == 9


def test_a_dataset_s_part_is_read_whole_with_long_texts(tmp_path: Path) -> None:
    texts = [f"{number} " * 3000 for number in range(40)]
    table = made(40, texts)
    with (tmp_path / "part.parquet").open("wb") as stream:
        pieces = FORMATS["parquet"].pieces(stream, table.schema, {"attnscope.run": "{}" * 9000})
        for start in range(0, 40, 8):
            pieces.write(table.slice(start, 8))
        pieces.close()
    with pa.OSFile(str(tmp_path / "part.parquet")) as source:
        assert as_plain(read_columns(source))["probe"].to_pylist() == texts


def doctored(data: bytes, place: int, change: int) -> bytes:
    return data[:place] + bytes([data[place] + change]) + data[place + 1 :]


def of_chunk(data: bytes, name: str) -> int:
    """Where the first page of a column begins."""
    meta = pq.ParquetFile(pa.BufferReader(data)).metadata
    chunk = meta.row_group(0).column(meta.schema.names.index(name))
    return chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset


def more_values_in_the_dictionary() -> bytes:
    """Its header: type, unpacked and packed sizes, then a struct whose first field is the number of values."""
    data = packed(made(9, ["ab"]), compression="none")
    at = of_chunk(data, "probe")
    assert data[at : at + 9] == bytes.fromhex("1504 150c 150c 4c 1502")
    return doctored(data, at + 8, 100)


def more_values_in_a_page() -> bytes:
    data = packed(made(9, ["ab"]), compression="none", use_dictionary=False, write_statistics=False)
    at = of_chunk(data, "layer")
    assert data[at + 7 : at + 9] == bytes.fromhex("1512")
    return doctored(data, at + 8, 64)


def without_its_schema(data: bytes) -> bytes:
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    return data[:footer] + b"\xff" * 9 + data[footer + 9 :]


def with_a_level_too_many() -> bytes:
    """Its footer says how often a null or a value of `layer` occurs, in a list of 0 and 2; here of 0, 2 and 0."""
    data = packed(pa.table({"layer": pa.array([1, 2], pa.int32())}), compression="none")
    counts = bytes.fromhex("1926 0004")
    assert data.count(counts) == 1
    length = int.from_bytes(data[-8:-4], "little") + 1
    return data.replace(counts, bytes.fromhex("1936 0004 00"))[:-8] + length.to_bytes(4, "little") + b"PAR1"


BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "a long text in many rows": (lambda: packed(made(2**14, ["x" * 2**20])), "texts that are too long"),
    "a page of many bytes": (lambda: packed(made(1, ["x" * (2**26 + 1)])), "a page of 67,10"),
    "many pages": (lambda: packed(made(6, ["x" * 2**24]), row_group_size=1), "probe takes 100,6"),
    "more rows than bytes": (lambda: packed(made(2**21, ["a"])), "2,097,152 rows"),
    "a footer of nothing": (
        lambda: packed(made(1, ["a"]).replace_schema_metadata({"a": "x" * 2**18}), store_schema=True),
        "a footer",
    ),
    "prefixes of texts": (
        lambda: packed(made(999, ["x" * 2**15]), use_dictionary=False, column_encoding={"probe": "DELTA_BYTE_ARRAY"}),
        "encoding 7",
    ),
    "a dictionary of more": (more_values_in_the_dictionary, "a dictionary of 51 values in 6 bytes"),
    "a page of more": (more_values_in_a_page, "41 values of 9 rows"),
    "words in place of numbers": (lambda: packed(made(1, ["a"], layer=pa.array(["x"]))), "layer is BYTE_ARRAY"),
    "bytes in place of texts": (lambda: packed(made(1, ["a"], probe=pa.array([b"x"]))), "probe is BYTE_ARRAY"),
    "numbers beyond the type": (lambda: packed(made(1, ["a"], layer=pa.array([2**40]))), "not in range"),
    "two of one name": (lambda: packed(pa.table([[1], [2]], names=["layer", "layer"])), "two columns"),
    "a text and a struct of one name": (
        lambda: packed(pa.table([["a"], [{"x": "a long text in many rows"}]], names=["probe", "probe"])),
        "two columns",
    ),
    "a footer of other bytes": (lambda: without_its_schema(packed(made(9, ["a"]))), "deserialize"),
    "cut": (lambda: packed(made(9, ["a"]))[:100], "no Parquet"),
    "empty": (lambda: b"", "no Parquet"),
    "a name alone": (lambda: b"PAR1", "no Parquet"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_no_run_writes_is_refused(name: str) -> None:
    make, says = BOMBS[name]
    data = make()
    assert len(data) < 2**20
    with pytest.raises(ValueError, match=says):
        read(data)


def test_pages_are_judged_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def decoded(*_: object, **__: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(pq.ParquetFile, "read", decoded)
    with pytest.raises(AssertionError, match="decoded"):
        read(packed(made(9, ["ab"])))
    for name in ("more rows than bytes", "a dictionary of more", "prefixes of texts"):
        with pytest.raises(ValueError):
            read(BOMBS[name][0]())


def test_a_footer_over_which_arrow_s_own_reader_ends_the_process_is_damage() -> None:
    with pytest.raises(ValueError, match="histogram"):
        read(with_a_level_too_many())


def test_a_table_of_more_rows_than_were_allowed_is_refused() -> None:
    data = packed(made(9, ["ab"]))
    assert len(read(data, 9)) == 9
    with pytest.raises(ValueError, match="9 rows"):
        read(data, 8)


def test_lists_are_no_column() -> None:
    table = made(2, ["a"]).set_column(0, "layer", pa.array([[1, 2], []]))
    assert read(packed(table)).column_names == ["probe", "score"]


@pytest.mark.parametrize(
    "header",
    [
        "1504 050204 00",  # field 1 twice: Arrow takes the second where it is of the type, and passes it over otherwise
        "1504 190504 00",  # a list
        "1c1c1c1c1c1c 000000000000 00",  # deeper than any
        f"15{'80' * 10}01 00",  # a number of 77 bits
    ],
)
def test_a_header_that_two_readers_may_read_differently_is_damage(header: str) -> None:
    with pytest.raises(ValueError, match=r"damaged header|too many bytes"):
        parquet._struct(bytes.fromhex(header), 0)


def test_the_headers_of_pages_are_those_that_arrow_counts() -> None:
    data = packed(made(5000, ["ab", "c" * 5000]), data_page_size=64, write_batch_size=100)
    source = pa.BufferReader(data)
    meta = open_parquet(source).metadata
    for place, chunk in enumerate(chunks_of(meta)[0]):
        pages = list(pages_of(source, chunk))
        assert sum(page.values for page in pages if page.kind != parquet.DICTIONARY) == 5000
        assert 0 < sum(page.unpacked for page in pages) <= meta.row_group(0).column(place).total_uncompressed_size
    assert len(pages) > 10


# A corpus: of any columns, some rows at a time


def corpus_rows(data: bytes) -> list[dict[str, object]]:
    return [row for batch in row_batches(pa.BufferReader(data)) for row in batch.to_pylist()]


CHATS = pa.table(
    {
        "id": list(range(300)),
        "text": [f"{number} bank" * (number % 7) for number in range(300)],
        "messages": [[{"role": "user", "content": f"hi {number}"}] * (number % 3) for number in range(300)],
        "tags": pa.array([[("a", number)] for number in range(300)], pa.map_(pa.string(), pa.int64())),
        "ids": [None if number % 5 == 0 else [number] * number for number in range(300)],
    }
)


PREFIXES: dict[str, object] = {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}


def test_a_corpus_may_have_a_larger_footer_than_a_file_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "FOOTER_BYTES", 1000)
    monkeypatch.setattr(parquet, "CORPUS_FOOTER_BYTES", 5000)
    rows = CHATS.select(["text"])
    assert corpus_rows(packed(rows, row_group_size=15)) == rows.to_pylist()
    with pytest.raises(ValueError, match="write larger row groups"):
        corpus_rows(packed(rows, row_group_size=1))
    with pytest.raises(ValueError, match="a footer of"):
        read_columns(pa.BufferReader(packed(rows, row_group_size=15)))


@pytest.mark.parametrize("room", [1 << 28, 1000, 1])
@pytest.mark.parametrize("options", [{}, {"row_group_size": 70}, PREFIXES], ids=str)
def test_a_corpus_has_the_rows_that_arrow_reads(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, object], room: int
) -> None:
    monkeypatch.setattr(parquet, "ROOM", room)
    data = packed(CHATS, **options, write_batch_size=20)
    assert corpus_rows(data) == CHATS.to_pylist()


def test_of_a_corpus_few_rows_with_long_texts_are_held_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROOM", 2**20)
    prefixes = packed(made(200, ["x" * 2**15]), use_dictionary=False, column_encoding={"probe": "DELTA_BYTE_ARRAY"})
    assert max(map(len, row_batches(pa.BufferReader(prefixes)))) < 64
    repeated = list(row_batches(pa.BufferReader(packed(made(200, ["x" * 2**15])))))
    assert [len(batch) for batch in repeated] == [1] * 192 + [8]
    assert max(batch.nbytes for batch in repeated) < 2**16
    assert unpacked_bytes(repeated[0]["probe"]) == 2**15
    few = list(row_batches(pa.BufferReader(packed(made(20, ["x" * 2**15])))))
    assert [len(batch) for batch in few] == [20]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: packed(made(1, ["x" * 2**21])), "probe takes far more memory than its bytes"),
        (lambda: packed(pa.table({"ids": [[0] * 2000]})), "ids.list.element takes far more memory"),
        (
            lambda: packed(
                pa.table({"a": [["x" * 2**15] * 300]}),
                use_dictionary=False,
                column_encoding={"a.list.element": "DELTA_BYTE_ARRAY"},
            ),
            "a.list.element repeats long texts",
        ),
    ],
    ids=["a page", "a list", "prefixes in a list"],
)
def test_a_corpus_that_takes_far_more_memory_than_its_bytes_is_refused(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], bytes], says: str
) -> None:
    for name, bound in {"MOST_VALUES": 1000, "ROOM": 2**20, "PAGE_BYTES": 2**20}.items():
        monkeypatch.setattr(parquet, name, bound)
    with pytest.raises(ValueError, match=says):
        corpus_rows(make())


def test_the_bytes_of_an_array_are_those_that_it_unpacks_to() -> None:
    coded = pa.array(["ab", None, "ab", ""]).dictionary_encode()
    assert unpacked_bytes(coded) == 4
    assert unpacked_bytes(coded.slice(2)) == 2
    assert unpacked_bytes(pa.StructArray.from_arrays([coded, coded], ["a", "b"])) == 8
    assert unpacked_bytes(pa.ListArray.from_arrays([0, 1, 3], coded)) == 4
    assert unpacked_bytes(pa.array(["ab", "ab"], pa.large_string()).dictionary_encode()) == 4
