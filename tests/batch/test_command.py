"""`attnscope batch` as a person types it: options with and without a value, YAML files, and everything mistyped."""

import gzip
import json
import os
import pickle
import pty
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from attnscope.cli import run
from attnscope.cli.app import app, make_command
from attnscope.cli.batch_options import BatchRun, with_value
from attnscope.cli.config import keys_of, read_config
from attnscope.cli.option_groups import parameters
from attnscope.corpus import run as on_ray
from attnscope.corpus.folder import ALL_TEXT, Record
from attnscope.corpus.pipeline import Run, Tally
from attnscope.corpus.run import Cluster
from attnscope.errors import UsageError
from attnscope.model.checkpoint import _samples, digest
from helpers.corpora import jsonl, rows, written
from helpers.forks import HANGS, Forked
from helpers.rows import json_lines


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, with a corpus of two texts."""
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "corpus.jsonl", ["the bank", "the river"])
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("c.jsonl --ray", "c.jsonl --ray="),
        ("--ray c.jsonl --out x", "--ray= c.jsonl --out x"),
        ("--ray --set num_actors=2 c.jsonl", "--ray= --set num_actors=2 c.jsonl"),
        ("--ray auto c.jsonl", "--ray=auto c.jsonl"),
        ("--ray local", "--ray=local"),
        ("--ray head:6379 c.jsonl", "--ray=head:6379 c.jsonl"),
        ("--ray 10.0.0.1:6379", "--ray=10.0.0.1:6379"),
        ("--ray [::1]:6379", "--ray=[::1]:6379"),
        ("--ray ray://head:10001 c.jsonl", "--ray=ray://head:10001 c.jsonl"),
        ("--ray=head:6379 c.jsonl", "--ray=head:6379 c.jsonl"),
        ("--ray --ray auto", "--ray= --ray=auto"),
        ("--ray -- --ray", "--ray= -- --ray"),
        ("--ray corpus:part", "--ray= corpus:part"),
        ("--ray autos", "--ray= autos"),
    ],
)
def test_an_address_follows_ray_or_the_next_argument_is_a_source(typed: str, read: str) -> None:
    assert list(with_value(typed.split())) == read.split()


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["corpus.jsonl", "--ray"], Cluster("", 1, 0)),
        (["--ray", "corpus.jsonl", "--set", "num_actors=3"], Cluster("", 3, 0)),
        (["--ray", "auto", "corpus.jsonl", "--set", "num_gpus_per_actor=0.5"], Cluster("auto", 1, 0.5)),
        (["corpus.jsonl", "--ray=head:6379"], Cluster("head:6379", 1, 0)),
        (["corpus.jsonl", "--config", "ray.yaml"], Cluster("", 2, 0)),
        (["corpus.jsonl", "--config", "ray.yaml", "--ray", "local"], Cluster("local", 2, 0)),
    ],
)
def test_ray_reaches_the_cluster_with_its_address(
    place: Path, monkeypatch: pytest.MonkeyPatch, typed: list[str], expected: Cluster
) -> None:
    (place / "ray.yaml").write_text("ray: true\nnum_actors: 2\n")
    asked: list[Any] = []

    def pretend(run: Run, cluster: Any) -> Tally:
        asked.append((cluster, run.corpus.sources))
        return Tally(stopped=True)

    monkeypatch.setattr(on_ray, "run_on_ray", pretend)
    run(["batch", *typed, "--out", "out", "-q"])
    assert asked == [(expected, ("corpus.jsonl",))]


def test_on_ray_a_signal_is_heard_before_the_first_record_is_committed() -> None:
    """`GracefulStop` lets a signal end the run at once until it is first asked."""
    told: list[str] = []
    journal = SimpleNamespace(records={}, append=lambda record: told.append("committed"))
    run = SimpleNamespace(journal=journal, note=lambda tally: None, stop=lambda: told.append("asked"))
    on_ray._commit([{"record": pickle.dumps(on_ray.Reply(Record(0, 1, 1, 5)))}], cast(Run, run), Tally())
    assert told == ["asked", "committed", "asked"]


def test_help_shows_that_the_address_may_be_left_out() -> None:
    assert "--ray [ADDRESS]" in CliRunner().invoke(app, ["batch", "--help", "all"]).stdout


def test_the_keys_of_a_batch_file_are_the_options_of_batch() -> None:
    options = {max(one.opts, key=len).lstrip("-").replace("-", "_") for one in make_command("batch").params}
    settings = {one.key for one in parameters(BatchRun).values() if one.is_setting}
    assert set(keys_of(BatchRun)) == (options | settings) - {"sources", "config", "set", "help"}


@pytest.mark.usefixtures("drawn_here")
@pytest.mark.e2e
def test_a_file_sets_the_options_of_batch_and_flags_win(place: Path, tiny_folder: Path) -> None:
    (place / "run.yaml").write_text(
        f"model: {tiny_folder}\ntables: relations\nformat: jsonl\nbatch_tokens: 64\nshard_size: 3\n"
        "figures: metrics\nimage: svg\nmatrices: true\ntop_k: 2\nquiet: true\n"
    )
    assert run(["batch", "corpus.jsonl", "--config", "run.yaml", "--out", "out", "--format", "csv"]) == 0
    assert sorted(one.name for one in (place / "out").iterdir() if one.is_dir()) == [
        *("figures", "relations", "texts", "weights")
    ]
    assert [one.name for one in (place / "out" / "relations").iterdir()] == ["part-000000000.csv"]
    assert [one.name for one in (place / "out" / "figures" / "000001").iterdir()] == ["metrics.svg"]
    held = json.loads((place / "out" / "run.json").read_text())["options"]
    assert (held["shard-size"], held["top-k"], held["matrices"]) == (3, "2", True)
    spelled = [
        "--model",
        str(tiny_folder),
        "--tables",
        "relations",
        "--format",
        "csv",
        "--set",
        "shard_size=3",
        "--matrices",
    ]
    spelled += ["--figures", "metrics", "--set", "image=svg", "--top-k", "2", "-q"]
    assert run(["batch", "corpus.jsonl", "--out", "out", *spelled]) == 0  # the same run, in flags


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("batch_token: 5", "unknown key 'batch_token'; did you mean 'batch_tokens'?"),
        ("shard-size: 5", "unknown key 'shard-size'; did you mean 'shard_size'?"),
        ("show: true", "unknown key 'show'"),
    ],
)
def test_what_a_batch_file_cannot_say(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UsageError) as refusal:
        read_config(tmp_path / "run.yaml", keys_of(BatchRun))
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("batch_tokens: 0", "batch_tokens: expected a whole number from 1 to 1,000,000,000, got '0'"),
        ("num_actors: true", "num_actors: expected a whole number from 1 to 10,000, got 'true'"),
        ("num_gpus_per_actor: -1", "num_gpus_per_actor: expected a number from 0 to 1,000, got '-1'"),
        ("num_gpus_per_actor: .nan", "num_gpus_per_actor: expected a number from 0"),
        ("num_gpus_per_actor: nan", "num_gpus_per_actor: expected a number from 0 to 1,000, got 'nan'"),
        ("format: arrow", "format: expected parquet, csv or jsonl, got 'arrow'"),
        ("matrices: softmax", "matrices: expected true or false, got 'softmax'"),
    ],
)
def test_a_value_of_a_batch_file_is_what_the_option_takes(
    place: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    (place / "run.yaml").write_text(text)
    assert run(["batch", "corpus.jsonl", "--config", "run.yaml", "--out", "out"]) == 2
    said = capsys.readouterr().err
    assert f"run.yaml: {says}" in said
    assert said.count("\n") == 1


WRONG = [
    ("nofile.jsonl --out o", 2, "there is no file nofile.jsonl; check the path"),
    ("empty --out o", 2, "empty holds no file that ends in .txt, .json, .jsonl, .csv, .tsv, .parquet; name another"),
    ("corpus.jsonl", 2, "expected one place to write to; give --out DIR"),
    ("corpus.jsonl --out afile", 2, "cannot write to afile: afile is no folder; name another folder"),
    ("corpus.jsonl --out other", 2, "other holds heads, which is not part of a dataset of attnscope batch; name a new"),
    (
        "corpus.jsonl --out another",
        2,
        "another/run.json is not written by attnscope batch, or is damaged; name another",
    ),
    ("corpus.jsonl --out o --set batch_tokens=0", 2, "--set batch_tokens: expected a whole number from 1"),
    (
        "corpus.jsonl --out o --ray --set num_actors=0",
        2,
        "--set num_actors: expected a whole number from 1",
    ),
    ("corpus.jsonl --out o --top-k 0", 2, "--top-k: expected a number from 1, or all"),
    ("corpus.jsonl --out o --tables head", 2, "--tables: expected some of heads, relations, got 'head'"),
    (
        "corpus.jsonl --out o --figures all",
        2,
        "--figures: expected some of overview, layers, heads, metrics, got 'all'",
    ),
    ("corpus.jsonl --out o --select 99", 2, "'99' names layer 99, but this model has layers 0 to 3"),
    ("corpus.jsonl --out o --config c.yaml", 2, "there is no file c.yaml; check the path of --config"),
    ("corpus.jsonl --out o --ray=here", 2, "--ray: expected auto, local, ray://HOST:PORT or HOST:PORT, got 'here'"),
    ("corpus.jsonl --to-stdout jsonl --ray", 2, "--to-stdout prints rows alone"),
    ("corpus.jsonl --out o --set spreadsheet=true", 2, "--spreadsheet is for csv alone; add --format csv"),
    ("corpus.odd --out o", 2, "corpus.odd: its suffix does not say what it is; name a file that ends in .txt"),
    ("corpus.jsonl --out o --model ./no", 3, "there is no folder ./no; check the path"),
    ("void.txt --out o", 4, "there is no text in void.txt; give a corpus"),
    ("void.txt --to-stdout jsonl", 4, "there is no text in void.txt; give a corpus"),
    ("void.txt --dry-run", 4, "there is no text in void.txt; give a corpus"),
    (
        "corpus.jsonl --out o -q --text-field body",
        1,
        "; all in o/failures.jsonl; --text-field NAME names that of the text",
    ),
    ("broken.txt.gz --out o -q", 1, "1 item failed, the first broken.txt.gz: the file can't be read: Not a gzipped"),
    ("cut.txt.gz --out o -q", 1, "the file can't be read: Compressed file ended before the end-of-stream"),
    ("corpus.jsonl --out o -q --text-field n", 1, "line 1: field 'n': expected text, got int; all in o/failures.jsonl"),
    (
        "corpus.jsonl --out o --set strict=true --set id_field=x",
        4,
        "no field 'x'; correct it, or leave --strict out",
    ),
]


@pytest.mark.parametrize(("typed", "code", "says"), WRONG, ids=[line for line, _, _ in WRONG])
def test_what_is_wrong_is_one_line_with_the_next_step_and_its_exit_code(
    place: Path, capfd: pytest.CaptureFixture[str], typed: str, code: int, says: str
) -> None:
    for name in ("empty", "other/heads", "another"):
        (place / name).mkdir(parents=True)
    for name in ("afile", "void.txt", "other/heads/part-000000000.parquet", "corpus.odd"):
        (place / name).touch()
    (place / "another" / "run.json").write_text("{}")
    (place / "broken.txt.gz").write_text("not gzip")
    (place / "cut.txt.gz").write_bytes(gzip.compress(b"one line\n")[:20])
    assert run(["batch", *typed.split()]) == code
    printed = capfd.readouterr()
    assert printed.out == ""
    assert says in printed.err
    assert len(printed.err.splitlines()) == 1
    assert (place / "other" / "heads" / "part-000000000.parquet").exists()  # not swept: it is not ours


def test_standard_input_that_is_a_terminal_is_not_waited_for(place: Path) -> None:
    leader, follower = pty.openpty()
    process = Forked(("batch", "-", "--out", "o"), stdin=follower, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    err = process.communicate(HANGS)[1].decode()
    os.close(leader)
    os.close(follower)
    assert (process.wait(), err.count("\n")) == (2, 1)
    assert "standard input is a terminal; pipe a corpus into it, or name a file" in err


def test_a_corpus_from_standard_input_has_the_rows_of_its_file(place: Path, tiny_folder: Path) -> None:
    arguments = ("--input-format", "jsonl", "--model", tiny_folder, "--tables", "heads", "-q", "--out")
    with open("corpus.jsonl", "rb") as corpus:
        assert Forked(("batch", "-", *arguments, "piped"), stdin=corpus.fileno()).wait(HANGS) == 0
    assert run(["batch", "corpus.jsonl", *map(str, arguments), "named"]) == 0
    assert rows(place / "piped", "heads") == rows(place / "named", "heads")
    assert {row["file"] for row in rows(place / "piped", "texts")} != {"corpus.jsonl"}


def test_zst_without_its_codec(place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    import pyarrow as pa

    class Poor(pa.Codec):  # a pyarrow that was built without zstd
        @staticmethod
        def is_available(name: str) -> bool:
            return False

    (place / "corpus.txt.zst").write_bytes(b"")
    monkeypatch.setattr(pa, "Codec", Poor)
    assert run(["batch", "corpus.txt.zst", "--out", "o"]) == 2
    assert "corpus.txt.zst: this pyarrow reads no zstd; pip install -U pyarrow" in capfd.readouterr().err


@pytest.mark.usefixtures("drawn_here")
@pytest.mark.parametrize(
    "flags",
    [
        ("--group", "words"),
        ("--group", "sentences", "--by", "kv", "--select", "1.0,last"),
        ("--min-weight", "0.2", "--top-k", "all"),
        ("--truncate", "left", "--by", "kv"),
        pytest.param(("--truncate", "left", "--figures", "overview,metrics", "--by", "kv"), marks=pytest.mark.e2e),
    ],
    ids=" ".join,
)
def test_the_options_of_one_text_together(place: Path, tiny_folder: Path, flags: tuple[str, ...]) -> None:
    assert run(["batch", "corpus.jsonl", "--model", str(tiny_folder), "--out", "out", "-q", *flags]) == 0
    found = rows(place / "out", "relations")
    assert {row["item"] for row in found} == {0, 1}
    assert all(row["weight"] >= (0.2 if "--min-weight" in flags else 0) for row in found)
    assert all((row["head"] is None) == ("--by" in flags) for row in found)


def test_chat_records(place: Path) -> None:
    turns = [{"role": "user", "content": "the bank"}]
    lines = [{"messages": turns}, {"messages": "the bank"}, {"messages": [{"role": "user"}]}, {"text": "a river"}]
    written(place / "chat.jsonl", lines)
    assert run(["batch", "chat.jsonl", "--chat", "--out", "out", "-q"]) == 1
    found = rows(place / "out", "texts")
    assert [row["line"] for row in found] == [1, 2, 4]
    assert found[0]["sha256"] == found[1]["sha256"]
    [failed] = json_lines((place / "out" / "failures.jsonl").read_bytes())
    assert failed["line"] == 3
    assert "content" in failed["reason"]


def test_a_finished_folder_says_what_is_there_already(
    place: Path, tiny_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["batch", "corpus.jsonl", "--model", str(tiny_folder), "--out", "out", "--tables", "heads"]
    said = []
    for code in (0, 0, 1):
        assert run(command) == code
        said.append(capfd.readouterr().err.splitlines()[0])
        if len(said) == 2:
            (place / "corpus.jsonl").open("a").write('{"no": 1}\n{"text": "a boat"}\n')
    assert said[0].startswith("2 texts, ")
    assert said[0].endswith(" measured in out")
    assert said[1] == "all 2 are there already in out"
    assert said[2].endswith(" measured in out; 2 texts were there already")


def test_a_folder_of_a_version_that_is_not_resumed_is_refused(
    place: Path, tiny_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["batch", "corpus.jsonl", "--model", str(tiny_folder), "--out", "out", "--tables", "heads", "-q"]
    assert run(command) == 0
    said = json.loads((place / "out" / "run.json").read_text())
    (place / "out" / "run.json").write_text(json.dumps(said | {"schema": ALL_TEXT - 1}))
    assert run(command) == 2
    assert f"has schema {ALL_TEXT - 1}, expected {said['schema']}; resume it with" in capfd.readouterr().err


@pytest.mark.parametrize("changed", ["weights", "config", pytest.param("tokenizer", marks=pytest.mark.e2e)])
def test_a_checkpoint_that_changed_under_its_name_is_refused(
    place: Path, tiny_folder: Path, capfd: pytest.CaptureFixture[str], changed: str
) -> None:
    model = place / "model"
    shutil.copytree(tiny_folder, model)
    arguments = ["batch", "corpus.jsonl", "--model", str(model), "--out", "out", "-q"]
    assert run(arguments) == 0
    shutil.copytree(model, place / "moved")  # the same files, made later: the same checkpoint
    shutil.rmtree(model)
    (place / "moved").rename(model)
    assert run(arguments) == 0
    if changed == "weights":  # one more step of training: the same names, shapes and sizes
        data = bytearray((model / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (model / "model.safetensors").write_bytes(bytes(data))
    else:
        name = {"tokenizer": "tokenizer.json", "config": "config.json"}[changed]
        (model / name).write_text((model / name).read_text() + "\n")
    assert run(arguments) == 2
    said = capfd.readouterr().err
    assert f"out was started with other options: model was '{model} (files " in said
    assert said.count("was '") == said.count("\n") == 1


def test_a_corpus_by_another_path_resumes_with_the_names_that_it_began_with(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = str(place / "corpus.jsonl")
    assert run(["batch", whole, "--out", "out", "-q"]) == 0
    kept = (place / "out" / "journal.jsonl").read_bytes()
    assert run(["batch", "corpus.jsonl", "--out", "out", "-q"]) == 0
    assert (place / "out" / "journal.jsonl").read_bytes() == kept
    assert run(["batch", "corpus.jsonl", "--out", "out", "-q", "--query", "last"]) == 2
    assert "out was started with other options: query was not given, now 'last';" in capfd.readouterr().err


def test_more_training_shows_in_the_digest_of_a_large_file_that_is_not_read_whole(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "model.safetensors"
    weights = {f"layer.{n}": torch.randn(256, 1024) for n in range(12)}
    save_file(weights, path)
    before = digest(tmp_path)
    assert digest(tmp_path) == before
    assert sum(map(len, _samples(path))) < path.stat().st_size / 8
    save_file(weights | {"layer.7": weights["layer.7"] * 1.001}, path)  # as merging an adapter does
    assert digest(tmp_path) != before
