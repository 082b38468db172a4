"""Answers, metrics of length and entries in `batch`: rows are those of one text alone, and a folder is held to them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import attnscope
from attnscope.corpus.folder import DatasetOutput, Job
from attnscope.corpus.item_requests import ask_for
from attnscope.corpus.items import Item
from attnscope.corpus.tables import schema_of
from attnscope.errors import InputError
from attnscope.metrics.metrics import LOOKBACKS
from attnscope.model.loaded import LoadedModel
from attnscope.model.selection import as_ranges
from attnscope.observe.observation import Observation
from attnscope.observe.request import CaptureSpec, Request, View
from helpers.command_line import call
from helpers.corpora import batch, differs, written
from helpers.folders import with_tokenizer
from helpers.stack_families import tiny as tiny_of

RECORDS = [
    {"id": "a", "text": "the bank is on", "answer": " the river bank", "passage": "bank"},
    {"id": "b", "text": "the financial bank is located on", "answer": " river", "passage": "financial"},
    {"id": "c", "text": "a quick fox said", "answer": " the bank is on the river", "passage": "fox"},
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return written(tmp_path / "c.jsonl", RECORDS)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A folder with the corpus and a dataset of it for which nothing was asked."""
    folder = tmp_path_factory.mktemp("plain")
    batch(written(folder / "c.jsonl", RECORDS), tiny_folder, folder / "out").ok()
    return folder


def table(out: Path, name: str) -> pd.DataFrame:
    return pd.read_parquet(out / name)


def alone(tiny: LoadedModel, record: dict[str, str], **asked: Any) -> Observation:
    request = Request(relations=True, **asked)
    return attnscope.capture(tiny, record["text"], answer=record["answer"], request=request)


def test_rows_of_an_answer_are_those_of_one_text(corpus: Path, tiny_folder: Path, tiny: LoadedModel) -> None:
    out = corpus.parent / "out"
    batch(corpus, tiny_folder, out, "--answer-field", "answer", "--query", "made", "--key-field", "passage").ok()
    heads, texts = table(out, "heads"), table(out, "texts")
    for number, record in enumerate(RECORDS):
        seen = alone(tiny, record, query="made", key=record["passage"])
        expected, found = seen.table().to_pandas(), heads[heads["item"] == number]
        for name in (*LOOKBACKS, "mass", "uniform", "entropy"):
            np.testing.assert_allclose(found[name], expected[name], atol=1e-5, err_msg=name)
        text = texts.iloc[number]
        assert (text["answer"], text["tokens"]) == (seen.prompt.answer, len(seen.prompt))
        assert text["query"] == as_ranges(range(seen.prompt.answer - 1, len(seen.prompt) - 1))
    assert heads[heads["item"] == 1]["lookback"].isna().all()  # of one token no row made another
    assert heads[heads["item"] == 2]["lookback"].notna().all()


def test_metrics_and_weights_are_those_of_one_text(corpus: Path, tiny_folder: Path, tiny: LoadedModel) -> None:
    out = corpus.parent / "out"
    flags = ("--metrics", "keys_95,entropy", "--weights", "value", "--answer-field", "answer")
    batch(corpus, tiny_folder, out, *flags).ok()
    seen = alone(tiny, RECORDS[0], view=View("value"), metrics=(*Request().metrics, "keys_95"))
    heads, relations = (table(out, name) for name in ("heads", "relations"))
    assert list(heads.columns[-4:]) == ["keys_95", *LOOKBACKS, "stack"]
    np.testing.assert_allclose(heads[heads["item"] == 0]["keys_95"], seen.table().to_pandas()["keys_95"], atol=1e-5)
    assert "weight" not in relations.columns
    found, expected = relations[relations["item"] == 0], seen.relations().to_pandas()
    np.testing.assert_allclose(found["norm"], expected["norm"], atol=1e-5)
    assert found["key"].tolist() == expected["key"].tolist()


def test_one_answer_follows_every_text(corpus: Path, tiny_folder: Path) -> None:
    done = call(
        *("batch", str(corpus), "--model", str(tiny_folder), "--to-stdout", "jsonl", "--tables", "heads"),
        *("--set", "answer= the bank", "-q"),
    )
    for record, found in zip(RECORDS, done.silent().records, strict=True):
        assert found["answer"] < found["tokens"]
        assert {"lookback", "focus"} <= set(found["heads"][0])
        assert found["id"] == record["id"]


def test_the_summary_and_the_ranked_heads_have_what_was_asked_for(corpus: Path, tiny_folder: Path) -> None:
    out = corpus.parent / "out"
    batch(corpus, tiny_folder, out, "--answer-field", "answer", "--metrics", "keys_95", "--summary").ok()
    expected = table(out, "heads").groupby(["layer", "head"])[["lookback", "keys_95"]].mean()
    found = pd.DataFrame(call("heads", str(out), "--sort", "lookback", "-q", "--format", "jsonl").silent().records)
    assert (np.diff(found["lookback"]) <= 0).all()
    for name in expected:
        np.testing.assert_allclose(
            found.set_index(["layer", "head"])[name],
            expected[name].reindex(found[["layer", "head"]].apply(tuple, axis=1)),
            atol=1e-5,
        )


