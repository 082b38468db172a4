"""Tables: the bytes of every text format, Arrow's types, and the libraries that take a table as it is."""

import io
import os
import re
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from attnscope.cli.batch_options import Dataset
from attnscope.cli.option_groups import parameters
from attnscope.cli.output import Format
from attnscope.errors import UsageError
from attnscope.inputs.prompt import from_text
from attnscope.observe.collect import observe
from attnscope.observe.observation import Observation
from attnscope.observe.request import Request
from attnscope.utils import tables
from attnscope.utils.files import remove_unfinished, save_json, whole_file, whole_path, write_whole
from attnscope.utils.tables import CHUNK, FORMATS, as_table, read_delimited, rows, save, texts_at, write

TABLE = as_table(
    {
        "layer": np.array([0, 1, 2, 3], np.int32),
        "head": [0, None, 2, None],
        "role": ["sink", "-", "sink", "other"],
        "key_token": ['say "hi"', "a,b\nc", "tab\there", " café 🙂"],
        "weight": np.array([0.1, np.nan, 1e-5, 1 / 3], np.float32),
        "entropy": np.array([0.1, 1e-5, np.nan, np.inf]),
        "holds": [True, False, None, True],
        "why": ["", "\r", "'", None],
    }
)
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # Arrow's columnar format, "IPC Streaming Format"
CSV = """\
layer,head,role,key_token,weight,entropy,holds,why
0,0,sink,"say ""hi""\",0.1,0.1,True,
1,,-,"a,b
c",,1e-05,False,"\r"
2,2,sink,tab\there,1e-05,,,'
3,,other, café 🙂,0.33333334,inf,True,
"""
TSV = """\
layer\thead\trole\tkey_token\tweight\tentropy\tholds\twhy
0\t0\tsink\t"say ""hi""\"\t0.1\t0.1\tTrue\t
1\t\t-\t"a,b
c"\t\t1e-05\tFalse\t"\r"
2\t2\tsink\t"tab\there"\t1e-05\t\t\t'
3\t\tother\t café 🙂\t0.33333334\tinf\tTrue\t
"""
JSONL = r"""
{"layer": 0, "head": 0, "role": "sink", "key_token": "say \"hi\"", "weight": 0.1, "entropy": 0.1, "holds": true, "why": ""}
{"layer": 1, "head": null, "role": "-", "key_token": "a,b\nc", "weight": null, "entropy": 1e-05, "holds": false, "why": "\r"}
{"layer": 2, "head": 2, "role": "sink", "key_token": "tab\there", "weight": 1e-05, "entropy": null, "holds": null, "why": "'"}
{"layer": 3, "head": null, "role": "other", "key_token": " café 🙂", "weight": 0.33333334, "entropy": "inf", "holds": true, "why": null}
""".lstrip("\n")  # noqa: E501


def written(table: pa.Table, form: str) -> bytes:
    stream = io.BytesIO()
    write(table, stream, form)
    return stream.getvalue()


@pytest.mark.parametrize(("form", "expected"), [("csv", CSV), ("tsv", TSV), ("jsonl", JSONL)])
def test_the_bytes_of_the_text_formats(form: str, expected: str) -> None:
    assert written(TABLE, form) == expected.encode()


@pytest.mark.parametrize("form", ["csv", "tsv", "jsonl"])
def test_text_formats_have_seven_digits_and_the_others_all(form: str) -> None:
    values = [0.0030040203788470167, 123456789.123, -1 / 3, 1e-300, 5.0, np.nan]
    table = as_table({"effect": np.array(values), "weight": np.array(values, np.float32)})
    stream = io.BytesIO()
    write(table, stream, form)
    lines = stream.getvalue().decode().splitlines()
    spelled = ["0.00300402", "123456800.0", "-0.3333333", "1e-300", "5.0"]
    for one, line in zip(spelled, lines[form != "jsonl" :], strict=False):
        assert re.search(rf"(^|[\s:]){re.escape(one)}[,\s]", line), line
    exact = io.BytesIO()
    write(table, exact, "parquet")
    assert pq.read_table(exact)["effect"].to_pylist()[:5] == values[:5]


def test_the_types_of_the_columns() -> None:
    token = pa.dictionary(pa.int32(), pa.string())
    types = [pa.int32(), pa.int64(), token, token, pa.float32(), pa.float64(), pa.bool_(), pa.string()]
    assert TABLE.schema.types == types
    assert [column.null_count for column in TABLE.columns] == [0, 2, 0, 0, 1, 1, 1, 1]


