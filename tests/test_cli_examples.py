"""Every example of every --help is run as it stands."""

import gzip
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from helpers.command_line import HANGS, call
from helpers.commands import COMMANDS
from helpers.corpora import written
from helpers.forks import shim

EXAMPLES = [example for _, examples in COMMANDS.values() for example in examples]
STARTED = [COMMANDS[name][1][-1] for name in ("batch", "heads")]  # the others are forked: nothing else differs
SLOW = ("attnscope ablate demo --select @previous-token --sequences 32", "attnscope scan demo --sequences 32 --out")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_two_examples(command):
    result = call(command, "--help").silent()
    shown = re.sub(r" \\\n +", " ", result.out.decode().replace("\r", ""))
    examples = COMMANDS[command][1]
    assert len(examples) >= 2
    for example in examples:
        assert f"\n    {example}\n" in shown + "\n"
        assert f"attnscope {command} " in example + " "


@pytest.fixture
def surroundings(tmp_path):
    """What the examples find where they are typed: a readme and small corpora."""
    lines = ["The river bank is green.", "The old boat lies still."]
    (tmp_path / "README.md").write_text("\n".join(lines * 80))
    written(tmp_path / "corpus.jsonl", ({"body": line} for line in lines))
    written(tmp_path / "facts.jsonl", ({"text": line, "key": "1"} for line in lines))
    written(tmp_path / "pairs.jsonl", ({"text": line, "corrupted": line.replace("river", "old")} for line in lines))
    (tmp_path / "corpus.txt.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return tmp_path


@pytest.fixture
def own_server():
    """The environment in which a server is nobody else's; the path of a socket has to be short."""
    with tempfile.TemporaryDirectory() as folder:
        yield {"XDG_RUNTIME_DIR": folder}


@pytest.mark.parametrize(
    "example", [pytest.param(one, marks=pytest.mark.slow) if one.startswith(SLOW) else one for one in EXAMPLES]
)
def test_an_example_runs(example, surroundings, own_server):
    first = Path(sys.executable).parent if example in STARTED else shim()
    env = os.environ | own_server | {"PATH": f"{first}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "-c", example]
    done = subprocess.run(command, cwd=surroundings, env=env, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    target = re.search(r"(?:--out|>) (\S+)", example)
    if target is None:
        assert done.stdout
        return
    written = surroundings / target[1]
    assert any(written.iterdir()) if written.is_dir() else written.stat().st_size > 0


def test_the_first_help_lists_the_commands():
    shown = call("--help").out.decode()
    for command in COMMANDS:
        assert f"  {command} " in shown
