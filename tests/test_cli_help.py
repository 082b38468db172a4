"""`--help`: plain text in panels, as wide as the terminal."""

import re
from collections import defaultdict

import pytest

from attnscope.cli.app import COMMANDS
from attnscope.cli.groups import parameters
from attnscope.cli.options import PANELS
from helpers.command_line import call


def sections(shown):
    """The options under each heading: {"Options": ["--model", ...]}."""
    found, heading = defaultdict(list), ""
    for line in shown.splitlines():
        if re.fullmatch(r"\S.*:", line):
            heading = line.rstrip(":")
        elif heading and (named := re.match(r"\s+(?:-\w, )?(--[\w-]+)", line)):
            found[heading].append(named[1])
    return found


@pytest.mark.parametrize("columns", ["80", "160"])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_stands_in_panels_at_the_width_of_the_terminal(command, columns):
    shown = call(command, "--help", COLUMNS=columns).out.decode()
    assert call(command, "-h", COLUMNS=columns).out.decode() == shown
    found = sections(shown.partition("  Examples:\n")[0])
    options = [one for one in parameters(*COMMANDS[command][0].groups).values() if one.is_option]
    listed = [name for names in found.values() for name in names]
    assert sorted(listed) == sorted([*(f"--{one.spelled}" for one in options), "--help"])
    assert [name for name in PANELS if name in found] == list(found)
    assert len(found["Options"]) <= 11
    assert all(len(line) <= int(columns) for line in shown.partition("  Examples:\n")[0].splitlines())
    assert "\xa0" not in shown


def test_a_default_is_never_torn():
    for command in COMMANDS:
        shown = call(command, "--help", COLUMNS="80").out.decode()
        assert shown.count("[default: ") == len(re.findall(r"\[default: [^\]\n]+\]", shown))


def test_the_list_of_commands_is_whole_in_80_columns():
    shown = call("--help", COLUMNS="80").out.decode()
    assert "..." not in shown.replace("[ARGS]...", "")
