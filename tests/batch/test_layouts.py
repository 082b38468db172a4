"""What texts are called in a dataset, whether it has them, and a folder of the layout before."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from attnscope.corpus.folder import ALL_TEXT, SCHEMA
from helpers.command_line import Result, call

BEFORE = Path(__file__).parents[1] / "reference" / "dataset-6"
CORPUS = BEFORE.with_name("dataset-6-corpus.jsonl")
ADDED = '{"id": 10, "text": "The dog ran home."}\n'
TEXTS = ("the bank", "the river bank", "the cat sat")


def corpus_of(place: Path, *ids: Any) -> Path:
    """A record for each id, ABSENT without one."""
    path = place / "corpus.jsonl"
    records = [{"text": text} | ({} if id is ABSENT else {"id": id}) for id, text in zip(ids, TEXTS, strict=False)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


ABSENT = object()


def measured(corpus: Path | str, out: Path, *flags: str, **stdin: Any) -> Result:
    return call("batch", str(corpus), "--out", str(out), "--select", "3.0", "--top-k", "2", *flags, **stdin)


def table(folder: Path, name: str) -> pa.Table:
    """As a reader of many files has it: of one schema."""
    return pq.read_table(folder / name)


@pytest.mark.parametrize(
    ("ids", "expected", "warned"),
    [
        ((7, 0, -(2**63)), [7, 0, -(2**63)], False),
        (("7", "8", "9"), ["7", "8", "9"], False),
        ((7, "a", 9), ["7", "a", "9"], True),
        pytest.param((7, ABSENT, 9), ["7", "corpus.jsonl:2", "9"], True, id="absent"),
        ((True, False, None), ["true", "false", "corpus.jsonl:3"], False),
        ((2**63, 1, 2), [str(2**63), "1", "2"], False),
    ],
    ids=str,
)
def test_ids_are_numbers_where_all_are_and_else_text(tmp_path, monkeypatch, ids, expected, warned):
    monkeypatch.chdir(tmp_path)
    corpus_of(tmp_path, *ids)
    done = measured("corpus.jsonl", tmp_path / "out", "--tables", "heads,relations", "--spans", "end=last").ok()
    assert ("ids are whole numbers and text" in done.err) == warned
    kind = pa.int64() if isinstance(expected[0], int) else pa.string()
    for name in ("texts", "heads", "relations", "spans"):
        rows = table(tmp_path / "out", name)
        assert getattr(rows.schema.field("id").type, "value_type", rows.schema.field("id").type) == kind, name
        assert rows["id"].unique().to_pylist() == expected, name


@pytest.mark.parametrize("format", ["jsonl", "csv"])
def test_ids_are_numbers_in_the_other_formats(tmp_path, format):
    measured(corpus_of(tmp_path, 7, 8), tmp_path / "out", "--tables", "heads", "--format", format).ok()
    [path] = (tmp_path / "out" / "texts").iterdir()
    expected = {"jsonl": '{"item":0,"id":7,"text":"the bank",', "csv": '0,7,"the bank",'}[format]
    assert expected in path.read_text()


def test_an_item_without_a_text_says_nothing_of_the_ids(tmp_path):
    corpus = corpus_of(tmp_path, 7, 8)
    with corpus.open("a") as stream:
        stream.write('broken\n{"id": "x", "text": ""}\n')
    assert measured(corpus, tmp_path / "out", "--tables", "heads").code == 1
    assert table(tmp_path / "out", "texts")["id"].to_pylist() == [7, 8]
    failed = [json.loads(line)["id"] for line in (tmp_path / "out" / "failures.jsonl").read_text().splitlines()]
    assert failed == [f"{corpus}:3", "x"]


def test_a_dataset_keeps_the_kind_of_its_ids_when_the_corpus_grows(tmp_path):
    corpus = corpus_of(tmp_path, 7, 8)
    measured(corpus, tmp_path / "out", "--tables", "heads").ok()
    with corpus.open("a") as stream:
        stream.write('{"id": "nine", "text": "the cat"}\n{"id": 10, "text": "the dog"}\n')
    done = measured(corpus, tmp_path / "out", "--tables", "heads")
    assert (done.code, "its id is text, and those of the dataset are whole numbers" in done.err) == (1, True)
    assert table(tmp_path / "out", "texts")["id"].to_pylist() == [7, 8, 10]


def test_standard_input_is_read_once_and_has_ids_of_text_in_a_folder_and_their_own_in_a_pipe(tmp_path):
    data = b'{"id": 7, "text": "the bank"}\n{"id": "b", "text": "the river"}\n'
    measured("-", tmp_path / "out", "--input-format", "jsonl", "--tables", "heads", stdin=data).ok()
    assert table(tmp_path / "out", "texts")["id"].to_pylist() == ["7", "b"]
    done = call("batch", "-", "--to-stdout", "jsonl", "--input-format", "jsonl", "--tables", "heads", stdin=data).ok()
    assert [record["id"] for record in done.records] == [7, "b"]
    assert done.out.startswith(b'{"item":0,"id":7,"text":"the bank","file":')


def test_the_text_is_kept_as_the_corpus_has_it_or_left_out(tmp_path):
    records = [{"text": '=1+1, and\n"lines", 日本', "id": 1}, {"text": "the bank", "id": 2}]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(record) + "\n" for record in records))
    measured(corpus, tmp_path / "with", "--tables", "heads", "--max-tokens", "5").ok()
    assert table(tmp_path / "with", "texts")["text"].to_pylist() == ['=1+1, and\n"lines", 日本', "the bank"]
    without = ("--tables", "heads", "--set", "keep_text=false")
    measured(corpus, tmp_path / "without", *without).ok()
    assert "text" not in table(tmp_path / "without", "texts").column_names
    refused = measured(corpus, tmp_path / "without", "--tables", "heads").refusal
    assert "keep-text was False, now True" in refused


def test_a_folder_of_the_layout_before_is_read_and_resumed_as_it_was_begun(tmp_path, monkeypatch):
    """It was written by the code of layout 6, of three records with ids 7 to 9."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(BEFORE, "kept")
    shutil.copy(CORPUS, "corpus.jsonl")
    before = call("heads", "kept", "-q").silent().rows
    assert len(before) == 6
    with open("corpus.jsonl", "a") as stream:
        stream.write(ADDED)
    call("batch", "corpus.jsonl", "--out", "kept", "--tables", "heads", "--select", "3").ok()
    texts, heads = (table(tmp_path / "kept", name) for name in ("texts", "heads"))
    assert texts["id"].to_pylist() == ["7", "8", "9", "10"]
    assert "text" not in texts.column_names
    assert heads["id"].unique().to_pylist() == ["7", "8", "9", "10"]
    for path in tmp_path.glob("kept/*/*.parquet"):
        expected = {"texts": b"texts/2", "heads": b"heads/5"}[path.parent.name]
        assert pq.read_schema(path).metadata[b"attnscope.schema"] == expected
    schemas = [pq.read_schema(path).remove_metadata() for path in sorted(tmp_path.glob("kept/texts/*.parquet"))]
    assert (len(schemas), schemas[0]) == (2, schemas[1])
    assert json.loads(Path("kept/run.json").read_text())["schema"] == ALL_TEXT < SCHEMA
    assert len(call("heads", "kept", "-q").silent().rows) == 6
    refused = call("batch", "corpus.jsonl", "--out", "kept", "--tables", "heads", "--select", "2").refusal
    assert "select was '3', now '2'" in refused
