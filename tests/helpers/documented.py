"""Commands that help and pages show, each run as it is typed: in a shell, or, if it is one command, in this process."""

import contextlib
import os
import re
import shlex
import subprocess
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

import pytest

from helpers.command_line import HANGS, call
from helpers.forks import shim

DEAR = re.compile(  # pictures, studies, draws over a long text
    r"attnscope (?!batch|rollout).* --out runs|--sequences|--keep stream|--config |attnscope serve|"
    r'attnscope knockout "[^"]{99}'
)


def typed(line: str) -> tuple[list[str], bytes]:
    """The arguments of a line that is one plain command, and what `echo` sends it; no arguments if it needs a shell."""
    words = shlex.shlex(line, posix=True, punctuation_chars=True)
    words.whitespace_split, words.commenters = True, ""
    match list(words):
        case ["echo", text, "|", "attnscope", *arguments]:
            stdin = f"{text}\n".encode()
        case ["attnscope", *arguments]:
            stdin = b""
        case _:
            return [], b""
    return [] if any(set(word) <= set("();<>|&") for word in arguments) else arguments, stdin


def quick(lines: Iterable[str]) -> list[str]:
    """The lines that run in this process in little time."""
    return [line for line in lines if typed(line)[0] and not DEAR.search(line)]


def first_of_each(lines: Iterable[str]) -> list[str]:
    """Of each command the first line; `in_a_shell` has all."""
    return list({typed(line)[0][0]: line for line in reversed(list(lines))}.values())[::-1]


def in_a_shell(lines: Iterable[str], slow: tuple[str, ...] = ()) -> list[object]:
    """All lines as parameters that the default selection leaves out; slow: how those begin that take minutes."""
    marks = pytest.mark
    return [pytest.param(line, marks=marks.slow if slow and line.startswith(slow) else marks.e2e) for line in lines]


def makers(line: str, lines: Iterable[str]) -> list[str]:
    """The lines before this one that write the folders which it reads, in their order."""
    earlier = list(takewhile(lambda other: other != line, lines))
    folders = set(re.findall(r"(?<!--out )\bruns/[\w-]+", line))
    return [other for other in earlier if any(f"--out {folder}" in other.split(" && ")[0] for folder in folders)]


def runs_here(line: str, folder: Path) -> None:
    """One plain command runs in this process, in that folder."""
    arguments, stdin = typed(line)
    with contextlib.chdir(folder):
        done = call(*arguments, stdin=stdin).ok()
    _judge(line, folder, done.out.decode(), done.err)


def runs(line: str, folder: Path, first: Path | None = None, **environment: str) -> None:
    """A line runs in a shell, in that folder; first: where `attnscope` is, in the place of what forks."""
    env = os.environ | environment | {"PATH": f"{first or shim()}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "-o", "pipefail", "-c", line]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    _judge(line, folder, done.stdout, done.stderr)


def _judge(line: str, folder: Path, out: str, err: str) -> None:
    assert "check failed" not in err
    assert "Traceback" not in err
    *_, last = re.split(" && ", line)
    target = re.search(r"(?:--out|-o|>) (\S+)", last)
    if target is None:
        assert out
        return
    written = folder / target[1]
    assert any(written.iterdir()) if written.is_dir() else written.stat().st_size > 0
