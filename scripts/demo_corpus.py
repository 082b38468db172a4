"""The text that the embedded model is trained on: found in Python's own installation, and a little made here.

Found: docstrings and comment blocks of the standard library, and the language topics of `pydoc_data`. Made: plain
sentences from a small grammar. Nothing outside the standard library is read, so the text depends on the Python
version alone; `Corpus.sha256` says which text it was.
"""

import ast
import hashlib
import inspect
import os
import random
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Parts that distributions leave out or patch, and parts that are tables rather than text.
SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "tkinter",
    "turtledemo",
    "lib2to3",
    "ensurepip",
    "encodings",
    "lib-dynload",
    "pydoc_data",
    "__pycache__",
}
SKIPPED_FILES = {"sitecustomize.py", "usercustomize.py", "site.py", "this.py", "turtle.py"}
HELD_OUT_SHARE = 16  # one document in sixteen is never trained on
SHINGLE_WORDS = 8


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and documents held out; no run of eight words is in both."""

    train: list[str]
    held_out: list[str]
    made: list[str]

    @property
    def sha256(self) -> str:
        """Hash of every document, in order, with the part it belongs to."""
        digest = hashlib.sha256()
        for part in (self.train, self.held_out, self.made):
            for text in part:
                digest.update(text.encode("utf-8") + b"\0")
            digest.update(b"\1")
        return digest.hexdigest()


def read_corpus(seed: int) -> Corpus:
    """Read, clean, and split the standard library's text.

    `seed` chooses the made sentences only; which found documents are held out follows from their own text.

    >>> corpus = read_corpus(seed=0)
    >>> corpus.sha256[:8]
    """
    train: list[str] = []
    held_out: list[str] = []
    for text in _unique_paragraphs(_found_documents()):
        chosen = int(hashlib.sha256(text.encode("utf-8")).hexdigest(), 16) % HELD_OUT_SHARE == 0
        (held_out if chosen else train).append(text)
    seen = {shingle for text in train for shingle in _shingles(text)}
    kept = [_without_seen_paragraphs(text, seen) for text in held_out]
    return Corpus(train, [text for text in kept if text], list(_made_documents(random.Random(seed))))


def _found_documents() -> Iterator[str]:
    from pydoc_data.topics import topics

    for _, text in sorted(topics.items()):
        yield text
    for path in _library_files(Path(sysconfig.get_path("stdlib"))):
        source = path.read_text(encoding="utf-8", errors="replace")
        yield from _docstrings(source)
        yield from _comment_blocks(source)


def _library_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(
            name for name in subfolders if name not in SKIPPED_FOLDERS and not name.startswith("config-")
        )
        for name in sorted(names):
            if name.endswith(".py") and name not in SKIPPED_FILES and not name.startswith("_sysconfigdata"):
                yield Path(folder, name)


def _docstrings(source: str) -> Iterator[str]:
    """Docstrings in the order of the source, read without importing the module."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # lib has files for other versions of the language
        return
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(tree) if isinstance(node, owners)]
    for node in sorted(found, key=lambda node: getattr(node, "lineno", 0)):
        text = ast.get_docstring(node, clean=True)
        if text:
            yield text


def _comment_blocks(source: str, at_least: int = 3) -> Iterator[str]:
    """Comments of three lines or more that stand alone: prose, rather than a remark on the line."""
    block: list[str] = []
    for line in [*source.splitlines(), ""]:
        stripped = line.strip()
        if stripped.startswith("#"):
            block.append(stripped.lstrip("#!").removeprefix(" "))
            continue
        if len(block) >= at_least:
            yield inspect.cleandoc("\n".join(block))
        block = []


def _unique_paragraphs(documents: Iterator[str]) -> Iterator[str]:
    """Drop every paragraph that was seen before, wherever it was, and those that are not words."""
    seen: set[str] = set()
    for text in documents:
        kept = []
        for paragraph in re.split(r"\n\s*\n", text.replace("\t", "    ").replace("\r", "")):
            key = " ".join(re.findall(r"[a-z]+", paragraph.lower()))
            if key not in seen and len(key) >= 0.6 * len(re.sub(r"\s+", " ", paragraph)) and len(key) >= 12:
                seen.add(key)
                kept.append(paragraph.rstrip())
        if kept:
            yield "\n\n".join(kept)


def _shingles(text: str) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"[a-z0-9]+", text.lower())
    for start in range(max(1, len(words) - SHINGLE_WORDS + 1)):
        yield tuple(words[start : start + SHINGLE_WORDS])


def _without_seen_paragraphs(text: str, seen: set[tuple[str, ...]]) -> str:
    """Leave out of a held-out document each paragraph that shares eight words in a row with the training text."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(part for part in paragraphs if not any(shingle in seen for shingle in _shingles(part)))


def _words(text: str) -> list[str]:
    return text.split()


ADJECTIVES = _words("""
    financial old small large quiet busy new narrow deep wooden local famous green cold early empty
    public bright dusty gentle heavy hidden modern northern patient quick red southern tall warm
    western young
""")
PLACES = _words("""
    river bank bridge town village market station school garden library harbour church mill forest
    valley road square hill lake island field castle museum hospital office factory farm street
    tower house
""")
PEOPLE = _words("""
    teacher farmer doctor banker sailor writer baker child student driver painter judge traveller
    neighbour engineer gardener nurse fisherman clerk merchant
""")
THINGS = _words("""
    letter boat loan book map box key coin lamp basket ticket table clock picture story song coat
    horse dog cat bird apple loaf cup window door chair
""")
ACTIONS = _words("""
    found sold carried painted repaired lost bought watched hid borrowed counted opened cleaned drew
    left brought forgot kept
""")
STATES = _words("is was lies stands")
RELATIONS = _words("on in near behind beside above below across along under")
LOCATED = _words("located built found seen placed")
TIMES = ["yesterday", "today", "every morning", "in the evening", "last winter", "before noon", "at night"]


def _made_documents(rng: random.Random, count: int = 1200) -> Iterator[str]:
    for _ in range(count):
        # One half in lower case without stops: how people type a text into a prompt.
        plain = rng.random() < 0.5
        sentences = [_sentence(rng) for _ in range(rng.randint(2, 6))]
        yield "\n".join(sentences) if plain else " ".join(line[0].upper() + line[1:] + "." for line in sentences)


def _noun(rng: random.Random, names: list[str]) -> str:
    article = rng.choice(["the", "the", "the", "a", "every", "this", "her", "our"])
    adjective = f"{rng.choice(ADJECTIVES)} " if rng.random() < 0.6 else ""
    return re.sub(r"^a (?=[aeiou])", "an ", f"{article} {adjective}{rng.choice(names)}")


def _sentence(rng: random.Random) -> str:
    place, where = _noun(rng, PLACES), f"{rng.choice(RELATIONS)} {_noun(rng, PLACES)}"
    person, thing = _noun(rng, PEOPLE), _noun(rng, THINGS)
    return rng.choice(
        [
            f"{place} is {rng.choice(LOCATED)} {where}",
            f"{place} {rng.choice(STATES)} {where}",
            f"{person} {rng.choice(ACTIONS)} {thing} {where}",
            f"{person} {rng.choice(ACTIONS)} {thing} {rng.choice(TIMES)}",
            f"{person} and {_noun(rng, PEOPLE)} went from {place} to {_noun(rng, PLACES)}",
            f"{rng.choice(TIMES)} {person} gave {thing} to {_noun(rng, PEOPLE)}",
            f"when {person} {rng.choice(ACTIONS)} {thing}, {_noun(rng, PEOPLE)} was {where}",
        ]
    )
