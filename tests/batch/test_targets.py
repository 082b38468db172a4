"""A corpus through an encoder-decoder: as `heads` has it for each text and target, in all three stacks."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, WhisperConfig, WhisperForConditionalGeneration

import attnscope
from attnscope.corpus.folder import Job
from attnscope.corpus.item_requests import batches
from attnscope.corpus.worker import Worker
from attnscope.errors import ModelError
from attnscope.model.selection import CROSS, DECODER, ENCODER
from helpers.command_line import call
from helpers.corpora import batch, differs, rows, written
from helpers.folders import with_tokenizer
from helpers.rows import json_lines
from helpers.stack_families import own, tiny

RECORDS = [
    {"id": "a", "text": "the bank by the river", "said": "the bank was on the river"},
    {"id": "b", "text": "a river bank", "said": "the bank"},
    {"id": "c", "text": "the old bank", "said": "bank"},
    {"id": "d", "text": "the new bank", "said": "river"},
    {"id": "e", "text": "the new bank"},
    {"id": "f", "text": "the new bank", "said": 7},
    {"id": "g", "text": "the new bank", "said": " "},
]
FAILURES = {
    "e": "no field 'said'; there are none",
    "f": "field 'said': expected text, got int",
    "g": "the target is empty",
}
START = {"t5": 0, "bart": 2}
KINDS = (ENCODER, DECODER, CROSS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    place, end = tmp_path_factory.mktemp("models"), {"forced_eos_token_id": None}
    made = {name: tiny(name, vocab_size=2000, decoder_start_token_id=start, **end) for name, start in START.items()}
    return {name: str(with_tokenizer(model, place / name)) for name, model in made.items()}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(written(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", RECORDS))


@pytest.fixture(scope="module")
def given(models: dict[str, str], corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of the corpus with its targets, and a summary."""
    out = tmp_path_factory.mktemp("given") / "out"
    assert batch(corpus, models["t5"], out, "--target-field", "said", "--summary").code == 1
    return out


def alone(command: str, model: str, record: dict[str, Any], *flags: str) -> list[dict[str, Any]]:
    return call(command, "-m", model, "-t", record["text"], "-q", "--format", "jsonl", *flags).ok().records


