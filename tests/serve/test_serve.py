"""Commands that ask a server print and write what they do alone; whatever ails it, they end as if alone."""

import os
import random
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import nullcontext, suppress
from functools import partial
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

import attnscope
from attnscope.cli.run_file import run_lines, words_of
from attnscope.errors import InputError, UsageError
from attnscope.inputs.prompt import _read, from_text
from attnscope.model.loading import load_tokenizer
from attnscope.model.options import LoadOptions
from attnscope.model.sources import DEMO_FOLDER
from attnscope.observe.request import CaptureSpec, Request
from attnscope.serve import client, wire
from attnscope.serve import server as serving_module
from attnscope.serve import wire as identity
from attnscope.serve import wire as place
from attnscope.serve import worker as reader
from attnscope.serve.questions import PURPOSES
from attnscope.serve.wire import UnansweredError
from attnscope.serve.worker import CancelledError, cancellable
from attnscope.utils.files import state_of
from attnscope.utils.stages import NO_PROGRESS
from helpers.command_line import ATTNSCOPE, HANGS, SENTENCE, call
from helpers.folders import rewrite
from helpers.forks import until
from helpers.serving import Stub, serving, why_unanswered

pytestmark = pytest.mark.skipif(not place.supported(), reason="this system has no sockets that say who asks")
STORY = "examples/story.txt"
RIVER = "the bank of the river, the bank of the"
MARY = "Mary saw John, and John gave Mary a book"
ASKED = [  # each is answered by the server
    ["heads", SENTENCE],
    ["heads", SENTENCE, "--format", "parquet"],
    ["heads", SENTENCE, "--engine", "eager", "--sort=-entropy"],
    ["heads", SENTENCE, "--select", "1,3.0", "--by", "kv"],
    ["heads", SENTENCE, "--metrics", "keys_95,streaming_mass_32"],
    ["heads", MARY, "--query", "last", "--key", "Mary"],
    ["heads", MARY, "--define", "who=Mary,John", "--query", "who"],
    ["heads", SENTENCE, "--generate", "5", "--sort", "lookback"],
    ["heads", SENTENCE, "--answer", " the river"],
    ["heads", SENTENCE, "--weights", "value", "--set", "by=kv"],
    ["heads", "café 日本語 🦊 naïve"],
    ["relations", SENTENCE, "--over", "heads", "--format", "csv"],
    ["relations", SENTENCE, "--query", "last", "--set", "top_k=all"],
    ["relations", SENTENCE, "--min-weight", "0.4", "--format", "tsv"],
    ["relations", SENTENCE, "--weights", "logit", "--answer", " the", "--foil", " a"],
    ["keys", SENTENCE, "--select", "2", "--format", "jsonl"],
    ["keys", "--file", STORY, "--truncate", "left"],
    ["text", SENTENCE, "--query", "bank#2", "--mean", "layer"],
    ["rollout", SENTENCE, "--group", "words", "--format", "jsonl"],
    ["tokens", "--text", "the bank by the river bank", "--query", "bank#2", "--format", "jsonl"],
    ["tokens", "the cat sat on the mat", "--query", "^special,^the", "--define", "subject=cat", "--key", "subject"],
    ["tokens", SENTENCE, "--chat"],
    ["tokens", "word " * 600],
    ["explain", "--text", "the cat sat on the mat", "--head", "L2H3", "--query", "last"],
    ["why", RIVER, "--head", "L3H0", "--key", "river", "--side", "both", "--format", "jsonl"],
    ["why", RIVER, "--head", "L2H1", "--side", "query", "--define", "who=river", "--key", "who"],
    ["depth", RIVER, "--query", "bank", "--format", "jsonl"],
    ["knockout", RIVER, "--key", "river", "--over", "window:3", "--random", "0", "--how", "zero"],
    ["knockout", RIVER, "--key", "river", "--select", "@induction", "--format", "jsonl"],
    ["view", SENTENCE, "--out", "-", "--select", "2.3", "--query", "bank#2", "--max-mb", "0.1"],
    ["view", RIVER, "--out", "-", "--why", "L3H0", "--query", "last"],
    ["view", MARY, "--compare-text", "John saw Mary, and Mary gave John a book", "--out", "-"],
]
ASKED_MORE = [  # whose fields and purposes those above have too
    ["heads", SENTENCE, "--format", "jsonl"],
    ["heads", SENTENCE, "--engine", "fused"],
    ["heads", "--file", STORY, "--truncate", "right"],
    ["heads", "--text", SENTENCE, "--quiet"],
    ["heads", SENTENCE, "--chat"],
    ["relations", SENTENCE],
    ["relations", SENTENCE, "--group", "words"],
    ["relations", SENTENCE, "--weights", "scores"],
    ["keys", SENTENCE],
    ["text", SENTENCE],
    ["text", SENTENCE, "--key", "bank", "--select", "3.0"],
    ["rollout", SENTENCE],
    ["tokens", "the cat sat on the mat"],
    ["tokens", "word " * 600, "--truncate", "left"],
    ["explain", SENTENCE, "--head", "2.3", "--query", "bank#2", "--format", "table"],
    ["why", RIVER, "--head", "L3H0", "--key", "river"],
    ["why", RIVER, "--head", "L3H0", "--key", "river", "--against", "bank#1", "--by", "tokens"],
    ["why", RIVER, "--head", "L3H0", "--key", "river", "--verify", "--format", "table"],
    ["depth", RIVER],
    ["knockout", RIVER, "--key", "river", "--over", "heads"],
    ["knockout", RIVER, "--answer", " river", "--foil", " bank", "--over", "keys", "--format", "table"],
    ["view", SENTENCE, "--out", "-"],
    ["view", SENTENCE, "--out", "-", "--generate", "4", "--precision", "16"],
    ["view", "--file", STORY, "--truncate", "right", "--out", "-", "--max-mb", "0.3"],
]
REFUSED = [  # by the server's own pass, with the same words
    ["heads", SENTENCE, "--query", "elephant"],
    ["heads", SENTENCE, "--select", "99.0"],
    ["heads", "word " * 600],
    ["relations", SENTENCE, "--query", "99"],
    ["tokens", SENTENCE, "--query", "elephant"],
    ["explain", SENTENCE, "--head", "99.0"],
    ["explain", SENTENCE, "--head", "L0H0", "--query", "bank"],
    ["why", RIVER, "--head", "L3H0", "--query", "1", "--key", "last"],
    ["why", RIVER, "--head", "L3"],
    ["depth", RIVER, "--query", "elephant"],
    ["knockout", RIVER, "--key", "elephant"],
    ["knockout", RIVER, "--query", "0", "--key", "last"],
    ["view", SENTENCE, "--out", "-", "--why", "99.0"],
    ["view", MARY, "--compare-text", "word " * 600, "--out", "-"],
]
WRITTEN = [
    ["heads", SENTENCE, "--top", "2", "--figures", "top"],
    ["relations", MARY, "--key", "Mary"],
    ["text", SENTENCE, "--query", "last"],
    pytest.param(["rollout", SENTENCE], marks=pytest.mark.e2e),
    ["draw", SENTENCE, "--select", "1.4", "--figures", "heads"],
    ["why", RIVER, "--head", "L3H0", "--key", "river"],
    pytest.param(["explain", SENTENCE, "--head", "L2H3"], marks=pytest.mark.e2e),
]
ALONE = [  # that a process reads itself
    ["knockout", RIVER, "--key", "river", "--random", "0", "--dry-run"],
    ["explain", "--toy"],
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("run")) as found:
        yield found


