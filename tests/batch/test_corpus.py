"""Corpus: every good item delivered, every bad one explained, nothing read ahead."""

import csv
import gzip
import json
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from attnscope.corpus import items as items_module
from attnscope.corpus.folder import DatasetOutput, Job
from attnscope.corpus.items import Item, read_items, texts_in
from attnscope.corpus.records import Corpus, find_files
from attnscope.corpus.run import run_folder
from attnscope.errors import InputError, UsageError
from attnscope.model.options import LoadOptions
from attnscope.observe.request import Request
from helpers.corpora import rows, some_texts
from helpers.rows import json_lines


def read(*sources: object, **how: Any) -> list[Item]:
    reading = Corpus(tuple(map(str, sources)), **how)
    return list(read_items(reading, find_files(reading)))


GOOD = ["the bank", "a, b", 'say "so"', "日本 😀"]


def written(path: Path, form: str) -> Path:
    if form == "txt":
        path.write_text("\n".join(GOOD))
    elif form == "jsonl":
        path.write_text(
            "".join(json.dumps({"text": text, "id": f"i{n}", "more": n}) + "\n" for n, text in enumerate(GOOD))
        )
    elif form == "json":
        path.write_text(json.dumps([{"text": text, "id": f"i{n}", "more": n} for n, text in enumerate(GOOD)], indent=1))
    elif form in ("csv", "tsv"):
        with open(path, "w", newline="") as stream:
            csv.writer(stream, delimiter=",\t"[form == "tsv"]).writerows(
                [["text", "id", "more"], *([text, f"i{n}", n] for n, text in enumerate(GOOD))]
            )
    else:
        pq.write_table(pa.table({"text": GOOD, "id": [f"i{n}" for n in range(4)], "more": range(4)}), path)
    return path


@pytest.mark.parametrize("form", ["txt", "json", "jsonl", "csv", "tsv", "parquet"])
def test_each_format_gives_the_same_texts(tmp_path: Path, form: str) -> None:
    items = read(written(tmp_path / f"c.{form}", form))
    assert [item.text for item in items] == GOOD
    assert [item.number for item in items] == [0, 1, 2, 3]
    assert [item.problem for item in items] == [None] * 4
    if form != "txt":
        assert [item.id for item in items] == ["i0", "i1", "i2", "i3"]
        assert [int(item.fields["more"]) for item in items] == [0, 1, 2, 3]


def test_the_texts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": ""}\nbroken\n{"text": "b"}\n{"text": "c"}\n')
    assert [item.text for item in texts_in(str(path))] == ["a", "b", "c"]
    assert [item.text for item in texts_in(str(path), 2)] == ["a", "b"]
    assert [item.text for item in texts_in(str(path), 1, strict=True)] == ["a"]
    with pytest.raises(InputError, match=r"c\.jsonl:4: broken JSON"):
        texts_in(str(path), strict=True)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("content", "why"), [("", ""), ("\n\n", ": empty"), (" \n", ": empty")])
def test_a_file_without_a_text(tmp_path: Path, content: str, why: str, strict: bool) -> None:
    path = tmp_path / "c.txt"
    path.write_text(content)
    with pytest.raises(InputError) as raised:
        texts_in(str(path), strict=strict)
    assert raised.value.message == f"there is no text in {path}{why}"


@pytest.mark.parametrize("form", ["txt", "json", "jsonl", "csv", "tsv"])
@pytest.mark.parametrize("pack", [".gz", ".zst"])
def test_compressed_files_give_the_same(tmp_path: Path, form: str, pack: str) -> None:
    plain = written(tmp_path / f"c.{form}", form)
    pressed = tmp_path / f"c.{form}{pack}"
    data = plain.read_bytes()
    pressed.write_bytes(gzip.compress(data) if pack == ".gz" else zstandard.compress(data))
    assert [item.text for item in read(pressed)] == GOOD


