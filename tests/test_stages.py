"""What long work says of itself: stages, the watch that names them, and weights that are counted as they are loaded."""

import json
import re
import sys
import threading
import time
from pathlib import Path

import pytest

from attnscope.cli import output
from attnscope.model.libraries import weights_counted
from attnscope.model.loading import DEMO_FOLDER, load
from attnscope.model.options import LoadOptions
from attnscope.utils import stages
from attnscope.utils.stages import FIRST_SECONDS, NEXT_SECONDS, Stage, Watch
from helpers.command_line import call, on_terminal

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import silence

LONG = 10 * NEXT_SECONDS


@pytest.fixture
def clocked(monkeypatch):
    """A clock that a test moves."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def opened(title="loading demo", drawn=False, **counted):
    stage = Stage(title, **counted)
    stage.changed = (lambda: None) if drawn else None
    return stages.during(stage)


def after(watch, seconds):
    return watch.due(1000.0 + seconds)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_command_that_says_nothing_is_named_once_it_was_silent(clocked, terminal):
    watch = Watch(print, terminal)
    with opened():
        assert after(watch, FIRST_SECONDS - 0.1) == ""
        assert after(watch, FIRST_SECONDS + 0.1) == "loading demo"
    assert after(watch, FIRST_SECONDS + 0.1) == "starting attnscope"
    with opened(drawn=True):  # its bar says it
        assert after(watch, LONG) == ""


def test_a_pipe_hears_of_a_stage_once_a_minute_and_of_nothing_between_stages(clocked):
    watch = Watch(print, terminal=False)
    watch.heard()
    assert after(watch, LONG) == ""
    with opened("cutting", total=40, unit="passes") as stage:
        stage.advance(10)
        clocked[0] += 30
        assert after(watch, NEXT_SECONDS - 0.1) == ""
        assert after(watch, NEXT_SECONDS + 0.1) == "cutting: 10/40 passes, 0.3/s, 0:01:30 left"


def test_a_terminal_is_told_of_each_silence_between_stages_only_what_is_imported(clocked, monkeypatch):
    watch = Watch(print, terminal=True)
    watch.heard()
    assert after(watch, LONG) == ""
    monkeypatch.setattr(stages, "importing", lambda: "importing torch")
    assert after(watch, FIRST_SECONDS + 0.1) == "importing torch"


def test_the_library_that_is_imported_is_named(tmp_path, monkeypatch):
    (tmp_path / "slowly.py").write_text("from attnscope.utils import stages\nseen = stages.importing()\n")
    monkeypatch.syspath_prepend(tmp_path)
    import slowly

    assert slowly.seen == "importing slowly"
    assert stages.importing() == ""


@pytest.mark.parametrize(
    ("total", "unit", "done", "expected"),
    [
        (4, "layers", 2, "2/4 layers"),
        (1200, "pictures", 1000, "1,000/1,200 pictures"),
        (None, "", 3, ""),
        (98_000_000, "bytes", 42_460_000, "42.5/98.0 MB"),
        (2_200_000_000, "bytes", 1_100_000_000, "1.1/2.2 GB"),
        (400, "bytes", 100, "0.1/0.4 kB"),
    ],
)
def test_how_much_is_done(total, unit, done, expected):
    stage = Stage("", total, unit)
    stage.advance(done)
    assert stage.count == expected


def test_what_was_done_before_the_first_step_does_not_slow_the_estimate(clocked):
    stage = Stage("loading demo")
    clocked[0] += 60  # of imports
    assert stage.time == "0:01:00 so far"
    stage.expect(100, "bytes")
    clocked[0] += 5
    stage.advance(50)
    assert stage.time == "0:00:05 left"


def test_every_byte_of_a_model_is_counted_while_it_is_loaded():
    seen = []
    with stages.stage("loading demo") as stage:
        stage.changed = lambda: seen.append(stage.done)
        load(LoadOptions())
    header = (DEMO_FOLDER / "model.safetensors").stat().st_size - stage.total
    assert 0 < header < 10_000
    assert stage.done == pytest.approx(stage.total)
    assert len(seen) > 30
    assert seen == sorted(seen)


def test_weights_that_no_conversion_names_share_what_the_named_ones_leave():
    from transformers.utils import logging

    class Named:
        source_patterns = ("a",)

    with stages.stage("loading") as stage, weights_counted({"a": 10, "b": 20, "c": 30}):
        assert [*logging.tqdm({"a": Named(), "x": 1, "y": 2}.items(), desc="Loading weights")]
        assert (stage.total, stage.done) == (60, 60)
        assert [*logging.tqdm([1, 2], desc="Other")] == [1, 2]
    assert logging.set_tqdm_hook(None) is None


def test_a_title_is_cut_and_no_line_is_wider_than_the_terminal():
    code, shown = on_terminal(["heads", "a bank", "--model", f"{DEMO_FOLDER}/{'./' * 20}", "--top", "1"], 60)
    assert code == 0
    lines = re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown))
    bars = [line for line in lines if "so far" in line or " left" in line]
    assert bars
    assert all(len(line) <= 60 and ("so far" in line or re.search(r"\d left", line)) for line in bars)


def watches():
    return sum(isinstance(thread, Watch) for thread in threading.enumerate())


def test_a_quiet_command_and_a_program_that_shows_stages_have_no_watch(monkeypatch):
    monkeypatch.delenv("ATTNSCOPE_STAGES")
    with output.watched(quiet=False):
        assert (watches(), stages.threads()) == (1, threading.active_count() - 1)
    assert watches() == 0
    with output.watched(quiet=True):
        assert watches() == 0
    for value in ("json", "none"):
        monkeypatch.setenv("ATTNSCOPE_STAGES", value)
        with output.watched(quiet=False):
            assert watches() == 0


SLEEPING = """
import sys, time
from attnscope.cli import main, metrics
print_all = metrics.output.emit
def sleepy(*arguments, **options):
    time.sleep(4)
    return print_all(*arguments, **options)
