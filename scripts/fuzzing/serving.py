"""Servers that answer what no server answers, and files of commands."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from attnscope.errors import AttnscopeError
from attnscope.model.options import LoadOptions
from attnscope.serve import wire
from attnscope.serve.page import LiveQuestion
from attnscope.serve.questions import PURPOSES
from attnscope.utils.schema import from_json
from fuzzing.made import shallow
from fuzzing.trying import Ended, Try, kind
from fuzzing.words import JSONS, NASTY, TEXT

KINDS_OF_PARTS = ("said", "warned", "stage", "step", "over", "prepared", "answer", "error", "no", "?")
RECORDS = [{"~": one, "fields": {}} for one in (*(one.record for one in PURPOSES.values()), "Prompt", "again")]
QUESTIONS = (
    ["heads", "-q"],
    ["relations"],
    ["keys", "-q"],
    ["tokens"],
    ["view", "--out", "-"],
    ["explain", "--head", "0.0"],
    ["why", "--head", "0.0", "-q"],
    ["knockout", "--key", "0", "--random", "0"],
)


@kind
def answers(rng: random.Random, folder: Path) -> Try:
    """A command asks what listens on this user's socket, and gets any answer."""
    parts = [_part(rng) for _ in range(rng.choice((1, 2, 5)))]
    environment: dict[str, str | None] = {"XDG_RUNTIME_DIR": str(folder / "run"), "ATTNSCOPE_NO_SERVER": None}
    command = rng.choice(QUESTIONS)
    arguments = [*command, "--model", str(shallow()), "--text", TEXT]
    if rng.random() < 0.2:
        arguments = ["serve", rng.choice(("--status", "stop"))]
    return Try(arguments, environment=environment, before=listening(folder / "run" / "attnscope", parts))


@kind
def command_files(rng: random.Random, folder: Path) -> Try:
    """The lines of a file are run as commands; at most one is wrong."""
    known = f"keys -q --model {shallow()} --text bank"
    row = rng.choice((*(one for one in NASTY if "\n" not in one), "serve --stop", "heads '", "--help", known))
    rows = ["# a comment", rng.choice((known, "", "metrics focus")), row]
    path = folder / "commands.txt"
    path.write_bytes("\n".join(rows).encode(errors="surrogatepass"))
    return Try(["run", str(path)])