@pytest.fixture(scope="module", autouse=True)
def warm(server, tmp_path_factory):
    """What the first commands of a process load, there and here."""
    server.call("view", RIVER, "--out", "-", "--why", "L3H0").ok()
    call("knockout", RIVER, "--key", "river", "--random", "0").ok()
    call(
        "draw", "the bank", "--figures", "heads", "--select", "0.0", "--out", str(tmp_path_factory.mktemp("warm"))
    ).ok()


def kept(folder):
    """The bytes of the files of a folder, but for what says when they were made."""
    return {
        str(path.relative_to(folder)): re.sub(rb"/CreationDate[^\n]*", b"", path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def asked_server(server, *arguments, **how):
    """A command that the server answered."""
    before = server.status["answered"]
    found = server.call(*arguments, **how)
    assert server.status["answered"] == before + 1, "the server was not asked"
    return found


@pytest.mark.parametrize(
    "arguments",
    [*ASKED, *REFUSED, *(pytest.param(one, marks=pytest.mark.e2e) for one in ASKED_MORE)],
    ids=lambda one: " ".join(one)[:60],
)
def test_with_a_server_output_exit_code_and_talk_are_the_same(server, arguments):
    alone = call(*arguments)
    assert asked_server(server, *arguments) == alone
    assert (alone.code == 0) == (arguments not in REFUSED)


@pytest.mark.parametrize("arguments", ALONE, ids=lambda one: " ".join(one)[:60])
def test_what_a_server_does_not_answer_is_the_same_beside_one(server, arguments):
    before = server.status["answered"]
    assert server.call(*arguments) == call(*arguments).ok()
    assert server.status["answered"] == before


@pytest.mark.parametrize("arguments", WRITTEN, ids=lambda one: one[0])
def test_with_a_server_files_are_the_same(server, arguments, tmp_path):
    folders = tmp_path / "alone" / "run", tmp_path / "asked" / "run"
    results = []
    for folder, run in zip(folders, (call, lambda *words: asked_server(server, *words)), strict=True):
        folder.parent.mkdir()
        os.chdir(folder.parent)
        results.append(run(*arguments, "--out", "run"))
    assert results[0] == results[1]
    assert results[0].code == 0
    assert kept(folders[0]) == kept(folders[1]) != {}


@pytest.fixture(autouse=True)
def here():
    """Each test leaves the folder as it found it."""
    before = os.getcwd()
    yield
    os.chdir(before)


def test_a_run_that_lies_there_is_refused_before_the_pass(server, tmp_path):
    run = str(tmp_path / "run")
    server.call("relations", SENTENCE, "--out", run).ok()
    refused = server.call("relations", "another text of mine", "--out", run)
    assert refused.code == 2
    assert refused == call("relations", "another text of mine", "--out", run)
    asked_server(server, "heads", SENTENCE).ok()


def test_the_run_of_a_folder_is_read_again_by_the_server(server, tmp_path):
    run = str(tmp_path / "run")
    call("relations", SENTENCE, "--out", run).ok()
    assert asked_server(server, "keys", run) == call("keys", run)


@pytest.mark.slow
def test_a_warning_of_the_library_is_heard(server, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(DEMO_FOLDER, folder)
    said = (folder / "atlas" / "atlas.json").read_text()
    (folder / "atlas" / "atlas.json").write_text(said.replace('"weights_sha256"', '"none"').replace("demo", "else"))
    with serving(tmp_path / "run", "--model", str(folder)) as other:
        alone = call("heads", SENTENCE, "--model", str(folder))
        assert "attnscope:" in alone.err
        assert other.call("heads", SENTENCE, "--model", str(folder)) == alone


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--dtype", "bfloat16"], "does not hold demo as it is asked for"),
        (["--trust-remote-code"], "runs no code of a model"),
        (["--set", "allow_pickle=true"], "reads no pickle"),
        (["--model", str(DEMO_FOLDER)], "does not hold"),
    ],
)
def test_what_it_does_not_hold_a_process_reads_itself(server, more, why):
    before = server.status["answered"]
    assert why in server.call("heads", SENTENCE, *more, "--verbose").ok().err
    assert server.status["answered"] == before


def test_what_is_asked_offline_it_answers(server):
    assert asked_server(server, "keys", SENTENCE, "--offline").ok().out == call("keys", SENTENCE).ok().out


def test_no_server_is_asked_where_that_is_said(server):
    before = server.status["answered"]
    server.call("heads", SENTENCE, "--set", "no_server=true").ok()
    call("heads", SENTENCE, **{**server.environment, "ATTNSCOPE_NO_SERVER": "1"}).ok()
    server.call("heads", SENTENCE, "--verify").ok()
    assert server.status["answered"] == before


def test_another_environment_is_not_answered(server):
    found = server.call("heads", SENTENCE, "--verbose", HF_ENDPOINT="http://localhost:1").ok()
    assert "the server runs in another environment" in found.err


@pytest.mark.slow
def test_changed_files_are_not_answered(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(DEMO_FOLDER, folder)
    with serving(tmp_path / "run", "--model", str(folder)) as server:
        asked_server(server, "heads", SENTENCE, "--model", str(folder)).ok()
        asked_server(server, "heads", SENTENCE, "--model", f"{folder}/../model").ok()
        for name in ("tokenizer.json", "model.safetensors"):
            path = folder / name
            held = path.read_bytes()
            path.write_bytes(held)
            found = server.call("heads", SENTENCE, "--model", str(folder), "--verbose").ok()
            assert "the files of the model have changed" in found.err
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        assert "have changed" in server.call("heads", SENTENCE, "--model", str(folder), "--verbose").ok().err


def test_other_code_is_not_answered(server, monkeypatch):
    monkeypatch.setattr("attnscope.serve.wire.code", lambda: "other")
    assert "the server runs other code" in server.call("heads", SENTENCE, "--verbose").ok().err


def test_a_worker_that_ended_is_started_again_with_its_models(stubbed):
    with stubbed() as (server, _):
        assert why_unanswered() == "answered by 1"
        Stub.made[0].killed()
        assert why_unanswered() == "answered by 2"
        loads = [[one["options"]["model"] for one in stub.said if one["what"] == "load"] for stub in Stub.made]
        assert loads == [["demo"], ["demo"]]
        assert [one["what"] for one in Stub.made[0].said].count("question") == 1
        assert server.answered == 2


def test_a_server_answers_for_the_files_that_it_loaded_and_their_content(stubbed, tmp_path):
    folder = Path(shutil.copytree(DEMO_FOLDER, tmp_path / "model"))
    with stubbed() as (server, _):
        server.hold(LoadOptions(str(folder)))
        server.models[1].files.hashing.join()
        assert why_unanswered(str(folder)) == "answered by 1"
        (folder / "model.safetensors").chmod(0o600)
        assert why_unanswered(str(folder)) == "answered by 1"
        rewrite(folder / "config.json", b'"bos_token_id": 0', b'"bos_token_id": 2')
        assert "the files of the model have changed" in why_unanswered(str(folder))
        Stub.made[0].killed()
        assert why_unanswered() == "answered by 2"
        assert why_unanswered(str(folder)) == "answered by 2", "a new worker has loaded what is there now"
        rewrite(folder / "config.json", b'"bos_token_id": 2', b'"bos_token_id": 0')
        assert "the files of the model have changed" in why_unanswered(str(folder))


def test_what_a_model_downloads_while_it_is_loaded_is_of_it(stubbed, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(DEMO_FOLDER, tmp_path / "model"))
    more = folder / "more.json"
    changes = {True: lambda: rewrite(more, b"{}", b"[]"), False: lambda: more.write_text("{}")}
    monkeypatch.setattr(Stub, "loading", lambda stub, model: model != "demo" and changes[more.exists()]())
    with stubbed() as (server, _):
        server.hold(LoadOptions(str(folder)))
        assert why_unanswered(str(folder)) == "answered by 1"
        Stub.made[0].killed()
        assert why_unanswered() == "answered by 2"
        assert "the files of the model have changed" in why_unanswered(str(folder)), "what was loaded is not known"


def test_code_whose_times_of_change_moved_is_the_same_code(stubbed, monkeypatch):
    monkeypatch.setattr(identity, "code", lambda: identity.code_of(identity.code_files()))
    moved = {path: state._replace(changed_ns=state.changed_ns + 1) for path, state in identity.code_files().items()}
    with stubbed() as (server, _):
        server._code_files.hashing.join()
        monkeypatch.setattr(identity, "code_files", lambda: moved)
        monkeypatch.setattr(identity, "state_of", lambda path: moved.get(str(path)) or state_of(path))
        assert why_unanswered() == "answered by 1"
        written = moved | {min(moved): moved[min(moved)]._replace(written_ns=1)}
        monkeypatch.setattr(identity, "code_files", lambda: written)
        assert why_unanswered() == "the server runs other code"


def test_a_worker_that_ends_amid_an_answer_ends_it(stubbed, monkeypatch):
    def killed(stub, number):
        wire.receive(stub.theirs)
        wire.send(stub.theirs, ["loaded", {"device": "cpu", "dtype": "float32", "bytes": 1}], last=True)
        wire.receive(stub.theirs)
        stub.killed()

    monkeypatch.setattr(Stub, "work", killed)
    with stubbed():
        assert "ended amid the answer" in why_unanswered()


def test_a_second_server_is_refused_and_the_first_is_stopped(stubbed):
    with stubbed() as (_, thread):
        with pytest.raises(UsageError, match="serve stop"), serving_module.Server():
            pass
        assert len(Stub.made) == 1
        assert call("serve", "status").ok().out == b"demo  cpu  float32  weights 2.0 KiB\n"
        assert thread.is_alive()
        assert call("serve", "stop").ok().out == b"demo  cpu  float32  weights 2.0 KiB\n"
        thread.join(HANGS)
        assert not thread.is_alive()
    assert not place.address().exists()
    assert call("serve", "status").code == 1


def test_a_server_that_nobody_asks_ends(stubbed, monkeypatch):
    monkeypatch.setattr(serving_module, "POLL_SECONDS", 0.02)
    with stubbed(idle=0.05) as (_, thread):
        thread.join(HANGS)
        assert not thread.is_alive()


@pytest.mark.e2e
def test_a_worker_that_is_killed_is_started_again(tmp_path):
    alone = call("heads", SENTENCE)
    with serving(tmp_path / "run") as server:
        os.kill(server.worker(), 9)
        until(lambda: server.status["models"])
        assert server.call("heads", SENTENCE) == alone
        assert asked_server(server, "heads", SENTENCE) == alone


@pytest.mark.slow
def test_a_worker_that_is_killed_amid_an_answer_is_no_error(tmp_path, monkeypatch):
    alone = call("heads", SENTENCE)
    with serving(tmp_path / "run") as server:
        heard = client._Answer._pass_on

        def killed(answer, kind, frame):
            heard(answer, kind, frame)
            if kind == "said":
                os.kill(server.worker(), 9)

        monkeypatch.setattr(client._Answer, "_pass_on", killed)
        assert server.call("heads", SENTENCE) == alone  # the header is said once


@pytest.mark.slow
def test_a_server_that_was_killed_leaves_a_socket_that_is_no_harm(tmp_path):
    alone = call("heads", SENTENCE)
    with serving(tmp_path / "run") as server:
        worker = server.worker()
        server.process.kill()
        server.process.wait()
        assert (tmp_path / "run" / "attnscope" / "serve.sock").exists()
        assert server.call("heads", SENTENCE) == alone
        until(lambda: not Path(f"/proc/{worker}").exists())
    with serving(tmp_path / "run") as server:
        asked_server(server, "heads", SENTENCE)


@pytest.mark.e2e
def test_there_is_one_server_and_it_can_be_stopped(tmp_path):
    with serving(tmp_path / "run") as server:
        second = subprocess.run([*ATTNSCOPE, "serve"], env=os.environ | server.environment, capture_output=True)
        assert second.returncode == 2
        assert b"a server of yours is there already" in second.stderr
        stopped = server.call("serve", "stop")
        assert stopped.out == b"demo  cpu  float32  weights 7.7 MiB\n"
        assert server.process.wait(HANGS) == 0
        assert not (tmp_path / "run" / "attnscope" / "serve.sock").exists()
        assert server.call("serve", "status").code == 1


@pytest.mark.slow
def test_it_ends_where_nobody_asks(tmp_path):
    with serving(tmp_path / "run", "--idle", "1s") as server:
        assert server.process.wait(HANGS) == 0


def test_a_question_that_is_left_ends_at_the_next_layer(server):
    with server.found(), socket.socket(socket.AF_UNIX) as link:
        question, blobs = client._question(LoadOptions(), CaptureSpec(SENTENCE))
        link.connect(str(place.address()))
        wire.send(link, question, blobs)
        assert wire.receive(link).header[0] == "prepared"  # it waits for a word, which never comes
    until(lambda: not server.status["busy"])
    asked_server(server, "heads", SENTENCE).ok()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80\x04\x95pickle",
        wire.FORM.pack(wire.MAGIC, 0, 2**31, 0),
        wire.FORM.pack(wire.MAGIC, 0, 4, 0) + b"nope",
        wire.FORM.pack(wire.MAGIC, 0, 2, 0) + b"[]",
        wire.FORM.pack(wire.MAGIC, 0, 40, 0) + b'{"said": {"what": "rm"}, "sizes": []}   ',
        wire.FORM.pack(wire.MAGIC, 0, 40, 0) + b'{"said": {"what": 12}, "sizes": [4]}    ',
        wire.FORM.pack(wire.MAGIC, 7, 1, 0),
        b"",
    ],
)
def test_what_is_no_question_is_not_answered(server, sent):
    with server.found(), socket.socket(socket.AF_UNIX) as link:
        link.connect(str(place.address()))
        with suppress(ConnectionError):  # it closes before it has read all that is no question
            link.sendall(sent)
            link.shutdown(socket.SHUT_WR)
            assert link.recv(1) == b""
    asked_server(server, "heads", SENTENCE).ok()


