"""The process that draws beside the one that reads the model."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnscope.export import drawing
from attnscope.figures import drawing_process, load_drawing
from attnscope.figures.drawing_process import cores
from attnscope.model import loading
from helpers.command_line import HANGS, call
from helpers.drawing_process import a_drawing, files

HELPER = Path(__file__).parent / "helpers" / "drawing_process.py"
pytestmark = pytest.mark.skipif(sys.platform != "linux" or cores() == 1, reason="needs Linux and two cores")


@pytest.mark.parametrize("part", ["draws", pytest.param("ends", marks=pytest.mark.e2e)])
def test_it_draws_the_same_and_ends_as_it_should(tmp_path: Path, part: str) -> None:
    command = [sys.executable, str(HELPER), part, str(tmp_path / "there")]
    (tmp_path / "there").mkdir()
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    if part == "draws":
        a_drawing().draw(tmp_path / "here")
        assert files(tmp_path / "there") == files(tmp_path / "here") != {}


def test_none_is_begun_where_pytorch_is_loaded() -> None:
    assert torch.__name__ in sys.modules
    drawing_process.begin(load_drawing, "attnscope.export.drawing")
    assert drawing_process.take_process() is None


def test_heads_begins_a_process_and_has_it_draw(demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = list[str]()

    class Here:
        def drawn(self, *works):
            events.append(f"{len(works)} works")
            for work in works:
                yield from work()

    monkeypatch.setattr(loading, "load", lambda options: events.append("loaded") or demo)
    monkeypatch.setattr(drawing_process, "begin", lambda load, *modules: events.extend(modules))
    monkeypatch.setattr(drawing, "take_process", Here)
    run = ("heads", "the bank", "--out", str(tmp_path / "run"), "--figures")
    call(*run, "overview,metrics").ok()
    assert events == ["attnscope.export.drawing", "loaded", "2 works"]
    assert {path.name for path in (tmp_path / "run").glob("*.png")} == {"overview.png", "metrics.png"}


def test_a_run_without_pictures_begins_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing_process, "begin", lambda load, *modules: pytest.fail("begun"))
    call("relations", "the bank", "--out", str(tmp_path / "run")).ok()


@pytest.mark.e2e
def test_heads_loads_no_matplotlib_where_another_process_draws(tmp_path: Path) -> None:
    code = (
        "import sys, attnscope.cli as cli; "
        "code = cli.run(['heads', 'the bank', '--out', sys.argv[1], '--set', 'cmap=' + sys.argv[2], '--quiet']); "
        "print('matplotlib.figure' in sys.modules, file=sys.stderr); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    done = subprocess.run([*command, "magma"], capture_output=True, text=True, timeout=HANGS)
    assert (done.returncode, done.stderr) == (0, "False\n")
    assert (tmp_path / "run" / "overview.png").stat().st_size > 1000
