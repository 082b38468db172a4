"""Loading in a fresh process: what is imported, what is said, and how the Hub is talked to."""

import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager

import pytest

from attnscope.errors import ModelError
from attnscope.model import sources
from attnscope.model.loading import load
from attnscope.model.options import LoadOptions
from helpers.command_line import HANGS
from helpers.fake_hub import COMMIT, serve
from helpers.folders import edit_config, saved


@pytest.fixture
def folder(tmp_path):
    return saved(tmp_path / "model", vocab_size=2000)


SCRIPT = """
import sys, json, os
from attnscope.model import sources
from attnscope.errors import AttnscopeError
from attnscope.model.libraries import silence_libraries
from attnscope.model.loading import load
from attnscope.model.options import LoadOptions
silence_libraries(False)
within, deadlines = sources.within, []
def counted(seconds, call):
    deadlines.append(seconds)
    return within(seconds, call)
sources.within = counted
def say(options):
    sources.ANSWER_SECONDS = options.pop("answer", sources.ANSWER_SECONDS)
    try:
        if options.pop("files", False):  # what is downloaded, without what is made of it
            snapshot = sources.fetch(options.pop("model"), **options)
            sources.fetch_weights(snapshot, ["model.safetensors"])
            print("loaded", snapshot.commit, (snapshot.folder / "model.safetensors").is_file())
            return
        loaded = load(LoadOptions(**options))
        print("loaded", loaded.revision, "torch" in sys.modules)
    except AttnscopeError as error:
        print(type(error).__name__, error, "torch" in sys.modules)
    finally:
        print(sum(deadlines), flush=True)
"""
IMPORTED = "huggingface_hub.errors, huggingface_hub.hf_api"  # and torch is not
ONCE = "say(json.loads(sys.argv[1]))"
FORKS = """
import {modules}
for line in sys.stdin:
    if not os.fork():
        try:
            say(json.loads(line))
        finally:
            os._exit(0)
    os.wait()
    print("end", flush=True)
"""


