"""The page's data and state in Node, where there is one: tests/viewer/data.test.mjs."""

import shutil
import subprocess
from pathlib import Path

import pytest

from helpers.command_line import HANGS

NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="no node")
def test_the_pages_data_and_state_hold_in_node() -> None:
    ran = subprocess.run(
        [str(NODE), "--test", "data.test.mjs"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=HANGS
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "\n# fail 0\n" in ran.stdout
    assert "\n# pass 0\n" not in ran.stdout
