"""benchmarks/gpu.sh, what a visit to a card runs, with stand-ins for what it calls; and its records as tables."""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from helpers.forks import HANGS, until
from helpers.rows import json_lines

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
STUB = """#!/bin/sh
# What every part runs: a table of four rows, a failure where it is planted, and no end before one row of one part.
case "$*" in *$FAILING*) echo "planted"; exit 3 ;; esac
echo said; echo; echo "| a |"
for row in 1 2 3 4; do
  case "$* $row" in *$ENDLESS) sleep 6000 ;; esac
  echo "| $row |"
done
"""


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"visit_{name}", BENCHMARKS / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def visit(folder: Path, which: str = "first", failing: str = "none", endless: str = "none") -> subprocess.Popen:
    """A visit to whose folder everything is written; no `python` is on its PATH, and PYTHON names a stand-in."""
    stub = folder / "stub"
    stub.write_text(STUB)
    stub.chmod(0o755)
    more = {"PATH": f"/usr/bin{os.pathsep}/bin", "PYTHON": str(stub), "FAILING": failing, "ENDLESS": endless}
    command = ["bash", BENCHMARKS / "gpu.sh", folder / "visit", which]
    given = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    return subprocess.Popen(command, env=os.environ | more, **given)


def records(folder: Path) -> list[dict]:
    return json_lines((folder / "visit/visit.jsonl").read_bytes())


def ends(folder: Path) -> dict[str, int]:
    return {one["part"]: one["code"] for one in records(folder) if "code" in one}


def test_parts_that_failed_are_run_again_and_become_tables(tmp_path: Path) -> None:
    assert visit(tmp_path, failing="benchmarks/kernels.py").wait(HANGS) == 0
    assert ends(tmp_path) == {"environment": 0, "kernels": 3, "engines": 0}
    results = script("results")
    assert results.of_a_visit(tmp_path / "visit", tmp_path / "RESULTS.md") == ["kernels"]
    visit(tmp_path).wait(HANGS)
    assert [one["part"] for one in records(tmp_path) if "command" in one] == [
        *("environment", "kernels", "engines"),
        "kernels",
    ]
    assert results.of_a_visit(tmp_path / "visit", tmp_path / "RESULTS.md") == []
    page = (tmp_path / "RESULTS.md").read_text()
    assert page.count("\n## On a card: ") == 3
    assert "said\n\n| a |\n| 1 |" in page


@pytest.mark.parametrize(("part", "row"), [("environment", 1), ("environment", 4), ("kernels", 3)])
def test_what_was_printed_is_kept_when_a_visit_is_killed(tmp_path: Path, part: str, row: int) -> None:
    """A row stands in its part's file from when it was printed, and the part is run again."""
    running = visit(tmp_path, endless=f"benchmarks/{part}.py* {row}")
    file, printed = tmp_path / "visit" / f"{part}.txt", ["said", "", "| a |", *(f"| {one} |" for one in range(1, row))]
    until(lambda: file.exists() and file.read_text().splitlines() == printed)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait(HANGS)
    assert file.read_text().splitlines() == printed
    assert [one["part"] for one in records(tmp_path) if "command" in one][-1] == part
    assert part not in ends(tmp_path)
    assert script("results").of_a_visit(tmp_path / "visit", tmp_path / "RESULTS.md") == [part]
    visit(tmp_path).wait(HANGS)
    assert ends(tmp_path) == dict.fromkeys(("environment", "kernels", "engines"), 0)


def test_a_second_command_has_parts_of_its_own_and_few_files(tmp_path: Path) -> None:
    visit(tmp_path, "second").wait(HANGS)
    assert {"tests", "commands", "masks", "parity", "batch"} <= set(ends(tmp_path))
    assert len(list((tmp_path / "visit").iterdir())) <= 8


@pytest.mark.parametrize("name", ["environment", "kernels", "card", "paths", "engines", "parity", "batch"])
def test_what_a_visit_calls_is_there(name: str) -> None:
    assert f"benchmarks/{name}.py" in (BENCHMARKS / "gpu.sh").read_text("utf-8")
    assert (BENCHMARKS / f"{name}.py").exists()


def test_limits_of_a_visits_parts_fit_ten_minutes() -> None:
    text = (BENCHMARKS / "gpu.sh").read_text("utf-8")
    for which in ("first", "second"):
        lines = text.partition(f"\n{which})\n")[2].partition(";;")[0].splitlines()
        limits = [int(line.split()[2]) for line in lines if line.strip().startswith("part ")]
        assert 0 < sum(limits) <= 600


def test_the_engines_of_a_visit_are_those_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is in bfloat16 from the beginning; every way runs, and says who answered."""
    card = script("card")
    model = card.made("tiny", "cpu")
    assert {str(one.dtype) for one in model.parameters()} == {"torch.bfloat16"}
    monkeypatch.setattr(card, "LONG", 1)  # no run before the one that counts
    monkeypatch.setattr("attnscope.attention.tiling.SMALL", 0)  # as on a card, where no text is read by rows
    found = list(card.rows(model, 40, "cpu", 1))
    assert [line.split(" | ")[1] for line, _ in found] == ["plain", *card.OURS]
    assert [line.split(" | ")[-1] for line, _ in found] == ["sdpa |", *["tiles |"] * len(card.OURS)]


def test_a_way_that_fails_leaves_the_others_and_a_refused_kernel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    card = script("card")

    def fails() -> set[str]:
        raise RuntimeError("planted | here\nand more")

    said = {"plain": fails, card.OURS[0]: lambda: {"triton", "tiles"}, card.OURS[1]: lambda: {"tiles: differs"}}
    monkeypatch.setattr(card, "ways", lambda model, ids: said)
    broken, *others = card.rows(None, 40, "cpu", 1)
    assert broken == ("| 40 | plain | RuntimeError: planted / here | | | | |", False)
    assert [held for _, held in others] == [True, True]
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(card.torch.cuda, name, lambda: None)
    monkeypatch.setattr(card.torch.cuda, "max_memory_allocated", lambda: 10**9)
    monkeypatch.setattr(card.torch.Tensor, "to", lambda self, device: self)
    rows = list(card.rows(None, 40, "cuda:0", 1))
    assert [held for _, held in rows] == [False, True, False]
    assert "| 1.00 GB |" in rows[1][0]
    assert rows[2][0].endswith("| tiles: differs |")


def test_commands_are_compared_by_what_a_row_is_of() -> None:
    """In bfloat16 another key of nearly the same weight is no difference; in float32 everything is."""
    paths = script("paths")
    mine = [{"layer": 0.0, "head": 1.0, "weight": 0.5, "strongest.key": 3.0}]
    theirs = [{"layer": 0.0, "head": 1.0, "weight": 0.501, "strongest.key": 9.0}]
    assert paths.difference(mine, theirs, rounded=True)[0] < 1e-3
    assert paths.difference(mine, theirs, rounded=False) == (0.6, "strongest.key")
    assert paths.difference(mine, [theirs[0] | {"weight": 0.9}], rounded=True)[0] > 0.2
    assert paths.difference(mine, [theirs[0] | {"layer": 2.0}], rounded=True) == (float("inf"), "rows")
