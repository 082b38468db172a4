"""`attnscope heads DATASET`: means over texts against pandas on the same rows, depth drawn, and what is refused."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from attnscope.cli.dataset import dataset_sheet, open_ends
from attnscope.corpus.dataset import read_dataset
from attnscope.corpus.folder import Journal, Record
from attnscope.corpus.tables import write_summary
from attnscope.errors import InputError, UsageError
from attnscope.metrics.metrics import METRICS
from attnscope.model import loading
from attnscope.studies.intervals import SHARE
from attnscope.studies.statistics import means
from helpers.command_line import HANGS, call, on_terminal
from helpers.corpora import batch, jsonl, some_texts

TEXTS, HEADS = 40, 16
WHO = ["layer", "head"]


BY_HEADS = ("--tables", "heads")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """Datasets of the same texts, one with queries and keys, one of spans, one of means over kv heads."""
    place = tmp_path_factory.mktemp("read")
    corpus = jsonl(place / "corpus.jsonl", [*some_texts(TEXTS), ""])
    batch(corpus, tiny_folder, place / "asked", *BY_HEADS, "--query", "last", "--key", "first", "--set", "shard_size=1")
    batch(
        corpus, tiny_folder, place / "spans", *BY_HEADS, "--spans", "end=last", "--spans", "start=first", "--by", "kv"
    )
    few = jsonl(place / "few.jsonl", ["the bank", "the river"])
    batch(few, tiny_folder, place / "few", *BY_HEADS, "--format", "csv")
    return place


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(loading, "load", refuse)


def ranked(folder: Path, *flags: str) -> pd.DataFrame:
    rows = call("heads", str(folder), "-q", "--format", "jsonl", *flags).silent().records
    return pd.DataFrame(rows)


def written(folder: Path) -> pd.DataFrame:
    return pd.read_parquet(folder / "heads")


def test_heads_have_the_means_of_the_rows_that_were_written(place: Path) -> None:
    found, rows = ranked(place / "asked").set_index(WHO), written(place / "asked").groupby(WHO)
    for name in (*METRICS, "mass", "uniform"):
        expected = rows[name].mean().reindex(found.index)
        np.testing.assert_allclose(found[name].astype(float), expected, atol=1e-5, err_msg=name)
    for name in ("focus", "mass"):
        assert found[f"{name}_texts"].tolist() == rows[name].count().reindex(found.index).tolist()
        values = written(place / "asked").pivot(index="item", columns=WHO, values=name)
        by_hand = means(values.to_numpy(), within=SHARE)
        for end in ("low", "high"):
            expected = pd.Series(getattr(by_hand, end), values.columns).reindex(found.index)
            np.testing.assert_allclose(found[f"{name}_{end}"], expected, atol=1e-5)


def test_they_are_ranked_by_mass_above_uniform_or_by_what_was_named(place: Path) -> None:
    found = ranked(place / "asked")
    assert (np.diff(found["mass"] - found["uniform"]) <= 0).all()
    entropy = ranked(place / "few", "--sort", "-entropy")["entropy"]
    assert (np.diff(entropy) >= 0).all()
    assert not (np.diff(found["entropy"]) >= 0).all()
    assert ranked(place / "few", "--sort", "layer")["layer"].is_monotonic_increasing
    assert ranked(place / "few", "--set", "ascending=true", "--sort", "sink")["sink"].is_monotonic_increasing


def test_select_takes_some_heads_and_top_the_first_of_them(place: Path) -> None:
    found = ranked(place / "few", "--select", "1.0,L0H1")
    assert sorted(map(tuple, found[WHO].to_numpy().tolist())) == [(0, 1), (1, 0)]
    pd.testing.assert_frame_equal(ranked(place / "few", "--select", "1.0,L0H1", "--top", "1"), found[:1])
    done = call("heads", str(place / "asked"), "--select", "7")
    assert (done.code, "names layer 7" in done.err, done.err.count("\n")) == (2, True, 1)


def test_a_summary_that_was_written_is_what_is_printed(place: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(place / "asked", tmp_path / "asked"))
    before = ranked(folder)
    path = write_summary(folder, read_dataset(folder).output)
    pd.testing.assert_frame_equal(ranked(folder), before)
    table = pq.read_table(path)
    doubled = pa.array([2 * one for one in table["mean"].to_pylist()], pa.float32())
    pq.write_table(table.set_column(table.column_names.index("mean"), "mean", doubled), path)
    found = ranked(folder).set_index(WHO)["focus"]
    np.testing.assert_allclose(found, 2 * before.set_index(WHO)["focus"].reindex(found.index))


def test_a_summary_of_fewer_texts_does_not_outlive_them(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    (tmp_path / "summary.parquet").touch()
    journal.append(Record(0, 1, 1, 5))
    assert not (tmp_path / "summary.parquet").exists()


def test_of_spans_two_are_named(place: Path) -> None:
    rows = pd.read_parquet(place / "spans" / "spans")
    pair = rows[(rows["query_span"] == "end") & (rows["key_span"] == "start")]
    found = ranked(place / "spans", "--query", "end", "--key", "start").set_index(["layer", "kv_head"])
    assert found["head"].isna().all()
    expected = pair.groupby(["layer", "kv_head"])["mass"].mean().reindex(found.index)
    np.testing.assert_allclose(found["mass"], expected, atol=1e-5)
    assert "focus" not in found.columns
    assert "focus" in ranked(place / "spans").columns


@pytest.mark.parametrize("columns", [80, 200])
def test_the_table_says_what_it_is_of(place: Path, columns: int) -> None:
    done = call("heads", str(place / "asked"), "--top", "3", columns=columns).ok()
    lines = done.lines
    heading = next(line for line in lines if "head" in line)
    assert all(part in heading for part in ("mass ▾", "95 % interval", "uniform", "texts", "focus"))
    assert len([line for line in lines if "L" in line and "H" in line and "[" in line]) == 3
    assert f"{place / 'asked'}  " in done.err
    assert f"{TEXTS} texts, 1 failed" in done.err
    assert f"3 of {HEADS} rows" in done.err
    assert "queries last, keys first" in done.err
    said = " ".join(done.err.split())
    assert all(f"{word}: " in said for word in ("focus", "prev", "mass", "uniform"))
    assert all(len(line) <= columns for line in lines)


def test_few_texts_have_no_interval_and_it_says_so(place: Path) -> None:
    done = call("heads", str(place / "few"), columns=120).ok()
    assert "no intervals: they need 32 texts, this dataset has 2" in done.err
    assert "[" not in done.out.decode().split("texts", 1)[1].split("\n", 1)[1]


def test_a_line_counts_intervals_with_an_open_end(place: Path) -> None:
    found, every = read_dataset(place / "asked").heads(), np.arange(HEADS)
    score = found.scores["sink"]
    assert score.low is not None
    assert score.high is not None
    assert open_ends(found, every, "sink") == []
    opened = np.where(every < 2, np.nan, score.high), np.where(every == 1, np.nan, score.low)
    with_two = replace(found, scores={**found.scores, "sink": replace(score, high=opened[0], low=opened[1])})
    [line] = open_ends(with_two, every, "sink")
    assert line.startswith(f"2 of {HEADS} intervals have an open end (-): too few texts")
    sheet = dataset_sheet(with_two, every, "sink", width=200)
    [interval] = [column for column in sheet.columns if column.title == "95 % interval"]
    assert [interval.cell(row) for row in sheet.rows[:2]] == [f"[{score.low[0]:.2f}, -]", "-"]


def test_every_format_of_a_dataset_and_of_the_table_reads_the_same(place: Path) -> None:
    rows = call("heads", str(place / "few"), "-q").silent().rows
    assert len(rows) == HEADS
    parquet = pq.read_table(
        pa.BufferReader(call("heads", str(place / "few"), "-q", "--format", "parquet").silent().out)
    )
    assert parquet.column_names == list(rows[0])
    assert [str(one) for one in parquet["layer"].to_pylist()] == [row["layer"] for row in rows]


def test_no_torch_is_imported(place: Path) -> None:
    script = (
        "import sys, attnscope.cli as cli; cli.run(sys.argv[1:]); "
        "print(*sorted({'torch', 'transformers', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
    )
    command = [sys.executable, "-c", script, "heads", str(place / "asked"), "-q"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, check=True)
    assert done.stderr.split() == []
    assert done.stdout.count("\n") == 1 + HEADS


def test_a_run_that_is_still_writing_is_read_as_far_as_it_has_come(place: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(place / "asked", tmp_path / "asked"))
    journal = folder / "journal.jsonl"
    content = journal.read_bytes() + b"0123456789abcdef {half a li"
    journal.write_bytes(content)
    assert len(ranked(folder)) == HEADS
    assert journal.read_bytes() == content  # of the writer alone to cut


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("asked", "--model", "demo"), 2, "asked is a finished dataset: --model does not apply to it"),
        (("asked", "--show"), 2, "asked is a finished dataset: --show does not apply to it"),
        (("asked", "--sort", "top_key_mass"), 2, "this dataset did not measure top_key_mass"),
        (("few", "--sort", "mass"), 2, "this dataset did not measure mass; it has"),
        (("asked", "--query", "last", "--key", "first"), 2, "has no spans, and those are what a query and a key name"),
        (
            ("spans", "--query", "end"),
            2,
            "--query and --key name two spans of a dataset, and one of them was given; give both",
        ),
        (("spans", "--query", "end", "--key", "middle"), 2, "has these spans: end, start; name two of them"),
        (("asked", "--figures", "depth"), 2, "--figures are files; name a folder with --out DIR"),
        (("asked", "--figures", "overview", "--out", "x"), 2, "--figures: expected depth of a dataset, got 'overview'"),
        ((".",), 2, "without manifest.json: .; name the folder of a run, or of a dataset of attnscope batch, or"),
    ],
)
def test_what_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int, says: str
) -> None:
    monkeypatch.chdir(place)
    done = call("heads", *arguments)
    assert (done.code, done.out, done.err.count("\n")) == (code, b"", 1), done.err
    assert says in done.err
    assert not (place / "x").exists()


def other_rows(folder: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    path = next((folder / "heads").iterdir())
    pq.write_table(change(pq.read_table(path)), path)


def replaced(name: str, values: Callable[[int], pa.Array]) -> Callable[[Path], None]:
    def change(table: pa.Table) -> pa.Table:
        return table.set_column(table.column_names.index(name), name, values(len(table)))

    return lambda folder: other_rows(folder, change)


def long_texts(count: int) -> pa.DictionaryArray:
    """A text of a mebibyte in each row: a file of some kilobytes."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array(["x" * 2**20]))


