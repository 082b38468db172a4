"""Spans over a corpus against loops over the model's own matrices, and every text's trouble its own; texts cut."""

import csv
import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from attnscope.corpus.folder import DatasetOutput, Job
from attnscope.corpus.items import Item, given_spans
from attnscope.corpus.records import Corpus
from attnscope.corpus.run import run_folder
from attnscope.errors import InputError
from attnscope.inputs.prompt import from_text
from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import load
from attnscope.model.options import LoadOptions
from attnscope.observe.request import Request
from helpers.command_line import call
from helpers.corpora import batch, differs, jsonl, rows, some_texts, written
from helpers.folders import saved
from helpers.own import attentions
from helpers.rows import json_lines

RECORDS: list[dict[str, Any]] = [
    {"id": "a", "text": "Mary saw the river bank and John saw Mary", "spans": {"place": [[13, 23]], "other": [[0, 4]]}},
    {"id": "b", "text": "the bank is on the river bank by Mary", "spans": {"place": [[4, 8], [19, 29]]}},
    {"id": "c", "text": "the quick fox"},
    {"id": "d", "text": "a Mary at the lake", "spans": {"subject": [[14, 18]], "place": []}},
]
HEADS = ("--tables", "heads")
SPANS = ("--spans", "subject=Mary", "--spans", "place", "--spans", "end=-2:")
POSITIONS = {  # counted by hand in what `attnscope tokens` lists
    "a": {"subject": "1-2,17-18", "place": "7-8", "end": "17-18"},
    "b": {"subject": "9-10", "place": "2,6-7", "end": "9-10"},
    "c": {"subject": None, "place": None, "end": "4-5"},
    "d": {"subject": "6", "place": None, "end": "5-6"},  # the record's own word goes before what all texts mean
}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return written(tmp_path / "corpus.jsonl", RECORDS)


@pytest.fixture(scope="module")
def windowed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("windowed") / "mistral", "mistral", vocab_size=2048, sliding_window=4)


def places(spelled: str | None) -> list[int]:
    """`2,6-7` -> 2, 6, 7."""
    runs = [part.split("-") for part in spelled.split(",")] if spelled else []
    return [at for run in runs for at in range(int(run[0]), int(run[-1]) + 1)]


def matrices(loaded: LoadedModel, text: str) -> dict[tuple[int, int], list[list[float]]]:
    """The model's own, by layer and head, rows of queries."""
    layers = attentions(loaded.model, loaded.tokenizer(text)["input_ids"])
    return {(at, head): rows_QK.tolist() for at, heads in enumerate(layers) for head, rows_QK in enumerate(heads)}


def mean_masses(rows_QK: list[list[float]], query: list[int], key: list[int], window: int) -> list[float | None]:
    """The mass on the keys and that of uniform attention, over the queries that see one of them."""
    counted = []
    for i in query:
        visible = range(max(0, i - window + 1), i + 1)
        if any(j in visible for j in key):
            counted.append((sum(rows_QK[i][j] for j in key), sum(j in visible for j in key) / len(visible)))
    return [sum(part) / len(counted) for part in zip(*counted, strict=True)] or [None, None]


EAGER, FUSED = ("--engine", "eager"), ("--engine", "fused", "--set", "batch_tokens=1")


