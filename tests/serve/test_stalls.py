"""An end that stops (a client, the worker, the server) holds up nobody else, and each command ends as if alone."""

import os
import signal
import socket
import stat
import subprocess
import threading
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import Pipe

import pytest

from attnscope.errors import ModelError, UsageError
from attnscope.inputs.prompt import from_text
from attnscope.model.options import LoadOptions
from attnscope.observe.request import CaptureSpec, RunInfo
from attnscope.serve import client, wire, worker
from attnscope.serve import client as relay
from attnscope.serve import server as serving_module
from attnscope.serve import wire as place
from attnscope.serve import worker as reader
from attnscope.serve.wire import UnansweredError, WireError
from attnscope.utils.stages import NO_PROGRESS, Progress
from helpers.command_line import HANGS, SENTENCE, call
from helpers.forks import until
from helpers.serving import Stub, serving, why_unanswered

pytestmark = pytest.mark.skipif(not place.supported(), reason="this system has no sockets that say who asks")
LONG = "x" * 2**22  # longer than what a socket holds


@contextmanager
def asking(model="demo"):
    """The socket of a client that has asked, and says and reads nothing more."""
    question, blobs = client._question(LoadOptions(model), CaptureSpec(SENTENCE))
    with client.connected() as link:
        wire.send(link, question, blobs)
        link.settimeout(HANGS)
        yield link


def parts(link):
    """What it is answered, but for the word that the server is there."""
    frames = [wire.receive(link)]
    while not frames[-1].last:
        frames.append(wire.receive(link))
    return [frame.header for frame in frames if frame.header[0] != "here"]


class Listener(Progress):
    """Which stages were shown."""

    def __init__(self):
        self.stages = []

    def stage(self, title, total=None, unit=""):
        self.stages.append(title)
        return NO_PROGRESS.stage(title)


# A client that stopped


def test_an_answer_waits_for_a_client_that_does_not_read_it_and_others_are_answered(stubbed, monkeypatch):
    monkeypatch.setattr(Stub, "answering", lambda stub: wire.send(stub.theirs, ["said", LONG]))
    with stubbed(), asking() as stopped:
        assert why_unanswered() == "answered by 1"
        assert parts(stopped) == [["said", LONG], ["no", "answered by 1"]]


def test_a_client_that_does_not_read_a_longer_answer_has_gone_after_a_while(stubbed, monkeypatch):
    for name, value in {"MOST_KEPT": 2**16, "HERE_SECONDS": 0.01, "STALLED_SECONDS": 0.05}.items():
        monkeypatch.setattr(relay, name, value)
    monkeypatch.setattr(Stub, "answering", lambda stub: len(stub.said) == 2 and wire.send(stub.theirs, ["said", LONG]))
    with stubbed(), asking() as stopped:
        until(lambda: len(Stub.made[0].said) == 2)
        assert why_unanswered() == "answered by 1"
        with pytest.raises(WireError):
            parts(stopped)
        assert [one["what"] for one in Stub.made[0].said] == ["load", "question", "cancel", "question"]


def test_who_takes_something_now_and_then_has_not_gone():
    ours, theirs = socket.socketpair()
    asker = relay.Asker(ours)
    asker.put(LONG.encode())
    for _ in range(3):
        asker.check(0.9 * relay.STALLED_SECONDS)
        assert theirs.recv(2**20)
        asker.push()
    left = asker.kept
    asker.check(0.9 * relay.STALLED_SECONDS)
    assert (asker.has_gone, asker.kept) == (False, left)
    asker.check(0.2 * relay.STALLED_SECONDS)
    assert (asker.has_gone, asker.kept) == (True, 0)


def test_a_client_that_was_suspended_while_it_waited_is_passed_over(stubbed, monkeypatch):
    for module in (relay, serving_module):
        monkeypatch.setattr(module, "HERE_SECONDS", 0.01)
    finishes = threading.Event()
    monkeypatch.setattr(Stub, "answering", lambda stub: finishes.wait(HANGS))
    with stubbed() as (server, _), asking() as first:
        until(lambda: server.status().busy)
        with asking() as second:
            assert "another question is first" in wire.receive(second).header[1]
            monkeypatch.setattr(serving_module, "is_suspended", lambda process: process == os.getpid())
            finishes.set()
            assert parts(first) == [["no", "answered by 1"]]
            with pytest.raises(WireError, match="gone"):
                parts(second)


