"""Parts of studies that an earlier run left: taken where they are what is expected, else read anew."""

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attnscope.errors import UsageError
from attnscope.interventions.base import LOSS
from attnscope.interventions.spec import HeadSet
from attnscope.studies import atlas as scan_room
from attnscope.studies.ablation_search import pruned
from attnscope.studies.atlas import ScanStudy, plan, read_trial
from attnscope.studies.study_folder import Column, Parts, claim
from helpers.command_line import call

GOOD = {"loss": np.arange(6.0).reshape(2, 3), "word": np.array(["sink", "-"])}
EXPECTED = {"loss": Column((2, 3)), "word": Column((2,), "U")}


def saved(path: Path, **columns: object) -> bytes:
    np.savez_compressed(path, **columns)
    return path.read_bytes()


def header(path: Path, shape: tuple[int, ...]) -> bytes:
    """A part whose header promises another shape than its bytes hold."""
    whole = saved(path, **GOOD)
    import io
    import zipfile

    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, data.replace(b"(2, 3)", str(shape).encode()) if name == "loss.npy" else data)
    return made.getvalue()


DAMAGED = {
    "empty": lambda path: b"",
    "no archive": lambda path: b"{",
    "cut": lambda path: saved(path, **GOOD)[:-40],
    "a bit": lambda path: bytes(byte ^ (8 if at == 90 else 0) for at, byte in enumerate(saved(path, **GOOD))),
    "objects": lambda path: saved(path, loss=np.array([{}, 1], object), word=GOOD["word"]),
    "a scalar": lambda path: saved(path, **GOOD | {"loss": np.float64(1)}),
    "another shape": lambda path: saved(path, **GOOD | {"loss": np.zeros((3, 3))}),
    "whole numbers": lambda path: saved(path, **GOOD | {"loss": np.zeros((2, 3), int)}),
    "long words": lambda path: saved(path, **GOOD | {"word": np.array(["x" * 1000, ""])}),
    "a column less": lambda path: saved(path, loss=GOOD["loss"]),
    "a column more": lambda path: saved(path, **GOOD, more=np.zeros(1)),
    "a promise": lambda path: header(path, (10**9, 10**9)),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_part_is_read_anew_and_kept(tmp_path: Path, damage: str, caplog) -> None:
    path, skipped = tmp_path / "part.npz", []
    path.write_bytes(DAMAGED[damage](path))
    with caplog.at_level(logging.WARNING):
        found = Parts(tmp_path).kept("part", EXPECTED, lambda: GOOD, skipped=lambda: skipped.append(1))
    assert found is GOOD
    assert not skipped
    assert f"{path} is damaged and made again" in caplog.text

    def unread() -> dict[str, np.ndarray]:
        raise AssertionError("read again")

    again = Parts(tmp_path).kept("part", EXPECTED, unread, skipped=lambda: skipped.append(1))
    assert skipped == [1]
    assert {name: one.tolist() for name, one in again.items()} == {name: one.tolist() for name, one in GOOD.items()}


def test_a_part_of_another_study_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "part.npz"
    saved(path, **GOOD)
    assert Parts(tmp_path).kept("part", EXPECTED, lambda: GOOD, fits=lambda columns: columns["word"][0] == "-") is GOOD


def test_a_pipe_is_no_part(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "part.npz")
    assert Parts(tmp_path).kept("part", EXPECTED, lambda: GOOD) is GOOD


@pytest.mark.parametrize("content", ["{", "[]", "5", "null", "9" * 5000, "[" * 100_000, '"scan"'])
def test_a_claim_that_is_damaged_is_one_line_and_force_writes_over_it(tmp_path: Path, content: str) -> None:
    readings = tmp_path / "readings"
    readings.mkdir()
    (readings / "scan.json").write_text(content)
    (readings / "old.npz").write_bytes(b"")
    with pytest.raises(UsageError, match=r"scan.json is damaged; name another folder, or write over it with force"):
        claim(tmp_path, "readings", "scan", {"seed": 0}, force=False)
    claim(tmp_path, "readings", "scan", {"seed": 0}, force=True)
    assert json.loads((readings / "scan.json").read_text()) == {"seed": 0}
    assert not (readings / "old.npz").exists()


def test_a_scan_reads_damaged_readings_anew(demo, tmp_path: Path, monkeypatch) -> None:
    planned = plan(demo, sequences=2)
    planned = replace(planned, trials=[one for one in planned.trials if one.name == "offsets"])
    found, path = ScanStudy(demo, planned).run(tmp_path), tmp_path / "readings" / "offsets.npz"
    whole, trials = path.read_bytes(), []

    def watched(loaded, trial, *how):
        trials.append(trial.name)
        return read_trial(loaded, trial, *how)

    monkeypatch.setattr(scan_room, "read_trial", watched)
    with np.load(path) as columns:
        others = {name: columns[name] for name in columns.files} | {"heads": np.zeros((24, 2), int)}
    for damage in (whole[:100], saved(tmp_path / "other.npz", **others)):
        path.write_bytes(damage)
        assert ScanStudy(demo, planned).run(tmp_path).table().equals(found.table())
        assert path.read_bytes() == whole
    assert trials == ["offsets", "offsets"]


def test_a_step_that_takes_no_head_of_the_pruning_is_taken_anew(tmp_path: Path) -> None:
    class Passes:
        """Whose loss grows with the head's number."""

        def measured(self, sets: list[HeadSet]) -> np.ndarray:
            return np.array([[0.0, *(sum(head for _, head in one.heads) for one in sets)]])

        measure = LOSS

        class task:  # noqa: N801
            tokens = 1

        class loaded:  # noqa: N801
            class geometry:  # noqa: N801
                layers = ()

    heads = [(0, 0), (0, 1)]
    first = list(pruned(Passes(), heads, Parts(tmp_path)))  # type: ignore[arg-type]
    saved(tmp_path / "step-00001.npz", layer=np.array(9), head=np.array(9), value=np.array(0.0))
    assert list(pruned(Passes(), heads, Parts(tmp_path))) == first  # type: ignore[arg-type]
    assert [(one.layer, one.head) for one in first] == heads


@pytest.mark.parametrize("command", ["scan", "ablate"])
def test_a_damaged_folder_is_said_by_the_command(tmp_path: Path, command: str) -> None:
    folder, name = ("readings", "scan") if command == "scan" else ("ablation", "ablation")
    (tmp_path / folder).mkdir()
    (tmp_path / folder / f"{name}.json").write_text("{")
    more = ["--select", "L3H0"] if command == "ablate" else []
    result = call(command, "demo", "-q", "--sequences", "2", "--out", str(tmp_path), *more)
    assert (result.code, result.out) == (2, b"")
    assert re.search(rf"{name}\.json is damaged.*--force", result.err)


@pytest.mark.parametrize("line", [("scan",), ("ablate", "--select", "L3H0"), ("ablate", "--select", "3", "--prune")])
def test_the_cost_of_a_million_sequences_is_that_of_few_times_as_many(
    line: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnscope.studies.atlas.scan_seconds", lambda *given: 1e-3)  # which would read a batch

    def numbers(sequences: int) -> list[str]:
        result = call(line[0], "demo", *line[1:], "-q", "--dry-run", "--sequences", str(sequences)).ok()
        return result.out.decode().split()

    few, many = numbers(64), numbers(64 * 10**4)
    at = next(place for place, word in enumerate(few) if word == "tokens") - 1
    assert few[: at - 1] == [word.replace("640000", "64") for word in many[: at - 1]]
    if line[0] == "ablate":
        assert int(many[at]) == 10**4 * int(few[at])
    else:  # of retrieval there are fewer the longer they are, down to a single one
        assert int(many[at]) >= 10**4 * int(few[at])


def test_a_draft_costs_what_its_trial_takes(demo) -> None:
    for sequences in (1, 2, 7):
        planned = plan(demo, sequences=sequences)
        assert planned.takes == {one.name: one.tokens for one in planned.trials}
        assert plan(demo, sequences=sequences, drawn=1).takes == planned.takes


def test_sequences_without_room_are_refused_before_they_are_drawn(demo, monkeypatch) -> None:
    monkeypatch.setattr("attnscope.utils.memory.free_memory", lambda device: 2**30)
    result = call("scan", "demo", "-q", "--sequences", "1000000")
    assert (result.code, result.out) == (5, b"")
    assert "ask for fewer with --sequences 64" in result.err
