"""Files that anybody may have put into a folder: read within bounds, and never written through a link."""

import json
import os
import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from attnscope.corpus.folder import Journal, check_ours
from attnscope.errors import AttnscopeError, InputError, ModelError, UsageError
from attnscope.export.manifest import read_manifest
from attnscope.inputs.sound import extractor_of
from attnscope.model.checkpoint import read_json
from attnscope.model.loading import DEMO_FOLDER, load, load_tokenizer
from attnscope.model.options import LoadOptions
from attnscope.observe.atlas import atlas_of
from attnscope.studies.atlas import load_atlas
from attnscope.studies.comparison import check_folder
from attnscope.studies.study_folder import claim
from attnscope.utils import files as reading
from attnscope.utils.files import SMALL_BYTES, read_small
from attnscope.utils.isolation import within
from helpers.atlases import made_atlas
from helpers.command_line import SENTENCE, call
from helpers.sounds import saved_whisper

HANGS = 60  # seconds: nothing here takes one
READERS = {
    "manifest.json": lambda folder: read_manifest(folder / "manifest.json"),
    "run.json": check_ours,
    "journal.jsonl": Journal,
    "atlas.json": load_atlas,
    "compare.json": lambda folder: check_folder(folder, {}, False),
    "config.json": lambda folder: read_json(folder / "config.json"),
    "readings/scan.json": lambda folder: claim(folder, "readings", "scan", {}, False),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_in_a_folder_is_not_waited_for(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    with pytest.raises((AttnscopeError, OSError)) as error:
        within(HANGS, lambda: READERS[name](tmp_path))
    assert not isinstance(error.value, TimeoutError)


def test_a_feature_extractor_that_is_too_large_is_refused_before_transformers_reads_it(tmp_path: Path) -> None:
    loaded = load(LoadOptions(model=str(saved_whisper(tmp_path))))
    with (tmp_path / "preprocessor_config.json").open("r+b") as stream:
        stream.truncate(SMALL_BYTES + 1)
    with pytest.raises(ModelError, match="larger than 64 MiB"):
        extractor_of(loaded)


@pytest.mark.parametrize(
    "name", ["generation_config.json", "special_tokens_map.json", "chat_template.jinja", "tokenizer.json", "merges.txt"]
)
def test_a_document_that_is_too_large_is_refused_before_transformers_reads_it(tmp_path: Path, name: str) -> None:
    shutil.copytree(DEMO_FOLDER, tmp_path / "model")
    with (tmp_path / "model" / name).open("ab") as stream:
        stream.truncate(8 * 2**30)  # sparse: it takes no room
    bound = 64 if name.endswith("p.json") or name in ("generation_config.json", "chat_template.jinja") else 1024
    for read in (load, load_tokenizer):
        with pytest.raises(ModelError, match=f"{name} .* {bound} MiB"):
            read(LoadOptions(model=str(tmp_path / "model")))


@pytest.mark.parametrize("name", [name for name in READERS if name != "journal.jsonl"])
def test_a_file_that_is_too_large_is_refused_before_it_is_parsed(tmp_path: Path, name: str, monkeypatch) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as stream:
        stream.truncate(SMALL_BYTES + 1)

    def parsed(*arguments: object, **how: object) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr(json, "loads", parsed)
    with pytest.raises(AttnscopeError):
        READERS[name](tmp_path)


def test_what_is_read_is_a_regular_file_of_bounded_size(tmp_path: Path) -> None:
    path, link = tmp_path / "a.json", tmp_path / "link.json"
    path.write_bytes(b"12345")
    link.symlink_to(path)  # as in the cache of the Hub
    assert read_small(path, 5) == read_small(link, 5) == b"12345"
    with pytest.raises(OSError, match="larger than 0 MiB"):
        read_small(path, 4)
    for other, says in (("/dev/zero", "not a regular file"), (str(tmp_path), "Is a directory")):
        with pytest.raises(OSError, match=says):
            read_small(Path(other), 5)


def test_a_pipe_that_a_person_names_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writing = threading.Thread(target=pipe.write_bytes, args=(b"the bank",))
    writing.start()
    assert reading.read_text(None, str(pipe)) == "the bank"
    writing.join()


@pytest.mark.parametrize("flag", ["--file", "--ids"])
def test_a_text_without_an_end_is_refused(flag: str, tmp_path: Path) -> None:
    endless = tmp_path / "endless"
    with endless.open("wb") as stream:
        stream.truncate(reading.MOST_BYTES + 1)
    result = call("heads", "-q", flag, str(endless))
    assert (result.code, result.out) == (4, b"")
    assert "64 MiB" in result.err
    piped = call("heads", "-q", flag, "-", stdin=b" " * (reading.MOST_BYTES + 1))
    assert (piped.code, piped.out) == (4, b"")
    assert re.search("standard input .*64 MiB", piped.err)


def test_a_table_of_more_rows_than_any_atlas_has_is_not_read(tmp_path: Path) -> None:
    made_atlas(tmp_path, {(3, 0): ("induction",)}).save(tmp_path)
    assert load_atlas(tmp_path).named("induction") == {3: (0,)}
    row = pq.read_table(tmp_path / "atlas.parquet").slice(0, 1)
    pq.write_table(row.take(pa.array(np.zeros(600_000, int))), tmp_path / "atlas.parquet")
    with pytest.raises(InputError, match="no whole atlas"):
        load_atlas(tmp_path)


def long_texts(rows: int) -> pa.DictionaryArray:
    """A text of a mebibyte in each row: a file of some kilobytes."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array(["x" * 2**20]))


def beside_weights(folder: Path) -> SimpleNamespace:
    """A model whose folder has weights and an atlas of them."""
    (folder / "model.safetensors").write_bytes(b"weights")
    made_atlas(folder, {(3, 0): ("induction",)}).save(folder / "atlas")
    return SimpleNamespace(name="m", revision=None, source_folder=folder, base_folder=None)


def test_an_atlas_beside_a_model_may_take_no_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, path = beside_weights(tmp_path), tmp_path / "atlas" / "atlas.parquet"
    found = atlas_of(model)
    assert found is not None
    assert found.named("induction") == {3: (0,)}
    rows = 2**14
    table = pq.read_table(path).take(pa.array(np.arange(rows) % 24)).drop_columns(["probe", "against"])
    for name in ("probe", "against"):
        table = table.append_column(name, long_texts(rows))
    pq.write_table(table, path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 2**16
    assert atlas_of(model) is None
    assert "holds no whole atlas" in caplog.text


def test_an_atlas_of_other_weights_is_told_by_its_facts_before_its_table_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("the table was read")

    model = beside_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    monkeypatch.setattr("attnscope.observe.atlas.columns_of", read)
    assert atlas_of(model) is None
    assert "not made with these weights" in caplog.text


@pytest.mark.parametrize("roles", [[5], "sink", {"a": 1}, None, [["sink"]], ["a sink"], [""], ["\x1b[31msink"]])
def test_roles_that_are_no_names_are_damage(tmp_path: Path, roles: object) -> None:
    made_atlas(tmp_path, {}).save(tmp_path)
    path = tmp_path / "atlas.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"roles": {"L0H0": roles}}))
    with pytest.raises(InputError, match="no whole atlas"):
        atlas_of(None, tmp_path)  # type: ignore[arg-type]  # the model is asked for what fits, later


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus and its dataset `out`."""
    place = tmp_path_factory.mktemp("dataset")
    call(*corpus_run(place, place / "out")).ok()
    return place


def corpus_run(place: Path, out: Path) -> tuple[str, ...]:
    corpus = place / "corpus.txt"
    corpus.write_text("the river bank\n")
    return ("batch", str(corpus), "-q", "--out", str(out))


@pytest.mark.parametrize(
    "name", [".lock", "journal.jsonl", "failures.jsonl", ".partial", "heads", "texts", "figures", "relations"]
)
def test_a_dataset_is_not_written_through_a_link(dataset: Path, tmp_path: Path, name: str) -> None:
    out, other = shutil.copytree(dataset / "out", tmp_path / "out"), tmp_path / "other"
    arguments = corpus_run(dataset, out)
    other.mkdir()
    victims = [other / "part-000000000.parquet", other / "000007" / "a.png", other / "file"]
    victims[1].parent.mkdir()
    for victim in victims:
        victim.write_text("keep")
    place = out / name
    if place.is_dir():
        for path in place.iterdir():
            path.unlink()
        place.rmdir()
    place.unlink(missing_ok=True)
    place.symlink_to(other / "file" if "." in name[1:] or name == ".lock" else other)
    result = call(*arguments)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert f"/out/{name} is a link" in result.err
    assert [victim.read_text() for victim in victims] == ["keep"] * 3
    assert len(list(other.iterdir())) == 3


def test_sweeping_removes_nothing_behind_a_link(tmp_path: Path) -> None:
    """Also where a link comes after the folder was checked."""
    out, other = tmp_path / "out", tmp_path / "other"
    (out / "figures").mkdir(parents=True)
    (other / "000007").mkdir(parents=True)
    (other / "part-000000000.parquet").write_text("keep")
    for name in (".hidden", "heads", ".partial", "figures/7"):
        (out / name).symlink_to(other)
    Journal(out).sweep()
    assert sorted(path.name for path in other.iterdir()) == ["000007", "part-000000000.parquet"]
    assert not (out / "figures" / "7").is_symlink()


@pytest.mark.parametrize("name", ["journal.jsonl", "failures.jsonl"])
def test_a_journal_is_not_appended_to_through_a_link(tmp_path: Path, name: str) -> None:
    from attnscope.corpus.folder import Record

    journal, victim = Journal(tmp_path), tmp_path / "victim"
    victim.write_text("keep")
    (tmp_path / name).symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"):
        journal.append(Record(0, 1, 1, 1))
    assert victim.read_text() == "keep"


@pytest.mark.parametrize("name", ["layers", "heads"])
def test_a_run_draws_into_no_link(tmp_path: Path, name: str) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    out.mkdir()
    other.mkdir()
    (out / name).symlink_to(other)
    result = call("heads", "-q", "--text", SENTENCE, "--top", "1", "--out", str(out))
    assert (result.code, list(other.iterdir())) == (2, [])
    assert f"/out/{name} is a link" in result.err


def test_a_folder_that_is_itself_a_link_is_written(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    call(*corpus_run(tmp_path, tmp_path / "out")).ok()
    assert (tmp_path / "real" / "journal.jsonl").exists()


def test_a_study_keeps_nothing_behind_a_link(tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    out.mkdir()
    other.mkdir()
    (other / "a.npz").write_text("keep")
    (out / "readings").symlink_to(other)
    with pytest.raises(UsageError, match="is a link"):
        claim(out, "readings", "scan", {}, force=True)
    assert (other / "a.npz").exists()