@pytest.mark.parametrize(
    ("model", "window", "flags"),
    [
        ("tiny_folder", 10**6, EAGER),
        ("windowed_folder", 4, FUSED),
        pytest.param("tiny_folder", 10**6, FUSED, marks=pytest.mark.e2e),
        pytest.param("windowed_folder", 4, EAGER, marks=pytest.mark.e2e),
    ],
)
def test_every_span_has_its_mass_on_every_span(
    tmp_path: Path, corpus: Path, model: str, window: int, flags: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(model)
    batch(corpus, folder, tmp_path / "out", *HEADS, *SPANS, *flags).ok()
    assert {row["id"]: json.loads(row["positions"]) for row in rows(tmp_path / "out", "texts")} == POSITIONS
    found = iter(rows(tmp_path / "out", "spans"))
    loaded = load(LoadOptions(model=str(folder), device="cpu"))
    loaded.model.set_attn_implementation("eager")
    for record in RECORDS:
        tokens = {name: places(said) for name, said in POSITIONS[record["id"]].items()}
        for (layer, head), rows_QK in matrices(loaded, record["text"]).items():
            for q, k in product(tokens, tokens):
                row = next(found)
                who = (row["id"], row["layer"], row["head"], row["kv_head"], row["query_span"], row["key_span"])
                assert who == (record["id"], layer, head, head // 2, q, k)
                mass, uniform = mean_masses(rows_QK, tokens[q], tokens[k], window)
                assert (row["mass"], row["uniform"]) == (
                    (None, None) if mass is None else pytest.approx((mass, uniform), abs=1e-5)
                )
    assert next(found, None) is None


def test_it_is_the_mass_of_query_and_key(tmp_path: Path, tiny_folder: Path, corpus: Path) -> None:
    """Averaged over kv heads, and of chosen heads, too."""
    asked = ("--define", "subject=Mary", "--define", "end=last", "--query", "end", "--key", "subject")
    flags = ("--by", "kv", "--select", "1.*,3.2", "--spans", "subject,end")
    batch(written(corpus, RECORDS[:2]), tiny_folder, tmp_path / "out", *HEADS, *asked, *flags).ok()
    found = rows(tmp_path / "out", "spans")
    pairs = [row for row in found if (row["query_span"], row["key_span"]) == ("end", "subject")]
    heads = rows(tmp_path / "out", "heads")
    assert len(pairs) == len(heads) == 2 * 3
    for pair, head in zip(pairs, heads, strict=True):
        for name in ("item", "layer", "head", "kv_head"):
            assert pair[name] == head[name]
        assert [pair["mass"], pair["uniform"]] == pytest.approx([head["mass"], head["uniform"]])


def lacking(err: str) -> list[tuple[str, int, int]]:
    """What stderr says of spans, in its order: how many texts lack each, and of how many."""
    said = re.findall(r"^span '(\w+)' is not in (\d+) of (\d+) texts(?:;.*)?$", err, re.MULTILINE)
    return [(name, int(count), int(of)) for name, count, of in said]


def test_texts_without_a_span_are_counted(tmp_path: Path, tiny_folder: Path, corpus: Path) -> None:
    asked = ("batch", str(corpus), "--model", str(tiny_folder), *SPANS)
    done = call(*asked, "--out", str(tmp_path / "out")).ok()
    assert lacking(done.err) == [("place", 2, 4), ("subject", 1, 4)]
    again = call(*asked, "--out", str(tmp_path / "out"))
    assert lacking(again.err) == lacking(done.err)  # though this run read none of them
    lines = call(*asked, "--to-stdout", "jsonl")
    assert lacking(lines.err) == lacking(done.err)
    said = lines.records
    assert [one["positions"] for one in said] == list(POSITIONS.values())
    assert len(said[0]["spans"]) == 4 * 4 * 9
    columns = {"layer", "head", "kv_head", "query_span", "key_span", "mass", "uniform", "stack"}
    assert said[0]["spans"][0].keys() == columns


def test_a_span_that_no_record_has_is_said_with_how_a_record_gives_it(tmp_path: Path, tiny_folder: Path) -> None:
    corpus = written(tmp_path / "c.jsonl", [{"text": "Mary met John", "subject": [[0, 4]]}])
    done = call("batch", str(corpus), "--model", str(tiny_folder), "--spans", "subject", "--out", str(tmp_path / "o"))
    assert """1 of 1 text; a record gives it as "spans": {"subject": [[0, 4]]}, in characters""" in done.ok().err


@pytest.mark.parametrize(
    ("spans", "reason"),
    [
        ([[0, 4]], "field 'spans': expected {\"subject\": [[5, 9]]}, got [[0, 4]]"),
        ("subject", "field 'spans': expected {\"subject\": [[5, 9]]}, got 'subject'"),
        ({"subject": [0, "4"]}, "span 'subject': expected ranges like [[5, 9]], got [0, '4']"),
        ({"subject": "Mary"}, "span 'subject': expected ranges like [[5, 9]], got 'Mary'"),
        ({"subject": [[0, 4.0]]}, "span 'subject': expected ranges like [[5, 9]], got [[0, 4.0]]"),
        ({"subject": [[False, True]]}, "span 'subject': expected ranges like [[5, 9]], got [[False, True]]"),
        ({"subject": [[0, 1, 2]]}, "span 'subject': expected ranges like [[5, 9]], got [[0, 1, 2]]"),
        ({"subject": 0}, "span 'subject': expected ranges like [[5, 9]], got 0"),
        ({"subject": [[4, 9]]}, "span 'subject': [4, 9] is not a range of the text's 8 characters"),
        ({"subject": [[-2, 1]]}, "span 'subject': [-2, 1] is not a range of the text's 8 characters"),
        ({"subject": [[0, 2], [3, 3]]}, "span 'subject': [3, 3] is not a range of the text's 8 characters"),
    ],
)
def test_a_record_whose_spans_are_none_is_refused(tiny: Any, spans: Any, reason: str) -> None:
    prompt = from_text(tiny.tokenizer, "the bank")
    with pytest.raises(InputError) as refused:
        given_spans(Item(0, "c.jsonl", 1, "a", "the bank", {"spans": spans}), prompt, ("subject",))
    assert str(refused.value) == reason


def test_character_ranges_are_not_of_a_chat(tiny: Any) -> None:
    record = Item(0, "c.jsonl", 1, "a", "the bank", {"spans": {"subject": [[0, 3]]}})
    prompt = from_text(tiny.tokenizer, "the bank")
    with pytest.raises(InputError, match="the chat template writes another"):
        given_spans(record, prompt, ("subject",), chat=True)
    assert given_spans(record, prompt, ("other",), chat=True) == {}


def test_bad_spans_are_failures_and_the_rest_goes_on(tmp_path: Path, tiny_folder: Path, corpus: Path) -> None:
    records = [{"text": "the bank", "spans": {"subject": [[0, 99]], "other": "x"}}, {"text": "the bank"}]
    assert batch(written(corpus, records), tiny_folder, tmp_path / "out", *HEADS, "--spans", "subject").code == 1
    [failure] = json_lines((tmp_path / "out" / "failures.jsonl").read_bytes())
    assert failure["reason"] == "span 'subject': [0, 99] is not a range of the text's 8 characters"
    assert [row["item"] for row in rows(tmp_path / "out", "texts")] == [1]


def test_spans_in_csv_and_parquet(tmp_path: Path, tiny_folder: Path) -> None:
    given = [{"subject": [[4, 8]]}, None, {"subject": []}]
    with open(tmp_path / "c.csv", "w", newline="") as stream:
        csv.writer(stream).writerows([["text", "spans"], *(["the bank", json.dumps(one)] for one in given)])
    pq.write_table(pa.table({"text": ["the bank"] * 3, "spans": given}), tmp_path / "c.parquet")
    for name in ("c.csv", "c.parquet"):
        batch(tmp_path / name, tiny_folder, tmp_path / f"{name}.out", *HEADS, "--spans", "subject=the").ok()
        found = [json.loads(row["positions"])["subject"] for row in rows(tmp_path / f"{name}.out", "texts")]
        assert found == ["2", "1", None]


def test_the_fields_of_query_and_key_take_ranges_as_spans_do(tmp_path: Path, tiny_folder: Path, corpus: Path) -> None:
    """One range, or several, or an expression, each record as it likes; the same tokens have the same numbers."""
    text = "Mary saw the river bank and John saw Mary"
    asks = [("last", "river,bank"), ([[37, 41]], [13, 23]), ("[37, 41]", "[[13, 18], [19, 23]]"), (-1, [[14, 21]])]
    given = [{"text": text, "asks": query, "of": key} for query, key in asks]
    fields = ("--query-field", "asks", "--key-field", "of")
    batch(written(corpus, given), tiny_folder, tmp_path / "out", *HEADS, *fields).ok()
    first, *others = ([row["key"], row["query"]] for row in rows(tmp_path / "out", "texts"))
    assert first == ["7-8", "18"]
    assert others == [["7-8", "17-18"], ["7-8", "17-18"], ["7-8", "18"]]
    masses = [row["mass"] for row in rows(tmp_path / "out", "heads")]
    assert masses[:16] == pytest.approx(masses[48:], abs=1e-6)
    assert masses[16:32] == pytest.approx(masses[32:48], abs=1e-6)
    assert masses[:16] != pytest.approx(masses[16:32], abs=1e-3)


def test_ranges_of_query_and_key_fail_their_texts_alone(tmp_path: Path, tiny_folder: Path, corpus: Path) -> None:
    keys = [[[0, 99]], [[16, 21]], [], [[0, 3]]]
    flags = ("--key-field", "of", "--max-tokens", "3")
    given = [{"text": "the bank of the river", "of": key} for key in keys]
    assert batch(written(corpus, given), tiny_folder, tmp_path / "out", *HEADS, *flags).code == 1
    failures = json_lines((tmp_path / "out" / "failures.jsonl").read_bytes())
    assert [one["reason"] for one in failures] == [
        "field 'of': [0, 99] is not a range of the text's 21 characters",
        "field 'of': no token is left of the characters [[16, 21]]",
        "field 'of': no token is left of the characters []",
    ]
    assert [row["key"] for row in rows(tmp_path / "out", "texts")] == ["1"]


def test_what_was_cut_off_is_not_there(tmp_path: Path, tiny_folder: Path, corpus: Path) -> None:
    records = [{"text": "the bank of the river", "spans": {"head": [[0, 12]], "tail": [[16, 21]]}}]
    flags = ("--spans", "head,tail", "--max-tokens", "3")
    batch(written(corpus, records), tiny_folder, tmp_path / "out", *HEADS, *flags).ok()
    [row] = rows(tmp_path / "out", "texts")
    assert json.loads(row["positions"]) == {"head": "1-2", "tail": None}


@pytest.mark.parametrize(("truncate", "kept"), [((), [0, 1, 2, 3]), (("--truncate", "left"), [0, 3, 4, 5])])
def test_every_text_is_cut(
    tmp_path: Path, tiny_folder: Path, tiny: Any, corpus: Path, truncate: tuple[str, ...], kept: list[int]
) -> None:
    records = [{"id": "long", "text": "the bank of the river"}, {"id": "short", "text": "the bank"}]
    flags = ("--max-tokens", "4", *truncate)
    batch(written(corpus, records), tiny_folder, tmp_path / "out", *HEADS, *flags).ok()
    found = {row["id"]: (row["tokens"], row["removed_tokens"]) for row in rows(tmp_path / "out", "texts")}
    assert found == {"long": (4, 2), "short": (3, 0)}
    ids = tiny.tokenizer(records[0]["text"])["input_ids"]
    (tmp_path / "ids").write_text(json.dumps([ids[at] for at in kept]))
    given = ("--ids", str(tmp_path / "ids"), "--sort", "layer", "--format", "jsonl", "-q")
    alone = call("heads", "--model", str(tiny_folder), *given)
    expected = [json.loads(line)["entropy"] for line in alone.out.splitlines()]
    assert [row["entropy"] for row in rows(tmp_path / "out", "heads")][:16] == pytest.approx(expected, abs=1e-5)
    other = batch(corpus, tiny_folder, tmp_path / "out", *HEADS, "--max-tokens", "5", *truncate)
    assert (other.code, differs("max-tokens", 4, 5) in other.err) == (2, True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--spans", "last"), "'last' means tokens already; give them a name, as in --spans end=last"),
        (("--spans", "river bank"), "a span is a name, or a name and what it means, got 'river bank'"),
        (("--spans", "=Mary"), "a span is a name, or a name and what it means, got ''"),
        (("--spans", ""), "a span is a name, or a name and what it means, got ''"),
        (("--spans", "bad=/(/"), "is not a regular expression"),
        (("--spans", "a=Mary", "--define", "a=John"), "the group 'a' is defined twice"),
        (("--max-tokens", "0"), "--max-tokens: expected a whole number from 1 to 1,000,000,000, got '0'"),
        (("--max-tokens", "513"), "texts of 513 tokens are too long: the model reads at most 512"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_once(
    tmp_path: Path, tiny_folder: Path, corpus: Path, flags: tuple[str, ...], message: str
) -> None:
    done = batch(corpus, tiny_folder, tmp_path / "out", *HEADS, *flags)
    assert (done.code, message in done.err) == (2, True), done.err
    assert not list(tmp_path.glob("out/*/part-*"))


def one_window(job: Job, corpus: Corpus, folder: Path, tiny: LoadedModel) -> bool:
    """Whether a run that is stopped at the end of a window had more to do."""
    noted: list[Any] = []
    return run_folder(job, corpus, folder, {}, loaded=tiny, stop=lambda: bool(noted), note=noted.append)[1].stopped


@pytest.mark.e2e
def test_going_on_gives_the_same_rows(tmp_path: Path, tiny: LoadedModel) -> None:
    corpus = Corpus((str(jsonl(tmp_path / "c.jsonl", some_texts(4, longest=9))),))
    request = Request(define={"start": "1", "end": "last"}, spans=("start", "end"))
    output = DatasetOutput(tables=("heads",), spans=("start", "end"))
    job = Job(request=request, output=output, shard_bytes=1_500, batch_tokens=128)
    run_folder(job, corpus, tmp_path / "whole", {}, loaded=tiny)
    stops = 0
    while one_window(job, corpus, tmp_path / "parts", tiny):
        stops += 1
    assert stops == len(list((tmp_path / "parts" / "spans").iterdir())) > 2
    whole, parts = (rows(tmp_path / name, "spans") for name in ("whole", "parts"))
    assert len(whole) == 4 * 16 * 4
    assert [{**row, "mass": None} for row in parts] == [{**row, "mass": None} for row in whole]
    assert [row["mass"] or 0 for row in parts] == pytest.approx([row["mass"] or 0 for row in whole], abs=1e-5)
