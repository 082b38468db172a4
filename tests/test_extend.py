"""A metric, an option, an engine and a command are each one or two files' work: done on a copy, and run there."""

import csv
import io
import json
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


READ = ("--text", TEXT, "--format", "csv", "-q")
HEADS = ("heads", "--engine")
INFO = ("info", "demo", "--format", "json")
COMMANDS = (
    (*HEADS, "recomputed", *READ),
    (*HEADS, "eager", *READ),
    ("tokens", *READ),
    INFO,
    ("heads", "--help"),
    ("--help",),
)
PROCESS = """
import json, sys
from helpers.command_line import call
done = [call(*arguments) for arguments in json.load(sys.stdin)]
print(json.dumps([(one.code, one.out.decode(), one.err) for one in done]))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], str]:
    """{command: what it prints} in a process of the copy."""
    folder = extend(tmp_path_factory.mktemp("copy"))
    done = subprocess.run(
        [sys.executable, "-c", PROCESS],
        input=json.dumps(COMMANDS),
        env=os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT / 'tests'}", "COLUMNS": "100"},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [code for code, _, _ in found] == [0] * len(COMMANDS), found
    return {command: out for command, (_, out, _) in zip(COMMANDS, found, strict=True)}


def table(printed: str) -> list[dict[str, str]]:
    """The rows of CSV."""
    return list(csv.DictReader(io.StringIO(printed)))


@pytest.mark.parametrize("what", EXTENSIONS)
def test_it_is_one_or_two_files_which_the_guide_names(what: str) -> None:
    [line] = [line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line.startswith(f"| {what} |")]
    files = EXTENSIONS[what]
    assert len(files) <= 2
    assert all(f"`{name.replace('tokens', 'NAME')}`" in line for name in files)


def test_the_metric_is_measured_on_the_new_engine_as_python_loops_have_it(demo, said) -> None:
    weights = attnscope.capture(demo, TEXT, engine="eager").weights
    rows = table(said[(*HEADS, "recomputed", *READ)])
    assert len(rows) == 24
    for row in rows:
        matrix = weights[int(row["layer"])][int(row["head"])].tolist()
        expected = [matrix[query][query - 2] for query in range(2, len(matrix))]
        assert float(row["two_back"]) == pytest.approx(sum(expected) / len(expected), abs=1e-5)
    eager = table(said[(*HEADS, "eager", *READ)])
    assert float(eager[0]["entropy"]) == pytest.approx(float(rows[0]["entropy"]), abs=1e-5)


def test_the_engine_has_its_cost_in_what_info_says(said: dict[tuple[str, ...], str]) -> None:
    costs = json.loads(said[INFO])["costs"]
    assert costs
    for cost in costs:
        assert cost["engines"]["recomputed"] == cost["eager_bytes"] > 0


def test_the_option_is_in_the_help_and_the_command_in_the_list(said: dict[tuple[str, ...], str]) -> None:
    assert "--role ROLE" in said["heads", "--help"]
    assert "auto|eager|recomputed|fused" in said["heads", "--help"]
    assert "tokens" in said[("--help",)]
    labels = [row["token"] for row in table(said["tokens", *READ])]
    assert "".join(labels).replace("·", " ").split()[-2:] == ["the", "river"]