def test_a_question_with_wrong_types_is_refused_and_the_rest_goes_on(server):
    with server.found():
        question, _ = client._question(LoadOptions(), CaptureSpec(SENTENCE))
        for change in (
            {"options": {"model": 7}},
            {"options": None},
            {"ask": {"schema": "ask/1", "text": {"~": "Prompt"}}},
            {"ask": []},
            {"folder": "/no/such"},
            {"folder": 7},
            {"prompt": {"~": "os.system", "fields": {}}},
            {"prompt": {"~": "Prompt", "fields": {"text": "a"}}},
            {"name": None, "code": None},
        ):
            with client.connected() as link:
                wire.send(link, question | change)
                while not (frame := wire.receive(link)).last:
                    assert frame.header[0] != "observed"
                assert frame.header[0] in ("no", "error")
    asked_server(server, "heads", SENTENCE).ok()


def test_the_socket_lies_in_a_folder_that_its_user_alone_enters(server):
    with server.found():
        assert place.address().parent == place.folder()
        assert place.folder().stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_cannot_connect(server, tmp_path):
    with server.found():
        address = str(place.address())
    said = "import os, socket, sys; os.setuid(65534); socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    found = subprocess.run([sys.executable, "-c", said, address], capture_output=True, text=True)
    assert "PermissionError" in found.stderr


