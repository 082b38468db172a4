"""What goes where: data to stdout, talk to stderr, colour to terminals, and a clean end however it comes."""

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import attnscope
from attnscope.cli import output
from attnscope.cli.option_groups import parameters
from attnscope.model.loading import DEMO_FOLDER
from attnscope.utils import signals
from helpers.command_line import ATTNSCOPE, HANGS, SENTENCE, call, on_terminal, spawn, start, tree
from helpers.commands import COMMANDS
from helpers.forks import Forked, forked, shim
from helpers.rows import json_lines

ESCAPE = "\x1b"
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
LONG = "the bank is on the river and the cat sat by it. " * 40
CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


def rows_of(data, delimiter=","):
    """The rows of CSV, the header first."""
    return list(csv.reader(io.StringIO(data.decode(), newline=""), delimiter=delimiter))


# stdout is data, stderr is talk


@pytest.mark.parametrize("run", [spawn, pytest.param(start, marks=pytest.mark.e2e)])
def test_a_pipe_gets_csv_and_the_talk_goes_to_stderr(run):
    result = run("heads", "--text", SENTENCE).ok()
    header, *body = rows_of(result.out)
    assert header[:4] == ["layer", "head", "kv_head", "role"]
    assert len(body) == 24
    assert {len(row) for row in body} == {len(header)}
    assert result.err.startswith("demo  cpu  float32  4 layers x 6 heads (3 kv)  ")
    assert ESCAPE not in result.out.decode() + result.err


@pytest.mark.parametrize("command", ["heads", "relations"])
def test_quiet_is_silent(command):
    assert call(command, "--text", SENTENCE, "--quiet").silent().rows


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_can_be_quiet(command):
    assert "quiet" in parameters(*COMMANDS[command][0].groups)


@pytest.mark.parametrize("quiet", ["-q", "--quiet"])
def test_facts_without_messages(quiet):
    for command in ("metrics", "doctor"):
        assert call(command, quiet).silent().out


@pytest.mark.parametrize("command", [("run",), ("serve", "--run")])
def test_a_file_of_commands_is_quiet_as_each_of_them(command):
    lines = f"tokens '{SENTENCE}'\nhelp metrics\nattnscope keys '{SENTENCE}' --top 1\n".encode()
    spoken, silent = (call(*command, "-", *quiet, stdin=lines).ok() for quiet in ((), ("--quiet",)))
    assert silent.silent().out == spoken.out
    assert spoken.err


@pytest.mark.parametrize("command", ["heads", "relations"])
def test_every_format_holds_the_same_table(command):
    def data(format):
        return call(command, "--text", SENTENCE, "--format", format).out

    expected = rows_of(data("csv"))
    assert rows_of(data("tsv"), "\t") == expected
    columns, *values = expected
    for found in (
        json_lines(data("jsonl")),
        pq.read_table(io.BytesIO(data("parquet"))).to_pylist(),
        pa.ipc.open_stream(data("arrow")).read_all().to_pylist(),
    ):
        assert [list(row) for row in found] == [columns] * len(values)
        for row, cells in zip(found, values, strict=True):
            for value, cell in zip(row.values(), cells, strict=True):
                number = isinstance(value, float)
                assert (
                    (float(cell) == pytest.approx(value, rel=1e-6))
                    if number
                    else (cell == ("" if value is None else str(value)))
                )


@pytest.mark.parametrize(("format", "delimiter"), [("csv", ","), ("tsv", "\t")])
def test_tokens_come_through_exactly(format, delimiter):
    text = 'say "yes, no",\n\tthen: end'
    result = call("relations", "--text", text, "--top-k", "1", "--select", "0.0", "--format", format, "-q")
    header, *body = rows_of(result.out, delimiter)
    tokens = [row[header.index("query_token")] for row in body]
    assert "".join(tokens).removeprefix("<s>") == text
    assert any("\n" in token for token in tokens)


@pytest.mark.parametrize(
    "environment",
    [{}, {"NO_COLOR": "1"}, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, {"FORCE_COLOR": ""}, {"COLORTERM": "truecolor"}],
    ids=str,
)
def test_a_table_in_a_pipe_is_plain_text(environment):
    result = call("heads", "--text", SENTENCE, "--format", "table", **environment).ok()
    assert ESCAPE not in result.out.decode() + result.err
    assert "→" in result.out.decode()


