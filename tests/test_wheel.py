"""The built wheel carries the embedded model and runs outside the clone; the sdist has the page's sources, too."""

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from helpers.rows import csv_rows

ROOT = Path(__file__).parents[1]
PAGE_SOURCES = "attnscope/viewer/src/"
SENTENCE = "the financial bank is located on river bank"

pytestmark = pytest.mark.slow


def done(*command: str | Path, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    result = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The sdist and the wheel made of it. From a copy: setuptools leaves a build folder, and would take stale files."""
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT / "attnscope", source / "attnscope", ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    done(sys.executable, "-m", "build", "--outdir", dist, source, cwd=dist)
    return dist


@pytest.fixture(scope="module")
def wheel(dist):
    [path] = dist.glob("attnscope-*.whl")
    return path


def test_the_sources_of_the_page_are_in_the_sdist(dist):
    [path] = dist.glob("attnscope-*.tar.gz")
    with tarfile.open(path) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    sources = {one.relative_to(ROOT).as_posix() for one in (ROOT / PAGE_SOURCES).rglob("*") if one.is_file()}
    assert len(sources) > 30
    assert sources <= names


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "attnscope").rglob("*") if path.is_file()}
    expected = {name for name in files if "__pycache__" not in name and "/." not in name}
    expected = {name for name in expected if not name.startswith(PAGE_SOURCES)}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith("demo/model.safetensors") for name in names)
    demo = [entry for entry in zipfile.ZipFile(wheel).infolist() if entry.filename.startswith("attnscope/demo/")]
    weights = [entry for entry in demo if not entry.filename.endswith((".md", "LICENSE", "training.json"))]
    assert sum(entry.file_size for entry in weights) <= 8e6


@pytest.mark.timeout(1200)
def test_a_clean_environment_runs_heads(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    binaries = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin")
    done(binaries / "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    where = done(binaries / "python", "-c", "import attnscope; print(attnscope.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(tmp_path / "venv")
    table = done(binaries / "attnscope", "heads", "--text", SENTENCE, "--out", "runs/bank", cwd=tmp_path)
    assert len(csv_rows(table.encode())) == 24
    assert (tmp_path / "runs" / "bank" / "overview.png").stat().st_size > 1000
    assert (tmp_path / "runs" / "bank" / "manifest.json").is_file()
