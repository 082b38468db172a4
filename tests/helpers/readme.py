"""README's sample: what its first command shows on a terminal of 100 columns."""

import contextlib
import io
import os
import re
import shlex
import sys
from pathlib import Path
from unittest.mock import patch

from attnscope.cli import run
from helpers.command_line import Screen

ROOT = Path(__file__).parents[2]
COLUMNS = 100
SAMPLE = re.compile(r"(?<=&& )(attnscope heads [^\n]*)(\n\n```\n)(.*?)(```\n)", re.DOTALL)


def document(page: str, folder: Path) -> str:
    """The page with its sample as it comes out; the command runs in a folder, and leaves its files there."""

    def made(found: re.Match[str]) -> str:
        return found[1] + found[2] + shown(found[1], folder) + found[4]

    return SAMPLE.sub(made, page, count=1)


def shown(command: str, folder: Path) -> str:
    """What a person sees on a terminal without colour: data and talk, in their order, without bars that go away."""
    (folder / "examples").symlink_to(ROOT / "examples", target_is_directory=True)
    screen = io.BytesIO()
    out = Screen(screen, encoding="utf-8", write_through=True)
    err = io.TextIOWrapper(screen, encoding="utf-8", write_through=True)
    settings = {"COLUMNS": str(COLUMNS), "NO_COLOR": "1", "TERM": "xterm"}
    arguments = [*shlex.split(command)[1:], "--device", "cpu"]
    with patch.dict(os.environ, settings), patch.multiple(sys, stdout=out, stderr=err), contextlib.chdir(folder):
        assert run(arguments) == 0
    text = screen.getvalue().decode()
    return "".join(line.rstrip() + "\n" for line in text.splitlines())