@pytest.mark.parametrize("name", ["asked", "few"])  # Parquet, and CSV
def test_a_dataset_of_the_version_before_is_ranked_the_same(tmp_path: Path, place: Path, name: str) -> None:
    folder = Path(shutil.copytree(place / name, tmp_path / name))
    said = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(said | {"schema": 5}))
    for path in (folder / "heads").iterdir():
        read, write = (pq.read_table, pq.write_table) if path.suffix == ".parquet" else (csv.read_csv, csv.write_csv)
        write(read(path).drop_columns(["text_role", "atlas_roles"]), path)
    pd.testing.assert_frame_equal(ranked(folder), ranked(place / name))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no options": lambda folder: (folder / "run.json").unlink(),
    "foreign options": lambda folder: (folder / "run.json").write_text('{"schema": 99}'),
    "an older folder": lambda folder: (folder / "run.json").write_text('{"schema": 4, "options": {}}'),
    "no journal": lambda folder: (folder / "journal.jsonl").unlink(),
    "a flipped journal": lambda folder: (folder / "journal.jsonl").write_bytes(
        (folder / "journal.jsonl").read_bytes().replace(b"items", b"itemz") + b"\n\n"
    ),
    "no rows": lambda folder: shutil.rmtree(folder / "heads"),
    "no table": lambda folder: next((folder / "heads").iterdir()).write_bytes(b"PAR1"),
    "other rows": lambda folder: other_rows(folder, lambda table: table.slice(1)),
    "no column": lambda folder: other_rows(folder, lambda table: table.drop_columns(["layer"])),
    "words": replaced("focus", lambda count: pa.array(["x"] * count)),
    "no such layer": replaced("layer", lambda count: pa.array([2**30] * count, pa.int32())),
    "no number": replaced("layer", lambda count: pa.array([float("nan")] * count)),
    "no heads in common": replaced("item", lambda count: pa.array((n // 4 for n in range(count)), pa.int64())),
    "one text alone": replaced("item", lambda count: pa.array([0] * count, pa.int64())),
    "no texts": replaced("item", lambda count: pa.nulls(count, pa.int64())),
    "one head alone": replaced("head", lambda count: pa.array([0] * count, pa.int32())),
    "a long stack": replaced(
        "stack",
        lambda count: pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array(["x" * 2**20])),
    ),
    "a format of no dataset": lambda folder: (folder / "journal.jsonl").write_bytes(
        (folder / "journal.jsonl").read_bytes().replace(b".parquet", b".arrow")
    ),
    "a summary of nothing": lambda folder: (folder / "summary.parquet").write_bytes(b"PAR1"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_dataset_is_one_line(place: Path, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(place / "asked", tmp_path / "asked"))
    DAMAGE[name](folder)
    done = call("heads", str(folder), "-q")
    assert done.err.count("\n") <= 1, done.err
    assert "internal error" not in done.err
    if name != "no heads in common":  # few enough to be held
        assert done.code in (2, 4), done.err


def test_rows_that_share_no_head_ask_for_no_memory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnscope.corpus.tables.HELD", 0)
    monkeypatch.setattr("attnscope.corpus.tables.MOST_SPARSE", 0.5)
    with pytest.raises(InputError, match="its texts do not have the same heads"):
        read_dataset(place / "asked").heads()


# The picture


def test_depth_is_drawn_of_a_dataset_and_again_from_heatmap(place: Path, tmp_path: Path) -> None:
    first = ("heads", str(place / "asked"), "--sort", "sink", "--metrics", "entropy", "--figures", "depth", "-q")
    call(*first, "--out", str(tmp_path / "a"), "--image", "svg").silent()
    content = (tmp_path / "a" / "depth.svg").read_text(encoding="utf-8")
    assert all(word in content for word in ("sink", "entropy", "95 % interval", f"{TEXTS} texts", "queries last"))
    again = ("draw", str(place / "asked"), "--sort", "sink", "--set", "metrics=entropy", "--image", "svg")
    done = call(*again, "--out", str(tmp_path / "b"), "-q").silent()
    assert done.out.decode() == f"{tmp_path / 'b' / 'depth.svg'}\n"
    assert (tmp_path / "b" / "depth.svg").is_file()
    plain = call("heads", str(place / "asked"), "--out", str(tmp_path / "c"), "--dpi", "20", "-q")
    assert (plain.code, plain.err) == (0, "")
    assert (tmp_path / "c" / "depth.png").is_file()  # all that there is to draw of a dataset


def test_the_intervals_are_of_the_means_of_each_text(place: Path) -> None:
    dataset = read_dataset(place / "asked")
    found = dataset.heads()
    [depths] = dataset.depths(found, np.arange(HEADS), ["sink"]).values()
    layers, low, high = depths[0].interval
    rows = written(place / "asked").groupby(["item", "layer"])["sink"].mean().unstack()
    by_hand = means(rows.to_numpy(), within=SHARE)
    assert layers.tolist() == rows.columns.tolist()
    np.testing.assert_allclose(low, by_hand.low, atol=1e-5)
    np.testing.assert_allclose(high, by_hand.high, atol=1e-5)
    with pytest.raises(UsageError, match="this dataset did not measure keys_95"):
        dataset.depths(found, np.arange(HEADS), ["keys_95"])


# What `batch` says at its end


def test_the_last_line_of_batch_names_the_next_command(tmp_path: Path, tiny_folder: Path) -> None:
    corpus = jsonl(tmp_path / "c.jsonl", ["the bank", "the river"])

    def last(out: Path, *flags: str) -> str:
        done = call("batch", str(corpus), "--model", str(tiny_folder), "--out", str(out), *flags).ok()
        return done.err.splitlines()[-1]

    out, spans = tmp_path / "a b", ("--spans", "a=first", "--spans", "b=last")
    assert last(out, "--tables", "heads") == f"heads ranked over these texts: attnscope heads '{out}'"
    assert last(tmp_path / "s", "--tables", "relations", *spans).endswith(f"{tmp_path / 's'} --query b --key a")
    assert "heads ranked" not in last(tmp_path / "r", "--tables", "relations")


def test_on_a_terminal_it_is_a_table(place: Path) -> None:
    code, sent = on_terminal(("heads", str(place / "asked"), "-q"), 100)
    assert (code, "mass ▾" in sent, sent.count("L0H0")) == (0, True, 1)


def test_the_example_of_the_document_says_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "asking.md").read_text(encoding="utf-8")
    [block] = re.findall(r"^```\n(attnscope batch .*?)```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "examples").symlink_to(Path(__file__).parents[2] / "examples")
    monkeypatch.chdir(tmp_path)
    asked = [line.split()[1:] for line in block.splitlines() if line.startswith("attnscope ")]
    shown = [line for line in block.splitlines() if not line.startswith("attnscope ")]
    found = [call(*words) for words in asked]
    assert len(found) == 2
    assert set(shown) <= {line for one in found for line in one.ok().err.splitlines()}
