"""Pages with samples: a command in a block, and below it what that shows on a terminal of 100 columns."""

import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from attnscope.cli import run
from helpers.command_line import Screen
from helpers.documented import makers

ROOT = Path(__file__).parents[2]
COLUMNS = 100
PAGES = ("README.md", "docs/tutorial.md")
SAMPLE = re.compile(r"(?<=^    )(attnscope [^\n]*)(\n\n```\n)(.*?)(```\n)", re.DOTALL | re.MULTILINE)


def samples(page: str) -> Iterator[tuple[str, str]]:
    """(command, what the page says that it shows) of each sample."""
    for sample in SAMPLE.finditer(page):
        yield sample[1], sample[3]


def commands(page: str) -> list[str]:
    """All commands of a page, those without a sample too."""
    return re.findall(r"^ {4}(attnscope .*)$", page, re.MULTILINE)


def document(page: str, folder: Path) -> str:
    """The page with its samples as they come out; the commands run in a folder, and leave their files there."""

    def fresh(sample: re.Match[str]) -> str:
        for line in makers(sample[1], commands(page)):
            shown(line, folder)
        return sample[1] + sample[2] + shown(sample[1], folder) + sample[4]

    return SAMPLE.sub(fresh, page)


def shown(command: str, folder: Path) -> str:
    """What a person sees on a terminal without colour: data and messages, in their order, without bars that go away."""
    for name in ("examples", "configs"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name, target_is_directory=True)
    screen = io.BytesIO()
    out = Screen(screen, encoding="utf-8", write_through=True)
    err = io.TextIOWrapper(screen, encoding="utf-8", write_through=True)
    settings = {"COLUMNS": str(COLUMNS), "NO_COLOR": "1", "TERM": "xterm"}
    words = shlex.split(command)[1:]
    arguments = words if words[1].startswith("runs/") else [*words, "--device", "cpu"]
    with patch.dict(os.environ, settings), patch.multiple(sys, stdout=out, stderr=err), contextlib.chdir(folder):
        code = run(arguments)
    text = screen.getvalue().decode()
    assert code == 0, text
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n") + "\n"