def test_parquet_and_arrow_hold_the_same_table() -> None:
    kinds = {one.name: pa.string() if pa.types.is_dictionary(one.type) else one.type for one in TABLE.schema}
    as_a_dataset = TABLE.cast(pa.schema(kinds))
    assert pq.read_table(io.BytesIO(written(TABLE, "parquet"))).equals(as_a_dataset)
    streamed = written(TABLE, "arrow")
    assert pa.ipc.open_stream(streamed).read_all().equals(TABLE)
    assert streamed.endswith(END_OF_STREAM)


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_written_in_pieces_is_read_back(form: str, tmp_path: Path) -> None:
    parts = [{"layer": [0, 1], "key_token": ["a", 'b "c", d']}, {"layer": [2, None], "key_token": ["\n", "a"]}]
    weights = np.array([0.1, np.nan, 1e-5, 1 / 3], np.float32)
    tables = [as_table({**part, "weight": weights[2 * place :][:2]}) for place, part in enumerate(parts)]
    with open(tmp_path / "table", "wb") as stream:
        pieces = FORMATS[form].pieces(stream, tables[0].schema, {"run": "of a test"})
        for table in tables:
            pieces.write(table)
        pieces.close()
        assert not stream.closed
    kinds = pa.schema([("layer", pa.int64()), ("key_token", pa.string()), ("weight", pa.float32())])
    found = FORMATS[form].read(tmp_path / "table", ["weight", "key_token", "layer"], kinds)
    assert found.column_names == ["weight", "key_token", "layer"]
    weights_read = [None if value is None else np.float32(value) for value in found["weight"].to_pylist()]
    assert weights_read == [weights[0], None, weights[2], weights[3]]
    assert found["key_token"].to_pylist() == ["a", 'b "c", d', "\n", "a"]
    assert found["layer"].to_pylist() == [0, 1, 2, None]


def test_every_format_that_a_command_offers_has_a_row() -> None:
    assert set(parameters(Format)["format"].choices) == {"table", *FORMATS}
    assert set(parameters(Dataset)["format"].choices) < set(FORMATS)


WIDE = b"," * 2000


@pytest.mark.parametrize("header", [WIDE + b"\n", b"a" * 2**17 + b"\n", b"a,b", b"\n", b'"a\n' + WIDE + b'"\n'])
def test_a_header_that_no_table_has_is_refused(header: bytes) -> None:
    """Arrow takes 8 KiB for each column, whatever it holds."""
    with pytest.raises(ValueError):
        read_delimited(pa.BufferReader(header + header))


def test_a_header_is_that_of_the_file() -> None:
    table = read_delimited(pa.BufferReader(b'\xef\xbb\xbfa,"b,c"\r\n1,"x\ny"\r\n'), {"a": pa.int8()}, multiline=True)
    assert (table.to_pydict(), table.schema.field("a").type) == ({"a": [1], "b,c": ["x\ny"]}, pa.int8())
    assert read_delimited(pa.BufferReader(b"a\tb\n"), delimiter="\t").column_names == ["a", "b"]


def test_rows_go_on_over_chunks_and_slices() -> None:
    numbers = np.arange(2 * CHUNK + 1, dtype=np.int32)
    table = as_table({"query": numbers, "query_token": texts_at(["a", "b", "a"], numbers % 3)})
    expected = [(number, "aba"[number % 3]) for number in range(len(numbers))]
    assert list(rows(table)) == expected
    assert list(rows(table.slice(CHUNK - 1, 3))) == expected[CHUNK - 1 : CHUNK + 2]
    assert list(rows(table.slice(0, 0))) == []


@pytest.fixture(scope="module")
def seen(demo) -> Observation:
    [one] = observe(demo, [from_text(demo.tokenizer, "the bank by the river bank")], Request(relations=True))
    return one


@pytest.mark.parametrize("name", ["relations", "table"])
def test_pandas_polars_and_duckdb_take_a_table_as_it_is(seen: Observation, name: str) -> None:
    table = getattr(seen, name)()
    expected = [tuple(row.values()) for row in table.to_pylist()]
    columns = table.column_names
    assert expected
    frames = [table.to_pandas()]
    if hasattr(pd.DataFrame, "from_arrow"):  # pandas 3
        frames.append(pd.DataFrame.from_arrow(table))
    for frame in frames:
        found = [tuple(None if pd.isna(cell) else cell for cell in row) for row in frame.itertuples(index=False)]
        assert (list(frame.columns), found) == (columns, expected)
    polar = pl.DataFrame(table)
    assert (polar.columns, polar.rows()) == (columns, expected)
    duck = duckdb.sql('select * from "table"')
    assert (duck.columns, duck.fetchall()) == (columns, expected)


