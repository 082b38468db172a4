"""Settings: what `--set NAME=VALUE` takes, and settings that are typed as options; words that a command lacks."""

import re
from functools import partial

import pytest

from attnscope.cli import run
from attnscope.cli.app import make_command, meant
from attnscope.cli.heads import Ranking
from attnscope.cli.option_groups import SYNONYMS, by_key, parameters
from attnscope.errors import UsageError
from helpers.command_line import SENTENCE, call
from helpers.commands import COMMANDS
from helpers.hints import hints_of_source

USAGE = 2
MOST = 45  # options of a command


def settings(command):
    return {name for name, one in parameters(*COMMANDS[command][0].groups).items() if one.is_setting}


def refused(*arguments):
    result = call(*arguments)
    assert (result.code, result.out) == (USAGE, b"")
    assert result.err.count("\n") == 1
    return result.err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_few_options(command):
    shown = [one for one in make_command(command).params if not getattr(one, "hidden", False)]
    assert len(["--help", *(one for one in shown if one.param_type_name == "option")]) <= MOST
    assert len(shown) <= MOST


def test_a_setting_is_what_it_was_as_an_option(tmp_path):
    heads = ("heads", SENTENCE, "-q", "--sort")
    down, up = (call(*heads, sort).ok().out for sort in ("entropy", "-entropy"))
    assert down != up
    assert call(*heads, "entropy", "--set", "ascending=true").ok().out == up
    assert call(*heads, "entropy", "--set", "ascending=false").ok().out == down
    (tmp_path / "run.yaml").write_text("ascending: true\nsort: entropy\n")
    of_file = ("heads", SENTENCE, "-q", "--config", str(tmp_path / "run.yaml"))
    assert call(*of_file).ok().out == up
    assert call(*of_file, "--set", "ascending=no").ok().out == down


def test_the_last_of_a_name_counts_and_of_what_is_repeated_all():
    tokens = ("tokens", "the river bank", "-q", "--key", "it")
    defined = call(*tokens, "--set", "define=place=bank", "--set", "define=it=place,river").ok()
    assert [row["token"].strip() for row in defined.rows] == ["river", "bank"]
    heads = ("heads", SENTENCE, "-q", "--sort", "entropy")
    both = call(*heads, "--set", "ascending=true", "--set", "ascending=false").ok()
    assert both.out == call(*heads).ok().out


@pytest.mark.parametrize(
    ("option", "setting"),
    [(("--model", "demo"), "model=/no/such"), (("--dpi", "200"), "dpi=200"), (("--no-caption",), "caption=true")],
)
def test_a_value_that_is_given_both_ways_is_refused(option, setting):
    name = setting.partition("=")[0]
    says = f"--{name} and --set {name} were both given; give one of them"
    assert says in refused("heads", SENTENCE, "-q", *option, "--set", setting)
    assert says in refused("heads", SENTENCE, "-q", "--set", setting, *option)


def test_set_gives_options_too():
    assert call("heads", SENTENCE, "-q", "--set", "model=/no/such").code == 3


@pytest.mark.parametrize("command", [name for name in COMMANDS if settings(name)])
def test_each_setting_may_be_typed_as_an_option(command):
    command = make_command(command)
    context = command.make_context("it", ["--no-such"], resilient_parsing=True)
    declared = [one for one in parameters(*command.groups).values() if one.is_setting]
    there = {name: one for one in command.get_params(context) for name in one.opts}
    assert all(there[f"--{one.spelled}"].hidden for one in declared)


