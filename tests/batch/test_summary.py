"""The corpus's own table: the means of the rows that were written, however they were written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from attnscope.corpus import tables as summary
from attnscope.corpus.folder import DatasetOutput, Job
from attnscope.corpus.records import Corpus
from attnscope.corpus.run import run_folder
from attnscope.corpus.tables import SCHEMAS, write_summary
from attnscope.errors import InputError, UsageError
from attnscope.metrics.metrics import METRICS
from attnscope.model.loaded import LoadedModel
from attnscope.observe.request import Request
from attnscope.studies.intervals import SHARE
from attnscope.studies.statistics import means
from attnscope.utils.folders import locked
from helpers.command_line import Result, call
from helpers.corpora import jsonl, some_texts

TEXTS = 40
WHO = ["layer", "kv_head", "head"]


def output(format: str = "parquet") -> DatasetOutput:
    return DatasetOutput(("heads",), format, chosen=("key",), spans=("place", "end"))


def dataset(folder: Path, tiny: LoadedModel, format: str = "parquet", shard_bytes: int = 50_000) -> Path:
    corpus = jsonl(folder.with_suffix(".jsonl"), [*some_texts(TEXTS), "", "the end"])
    request = Request(key="last", define={"place": "bank", "end": "last"}, spans=("place", "end"))
    job = Job(request=request, output=output(format), shard_bytes=shard_bytes)
    run_folder(job, Corpus((str(corpus),)), folder, {}, loaded=tiny)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny: LoadedModel) -> Path:
    folder = dataset(tmp_path_factory.mktemp("summary") / "parts", tiny)
    assert len(list((folder / "heads").iterdir())) > 2
    return folder


@pytest.fixture(scope="module")
def summed(made: Path) -> Path:
    """The summary of it."""
    return write_summary(made, output())


def expected(rows: pd.DataFrame, metric: str, by: list[str]) -> pd.DataFrame:
    grouped = rows.groupby(by, sort=False)[metric]  # in the order of the rows
    return pd.DataFrame({"mean": grouped.mean(), "texts": grouped.count()}).reset_index()


def test_it_has_the_mean_of_every_number_of_heads_and_spans(made: Path, summed: Path) -> None:
    path = summed
    assert path == made / "summary.parquet"
    assert pq.read_schema(path).metadata[b"attnscope.schema"] == b"summary/2"
    table = pq.read_table(path)
    assert table.column_names == SCHEMAS["summary"].names
    found, heads, spans = table.to_pandas(), pd.read_parquet(made / "heads"), pd.read_parquet(made / "spans")
    of_heads = found[found["query_span"].isna()]
    assert list(of_heads["metric"].unique()) == [*METRICS, "mass"]
    for metric in (*METRICS, "mass"):
        one, wanted = of_heads[of_heads["metric"] == metric], expected(heads, metric, WHO)
        assert one[WHO].to_numpy().tolist() == wanted[WHO].to_numpy().tolist()
        assert one["texts"].tolist() == wanted["texts"].tolist()
        np.testing.assert_allclose(one["mean"], wanted["mean"], atol=1e-6)
    counted = of_heads.groupby("metric")["texts"].max()
    assert counted["entropy"] == TEXTS + 1
    assert 0 < counted["induction"] < TEXTS  # null in a text without repetition, which does not count then
    of_spans, by = found[found["query_span"].notna()], [*WHO, "query_span", "key_span"]
    for name, wanted in (("mean", expected(spans, "mass", by)), ("uniform", expected(spans, "uniform", by))):
        np.testing.assert_allclose(of_spans[name], wanted["mean"], atol=1e-6)
        assert of_spans["texts"].tolist() == wanted["texts"].tolist()
    assert of_spans["texts"].min() < 32 < of_spans["texts"].max()  # few texts end in a bank, which then sees the end
    assert of_heads[of_heads["metric"] != "mass"]["uniform"].isna().all()


def test_its_intervals_are_of_texts_and_none_stands_under_32(made: Path, summed: Path) -> None:
    found = pq.read_table(summed).to_pandas()
    heads = pd.read_parquet(made / "heads")
    for metric in ("sink", "duplicate_token"):
        values = heads.pivot(index="item", columns=WHO, values=metric).to_numpy()
        by_hand = means(values, within=SHARE)
        one = found[(found["metric"] == metric) & found["query_span"].isna()]
        np.testing.assert_allclose(one["low"], by_hand.low, atol=1e-6)
        np.testing.assert_allclose(one["high"], by_hand.high, atol=1e-6)
    few = found["texts"] < 32
    assert few.any()
    assert found[few]["low"].isna().all()
    assert found[~few]["low"].notna().all()
    assert (found[~few]["low"] <= found[~few]["mean"]).all()


@pytest.mark.parametrize("format", ["csv", pytest.param("jsonl", marks=pytest.mark.e2e)])
def test_every_format_gives_the_same(tmp_path: Path, tiny: LoadedModel, summed: Path, format: str) -> None:
    folder = dataset(tmp_path / "out", tiny, format, shard_bytes=2**20)
    path = write_summary(folder, output(format))
    found = pd.read_csv(path) if format == "csv" else pd.read_json(path, lines=True)
    wanted = pq.read_table(summed).to_pandas()
    assert list(found.columns) == list(wanted.columns)
    for name in wanted:
        if wanted[name].dtype.kind in "if":
            np.testing.assert_allclose(found[name].astype(float), wanted[name], atol=2e-5)
        else:
            assert found[name].fillna("").tolist() == wanted[name].fillna("").tolist()


def test_metric_by_metric_and_again_it_is_the_same_file(
    made: Path, summed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    first = summed.read_bytes()
    monkeypatch.setattr(summary, "HELD", 1)
    assert write_summary(made, output(), told.append).read_bytes() == first
    assert sum(told) == len(METRICS) + 2


def test_a_text_in_which_a_layer_is_not_heard_counts_for_the_others() -> None:
    parts = [(np.array([3, 7]), np.array([[1.0, 2.0]])), (np.array([7]), np.array([[4.0], [5.0]]))]
    found = summary._stacked(np.array([3, 7]), parts)
    assert found.tolist()[0] == [1, 2]
    assert np.isnan(found[1:, 0]).all()
    assert found[1:, 1].tolist() == [4, 5]


def test_a_folder_that_is_being_written_has_none_yet(made: Path) -> None:
    with locked(made), pytest.raises(UsageError, match="another run"):
        write_summary(made, output())


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:300])


def of_words(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.column_names.index("layer"), "layer", pa.array(["x"] * len(table))), path)


def beyond_any_model(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.column_names.index("layer"), "layer", pa.array([2**40] * len(table))), path)


def fewer(path: Path) -> None:
    pq.write_table(pq.read_table(path).slice(1), path)


@pytest.mark.parametrize("damage", [cut, of_words, beyond_any_model, fewer, Path.unlink])
def test_a_damaged_part_is_said_and_no_summary_is_written(
    made: Path, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "parts", ignore=shutil.ignore_patterns("summary*")))
    damage(min((folder / "spans").iterdir()))
    with pytest.raises(InputError, match="damaged, or of another kind; make the dataset again"):
        write_summary(folder, output())
    assert not (folder / "summary.parquet").exists()


def batch(corpus: Path, model: Path, *flags: str) -> Result:
    return call("batch", str(corpus), "--model", str(model), *flags)


def test_the_command_writes_it_at_the_end_and_of_a_folder_that_is_whole_already(
    tmp_path: Path, tiny_folder: Path
) -> None:
    corpus, out = jsonl(tmp_path / "c.jsonl", ["the bank", "the river"]), tmp_path / "out"
    flags = ("--out", str(out), "--tables", "heads", "--by", "kv", "--select", "1.*")
    batch(corpus, tiny_folder, *flags).ok()
    assert not (out / "summary.parquet").exists()
    done = batch(corpus, tiny_folder, *flags, "--summary").ok()
    assert f"means over the texts in {out}/summary.parquet" in done.err
    found: list[dict[str, Any]] = pq.read_table(out / "summary.parquet").to_pylist()
    assert [(row["layer"], row["head"], row["kv_head"]) for row in found[:2]] == [(1, None, 0), (1, None, 1)]
    assert len(found) == 2 * len(METRICS)
    assert {row["texts"] for row in found} <= {0, 2}
    assert json.loads((out / "run.json").read_text())["options"].get("summary") is None  # it changes no row


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tables", "relations", "--out", "out"), "--summary is of heads or spans, and neither is written"),
        (("--to-stdout", "jsonl"), "--summary is of a whole corpus, and --to-stdout prints text by text"),
    ],
)
def test_where_there_is_nothing_to_sum_up(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = batch(jsonl(tmp_path / "c.jsonl", ["the bank"]), tiny_folder, *flags, "--summary")
    assert (done.code, message in done.err) == (2, True), done.err
    assert not (tmp_path / "out").exists()
