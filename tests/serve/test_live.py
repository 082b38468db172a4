"""Who may ask the live page, how much, and what a question may name. What a browser does with it: tests/viewer."""

import asyncio
import base64
import contextlib
import http.client
import json
import os
import random
import resource
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import yaml

from attnscope.errors import AttnscopeError
from attnscope.model.options import LoadOptions
from attnscope.serve import wire as identity
from attnscope.utils.schema import from_json
from helpers.command_line import ATTNSCOPE, SENTENCE, call
from helpers.folders import with_tokenizer
from helpers.forks import HANGS, shim, until
from helpers.picture_models import picture, saved
from helpers.serving import serving
from helpers.stack_families import tiny

pytest.importorskip("starlette", reason="pip install 'attnscope[serve]'")
from attnscope.serve import page as app
from attnscope.serve import page as asking
from attnscope.serve import page as guard
from attnscope.serve import page as question

QUESTION = {"command": "view", "model": "demo", "text": SENTENCE}


class Asking:
    """The page's port, asked as nothing but a browser should."""

    def __init__(self, page, address):
        self.page, self.address = page, address
        self.host, _, token = address.removeprefix("http://").partition("/#")
        self.port = int(self.host.partition(":")[2])
        self.headers = {"Host": self.host, "Authorization": f"Bearer {token}"}

    def get(self, path="/models", method="GET", body=None, **headers):
        """Code and text of an answer; a header that is None is left out."""
        said = self.headers | {name.replace("_", "-"): value for name, value in headers.items()}
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANGS)
        with contextlib.closing(link):
            link.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in said.items():
                if value is not None:
                    link.putheader(name, value)
            if body is not None:
                link.putheader("Content-Length", str(len(body)))
            whole, link.send = [], lambda part: whole.append(part)
            link.endheaders(body)
            link.connect()
            link.sock.sendall(b"".join(whole))  # at once: of a body that comes after its refusal, nothing is heard
            answer = link.getresponse()
            return answer.status, answer.read()

    def ask(self, **changes):
        """The lines of an answer to a question, and the page behind them."""
        code, text = self.get("/ask", "POST", json.dumps(QUESTION | changes).encode())
        lines = []
        while code == 200 and text:
            line, _, text = text.partition(b"\n")
            lines.append(json.loads(line))
            if "page" in lines[-1]:
                assert len(text) == lines[-1]["page"]
                return lines, text
        return lines or code, text

    def request(self):
        """A question, as bytes on a connection."""
        body = json.dumps(QUESTION)
        head = f"POST /ask HTTP/1.1\r\nHost: {self.host}\r\nAuthorization: {self.headers['Authorization']}\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()

    def raw(self):
        """A connection that says nothing yet."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=HANGS)


@pytest.fixture(scope="module")
def live():
    """A page whose commands are forked; tests/viewer has one whose commands ask a server."""
    page = app.LivePage(lambda: [LoadOptions()])
    with pytest.MonkeyPatch.context() as patch, page as address:
        patch.setattr(asking, "COMMAND", (str(shim() / "attnscope"),))
        yield Asking(page, address)


def test_the_address_has_the_token_where_a_browser_sends_it_to_no_one(live):
    assert live.address == f"http://127.0.0.1:{live.page.port}/#{live.page.token}"
    assert len(live.page.token) >= 40


def test_the_page_itself_holds_nothing_and_its_policy_lets_nothing_else_in(live):
    link = http.client.HTTPConnection("127.0.0.1", live.page.port)
    link.request("GET", "/")
    answer = link.getresponse()
    text, policy = answer.read().decode(), answer.headers["Content-Security-Policy"]
    assert answer.status == 200
    assert "demo" not in text
    assert live.page.token not in text
    parts = dict(part.split(" ", 1) for part in policy.split("; "))
    assert parts["default-src"] == parts["base-uri"] == parts["form-action"] == parts["frame-ancestors"] == "'none'"
    assert parts["connect-src"] == "'self'"
    assert "unsafe" not in policy
    assert "Access-Control-Allow-Origin" not in answer.headers
    link.close()


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Host": "attacker.example"}, 421),  # a name that was made to lead here
        ({"Host": "127.0.0.1.attacker.example:80"}, 421),
        ({"Host": "localhost@attacker.example"}, 421),
        ({"Host": None}, 400),
        ({"Host": "["}, 421),
        ({"Host": "127.0.0.1:8808, attacker.example"}, 421),
        ({"Host": "127.0.0.1:8808/attacker.example"}, 421),
        ({"Host": "[::1"}, 421),
        ({"Origin": "http://attacker.example"}, 403),
        ({"Origin": "null"}, 403),  # as of the frame, whose page may be anyone's
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),  # another port of this machine
        ({"Authorization": None}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer \u00e9"}, 401),
    ],
)
@pytest.mark.parametrize("path", ["/models", "/ask"])
def test_others_are_refused(live, headers, code, path):
    body = None if path == "/models" else json.dumps(QUESTION).encode()
    assert live.get(path, "GET" if body is None else "POST", body, **headers)[0] == code
    assert live.get()[0] == 200


def test_this_page_may_ask(live):
    origin = f"http://{live.host}"
    assert json.loads(live.get(Origin=origin, Sec_Fetch_Site="same-origin")[1])["models"] == ["demo"]
    there = f"localhost:{live.page.port + 1}"  # as through a tunnel of ssh
    assert live.get(Host=there, Origin=f"http://{there}")[0] == 200


@pytest.mark.parametrize("path", ["/other", "/../etc/passwd", "/ask/..", "//", "/%2e%2e/page.js", "/models/"])
def test_no_other_path_is_there(live, path):
    assert live.get(path)[0] in (404, 307, 401)
    assert live.get(path, Authorization=None)[0] == 401


def test_methods(live):
    assert live.get("/ask")[0] == 405
    assert live.get("/models", "DELETE")[0] == 405
    assert live.get("/", "POST", b"{}")[0] == 405


def test_a_body_that_is_too_long_is_refused_before_it_is_read(live):
    with live.raw() as link:
        head = f"POST /ask HTTP/1.1\r\nHost: {live.host}\r\nAuthorization: Bearer {live.page.token}\r\n"
        link.sendall(f"{head}Content-Length: {100 * 2**20}\r\n\r\n".encode())
        assert link.recv(100).startswith(b"HTTP/1.1 413")
    with live.raw() as link:
        link.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        piece = b"100000\r\n" + b"x" * 2**20 + b"\r\n"
        with contextlib.suppress(OSError):  # it stops listening
            for _ in range(100):
                link.sendall(piece)
        with contextlib.suppress(ConnectionResetError):
            assert link.recv(100)[:12] in (b"HTTP/1.1 413", b"")
    assert live.get()[0] == 200


def test_a_body_that_does_not_come(live, monkeypatch):
    monkeypatch.setattr(app, "BODY_SECONDS", 0.3)
    with live.raw() as link:
        head = f"POST /ask HTTP/1.1\r\nHost: {live.host}\r\nAuthorization: Bearer {live.page.token}\r\n"
        link.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        assert link.recv(100).startswith(b"HTTP/1.1 408")
    assert live.get()[0] == 200


def test_a_thousand_connections_that_say_nothing(live, monkeypatch):
    monkeypatch.setattr(guard, "STRANGER_SECONDS", 3600.0)  # the oldest make room, long before their time is over
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    try:
        with contextlib.ExitStack() as links:
            for _ in range(1000):
                links.enter_context(live.raw())
            assert live.get()[0] == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_bytes_that_are_no_request(live):
    """Whatever comes, the next question is answered."""
    rng = random.Random(0)
    whole = f"GET /models HTTP/1.1\r\nHost: {live.host}\r\nAuthorization: Bearer {live.page.token}\r\n\r\n".encode()
    for _ in range(200):
        at = rng.randrange(len(whole))
        said = whole[:at] + rng.randbytes(rng.choice((0, 1, 8))) + whole[at + rng.choice((0, 1, 20)) :]
        with live.raw() as link:
            link.sendall(said)
            link.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert live.page.token.encode() not in link.recv(10_000)
    assert live.get()[0] == 200


def test_a_stranger_is_not_waited_for(live, monkeypatch):
    monkeypatch.setattr(guard, "STRANGER_SECONDS", 0.2)
    with live.raw() as link:
        link.sendall(b"GET / HT")
        assert link.recv(100) == b""  # it was ended


ASKS = {"command": "view", "model": "demo", "text": "a"}


@pytest.mark.parametrize(
    ("said", "why", "hint"),
    [
        (b"", "expected a question in JSON", '"command": "view"'),
        (b"{", "expected a question in JSON", '"command": "view"'),
        (b"[" * 100_000, "expected a question in JSON", '"command": "view"'),
        (b"[]", "question: expected an object, got []", "it has command, model, text"),
        (b"null", "question: expected an object, got None", "it has command, model, text"),
        (b'"view"', "question: expected an object, got 'view'", "it has command, model, text"),
        (b"{}", "question lacks the field 'command'", "it has command, model, text"),
        ({"command": "view", "model": "demo"}, "question lacks the field 'text'", "it has command, model, text"),
        (ASKS | {"command": "heads"}, "question.command: expected 'view' or 'knockout'", "question needs this field"),
        (ASKS | {"text": ["a"]}, "question.text: expected a text, got ['a']", "question needs this field"),
        (ASKS | {"out": "/tmp/page.html"}, "question has no field 'out'", "it has command, model, text"),
        (ASKS | {"trust_remote_code": True}, "question has no field 'trust_remote_code'", "it has command, model"),
        (ASKS | {"generate": "1"}, "question.generate: expected a whole number or null, got '1'", "or leave it out"),
    ],
)
def test_what_is_no_question_is_refused_with_the_next_step(live, said, why, hint):
    code, text = live.get("/ask", "POST", said if isinstance(said, bytes) else json.dumps(said).encode())
    assert code == 400
    says, next_step = text.decode().split("; ", 1)
    assert says.startswith(why)
    assert hint in next_step
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": "/etc"}, "is not held"),
        ({"compare_model": "../models/other"}, "is not held"),
        ({"picture": "no base64"}, "no base64"),
        pytest.param({"picture": "AAAA"}, "picture", marks=pytest.mark.e2e),
        ({"query": "elephant"}, "elephant"),
        ({"select": "99.0"}, "99"),
        pytest.param({"engine": "../x"}, "engine", marks=pytest.mark.e2e),
        ({"text": ""}, "text"),
    ],
)
def test_what_cannot_be_answered_says_why(live, changes, why):
    lines, _ = live.ask(**changes)
    assert why in lines[-1]["failed"]
    assert "Traceback" not in lines[-1]["failed"]


def test_an_answer_is_the_page_that_the_command_writes(live, tmp_path):
    lines, page = live.ask(query="last", key="bank", compare_text="the cat \U0001f98a sat")
    assert lines[-1]["code"] == 0
    assert any("stage" in line and line["total"] == line["done"] for line in lines)
    assert any("page.html" in line.get("said", "") for line in lines)
    assert not any("attnscope-page-" in str(line) for line in lines)  # the folder, which the reader cannot open
    asked = ("--query", "last", "--key", "bank", "--compare-text", "the cat \U0001f98a sat")
    call("view", "--file", "-", *asked, "--out", str(tmp_path / "page.html"), stdin=SENTENCE.encode()).ok()
    assert page == (tmp_path / "page.html").read_bytes()


def test_a_question_names_no_file(tmp_path):
    """What its command reads and writes lies in the folder of the question, or comes by the pipe."""
    given = {"text": "/etc/passwd", "target": "-", "picture": "AAAA"}
    asked = from_json(question.LiveQuestion, QUESTION | given, "question")
    words = asked.arguments([LoadOptions()], tmp_path)
    assert words[1::2] == ["--config", "--file", "--out"]
    assert [word for word in words[2::2] if word != "-"] == [
        str(tmp_path / name) for name in ("question.yaml", "page.html")
    ]
    options = yaml.safe_load((tmp_path / question.CONFIG).read_text())
    assert options == {"model": "demo", "target": "-", "picture": [str(tmp_path / question.PICTURE)]}
    assert (tmp_path / question.PICTURE).read_bytes() == b"\0\0\0"


def answered(tmp_path, folder, **said):
    """The page that the command of a question writes, run in this process."""
    asked = from_json(question.LiveQuestion, QUESTION | said | {"model": folder}, "question")
    call(*asked.arguments([LoadOptions(model=folder)], tmp_path), stdin=asked.text.encode()).ok()
    return (tmp_path / question.PAGE).read_bytes()


def test_the_command_of_a_question_with_a_picture(tmp_path):
    shown = base64.b64encode(Path(picture(tmp_path / "field.png")).read_bytes()).decode()
    page = answered(tmp_path, saved("llava", tmp_path), text="What is this?", picture=shown)
    assert b'"pictures":[{"src":"data:image/' in page


def test_the_command_of_a_question_with_a_target(tmp_path):
    folder = str(with_tokenizer(tiny("t5", vocab_size=2000, decoder_start_token_id=0), tmp_path / "t5"))
    assert b"la banque" in answered(tmp_path, folder, target="la banque", query="last")


@pytest.mark.e2e
def test_a_text_with_a_picture(tmp_path):
    folder = saved("llava", tmp_path)
    bytes_of = Path(picture(tmp_path / "field.png")).read_bytes()
    with app.LivePage(lambda: [LoadOptions(model=folder)]) as address:
        live = Asking(None, address)
        lines, page = live.ask(model=folder, text="What is this?", picture=base64.b64encode(bytes_of).decode())
    assert lines[-1].get("code") == 0, lines[-1]
    assert b'"pictures":[{"src":"data:image/' in page


@pytest.mark.e2e
def test_a_text_and_its_target(tmp_path):
    folder = str(with_tokenizer(tiny("t5", vocab_size=2000, decoder_start_token_id=0), tmp_path / "t5"))
    with app.LivePage(lambda: [LoadOptions(model=folder)]) as address:
        lines, page = Asking(None, address).ask(model=folder, target="la banque", query="last")
    assert lines[-1].get("code") == 0, lines[-1]
    assert b"la banque" in page


def test_a_chat(live):
    lines, page = live.ask(text="hi", chat=True, generate=2)
    assert lines[-1].get("code") == 0, lines[-1]
    assert any(line.get("said", "").startswith("generated 2 tokens") for line in lines)
    assert b'"user"' in page


def test_a_question_for_a_model_asks_for_it_as_it_was_loaded(tmp_path):
    held = LoadOptions(model="runs/x", dtype="bfloat16", offline=True)
    asked = from_json(question.LiveQuestion, QUESTION | {"model": "runs/x"}, "question")
    words = asked.arguments([LoadOptions(), held], tmp_path)
    assert words[words.index("--file") + 1] == "-"
    said = (tmp_path / question.CONFIG).read_text()
    assert "dtype: bfloat16" in said
    assert "offline: true" in said


@pytest.mark.parametrize("field", ["text", "target"])
def test_a_question_has_an_end(field):
    with pytest.raises(AttnscopeError, match="too long"):
        from_json(question.LiveQuestion, QUESTION | {field: "a" * (question.MOST_LETTERS + 1)}, "question")


@pytest.fixture
def begun(monkeypatch):
    """The commands that were begun."""
    found, original = [], asyncio.create_subprocess_exec

    async def noted(*words, **options):
        found.append(await original(*words, **options))
        return found[-1]

    monkeypatch.setattr(asking.asyncio, "create_subprocess_exec", noted)
    return found


def leave(live, said=b"stage"):
    """Ask, and stop listening once something is heard."""
    with live.raw() as link:
        link.sendall(live.request())
        heard = b""
        while said not in heard:
            heard += link.recv(1000)


def test_who_stops_listening_ends_the_command(live, begun, monkeypatch):
    """A command that is not over before."""
    endless = "import sys, time; print('begun', file=sys.stderr); time.sleep(600)"
    monkeypatch.setattr(question.LiveQuestion, "arguments", lambda *_: [])
    monkeypatch.setattr(asking, "COMMAND", (sys.executable, "-c", endless))
    leave(live, b"begun")
    until(lambda: begun[0].returncode is not None)
    assert begun[0].returncode != 0


def test_a_command_that_does_not_end_is_ended(live, begun, monkeypatch):
    deaf = (
        "import signal, sys, time; signal.signal(2, signal.SIG_IGN); print('begun', file=sys.stderr); time.sleep(600)"
    )
    monkeypatch.setattr(question.LiveQuestion, "arguments", lambda *_: [])
    monkeypatch.setattr(asking, "COMMAND", (sys.executable, "-c", deaf))
    monkeypatch.setattr(asking, "GOING_SECONDS", 0.2)
    leave(live, b"begun")
    until(lambda: begun[0].returncode is not None)
    assert begun[0].returncode == -9


def test_a_question_takes_its_time_and_no_more(live, begun, monkeypatch):
    monkeypatch.setattr(asking, "COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))
    monkeypatch.setattr(asking, "MOST_SECONDS", 0.3)
    lines, _ = live.ask()
    assert lines[-1]["failed"].startswith("stopped")
    assert begun[0].returncode is not None


def test_questions_that_come_together_are_counted(live, monkeypatch):
    monkeypatch.setattr(question.LiveQuestion, "arguments", lambda *_: ["600"])
    monkeypatch.setattr(asking, "COMMAND", ("sleep",))
    with contextlib.ExitStack() as links:
        asked = [links.enter_context(live.raw()) for _ in range(21)]
        for link in asked:
            link.sendall(live.request())
        codes = [link.recv(12)[-3:] for link in asked]
    assert sorted(codes) == [b"200"] * 18 + [b"503"] * 3
    until(lambda: live.get("/ask", "POST", b"[]")[0] == 400)  # who has left is counted no more


def test_what_strangers_send_is_logged_nowhere(live, caplog):
    upgrade = f"GET / HTTP/1.1\r\nHost: {live.host}\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    for said in (b"\0" * 100, b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", upgrade.encode()):
        with live.raw() as link:
            link.sendall(said)
            assert link.recv(5) == b"HTTP/"
    assert caplog.records == []


def test_the_end_of_the_page_ends_the_questions_under_way(begun, monkeypatch, caplog):
    monkeypatch.setattr(question.LiveQuestion, "arguments", lambda *_: ["600"])
    monkeypatch.setattr(asking, "COMMAND", ("sleep",))
    monkeypatch.setattr(app, "CLOSING_SECONDS", HANGS)
    with contextlib.ExitStack() as links:
        with app.LivePage(lambda: [LoadOptions()]) as address:
            live = Asking(None, address)
            for _ in range(3):  # of which two are begun
                links.enter_context(live.raw()).sendall(live.request())
            until(lambda: len(begun) == 2)
        assert all(process.returncode is not None for process in begun)
    assert len(begun) == 2
    assert caplog.records == []


def test_the_command_line_says_what_is_missing(monkeypatch):
    import builtins

    original = builtins.__import__

    def without(name, *rest):
        if name == "attnscope.serve.page":
            raise ImportError("No module named 'uvicorn'", name="uvicorn")
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    done = call("serve", "--page")
    assert done.code == 2
    assert "--page needs uvicorn" in done.err
    assert "attnscope[serve]" in done.err


@pytest.fixture
def known(monkeypatch):
    """The address of the next page: its port and its token are known before it is begun."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(app.secrets, "token_urlsafe", lambda size: "t" * size)
    return f"http://127.0.0.1:{port}/#{'t' * 32}"