metrics.output.emit = sleepy
"""
UNWATCHED = """
from contextlib import nullcontext
metrics.output.watched = lambda quiet: nullcontext()
"""


@pytest.mark.e2e
@pytest.mark.parametrize("terminal", [False, True])
def test_a_command_that_would_be_silent_says_something_and_one_without_a_watch_is_found(
    tmp_path, terminal, monkeypatch
):
    """The limit is that of a busy machine; the work is silent for longer than both."""
    spoken, silent = tmp_path / "spoken.py", tmp_path / "silent.py"
    spoken.write_text(f"{SLEEPING}main(['metrics'])\n")
    silent.write_text(f"{SLEEPING}{UNWATCHED}main(['metrics'])\n")
    said, nothing = (
        silence.listen([sys.executable, str(path)], terminal, tmp_path / "data") for path in (spoken, silent)
    )
    assert said.code == nothing.code == 0
    assert said.first is not None
    assert said.first < said.end - 2
    assert (nothing.first, nothing.over(silence.LIMIT)) == (None, True)


@pytest.mark.parametrize(
    ("command", "stage"),
    [
        (("knockout", "Mary saw John, and John", "--key", "first", "--set", "random=1"), "cutting"),
        (("patch", "Mary saw John", "--corrupted", "Lily saw John", "--answer", " and", "--select", "3"), "patching"),
    ],
    ids=["knockout", "patch"],
)
def test_a_study_says_its_share(command, stage):
    done = call(*command, ATTNSCOPE_STAGES="json").ok()
    told = [json.loads(line) for line in done.err.splitlines() if line.startswith("{")]
    counted = [(line["done"], line["total"], line["unit"]) for line in told if line["stage"] == stage]
    assert counted[-1][0] > 0
    assert all(0 <= part <= whole and unit == "tokens x layers" for part, whole, unit in counted)
