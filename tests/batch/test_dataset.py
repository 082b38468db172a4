"""What is written: the rows of the single-text commands, in input order, readable by everyone."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from typer.testing import CliRunner

from attnscope.cli import run
from attnscope.cli.app import app
from attnscope.corpus.dataset import CorpusHeads
from attnscope.corpus.folder import PARTIAL, DatasetOutput, Job
from attnscope.corpus.items import Item
from attnscope.corpus.records import Corpus
from attnscope.corpus.rows import Measured, ShardWriter, arrow_tables, pieces
from attnscope.corpus.run import run_folder
from attnscope.corpus.tables import SCHEMA_VERSIONS, SCHEMAS, schema_of
from attnscope.corpus.worker import Worker
from attnscope.inputs.prompt import from_text
from attnscope.model.loading import load
from attnscope.model.options import LoadOptions
from attnscope.model.selection import STACKS
from attnscope.observe.collect import observe
from attnscope.observe.request import Request
from attnscope.utils.tables import FORMATS, as_text, escape_formulas, json_rows
from helpers.command_line import call
from helpers.corpora import batch, differs, jsonl, rows, some_texts, written
from helpers.folders import saved
from helpers.pictures import without_command
from helpers.rows import csv_rows, json_lines


def written_by_batch(tmp_path: Path, model: Path, texts: list[str], *flags: str) -> Path:
    """A dataset of these texts; its corpus lies beside it."""
    batch(jsonl(tmp_path / "out.jsonl", texts), model, tmp_path / "out", *flags).ok()
    return tmp_path / "out"


def single(command: str, model: Path, text: str, *flags: str) -> list[dict[str, Any]]:
    """The rows that `heads` or `relations` prints."""
    return call(command, "--model", str(model), "-t", text, "-q", "--format", "jsonl", *flags).ok().records


def without_item(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in ("item", "id")} for row in found]


def in_float32(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with numbers of the columns' precision: in JSON they are spelled with its digits."""
    return [{key: np.float32(value) if type(value) is float else value for key, value in row.items()} for row in found]


FLAGS = [
    ("--select", "1.*", "--top-k", "2"),
    ("--by", "kv", "--min-weight", "0.1", "--top-k", "all"),
    *(pytest.param(one, marks=pytest.mark.e2e) for one in ((), ("--by", "kv"))),
]


@pytest.mark.parametrize("flags", FLAGS)
def test_one_text_through_the_single_commands_or_batch_gives_identical_rows(
    tmp_path: Path, tiny_folder: Path, flags: tuple[str, ...]
) -> None:
    text = some_texts(1, seed=4, longest=40)[0]
    out = written_by_batch(tmp_path, tiny_folder, [text], *flags)
    relations = without_item(rows(out, "relations"))
    expected = single("relations", tiny_folder, text, *flags)
    assert [{**row, "weight": None} for row in relations] == [{**row, "weight": None} for row in expected]
    assert [np.float32(row["weight"]) for row in relations] == [np.float32(row["weight"]) for row in expected]
    heads = without_item(rows(out, "heads"))
    ranked = single("heads", tiny_folder, text, *[flag for flag in flags if "min" not in flag and flag != "0.1"])
    order = sorted(ranked, key=lambda row: (row["layer"], row["kv_head"], row["head"] or 0))
    assert {row.pop("type") for row in order} == {None}  # a dataset has no rows of layers without attention
    assert in_float32(heads) == in_float32(order)


def test_groups_of_words_are_the_same_rows_too(tmp_path: Path, tiny_folder: Path) -> None:
    text = "The bank. The river said so, twice."
    out = written_by_batch(tmp_path, tiny_folder, [text], "--group", "words", "--tables", "relations")
    expected = single("relations", tiny_folder, text, "--group", "words")
    found = without_item(rows(out, "relations"))
    assert [row["query_token"] for row in found] == [row["query_token"] for row in expected]
    assert [np.float32(row["weight"]) for row in found] == [np.float32(row["weight"]) for row in expected]


