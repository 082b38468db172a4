"""Numbers that no machine reaches, in every option of every command: one line, or a run."""

from pathlib import Path
from typing import Any, get_args

import pytest

from attnscope.cli.config import convert
from attnscope.cli.option_groups import Parameter, parameters
from attnscope.errors import UsageError
from helpers.command_line import SENTENCE, call
from helpers.commands import COMMANDS, context

NUMBERS = (str(10**20), str(-(10**20)), "0", "nan", "inf", "1e400")
# What each command is given beside the option, so that it costs little.
BESIDE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("heads", "relations", "keys", "text", "rollout", "tokens", "depth"), (SENTENCE,)),
    "draw": (SENTENCE, "--show", "--figures", "overview"),
    "view": (SENTENCE, "--out", "page.html"),
    "explain": (SENTENCE, "--head", "L1H4"),
    "why": (SENTENCE, "--head", "L1H4", "--key", "bank"),
    "batch": ("corpus.txt", "--dry-run"),
    "scan": ("demo", "--dry-run"),
    "ablate": ("demo", "--select", "1.0", "--dry-run"),
    "knockout": (SENTENCE, "--key", "bank", "--dry-run"),
    "patch": ("the bank", "--corrupted", "the field", "--dry-run"),
    "compare": (SENTENCE, "--compare-text", "the muddy bank is on the river"),
    "budgets": (SENTENCE, "--keep", "top:4", "--dry-run"),
    "serve": ("status",),
    "run": ("corpus.txt",),
    "parity": (SENTENCE, "--select", "0"),
    "info": (),
    "metrics": (),
    "doctor": (),
}
FILES = {"file", "ids", "audio", "picture", "texts", "config", "from", "html", "out"}  # which name files


def taken(command: str) -> dict[str, Parameter]:
    """The options and settings of a command that take a value which is no file's, by field."""
    own = parameters(*COMMANDS[command][0].groups).items()
    return {name: one for name, one in own if not one.is_argument and one.metavar and one.key not in FILES}


def is_number(one: Parameter) -> bool:
    """Whether Typer makes a number of what is typed."""
    return bool({int, float} & {one.hint, *get_args(one.hint)}) and not one.info.parser


@pytest.mark.parametrize("command", COMMANDS)
def test_every_number_has_two_ends_and_says_so(command: str) -> None:
    for name, one in taken(command).items():
        if not is_number(one):
            continue
        low, high = one.info.min, one.info.max
        assert None not in (low, high), one.spelled
        for number in NUMBERS:
            if number == "0" and low <= 0:
                continue
            with pytest.raises(UsageError) as refusal:
                convert(
                    context(command, *BESIDE[command]), COMMANDS[command][0].groups, f"--{one.spelled}", name, number
                )
            assert f"--{one.spelled}: expected a " in str(refusal.value)
            assert f"number from {low:,.15g} to {high:,.15g}, got '{number}'" in str(refusal.value)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(one, marks=pytest.mark.e2e if one in ("0", "nan", NUMBERS[0]) else pytest.mark.slow)
        for one in NUMBERS
    ],
)
def test_no_number_is_an_internal_error(number: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Where words are expected, too: there it is a word."""
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text("the river bank\n")
    for command in COMMANDS:
        for one in taken(command).values():
            result = call(command, *BESIDE[command], "-q", *one.words(number))
            assert result.code in (0, 1, 2, 3, 4), (command, one.words(number), result)
            assert result.err.count("\n") <= 1 or result.code == 0