def answers(port: int) -> bool:
    """Whether somebody listens at a port."""
    with contextlib.closing(socket.socket()) as link:
        return link.connect_ex(("127.0.0.1", port)) == 0


def test_a_page_joins_the_server_that_runs_and_ends_with_it(stubbed, known):
    models = []
    with stubbed() as (server, _), ThreadPoolExecutor(1) as other:
        server.hold(LoadOptions("tests/../attnscope/demo"))

        def look():
            try:
                until(lambda: server.pages == 1)
                until(partial(answers, Asking(None, known).port))  # it joins before it listens
                models.append(json.loads(Asking(None, known).get()[1])["models"])
                models.append(call("serve", "status").ok().err)
            finally:  # or the page would never end
                call("serve", "stop").ok()

        looking = other.submit(look)
        port = known.partition("/#")[0].rpartition(":")[2]
        done = call("serve", "--page", "--port", port, "-m", os.path.abspath("attnscope/demo")).ok()
        looking.result()
    assert done.out.decode().strip() == known
    assert "which answers for demo, tests/../attnscope/demo" in done.err
    assert done.err.splitlines()[-1] == "the server has ended, and the page with it"
    assert models[0] == ["demo", "tests/../attnscope/demo"]
    assert ", 1 page, " in models[1]
    assert server.pages == 0