def test_a_setting_as_an_option_is_as_set_gives_it(tmp_path):
    heads = ("heads", SENTENCE, "-q", "--sort", "entropy")
    assert call(*heads, "--ascending").ok().out == call(*heads, "--set", "ascending=true").ok().out
    (tmp_path / "run.yaml").write_text("width: wide\n")
    assert call(*heads, "--config", str(tmp_path / "run.yaml")).code == USAGE
    drawn = ("draw", SENTENCE, "-q", "--select", "L1H4", "--config", str(tmp_path / "run.yaml"))
    out = ("--out", str(tmp_path / "head.png"))
    assert call(*drawn, *out).code == USAGE
    assert call(*drawn, "--width", "page", *out).ok()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("heads", "--dpi", "5", "a", "--out", "o"), "--dpi: expected a whole number from 10 to 1,200, got '5'"),
        (("draw", "--width=wide", "a", "--out", "o"), "width: expected column or page, or inches from 1 to 60"),
        (("heads", "a", "--title"), "--title: its value is missing; write --title TITLE"),
        (("batch", "c.jsonl", "--out", "o", "--num-actors", "0"), "--num-actors: expected a whole number from 1 to"),
        (("scan", "demo", "--base", "gpt2"), "demo is no adapter"),
        (("draw", ".", "--out", "o", "--listen"), "--listen does not apply to it"),
        (("heads", "--dpy", "200"), "No such option: --dpy; did you mean --dpi?"),
        (("heads", "--tpo", "3"), "No such option: --tpo; did you mean --top?"),
        (("heads", "--zzzz"), "No such option: --zzzz; `attnscope heads --help all` lists all options"),
    ],
)
def test_what_is_said_of_a_setting_as_an_option(arguments, says):
    assert says in refused(*arguments)


def test_help_is_the_same_where_a_setting_was_typed():
    assert call("heads", "--dpi", "200", "--help").ok().out == call("heads", "--help").ok().out


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("dpy=200", "--set: there is no setting 'dpy'; did you mean --dpi?"),
        ("config=x", "--set: there is no setting 'config'"),
        ("given=x", "--set: there is no setting 'given'"),
        ("=3", "--set: there is no setting ''; the settings are base, task,"),
        ("dpi", "--set dpi: expected NAME=VALUE, got 'dpi'; write --set dpi=VALUE"),
        ("dpi=wide", "--set dpi: expected a whole number from 10 to 1,200, got 'wide'"),
        ("scale=cubic", "--set scale: expected auto, linear, sqrt or log, got 'cubic'; correct the value"),
        ("top=many", "--set top: expected a number from 1, or all, got 'many'; correct the value"),
        ("listen=maybe", "--set listen: expected true or false, got 'maybe'"),
    ],
)
def test_what_set_does_not_take(given, says):
    assert says in refused("heads", SENTENCE, "--set", given)


def test_hyphens_are_taken_for_underscores():
    assert "per_head_scale: expected true or false" in refused("heads", SENTENCE, "--set", "per-head-scale=maybe")


def test_a_range_holds_for_a_setting():
    refusal = refused("batch", "c.jsonl", "--out", "o", "--set", "num_actors=0")
    assert "--set num_actors: expected a whole number from 1 to 10,000, got '0'" in refusal


def test_errors_name_a_setting_as_an_option():
    heads = ("heads", SENTENCE, "--weights", "scores", "--set", "scale=log")
    assert "use --scale linear with --weights scores" in refused(*heads)
    error = UsageError("no", "say {base=FOLDER} or {allow_pickle=True}, leave out {base}, {top=3}")
    assert error.for_shell() == "no; say --base FOLDER or --allow-pickle, leave out --base, --top 3"


HINTS = [  # what `explain` says of each, whose options they mostly are not
    ("use {engine=eager}", "use --engine eager, which `attnscope heads` takes"),
    ("12 tokens fit: shorten the text, or use {engine=fused}", "12 tokens fit: shorten the text"),
    ("give the target with {target=TEXT}, or use {task=encoder}", "use --task encoder"),
    ("use {dtype=float32}; where only scores are too large {engine=fused} reads it", "use --dtype float32"),
    ("leave out {max_tokens} and {truncate}", "leave out --max-tokens and --truncate, which `attnscope batch` takes"),
    ("use {truncate=left} or {truncate=right}", "use --truncate left or --truncate right"),
    ("leave out {max_mb}, or {why}", "leave out --max-mb, or --why, which `attnscope view` takes"),
    ("leave out {change}", "`attnscope explain --help all` lists all options"),  # of Python alone
    ("choose another", "choose another"),
]


@pytest.mark.parametrize(("hint", "says"), HINTS)
def test_a_hint_names_options_that_the_command_has(monkeypatch, capsys, hint, says):
    def refused(*given):
        raise UsageError("no", hint)

    monkeypatch.setattr("attnscope.cli._dispatch", refused)
    assert run(["explain", "the bank"]) == 2
    assert capsys.readouterr().err == f"attnscope: no; {says}\n"


