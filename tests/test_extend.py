"""A metric, an option, an engine and a command are each one or two files' work: done on a copy, and run there."""

import csv
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

import attnscope

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
from extend import EXTENSIONS, extend  # noqa: E402

TEXT = "the financial bank is located on river bank by the river"


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extend(tmp_path_factory.mktemp("copy"))


def table_of(folder: Path, *arguments: str) -> list[dict[str, str]]:
    """The rows that a command of the copy prints."""
    done = subprocess.run(
        [sys.executable, "-m", "attnscope", *arguments, "--text", TEXT, "--format", "csv", "-q"],
        env=os.environ | {"PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return list(csv.DictReader(io.StringIO(done.stdout)))


@pytest.mark.parametrize("what", EXTENSIONS)
def test_it_is_one_or_two_files_which_the_guide_names(what: str) -> None:
    [line] = [line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line.startswith(f"| {what} |")]
    files = EXTENSIONS[what]
    assert len(files) <= 2
    assert all(f"`{name.replace('tokens', 'NAME')}`" in line for name in files)


def test_the_metric_is_measured_on_the_new_engine_as_python_loops_have_it(extended: Path) -> None:
    weights = attnscope.capture(attnscope.load("demo"), TEXT, engine="eager").weights
    rows = table_of(extended, "heads", "--engine", "recomputed")
    assert len(rows) == 24
    for row in rows:
        matrix = weights[int(row["layer"])][int(row["head"])].tolist()
        expected = [matrix[query][query - 2] for query in range(2, len(matrix))]
        assert float(row["two_back"]) == pytest.approx(sum(expected) / len(expected), abs=1e-5)
    eager = table_of(extended, "heads", "--engine", "eager")
    assert float(eager[0]["entropy"]) == pytest.approx(float(rows[0]["entropy"]), abs=1e-5)


def test_the_option_is_in_the_help_and_the_command_in_the_list(extended: Path) -> None:
    def said(*arguments: str) -> str:
        command = [sys.executable, "-m", "attnscope", *arguments, "--help"]
        env = os.environ | {"PYTHONPATH": str(extended), "COLUMNS": "100"}
        return subprocess.run(command, env=env, cwd=extended, capture_output=True, text=True, check=True).stdout

    assert "--role ROLE" in said("heads")
    assert "auto|eager|recomputed|fused" in said("heads")
    assert "tokens" in said()
    labels = [row["token"] for row in table_of(extended, "tokens")]
    assert "".join(labels).replace("·", " ").split()[-2:] == ["the", "river"]
