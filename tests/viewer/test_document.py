"""The document: one file, nothing of the text outside the data, a policy that lets its own script alone run."""

import hashlib
import json
import re
import shutil
import subprocess
from base64 import b64encode
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import attnscope
from helpers.pages import Read

ROOT = Path(attnscope.__file__).parents[1]
VIEWER = ROOT / "attnscope" / "viewer"
HOSTILE = {
    "script": "<script>alert(1)</script><img src=x onerror=alert(2)>",
    "ends": "</script></style></title><!--<script>]]>--!> \"quotes' &amp; &#60;b&#62;",
    "directions": "a\u202eb\u2066c\u2069 \u2028 \u2029 \u200b",
    "nul": "a\0b\x1b[2J\x07 \r\n\t",
    "state": "#view=head&at=99&head=-1 javascript:alert(1) ${x} `y` \\u003cscript\\u003e \\",
    "emoji": "👨‍👩‍👧 日本語 🇺🇸 ﷽ e\u0301",
}


class Tags(HTMLParser):
    """The elements of a document: (name, attributes, text)."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[list] = []
        self.inside = False

    def handle_starttag(self, tag, attributes):
        self.found.append([tag, dict(attributes), ""])
        self.inside = True

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.found[-1][2] += data


def tags(html: bytes) -> list[list]:
    parser = Tags()
    parser.feed(html.decode())
    return parser.found


def shape(html: bytes) -> list[tuple]:
    """What a document is made of, without what is in it."""
    return [(name, sorted(given)) for name, given, _ in tags(html)]


@pytest.fixture(scope="module")
def page(demo):
    return attnscope.capture(demo, "the bank").page()


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_text_is_data(demo, page, text):
    hostile = attnscope.capture(demo, text).page()
    assert shape(hostile.html) == shape(page.html)  # not one element more, and no attribute
    read = Read(hostile.html)
    [side] = read.said["sides"]
    assert "".join(side["tokens"]["plain"]).removeprefix("<s>") == text
    data = re.search(rb'id="page">(.*?)</script>', hostile.html, re.DOTALL)[1]
    assert data.isascii()
    assert not set(b"<>&") & set(data)
    assert len(read.blobs) == len(Read(page.html).blobs)


def test_a_token_of_100_000_characters(demo, page):
    long = "x" * 100_000
    seen = attnscope.capture(demo, "the bank")
    prompt = seen.prompt
    changed = {name: (*getattr(prompt, name)[:-1], long) for name in ("tokens", "labels", "plain")}
    prompt = type(prompt)(**{**vars(prompt), **changed} | {"text": long})
    fields = {**{name: getattr(seen, name) for name in seen.__dataclass_fields__}, "queries": prompt, "keys": prompt}
    made = type(seen)(**fields).page()
    assert Read(made.html).said["sides"][0]["tokens"]["text"][-1] == long
    assert len(made.title) < 200
    assert shape(made.html) == shape(page.html)


def test_the_policy_allows_this_script_and_this_style_and_no_network(page):
    found = tags(page.html)
    [policy] = [given["content"] for _, given, _ in found if given.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    [style] = [text for name, _, text in found if name == "style"]
    [script] = [text for name, given, text in found if name == "script" and not given]
    for rule, text in (("style-src", style), ("script-src", script)):
        assert rules.pop(rule) == f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    none = "'none'"
    assert rules == {"default-src": none, "img-src": "data: blob:", "base-uri": none, "form-action": none}
    assert not any(key.startswith("on") or key in ("style", "src", "href") for _, given, _ in found for key in given)


def test_the_bundle_can_stand_in_a_document():
    for name in ("bundle.js", "bundle.css"):
        text = (VIEWER / name).read_bytes()
        assert text.isascii()
        assert not re.search(rb"<!--|</?script|</style|\r|\0", text, re.IGNORECASE)
        assert set(re.findall(rb"https?://[^/]*", text)) <= {b"http://www.w3.org"}  # names of namespaces


def test_no_source_makes_elements_of_text():
    for path in (VIEWER / "src").rglob("*.js"):
        forbidden = r"\beval\(|new Function|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\.html\(|fetch\("
        assert not re.search(forbidden, path.read_text()), path


def test_no_text_of_the_page_has_a_command_in_backticks():
    """They are code in Markdown, and backticks on a page."""
    lines = [line.strip() for path in (VIEWER / "src").rglob("*.js") for line in path.read_text().splitlines()]
    assert [one for one in lines if re.search(r"`attnscope \w+`", one) and not one.startswith(("*", "/*", "//"))] == []


def sources() -> str:
    """The hash that a bundle's first line names: of name, length and text of every source, then of the lock."""
    found = hashlib.sha256()
    paths = {path.relative_to(VIEWER / "src").as_posix(): path for path in (VIEWER / "src").rglob("*")}
    names = sorted(name for name in paths if name.endswith((".js", ".css")))
    for name, path in [*((name, paths[name]) for name in names), ("package-lock.json", ROOT / "package-lock.json")]:
        text = path.read_bytes()
        found.update(f"{name} {len(text)}\n".encode() + text)
    return found.hexdigest()