def test_folders_and_globs_are_read_in_order_and_only_what_is_known(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "deep/c.txt", ".hidden/d.txt", "picture.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [item.text for item in read(tmp_path)] == ["a.txt", "b.txt", "deep/c.txt"]
    assert [item.text for item in read(tmp_path / "*.txt")] == ["a.txt", "b.txt"]
    assert [item.text for item in read(tmp_path, whole=True)] == ["a.txt", "b.txt", "deep/c.txt"]
    (tmp_path / "about.json").write_text('["of the others"]')
    assert len(read(tmp_path)) == 3
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "one.json").write_text('["a"]')
    assert [item.text for item in read(tmp_path / "chats")] == ["a"]


@pytest.mark.parametrize(
    ("name", "words"),
    [("missing.txt", "there is no file"), ("*.nothing", "there is no file"), ("odd.doc", "suffix does not say")],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "odd.doc").write_text("x")
    with pytest.raises(UsageError, match=words):
        read(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ('{"text": "a"}\n{"text": "b"}\n', ["a", "b"]),  # JSON lines under another name
        ('{"version": "1.1", "data": [{"text": "a"}, {"text": "b"}]}', ["a", "b"]),
        ('{"text": {"0": "a", "1": "b"}, "n": {"0": 1, "1": 2}}', ["a", "b"]),  # columns, as pandas writes them
        ('["a", "b"]', ["a", "b"]),
        ("\ufeff [ ]", []),
        ('{"text": "a", "n": 1}', ["a"]),
        ('{"doc": {"text": "a"}}', ["no field 'text'; there are 'doc'"]),
        ('[{"text": "a"}, 3, {"text": "b"}]', ["a", "expected a JSON object, got int", "b"]),
        ('[{"text": "a"}, {"text": ', ["a", "broken JSON: Expecting value"]),
        ('[{"text": "a"}', ["a", "broken JSON: the array does not end"]),
        ('[{"text": "a"}] {"text": "b"}', ["a", "broken JSON: something follows the array"]),
        ("[" * 200_000, ["broken JSON: nested too deeply"]),
    ],
)
def test_a_json_file_holds_records_in_the_ways_that_people_write_them(
    tmp_path: Path, content: str, texts: list[str]
) -> None:
    (tmp_path / "c.json").write_text(content, encoding="utf-8")
    assert [item.problem or item.text for item in read(tmp_path / "c.json")] == texts


def test_the_messages_of_one_record_are_no_records(tmp_path: Path) -> None:
    messages = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
    (tmp_path / "c.json").write_text(json.dumps({"id": 7, "conversations": messages}))
    [item] = read(tmp_path / "c.json", chat=True)
    assert (item.id, json.loads(item.text)) == (7, messages)


@pytest.mark.parametrize(
    ("record", "how", "text"),
    [
        ({"text": "a", "relations": [{"query": "b"}]}, {}, "a"),
        ({"doc": {"question": "a"}, "choices": [{"label": "b"}]}, {"text_field": "doc.question"}, "a"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}, {"chat": True}, "content"),
        ({"sound": "a.wav", "words": [{"start": 0}]}, {"audio_field": "sound"}, ""),
    ],
)
def test_a_record_that_has_its_text_is_one_whatever_list_is_beside(
    tmp_path: Path, record: dict[str, object], how: dict[str, Any], text: str
) -> None:
    (tmp_path / "c.json").write_text(json.dumps(record))
    [item] = read(tmp_path / "c.json", **how)
    assert item.problem is None
    assert text in item.text
    assert item.fields.keys() & {"relations", "choices", "tools", "words"}


def test_a_cell_of_several_lines_with_one_that_is_no_utf_8_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "c.tsv").write_bytes(b'text\tid\n"a\n\xff\nb"\tx\nc\ty\n')
    items = read(tmp_path / "c.tsv")
    assert "a\n\nb" not in [item.text for item in items]
    assert "not UTF-8: byte 0xFF at offset 0" in [item.problem for item in items]
    assert items[-1].text == "c"