def test_the_types_of_an_observation(demo, seen: Observation) -> None:
    from attnscope.observe.request import View

    assert seen.table().schema.field("head").type == seen.relations().schema.field("head").type == pa.int32()
    assert seen.relations().schema.field("weight").type == pa.float32()
    assert pa.types.is_dictionary(seen.relations().schema.field("key_token").type)
    assert pa.types.is_dictionary(seen.table().schema.field("role").type)
    heads = seen.table().schema
    assert heads.field("entropy").type == heads.field("top_key_mass").type == pa.float32()
    assert (heads.field("near_uniform").type, heads.field("top_key").type) == (pa.bool_(), pa.int32())
    assert pa.types.is_dictionary(heads.field("top_key_token").type)
    [averaged] = observe(demo, [seen.prompt], Request(view=View(by_kv=True), relations=True))
    for table in (averaged.table(), averaged.relations()):
        assert table.schema.field("head").type == pa.int32()
        assert table["head"].null_count == len(table) > 0


# files


def test_what_a_signal_kept_from_being_removed_is_removed_by_name(tmp_path: Path) -> None:
    interrupted, going_on = whole_path(tmp_path / "a"), whole_path(tmp_path / "b")
    interrupted.__enter__().touch()  # and its block never ends
    remove_unfinished()
    assert list(tmp_path.iterdir()) == []
    with going_on as temp:
        temp.write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_a_whole_file_is_new_or_old(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.csv"
    save(TABLE, path)
    assert path.read_bytes() == CSV.encode()
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask

    def fail() -> None:
        with whole_file(path) as stream:
            stream.write(b"half")
            [hidden] = [item.name for item in path.parent.iterdir() if item != path]
            assert hidden.startswith(".a.csv.")
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        fail()
    assert [(item.name, item.read_bytes()) for item in path.parent.iterdir()] == [("a.csv", CSV.encode())]


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    with whole_file(tmp_path / "a") as first, whole_file(tmp_path / "a") as second:
        first.write(b"first")
        second.write(b"second")
    assert [(item.name, item.read_bytes()) for item in tmp_path.iterdir()] == [("a", b"first")]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write .*a\.png"):
        write_whole(tmp_path / "file" / "a.png", lambda temp: temp.write_bytes(b""))


def test_json_has_a_word_for_every_number(tmp_path: Path) -> None:
    save_json({"a": [float("nan"), float("inf"), 0.1], 1: "é"}, tmp_path / "a.json")
    assert (tmp_path / "a.json").read_text() == ('{\n  "a": [\n    null,\n    "inf",\n    0.1\n  ],\n  "1": "é"\n}\n')


@pytest.mark.parametrize("few", [0, 100])
def test_texts_are_coded_and_written_out_as_arrow_does_it(few, monkeypatch):
    monkeypatch.setattr(tables, "FEW", few)
    texts, index = ["a", "b", "a", "c"], np.array([3, 0, 2, 1])
    mask = np.array([False, True, False, False])
    expected = pa.array(texts).dictionary_encode().take(pa.array(index, mask=mask))
    found = tables.texts_at(texts, index, mask)
    assert found.equals(expected)
    with_none = pa.array(["b", None, "a", "b"])
    assert tables.coded(with_none).equals(with_none.dictionary_encode())
    table = pa.table({"token": found, "sharp": pa.array([True, None, False, True]), "n": pa.array([1, 2, 3, 4])})
    assert tables.as_text(table).to_pydict() == {
        "token": ["c", None, "a", "b"],
        "sharp": ["True", None, "False", "True"],
        "n": [1, 2, 3, 4],
    }


def test_whole_numbers_and_truths_become_what_arrow_makes_of_them():
    found = tables.as_table({"n": [1, -(2**60)], "sharp": [True, False], "odd": [1, None], "x": [1, 2.5]})
    assert found.equals(pa.table({"n": [1, -(2**60)], "sharp": [True, False], "odd": [1, None], "x": [1, 2.5]}))
    assert tables.integers([1, None], np.int32).equals(pa.array([1, None], pa.int32()))