def settings(home, endpoint="http://127.0.0.1:9"):
    """The environment of a process whose Hub is at `endpoint` and whose cache is `home`."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    return environment | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


def in_a_fresh_process(home, endpoint="http://127.0.0.1:9", **options):
    """stdout, stderr and the most seconds it may wait for the Hub at `endpoint`; its cache is `home`."""
    command, environment = [sys.executable, "-c", SCRIPT + ONCE, json.dumps(options)], settings(home, endpoint)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANGS, check=False)
    said, seconds = done.stdout.strip().rsplit("\n", 1)
    return said, done.stderr, float(seconds)


@contextmanager
def forks(home, endpoint, modules):
    """stdout and stderr of loading, as often as it is called: a fork of a process that has imported these modules."""
    noise, pipe = home.with_name("noise"), subprocess.PIPE
    noise.touch()
    command, how = (
        [sys.executable, "-c", SCRIPT + FORKS.replace("{modules}", modules)],
        {"env": settings(home, endpoint), "text": True},
    )
    with noise.open("a") as stderr, subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, **how) as process:

        def loading(**options):
            before = noise.stat().st_size
            process.stdin.write(json.dumps(options) + "\n")
            process.stdin.flush()
            said, _seconds = itertools.takewhile("end\n".__ne__, process.stdout)
            return said.strip(), noise.read_text()[before:]

        yield loading


@pytest.mark.parametrize(
    "missing",
    ["folder", "config.json", "model.safetensors", pytest.param("tokenizer.json", marks=pytest.mark.e2e)],
)
def test_what_is_missing_is_said_before_torch_is_imported(folder, tmp_path, missing):
    (shutil.rmtree if missing == "folder" else os.unlink)(folder if missing == "folder" else folder / missing)
    said, noise, _ = in_a_fresh_process(tmp_path / "home", model=str(folder))
    assert said.startswith("ModelError")
    # a model without tokenizer may be none of language: that question needs transformers
    assert said.endswith("False") or missing == "tokenizer.json"
    assert noise == ""


def test_a_model_without_tokenizer_is_refused_here_too(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer"):
        load(LoadOptions(model=str(folder)))


@pytest.mark.parametrize(
    ("options", "modules"),
    [
        ({"files": True}, "huggingface_hub"),
        pytest.param({}, "torch, transformers.models.llama.modeling_llama", marks=pytest.mark.e2e),
    ],
    ids=["files", "loaded"],
)
def test_a_hub_model_is_loaded_and_found_again_offline(folder, tmp_path, options, modules):
    options = {"model": "owner/tiny"} | options
    with ExitStack() as served:
        fake = served.enter_context(serve(folder))
        with forks(tmp_path / "home", fake.url, modules) as loading:
            assert loading(**options) == (f"loaded {COMMIT} True", "")
            assert f"GET /owner/tiny/resolve/{COMMIT}/model.safetensors" in fake.requests
            asked = len(fake.requests)
            assert loading(**options, offline=True) == (f"loaded {COMMIT} True", "")
            assert len(fake.requests) == asked
            served.close()
            said, noise = loading(**options)
    assert said == f"loaded {COMMIT} True"
    assert "using the cached copy, commit 0123456789ab" in noise


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """Loads a model from a test Hub with an empty cache, in a fork; returns the outcome and stderr."""
    place = tmp_path_factory.mktemp("refused")
    with serve(saved(place / "model", vocab_size=2000)) as fake, forks(place / "home", fake.url, IMPORTED) as loading:
        yield loading


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": "owner/gated"}, "owner/gated is gated: the Hub refuses it (403); ask for access at http"),
        ({"model": "owner/none"}, "no public Hub model named 'owner/none'"),
        ({"model": "none"}, "no public Hub model named 'none'"),
        ({"model": "owner/tiny", "revision": "absent"}, "owner/tiny has no revision 'absent'"),
        ({"model": "owner/tiny", "offline": True}, "owner/tiny is neither a folder nor in the local cache"),
    ],
)
def test_what_the_hub_refuses(refused, options, says):
    said, noise = refused(**options)
    assert said.startswith("ModelError ")
    assert says in said
    assert said.endswith("False")
    assert noise == ""


def test_the_weights_of_a_model_that_is_refused_are_not_downloaded(folder, tmp_path):
    edit_config(folder, model_type="reformer")
    with serve(folder) as fake:
        said, _, _ = in_a_fresh_process(tmp_path / "home", fake.url, model="owner/tiny")
    assert said.startswith("ModelError the attention of reformer ")
    assert not any("safetensors" in request for request in fake.requests)


def test_a_hub_that_is_not_there(tmp_path):
    said, noise, seconds = in_a_fresh_process(tmp_path / "home", model="owner/tiny")
    assert said.startswith("ModelError owner/tiny ")
    assert "(http://127.0.0.1:9) cannot be reached" in said
    assert 'pass a folder: model="path/to/model"' in said
    assert noise == ""
    assert 0 < seconds < 20


@pytest.mark.slow
def test_a_hub_that_takes_the_call_and_says_nothing_is_given_up_in_20_seconds(tmp_path):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(50)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        said, _, seconds = in_a_fresh_process(tmp_path / "home", url, model="owner/tiny")
    assert f"({url})" in said
    assert 0 < seconds < 20


def test_the_deadline_bounds_what_has_no_timeout_of_its_own():
    late = threading.Event()
    with pytest.raises(TimeoutError, match="no answer"):
        sources.within(0.1, late.wait)
    late.set()
    assert sources.within(5, lambda: "answer") == "answer"
    assert sources.DEADLINE_SECONDS < 20


def test_a_hub_model_is_identified_by_its_commit_without_its_weights(folder, tmp_path):
    script = """
import sys
from attnscope.model.loading import identify
from attnscope.model.options import LoadOptions
words, options = identify(LoadOptions(model="owner/tiny"))
print(words, options.revision, "torch" in sys.modules)
"""
    with serve(folder) as fake:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        environment |= {"HF_ENDPOINT": fake.url, "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        assert done.stdout.split() == ["commit", COMMIT[:12], COMMIT, "False"], done.stderr
        assert not any("safetensors" in line for line in fake.requests)


@pytest.mark.slow
def test_a_second_instance_is_made_of_the_files_that_were_downloaded(folder, tmp_path):
    """Without the network: the Hub is gone when it is made, as it is when the model is loaded again."""
    command = [sys.executable, "-m", "attnscope", "parity", "--whole", "--model", "owner/tiny", "--text", "the bank"]
    with serve(folder) as served:
        environment = settings(tmp_path / "home", served.url)
        first = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANGS)
    again = subprocess.run([*command, "--offline"], env=settings(tmp_path / "home"), capture_output=True, timeout=HANGS)
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr.decode()
    assert "second instance by 0 of" in first.stderr