@pytest.mark.parametrize(
    ("more", "code", "why"),
    [
        (["-m", "runs/other"], 2, "does not hold runs/other as it is asked for"),
        (["--dtype", "bfloat16"], 2, "does not hold demo as it is asked for"),
        (["--idle", "5m"], 2, "--idle is that of the server"),
    ],
)
def test_a_page_asks_for_what_the_server_that_runs_cannot_give(stubbed, more, code, why):
    with stubbed() as (server, _):
        done = call("serve", "--page", *more)
        until(lambda: server.pages == 0)
    assert (done.code, done.out) == (code, b"")
    assert why in done.refusal


def test_a_page_of_another_environment_joins_no_server(stubbed, monkeypatch):
    with stubbed():
        monkeypatch.setattr(identity, "environment", lambda: "another")
        assert "runs in another environment; end it: attnscope serve stop" in call("serve", "--page").refusal


def test_the_commands_of_a_page_run_where_its_server_does(begun, monkeypatch, tmp_path):
    monkeypatch.setattr(question.LiveQuestion, "arguments", lambda *_: [])
    monkeypatch.setattr(
        asking, "COMMAND", (sys.executable, "-ISc", "import os, sys; print(os.getcwd(), file=sys.stderr)")
    )
    with app.LivePage(lambda: [LoadOptions()], folder=str(tmp_path)) as address:
        lines, _ = Asking(None, address).ask()
    assert lines[0] == {"said": os.path.realpath(tmp_path)}


@pytest.mark.e2e
def test_a_page_of_another_process_is_answered_by_the_server(tmp_path):
    """Though it was begun in another folder, from which the path of the model leads nowhere."""
    with serving(tmp_path / "run", "--model", "attnscope/demo") as server:
        page = subprocess.Popen(
            [*ATTNSCOPE, "serve", "--page", "-q"],
            env=os.environ | server.environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
        )
        lines, _ = Asking(None, page.stdout.readline().decode().strip()).ask(model="attnscope/demo")
        assert lines[-1].get("code") == 0, lines
        assert (server.status["answered"], server.status["pages"]) == (1, 1)
        server.call("serve", "stop").ok()
        assert page.wait(HANGS) == 0
        page.stdout.close()


def test_port_goes_with_page():
    assert "add --page" in call("serve", "--port", "8000").err