def test_results_are_in_input_order_and_equal_one_by_one(tmp_path: Path, tiny_folder: Path, tiny: Any) -> None:
    texts = some_texts(7, seed=1, longest=30)
    out = written_by_batch(tmp_path, tiny_folder, texts, "--set", "batch_tokens=100")
    found = {name: rows(out, name) for name in ("texts", "heads", "relations")}
    assert [row["id"] for row in found["texts"]] == [f"t{i}" for i in range(7)]
    assert [json.loads(row["fields"]) for row in found["texts"]] == [{"n": i} for i in range(7)]
    for name in ("heads", "relations"):
        assert [row["item"] for row in found[name]] == sorted(row["item"] for row in found[name])
    compared = 0
    for number, text in enumerate(texts):
        prompt = from_text(tiny.tokenizer, text)
        [one] = observe(tiny, [prompt], Request(relations=True))
        heads = [row for row in found["heads"] if row["item"] == number]
        for row, head in zip(heads, one.heads, strict=True):
            ours = [np.nan if row[name] is None else row[name] for name in head.score]
            assert_close(
                torch.tensor(ours), torch.tensor(list(head.score.values())), atol=1e-5, rtol=1e-5, equal_nan=True
            )
        relations = [row for row in found["relations"] if row["item"] == number]
        weights = one.relations()["weight"].to_numpy()
        assert_close(torch.tensor([row["weight"] for row in relations]), torch.tensor(weights), atol=1e-5, rtol=0)
        compared += len(relations)
    assert compared == len(found["relations"]) > 1_000


