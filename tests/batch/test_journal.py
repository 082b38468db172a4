"""The journal: what is committed survives, what is torn is forgotten, what is damaged is said."""

import json
import shutil
import time
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import pytest

from attnscope.corpus.folder import Failure, Journal, Record, begun_sources, check_options, check_ours, written
from attnscope.errors import InputError, UsageError
from attnscope.utils.folders import append

RECORDS = [
    Record(0, 3, 3, 30, "aa", {"heads": 3}, {"heads/part-000000000.parquet": 7}),
    Record(3, 2, 1, 10, "bb", {"heads": 1}, {}, (Failure(4, "c.txt", 5, "c.txt:5", "empty"),)),
]


def journal_of(folder: Path) -> Journal:
    journal = Journal(folder)
    for record in RECORDS:
        journal.append(record)
    return journal


def test_what_was_appended_is_read_again(tmp_path: Path) -> None:
    journal_of(tmp_path)
    assert list(Journal(tmp_path).records.values()) == RECORDS


def test_a_line_cut_at_any_byte_is_forgotten_whole(tmp_path: Path) -> None:
    journal_of(tmp_path)
    path = tmp_path / "journal.jsonl"
    data = path.read_bytes()
    first = data.index(b"\n") + 1
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        assert list(Journal(tmp_path).records.values()) == RECORDS[: int(cut >= first)], cut
        assert path.read_bytes() == data[: first if cut >= first else 0]


def test_a_flipped_bit_in_the_middle_is_damage(tmp_path: Path) -> None:
    journal_of(tmp_path)
    path = tmp_path / "journal.jsonl"
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(InputError, match="is damaged in line 1"):
        Journal(tmp_path)


@pytest.mark.parametrize(
    "more",
    [
        replace(RECORDS[1], first=2),
        replace(RECORDS[1], first=0, items=4),
        replace(RECORDS[1], first=9, files=RECORDS[0].files),
    ],
    ids=["an item of two", "items of both", "a file of two"],
)
def test_shards_that_share_an_item_or_a_file_are_damage(tmp_path: Path, more: Record) -> None:
    journal = journal_of(tmp_path)
    append(journal.path, asdict(more))
    with pytest.raises(InputError, match="is in two shards"):
        Journal(tmp_path)
    with pytest.raises(InputError, match="is in two shards"):
        written(tmp_path)


def test_more_texts_than_items_are_none_of_a_journal(tmp_path: Path) -> None:
    journal = journal_of(tmp_path)
    append(journal.path, asdict(replace(RECORDS[0], first=9, texts=2**40)))
    assert written(tmp_path) == RECORDS


