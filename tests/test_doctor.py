"""`attnscope doctor`: one screen of facts, each held against another way to find it."""

import json
import os
import platform
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers

from attnscope.cli import doctor
from helpers import homes
from helpers.command_line import call, on_terminal

NAMED = ("python", "torch", "transformers", "cpu", "threads", "browser", "cache")


@pytest.fixture(scope="module")
def facts():
    done = call("doctor", "--format", "json").silent()
    return json.loads(done.out)


def test_versions_threads_and_devices(facts):
    assert facts["python"] == platform.python_version()
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["versions"]["transformers"] == transformers.__version__
    assert facts["threads"] == {"torch": torch.get_num_threads(), "cores": os.cpu_count()}
    assert [one["device"] for one in facts["devices"]][:1] == ["cpu"]
    assert all(one["free_bytes"] > 0 for one in facts["devices"])


def test_what_builds_kernels_is_named(facts, monkeypatch):
    from attnscope.attention.kernels_cuda import operator as driver

    assert facts["kernels"]["cudnn"] == torch.backends.cudnn.version()
    assert {"triton", "numba"} & facts["versions"].keys() == {name for name in ("triton", "numba") if find_spec(name)}
    monkeypatch.setattr(driver.shutil, "which", lambda name: None)
    monkeypatch.setattr(driver, "python_header", lambda: Path("nowhere"))
    assert json.loads(call("doctor").out)["kernels"] == facts["kernels"] | {"cc": None, "python_header": False}
    assert "no C compiler, no Python.h" in call("doctor", columns=100).out.decode()


def test_a_pipe_gets_json_and_a_terminal_one_screen():
    assert json.loads(call("doctor").out)["versions"]
    shown = call("doctor", columns=100).out.decode()
    lines = shown.splitlines()
    assert len(lines) <= 45
    for name in NAMED:
        assert any(name in line for line in lines)


def test_a_device_that_does_not_answer_is_a_line_not_an_end(monkeypatch):
    def broken(device):
        raise RuntimeError("CUDA driver error")

    monkeypatch.setattr("attnscope.utils.memory.free_memory", broken)
    assert json.loads(call("doctor").out)["devices"][0]["free_bytes"] is None
    assert "unknown free" in call("doctor", columns=100).out.decode()


def test_fonts_are_those_that_figures_would_take(facts, monkeypatch):
    assert set(facts["fonts"]) == set(doctor.SCRIPTS)
    monkeypatch.setattr("matplotlib.font_manager.findSystemFonts", list)
    from attnscope.figures import fonts

    fonts._cover.cache_clear()
    without = json.loads(call("doctor").out)["fonts"]
    fonts._cover.cache_clear()
    assert set(without.values()) == {None}


def test_the_cache_counts_a_blob_once(tmp_path, monkeypatch):
    blobs, snapshot = (tmp_path / "models--gpt2" / name for name in ("blobs", "snapshots/1"))
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "a").write_bytes(b"12345")
    (snapshot / "config.json").symlink_to(blobs / "a")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    cache = json.loads(call("doctor").out)["cache"]
    assert (cache["models"], cache["bytes"]) == (1, 5)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "nowhere"))
    cache = json.loads(call("doctor").out)["cache"]
    assert (cache["models"], cache["bytes"]) == (0, 0)


def test_a_dangling_link_in_the_cache_is_no_end(tmp_path, monkeypatch):
    blobs = tmp_path / "models--gpt2" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "a").write_bytes(b"12345")
    (blobs / "b").symlink_to("nowhere")
    (blobs / "c").symlink_to("c")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert json.loads(call("doctor").out)["cache"]["bytes"] == 5
    (tmp_path / "round").symlink_to("round")
    for nowhere in ("round", "x" * 300, "round/hub"):
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / nowhere))
        assert json.loads(call("doctor").out)["cache"]["models"] == 0
        call("doctor", columns=100).ok()


def test_without_a_home_it_has_a_cache_folder_all_the_same(monkeypatch):
    homes.without_a_home(monkeypatch)
    assert json.loads(call("doctor").ok().out)["cache"]["folder"] == "~/.cache/huggingface/hub"


@pytest.mark.e2e
def test_without_a_home_it_says_what_it_can():
    """In a process that is started: Matplotlib looks for a home once."""
    env = {key: value for key, value in os.environ.items() if key not in homes.VARIABLES}
    code = "import pwd, sys; pwd.getpwuid = lambda uid: {}[uid]; from attnscope.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, "doctor"], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["cache"]["folder"] == "~/.cache/huggingface/hub"


def test_what_fontconfig_writes_itself_is_not_shown(monkeypatch, capfd):
    from attnscope.figures import fonts

    def warning():
        os.write(2, b"Fontconfig warning: \x1b[31mX\n")
        return []

    monkeypatch.setattr("matplotlib.font_manager.findSystemFonts", warning)
    fonts._cover.cache_clear()
    assert set(json.loads(call("doctor").silent().out)["fonts"].values()) == {None}
    fonts._cover.cache_clear()
    assert capfd.readouterr().err == ""


@pytest.mark.e2e
def test_a_language_that_fontconfig_quotes_steers_no_terminal():
    code, shown = on_terminal(["doctor", "--format", "json"], 100, fork=False, LC_ALL="\x1b[31mX")
    assert code == 0
    assert "\x1b" not in shown


def test_the_cache_is_where_the_hub_has_it(monkeypatch):
    from huggingface_hub import constants

    from attnscope.cli.option_groups import cache_folder

    if not {"HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"} & set(os.environ):
        assert cache_folder() == Path(constants.HF_HUB_CACHE)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/hub")


def test_the_home_folder_and_other_variables_are_nobodys_business(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    shown = call("doctor").out.decode()
    assert "secret" not in shown
    assert str(tmp_path) not in shown
    assert json.loads(shown)["environment"]["HF_HOME"] == "~/hf"


def test_a_browser_without_a_display_is_named(tmp_path, monkeypatch):
    """`webbrowser` knows none where there is no display."""
    browser = tmp_path / "chromium"
    browser.write_text("#!/bin/sh\n")
    browser.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor.webbrowser, "get", lambda: (_ for _ in ()).throw(doctor.webbrowser.Error()))
    assert doctor._browser() == "chromium, without a display to open it on"
    browser.unlink()
    assert doctor._browser() is None