def test_a_table_in_a_pipe_for_less_has_the_colours_and_the_width_that_are_asked_for():
    plain, wide = (call("heads", "--text", SENTENCE, "--format", "table", COLUMNS=width) for width in ("90", "0"))
    lines = plain.out.decode().splitlines()
    assert 40 < max(map(len, lines)) <= 90 < max(map(len, wide.out.decode().splitlines()))
    coloured = call("heads", "--text", SENTENCE, "--format", "table", COLUMNS="90", FORCE_COLOR="1")
    assert COLOUR.search(coloured.out.decode())
    assert CODES.sub("", coloured.out.decode()).splitlines() == lines
    assert coloured.err == plain.err


def test_a_locale_without_arrows_still_gets_its_table(tmp_path):
    script = tmp_path / "ascii.py"
    script.write_text(
        "import sys, attnscope.cli as cli\n"
        "sys.stdout.reconfigure(encoding='ascii', errors='strict')\n"
        "cli.main(sys.argv[1:])"
    )
    done = forked(script, "heads", "--text", SENTENCE, "--format", "table")
    assert (done.returncode, r"\u2192" in done.stdout) == (0, True), done.stderr


@pytest.mark.e2e
def test_a_locale_without_arrows_from_the_start():
    result = start("heads", "--text", SENTENCE, "--format", "table", PYTHONIOENCODING="ascii", PYTHONUTF8="0").ok()
    assert rb"\u2192" in result.out


# a terminal


@pytest.mark.parametrize("columns", [80, *(pytest.param(wider, marks=pytest.mark.e2e) for wider in (120, 200))])
@pytest.mark.parametrize(
    "command",
    [
        ("heads", "--text", SENTENCE),
        ("relations", "--text", "an internationalisation of counterrevolutionaries, " * 2, "--group", "words"),
        ("info", "demo"),
        ("metrics",),
    ],
    ids=lambda command: command[0],
)
def test_a_terminal_gets_a_table_that_fits(command, columns):
    result = call(*command, columns=columns).ok()
    lines = CODES.sub("", result.out.decode()).splitlines()
    assert 40 < max(len(line.rstrip()) for line in lines) <= columns
    if command[0] == "heads":
        body = [line for line in lines if re.match(r"\s*L\d+H\d+ ", line)]
        assert len(body) == 20
        assert all("→" in line for line in body)
    if command[0] == "relations":
        body = lines[3:-1]
        assert len(body) == 40
        assert all(re.match(r"\s*L\d+H\d+\s", line) and re.search(r"\s\d\.\d{3}\s*$", line) for line in body)


def related(*flags, columns=200):
    """What `relations` shows on a terminal: (query, key) and weight of every row, and what is said."""
    result = call("relations", "--text", SENTENCE, *flags, columns=columns).ok()
    lines = [line.split() for line in CODES.sub("", result.out.decode()).splitlines()]
    body = [cells for cells in lines if cells and re.fullmatch(r"L\d+H\d+", cells[0])]
    return [((int(cells[2]), int(cells[4])), float(cells[-1].lstrip("<"))) for cells in body], result.err


@pytest.mark.parametrize("columns", [80, 200])
def test_a_terminal_has_the_strongest_relations_without_those_that_every_token_has(columns):
    found, said = related(columns=columns)
    assert len(found) == 40
    assert [weight for _, weight in found] == sorted((weight for _, weight in found), reverse=True)
    assert all(key not in (0, query) for (query, key), _ in found)
    every = call("relations", "--text", SENTENCE, "-q").rows
    others = [float(row["weight"]) for row in every if row["key"] not in ("0", row["query"])]
    assert [weight for _, weight in found] == [round(one, 3) for one in sorted(others, reverse=True)[:40]]
    assert f"40 of {len(others)} rows; --top N" in said
    left_out = len(every) - len(others)
    last = said.splitlines()[-1]
    assert last.startswith(f"{left_out} rows ")
    assert "; --all-keys " in last


