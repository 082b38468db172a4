"""Asking about tokens over a corpus: as `heads` has it for each text, and every text's trouble its own."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from helpers.command_line import call
from helpers.corpora import batch, differs, rows, written
from helpers.rows import json_lines

TEXTS = ("the bank by the river", "a river bank", "no such word here at all", "bank bank bank")
RECORDS = [
    {"id": "a", "text": "the bank by the river", "asks": "last", "of": "bank"},
    {"id": "b", "text": "a river bank", "asks": -1, "of": "river,1"},
    {"id": "c", "text": "no such word here at all", "asks": "last", "of": "bank"},
    {"id": "d", "text": "bank bank bank", "asks": "bank#2", "of": "bank#3"},
    {"id": "e", "text": "the bank", "asks": "last"},
    {"id": "f", "text": "the bank", "asks": "last", "of": ["bank"]},
    {"id": "g", "text": "the bank", "asks": "last", "of": "/(/"},
]
HEADS = ("--tables", "heads")
FIELDS = ("--query-field", "asks", "--key-field", "of")
FAILURES = {
    "c": "'bank' is not in the text",
    "e": "no field 'of'; there are 'asks'",
    "f": "field 'of': expected tokens, such as",
    "g": "/(/ is not a regular expression",
}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return written(tmp_path / "corpus.jsonl", RECORDS)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A dataset for which each record said what is asked."""
    out = tmp_path_factory.mktemp("made") / "out"
    assert batch(written(out.with_name("c.jsonl"), RECORDS), tiny_folder, out, *HEADS, *FIELDS).code == 1
    return out


def alone(model: Path, record: dict[str, Any], *flags: str) -> list[dict[str, Any]]:
    """The rows that `heads` prints of one record, in the model's order, as `batch` writes them."""
    asked = ("--query", str(record["asks"]), "--key", record["of"])
    done = call("heads", "--model", str(model), "-t", record["text"], "-q", "--format", "jsonl", *asked, *flags).ok()
    found = done.records
    return sorted(found, key=lambda row: (row["layer"], row["kv_head"], row["head"] or 0))


@pytest.mark.parametrize(
    "flags",
    [
        ("--by", "kv"),
        ("--engine", "fused", "--set", "batch_tokens=1"),
        pytest.param((), marks=pytest.mark.e2e),
    ],
)
def test_a_text_has_the_mass_that_it_has_alone_and_what_means_nothing_fails_alone(
    tmp_path: Path, tiny_folder: Path, corpus: Path, flags: tuple[str, ...]
) -> None:
    out = tmp_path / "out"
    assert batch(corpus, tiny_folder, out, *HEADS, *FIELDS, *flags).code == 1
    found = rows(out, "heads")
    for record in RECORDS:
        mine = [row for row in found if row["id"] == record["id"]]
        if record["id"] in FAILURES:
            assert mine == []
            continue
        expected = alone(tiny_folder, record, *flags[:2])
        assert len(mine) == len(expected) > 0
        for row, one in zip(mine, expected, strict=True):
            assert [row[name] for name in ("layer", "head", "role")] == [
                one[name] for name in ("layer", "head", "role")
            ]
            for name in ("mass", "uniform", "entropy", "sink"):
                assert row[name] == (None if one[name] is None else pytest.approx(one[name], abs=1e-5)), name
    assert found[0].keys() >= {"mass", "uniform"}
    assert any(row["mass"] is None for row in found if row["id"] == "d")  # bank#2 does not see bank#3
    failures = json_lines((out / "failures.jsonl").read_bytes())
    assert {one["id"]: one["reason"][: len(FAILURES[one["id"]])] for one in failures} == FAILURES


def test_the_positions_are_in_texts_as_the_grammar_takes_them(made: Path, tiny_folder: Path) -> None:
    found = {row["id"]: (row["query"], row["key"], row["note"]) for row in rows(made, "texts")}
    assert found == {"a": ("5", "2", None), "b": ("3", "1-2", None), "d": ("3", "4", None)}
    call("heads", "--model", str(tiny_folder), "-t", "a river bank", "--query", "3", "--key", "1-2", "-q").ok()