def test_an_array_is_streamed_and_a_giant_record_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.json"
    path.write_text(
        "[" + ",\n".join([json.dumps({"text": "a line of text"})] * 4_000 + ['{"text": "' + "x" * 1_000_000])
    )
    monkeypatch.setattr(items_module, "ITEM_BYTES", 100_000)
    tracemalloc.start()
    reading = Corpus((str(path),))
    problems = Counter(item.problem for item in read_items(reading, find_files(reading)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert problems == {None: 4_000, "broken JSON: too long: over 100000 characters, or broken": 1}
    assert peak < 2_000_000


def test_quotes_in_tsv_are_text_but_around_a_whole_cell(tmp_path: Path) -> None:
    lines = [
        ("text\tid", ""),
        ('"I can\'t" he said\ta', '"I can\'t" he said'),
        ('5" pipe\tb', '5" pipe'),
        ('"say ""so"""\tc', 'say "so"'),
        ('"two\nlines and a\ttab"\td', "two\nlines and a\ttab"),
        ('"never closed\te', '"never closed'),
        ('"lost', "expected 2 cells, got 1"),
        ("the end\tf", "the end"),
    ]
    (tmp_path / "c.tsv").write_text("\n".join(line for line, _ in lines) + "\n")
    items = read(tmp_path / "c.tsv")
    assert [item.problem or item.text for item in items] == [text for _, text in lines[1:]]
    assert [item.line for item in items] == [2, 3, 4, 5, 7, 8, 9]


def test_a_field_may_stand_in_a_field_and_a_text_may_be_cut_into_words(tmp_path: Path) -> None:
    record = {"doc": {"question": "why", "ids": ["q1"], "a.b": "plain"}, "arguments": {"gen_args_0": {"arg_0": "ask"}}}
    record |= {"tokens": ["the", "river", "bank"], "doc.id": "top"}
    (tmp_path / "c.jsonl").write_text(json.dumps(record))

    def said(**how: str) -> tuple[str, str | None]:
        [item] = read(tmp_path / "c.jsonl", **how)
        return item.text, item.problem

    assert said(text_field="doc.question") == ("why", None)
    assert said(text_field="arguments.gen_args_0.arg_0") == ("ask", None)
    assert said(text_field="doc.ids.0") == ("q1", None)
    assert said(text_field="doc.a.b") == ("plain", None)
    assert said(text_field="doc.id") == ("top", None)
    assert said(text_field="tokens") == ("the river bank", None)
    assert said(text_field="doc.answer") == ("", "no field 'doc.answer'; there are 'question', 'ids', 'a.b' in 'doc'")
    [item] = read(tmp_path / "c.jsonl", text_field="tokens", id_field="doc.ids.0")
    assert (item.id, item.says("doc.question")) == ("q1", "why")
    with pytest.raises(InputError, match=r"no field 'doc\.ids\.1'"):
        item.says("doc.ids.1")


def test_chat_messages_come_as_json(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"text": "hi"}))
    assert [item.text for item in read(tmp_path / "c.jsonl", chat=True)] == [json.dumps(messages), "hi"]


def test_a_large_file_is_streamed_and_a_giant_line_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.txt"
    path.write_bytes(b"short\n" + b"x" * 8_000_000 + b"\nend\n" + b"a line of text\n" * 10_000)
    monkeypatch.setattr(items_module, "ITEM_BYTES", 100_000)
    reading = Corpus((str(path),))
    tracemalloc.start()
    items: Iterator[Item] = read_items(reading, find_files(reading))
    first = [next(items) for _ in range(3)]
    count = sum(1 for _ in items)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [item.text for item in first] == ["short", "", "end"]
    assert first[1].problem == "too long: over 100000 bytes"
    assert count == 10_000
    assert peak < 1_000_000