def test_a_worker_does_not_wait_for_a_word_that_does_not_come(demo, monkeypatch):
    monkeypatch.setattr(worker, "GO_SECONDS", 0.01)
    ours, theirs = socket.socketpair()
    known = RunInfo(from_text(demo.tokenizer, SENTENCE), "demo", None, "cpu", "float32")
    link = worker.Link(ours)
    link.number = 1
    with pytest.raises(UnansweredError, match="did not answer for"):
        link.prepared(known)
    assert wire.receive(theirs).header[0] == "prepared"


def test_a_question_that_drips_is_not_waited_for(stubbed, monkeypatch):
    monkeypatch.setattr(serving_module, "ASKING_SECONDS", 0.1)
    data = wire.framed({"what": "status", "more": "x" * 2**16})
    with stubbed(), client.connected() as link, suppress(ConnectionError):
        for place_ in range(len(data) - 1):
            link.send(data[place_ : place_ + 1])
            if wire.is_readable(link, 0.01):
                assert link.recv(1) == b""
                return
        raise AssertionError("it was waited for")


# A worker that stopped


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="this system does not say what processes do")
def test_a_process_that_was_suspended_is_told_from_one_that_works():
    held = object.__new__(relay.Worker)
    held._unseen = held._suspended = 0.0
    held.process = subprocess.Popen(["sleep", str(HANGS)])
    try:
        assert not held.is_suspended()
        os.kill(held.process.pid, signal.SIGSTOP)
        until(held.is_suspended)
        held.check(relay.STOPPED_SECONDS / 2)
        with pytest.raises(WireError, match="suspended"):
            held.check(relay.STOPPED_SECONDS / 2)
        os.kill(held.process.pid, signal.SIGCONT)
        until(lambda: not held.is_suspended())
        held.check(9 * relay.STOPPED_SECONDS)
    finally:
        held.process.kill()
        held.process.wait()


def test_a_worker_that_was_suspended_is_ended_and_another_answers(stubbed, monkeypatch):
    for name, value in {"HERE_SECONDS": 0.01, "STOPPED_SECONDS": 0.05}.items():
        monkeypatch.setattr(relay, name, value)
    hangs = threading.Event()
    monkeypatch.setattr(Stub, "answering", lambda stub: stub.suspended and hangs.wait(HANGS))
    with stubbed():
        Stub.made[0].suspended = True
        assert "ended amid the answer" in why_unanswered()
        assert Stub.made[0].code == -9
        assert why_unanswered() == "answered by 2"
    hangs.set()


def test_a_stop_of_this_process_is_no_time_in_which_others_did_nothing(monkeypatch):
    clock, hour = relay.Clock(), 3600
    now = relay.time.monotonic()
    monkeypatch.setattr(relay.time, "monotonic", lambda: now + hour)
    assert clock.passed() <= 2 * relay.HERE_SECONDS


def test_a_reader_that_was_suspended_is_ended(demo, monkeypatch):
    process = subprocess.Popen(["sleep", str(HANGS)])
    ends = Pipe()
    monkeypatch.setattr(reader, "forked", lambda serve: (ends[0], process.pid))
    monkeypatch.setattr(reader, "seconds", lambda: 0.01)
    monkeypatch.setattr(reader, "MORE_SECONDS", 0.01)
    with pytest.raises(UnansweredError, match="cannot read its text"):
        reader.Reader()(len, ("the bank",))
    assert process.wait(HANGS) == -signal.SIGKILL
    for end in ends:
        end.close()


# A server that stopped, or works on something else


@pytest.fixture
def silent(stubbed, monkeypatch, tmp_path):
    """In the place of a server: a socket that takes questions and says nothing."""
    monkeypatch.setattr(client, "WORD_SECONDS", 0.01)
    monkeypatch.setattr(client, "SILENT_SECONDS", 0.05)
    place.make_folder()
    with socket.socket(socket.AF_UNIX) as found:
        found.bind(str(place.address()))
        found.listen()
        yield found


