"""What is drawn, and data on a terminal."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from xml.etree import ElementTree

from fuzzing.judging import steers
from fuzzing.made import lines
from fuzzing.trying import Ended, Try, heads, kind
from fuzzing.words import NASTY, TEXT

NO_XML = ("\ufffe", "\uffff", "\x08", "&<>", "\U0001fffe")


def _words(rng: random.Random, count: int) -> str:
    words = rng.choices((*NASTY[:8], *NO_XML), k=count)
    return " b ".join(words).replace("\x00", "\x01").replace("\ud800", "?")


@kind
def pictures(rng: random.Random, folder: Path) -> Try:
    image = rng.choice(("pdf", "svg", "svg", "png"))
    (folder / "text.txt").write_text(f"a {_words(rng, 2)}", encoding="utf-8")
    title = rng.choice(([], ["--set", f"title={_words(rng, 1)}"]))
    more = ["--file", str(folder / "text.txt"), "--image", image, "--out", str(folder / "runs"), *title]
    command = rng.choice((["draw", "-q", "--select", "0.0"], ["rollout", "-q"], ["explain", "-q", "--head", "0.0"]))
    if command[0] == "explain":
        more = more[:-2] if title else more
    return Try([*command, *more], after=of_pictures(folder / "runs"))


def of_pictures(runs: Path) -> Callable[[Ended], Iterable[str]]:
    """Every SVG is one that a browser opens, and nothing in it steers what shows it."""

    def after(ended: Ended) -> Iterable[str]:
        for path in sorted(runs.rglob("*.svg")):
            text = path.read_text(encoding="utf-8")
            try:
                ElementTree.fromstring(text)
            except ElementTree.ParseError as error:
                yield f"{path.name} is no XML: {error}"
            if steering := steers(text.replace("\t", " ")):
                yield f"{path.name} holds {', '.join(steering)}"

    return after


@kind
def data_on_terminals(rng: random.Random, folder: Path) -> Try:
    """Tables of every format, of a hostile text, on a terminal; in a file they keep the text as it is."""
    form, text = rng.choice(("csv", "tsv", "jsonl")), f"{TEXT} {_words(rng, 2)}"
    command = rng.choice(("heads", "relations", "keys", "text", "rollout", "tokens", "batch"))
    if command == "batch":
        (folder / "corpus.jsonl").write_bytes(lines({"text": text, "id": _words(rng, 1)}))
        more = ["--query", "last"] if rng.random() < 0.5 else []
        return Try(["batch", "-q", "corpus.jsonl", "--to-stdout", "jsonl", *more], terminal=True)
    if command == "heads":
        return heads("--text", text, "--format", form, terminal=True)
    return Try([command, "-q", "--text", text, "--format", form], terminal=True)