def bad_files(folder: Path) -> dict[tuple[str, int | None], str]:
    """Thirty kinds of bad items, each a place and words of its reason."""
    folder.mkdir()
    lines: list[tuple[bytes, str]] = [
        (b'{"text": "caf\xe9"}', "not UTF-8: byte 0xE9"),
        (b'{"text": ""}', "empty"),
        (b'{"text": "   "}', "empty"),
        (b"", "empty line"),
        (b'{"text": "cut', "broken JSON"),
        (b'{"text": "a"} trailing', "broken JSON"),
        (b"[1, 2]", "expected a JSON object, got list"),
        (b'"text"', "expected a JSON object, got str"),
        (b"null", "expected a JSON object, got NoneType"),
        (b'{"body": "a"}', "no field 'text'; there are 'body'"),
        (b"{}", "there are none"),
        (b'{"text": null}', "null"),
        (b'{"text": 3}', "expected text, got int"),
        (b'{"text": [3]}', "expected text, got list"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "broken JSON"),
        (b'{"text": "' + b"the bank " * 400 + b'"}', "tokens, the model reads at most"),
        (b'{"text": "%"}', "NaN in the weights"),
    ]
    (folder / "a.jsonl").write_bytes(b"\n".join(line for line, _ in lines) + b"\n")
    expected: dict[tuple[str, int | None], str] = {("a.jsonl", n): why for n, (_, why) in enumerate(lines, start=1)}
    (folder / "b.txt").write_bytes(b"caf\xe9\n\n \t \n\xff\xfe\n")
    expected |= {("b.txt", 1): "not UTF-8", ("b.txt", 2): "empty", ("b.txt", 3): "empty", ("b.txt", 4): "not UTF-8"}
    (folder / "c.csv").write_bytes(b'id,text\n1\n2,a,b\n3,caf\xe9\n4,""\n')
    expected |= {("c.csv", 2): "expected 2 cells, got 1", ("c.csv", 3): "expected 2 cells, got 3"}
    expected |= {("c.csv", 4): "not UTF-8", ("c.csv", 5): "empty"}
    pq.write_table(pa.table({"body": ["a"]}), folder / "d.parquet")
    pq.write_table(pa.table({"text": pa.array([None], pa.string())}), folder / "e.parquet")
    (folder / "f.parquet").write_bytes(b"not parquet at all")
    (folder / "g.txt.gz").write_bytes(gzip.compress(b"one good line\n" * 9)[:-12])
    (folder / "h.txt.zst").write_bytes(b"not zstd")
    (folder / "i.jsonl.gz").write_bytes(b"not gzip")
    expected |= {("d.parquet", 1): "no field 'text'", ("e.parquet", 1): "null", ("f.parquet", None): "can't be read"}
    expected |= {("g.txt.gz", None): "can't be read", ("h.txt.zst", None): "can't be read"}
    expected[("i.jsonl.gz", None)] = "can't be read"
    return expected


def test_a_row_of_a_list_that_repeats_a_long_text_fails_alone(tmp_path: Path) -> None:
    """A file of 20 KB whose second row has 400 MB."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 400, pa.int32()), pa.array(["x" * 2**20]))
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 399, 400], pa.int32()), texts)
    pq.write_table(pa.table({"text": ["a", "b", "c"], "more": lists}), tmp_path / "c.parquet", compression="zstd")
    assert (tmp_path / "c.parquet").stat().st_size < 2**15
    corpus = Corpus((str(tmp_path / "c.parquet"),))
    items = list(read_items(corpus, find_files(corpus)))
    assert [(item.text, item.line) for item in items] == [("a", 1), ("", 2), ("c", 3)]
    assert [item.problem for item in items] == [None, "too long: over 67108864 bytes", None]


def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the model with NaN where % is embedded."""
    from attnscope.corpus import worker

    real = worker.load

    def load(options: LoadOptions) -> Any:
        loaded = real(options)
        token = loaded.tokenizer("%", add_special_tokens=False)["input_ids"][-1]
        loaded.model.get_input_embeddings().weight[token] = float("nan")
        return loaded

    monkeypatch.setattr(worker, "load", load)


