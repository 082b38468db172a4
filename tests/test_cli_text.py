"""A text behind the command, in a pipe, in a file: every way gives the same table."""

import io
import json
import re
from dataclasses import replace

import pytest

from attnscope.errors import InputError, UsageError
from attnscope.hooks.engines import ENGINES
from attnscope.model.loading import DEMO_FOLDER
from attnscope.observe.engine_choice import choose
from attnscope.observe.request import Request
from attnscope.utils.display import decimal_bytes
from attnscope.utils.files import read_text
from helpers.command_line import SENTENCE, call, on_terminal

QUIET = ("--select", "0.0", "-q")


@pytest.fixture
def expected():
    return call("heads", "--text", SENTENCE, *QUIET)


def test_a_text_behind_the_command(expected):
    assert call("heads", SENTENCE, *QUIET) == expected
    assert call("heads", *QUIET, "--", SENTENCE) == expected


@pytest.mark.parametrize("asked", [(), ("-",), ("--text", "-"), ("--file", "-")], ids=str)
def test_a_text_in_a_pipe(expected, asked):
    assert call("heads", *asked, *QUIET, stdin=SENTENCE.encode()) == expected


@pytest.mark.parametrize("command", ["relations", "rollout"])
def test_other_commands_read_it_the_same_way(command):
    expected = call(command, "--text", "a bank", "-q").ok()
    assert call(command, "a bank", "-q") == expected
    assert call(command, "-q", stdin=b"a bank") == expected


def test_explain_and_heatmap_read_it_too(tmp_path):
    steps = [call("explain", *text, "--head", "L0H0", "-q") for text in (("a bank",), ("--text", "a bank"))]
    assert steps[0] == steps[1]
    assert call("explain", "--head", "L0H0", "-q", stdin=b"a bank") == steps[0]
    call("draw", "a bank", "-q", "--figures", "overview", "--out", str(tmp_path)).ok()


def test_what_has_a_text_leaves_standard_input_alone(expected, tmp_path):
    """A command in a `while read` loop does not eat the lines of the others."""
    (tmp_path / "run.yaml").write_text(f"text: {SENTENCE}\n")
    (tmp_path / "text.txt").write_text(SENTENCE)
    for asked in ((SENTENCE,), ("--text", SENTENCE), ("--file", str(tmp_path / "text.txt"))):
        assert call("heads", *asked, *QUIET, stdin=b"another text") == expected
    assert call("heads", "--config", str(tmp_path / "run.yaml"), *QUIET, stdin=b"another text") == expected
    (tmp_path / "none.yaml").write_text("top: 3\n")
    assert call("heads", "--config", str(tmp_path / "none.yaml"), stdin=b"another text").code == 2


def test_parity_has_a_text_of_its_own():
    alone = call("parity", "--format", "jsonl")
    assert (alone.code, alone.out) == (0, call("parity", "--format", "jsonl", stdin=b"another text").out)
    call("parity", "a bank").ok()


@pytest.mark.parametrize("stdin", [b"", b" \n"])
def test_nothing_in_the_pipe_is_no_text(stdin):
    said = call("heads", stdin=stdin)
    assert (said.code, said.out) == (2, b"")
    assert "; give --text TEXT, --file FILE, or - " in said.err
    assert said.err.count("\n") == 1


def test_a_terminal_is_not_waited_for():
    code, shown = on_terminal(["heads"], 120)
    assert code == 2
    assert "--text TEXT" in shown


def test_the_text_of_a_pipe_is_taken_as_it_is(monkeypatch):
    def piped(data, **asked):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        return read_text(None, None, **asked)

    assert piped(b" a bank\n", unasked=True) == " a bank\n"
    with pytest.raises(UsageError):
        piped(b"a bank")
    with pytest.raises(InputError, match="standard input is not UTF-8: byte 0xE9 at offset 3"):
        piped(b"caf\xe9", unasked=True)
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UsageError):
        read_text(None, None, unasked=True)


def test_a_text_behind_the_command_wins_over_a_file_of_options(tmp_path):
    (tmp_path / "run.yaml").write_text("file: absent.txt\n")
    call("heads", "a bank", "--config", str(tmp_path / "run.yaml"), "-q").ok()


def test_a_manifest_does_not_hold_the_text(tmp_path):
    call("heads", "a secret bank", *QUIET, "--figures", "overview", "--out", str(tmp_path)).ok()
    assert "secret" not in json.dumps(json.loads((tmp_path / "manifest.json").read_text())["options"])


def test_the_model_of_info_may_stand_behind_it():
    expected = call("info")
    assert call("info", "demo") == call("info", "--model", "demo") == call("info", "-m", "demo", "-q") == expected
    assert json.loads(expected.out)["model"] == "demo"


def test_info_counts_the_tiles_of_the_device_that_is_asked_about():
    """Which need not be here."""
    found = {
        device: json.loads(call("info", "demo", "--tokens", "9,32768", "--device", device, "--format", "json").out)
        for device in ("cpu", "cuda:1")
    }
    assert {device: facts["device"] for device, facts in found.items()} == {"cpu": "cpu", "cuda:1": "cuda:1"}
    (short, long), (short_there, long_there) = ([one["engines"] for one in facts["costs"]] for facts in found.values())
    assert long_there["fused"] - long["fused"] == 5 * 256 * 2**20 - 2 * 4 * 2**20
    assert short_there["fused"] < short["fused"]
    assert long_there["eager"] == long["eager"]


def test_info_says_what_auto_takes_as_a_run_would(demo):
    found = json.loads(call("info", "demo", "--tokens", "9,2048", "--device", "cpu", "--format", "json").out)
    expected = [choose(replace(demo, device="cpu"), tokens, request=Request()) for tokens in (9, 2048)]
    assert [one["auto"]["words"] for one in found["costs"]] == [one.words for one in expected]
    assert [one["auto"]["engine"] for one in found["costs"]] == ["eager", "fused"]
    elsewhere = json.loads(call("info", "demo", "--device", "cuda:99", "--format", "json").out)
    assert elsewhere["costs"][0]["auto"] is None
    assert "auto takes" not in call("info", "demo", "--device", "cuda:99", columns=120).out.decode()


def test_info_says_what_every_engine_takes_and_the_weights():
    facts = json.loads(call("info", "demo", "--tokens", "9,2048", "--dtype", "bfloat16", "--format", "json").out)
    assert facts["weights_bytes"] == 2 * facts["parameters"]
    for cost in facts["costs"]:
        assert set(cost["engines"]) == set(ENGINES)
        assert (cost["engines"]["eager"], cost["engines"]["fused"]) == (cost["eager_bytes"], cost["fused_bytes"])
        assert cost["auto"] == {"engine": "eager", "words": cost["auto"]["words"]}
    assert facts["costs"][1]["auto"]["words"] == "eager: fused rounds differently in bfloat16"
    assert facts["costs"][1]["engines"]["eager"] == 2048**2 * (6 * (2 + 4 + 4) + 2)
    shown = " ".join(call("info", "demo", columns=120).out.decode().split())
    assert all(f"{what}: one layer" in re.sub(r"\x1b\[[0-9;]*m", "", shown) for what in ("eager", "fused"))
    on_disk = sum(path.stat().st_size for path in DEMO_FOLDER.glob("*.safetensors"))
    assert (facts["disk_bytes"], facts["dtype"]) == (on_disk, "bfloat16")
    assert f"2.0 M parameters ({decimal_bytes(on_disk)} on disk, 8.03 MB in float32)" in shown
