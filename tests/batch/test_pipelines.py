"""Every block of docs/pipelines.md runs, where its programs are there."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from attnscope.cli import run
from attnscope.export import study_figures
from helpers.command_line import spawn
from helpers.corpora import jsonl, rows, written
from helpers.forks import shim

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "pipelines.md").read_text()
SCHEMAS = (DOCS / "schemas.md").read_text()
PROGRAMS = ("jq", "zstd", "xargs", "parallel", "duckdb")
TEXTS = ["the bank is on the river", "the quick fox", "said the fox", "a b c d a b c d"]


def blocks(language: str, page: str = PAGE) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """What the blocks find: a corpus, and two folders of texts."""
    jsonl(tmp_path / "corpus.jsonl", TEXTS, source="here")
    for name, texts in {"one/a.jsonl": TEXTS[:2], "two/b.jsonl": TEXTS[2:]}.items():
        (tmp_path / "books" / name).parent.mkdir(parents=True)
        jsonl(tmp_path / "books" / name, texts)
    return tmp_path


def quick(block: str) -> bool:
    """What is one command or two in processes that are forked; the rest is tried under e2e."""
    return block != blocks("sh")[0] and not re.search(r"--figures|--config|\|", block)


@pytest.mark.parametrize(
    "block",
    [pytest.param(block, marks=[] if quick(block) else [pytest.mark.e2e]) for block in blocks("sh")],
    ids=lambda block: " ".join(block.split()[:6]),
)
def test_shell_block(place: Path, block: str) -> None:
    missing = [name for name in PROGRAMS if re.search(rf"(^|\|\s*|\n){name} ", block) and not shutil.which(name)]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    first = Path(sys.executable).parent if block == blocks("sh")[0] else shim()  # one is started, imports and all
    env = os.environ | {"PATH": f"{first}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-eo", "pipefail", "-c", block], cwd=place, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    if "jq -s length" in block:
        assert done.stdout == "4\n"
    elif "select(.induction" in block:
        assert len(done.stdout.splitlines()) == 4
    elif "xargs" in block:
        assert sorted(path.name for path in (place / "runs").iterdir()) == ["one", "two"]
    elif "--config" in block:
        assert sorted(path.name for path in (place / "runs" / "from-file" / "figures" / "000003").iterdir()) == [
            "metrics.svg"
        ]


def test_python_block(place: Path) -> None:
    spawn("batch", "corpus.jsonl", "--out", "runs/corpus", "-q", cwd=place).ok()
    [block] = blocks("python")
    done = subprocess.run([sys.executable, "-c", block], cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("here") == 10


@pytest.mark.e2e
def test_the_workflow_fails_a_pull_request(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command ends with 0 on the baseline's own model, and with 1 where a bound is less than what rounding does."""
    [workflow] = map(yaml.safe_load, blocks("yaml"))
    [command] = [
        step["run"] for step in workflow["jobs"]["gate"]["steps"] if "attnscope compare" in step.get("run", "")
    ]
    words = shlex.split(command.partition(">")[0])[1:]
    monkeypatch.chdir(place)
    monkeypatch.setattr(study_figures, "save_differences", lambda *given: ())
    corpus = words[words.index("--texts") + 1]
    assert run(["compare", "--texts", corpus, "--save-baseline", "baseline.json", "-q"]) == 0
    assert run([*words, "-q"]) == 0
    gate = words.index("--gate") + 1
    moved = [*words[:gate], "visible=same,entropy<0.0005", *words[gate + 1 :], "--dtype", "bfloat16", "--force", "-q"]
    assert run(moved) == 1


@pytest.mark.parametrize("block", blocks("python", SCHEMAS), ids=["duckdb", "pandas"])
def test_the_other_fields_of_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: str) -> None:
    monkeypatch.chdir(tmp_path)
    fields = [{"source": "b", "meta": {"year": 2001}}, {"source": "a", "meta": {"year": 1999}}] * 2
    lines = [{"id": str(n), "text": text, **more} for n, (text, more) in enumerate(zip(TEXTS, fields, strict=True))]
    written(Path("corpus.jsonl"), lines)
    assert run(["batch", "corpus.jsonl", "--tables", "heads", "--out", "runs/corpus", "-q"]) == 0
    entropies: dict[tuple[str, int], list[float]] = {}
    for row in rows(Path("runs/corpus"), "heads"):
        key = fields[row["item"]]["source"], fields[row["item"]]["meta"]["year"]
        if row["entropy"] is not None:
            entropies.setdefault(key, []).append(row["entropy"])
    names: dict[str, Any] = {}
    exec(block, names)
    found = names["by_source"]
    pairs = found if isinstance(found, list) else [(*key, value) for key, value in found.items()]
    assert [(source, year) for source, year, _ in pairs] == [("a", 1999), ("b", 2001)]
    for source, year, mean in pairs:
        assert mean == pytest.approx(sum(entropies[source, year]) / len(entropies[source, year]))