def test_thirty_kinds_of_bad_items_among_good_ones(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = bad_files(tmp_path / "bad")
    assert len(expected) >= 30
    good = some_texts(100, longest=9)
    (tmp_path / "good.txt").write_text("\n".join(good[:50]))
    (tmp_path / "more.txt").write_text("\n".join(good[50:]))
    poisoned(monkeypatch)
    sources = [str(tmp_path / "good.txt"), str(tmp_path / "bad"), str(tmp_path / "more.txt")]
    job = Job(
        LoadOptions(model=str(tiny_folder), device="cpu"),
        Request(metrics=("entropy",)),
        output=DatasetOutput(tables=()),
    )
    _, tally = run_folder(job, Corpus(tuple(sources)), tmp_path / "out", {})
    failures = json_lines((tmp_path / "out" / "failures.jsonl").read_bytes())
    found = {(Path(one["file"]).name, one["line"]): one["reason"] for one in failures}
    assert found.keys() == expected.keys()
    assert [key for key, why in expected.items() if why not in found[key]] == []
    texts = rows(tmp_path / "out", "texts")
    assert [row["file"] for row in texts if "good.txt" in row["file"] or "more.txt" in row["file"]] == [
        *[str(tmp_path / "good.txt")] * 50,
        *[str(tmp_path / "more.txt")] * 50,
    ]
    assert tally.texts == len(texts) >= 100
    assert tally.failed == len(expected)
    assert [row["item"] for row in texts] == sorted(row["item"] for row in texts)
    assert {row["item"] for row in texts}.isdisjoint(one["item"] for one in failures)


def test_strict_stops_at_the_first_and_keeps_what_came_before(tmp_path: Path, tiny: Any) -> None:
    (tmp_path / "c.txt").write_text("good\n\ngood\n")
    job = Job(strict=True)
    with pytest.raises(InputError, match=r"c.txt, line 2: empty"):
        run_folder(job, Corpus((str(tmp_path / "c.txt"),)), tmp_path / "out", {}, loaded=tiny)


def test_a_corpus_that_changed_is_refused_and_one_that_grew_is_gone_on_with(tmp_path: Path, tiny: Any) -> None:
    corpus, out = tmp_path / "c.txt", tmp_path / "out"
    job, reading = Job(), Corpus((str(corpus),))
    corpus.write_text("one\ntwo\n")
    run_folder(job, reading, out, {}, loaded=tiny)
    corpus.write_text("one\ntwo\nthree\n")
    run_folder(job, reading, out, {}, loaded=tiny)
    assert [row["id"] for row in rows(out, "texts")] == [f"{corpus}:{line}" for line in (1, 2, 3)]
    corpus.write_text("one\nother\nthree\n")
    with pytest.raises(InputError, match="items 0 to 1 are not those that were read before"):
        run_folder(job, reading, out, {}, loaded=tiny)
    corpus.write_text("one\ntwo\n")
    with pytest.raises(InputError, match="item 2 was read before, and now it ends earlier"):
        run_folder(job, reading, out, {}, loaded=tiny)


def test_a_field_of_plain_text_is_refused(tmp_path):
    plain, records = tmp_path / "c.txt", tmp_path / "c.jsonl"
    plain.write_text("the bank")
    records.write_text('{"body": "the bank"}')
    for name in ("text_field", "id_field"):
        with pytest.raises(UsageError, match=f"c.txt is plain text, which has no fields; leave out {name}"):
            read(plain, **{name: "body"})
    assert [item.text for item in read(plain, records, text_field="body")] == ["the bank", "the bank"]
