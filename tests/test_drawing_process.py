"""The process that draws beside the one that reads the model."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnscope.figures import drawing_process
from attnscope.figures.pool import cores
from helpers.command_line import HANGS

HELPER = Path(__file__).parent / "helpers" / "drawing_process.py"
pytestmark = pytest.mark.skipif(sys.platform != "linux" or cores() == 1, reason="needs Linux and two cores")


def test_it_draws_the_same_and_ends_as_it_should(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(HELPER), str(tmp_path)], capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr


def test_none_is_begun_where_pytorch_is_loaded() -> None:
    assert torch.__name__ in sys.modules
    drawing_process.begin("attnscope.drawing")
    assert drawing_process.begun() is None


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
