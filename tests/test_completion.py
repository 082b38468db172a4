"""What TAB offers, in the words of each shell, and in the shells that are here."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time

import pytest

from attnscope.cli.app import COMMANDS
from attnscope.cli.option_groups import parameters
from attnscope.metrics.metrics import LENGTHS, LOOKBACKS, METRICS, SIGNED
from helpers import commands
from helpers.command_line import HANGS, call
from helpers.homes import without_a_home

SHELLS = ("bash", "zsh", "fish", "pwsh")


def asked(shell, *typed):
    """What a shell's script sends for a line whose last word is not yet finished, and what it gets back."""
    line = " ".join(typed)
    if shell == "bash":
        send = {"COMP_WORDS": "\n".join(typed), "COMP_CWORD": str(len(typed) - 1)}
    else:
        send = {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
        send["_TYPER_COMPLETE_WORD_TO_COMPLETE"] = typed[-1]
    return call(_ATTNSCOPE_COMPLETE=f"complete_{shell}", **send).silent().out.decode()


def offered(*typed):
    return asked("bash", *typed).split()


def test_commands():
    assert offered("attnscope", "") == list(COMMANDS)
    assert offered("attnscope", "he") == ["heads"]
    assert offered("attnscope", "dr") == ["draw"]
    assert offered("attnscope", "heatmap", "--sel") == offered("attnscope", "draw", "--sel") == ["--select"]
    assert offered("attnscope", "help", "re") == ["relations"]
    assert {"--help", "--version", "--install-completion"} <= set(offered("attnscope", "--"))


def test_options():
    assert offered("attnscope", "heads", "--to") == ["--top", "--top-k"]
    assert offered("attnscope", "heads", "--text", "'a bank'", "--sel") == ["--select"]
    assert offered("attnscope", "rollout", "--sel") == []


def test_settings_are_offered_as_options_once_a_letter_is_typed():
    assert offered("attnscope", "heads", "--dp") == ["--dpi"]
    assert offered("attnscope", "heads", "--scale", "log", "--ti") == ["--title"]
    assert offered("attnscope", "heads", "--scale", "l") == ["linear", "log"]
    assert "--dpi" not in offered("attnscope", "heads", "--")


@pytest.mark.parametrize("command", COMMANDS)
def test_options_that_help_does_not_show_are_offered_too(command):
    found = parameters(*commands.COMMANDS[command][0].groups).values()
    spelled = {f"--{one.spelled}" for one in found if not (one.is_argument or one.is_setting or one.is_hidden)}
    assert spelled <= set(offered("attnscope", command, "--"))


def test_values():
    assert offered("attnscope", "heads", "--sort", "") == [*METRICS, *LENGTHS, *LOOKBACKS, *SIGNED, "mass"]
    assert offered("attnscope", "heads", "--sort", "indu") == ["induction"]
    assert offered("attnscope", "metrics", "ent") == [name for name in METRICS if name.startswith("ent")]
    assert "log" in offered("attnscope", "draw", "--scale", "")
    assert offered("attnscope", "heads", "--format", "j") == ["jsonl"]
    assert offered("attnscope", "heads", "--device", "cu") == ["cuda"]
    assert offered("attnscope", "batch", "--group", "") == ["words", "sentences"]
    assert offered("attnscope", "heads", "--set", "sc") == ["scale="]


def test_models_of_the_cache(tmp_path, monkeypatch):
    for name in ("models--gpt2", "models--meta-llama--Llama-3.2-3B", "datasets--x--y"):
        (tmp_path / name).mkdir()
    for name in ("a\x1b[2J", "a\u202e", "a b", "a--b--c", "-rf", ""):  # the Hub has no model of such a name
        (tmp_path / f"models--{name}").mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert offered("attnscope", "heads", "--model", "") == ["demo", "gpt2", "meta-llama/Llama-3.2-3B"]
    assert offered("attnscope", "info", "g") == ["gpt2"]


def test_without_a_home_there_is_the_embedded_model(monkeypatch):
    without_a_home(monkeypatch)
    assert offered("attnscope", "heads", "--model", "") == ["demo"]


def test_where_files_belong_nothing_is_offered_so_that_the_shell_offers_its_files():
    for typed in (("heads", "--file", ""), ("heads", "--out", "r"), ("heads", ""), ("batch", "corp")):
        assert offered("attnscope", *typed) == []
    assert asked("zsh", "attnscope", "heads", "--file", "a").strip() == "_files"
    files = {"_TYPER_COMPLETE_FISH_ACTION": "is-args", "_TYPER_COMPLETE_ARGS": "attnscope heads --file a"}
    assert call(_ATTNSCOPE_COMPLETE="complete_fish", **files).code == 1


def test_zsh_fish_and_powershell_get_the_descriptions_too():
    title = METRICS["induction"].title
    assert f'"induction":"{title}"' in asked("zsh", "attnscope", "heads", "--sort", "indu")
    assert asked("fish", "attnscope", "heads", "--sort", "indu") == f"induction\t{title}\n"
    assert asked("pwsh", "attnscope", "heads", "--sort", "indu") == f"induction:::{title}\n"


def script(shell):
    """The script that `--show-completion` prints inside a shell; here it is told which."""
    return call("--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1").silent().out.decode()


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_a_shell_asks_us(shell):
    shown = script(shell)
    assert "_ATTNSCOPE_COMPLETE" in shown
    assert f"complete_{'powershell' if shell == 'pwsh' else shell}" in shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_real_shell_can_read_its_script(shell, tmp_path):
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(script(shell))
    done = subprocess.run([shell, "-n", tmp_path / "script"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def started(tmp_path):
    """A folder with an `attnscope` that starts: it imports little, and Typer asks its parent which shell that is."""
    command = tmp_path / "bin" / "attnscope"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\nfrom attnscope.cli import main\n\nmain()\n")
    command.chmod(0o755)
    return command.parent


def bash(commands, home, found_in):
    env = os.environ | {"PATH": f"{found_in}{os.pathsep}{os.environ['PATH']}", "HOME": str(home)}
    return subprocess.run(["bash", "-c", commands], env=env, capture_output=True, text=True, timeout=HANGS)


def test_bash_installs_it_for_itself(tmp_path, started):
    done = bash("attnscope --install-completion; true", tmp_path, started)
    assert "bash completion installed in" in done.stdout
    asking = "COMP_WORDS=(attnscope heads --sort indu); COMP_CWORD=3; _attnscope_completion attnscope"
    done = bash(f'source "$HOME/.bashrc"; {asking}; echo "${{COMPREPLY[@]}}"', tmp_path, started)
    assert (done.stdout, done.stderr) == ("induction\n", "")


def test_tab_in_bash(tmp_path, started):
    """A bash on a terminal, its script read, and the keys that a person would press."""
    (tmp_path / "rc").write_text(f"PS1='$ '; PATH={started}:$PATH\n{script('bash')}\n")
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "dumb"}
    command = ["bash", "--noprofile", "--rcfile", str(tmp_path / "rc"), "-i"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True)
    os.close(theirs)
    os.write(ours, b"attnscope relat\t--sel\t")
    shown, end = b"", time.monotonic() + HANGS
    while b"attnscope relations --select " not in shown and time.monotonic() < end:
        if select.select([ours], [], [], 0.1)[0]:
            shown += os.read(ours, 4096)
    process.kill()
    process.wait()
    os.close(ours)
    assert b"attnscope relations --select " in shown
