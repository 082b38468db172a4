"""Models that change while they are held, and ends of a server's socket that stop amid what they say."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from attnscope.model.options import LoadOptions
from attnscope.observe.request import CaptureSpec
from attnscope.serve import client, server, wire
from attnscope.serve import client as relay
from attnscope.serve import wire as place
from fuzzing.made import copied, shallow
from fuzzing.serving import QUESTIONS, framed, listening
from fuzzing.trying import Ended, Try, kind
from fuzzing.words import NASTY, TEXT

HERE: dict[str, str | None] = {
    "XDG_RUNTIME_DIR": "run",
    "ATTNSCOPE_NO_SERVER": None,
}  # a server of the try's own folder
RIVER, BANK = "Ġriver".encode(), "Ġbank".encode()  # tokens of TEXT
LONG_ANSWER = 48  # MiB: more than a server keeps for who does not read


@kind
def changed_in_place(rng: random.Random, folder: Path) -> Try:
    """A file of a model changes between two commands that keep their models, its size and its times as they were."""
    model, lines = copied(shallow(), folder), folder / "lines"
    changed = rng.random() < 0.8
    change = rng.choice(CHANGES if changed else HARMLESS)
    seed, asked = rng.random(), f"view -q --model {model} --text '{TEXT}' --out"
    pages = [folder / "one.html", folder / "two.html"]
    os.mkfifo(lines)

    def write_lines() -> None:
        with open(lines, "w", encoding="utf-8") as pipe:
            pipe.write(f"{asked} {pages[0]}\n")
            pipe.flush()
            while not pages[0].exists():
                time.sleep(0.01)
            change(random.Random(seed), model)
            pipe.write(f"{asked} {pages[1]}\n")

    def after(ended: Ended) -> Iterable[str]:
        if ended.code != 0:
            return [f"left with {ended.code} where a model has changed"]
        same = pages[0].read_bytes() == pages[1].read_bytes()
        return ["answered from what the file held before"] if same and changed else []

    return Try(["run", str(lines)], before=threading.Thread(target=write_lines, daemon=True).start, after=after)


def _weights(rng: random.Random, model: Path) -> None:
    """Other signs of some weights."""

    def signs(data: bytearray) -> None:
        for at in rng.sample(range(len(data) // 4, len(data) // 2), 50_000):
            data[2 * at + 1] ^= 0x80

    _in_place(model / "model.safetensors", signs)


def _words(rng: random.Random, model: Path) -> None:
    """Two words of the text have each other's number."""

    def swap(data: bytearray) -> None:
        for old, new in ((RIVER, b"?"), (BANK, RIVER), (b"?", BANK)):
            _replaced(data, b'"%s":' % old, b'"%s":' % new)

    _in_place(model / "tokenizer.json", swap)


def _angles(rng: random.Random, model: Path) -> None:
    _in_place(model / "config.json", lambda data: _replaced(data, b"10000.0", b"50000.0"))


def _replaced(data: bytearray, old: bytes, new: bytes) -> None:
    data[:] = data.replace(old, new)


def _in_place(path: Path, change: Callable[[bytearray], None]) -> None:
    before = path.stat()
    data = bytearray(path.read_bytes())
    change(data)
    with open(path, "r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _linked(rng: random.Random, model: Path) -> None:
    os.link(model / "model.safetensors", model.with_name("linked"))


def _permitted(rng: random.Random, model: Path) -> None:
    (model / "model.safetensors").chmod(0o600)


CHANGES = (_weights, _words, _angles)
HARMLESS = (_linked, _permitted)


@kind
def silent_servers(rng: random.Random, folder: Path) -> Try:
    """What listens on this user's socket says nothing, or a part of an answer, and no more."""
    parts = [framed(["here", rng.choice(("", *NASTY))]) for _ in range(rng.choice((0, 0, 1, 3)))]
    whole = framed([rng.choice(("said", "stage", "answer", "here")), rng.choice(NASTY)])
    parts.append(whole[: rng.randrange(len(whole))])
    listen = listening(Path("run/attnscope"), parts, seconds=600.0)

    def before() -> None:
        client.SILENT_SECONDS, client.WORD_SECONDS = 0.5, 0.2
        listen()

    asked = [*rng.choice(QUESTIONS), "--model", str(shallow()), "--text", TEXT]
    return Try(asked, environment=HERE, before=before)


@kind
def stalled_clients(rng: random.Random, folder: Path) -> Try:
    """A server is asked by some who stop amid their question, or read nothing of their answer; then by a command."""
    shares = [rng.choice((1.0, 1.0, rng.random(), 0.0)) for _ in range(rng.choice((1, 2, 8)))]
    model = str(shallow())
    asked = [*rng.choice(QUESTIONS), "--model", model, "--text", TEXT]
    return Try(asked, environment=HERE, before=lambda: _stalled(model, shares))


def _stalled(model: str, shares: list[float]) -> None:
    """A server in this process whose worker runs no model, and clients; shares: of its question, what each has sent."""
    server.ASKING_SECONDS = relay.STALLED_SECONDS = 0.5
    os.makedirs("run", mode=0o700)
    server.Worker = Stub  # type: ignore[misc]
    serving = server.Server()
    serving.__enter__()
    serving.hold(LoadOptions(model))
    threading.Thread(target=serving.serve, daemon=True).start()
    question, blobs = client._question(LoadOptions(model), CaptureSpec(TEXT))
    whole = framed(question) if not blobs else b""
    for share in shares:
        link = socket.socket(socket.AF_UNIX)
        link.connect(str(place.address()))
        link.sendall(whole[: int(share * len(whole))])
        Stub.clients.append(link)  # and nothing more


class Stub(server.Worker):
    """A worker in a thread of this process, which runs no model: its answers are long, and none."""

    clients: ClassVar[list[socket.socket]] = []

    def __init__(self) -> None:
        self.link, self._other = socket.socketpair()
        self.lock = threading.Lock()
        self.process: Any = SimpleNamespace(pid=os.getpid(), poll=lambda: None)
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        with suppress(wire.WireError, OSError):
            while True:
                said = wire.receive(self._other).header
                if said["what"] == "load":
                    wire.send(self._other, ["loaded", {}], last=True)
                elif said["what"] == "question":
                    for _ in range(LONG_ANSWER):
                        wire.send(self._other, ["step", 1], [bytes(2**20)])
                    wire.send(self._other, ["no", "a stub answers nothing"], last=True)

    def check(self, passed: float) -> None:
        """It is never suspended."""

    def end(self) -> None:
        self.link.close()
