"""Servers that answer what no server answers, and files of commands."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from attnscope.errors import AttnscopeError
from attnscope.live.question import LiveQuestion
from attnscope.model.options import LoadOptions
from attnscope.purposes.named import PURPOSES
from attnscope.serve import wire
from attnscope.typed import typed
from fuzzing.made import shallow
from fuzzing.trying import Try, kind
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
        arguments = ["serve", rng.choice(("--status", "--stop"))]
    return Try(arguments, environment=environment, before=_listening(folder / "run" / "attnscope", parts))


@kind
def command_files(rng: random.Random, folder: Path) -> Try:
    """The lines of a file are run as commands."""
    known = f"keys -q --model {shallow()} --text bank"
    row = rng.choice((*NASTY, "serve --stop", "heads '", "--help", known))  # one, of which at most one is wrong
    rows = ["# a comment", rng.choice((known, "", "metrics focus")), row]
    path = folder / "commands.txt"
    path.write_bytes("\n".join(rows).encode(errors="surrogatepass"))
    return Try(["serve", "--run", str(path)])


@kind
def page_questions(rng: random.Random, folder: Path) -> Try:
    """What the live page asks, with anything in some of its fields."""
    model = str(shallow())
    said = {"command": rng.choice(("view", "knockout")), "model": model, "text": TEXT}
    names = [one.name for one in fields(LiveQuestion) if one.name not in ("command", "model")]
    values = (*NASTY, "last", "0.1", "demo", "AAAA", model, 0, 3, True, None)
    try:
        question = typed(LiveQuestion, said | {name: rng.choice(values) for name in rng.sample(names, 2)}, "question")
        arguments = question.arguments([LoadOptions(model=model)], folder)
    except AttnscopeError:
        question = typed(LiveQuestion, said, "question")
        arguments = question.arguments([LoadOptions(model=model)], folder)
    stdin = question.text.encode(errors="surrogatepass")
    return Try([*arguments, "--quiet"], stdin=stdin)


def _part(rng: random.Random) -> bytes:
    """A frame of an answer, or what is none."""
    said: Any = [rng.choice(KINDS_OF_PARTS), rng.choice((*JSONS, *NASTY, *RECORDS, ["UsageError", *NASTY[:2]]))]
    left, right = socket.socketpair()
    with left, right:
        with suppress(TypeError, ValueError):
            wire.send(left, rng.choice((said, said, said, rng.choice(JSONS))), last=rng.random() < 0.3)
        left.shutdown(socket.SHUT_WR)
        whole = b"".join(iter(lambda: right.recv(2**16), b""))
    if rng.random() < 0.3:
        place = rng.randrange(max(len(whole), 1))
        whole = whole[:place] + rng.randbytes(rng.choice((0, 1, 40))) + whole[place + 1 :]
    return whole[: 2**16]


def _listening(folder: Path, parts: list[bytes]) -> Callable[[], None]:
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

    return listen
