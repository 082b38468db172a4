"""benchmarks/gpu.sh, what a visit to a card runs, with stand-ins for what it calls; and its records as tables."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.command_line import HANGS
from helpers.rows import json_lines

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def visit(folder: Path) -> list[dict]:
    """The records of a visit on which every benchmark prints a table, and the card's own tool is missing."""
    stub = folder / "python"
    stub.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} -IS "$@"\necho said\necho; echo "| a |"\n')
    stub.chmod(0o755)
    env = os.environ | {"PATH": f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin"}
    command = ["bash", BENCHMARKS / "gpu.sh", folder / "gpu.jsonl"]
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=HANGS)
    return json_lines((folder / "gpu.jsonl").read_bytes())


def test_a_visit_goes_on_where_it_was_cut_off_and_becomes_tables(tmp_path: Path) -> None:
    whole = visit(tmp_path)
    parts = [one["part"] for one in whole]
    assert {"Environment", "Kernels beside the tiles", "Engines (cuda:0, 8192 tokens)"} <= set(parts)
    assert [one["part"] for one in whole if one["code"]] == (["Card"] if whole[1]["code"] else [])
    lines = (tmp_path / "gpu.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "gpu.jsonl").write_text("".join(lines[:3]))
    assert [one["part"] for one in visit(tmp_path)] == parts
    spec = importlib.util.spec_from_file_location("results", BENCHMARKS / "results.py")
    assert spec
    assert spec.loader
    results = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(results)
    failed = results.of_a_visit(tmp_path / "gpu.jsonl", tmp_path / "RESULTS.md")
    assert failed == [one["part"] for one in whole if one["code"]]
    page = (tmp_path / "RESULTS.md").read_text()
    assert page.count("\n## On a card: ") == len(whole)
    assert "said\n\n| a |" in page


@pytest.mark.parametrize("script", ["paths", "kernels", "engines", "parity", "figures", "batch"])
def test_what_a_visit_calls_is_there(script: str) -> None:
    assert f"benchmarks/{script}.py" in (BENCHMARKS / "gpu.sh").read_text("utf-8")
    assert (BENCHMARKS / f"{script}.py").exists()
