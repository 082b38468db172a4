"""A scan or an ablation that is stopped: every batch of sequences that was finished is kept, and not run again."""

from __future__ import annotations

import hashlib
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest

from attnscope.interventions.passes import Passes
from attnscope.studies import atlas as findings
from attnscope.studies.ablation import AblationStudy, HeadSets, copy
from attnscope.studies.ablation_search import head_set
from attnscope.studies.atlas import ScanStudy, plan
from attnscope.studies.study_folder import Column, Parts
from attnscope.utils import signals
from helpers.command_line import call
from helpers.forks import HANGS, Forked

SETS = [head_set("induction", {3: (0, 1)}), head_set("one", {1: (4,)})]
Study = Callable[[Path], object]


def files_of(folder: Path) -> dict[str, str]:
    """The hash of every file, but of one that was being written when its process was killed."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


@pytest.fixture
def ablating(demo, monkeypatch) -> Study:
    """An ablation of two chunks of sets, in a pass for each of three sequences."""
    monkeypatch.setattr("attnscope.studies.ablation.PERIOD", 10)
    monkeypatch.setattr("attnscope.interventions.passes.CPU_TOKENS", 4 * 21)
    task, asked = copy(demo, sequences=3), HeadSets.of(SETS, demo.geometry, random=1)
    return lambda folder: AblationStudy(demo, task, asked).run(folder)


@pytest.fixture
def scanning(demo, monkeypatch) -> Study:
    """A scan of two trials, in batches of about four sequences."""
    monkeypatch.setattr(findings, "BATCH_TOKENS", 4 * 65)
    planned = plan(demo, sequences=6)
    few = [one for one in planned.trials if one.name in ("offsets", "sink")]
    return lambda folder: ScanStudy(demo, replace(planned, trials=few)).run(folder)


PASSES = {"ablating": (Passes, "run"), "scanning": (findings, "_read")}


class Stopping:
    """Stands for the pass: counts its calls, and is stopped in one of them by a signal."""

    def __init__(self, monkeypatch: Any, study: str, way: BaseException | None = None) -> None:
        where, name = PASSES[study]
        self.calls, self.at, real = 0, 0, getattr(where, name)

        def counted(*args: Any) -> Any:
            self.calls += 1
            if self.calls == self.at:
                raise way or signals.Stopped(signal.SIGINT)
            return real(*args)

        monkeypatch.setattr(where, name, counted)


@pytest.fixture
def study(request, monkeypatch) -> tuple[Study, Stopping]:
    return request.getfixturevalue(request.param), Stopping(monkeypatch, request.param)


@pytest.fixture
def unbroken(study, tmp_path) -> tuple[dict[str, str], int, int]:
    """The files of a study that nothing stops, its passes, and how many of them are of no batch."""
    run, passes = study
    run(tmp_path / "whole")
    whole, calls = files_of(tmp_path / "whole"), passes.calls
    run(tmp_path / "whole")
    beside, passes.calls = passes.calls - calls, 0  # passes of no batch: whether sets can share layers
    assert calls - beside > 2 * len([name for name in whole if name.endswith(".npz")])  # several batches behind a part
    return whole, calls, beside


def stop(study: tuple[Study, Stopping], folder: Path, unbroken: tuple[dict[str, str], int, int], number: int) -> int:
    """Stop it in the pass of this number; how many batches were finished, and are said to be kept."""
    (run, passes), (_, calls, beside) = study, unbroken
    passes.calls, passes.at = 0, number
    with pytest.raises(signals.Stopped) as stopped:
        run(folder)
    finished = max(0, number - 1 - beside)
    if finished:
        assert re.match(rf"{finished} of {calls - beside} .* {re.escape(str(folder))};", stopped.value.kept)
    else:
        assert stopped.value.kept == "the same command starts again"
    return finished


def check_resumed(study: tuple[Study, Stopping], folder: Path, unbroken: tuple[dict[str, str], int, int], number: int):
    """Stopped in the pass of this number, it ends as if it had not been."""
    (run, passes), (whole, calls, _) = study, unbroken
    finished = stop(study, folder, unbroken, number)
    passes.calls, passes.at = 0, 0
    run(folder)
    assert passes.calls == calls - finished
    assert files_of(folder) == whole


@pytest.mark.parametrize("study", ["ablating", "scanning"], indirect=True)
def test_a_study_that_was_stopped_ends_as_if_it_had_not_been(study, unbroken, tmp_path):
    """In the first pass, in the last, and half way."""
    _, calls, beside = unbroken
    assert stop(study, tmp_path / "1", unbroken, 1) == 0
    for number in ((calls + beside) // 2 + 1, calls):
        check_resumed(study, tmp_path / str(number), unbroken, number)


@pytest.mark.e2e
@pytest.mark.parametrize("study", ["ablating", "scanning"], indirect=True)
def test_wherever_it_is_stopped_it_ends_as_if_it_had_not_been(study, unbroken, tmp_path):
    for number in range(1, unbroken[1] + 1):
        check_resumed(study, tmp_path / str(number), unbroken, number)


def ablate(sequences: int, random: int) -> tuple[str, ...]:
    drawn = ("--random", str(random), "--sequences", str(sequences))
    return ("ablate", "demo", "--select", "3.0-1", *drawn, "-q", "--top", "99")


def scan(sequences: int) -> tuple[str, ...]:
    return ("scan", "demo", "--sequences", str(sequences), "-q", "--top", "99")


def check_said(err: str, folder: Path) -> int:
    """How many batches a command that was interrupted says that it keeps."""
    said = rf"attnscope: interrupted; (\d+) of \d+ .* {folder}; .*\n"
    return int(re.fullmatch(said, err)[1])


class Killed(BaseException):
    """Stands for a kill: nothing of ours answers it."""


@pytest.mark.usefixtures("short_scan")
@pytest.mark.parametrize(
    ("line", "study", "way"),
    [
        pytest.param(ablate(2, 1), "ablating", signals.Stopped(signal.SIGINT), marks=pytest.mark.e2e),
        (ablate(2, 1), "ablating", Killed()),
        (scan(2), "scanning", signals.Stopped(signal.SIGINT)),
    ],
    ids=["ablate-signal", "ablate-kill", "scan-signal"],
)
def test_a_command_resumes_behind_the_pass_that_broke_off(tmp_path, monkeypatch, line, study, way):
    """In this process, with short studies. An exception replaces the signal and the kill."""
    monkeypatch.setattr(findings, "BATCH_TOKENS", 65)
    monkeypatch.setattr("attnscope.studies.ablation.PERIOD", 10)
    monkeypatch.setattr("attnscope.interventions.passes.CPU_TOKENS", 3 * 21)  # two sets a pass
    monkeypatch.setattr("attnscope.api.ablate.save_ablation", lambda *given, **how: None)
    command, passes = (*line, "--out", str(tmp_path / "out")), Stopping(monkeypatch, study, way)
    whole = call(*line, "--out", str(tmp_path / "whole")).ok()
    calls, passes.calls, passes.at = passes.calls, 0, passes.calls // 2
    if isinstance(way, Killed):
        with pytest.raises(Killed):
            call(*command)
    else:
        stopped = call(*command)
        assert (stopped.code, stopped.out) == (130, b"")
        assert check_said(stopped.err, tmp_path / "out") > 0
    passes.calls, passes.at = 0, 0
    resumed = call(*command).ok()
    assert passes.calls < calls
    assert (resumed.out, files_of(tmp_path / "out")) == (whole.out, files_of(tmp_path / "whole"))


@pytest.mark.e2e
@pytest.mark.parametrize(("line", "readings"), [(ablate(8, 9), "ablation"), (scan(8), "readings")])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_command_that_was_stopped_resumes(tmp_path, line, readings, number):
    folder, seen, kept = tmp_path / "out", set[str](), [0]

    def names() -> set[str]:
        return {path.name for path in (folder / readings).glob("*.*.npz")}

    for _ in range(2):
        process = Forked([*line, "--out", str(folder)], cwd=tmp_path, stdout=PIPE, stderr=PIPE)
        while not names() - seen:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        err = process.communicate(HANGS)[1].decode()
        seen = names()  # with what was written before the signal arrived
        if number == signal.SIGINT:
            assert process.returncode == 130
            kept.append(check_said(err, folder))
            assert kept[-1] > kept[-2]
    resumed, whole = call(*line, "--out", str(folder)).ok(), call(*line, "--out", str(tmp_path / "whole")).ok()
    assert (resumed.out, files_of(folder)) == (whole.out, files_of(tmp_path / "whole"))


def test_without_a_folder_a_stop_says_that_nothing_is_kept(ablating, monkeypatch):
    passes = Stopping(monkeypatch, "ablating")
    passes.at = 4
    with pytest.raises(signals.Stopped) as stopped:
        ablating(None)
    assert stopped.value.kept == "nothing is kept without a folder"


def test_a_batch_of_other_sequences_is_read_anew(tmp_path):
    def read(value: float) -> Callable[[], dict[str, np.ndarray]]:
        return lambda: {"value": np.array([value])}

    def batch(row: int, value: float) -> float:
        found = Parts(tmp_path).batch("part", [0, row], {"value": Column((1,))}, read(value))
        return float(found["value"][0])

    assert (batch(1, 1.0), batch(1, 2.0), batch(2, 3.0)) == (1.0, 1.0, 3.0)
