"""Pages opened in Chromium, at hostile addresses and with hostile words in what they show."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote

from fuzzing.judging import steers
from fuzzing.made import copied, left, room
from fuzzing.pages import FACTS
from fuzzing.trying import Ended, Try, kind
from fuzzing.words import JSONS, NASTY, NUMBERS, edit

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 60
OPTIONS = (
    "--headless",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
)
OPTIONS += ("--enable-logging=stderr", "--virtual-time-budget=2000", "--dump-dom")
MARKUP = ("<img src=x onerror=document.title='trapped'>", "</script><script>document.title='trapped'</script>")
VIEWS = ("model", "metrics", "head", "matrix", "text", "token", "steps", "why", "compare", "picture", "constructor", "")
KEYS = (
    "at",
    "head",
    "query",
    "key",
    "keyEnd",
    "group",
    "sort",
    "theme",
    "side",
    "filter",
    "min",
    "__proto__",
    "toString",
)


@kind
def addresses(rng: random.Random, folder: Path) -> Try:
    """A page of tables whose manifest and roles are hostile words, at an address that no link of ours has."""
    runs, words = copied(left("run"), folder, "runs"), [*NASTY[:14], *MARKUP]
    word = rng.choice(words).replace("\ud800", "")
    edit(runs / "manifest.json", lambda values: values["model"].update({rng.choice(FACTS[:3]): word}))
    table = runs / "heads.csv"
    if rng.random() < 0.5:
        role = '"' + rng.choice(words).replace('"', '""').replace("\ud800", "") + '"'
        first, *rows = table.read_text(encoding="utf-8").splitlines()
        cells, place = rows[0].split(","), rng.choice((3, 4, 5))  # role, text_role, atlas_roles
        rows[0] = ",".join([*cells[:place], role, *cells[place + 1 :]])
        table.write_text("\n".join([first, *rows]), encoding="utf-8", newline="")
    said = [f"view={rng.choice(VIEWS)}"]
    for key in rng.sample(KEYS, 3):
        value = str(rng.choice((*words, *NUMBERS, *JSONS, "0", "1")))[:500].encode(errors="replace").decode()
        said.append(f"{key}={quote(value) if rng.random() < 0.7 else value}")

    def after(ended: Ended) -> Iterable[str]:
        page = folder / "page.html"
        state = "&".join(said)
        found = wrong_of(page, state) if page.is_file() and browser() else ()
        return [f"{one} at #{state[:200]!a}" for one in found]

    return Try(["view", "-q", str(runs), "--from-tables", "--out", "page.html"], after=after)


@cache
def browser() -> str | None:
    """Chromium, where there is one."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def wrong_of(page: Path, state: str) -> list[str]:
    """What a page at an address does in a browser that it must not do."""
    address = f"{page.as_uri()}#{state}".replace("\0", "%00")  # which an argument cannot hold
    command = [browser() or "", *OPTIONS, f"--user-data-dir={room() / 'browser'}", address]
    command[1:1] = ["--no-sandbox"] if os.geteuid() == 0 else []
    try:
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return ["the page took too long"]
    console = [line for line in done.stderr.decode(errors="replace").splitlines() if ":CONSOLE" in line]
    return wrong_in(done.stdout.decode(errors="replace")) + [
        f"the page's console: {line[-200:]}" for line in console[:1]
    ]


def wrong_in(document: str) -> list[str]:
    """What is wrong with a document that scripts have made."""
    shown, found = Shown(), []
    shown.feed(document)
    text = "\n".join(shown.words)
    if "cannot be shown" in text or "is damaged" in text:
        found.append(f"the page {text[text.find('cannot be shown') :][:200]!r}")
    # A page keeps every joiner, not those of emoji alone as `shown` does: it joins letters and moves none.
    if steering := steers(text.replace("\t", " ").replace("\u200d", "")):
        found.append(f"the page shows {', '.join(steering)}")
    if shown.title.strip() == "trapped" or "onerror" in shown.attributes:
        found.append("the page ran what it shows")
    return found


class Shown(HTMLParser):
    """What a document shows: its words and the words of its attributes, not its scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.attributes, self.title, self._in = list[str](), set[str](), "", list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "style", "title"):
            self._in = [tag]
        self.attributes |= {name for name, _ in attrs}
        self.words += [value or "" for name, value in attrs if name in ("title", "aria-label", "placeholder", "alt")]

    def handle_endtag(self, tag: str) -> None:
        self._in = []

    def handle_data(self, data: str) -> None:
        if self._in == ["title"]:
            self.title += data
        if self._in not in (["script"], ["style"]):
            self.words.append(data)