@pytest.mark.parametrize(
    ("before", "now", "says"),
    [
        ((), ("--metrics", "keys_95"), differs("metrics", None, "keys_95")),
        ((), ("--weights", "value"), differs("weights", None, "value")),
        ((), ("--answer-field", "answer"), differs("answer-field", None, "answer")),
        (("--set", "answer= a"), ("--set", "answer= b"), differs("answer", " a", " b")),
        pytest.param(("--metrics", "keys_95"), (), differs("metrics", "keys_95", None), marks=pytest.mark.e2e),
    ],
)
def test_a_folder_is_held_to_them(
    plain: Path, tmp_path: Path, tiny_folder: Path, before: Any, now: Any, says: str
) -> None:
    corpus, out = plain / "c.jsonl", tmp_path / "out"
    if before:
        batch(corpus, tiny_folder, out, *before).ok()
    else:
        shutil.copytree(plain / "out", out)
    done = batch(corpus, tiny_folder, out, *now)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert says in done.err
    again = call("batch", str(corpus), "--model", str(tiny_folder), "--out", str(out), *before).ok()
    assert "all 3 " in again.err


def test_a_folder_of_before_these_options_is_resumed(plain: Path, tmp_path: Path, tiny_folder: Path) -> None:
    corpus, out = plain / "c.jsonl", Path(shutil.copytree(plain / "out", tmp_path / "out"))
    said = json.loads((out / "run.json").read_text())
    for name in ("metrics", "weights", "answer", "answer-field"):
        del said["options"][name]
    (out / "run.json").write_text(json.dumps(said))
    batch(corpus, tiny_folder, out, "--metrics", "entropy").ok()  # which is measured in any case


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--answer-field", "answer", "--set", "answer=x"), "each record gives its answer"),
        (
            ("--answer-field", "answer", "--max-tokens", "5"),
            "an answer needs the whole text, and the text would be cut",
        ),
        (("--set", "answer=x", "--truncate", "left"), "an answer needs the whole text"),
        (("--set", "answer= "), "the answer is empty"),
        (("--metrics", "lookback"), "--metrics lookback needs an answer; give it with --answer-field NAME"),
        (("--metrics", "mass"), "mass is measured where keys are named"),
        (("--weights", "scores", "--matrices"), "--matrices writes softmax weights alone; leave out --weights scores"),
        (("--weights", "value", "--group", "words"), "norms of several keys cannot be summed into one"),
    ],
)
def test_what_cannot_be_meant(corpus: Path, tiny_folder: Path, flags: tuple[str, ...], says: str) -> None:
    done = batch(corpus, tiny_folder, corpus.parent / "out", *flags)
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert says in done.err
    assert not (corpus.parent / "out").exists()


def test_a_record_without_an_answer_fails_alone(tmp_path: Path, tiny_folder: Path, tiny: LoadedModel) -> None:
    long = " the bank" * tiny.geometry.max_positions
    records = [RECORDS[0], {"text": "x"}, {"text": "a", "answer": ""}, {"text": "a", "answer": 3}]
    done = batch(
        written(tmp_path / "c.jsonl", [*records, {"text": "a", "answer": long}]),
        *(tiny_folder, tmp_path / "out", "--answer-field", "answer", "--query", "made"),
    )
    assert done.code == 1
    failed = [json.loads(line) for line in (tmp_path / "out" / "failures.jsonl").read_text().splitlines()]
    says = ("no field 'answer'", "the answer is empty", "expected text, got int", "text and answer have")
    assert [one["item"] for one in failed] == [1, 2, 3, 4]
    assert all(part in one["reason"] for part, one in zip(says, failed, strict=True))


def test_an_encoder_decoder_has_targets_and_no_answers(corpus: Path) -> None:
    folder = with_tokenizer(tiny_of("t5", vocab_size=2000, decoder_start_token_id=0), corpus.parent / "t5")
    done = batch(corpus, Path(folder), corpus.parent / "out", "--answer-field", "answer")
    assert done.code == 2
    assert (
        "only a causal model has an answer after its text; name the field of each target with --target-field"
        in done.err
    )


def test_an_ask_has_the_answer_of_its_record() -> None:
    item = Item(0, "c.jsonl", 1, "a", "the bank", {"said": " is old"})
    assert ask_for(Job(answer_field="said"), item) == CaptureSpec("the bank", Request(relations=True), answer=" is old")
    assert ask_for(Job(answer=" is"), item).answer == " is"
    with pytest.raises(InputError, match="the answer is empty"):
        ask_for(Job(answer="  "), item)


def test_what_is_written_follows_from_what_is_asked() -> None:
    job = Job(request=Request(view=View("scores"), metrics=(*Request().metrics, "keys_95")), answer=" x")
    assert (job.output.answers, job.output.metrics) == (True, ("keys_95", *LOOKBACKS))
    assert schema_of("relations", job.output).names[-2:] == ["score", "stack"]
    assert schema_of("texts", job.output).names[-1] == "answer"
    assert Job().output == DatasetOutput()
