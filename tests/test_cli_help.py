"""`--help`: plain text as wide as the terminal, the most used options; `--help all`: all of them in panels."""

import re
import shlex
from collections import defaultdict

import pytest

from attnscope.cli import app
from attnscope.cli.help import FEW, WORDS
from attnscope.cli.option_groups import FIRST, parameters
from attnscope.cli.options import PANELS
from helpers.command_line import call
from helpers.commands import COMMANDS, context
from helpers.documented import runs

MOST = 15  # options of a plain --help


def sections(shown):
    """The options under each heading: {"Options": ["--model", ...]}."""
    found, heading = defaultdict(list), ""
    for line in shown.splitlines():
        if re.fullmatch(r"\S.*:", line):
            heading = line.rstrip(":")
        elif heading and (named := re.match(r"  (?:-\w, |    )(--[\w-]+)", line)):
            found[heading].append(named[1])
    return found


NARROWEST = 50  # columns: click writes no narrower


@pytest.mark.parametrize("columns", ["80", "160"])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_stands_in_panels_at_the_width_of_the_terminal(command, columns):
    shown = call(command, "--help", "all", COLUMNS=columns).out.decode()
    assert call(command, "-h", "all", COLUMNS=columns).out.decode() == shown
    assert call("help", command, "all", COLUMNS=columns).out.decode() == shown
    found = sections(shown.partition("  Examples:\n")[0])
    declared = [
        one for one in parameters(*COMMANDS[command][0].groups).values() if not (one.is_argument or one.is_hidden)
    ]
    options = [one for one in declared if not one.is_setting]
    listed = [name for names in found.values() for name in names]
    own = ["--help", *["--set"] * (len(options) < len(declared))]
    assert sorted(listed) == sorted([*(f"--{one.spelled}" for one in options), *own])
    below = shown.partition("\nSettings:\n")[2].partition("  Examples:\n")[0]
    assert re.findall(r"(?m)^      (\w+)=", below) == [one.key for one in declared if one.is_setting]
    assert [name for name in ("Options", *PANELS) if name in found] == list(found)
    assert len(found) <= 5
    assert all(len(names) > 1 for panel, names in found.items() if panel not in ("Options", "Settings"))
    assert len(found["Options"]) <= FEW
    assert "more options" not in shown
    assert all(len(line) <= int(columns) for line in shown.partition("  Examples:\n")[0].splitlines())
    assert "\xa0" not in shown


@pytest.mark.parametrize("columns", ["80", "160"])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_the_most_used_options_and_where_the_others_are(command, columns):
    shown = call(command, "--help", COLUMNS=columns).out.decode()
    assert call(command, "-h", COLUMNS=columns).out.decode() == shown
    everything = call(command, "--help", "all", COLUMNS=columns).out.decode()
    head, examples, _ = shown.partition("  Examples:\n")
    found, known = sections(head), sections(everything.partition("  Examples:\n")[0])
    declared = {f"--{one.spelled}": one for one in parameters(*COMMANDS[command][0].groups).values()}
    assert examples
    assert all(len(line) <= int(columns) for line in head.splitlines())
    if "Options" in known:
        expected = {"Options": known["Options"]}
    else:
        first = {
            panel: [name for name in names if name == "--help" or (name in declared and FIRST in declared[name].extra)]
            for panel, names in known.items()
            if panel not in ("Model and engine", "Settings")
        }
        expected = {panel: names for panel, names in first.items() if names}
        assert 5 <= sum(map(len, expected.values())) <= MOST
    assert found == expected
    named = [name for name in known["Model and engine"] if FIRST in declared[name].extra]
    line = ", ".join(f"-m {name}" if name == "--model" else name for name in named)
    assert (f"\nModel and engine:\n  {line}: attnscope help model\n" in head) == bool(named)
    left = sum(map(len, known.values())) - sum(map(len, found.values())) - len(named)
    assert (f"  {left} more options: attnscope {command} --help all\n" in head) == bool(left)


def test_a_command_says_what_it_asks_before_its_input_and_its_output():
    for command in ("heads", "knockout", "budgets", "relations", "scan"):
        shown = call(command, "--help", COLUMNS="80").out.decode()
        places = [shown.index(f"\n{panel}:\n") for panel in ("What to ask", "Input", "Output", "Model and engine")]
        assert places == sorted(places)
    assert sections(call("budgets", "--help").out.decode())["What to ask"][0] == "--keep"


def test_the_help_of_model_and_engine_has_every_option_of_it():
    shown = call("help", "model", COLUMNS="80").ok().out.decode()
    found = sections(shown)
    for command in ("heads", "serve", "scan", "parity"):
        of_command = sections(call(command, "--help", "all", COLUMNS="80").out.decode().partition("  Examples:\n")[0])
        assert set(of_command["Model and engine"]) <= set(found["Model and engine"])
    assert re.search(r"(?m)^      memory=SIZE ", shown)
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert call("help", "model", "all").ok().out == call("help", "model").out