def test_failures_are_listed_in_the_order_of_the_items(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    late = replace(RECORDS[1], first=9, failures=(Failure(9, "c.txt", None, "x", "empty"),))
    for record in (late, RECORDS[1]):
        journal.append(record)
    journal.rewrite_failures()
    lines = (tmp_path / "failures.jsonl").read_text().splitlines()
    assert [json.loads(line)["item"] for line in lines] == [4, 9]
    assert json.loads(lines[0]) == {"item": 4, "file": "c.txt", "line": 5, "id": "c.txt:5", "reason": "empty"}


def test_sweeping_leaves_what_is_committed_and_what_is_not_ours(tmp_path: Path) -> None:
    journal = journal_of(tmp_path)
    (tmp_path / "heads").mkdir()
    for name in ("part-000000000.parquet", "part-000000003.parquet", "notes.txt", "part-one.parquet"):
        (tmp_path / "heads" / name).touch()
    (tmp_path / ".partial").mkdir()
    journal.sweep()
    left = {path.name for path in (tmp_path / "heads").iterdir()}
    assert left == {"part-000000000.parquet", "notes.txt", "part-one.parquet"}
    assert not (tmp_path / ".partial").exists()


def test_what_a_killed_process_was_writing_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    journal = journal_of(tmp_path)
    theirs = (".failures.jsonl.old", ".run.json.0123abcd0", "x.run.json.0123abcd", ".notes.0123abcd")
    for name in (".failures.jsonl.79eacebf", ".run.json.0123abcd", ".summary.parquet.0123abcd", *theirs):
        (tmp_path / name).touch()
    (tmp_path / ".failures.jsonl.0123abcd").mkdir()  # no file of ours
    journal.sweep()
    assert waits == []
    assert {path.name for path in tmp_path.iterdir()} >= {*theirs, ".failures.jsonl.0123abcd"}
    assert not list(tmp_path.glob(".failures.jsonl.79*")) + list(tmp_path.glob(".run.json.0123abcd"))
    assert not list(tmp_path.glob(".summary.*"))


def test_pictures_of_items_that_no_shard_holds_are_swept(tmp_path: Path) -> None:
    journal = journal_of(tmp_path)  # items 0 to 4
    for name in ("000000", "000004", "000005", "123456789", "notes"):
        (tmp_path / "figures" / name / "heads").mkdir(parents=True)
    journal.sweep()
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == ["000000", "000004", "notes"]


def test_a_folder_that_is_still_written_to_is_swept_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial, remove, begun = tmp_path / ".partial", shutil.rmtree, iter("abc")
    (partial / "0").mkdir(parents=True)

    def amid(folder: Path, ignore_errors: bool) -> None:
        remove(folder, ignore_errors)
        for shard in islice(begun, 1):  # by a process elsewhere, which has not ended yet
            (folder / shard).mkdir(parents=True)

    monkeypatch.setattr(shutil, "rmtree", amid)
    monkeypatch.setattr("attnscope.corpus.folder.PAUSE_SECONDS", 0)
    Journal(tmp_path).sweep()
    assert not partial.exists()
    assert next(begun, None) is None


def test_changed_options_are_named(tmp_path: Path) -> None:
    check_options(tmp_path, {"model": "a", "top-k": 5, "by": None}, {})
    check_options(tmp_path, {"model": "a", "top-k": 5, "by": None}, {})
    match = "started with other options: by was not given, now 'x'; model was 'a', now 'b'; top-k was 5, now 6;"
    with pytest.raises(UsageError, match=match):
        check_options(tmp_path, {"model": "b", "top-k": 6, "by": "x"}, {})


def test_the_same_sources_spelled_another_way_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    assert begun_sources(tmp_path / "out", ["c.jsonl"]) == ("c.jsonl",)  # a new folder
    check_options(tmp_path, {"sources": [str(tmp_path / "c.jsonl"), "-"]}, {})
    for again in ("c.jsonl", "link/./c.jsonl"):
        assert begun_sources(tmp_path, [again, "-"]) == (str(tmp_path / "c.jsonl"), "-")
    for other in (["d.jsonl", "-"], ["-", "c.jsonl"], ["c.jsonl"]):
        assert begun_sources(tmp_path, other) == tuple(other)


OPTIONS = {"model": "a", "top-k": 5}


def test_a_folder_says_the_version_of_its_layout(tmp_path: Path) -> None:
    check_options(tmp_path, OPTIONS, {"about": "x"})
    assert json.loads((tmp_path / "run.json").read_text()) == {"schema": 7, "options": OPTIONS, "about": "x"}


@pytest.mark.parametrize("schema", [1, 2, 3, 4, 5, 8])
def test_a_folder_of_another_version_is_refused_in_one_line(tmp_path: Path, schema: int) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"schema": schema, "options": OPTIONS}))
    for check in (check_ours, lambda folder: check_options(folder, OPTIONS, {})):
        with pytest.raises(
            UsageError, match=rf"has schema {schema}, expected 7; .* or name another .*with out"
        ) as refusal:
            check(tmp_path)
        assert "\n" not in str(refusal.value)


def test_a_folder_that_says_no_version_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"options": OPTIONS, "about": "x"}))
    with pytest.raises(UsageError, match=r"run\.json .* damaged"):
        check_ours(tmp_path)


@pytest.mark.parametrize("schema", ["2", None, True, 2.0])
def test_a_version_that_is_no_number_is_damage(tmp_path: Path, schema: object) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"schema": schema, "options": OPTIONS}))
    with pytest.raises(UsageError, match=r"run\.json .* damaged"):
        check_ours(tmp_path)
