"""Every example of every --help is run as it stands."""

import gzip
import re
import sys
import tempfile
from pathlib import Path

import pytest

from helpers.command_line import call
from helpers.commands import COMMANDS
from helpers.corpora import written
from helpers.documented import first_of_each, in_a_shell, quick, runs, runs_here

EXAMPLES = [example for _, examples in COMMANDS.values() for example in examples]
STARTED = [COMMANDS[name][1][-1] for name in ("batch", "heads")]  # the others are forked: nothing else differs
SLOW = ("attnscope ablate demo --select @previous-token --sequences 32", "attnscope scan demo --sequences 32 --out")
QUICK = quick(EXAMPLES)


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


def test_an_example_of_each_command_is_quick():
    assert {re.search(r"attnscope (\w+)", line)[1] for line in QUICK} == set(COMMANDS) - {"serve"}  # which stays


@pytest.mark.parametrize("example", first_of_each(QUICK))
def test_a_quick_example_runs_in_this_process(example, surroundings):
    runs_here(example, surroundings)


@pytest.mark.parametrize("example", in_a_shell(EXAMPLES, slow=SLOW))
def test_an_example_runs(example, surroundings):
    """A server of its own, which is nobody else's."""
    first = Path(sys.executable).parent if example in STARTED else None
    with tempfile.TemporaryDirectory() as sockets:
        runs(example, surroundings, first, XDG_RUNTIME_DIR=sockets)


def test_the_first_help_lists_the_commands():
    shown = call("--help").out.decode()
    for command in COMMANDS:
        assert f"  {command} " in shown