def test_a_server_that_says_nothing_is_waited_for_with_a_word_and_then_not(silent):
    listener = Listener()
    with pytest.raises(UnansweredError, match="says nothing"):
        client.ask_server(LoadOptions(), CaptureSpec(SENTENCE), listener)
    assert listener.stages == [client.WAITING]


def test_why_a_server_hung_up_is_read_though_the_question_came_too_late(silent, monkeypatch):
    def after_the_refusal(*question):
        with silent.accept()[0] as link:
            wire.send(link, serving_module.FULL, last=True)
        wire.send(*question)

    monkeypatch.setattr(client, "send", after_the_refusal)
    assert why_unanswered() == "64 questions wait already"
    assert call("serve", "status").code == 1


def test_beside_a_socket_that_says_nothing_a_command_is_as_alone(silent):
    beside = call("heads", SENTENCE)
    assert beside == call("heads", SENTENCE, ATTNSCOPE_NO_SERVER="1").ok()


def test_a_server_whose_links_are_taken_answers_its_status_and_is_stopped(stubbed, monkeypatch):
    monkeypatch.setattr(serving_module, "SPARE_LINKS", 1)
    with stubbed() as (server, thread), ExitStack() as links:
        for _ in range(serving_module.MOST_LINKS):
            links.enter_context(client.connected())
        until(lambda: server._links._value == 0)
        assert client.request_status("status").ready
        assert why_unanswered() == "64 questions wait already"
        with client.connected():  # the spare one too
            until(lambda: server._spare._value == 0)
            found = call("serve", "status")
            assert found.code == 1
            assert "64 questions wait already; ask again" in found.err.replace("\n", " ")
            assert "kill" not in found.err
        until(lambda: server._spare._value == 1)
        assert call("serve", "stop").code == 0
        thread.join(HANGS)
        assert not thread.is_alive()


def test_the_status_of_a_server_that_says_nothing_names_its_process(silent, monkeypatch):
    monkeypatch.setattr(client, "CONNECT_SECONDS", 0.05)
    found = call("serve", "status")
    assert found.code == 1
    assert f"kill -CONT {os.getpid()}" in found.err.replace("\n", " ")


def test_a_question_for_which_no_file_is_left_leaves_the_worker_in_order(stubbed, monkeypatch):
    class NoFiles:
        def __init__(self):
            raise OSError(24, "Too many open files")

    with stubbed():
        with monkeypatch.context() as for_now:
            for_now.setattr(relay.selectors, "DefaultSelector", NoFiles)
            assert "ended amid the answer" in why_unanswered()
        assert why_unanswered() == "answered by 2"


def test_who_waits_hears_that_the_server_is_there(stubbed, monkeypatch):
    for module in (relay, serving_module):
        monkeypatch.setattr(module, "HERE_SECONDS", 0.01)
    goes_on = threading.Event()
    monkeypatch.setattr(Stub, "answering", lambda stub: goes_on.wait(HANGS))
    with stubbed(), asking() as first:
        assert wire.receive(first).header == ["here", ""], "it is being answered"
        with asking() as second:
            words = wire.receive(second).header
            assert words == ["here", "waiting for attnscope serve: another question is first"]
        with asking() as third:
            goes_on.set()
            assert parts(first) == parts(third) == [["no", "answered by 1"]]


def test_what_is_waited_for_is_shown_after_a_while_and_no_longer_than_it_is(monkeypatch):
    ours, theirs = socket.socketpair()
    listener, said = Listener(), []
    for header in (
        ["here", "first"],
        ["here", "first"],
        ["stage", ["pass", 4, "layers"]],
        ["here", ""],
        ["here", "late"],
    ):
        wire.send(theirs, header)
    wire.send(theirs, ["no", "reason"], last=True)
    monkeypatch.setattr(client, "WORD_SECONDS", 0.0)
    monkeypatch.setattr(client, "is_readable", lambda link, seconds: True)
    assert client._Answer(ours, listener, said.append).last().header == ["no", "reason"]
    assert listener.stages == ["first", "pass"]