@pytest.mark.e2e
def test_no_hint_of_the_source_names_an_option_that_a_command_lacks(monkeypatch, capsys):
    """Every hint as every command says it: its options are the command's, or those of the one that is named."""
    found = hints_of_source()
    assert len(found) > 100
    options = {
        name: {f"--{one.spelled}" for one in parameters(*make_command(name).groups).values()} for name in COMMANDS
    }
    for hint in sorted(found):
        monkeypatch.setattr("attnscope.cli._dispatch", partial(raised, UsageError("no", hint)))
        for name in COMMANDS:
            run([name])
            said = capsys.readouterr().err.removeprefix("attnscope: no; ").rstrip("\n")
            if said.endswith("lists all options"):
                continue
            other = re.search(r", which `attnscope (\w+)` takes$", said)
            named = set(re.findall(r"(?<![\w`-])--[a-z-]+", said)) - own_words(hint)
            assert named <= options[other[1] if other else name], (name, said)
            assert not said.startswith("--") or hint.startswith("{"), (name, said)


def own_words(hint):
    """The options that a hint names without braces, of a command that it names, too."""
    return set(re.findall(r"--[a-z-]+", hint))


def raised(error, *given):
    raise error


def test_a_group_is_made_without_its_settings():
    assert Ranking(top="3").ascending is False


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("keys", "a", "--key", "last"),
            "--key; it is an option of heads, relations, text, draw and ",
        ),
        (("relations", "a", "--sort", "weight"), "No such option: --sort; it is an option of heads, draw; `attn"),
        (("patch", "a", "--query", "last"), "--query; it is an option of knockout, why, heads, relations and "),
        (("info", "--shard-size", "3"), "No such option: --shard-size; it is an option of batch; `attnscope info"),
        (("heads", "a", "--layer", "3"), "--layer; did you mean --select (Layers and heads: 27, 27.3, L27H3"),
        (("heads", "a", "-layers", "3"), "-layers; did you mean --select ("),
        (("why", "a", "--heads", "1"), "--heads; did you mean --head?"),
        (("info", "--layer", "3"), "--layer; --select is an option of "),
        (
            ("heads", "a", "-n", "3"),
            "--top (Heads printed and drawn: a number, or all (default: 20 printed, in a pipe all; "
            "8 with a role drawn))?",
        ),
        (
            ("compare", "a", "b"),
            "got b too; give the second text with --compare-text, or put a text of several words in",
        ),
        (("heads", "a", "--json"), "--json; did you mean --format jsonl?"),
        (("info", "--json"), "--json; did you mean --format json?"),
        (("heads", "a", "--steps"), "--steps; `attnscope explain` does that; "),
        (("view", "a", "--html", "x"), "--html; did you mean --out (Write the page"),
        (
            ("--quiet", "heads", "a"),
            "--quiet comes before the command; write it after the command: attnscope heads --quiet",
        ),
        (("--verison",), "No such option: --verison; did you mean --version?"),
        (("heads", "a", "-m"), "-m: its value is missing; write -m NAME\n"),
        (("knockout", "a", "--how", "mas"), "--how: expected mask or zero, got 'mas'; did you mean mask?"),
        (("heads", "a", "--set", "layer=3"), "--set: there is no setting 'layer'; did you mean --select ("),
        (("heads", "a", "--set", "font=quantize"), "there is no setting 'font'; the settings are base, task, "),
    ],
)
def test_a_word_that_is_not_there_names_what_was_meant(arguments, says):
    assert says in refused(*arguments)


def test_synonyms_are_of_options_and_commands_and_their_values_are_taken():
    declared = [(key, one) for name in COMMANDS for key, one in by_key(make_command(name).groups).items()]
    for key, _, value in (row.partition("=") for row in SYNONYMS):
        taken = [one.choices for name, one in declared if name == key]
        assert taken or key in COMMANDS, key
        assert not value or any(not some or value in some for some in taken), (key, value)


def test_an_option_of_another_command_is_named_with_it():
    """Whatever one command has and another has not."""
    own = {name: by_key(make_command(name).groups) for name in COMMANDS}
    for name in ("keys", "info"):
        for key in {key for others in own.values() for key in others} - own[name].keys():
            guess = meant(key, own[name], name)
            assert re.search("did you mean|does that|it is an option of", guess)
