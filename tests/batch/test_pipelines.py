"""Every block of docs/pipelines.md runs, where its programs are there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from batch.corpora import jsonl

PAGE = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text()
PROGRAMS = ("jq", "zstd", "xargs", "parallel", "duckdb")
TEXTS = ["the bank is on the river", "the quick fox", "said the fox", "a b c d a b c d"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, in which the blocks run one after the other."""
    folder = tmp_path_factory.mktemp("pipelines")
    jsonl(folder / "corpus.jsonl", TEXTS, source="here")
    return folder


@pytest.mark.parametrize("block", blocks("sh"), ids=lambda block: " ".join(block.split()[:6]))
def test_shell_block(place: Path, block: str) -> None:
    missing = [name for name in PROGRAMS if re.search(rf"(^|\|\s*|\n){name} ", block) and not shutil.which(name)]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    here = str(Path(sys.executable).parent)
    env = os.environ | {"PATH": here + os.pathsep + os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-eo", "pipefail", "-c", block], cwd=place, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    if "jq -s length" in block:
        assert done.stdout == "4\n"
    elif "select(.induction" in block:
        assert len(done.stdout.splitlines()) == 4
    elif "xargs" in block:
        assert sorted(path.name for path in (place / "runs").iterdir()) == ["one", "two"]


def test_python_block(place: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "attnscope", "batch", "corpus.jsonl", "--out", "runs/corpus", "-q"],
        cwd=place,
        check=True,
    )
    [block] = blocks("python")
    done = subprocess.run([sys.executable, "-c", block], cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("here") == 10