RIVER = "the bank of the river, the bank of the"
FIELD = ("--corrupted", "the bank of the field, the bank of the")
LISTING = {
    "heads": [("heads", SENTENCE, "--sort", "entropy")],
    "relations": [("relations", SENTENCE, "--over", "heads"), ("relations", SENTENCE, "--over", "none")],
    "keys": [("keys", SENTENCE)],
    "rollout": [("rollout", SENTENCE)],
    "compare": [("compare", SENTENCE, "--compare-text", "the old bank is located on river bank")],
    "scan": [("scan", "demo", "--sequences", "2", "--probe", "offset 1")],
    "ablate": [
        ("ablate", "demo", "--sequences", "2", "--random", "0", "--select", "3.0-1,1.5", "--pairs"),
        ("ablate", "demo", "--sequences", "2", "--random", "0", "--select", "3.0-1"),
    ],
    "knockout": [("knockout", RIVER, "--key", "river", "--over", "heads", "--random", "0")],
    "budgets": [("budgets", RIVER, "--keep", "stream:1+2", "--over", "heads")],
    "patch": [("patch", RIVER, *FIELD, "--over", "heads", "--select", "2-3")],
    "why": [("why", RIVER, "--head", "L3H0", "--key", "river")],
    "depth": [("depth", RIVER)],
}
SLOW = ("scan", "ablate")
GROUPED = (*SLOW, "depth")  # whose rows in a pipe are several of one name


def listing(command):
    return pytest.param(command, id=" ".join(command), marks=[pytest.mark.e2e] * (command[0] in SLOW))


def names_of(row):
    """What a terminal calls a row: a set, a component, a head or a token."""
    for name in ("set", "component"):
        if name in row:
            return row[name]
    if "use" in row:
        return f"L{row['layer']}" if row["layer"] else row["use"]
    if "layer" in row:
        return f"L{row['layer']}H{row['head']}"
    return row["position"] if "position" in row else row["query"]


@pytest.mark.parametrize("command", [listing(one) for each in LISTING.values() for one in each])
def test_top_is_a_limit_in_a_pipe_too_and_rows_stand_as_on_a_terminal(command):
    whole, first = (call(*command, *flags, "-q").ok().rows for flags in ((), ("--top", "2")))
    names = list(map(names_of, first))
    if command[0] in GROUPED and "--pairs" not in command:  # so many sets or heads, each with its rows
        names = list(dict.fromkeys(names))
        assert first == [row for row in whole if names_of(row) in names]
    else:
        assert first == whole[:2]
    assert (len(names), len(whole) > len(first)) == (2, True)
    lines = call(*command, "--top", "2", "--format", "table", "-q", columns=200).lines
    rule = next(place for place, line in enumerate(lines) if "──" in line)
    assert [f" {name} " in f" {line} " for name, line in zip(names, lines[rule + 1 :], strict=False)] == [True, True]


def test_a_pipe_with_top_all_has_the_relations_of_a_terminal():
    every, most = (call("relations", SENTENCE, "-q", "--top", top).ok().rows for top in ("all", "99999"))
    assert every == most
    assert len(every) < len(call("relations", SENTENCE, "-q").ok().rows)
    assert every[0] == call("relations", SENTENCE, "-q", "--top", "1").ok().rows[0]


def test_every_command_with_top_is_among_them():
    having = {name for name, (command, _) in COMMANDS.items() if "top" in parameters(*command.groups)}
    assert having - {"draw"} == LISTING.keys()  # draw prints paths, and draws so many heads


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--all-keys", "--top", "1"), {(0, 0)}),
        (("--query", "first"), {(0, 0)}),
        (("--query", "last", "--key", "first"), {(8, 0)}),
        (("--query", "last", "--key", "last"), {(8, 8)}),
        (("--over", "none", "--top", "1"), {(0, 0)}),
    ],
    ids=str,
)
def test_what_is_asked_for_is_not_left_out_on_a_terminal(flags, expected):
    found, said = related(*flags)
    assert {place for place, _ in found} == expected
    assert "--all-keys" not in said


@pytest.mark.parametrize("fork", [True, pytest.param(False, marks=pytest.mark.e2e)], ids=["forked", "started"])
def test_a_real_terminal_has_a_table_and_progress_bars_that_go_away(fork):
    code, shown = on_terminal(["heads", "--text", SENTENCE], 100, fork=fork)
    assert code == 0
    body = [line for line in CODES.sub("", shown).splitlines() if re.match(r"\s*L\d+H\d+ ", line)]
    assert len(body) == 20
    assert max(map(len, body)) <= 100
    assert COLOUR.search(shown)
    assert "loading demo" in shown
    assert re.search(r"forward pass over \d+ tokens .* 4/4 layers ", CODES.sub("", shown))
    assert "\x1b[2K" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") > 0