def in_order(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(found, key=lambda row: (KINDS.index(row["stack"]), row["layer"], row["head"], row.get("query", 0)))


def check_alike(found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> None:
    """expected: of a text alone; its column type is of layers without attention, which have no rows in a dataset."""
    assert len(found) == len(expected) > 0
    for row, one in zip(in_order(found), in_order(expected), strict=True):
        for name, value in one.items() - {("type", None)}:
            assert row[name] == (pytest.approx(value, abs=1e-5) if isinstance(value, float) else value), name


def test_every_text_has_the_rows_that_it_has_alone(models: dict[str, str], given: Path) -> None:
    heads, relations = (rows(given, table) for table in ("heads", "relations"))
    for record in RECORDS:
        mine, related = ([row for row in table if row["id"] == record["id"]] for table in (heads, relations))
        if record["id"] in FAILURES:
            assert mine == related == []
            continue
        target = ("--target", record["said"])
        check_alike(mine, alone("heads", models["t5"], record, *target))
        if record["id"] == "a":
            check_alike(related, alone("relations", models["t5"], record, *target))
    failures = json_lines((given / "failures.jsonl").read_bytes())
    assert {one["id"]: one["reason"] for one in failures} == FAILURES


def test_ranges_are_of_the_text_and_not_of_the_target(models: dict[str, str], tmp_path: Path) -> None:
    record = {"text": "the new bank", "said": "river", "of": [[8, 12]]}
    flags = ("--target-field", "said", "--tables", "heads", "--key-field")
    keys = {}
    for name, of in (("ranges", [8, 12]), ("words", "bank")):
        corpus = written(tmp_path / f"{name}.jsonl", [{**record, "of": of}])
        batch(corpus, models["t5"], tmp_path / name, *flags, "of").ok()
        [row] = rows(tmp_path / name, "texts")
        masses = [one["mass"] or 0 for one in rows(tmp_path / name, "heads")]
        keys[name] = (json.loads(row["key"]), masses)
    assert keys["ranges"][0] == keys["words"][0]
    assert keys["ranges"][0]["decoder"] is None
    assert keys["ranges"][1] == pytest.approx(keys["words"][1])


def test_the_relations_are_the_models_own_weights(models: dict[str, str], corpus: str, tmp_path: Path) -> None:
    """A second spelling: the model loaded by transformers, read by its own attentions; the first stands in no batch."""
    batch(corpus, models["bart"], tmp_path / "out", "--target-field", "said", "--top-k", "all", "--select", "cross,dec")
    model = AutoModelForSeq2SeqLM.from_pretrained(models["bart"], attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(models["bart"])
    found = rows(tmp_path / "out", "relations")
    assert {row["stack"] for row in found} == {CROSS, DECODER}
    for record in RECORDS[:3]:
        source, target = (tokenizer(record[name]).input_ids for name in ("text", "said"))
        ids = torch.tensor([[START["bart"], *target]])
        expected = own(model, torch.tensor([source]), decoder_input_ids=ids)
        mine = [row for row in found if row["id"] == record["id"]]
        assert sum(row["stack"] == CROSS for row in mine) == 16 * ids.shape[1] * len(source)
        for row in mine:
            weight = expected[row["stack"], row["layer"]][0, row["head"], row["query"], row["key"]]
            assert abs(row["weight"] - float(weight)) < 1e-5
            assert tokenizer.decode(ids[0][row["query"]]) == row["query_token"]
            assert (
                tokenizer.decode(ids[0][row["key"]] if row["stack"] == DECODER else source[row["key"]])
                == (row["key_token"])
            )


@pytest.mark.e2e
def test_a_target_that_no_record_gives_is_generated_as_heads_does_and_said_so(
    models: dict[str, str], tmp_path: Path
) -> None:
    out, corpus, model = tmp_path / "out", tmp_path / "corpus.txt", str(shutil.copytree(models["t5"], tmp_path / "t5"))
    own = Path(model, "generation_config.json")
    own.write_text(json.dumps(json.loads(own.read_text()) | {"max_time": 1e-9}))
    corpus.write_text("the new bank\na river\n")
    said = call("batch", str(corpus), "-m", model, "--out", str(out), "--tables", "heads").ok().err
    assert said.count("generation config") == said.count("max_time") == 1, "once of a corpus"
    assert json.loads((out / "run.json").read_text())["targets"] == {"generated": 2, "cut": 2}
    assert "2 of 2 generated targets cut at 64 tokens" in said
    done = call("heads", "-m", models["t5"], "-t", "a river", "--format", "jsonl")
    text = rows(out, "texts")[1]
    assert f"generated greedily: {text['target']} ({text['target_tokens'] - 1} tokens, the most" in done.err
    mine = [row for row in rows(out, "heads") if row["item"] == 1]
    check_alike(mine, done.records)


def test_a_run_that_was_cut_off_goes_on_and_has_the_rows_of_a_whole_one(
    models: dict[str, str], corpus: str, given: Path, tmp_path: Path
) -> None:
    shutil.copytree(given, tmp_path / "parts")
    flags = ("--target-field", "said", "--summary")
    journal = tmp_path / "parts" / "journal.jsonl"
    journal.write_text("")  # as if it had been killed before its first shard was whole
    batch(corpus, models["t5"], tmp_path / "parts", *flags)
    check_alike(rows(tmp_path / "parts", "heads"), rows(given, "heads"))
    assert json.loads((tmp_path / "parts" / "run.json").read_text())["targets"] == {"given": 4}
    changed = batch(corpus, models["t5"], tmp_path / "parts")
    assert changed.code == 2
    assert differs("target-field", "said", None) in changed.err


@pytest.mark.parametrize("format", ["csv", *(pytest.param(one, marks=pytest.mark.e2e) for one in ("parquet", "jsonl"))])
def test_the_summary_has_a_mean_per_stack(format: str, models: dict[str, str], corpus: str, tmp_path: Path) -> None:
    flags = ("--target-field", "said", "--tables", "heads", "--summary", "--format", format)
    assert batch(corpus, models["t5"], tmp_path / "out", *flags).code == 1
    read = {"parquet": pd.read_parquet, "csv": pd.read_csv, "jsonl": lambda path: pd.read_json(path, lines=True)}
    summary = read[format](tmp_path / "out" / f"summary.{format}")
    heads = pd.concat(read[format](path) for path in sorted((tmp_path / "out" / "heads").iterdir()))
    which = ["stack", "layer", "head"]
    for metric in ("entropy", "sink", "self"):
        expected = heads.astype({"stack": str}).groupby(which)[metric].mean()
        found = summary[summary.metric == metric].astype({"stack": str}).set_index(which)["mean"]
        assert sorted(found.index) == sorted(expected.index)
        for place in expected.index:
            assert found[place] == pytest.approx(expected[place], abs=1e-5, nan_ok=True)
    assert summary[(summary.metric == "self") & (summary.stack == CROSS)]["mean"].isna().all()


@pytest.mark.usefixtures("drawn_here")
@pytest.mark.parametrize(
    ("figures", "name"), [("heads", "heads/L00H00"), pytest.param("overview", "overview", marks=pytest.mark.e2e)]
)
def test_pictures_lie_in_a_folder_per_stack(models: dict[str, str], tmp_path: Path, figures: str, name: str) -> None:
    one = tmp_path / "one.jsonl"
    one.write_text(json.dumps(RECORDS[0]))
    flags = (
        "--target-field",
        "said",
        "--figures",
        figures,
        "--tables",
        "heads",
        "--select",
        "enc.0.0,dec.0.0,cross.0.0",
    )
    batch(str(one), models["t5"], tmp_path / "out", *flags).ok()
    drawn = {path.relative_to(tmp_path / "out").as_posix() for path in tmp_path.rglob("*.png")}
    assert drawn == {f"figures/000000/{kind}/{name}.png" for kind in KINDS}


def test_tokens_and_spans_are_of_each_stacks_texts(models: dict[str, str], corpus: str, tmp_path: Path) -> None:
    spans = ("--spans", "where=river", "--spans", "what=bank")
    flags = ("--target-field", "said", "--tables", "heads", "--query", "river", "--key", "bank", *spans, "--summary")
    assert batch(corpus, models["t5"], tmp_path / "out", *flags).code == 1
    heads, found = (rows(tmp_path / "out", table) for table in ("heads", "spans"))
    given = ("--target", RECORDS[0]["said"], "--query", "river", "--key", "bank")
    expected = alone("heads", models["t5"], RECORDS[0], *given)
    check_alike([row for row in heads if row["id"] == "a"], expected)
    pairs = [row for row in found if row["id"] == "a" and (row["query_span"], row["key_span"]) == ("where", "what")]
    for pair, one in zip(in_order(pairs), in_order(expected), strict=True):
        assert pair["mass"] == (None if one["mass"] is None else pytest.approx(one["mass"], abs=1e-5))
    texts = {row["id"]: row for row in rows(tmp_path / "out", "texts")}
    assert json.loads(texts["b"]["query"]) == {ENCODER: "2", DECODER: None, CROSS: None}  # "the bank" has no river
    assert json.loads(texts["b"]["positions"])[DECODER] == {"where": None, "what": "2"}
    unasked = [row for row in heads if row["id"] == "b" and row["stack"] != ENCODER]
    assert all(row["entropy"] is None and row["top_key_token"] is None for row in unasked)


def test_to_stdout_gives_the_target(models: dict[str, str], corpus: str) -> None:
    flags = ("--target-field", "said", "--to-stdout", "jsonl", "--tables", "heads", "-q")
    done = call("batch", corpus, "-m", models["bart"], *flags)
    found = done.records
    assert [one["target"] for one in found] == [f"<unk><s>{one['said']}" for one in RECORDS[:4]]
    assert {row["stack"] for row in found[0]["heads"]} == set(KINDS)


def test_a_field_of_targets_is_refused_where_nothing_reads_them(tmp_path: Path, corpus: str) -> None:
    done = batch(corpus, "demo", tmp_path / "out", "--target-field", "said")
    assert done.code == 2
    assert "leave out --target-field" in done.err


def test_texts_of_a_batch_are_alike() -> None:
    pairs = [(5, 3), (4, 5), (5, 3), (5, 2), (4, 5)]
    found = batches([max(pair) for pair in pairs], 100, pairs)
    assert sorted(map(sorted, found)) == [[0, 2], [1, 4], [3]]


def test_a_model_of_sound_is_given_no_corpus_of_texts() -> None:
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = WhisperConfig(**sizes, **heads, vocab_size=2000, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    loaded = attnscope.wrap(WhisperForConditionalGeneration(config).eval(), attnscope.load("demo").tokenizer)
    with pytest.raises(ModelError, match="reads sound, and this corpus has texts"):
        Worker(Job(), loaded)