@kind
def long_lines(rng: random.Random, folder: Path) -> Try:
    """A file of commands has a line that is longer than any command, whose end would be one if it were a line."""
    path, hidden = folder / "commands.txt", "metrics focus"
    begin, letter = rng.choice(
        (("#", "x"), ("metrics ", "x"), ("metrics '", "x"), ('metrics "', "\\\\"), ("metrics ", "''"))
    )
    size = rng.choice((2**19, 2**20, 2**22, 2**23, 2**24)) + rng.choice((-1, 0, 0, 1))
    path.write_text(
        (begin + letter * (size // len(letter)))[:size] + rng.choice((hidden, f"{letter}\n")), encoding="utf-8"
    )

    def after(ended: Ended) -> Iterable[str]:
        return ["a part of a line was run"] if size >= 2**20 and b"focus" in ended.out else []  # a shorter one is run

    return Try(["run", str(path)], after=after)


@kind
def page_port(rng: random.Random, folder: Path) -> Try:
    """Questions that come together at the port of the live page, amid bytes of others; none of them is on stderr."""
    questions, others = rng.choice((5, 18, 25)), [_of_a_stranger(rng) for _ in range(rng.choice((0, 5)))]

    def after(ended: Ended) -> Iterable[str]:
        return ["a line about strangers"] if ended.err else []

    return Try(["metrics", "focus"], before=lambda: _asked_together(questions, others), after=after)


METHODS = ("GET", "POST", "GE\0T")


def _of_a_stranger(rng: random.Random) -> str:
    host = rng.choice(
        ("HOST", "HOST, evil.com", "HOST/evil.com", "localhost", "evil.com", "[::1", "HOST\r\nHost: HOST")
    )
    more = rng.choice(("", "Connection: upgrade\r\nUpgrade: websocket\r\n", "Authorization: Bearer x\r\n", "\0"))
    path = rng.choice(("/", "/models", "/ask", "//", "x", "/%ff", "/" + "a" * 99_999))
    return f"{rng.choice(METHODS)} {path} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n"


# Connects, says all at once, and prints the codes that come back; `nobody` asks the network in the process of the page.
CLIENT = """
import json, socket, sys
port, messages = json.load(sys.stdin)
links = [socket.create_connection(("127.0.0.1", port), timeout=50) for _ in messages]
for link, message in zip(links, messages):
    link.sendall(message.encode("latin-1"))
codes = []
for link in links:
    try:
        codes.append(link.recv(12)[-3:].decode("latin-1"))
    except OSError:
        codes.append("")
print(json.dumps(codes))
"""


def _asked_together(questions: int, others: list[str]) -> None:
    """Ask a page in this process, and look at how many were taken. Raises AssertionError for other codes."""
    from attnscope.serve import page as app
    from attnscope.serve import page as asking

    asking.COMMAND = (sys.executable, "-ISc", "import time; time.sleep(600)")
    with app.LivePage(lambda: [LoadOptions()]) as address:
        host, _, token = address.removeprefix("http://").partition("/#")
        body = json.dumps({"command": "view", "model": "demo", "text": TEXT})
        head = f"POST /ask HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\n"
        messages = [one.replace("HOST", host) for one in others]
        messages += [f"{head}Content-Length: {len(body)}\r\n\r\n{body}"] * questions
        said = json.dumps([int(host.partition(":")[2]), messages])
        done = subprocess.run(
            [sys.executable, "-ISc", CLIENT], input=said, capture_output=True, text=True, check=True, timeout=50
        )
        codes = json.loads(done.stdout)[len(others) :]
    most = app.MOST_AT_ONCE + app.MOST_WAITING
    assert sorted(codes) == ["200"] * min(questions, most) + ["503"] * max(questions - most, 0), codes


@kind
def page_questions(rng: random.Random, folder: Path) -> Try:
    """What the live page asks, with anything in some of its fields."""
    model = str(shallow())
    said = {"command": rng.choice(("view", "knockout")), "model": model, "text": TEXT}
    names = [one.name for one in fields(LiveQuestion) if one.name not in ("command", "model")]
    values = (*NASTY, "last", "0.1", "demo", "AAAA", model, 0, 3, True, None)
    try:
        question = from_json(
            LiveQuestion, said | {name: rng.choice(values) for name in rng.sample(names, 2)}, "question"
        )
        arguments = question.arguments([LoadOptions(model=model)], folder)
    except AttnscopeError:
        question = from_json(LiveQuestion, said, "question")
        arguments = question.arguments([LoadOptions(model=model)], folder)
    stdin = question.text.encode(errors="surrogatepass")
    return Try([*arguments, "--quiet"], stdin=stdin)


def _part(rng: random.Random) -> bytes:
    """A frame of an answer, or what is none."""
    said: Any = [rng.choice(KINDS_OF_PARTS), rng.choice((*JSONS, *NASTY, *RECORDS, ["UsageError", *NASTY[:2]]))]
    whole = framed(rng.choice((said, said, said, rng.choice(JSONS))), last=rng.random() < 0.3)
    if rng.random() < 0.3:
        place = rng.randrange(max(len(whole), 1))
        whole = whole[:place] + rng.randbytes(rng.choice((0, 1, 40))) + whole[place + 1 :]
    return whole[: 2**16]


def framed(said: Any, last: bool = False) -> bytes:
    """A frame without blobs; nothing for what has no form in JSON."""
    left, right = socket.socketpair()
    with left, right:
        with suppress(TypeError, ValueError):
            wire.send(left, said, last=last)
        left.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: right.recv(2**16), b""))


def listening(folder: Path, parts: list[bytes], seconds: float = 0.0) -> Callable[[], None]:
    """What listens in a folder, and says these parts to who asks; seconds: how long it keeps the link then."""

    def listen() -> None:
        os.makedirs(folder, mode=0o700)
        heard = socket.socket(socket.AF_UNIX)
        heard.bind(str(folder / "serve.sock"))
        heard.listen()
        threading.Thread(target=answer, args=(heard,), daemon=True).start()

    def answer(heard: socket.socket) -> None:
        link, _ = heard.accept()
        with link, suppress(OSError, wire.WireError):
            wire.receive(link)
            link.sendall(b"".join(parts))
            time.sleep(seconds)

    return listen