def test_a_stage_calls_a_model_by_its_folder_which_fits_a_terminal():
    done = call("heads", "--model", str(DEMO_FOLDER), "--text", SENTENCE, ATTNSCOPE_STAGES="json").ok()
    stages = {json.loads(line)["stage"] for line in done.err.splitlines() if line.startswith("{")}
    assert f"loading {DEMO_FOLDER.name}" in stages


def test_a_quiet_terminal_has_no_bars_and_one_without_colour_no_colours():
    _, shown = on_terminal(["heads", "--text", SENTENCE, "--quiet"], 100, NO_COLOR="1")
    assert "strongest relation" in shown
    assert "loading demo" not in shown
    assert not COLOUR.search(shown)


@pytest.mark.parametrize(
    "arguments",
    [
        ("heads", "--text", SENTENCE, "-q", "--sort", "inducton"),
        ("heads", "--text", SENTENCE, "--no-such-option"),
        ("heads", "--text", SENTENCE, "--select", "0.0"),
    ],
    ids=lambda arguments: arguments[-1],
)
def test_what_is_said_on_a_terminal_breaks_between_words(arguments):
    """The words are those of a pipe; no line is as long as the terminal lets it be before it breaks a word."""
    _, shown = on_terminal([*arguments, "--format", "csv"], 44, NO_COLOR="1")
    said = call(*arguments, "--format", "csv").err
    text = " ".join(CODES.sub("", shown).split())
    assert " ".join(said.splitlines()[-1].split()) in text
    lines = [line for line in CODES.sub("", shown).splitlines() if "," not in line]
    assert max(len(line.rpartition("\r")[2]) for line in lines) <= 44


def test_what_is_said_on_a_terminal_of_no_size_is_one_line():
    arguments = "heads", "--text", SENTENCE, "--sort", "inducton"
    _, shown = on_terminal(arguments, 0, NO_COLOR="1")
    assert call(*arguments).err.splitlines()[-1] in shown.splitlines()


def test_the_noise_of_libraries_needs_verbose(tmp_path):
    """Two commands, forked from one process that has imported the libraries."""
    noisy = "import warnings, transformers.utils.logging as t; warnings.warn('noise'); t.get_logger().warning('noise')"
    script = tmp_path / "noisy.py"
    script.write_text(
        "import os, sys, torch, transformers, attnscope.cli as cli, attnscope.model.loading as models\n"
        "load = models.load\n"
        f"models.load = lambda options: (exec({noisy!r}), load(options))[1]\n"
        "if os.fork() == 0:\n"
        "    cli.main(sys.argv[1:])\n"
        "assert os.wait()[1] == 0\n"
        "os.write(2, b'second')\n"
        "cli.main([*sys.argv[1:], '--verbose'])"
    )
    done = forked(script, "heads", "--text", SENTENCE)
    assert done.returncode == 0
    first, second = done.stderr.split("second")
    assert "noise" not in first
    assert "noise" in second


# readers that leave, disks that are full, streams that are closed


def program(fork):
    """What a shell calls: an `attnscope` that is forked, or one that is started, imports and all."""
    return str(shim() / "attnscope") if fork else " ".join(ATTNSCOPE)


@pytest.mark.parametrize(
    ("format", "fork"),
    [("csv", True), *(pytest.param(*one, marks=pytest.mark.e2e) for one in (("parquet", True), ("csv", False)))],
)
def test_head_ends_it_silently(tmp_path, format, fork):
    (tmp_path / "long.txt").write_text(LONG)
    attnscope = program(fork)
    asked = f"relations -f long.txt --truncate right --top-k all --select 0.0 -q --format {format}"
    line = f"{attnscope} {asked} | head -c 50 | wc -c"
    done = subprocess.run(
        ["bash", "-c", line + '; echo "${PIPESTATUS[@]}"'], cwd=tmp_path, capture_output=True, text=True, timeout=HANGS
    )
    assert done.stdout.split() == ["50", "0", "0", "0"]
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("line", "code", "out", "err"),
    [
        ("metrics >&-", "0", "", ""),
        ("metrics 2>&-", "0", "id,", ""),
        pytest.param("heads --text 'a bank' -q --select 0.0 2>&-", "0", "layer", "", marks=pytest.mark.e2e),
        ("hedas >&- 2>&-", "2", "", ""),
        pytest.param("view 'a bank' -q --out page.html <&- >&- 2>&-", "0", "", "", marks=pytest.mark.e2e),
        pytest.param("metrics >/dev/full", "2", "", "No space left on device", marks=pytest.mark.e2e),
        ("--help >/dev/full", "2", "", "No space left on device"),
        ("relations --text 'a bank' -q >/dev/full", "2", "", "No space left on device"),
    ],
)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full device is a Linux thing")
def test_streams_that_are_closed_or_full(tmp_path, line, code, out, err):
    command = ["bash", "-c", f"{program(fork=line.startswith('relations'))} {line}; echo $? >&9"]
    reading, writing = os.pipe()
    done = subprocess.run(
        ["bash", "-c", 'exec 9>&"$1"; shift; "$@"', "bash", str(writing), *command],
        pass_fds=[writing], cwd=tmp_path, capture_output=True, text=True, timeout=HANGS,
    )  # fmt: skip
    os.close(writing)
    with os.fdopen(reading) as ends:
        assert ends.read().strip() == code
    assert done.stdout.startswith(out) if out else done.stdout == ""
    assert err in done.stderr if err else done.stderr == ""
    assert done.stderr.count("\n") <= 1