def test_the_questions_of_the_first_help_are_whole_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = call("--help", COLUMNS="80").out.decode()
    assert len(app.QUESTIONS) == 5
    for question, line in app.QUESTIONS.items():
        assert re.search(rf"(?m)^  {re.escape(question)} +{re.escape(line)}$", shown)
        command, *arguments = shlex.split(line)[1:]
        assert context(command, *arguments).params["given"]
    assert call(*shlex.split(app.QUESTIONS["Which heads see Mary?"])[1:]).ok().rows
    assert call().ok() == call("--help")


@pytest.mark.e2e
@pytest.mark.parametrize("line", app.QUESTIONS.values())
def test_a_question_of_the_first_help_is_answered(line, tmp_path):
    runs(line, tmp_path)


def test_what_people_type_of_heads_is_in_its_help():
    found = sections(call("heads", "--help", COLUMNS="80").out.decode())
    expected = "text file query key select out format top sort"
    assert {f"--{name}" for name in expected.split()} <= {name for names in found.values() for name in names}


def test_all_is_a_text_too():
    assert call("tokens", "all", "-q").code == 0
    assert call("tokens", "--text", "--help", "all").code == 2  # a text that was given twice, not help


def test_a_default_is_never_torn():
    for command in COMMANDS:
        shown = call(command, "--help", "all", COLUMNS="80").out.decode()
        assert shown.count("[default: ") == len(re.findall(r"\[default: [^\]\n]+\]", shown))


def test_the_list_of_commands_is_whole_in_80_columns():
    for columns in ("80", "120"):
        shown = call("--help", COLUMNS=columns).out.decode()
        assert "..." not in shown.replace("[ARGS]...", "")
        assert all(f"  {row.summary}\n" in shown for row in app.COMMANDS.values())


@pytest.mark.parametrize("command", COMMANDS)
def test_the_list_says_of_a_command_what_its_own_help_says_first(command):
    """The list is made without importing the commands."""
    docstring = COMMANDS[command][0].__doc__
    assert app.COMMANDS[command].summary == docstring.splitlines()[0]
    assert f"\n  {docstring.splitlines()[0]}\n" in call(command, "--help", COLUMNS="120").out.decode()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_before_a_command_is_help_behind_it(command):
    assert call("help", command) == call(command, "--help")
    assert call("help", command, "all") == call(command, "--help", "all")


@pytest.mark.parametrize(("other", "command"), app.OTHER_NAMES.items())
def test_another_name_of_a_command_means_the_command(other, command):
    assert call(other, "--help").ok() == call(command, "--help")
    assert call("help", other, "all").ok() == call("help", command, "all")
    assert f"  {other} " not in call("--help").out.decode()
    said = [call(name, "--no-such").refusal for name in (other, command)]
    assert said[0] == said[1]
    assert [call(name, "-m").refusal for name in (other, command)] == [call(command, "-m").refusal] * 2
    assert call("--quiet", other).refusal == call("--quiet", command).refusal


def test_help_alone_and_of_nothing():
    assert call("help") == call("--help")
    assert "No such command 'hedas'; did you mean 'heads'?" in call("help", "hedas").err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("plot", "a"), "No such command 'plot'; did you mean draw?; `attnscope --help`"),
        (("status",), "No such command 'status'; did you mean serve?; "),
        (("help", "keep"), "No such command 'keep'; --keep is an option of budgets; "),
        (
            ("min-weight",),
            "No such command 'min-weight'; --min-weight is an option of heads, relations, rollout, batch; ",
        ),
        (("xyzzy",), "No such command 'xyzzy'; `attnscope --help`"),
    ],
)
def test_a_word_that_is_no_command_names_what_was_meant(arguments, says):
    assert says in call(*arguments).refusal


def test_the_version_has_a_short_flag():
    assert call("-V") == call("--version")


@pytest.mark.parametrize("command", COMMANDS)
def test_what_stands_for_a_value_says_what_it_is(command):
    """`METRIC`, `png|svg|pdf`; not the `<str>` that stands where nobody said."""
    shown = call(command, "--help", "all", COLUMNS="120").out.decode()
    assert not re.findall(r"<[\w ]+>", shown)


@pytest.mark.parametrize("columns", ["40", "80", "160"])
@pytest.mark.parametrize("command", COMMANDS)
def test_examples_break_at_blanks_and_are_still_what_a_shell_reads(command, columns):
    shown = call(command, "--help", COLUMNS=columns).out.decode().partition("  Examples:\n")[2]
    joined = re.sub(r" \\\n +", " ", shown)
    assert all(f"    {example}\n" in joined for example in COMMANDS[command][1])
    longest = max(len(word) for example in COMMANDS[command][1] for word in WORDS.findall(example))
    lines = shown.partition("\n\n")[0].splitlines()
    assert max(map(len, lines)) <= max(int(columns), NARROWEST, longest + 10)


def test_a_command_has_both_names_of_help_wherever_it_is_first_called():
    """It keeps the option of the first context, which may have no list of commands above it."""
    command = app.make_command.__wrapped__("info")
    alone = command.make_context("info", [], resilient_parsing=True)
    assert sorted(command.get_help_option(alone).opts) == ["--help", "-h"]