# A server that loads


@pytest.fixture
def loads(stubbed, monkeypatch, tmp_path):
    """A server that holds the demo, and loads another model until the event is set; its model, and what `hold` gave."""
    from shutil import copytree

    from attnscope.model.sources import DEMO_FOLDER

    for module in (relay, serving_module):
        monkeypatch.setattr(module, "HERE_SECONDS", 0.01)
    monkeypatch.setattr(serving_module, "POLL_SECONDS", 0.01)
    loaded, held = threading.Event(), []
    monkeypatch.setattr(Stub, "loading", lambda stub, model: model == "demo" or loaded.wait(HANGS))
    folder = str(copytree(DEMO_FOLDER, tmp_path / "slow"))
    with stubbed() as (server, _):
        server.ready = False
        holding = threading.Thread(target=lambda: held.append(server.hold(LoadOptions(folder))))
        holding.start()
        until(lambda: server.loading)
        yield folder, loaded, held
        loaded.set()
        holding.join(HANGS)


def test_the_status_says_what_a_server_loads(loads):
    folder, loaded, held = loads
    found = call("serve", "status")
    assert found.code == 1
    assert f"loading {folder}, 0:00:0" in found.err.replace("\n", " ")
    loaded.set()
    until(lambda: held)
    assert client.request_status("status").loading == ""
    assert held == [True]


def test_a_question_waits_for_the_model_that_is_loaded_and_for_no_other(loads):
    folder, loaded, _ = loads
    assert why_unanswered() == f"the server loads {folder}"
    with asking(folder) as link:
        assert wire.receive(link).header == ["here", f"waiting for attnscope serve: it loads {folder}"]
        loaded.set()
        assert parts(link) == [["no", "answered by 1"]]


def test_a_server_is_stopped_while_it_loads(loads):
    _, _, held = loads
    assert call("serve", "stop").code == 0
    until(lambda: held)
    assert held == [False]


def test_a_model_whose_process_ends_while_it_is_loaded_is_refused_in_a_line(stubbed, monkeypatch):
    with stubbed() as (server, _):
        monkeypatch.setattr(Stub, "loading", lambda stub, model: stub.killed())
        with pytest.raises(ModelError, match="demo was not loaded: the process that loads it has ended"):
            server.hold(LoadOptions())


# What lies in the server's folder


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file_of_ours_in_the_place_of_the_lock_is_refused(kind, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    place.make_folder()
    lock, other = place.folder() / "serve.lock", tmp_path / "other"
    other.write_text("kept")
    {"link": lambda: lock.symlink_to(other), "pipe": lambda: os.mkfifo(lock), "folder": lock.mkdir}[kind]()
    with pytest.raises(UsageError, match=r"serve\.lock"), serving_module.Server():
        pass
    assert other.read_text() == "kept"


def test_a_lock_that_lies_there_keeps_its_content_and_a_folder_in_the_socket_s_place_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    place.make_folder()
    (place.folder() / "serve.lock").write_text("kept")
    place.address().mkdir()
    with pytest.raises(UsageError, match=r"serve\.sock"), serving_module.Server():
        pass
    assert (place.folder() / "serve.lock").read_text() == "kept"
    assert stat.S_ISDIR(place.address().stat().st_mode)


# Processes


@pytest.mark.e2e
def test_beside_a_stopped_client_worker_and_server_commands_end_as_alone(tmp_path):
    alone = call("heads", SENTENCE)
    with serving(tmp_path / "run") as server:
        with server.found(), asking():
            assert server.call("heads", SENTENCE) == alone
        for stopped in (server.worker(), server.process.pid):
            os.kill(stopped, signal.SIGSTOP)
            try:
                assert server.call("heads", SENTENCE) == alone
            finally:
                with suppress(ProcessLookupError):  # the server ends a worker that was stopped
                    os.kill(stopped, signal.SIGCONT)
        until(lambda: not server.status["busy"])
        assert "not asked" not in server.call("heads", SENTENCE, "--verbose").ok().err