def test_a_folder_that_others_can_enter_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(serving_module, "Worker", Stub)
    monkeypatch.setattr(Stub, "made", [])
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("ATTNSCOPE_NO_SERVER", "")
    (tmp_path / "attnscope").mkdir()
    (tmp_path / "attnscope").chmod(0o755)  # whatever the umask
    assert "to be a folder of yours alone" in call("serve").err
    assert Stub.made == []
    assert "of yours alone" in call("heads", SENTENCE, "--verbose").ok().err
    (tmp_path / "attnscope").rmdir()
    (tmp_path / "attnscope").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    assert call("serve").code == 2


@pytest.mark.slow
def test_ten_clients_at_once_are_all_answered(server):
    alone, found = call("heads", SENTENCE).out, []
    before = server.status["answered"]

    def ask():
        command = [*ATTNSCOPE, "heads", SENTENCE]
        found.append(subprocess.run(command, env=os.environ | server.environment, capture_output=True).stdout)

    threads = [threading.Thread(target=ask) for _ in range(10)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert set(found) == {alone}
    assert server.status["answered"] == before + 10


HEAVY = "torch", "transformers", "matplotlib", "pandas", "pydantic"
UNUSED = "pyarrow.compute", "rich", "attnscope.figures.style", "attnscope.inputs.tensors"
LIGHT = f"""
import sys
import attnscope.cli as cli
for words, heavy in (
    (["heads", {SENTENCE!r}, "--query", "last"], {(*HEAVY, *UNUSED)}),
    (["view", {RIVER!r}, "--out", "-", "--why", "L3H0"], {HEAVY}),
    (["explain", {SENTENCE!r}, "--head", "2.3", "--format", "table"], {HEAVY}),
    (["why", {RIVER!r}, "--head", "3.0"], {HEAVY}),
    (["knockout", {RIVER!r}, "--key", "river", "--random", "0", "--format", "table"], {HEAVY}),
    (["tokens", {SENTENCE!r}], {HEAVY}),
):
    print("light:", words[0], cli.run(words), *sorted(set(heavy) & sys.modules.keys()), file=sys.stderr)
    own = sum(name.split(".")[0] == "attnscope" for name in sys.modules)
    print("own:", own, file=sys.stderr)
"""
OWN = 60  # files of the package that `heads` imports where a server answers


TABLE = "import sys, pyarrow; pyarrow.table({'a': [1]}); sys.exit('pandas' in sys.modules)"


def test_commands_that_are_answered_import_nothing_heavy(server):
    """One after the other in one process, `heads` first: it takes the fewest."""
    command = [sys.executable, "-c", LIGHT]
    found = subprocess.run(command, env=os.environ | server.environment, capture_output=True, text=True)
    said = [line.removeprefix("light: ") for line in found.stderr.splitlines() if line.startswith("light: ")]
    if "pandas" in said[0] and subprocess.run([sys.executable, "-c", TABLE]).returncode:
        pytest.skip("this pyarrow imports pandas for every table")
    own = [int(line.removeprefix("own: ")) for line in found.stderr.splitlines() if line.startswith("own: ")]
    assert own[0] <= OWN
    assert said == [f"{name} 0" for name in ("heads", "view", "explain", "why", "knockout", "tokens")]


def test_a_page_of_cuts_is_the_same(server, tmp_path):
    asked = ["knockout", RIVER, "--key", "river", "--over", "heads", "--random", "3", "--html"]
    with_server = asked_server(server, *asked, str(tmp_path / "one.html")).ok()
    alone = call(*asked, str(tmp_path / "two.html")).ok()
    assert with_server.out == alone.out
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def test_lines_are_run_in_order_with_one_model(tmp_path, monkeypatch):
    from attnscope.model import loading
    from attnscope.serve import worker

    loaded = []
    load = loading.load
    for module in (loading, worker):
        monkeypatch.setattr(module, "load", lambda options: loaded.append(options) or load(options))
    lines = f"""
        # a comment
        heads {SENTENCE!r} --quiet
        attnscope relations {SENTENCE!r} --quiet
        keys {SENTENCE!r} --key nowhere
    """
    found = call("run", "-", stdin=lines.encode())
    assert found.out == call("heads", SENTENCE, "-q").out + call("relations", SENTENCE, "-q").out
    assert found.code == 2
    assert len(loaded) == 3  # one of all lines, and those of the two commands here


@pytest.mark.parametrize(
    "line", [b"serve", b"attnscope serve stop", b"run -", b"heads 'a", b'heads "a\\"', b"heads a \\", b"heads \xff"]
)
def test_lines_that_cannot_be_run_are_named(line):
    found = call("run", "-", stdin=b"\n" + line + b"\n")
    assert found.code == 4
    assert "line 2 of -" in found.err


def test_a_line_that_is_too_long_is_refused_by_its_number_and_no_part_of_it_is_run(tmp_path):
    page = tmp_path / "page.html"
    lines = tmp_path / "lines.txt"
    for size in (2**20, 2**24):  # the last: where the rest of a line was once one of its own
        comment = b"#" + b" " * (size - 1)
        lines.write_bytes(b"metrics focus\n" + comment + f"view 'the bank' --out {page}\nmetrics".encode())
        found = call("run", str(lines))
        assert found.code == 4
        assert f"line 2 of {lines} has over 1,048,576 bytes" in found.err
        assert found.out == call("metrics", "focus").out
        assert not page.exists()


def test_a_line_is_split_as_a_shell_splits_it():
    def split(how, line):
        try:
            return how(line)
        except ValueError:
            return "refused"

    rng = random.Random(0)
    lines = ["".join(rng.choice("ab '\"\\\té") for _ in range(rng.randrange(12))) for _ in range(5000)]
    assert [split(words_of, line) for line in lines] == [split(shlex.split, line) for line in lines]
    assert 1000 < [split(words_of, line) for line in lines].count("refused") < 4000
    assert words_of("heads a#1 'b'#2 '#3' # '") == ["heads", "a#1", "b#2", "#3"]  # for shlex a comment begins in a word


def test_a_byte_order_mark_before_the_first_line_is_no_part_of_its_command(tmp_path):
    lines = tmp_path / "lines"
    lines.write_text("metrics focus\nmetrics focus\n", "utf-8-sig")
    found = call("run", str(lines))
    assert (found.code, found.out) == (0, call("metrics", "focus").out * 2)


def test_a_line_that_fails_is_named_and_the_others_run(tmp_path):
    lines = tmp_path / "lines"
    lines.write_text("metrics focus\n\nhedas\nmetrics focus\n")
    found = call("run", str(lines))
    assert (found.code, found.out) == (2, call("metrics", "focus").out * 2)
    assert f"line 3 of {lines} failed, exit code 2" in found.err


def test_lines_from_a_standard_input_that_is_closed(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(InputError, match="standard input is closed"):
        run_lines("-")


def test_run_and_the_words_behind_serve_have_their_old_names(stubbed):
    line = b"metrics focus"
    assert call("serve", "--run", "-", stdin=line).ok() == call("run", "-", stdin=line).ok()
    with stubbed() as (_, thread):
        assert call("serve", "--status").ok().out == call("serve", "status").ok().out != b""
        assert call("serve", "--stop").ok().out == b"demo  cpu  float32  weights 2.0 KiB\n"
        thread.join(HANGS)
    assert call("serve", "--status").code == call("serve", "status").code == 1
    assert "status and --run were both given" in call("serve", "status", "--run", "-").refusal
    assert "attnscope serve: expected status or stop, got 'halt'" in call("serve", "halt").refusal
    assert "name one: attnscope run FILE" in call("run").refusal
    shown = call("serve", "--help", "all").out.decode()
    assert "[status|stop]" in shown
    assert not {"--run", "--status", "--stop"} & set(shown.split())


def test_connect_captures_what_capture_does(server, demo):
    how = {"query": "last", "key": "bank", "generate": 2}
    with server.found():
        session = attnscope.connect()
        found, alone = session.capture(SENTENCE, **how), attnscope.capture(demo, SENTENCE, **how)
        assert type(found) is type(alone)
        assert repr(found) == repr(alone)
        assert found.table().equals(alone.table())
        for key, weights in alone.weights.items():
            torch.testing.assert_close(found.weights[key], weights, rtol=0, atol=0)
        assert list(session.capture(SENTENCE, layers=[1]).weights) == [(1, "decoder")]
        assert [len(one.prompt) for one in session.capture(["the bank", "the bank of the river"])] == [3, 6]
        with pytest.raises(attnscope.AttnscopeError, match="elephant"):
            session.capture(SENTENCE, query="elephant")
        with pytest.raises(attnscope.AttnscopeError, match="does not hold demo"):
            attnscope.connect(dtype="bfloat16").capture(SENTENCE)
        with pytest.raises(attnscope.AttnscopeError, match="a server does not verify"):
            session.capture(SENTENCE, verify=True)


def test_connect_without_a_server_says_how_to_start_one(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(attnscope.AttnscopeError, match="start one: attnscope serve --model demo"):
        attnscope.connect()
    with pytest.raises(TypeError, match="'colour'"):
        attnscope.connect(colour=1)


HANGS_AT = "{% if messages[0].content == 'hang' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
TEMPLATE = HANGS_AT + "{% endfor %}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.slow
def test_a_template_and_a_tokenizer_in_python_are_read_in_a_process_that_was_forked_before(tmp_path):
    chats, bytes_ = (Path(shutil.copytree(DEMO_FOLDER, tmp_path / name)) for name in ("chats", "bytes"))
    (chats / "chat_template.jinja").write_text(TEMPLATE)
    (bytes_ / "tokenizer.json").unlink()
    (bytes_ / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    limit = {"ATTNSCOPE_READING_SECONDS": "20"}
    both = ["--model", str(chats), "--model", str(bytes_)]
    with serving(tmp_path / "run", *both, **limit) as server:
        for arguments in (
            ["heads", SENTENCE, "--chat", "--model", str(chats)],
            ["heads", SENTENCE, "--chat", "--answer", " the river", "--model", str(chats)],
            ["tokens", '[{"role": "robot", "content": "the bank"}]', "--chat", "--model", str(chats)],
            ["knockout", SENTENCE, "--chat", "--key", "bank#1", "--random", "0", "--model", str(chats)],
            ["heads", SENTENCE, "--model", str(bytes_)],
            ["heads", SENTENCE, "--answer", " the river", "--model", str(bytes_)],
            ["view", SENTENCE, "--chat", "--out", "-", "--model", str(chats)],
        ):
            assert asked_server(server, *arguments, **limit) == call(*arguments, **limit).ok()


@pytest.mark.slow
def test_a_template_that_hangs_ends_its_question_alone(tmp_path):
    folder = Path(shutil.copytree(DEMO_FOLDER, tmp_path / "chats"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with serving(tmp_path / "run", "--model", str(folder), ATTNSCOPE_READING_SECONDS="1") as server:
        asked = {"ATTNSCOPE_READING_SECONDS": "1"}
        found = asked_server(server, "heads", "hang", "--chat", "--model", str(folder), **asked)
        assert " 1 seconds " in found.err
        asked_server(server, "heads", SENTENCE, "--model", str(folder), **asked).ok()


HEADS = {"explain": "L2H3", "why": "L3H0"}  # of purposes that are about one


@pytest.mark.parametrize("name", sorted({*PURPOSES} - {"tokens"}))
def test_a_question_that_was_cancelled_ends_at_the_next_layer_and_leaves_nothing(name):
    purpose = PURPOSES[name](*([HEADS[name]] if name in HEADS else []))
    loaded, ask = attnscope.load("demo"), CaptureSpec(RIVER, Request(query="last", key="river"), engine="eager")
    layers, ids = [], torch.tensor([[1, 2, 3]])

    def check():
        layers.append(None)
        if len(layers) == 3:
            raise CancelledError

    before = loaded.model(ids).logits
    with pytest.raises(CancelledError), cancellable(loaded.model, check):
        purpose.answer(loaded, ask, NO_PROGRESS, lambda info: None)
    assert len(layers) == 3
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in loaded.model.modules())
    assert torch.equal(loaded.model(ids).logits, before)


READER = f"""
import os
from functools import partial
from attnscope.model.loading import load_tokenizer
from attnscope.model.options import LoadOptions
from attnscope.serve.worker import Reader
from attnscope.serve.wire import UnansweredError
from attnscope.inputs.prompt import _read, from_text

def refused(*question):
    try:
        reader(*question)
    except UnansweredError:
        return True

reader, options, text = Reader(), LoadOptions(), {SENTENCE!r}
tokenizer = load_tokenizer(options).tokenizer
reader.hold(tokenizer, options)
found, error = reader(partial(_read, tokenizer), (text, False, None, None))
assert (found, error) == (from_text(tokenizer, text), None)
found, error = reader(partial(_read, tokenizer), (text, False, 2, None))
assert found is None
assert "the text has 9 tokens, the model reads at most 2" in str(error)
assert refused(lambda: tokenizer, ())
os.kill(reader.pid, 9)
assert refused(partial(_read, tokenizer), (text, False, None, None))
"""


def test_a_reader_is_sent_functions_by_name_and_tokenizers_by_their_options(demo, monkeypatch):
    """In a thread: what is sent, and what cannot be."""
    loaded = []

    def threaded(serve):
        ours, theirs = Pipe()

        def until_it_ends():
            with suppress(EOFError), theirs:
                serve(theirs)

        threading.Thread(target=until_it_ends, daemon=True).start()
        return ours, 0

    monkeypatch.setattr(reader, "forked", threaded)
    monkeypatch.setattr(reader, "IsolatedCall", lambda function, where: nullcontext(function))
    monkeypatch.setattr(reader, "load_tokenizer", lambda options: loaded.append(options) or load_tokenizer(options))
    read = reader.Reader()
    read.hold(demo.tokenizer, LoadOptions())
    for _ in range(2):
        assert read(partial(_read, demo.tokenizer), (SENTENCE, False, None, None)) == (
            from_text(demo.tokenizer, SENTENCE),
            None,
        )
    assert [one.offline for one in loaded] == [True], "once, and from what lies here"
    found, error = read(partial(_read, demo.tokenizer), (SENTENCE, False, 2, None))
    assert found is None
    assert "9 tokens" in str(error)
    with pytest.raises(UnansweredError):
        read(lambda: demo.tokenizer, ())
    read._pipe.close()
    with pytest.raises(UnansweredError):
        read(partial(_read, demo.tokenizer), (SENTENCE, False, None, None))


@pytest.mark.e2e
def test_a_reader_reads_with_a_tokenizer_that_it_loads_itself():
    """In a process that has used no torch: a fork of another may hang."""
    done = subprocess.run([sys.executable, "-c", READER], capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