@pytest.mark.parametrize("name", ["bundle.js", "bundle.css"])
def test_the_bundle_is_of_these_sources(name):
    first = (VIEWER / name).read_text().partition("\n")[0]
    assert sources() in first, "the viewer's sources changed: run `npm ci && npm run build`"


@pytest.mark.skipif(
    shutil.which("node") is None or not (ROOT / "node_modules" / "esbuild").is_dir(),
    reason="no Node with the lock's packages: `npm ci`",
)
def test_the_bundle_is_what_the_build_makes(tmp_path):
    subprocess.run(["node", "scripts/build_viewer.mjs", str(tmp_path)], cwd=ROOT, check=True, timeout=120)
    for name in ("bundle.js", "bundle.css"):
        assert (tmp_path / name).read_bytes() == (VIEWER / name).read_bytes(), "run `npm run build`"


def test_the_lock_names_no_registry():
    locked = json.loads((ROOT / "package-lock.json").read_text())["packages"]
    assert all("resolved" not in one for one in locked.values())
    assert all("integrity" in one for name, one in locked.items() if name)


def test_a_notebook_shows_the_page_in_a_sandboxed_frame(page):
    [(name, given, _)] = tags(page._repr_html_().encode())
    assert (name, given["sandbox"]) == ("iframe", "allow-scripts")
    assert given["srcdoc"].encode() == page.html


def test_the_page_of_an_observation_says_what_was_asked(demo):
    request = attnscope.Request(weights=True, query="last", key="bank")
    said = Read(attnscope.capture(demo, "the bank", request=request).page(select="1.4").html).said
    assert said["open"] == "view=token&at=1&head=4&query=2&key=2"
    assert said["asked"]["key"] == {"text": "bank", "positions": [2]}
    assert said["command"] is None


def test_the_observation_itself_stays_light(demo):
    seen = attnscope.capture(demo, "the bank", request=attnscope.Request(weights=True))
    assert len(seen._repr_html_()) < 20_000


def test_a_page_is_saved_whole_or_not_at_all(page, tmp_path):
    path = page.save(tmp_path / "new" / "bank.html")
    assert path.read_bytes() == page.html
    with pytest.raises(attnscope.AttnscopeError, match="cannot write"):
        page.save(path / "inside.html")
    assert [one.name for one in path.parent.iterdir()] == ["bank.html"]


def test_sizes_of_a_large_model():
    """8 layers x 16 heads, 256 tokens within 6 MB; 28 x 24, 128 tokens within 12 MB: the issue's limits."""
    from attnscope.viewer.pack import Blobs, packed_maps

    for layers, heads, tokens, most in ((8, 16, 256, 6e6), (28, 24, 128, 12e6)):
        random, blobs = np.random.default_rng(0), Blobs()
        logits = random.normal(0, 2, (heads, tokens, tokens)).astype(np.float32)
        shares = np.exp(logits) * np.tri(tokens, dtype=np.float32)
        for _ in range(layers):
            packed_maps(blobs, shares / shares.sum(-1, keepdims=True), 8)
        assert blobs.size < most