def test_no_file_that_is_opened_takes_the_place_of_a_closed_stream():
    """Else what a library in C writes to its stderr goes into that file."""
    code = "import os\nfor n in range(3): os.close(n)\nfrom attnscope.cli import _mend_streams\n_mend_streams()\n"
    code += f"os._exit(os.open({__file__!r}, os.O_RDONLY) <= 2)"
    assert subprocess.run([sys.executable, "-c", code], timeout=HANGS).returncode == 0


# signals


def stop(arguments, number, ready, cwd):
    """Start a command, send it a signal once `ready()` says so; how it ended, and what it said."""
    process = Forked(arguments, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not ready() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(HANGS)
    with pytest.raises(ProcessLookupError):  # nobody of its group is left
        os.killpg(process.pid, 0)
    return process.returncode, out, err.decode()


INTERRUPTED, TERMINATED = (signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")


def each_once(one, other):
    """Either signal at either place: by default the first at one, the second at the other."""
    rest = [
        pytest.param(*INTERRUPTED, other, marks=pytest.mark.e2e),
        pytest.param(*TERMINATED, one, marks=pytest.mark.e2e),
    ]
    return [(*INTERRUPTED, one), (*TERMINATED, other), *rest]


@pytest.mark.parametrize(("number", "code", "word", "module"), each_once(b"typer", b"torch."))
def test_a_signal_while_it_loads(number, code, word, module):
    """Python says what it imports: typer comes soon after the handlers, and parts of torch while torch is imported."""
    process = subprocess.Popen(
        [*ATTNSCOPE, "heads", "--text", SENTENCE, "-q"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=os.environ | {"PYTHONPROFILEIMPORTTIME": "1"},
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert any(line.rpartition(b"|")[2].strip().startswith(module) for line in process.stderr)
    process.send_signal(number)
    out, err = process.communicate(timeout=HANGS)
    talk = [line for line in err.decode().splitlines() if not line.startswith("import time:")]
    assert (process.returncode, out, talk) == (code, b"", [f"attnscope: {word}"])
    with pytest.raises(ProcessLookupError):  # nobody of its group is left
        os.killpg(process.pid, 0)


@pytest.mark.parametrize(("number", "code", "word", "written"), each_once("heads.csv", "heads/L00H02.svg"))
def test_a_signal_while_it_writes_leaves_no_half_file(tmp_path, number, code, word, written):
    drawn = ["--select", "*.*", "--image", "svg", "--figures", "heads"]
    arguments = ["heads", "--text", SENTENCE, "-q", "--out", "runs", *drawn]
    ended = stop(arguments, number, lambda: (tmp_path / "runs" / written).exists(), tmp_path)
    assert ended == (code, b"", f"attnscope: {word}\n")
    names = [path.name for path in (tmp_path / "runs").rglob("*")]
    assert written.rpartition("/")[2] in names
    assert "manifest.json" not in names
    assert not [name for name in names if name.startswith(".") or name.endswith(".tmp")]
    for path in (tmp_path / "runs").rglob("*.svg"):
        assert path.read_text().rstrip().endswith("</svg>")


@pytest.mark.e2e
def test_ctrl_c_of_a_terminal_reaches_the_workers_too(tmp_path):
    drawn = ["--select", "*.*", "--image", "svg", "--figures", "heads"]
    arguments = ["heads", "--text", LONG, "--truncate", "right", "-q", "--out", "runs", *drawn]
    process = Forked(arguments, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not (tmp_path / "runs" / "heads").exists() and process.poll() is None:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(HANGS)[1] == b"attnscope: interrupted\n"
    assert process.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert not [name for name, _ in tree(tmp_path) if "/." in name or name.endswith(".tmp")]


def test_a_signal_that_a_callback_swallowed_comes_again():
    script = """
import os, signal, time, weakref
from attnscope.utils import signals

class Thing: pass

def swallow(_):
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(1000): pass

signals.listen()
thing = Thing()
watched = weakref.ref(thing, swallow)
try:
    with signals.unwinding():
        del thing
        time.sleep(600)
except signals.Stopped as stopped:
    print("stopped", stopped.number)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANGS)
    assert (done.stdout, done.stderr) == ("stopped 15\n", "")


def test_a_signal_that_a_library_swallowed_ends_the_next_step():
    """Compiled code may clear what a handler raised, and go on as if nothing had come."""
    done = []

    def swallow():
        with suppress(signals.Stopped):
            signals._stop(signal.SIGTERM, None)

    def work():
        with signals.unwinding(), output.progress("drawing", 3, quiet=True) as advance:
            for step in (lambda: None, swallow, lambda: None):
                step()
                advance(1)
                done.append(step)

    def last():
        with signals.unwinding():
            swallow()

    with pytest.raises(signals.Stopped):
        work()
    assert len(done) == 1
    with pytest.raises(signals.Stopped):
        last()
    with signals.unwinding():  # what came to one piece of work does not end another
        signals.again()


def test_an_ignored_interrupt_stays_ignored():
    script = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from attnscope.utils import signals; signals.listen()\n"
        "assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN\n"
        "assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=HANGS).returncode == 0


def test_stopped_becomes_the_exit_code(monkeypatch):
    def stopped(asked):
        raise signals.Stopped(signal.SIGTERM)

    monkeypatch.setattr(output, "wanted_format", stopped)
    result = call("heads", "--text", SENTENCE)
    assert (result.code, result.err) == (143, "attnscope: terminated\n")


def test_a_signal_of_which_compiled_code_made_another_error(monkeypatch):
    def swallowed(asked):
        with pytest.raises(signals.Stopped), signals.unwinding():
            signals._stop(signal.SIGTERM, None)
        raise ValueError("Invalid affine transformation matrix")

    monkeypatch.setattr(signals, "_arrived", None)
    monkeypatch.setattr(output, "wanted_format", swallowed)
    result = call("heads", "--text", SENTENCE)
    assert (result.code, result.err) == (143, "attnscope: terminated\n")


# what should not happen


def fail(monkeypatch, error):
    def broken(asked):
        raise error

    monkeypatch.setattr(output, "wanted_format", broken)


def test_a_bug_is_one_line_and_verbose_shows_where(monkeypatch):
    fail(monkeypatch, ZeroDivisionError("a bug\nof two lines"))
    result = call("heads", "--text", SENTENCE)
    assert (result.code, result.out, result.err.count("\n")) == (70, b"", 1)
    assert "ZeroDivisionError: a bug" in result.err
    assert "--verbose" in result.err
    verbose = call("heads", "--text", SENTENCE, "--verbose")
    assert verbose.code == 70
    assert verbose.err.startswith("Traceback (most recent call last)")
    assert verbose.err.endswith(result.err)


@pytest.mark.parametrize(
    "error", [EOFError("a bug"), KeyError("a"), AssertionError(), TimeoutError("a bug"), SystemError()]
)
def test_every_kind_of_bug_is_internal(monkeypatch, error):
    fail(monkeypatch, error)
    result = call("heads", "--text", SENTENCE)
    assert result.code == 70
    assert type(error).__name__ in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried ..."),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
)
def test_out_of_memory_says_what_fits(monkeypatch, error):
    def full(*_, **__):
        raise error

    monkeypatch.setattr("attnscope.observe.run.observe", full)
    result = call("heads", "--text", SENTENCE, "--quiet")
    tokens = len(SENTENCE.split())
    said = re.fullmatch(r"attnscope: .* cpu .*\b(\d+) tokens .*; (\d+) tokens fit: .*\n", result.err)
    assert (result.code, result.out) == (5, b"")
    assert said
    assert int(said[1]) >= tokens
    assert int(said[2]) == int(said[1]) // 2
    fail(monkeypatch, error)
    assert call("heads", "--text", SENTENCE).code == 5


def test_a_text_too_large_is_refused_before_the_forward_pass(monkeypatch):
    monkeypatch.setattr("attnscope.observe.engine_choice.SURELY_FITS", 0)
    monkeypatch.setattr("attnscope.observe.engine_choice.free_memory", lambda device: 1000)
    result = call("heads", "--text", SENTENCE, "--engine", "eager")
    assert (result.code, result.out) == (5, b"")
    assert re.search(r"eager .*\d+ tokens .*cpu has 1000 bytes.*; \d+ tokens fit.*or use --engine fused\n", result.err)
    explained = call("explain", "--text", SENTENCE, "--head", "L2H0")  # which has no other engine
    assert re.search(r"; \d+ tokens fit: shorten the text\n$", explained.err)
    with pytest.raises(attnscope.AttnscopeError, match=r"; \d+ tokens fit: shorten the text$"):
        attnscope.explain(attnscope.load("demo"), SENTENCE, "L2H0")


def test_a_disk_that_fills_up_while_writing(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device", "heads.csv")

    monkeypatch.setattr("attnscope.utils.files.os.replace", full)
    result = call("heads", "--text", SENTENCE, "--quiet", "--out", str(tmp_path / "runs"))
    assert (result.code, result.out) == (2, b"")
    assert "heads.csv: No space left on device" in result.err
    assert result.err.count("\n") == 1
    assert [name for name, _ in tree(tmp_path)] == ["runs"]


def test_a_folder_that_was_removed_is_named_and_help_is_not_refused(tmp_path, monkeypatch):
    """Whatever the command: it said that standard output cannot be written, or PyTorch ended the process."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for words in (("heads", "the bank"), ("scan", "demo", "--dry-run"), ("doctor",)):
        assert call(*words).refusal == (
            "attnscope: the folder that this shell is in was removed; change to another, for example: cd ~"
        )
    assert call("heads", "--help").code == 0


def test_a_folder_whose_name_is_not_utf8(tmp_path):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    result = call("draw", "--text", "a bank", "-q", "--out", folder).ok()
    assert result.out.splitlines()[0] == os.fsencode(folder) + b"/overview.png"
    assert json.loads((Path(folder) / "manifest.json").read_text())["options"]["out"] == folder


# configuration files


def test_a_configuration_is_used_and_flags_win(tmp_path):
    (tmp_path / "run.yaml").write_text(f"text: {SENTENCE}\nselect: '1'\nformat: jsonl\nquiet: true\nsort: entropy\n")
    config = ("--config", str(tmp_path / "run.yaml"))
    plain = call("heads", *config)
    assert plain.err == ""
    found = plain.records
    assert {row["layer"] for row in found} == {1}
    assert [row["entropy"] for row in found] == sorted((row["entropy"] for row in found), reverse=True)
    flagged = call("heads", *config, "--select", "0.1", "--format", "csv", "--sort", "focus")
    assert [(row["layer"], row["head"]) for row in flagged.rows] == [("0", "1")]


def test_the_text_of_a_flag_wins_over_the_file_of_a_configuration(tmp_path):
    (tmp_path / "absent.yaml").write_text("file: absent.txt\n")
    assert call("heads", "--config", str(tmp_path / "absent.yaml")).code == 4
    call("heads", "--config", str(tmp_path / "absent.yaml"), "--text", "a bank").ok()
    (tmp_path / "text.yaml").write_text("text: a bank\n")
    result = call("heads", "--config", str(tmp_path / "text.yaml"), "--file", "absent.txt")
    assert (result.code, "absent.txt" in result.err) == (4, True)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_shipped_configurations_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text(LONG[:200])
    drawn = ("--select", "0.0", "--figures", "heads")
    on_this_machine = (
        [] if yaml.safe_load(path.read_text())["model"] == "demo" else ["--model", "demo", "--device", "cpu"]
    )
    result = call("heads", "--config", str(path), "-q", *drawn, "--dtype", "float32", *on_this_machine)
    assert len(result.silent().rows) == 1
    assert list((tmp_path / "runs").glob("*/manifest.json"))