def test_pandas_polars_and_duckdb_open_the_dataset_as_one(tmp_path: Path, tiny_folder: Path, tiny: Any) -> None:
    import duckdb

    corpus, out = jsonl(tmp_path / "c.jsonl", some_texts(4, seed=2, longest=20)), tmp_path / "out"
    job = Job(LoadOptions(model=str(tiny_folder), device="cpu"), shard_bytes=8_000)
    job = replace(job, output=replace(job.output, about={"model": str(tiny_folder)}))
    run_folder(job, Corpus((str(corpus),)), out, {}, loaded=tiny)
    parts = sorted((out / "relations").iterdir())
    assert len(parts) > 1
    expected = sum(pq.read_metadata(part).num_rows for part in parts)
    panda = pd.read_parquet(out / "relations")
    polar = pl.read_parquet(out / "relations" / "*.parquet")
    duck = duckdb.sql(f"select * from read_parquet('{out}/relations/*.parquet')")
    assert len(panda) == len(polar) == duck.count("*").fetchall()[0][0] == expected
    assert list(panda.columns) == polar.columns == duck.columns == schema_of("relations", DatasetOutput()).names
    duck_tokens = duckdb.sql(f"select query_token from read_parquet('{out}/relations/*.parquet')").fetchall()
    tokens = list(panda["query_token"])
    assert tokens == polar["query_token"].to_list() == [row[0] for row in duck_tokens]
    assert panda["item"].is_monotonic_increasing


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A dataset of texts that are hard to spell; its corpus lies beside it."""
    texts = [*some_texts(1, longest=12), 'a "b",\r\nc\td\n', "\u2028 x"]
    return written_by_batch(tmp_path_factory.mktemp("odd"), tiny_folder, texts)


def test_a_part_says_of_which_run_it_is_and_is_packed(odd: Path, tiny_folder: Path) -> None:
    [part] = (odd / "relations").iterdir()
    metadata = pq.read_schema(part).metadata
    assert metadata[b"attnscope.schema"] == b"relations/3"
    assert json.loads(metadata[b"attnscope.run"])["model"] == str(tiny_folder)
    group = pq.ParquetFile(part).metadata.row_group(0)
    columns = {column.path_in_schema: column for column in map(group.column, range(group.num_columns))}
    assert columns["query"].compression == columns["query_token"].compression == "ZSTD"
    assert columns["key"].compression == columns["weight"].compression == "UNCOMPRESSED"  # they hardly shrink
    assert "RLE_DICTIONARY" in columns["query_token"].encodings
    assert "DELTA_BINARY_PACKED" in columns["key"].encodings
    assert [name for name, column in columns.items() if column.is_stats_set] == ["item"]
    assert columns["item"].statistics.max == 2


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_csv_and_jsonl_hold_the_rows_of_parquet(tmp_path: Path, tiny_folder: Path, odd: Path, form: str) -> None:
    expected = rows(odd, "relations")
    batch(odd.with_name("out.jsonl"), tiny_folder, tmp_path / form, "--format", form).ok()
    [path] = (tmp_path / form / "relations").iterdir()
    found = {"csv": csv_rows, "jsonl": json_lines}[form](path.read_bytes())
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert np.float32(ours["weight"]) == np.float32(theirs["weight"])
        same = {name: str(value) for name, value in theirs.items() if name != "weight"}
        assert {name: str(value) for name, value in ours.items() if name != "weight"} == same
    read = pd.read_csv(path, keep_default_na=False) if form == "csv" else pl.read_ndjson(path)
    assert len(read) == len(expected)


def test_a_table_spelled_as_json_is_what_json_says() -> None:
    tokens = pa.array(['"', "\\", "\n", "😀", "\x00", None]).dictionary_encode()
    table = pa.table(
        {"token": tokens, "n": pa.array([1, None, 3, 4, 5, 6]), "x": [0.1, float("nan"), 1e-9, 2.0, -1.5, 3e9]}
    )
    found = [json.loads(line) for line in json_rows(table).to_pylist()]
    plainly = [{**row, "x": None if row["x"] != row["x"] else row["x"]} for row in table.to_pylist()]
    assert found == plainly


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "＝"])
def test_spreadsheet_cells_that_look_like_formulas_are_neutralised(start: str) -> None:
    cells = [f"{start}cmd|'/c calc'!A0", f" {start}1", "plain", None]
    table = pa.table({"token": pa.array(cells).dictionary_encode(), "text": cells, "n": [-1, 2, 3, 4]})
    found = as_text(escape_formulas(table)).to_pydict()
    assert found["token"] == found["text"] == [f"'{cells[0]}", f"'{cells[1]}", "plain", None]
    assert found["n"] == [-1, 2, 3, 4]
    assert as_text(table).to_pydict()["token"] == cells


def test_weights_are_the_lower_triangles(tmp_path: Path, tiny_folder: Path, tiny: Any) -> None:
    texts = some_texts(3, seed=3, longest=20)
    out = written_by_batch(tmp_path, tiny_folder, texts, "--matrices", "--select", "0.1,2.*", "--tables", "heads")
    index = json_lines((out / "weights" / "part-000000000.index.jsonl").read_bytes())
    stored = load_file(out / "weights" / "part-000000000.safetensors")
    assert [(row["item"], row["layer"]) for row in index] == [(item, layer) for item in range(3) for layer in (0, 2)]
    for row in index:
        [one] = observe(tiny, [from_text(tiny.tokenizer, texts[row["item"]])], Request(weights=True))
        packed = stored[row["tensor"]]
        assert packed.dtype == torch.float16
        for place, head in enumerate(row["heads"]):
            full, at = one.weights[row["layer"]][head], 0
            for query in range(row["tokens"]):
                for key in range(query + 1):
                    assert abs(float(packed[place, at]) - float(full[query, key])) < 1e-3
                    at += 1
            assert at == packed.shape[1]


def test_layers_without_a_softmax_have_triangles_with_their_signs(tmp_path: Path) -> None:
    """Of a layer with attention and Mamba-2 in parallel both, each under its own name."""
    folder, text = saved(tmp_path / "hybrid", "falcon_h1", vocab_size=2048), "the bank of the river"
    out = written_by_batch(tmp_path, folder, [text], "--matrices", "--select", "1.2,linear.1.2-3", "--tables", "heads")
    index = json_lines((out / "weights" / "part-000000000.index.jsonl").read_bytes())
    stored = load_file(out / "weights" / "part-000000000.safetensors")
    assert [(row["tensor"], row["stack"], row["layer"], row["heads"]) for row in index] == [
        ("0.1", "decoder", 1, [2]),
        ("0.linear.1", "linear", 1, [2, 3]),
    ]
    loaded = load(LoadOptions(model=str(folder), device="cpu"))
    [seen] = observe(loaded, [from_text(loaded.tokenizer, text)], Request(weights=True))
    for row, dtype in zip(index, (torch.float16, torch.float32), strict=True):
        packed, whole = stored[row["tensor"]], seen.of(row["stack"]).weights[1][row["heads"]]
        assert packed.dtype == dtype
        query, key = np.tril_indices(row["tokens"])
        assert_close(packed, whole[:, query, key].to(dtype))
    assert (stored["0.linear.1"] < 0).any()


@pytest.mark.usefixtures("drawn_here")
@pytest.mark.parametrize(
    ("figures", "names"),
    [
        ("heads", ["heads/L01H02.png"]),
        pytest.param("overview,heads", ["heads/L01H02.png", "overview.png"], marks=pytest.mark.e2e),
    ],
)
def test_figures_are_those_of_the_single_command_in_numbered_folders(
    tmp_path: Path, tiny_folder: Path, figures: str, names: list[str]
) -> None:
    text = "../../etc the bank"
    out = written_by_batch(tmp_path, tiny_folder, [text, "river"], "--figures", figures, "--select", "1.2")
    files = sorted(path.relative_to(out).as_posix() for path in (out / "figures").rglob("*.png"))
    assert files == [f"figures/{n:06d}/{name}" for n in range(2) for name in names]
    alone = tmp_path / "alone"
    drawn = ("--figures", figures, "--select", "1.2", "--out", str(alone))
    call("heads", "--model", str(tiny_folder), "-t", text, *drawn, "-q").ok()
    for name in names:
        drawn = (out / "figures" / "000000" / name).read_bytes()
        assert b"iTXtCommand\0" in drawn
        assert without_command((alone / name).read_bytes()) == without_command(drawn)


def test_ids_and_tokens_never_become_paths(tmp_path: Path, tiny_folder: Path) -> None:
    corpus = written(tmp_path / "c.jsonl", ({"id": bad, "text": bad} for bad in ("../x", "/etc/passwd", "a\x00b")))
    job = Job(LoadOptions(model=str(tiny_folder), device="cpu"))
    run_folder(job, Corpus((str(corpus),)), tmp_path / "out", {})
    names = {path.name for path in (tmp_path / "out").rglob("*")}
    assert names == {
        *("texts", "heads", "relations", "part-000000000.parquet"),
        *("journal.jsonl", "failures.jsonl", "run.json", ".lock"),
    }
    assert [row["id"] for row in rows(tmp_path / "out", "texts")] == ["../x", "/etc/passwd", "a\x00b"]


def test_jsonl_on_stdout_is_one_object_a_text(
    tmp_path: Path, tiny_folder: Path, tiny: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    corpus = jsonl(tmp_path / "c.jsonl", [*some_texts(2, longest=12), ""])
    assert run(["batch", str(corpus), "--model", str(tiny_folder), "--to-stdout", "jsonl", "-q"]) == 1
    printed = capfd.readouterr()
    assert printed.err.splitlines() == ["1 item failed", f"failed: {corpus}, line 3: empty"]
    found = json_lines(printed.out.encode())
    out = tmp_path / "out"
    run_folder(Job(), Corpus((str(corpus),)), out, {}, loaded=tiny)
    for table in ("heads", "relations"):
        printed_rows = in_float32([row for one in found for row in one[table]])
        assert printed_rows == in_float32(without_item(rows(out, table)))
    assert [one["fields"] for one in found] == [{"n": i} for i in range(2)]


def test_a_dry_run_says_what_it_would_do_and_does_nothing(tmp_path: Path, tiny_folder: Path) -> None:
    corpus = jsonl(tmp_path / "c.jsonl", [*some_texts(20), ""])
    arguments = ["batch", str(corpus), "--model", str(tiny_folder), "--out", str(tmp_path / "out"), "--dry-run"]
    done = CliRunner().invoke(app, arguments)
    said = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if "about" not in line)
    assert (said["items"], said["texts"], said["failed"], said["shards"]) == ("21", "20", "1", "1")
    assert not (tmp_path / "out").exists()


def test_changed_options_are_refused_by_the_command(
    tmp_path: Path, tiny_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = written_by_batch(tmp_path, tiny_folder, ["the bank"])
    arguments = ["batch", str(tmp_path / "out.jsonl"), "--model", str(tiny_folder), "--out", str(out), "--top-k", "3"]
    assert run(arguments) == 2
    assert differs("top-k", "5", "3") in capfd.readouterr().err


def test_an_empty_window_has_the_same_schema(tiny: Any) -> None:
    tables = arrow_tables(Measured(1, [], []), DatasetOutput())
    for name, table in tables.items():
        assert table.schema == schema_of(name, DatasetOutput())
        assert len(table) == 0
    assert set(FORMATS) >= {"csv", "jsonl", "parquet"}


def test_pieces_are_the_same_rows_in_the_same_order(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnscope.corpus.folder import Shard

    texts = ["the bank", "a", "the river bank is the bank", "one two three", "the"]
    worker = Worker(Job(), tiny)
    shard = Shard(tuple(Item(n, "f", n, str(n), text) for n, text in enumerate(texts)))
    [window] = worker.windows(shard)
    measured = worker.measure(window)
    assert measured is not None
    whole = arrow_tables(measured, DatasetOutput())
    assert len(list(pieces(measured))) == 1
    most = [one.most_relations for _, one in measured.seen]
    monkeypatch.setattr("attnscope.corpus.rows.ROWS_A_PIECE", most[0] + 1)
    parts = list(pieces(measured))
    assert 1 < len(parts) < len(texts)
    assert [item.number for part in parts for item, _ in part.seen] == list(range(len(texts)))
    for name, table in whole.items():
        rows = [row for part in parts for row in arrow_tables(part, DatasetOutput())[name].to_pylist()]
        assert rows == table.to_pylist()
    assert len(whole["relations"]) <= sum(most)

    # Relations alone are many enough to be written piece by piece.
    (tmp_path / PARTIAL).mkdir()
    writer = ShardWriter(tmp_path, shard, DatasetOutput())
    writer.add(measured)
    written = {name: writer.folder / name for name in writer.commit().rows}
    groups = {name: pq.ParquetFile(next(folder.iterdir())).num_row_groups for name, folder in written.items()}
    assert groups == {"texts": 1, "heads": 1, "relations": len(parts)}
    assert pq.read_table(written["relations"])["weight"].equals(whole["relations"]["weight"])


def test_a_worker_measures_what_it_tokenised(tiny: Any) -> None:
    from attnscope.corpus.folder import Shard

    shard = Shard((Item(5, "f", 1, "a", "the bank"), Item(6, "f", 2, "b", problem="empty")))
    worker = Worker(Job(), tiny)
    [window] = worker.windows(shard)
    measured = worker.measure(window)
    assert measured is not None
    assert [item.number for item, _ in measured.seen] == [5]
    assert [(one.item, one.reason) for one in measured.failures] == [(6, "empty")]


@pytest.mark.parametrize("table", list(SCHEMAS))
def test_every_column_is_in_the_documentation(table: str) -> None:
    documented = Path(__file__).parents[2] / "docs" / "schemas" / "columns.csv"
    with documented.open(encoding="utf-8", newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["schema"] == f"{table}/{SCHEMA_VERSIONS[table]}"]
    assert [row["column"] for row in rows] == SCHEMAS[table].names
    assert [row["type"] for row in rows] == [
        str(getattr(field.type, "value_type", field.type)) for field in SCHEMAS[table]
    ]
    assert all(row["meaning"] for row in rows)


@pytest.mark.parametrize(
    ("stacks", "plain"),
    [(["encoder"], "encoder"), (["encoder", "decoder", "cross"], "decoder"), (["decoder"], "decoder")],
)
def test_the_heads_without_another_name_are_the_decoder_s(stacks: list[str], plain: str) -> None:
    stack_N = np.array([STACKS.index(stack) for stack in stacks])
    zero_N = np.zeros_like(stack_N)
    assert CorpusHeads(zero_N, zero_N, zero_N, zero_N, stack_N, {}, {}).plain == plain