def test_the_same_words_for_all_texts_and_what_was_found_in_another_way_is_noted(
    tmp_path: Path, tiny_folder: Path, corpus: Path
) -> None:
    out = tmp_path / "out"
    batch(corpus, tiny_folder, out, *HEADS, "--key", "riv", "--define", "riv=/rive/")
    [first, second] = rows(out, "texts")
    assert (first["key"], second["key"]) == ("5", "2")
    assert "query" not in first
    batch(corpus, tiny_folder, tmp_path / "part", *HEADS, "--query", "ank")
    [note] = {row["note"] for row in rows(tmp_path / "part", "texts")}
    assert note.startswith("'ank' is not a whole word")
    assert "mass" not in rows(tmp_path / "part", "heads")[0]


def test_a_folder_is_held_to_the_question(tmp_path: Path, tiny_folder: Path, corpus: Path) -> None:
    out = tmp_path / "out"
    batch(corpus, tiny_folder, out, *HEADS, "--query", "last", "--key", "bank")
    assert (
        batch(corpus, tiny_folder, out, *HEADS, "--query", "last", "--key", "bank").code == 1
    )  # goes on: one text failed
    changed = batch(corpus, tiny_folder, out, *HEADS, "--query", "last", "--key", "river")
    assert changed.code == 2
    assert differs("key", "bank", "river") in changed.err


def test_without_a_question_nothing_is_more(tmp_path: Path, tiny_folder: Path, corpus: Path) -> None:
    batch(corpus, tiny_folder, tmp_path / "out", *HEADS)
    [heads] = (tmp_path / "out" / "heads").iterdir()
    [texts] = (tmp_path / "out" / "texts").iterdir()
    assert not {"mass", "uniform"} & set(pq.read_table(heads).column_names)
    assert not {"query", "key", "note"} & set(pq.read_table(texts).column_names)
    assert pq.read_schema(heads).metadata[b"attnscope.schema"] == b"heads/6"


@pytest.mark.parametrize("format", ["csv", "parquet", pytest.param("jsonl", marks=pytest.mark.e2e)])
def test_every_format_has_the_columns(tmp_path: Path, tiny_folder: Path, corpus: Path, made: Path, format: str) -> None:
    out = made
    if format != "parquet":
        out = tmp_path / "out"
        batch(corpus, tiny_folder, out, *HEADS, *FIELDS, "--format", format)
    [path] = (out / "heads").iterdir()
    names = {
        "csv": lambda: path.read_text().splitlines()[0].replace('"', "").split(","),
        "jsonl": lambda: list(json.loads(path.read_text().splitlines()[0])),
        "parquet": lambda: pq.read_table(path).column_names,
    }[format]()
    assert names[-3:] == ["mass", "uniform", "stack"]


def test_a_stream_says_them_too(tiny_folder: Path, corpus: Path) -> None:
    done = call("batch", str(corpus), "--model", str(tiny_folder), "--to-stdout", "jsonl", *FIELDS, "-q")
    first = json.loads(done.out.splitlines()[0])
    assert (first["query"], first["key"]) == ("5", "2")
    assert {"mass", "uniform"} <= first["heads"][0].keys()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--query", "last", "--query-field", "asks"), "--query and --query-field were both given"),
        (("--key", "bank", "--key-field", "of"), "--key and --key-field were both given"),
        (("--key", "/(/"), "is not a regular expression"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_once(
    tmp_path: Path, tiny_folder: Path, corpus: Path, flags: tuple[str, ...], message: str
) -> None:
    done = batch(corpus, tiny_folder, tmp_path / "out", *HEADS, *flags)
    assert done.code == 2
    assert message in done.err
    assert not (tmp_path / "out").exists()
