"""A scan or an ablation that is stopped: every batch of sequences that was finished is kept, and not run again."""

from __future__ import annotations

import hashlib
import re
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest

from attnscope import signals
from attnscope.folder.parts import Column, Parts
from attnscope.intervene.passes import Passes
from attnscope.study.ablation.effects import HeadSets, ablate_sets
from attnscope.study.ablation.sets import head_set
from attnscope.study.ablation.tasks import copy
from attnscope.study.atlas import findings
from attnscope.study.atlas.scan import plan, scan_heads
from helpers.command_line import call
from helpers.forks import Forked

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
    """An ablation of two chunks of sets, in a pass for each of four sequences."""
    monkeypatch.setattr("attnscope.intervene.passes.CPU_TOKENS", 4 * 101)
    task, asked = copy(demo, sequences=4), HeadSets.of(SETS, demo.geometry, random=1)
    return lambda folder: ablate_sets(demo, task, asked, folder=folder)


@pytest.fixture
def scanning(demo, monkeypatch) -> Study:
    """A scan of two trials, in batches of about four sequences."""
    monkeypatch.setattr(findings, "BATCH_TOKENS", 4 * 65)
    planned = plan(demo, sequences=6)
    few = [one for one in planned.trials if one.name in ("offsets", "sink")]
    return lambda folder: scan_heads(demo, type(planned)(few, planned.seed, planned.facts), folder)


PASSES = {"ablating": (Passes, "run"), "scanning": (findings, "_pass")}


class Stopping:
    """Stands for the pass: counts its calls, and is stopped in one of them by a signal."""

    def __init__(self, monkeypatch: Any, study: str) -> None:
        where, name = PASSES[study]
        self.calls, self.at, real = 0, 0, getattr(where, name)

        def counted(*args: Any) -> Any:
            self.calls += 1
            if self.calls == self.at:
                raise signals.Stopped(signal.SIGINT)
            return real(*args)

        monkeypatch.setattr(where, name, counted)


@pytest.fixture(params=PASSES)
def study(request, monkeypatch) -> tuple[Study, Stopping]:
    return request.getfixturevalue(request.param), Stopping(monkeypatch, request.param)


def test_wherever_it_is_stopped_it_ends_as_if_it_had_not_been(study, tmp_path):
    run, passes = study
    run(tmp_path / "whole")
    whole, calls = files_of(tmp_path / "whole"), passes.calls
    run(tmp_path / "whole")
    beside, passes.calls = passes.calls - calls, 0  # passes of no batch: whether sets can share layers
    assert calls - beside > 2 * len([name for name in whole if name.endswith(".npz")])  # several batches behind a part
    for number in range(1, calls + 1):
        folder, passes.calls, passes.at = tmp_path / str(number), 0, number
        with pytest.raises(signals.Stopped) as stopped:
            run(folder)
        finished = max(0, number - 1 - beside)
        if finished:
            said = f"{finished} of {calls - beside} batches are kept in {folder}; the same command resumes from there"
            assert stopped.value.kept == said
        passes.calls, passes.at = 0, 0
        run(folder)
        assert passes.calls == calls - finished
        assert files_of(folder) == whole


COMMAND = ("ablate", "demo", "--select", "3.0-1", "--each", "--random", "9", "--sequences", "8", "-q", "--top", "99")
SCAN = ("scan", "demo", "--sequences", "8", "-q", "--top", "99")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], tuple[bytes, dict[str, str]]]:
    """What a command prints and writes that nothing stops; each runs once."""

    @cache
    def run(line: tuple[str, ...]) -> tuple[bytes, dict[str, str]]:
        folder = tmp_path_factory.mktemp("unbroken")
        return call(*line, "--out", str(folder)).ok().out, files_of(folder)

    return run


@pytest.mark.parametrize(("line", "readings"), [(COMMAND, "ablation"), (SCAN, "readings")])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_command_that_was_stopped_resumes(tmp_path, unbroken, line, readings, number):
    folder, seen, kept = tmp_path / "out", set[str](), [0]
    for _ in range(2):
        process = Forked([*line, "--out", str(folder)], cwd=tmp_path, stdout=PIPE, stderr=PIPE)
        while not (now := {path.name for path in (folder / readings).glob("*.*.npz")}) - seen:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        err = process.communicate(60)[1].decode()
        seen |= now
        if number == signal.SIGINT:
            assert process.returncode == 130
            said = rf"attnscope: interrupted; (\d+) of \d+ batches are kept in {folder}; the same command resumes.*\n"
            kept.append(int(re.fullmatch(said, err)[1]))
            assert kept[-1] > kept[-2]
    resumed = call(*line, "--out", str(folder)).ok()
    assert (resumed.out, files_of(folder)) == unbroken(line)


def test_without_a_folder_a_stop_says_that_nothing_is_kept(ablating, monkeypatch):
    passes = Stopping(monkeypatch, "ablating")
    passes.at = 4
    with pytest.raises(signals.Stopped) as stopped:
        ablating(None)
    assert stopped.value.kept == "nothing is kept without --out DIR"


def test_a_batch_of_other_sequences_is_read_anew(tmp_path):
    def read(value: float) -> Callable[[], dict[str, np.ndarray]]:
        return lambda: {"value": np.array([value])}

    def batch(row: int, value: float) -> float:
        found = Parts(tmp_path).batch("part", [0, row], {"value": Column((1,))}, read(value))
        return float(found["value"][0])

    assert (batch(1, 1.0), batch(1, 2.0), batch(2, 3.0)) == (1.0, 1.0, 3.0)
