"""Sides -> one HTML document: data, style and script in one file, under a policy without network.

page_of([Side(seen)]).save("bank.html")

A `Plan` says whether whole maps go into a page of so many bytes, and what is made of them where they do not. It is
plain arithmetic, before a forward pass and after it. Sizes are upper bounds: deflate makes less of them.
"""

from __future__ import annotations

import html
import json
import math
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from attnscope._version import __version__
from attnscope.errors import brief, in_a_line
from attnscope.inputs.spans import WORDS, Align, alignment, units
from attnscope.metrics.metrics import MASS
from attnscope.model.selection import HeadsByLayer, is_cross, is_vision, pairs
from attnscope.observe.records import first_ranked
from attnscope.utils.display import shortened
from attnscope.utils.files import write_whole
from attnscope.viewer.pack import Bits, Blobs
from attnscope.viewer.page_data import MOST_KEYS, Wanted, rounded

if TYPE_CHECKING:
    from attnscope.model.geometry import LayerGeometry
    from attnscope.observe.observation import Observation

BASE64 = 4 / 3
ALL_KEYS = 1 << 31  # of a query: no limit
RELATION_BYTES = 6  # a key and its weight
MOST_ROWS, LEAST_ROWS = 500, 16  # of a binned map
DEFAULT_METRIC = "focus"  # what a page shows where its link names none, of viewer/src/store.js
DEFLATED = 1 / 3  # of their bytes, what whole maps may come to: where they could fit, they are packed and seen
STEP_TOKENS = 256  # a page of a longer text holds no steps
STEPS, RELATIONS, MAPS = 0.25, 0.4, 0.5  # shares of the page; only short texts have steps
WHY = 0.25  # the most that logits taken apart may take of it


@dataclass(frozen=True)
class Plan:
    """A page of at most `max_mb` megabytes; whole: heads whose maps stay whole whatever they take.

    listed: of tables, with every key that they list; where that is too much, with fewer keys and without maps. steps:
    whether q, k and v of a short text are kept for its steps.
    """

    max_mb: float = 20.0
    bits: Bits = 8
    whole: HeadsByLayer = field(default_factory=dict)
    listed: bool = False
    steps: bool = True

    @property
    def room(self) -> float:
        """Bytes of arrays."""
        return self.max_mb * 1e6

    @property
    def why_room(self) -> float:
        """Bytes that logits taken apart may take."""
        return self.room * WHY

    def why_bytes(self, components: int, queries: int, tokens: int) -> float:
        """What so many components of so many queries take at most, over all heads."""
        return 4 * components * queries * tokens * BASE64

    def shrunk(self, heads: int, tokens: int) -> Wanted:
        """Binned maps and relations, each within its share of the page."""
        rows = math.isqrt(int(2 * MAPS * self.room / (max(heads, 1) * self.bits / 8 * BASE64)))
        rows = min(max(rows, LEAST_ROWS), MOST_ROWS)
        top_k = int(self.room * RELATIONS / (max(heads, 1) * tokens * RELATION_BYTES * BASE64))
        return Wanted(self.bits, rows, min(top_k, MOST_KEYS, tokens), self.whole, bins=not self.listed)

    def request(
        self, layers: Sequence[LayerGeometry], tokens: int, others: Sequence[LayerGeometry] = ()
    ) -> dict[str, Any]:
        """What to keep of a pass, as fields of `Request`: whole matrices if they may fit, else bins and relations.

        others: layers on the page that have no q, k and v.
        """
        heads = sum(layer.heads for layer in (*layers, *others))
        kept = {"operands": self._steps({layer.index: layer for layer in layers}, tokens)}
        causal_bytes = heads * tokens * (tokens + 1) / 2 * self.bits / 8 * BASE64
        if causal_bytes * DEFLATED <= self.room:  # worth packing, to see whether they fit
            return {**kept, "weights": True}
        less = self.shrunk(heads, tokens)
        relations = {"relations": less.top_k > 0, "top_k": less.top_k or None}
        return {**kept, **relations, "maps": "all", "map_side": less.rows, "weights": self.whole or False}

    def _steps(self, layers: Mapping[int, LayerGeometry], tokens: int) -> HeadsByLayer:
        """The heads whose q, k and v have room: all, else those that stay whole, else none."""
        named = {index: heads for index, heads in self.whole.items() if index in layers}
        for chosen in ({index: range(layer.heads) for index, layer in layers.items()}, named):
            widths = {index: 2 * layers[index].head_dim + layers[index].value_dim for index in chosen}
            numbers = sum(len(heads) * widths[index] for index, heads in chosen.items())
            if self.steps and tokens <= STEP_TOKENS and 4 * numbers * tokens * BASE64 <= self.room * STEPS:
                return chosen
        return {}


FORMAT = "attnscope/page/2"
HeadDivergence = tuple[tuple[int, str], int, float | None, float, float]
NamedTokens = tuple[str, Sequence[int]]  # tokens that were asked about, in the asker's words, and their positions
LEAST_PART = 5_000  # bytes of a part whose size is listed
LONGEST_TEXT = 60  # letters of a text in the title
FRAME = "width:100%;height:{height}px;border:0"


@dataclass(frozen=True, repr=False)
class Page:
    """One HTML file: to be saved, or shown in a notebook in a frame that may run its script and nothing else.

    arrays: bytes that its arrays take, by what they are for.
    """

    html: bytes
    title: str
    left_out: tuple[str, ...] = ()
    arrays: Mapping[str, int] = field(default_factory=dict)

    @property
    def size(self) -> str:
        """Its size and that of its parts, in words: `1.93 MB: steps 1.40, maps 0.26, page 0.27`."""
        rest = {"page": len(self.html) - sum(self.arrays.values())}
        parts = [f"{name} {count / 1e6:.2f}" for name, count in {**self.arrays, **rest}.items() if count >= LEAST_PART]
        return f"{len(self.html) / 1e6:.2f} MB" + (f": {', '.join(parts)}" if len(parts) > 1 else "")

    def save(self, path: str | Path) -> Path:
        """Write the file, whole or not at all; UsageError where it cannot be written."""
        return write_whole(Path(path), lambda temp: temp.write_bytes(self.html))

    def _repr_html_(self) -> str:
        document = html.escape(self.html.decode())
        return f'<iframe sandbox="allow-scripts" style="{FRAME.format(height=720)}" srcdoc="{document}"></iframe>'

    def __repr__(self) -> str:
        return f"Page: {self.title}, {len(self.html) / 1e6:.1f} MB"


@dataclass(frozen=True)
class Copied:
    """What makes the page's numbers again. commands: {command: the words that name text and model, as a shell takes
    them}; python: the lines of a program, the last of which names the observation `seen`."""

    commands: Mapping[str, str]
    python: Sequence[str] = ()


@dataclass(frozen=True)
class About:
    """What a page says of itself; open: the state that it begins with, after `#`.

    defined: {name: the tokens that it means}. query, key: what was asked for, as text and tokens. copied: what a
    copied command or program begins with.
    """

    command: str | None = None
    open: str = ""
    defined: Mapping[str, Sequence[int]] = field(default_factory=dict)
    query: NamedTokens | None = None
    key: NamedTokens | None = None
    copied: Copied | None = None

    def said(self) -> dict[str, Any]:
        """As the page's JSON has it."""
        chosen = {"query": self.query, "key": self.key}
        return {
            "command": self.command,
            "open": self.open,
            "copied": self.copied and {"commands": dict(self.copied.commands), "python": list(self.copied.python)},
            "defined": {name: {"positions": list(positions)} for name, positions in self.defined.items()},
            "asked": {
                name: None if tokens is None else {"text": tokens[0], "positions": list(tokens[1])}
                for name, tokens in chosen.items()
            },
        }


def about(
    seen: Observation,
    whole: Mapping[int, Sequence[int]],
    command: str | None = None,
    groups: Mapping[str, Sequence[int]] | None = None,
    first: str | None = None,
) -> About:
    """What the page of an observation says of itself; it opens at the head and the tokens that were named.

    whole: the heads that were named. groups: names for tokens. first: the view that it opens at.

    >>> about(seen, {1: (4,)}).open
    'view=head&at=1&head=4'
    """
    query, key = (
        (match.expression, match.positions) if match else None for match in (seen.chosen.query, seen.chosen.key)
    )
    named, layers = pairs(whole), [place.named for place in seen.kv_of]
    of_query = "picture" if seen.prompt.medium.patches and query else "head"
    view = "token" if key else of_query if named or query else "model"
    # The page opens at the head that was named, else at one that shows something: with pictures, one that looks there.
    if named:
        at, head = (layers.index(named[0][0]), named[0][1]) if named[0][0] in layers else (0, 0)
    else:
        of_pictures = _on_pictures(seen, query[1][-1]) if view == "picture" and query else None
        at, head = of_pictures or _sharpest(seen)
    state: dict[str, Any] = {"view": first or view, "at": at, "head": head}
    # A page shows focus by itself: where no head has it, its link names the first metric that one has.
    scores = {name: score for name, score in seen.columns.scores.items() if name != MASS.id}
    metric = first_ranked(scores, np.flatnonzero(seen.columns.kept))
    if metric not in (None, DEFAULT_METRIC):
        state["metric"] = metric
    if query:
        state["query"] = query[1][-1]
    elif any(map(is_vision, stacks := {place.stack for place in seen.kv_of})) and len(stacks) > 1:
        state["query"] = seen.queries.turns[0].stop - 1  # the text's last token: behind it are patches
    # The first of the keys, and the end of all of them where they are a span.
    if key:
        start, last = key[1][0], key[1][-1]
        state |= {"key": start, **({"keyEnd": last + 1} if last > start and last - start == len(key[1]) - 1 else {})}
    return About(command, "&".join(f"{name}={value}" for name, value in state.items()), groups or {}, query, key)


def _sharpest(seen: Observation) -> tuple[int, int]:
    """The first head in the order of tables: of cross-attention, else not of a vision tower."""
    columns = seen.columns
    order = columns.order(first_ranked(columns.scores, np.flatnonzero(columns.kept)))
    stacks = columns.stack[order]
    choices = [is_cross(stack) for stack in stacks], [not is_vision(stack) for stack in stacks]
    best = int(order[next((choice.index(True) for choice in choices if any(choice)), 0)])
    keys = list(seen.kv_of)
    return keys.index((int(columns.layer[best]), columns.stack[best])), int(columns.head[best])  # type: ignore[arg-type]


def _on_pictures(seen: Observation, query: int) -> tuple[int, int] | None:
    """The head that gives most of a query's weight to pictures, of the decoder where there is one; None without any."""
    tokens, best = list(seen.queries.medium.patches), (0.0, (0, 0))
    alone = all(is_vision(key.stack) for key in seen.kv_of)
    for at, key in enumerate(seen.kv_of):
        if key not in seen.weights or (is_vision(key.stack) and not alone):
            continue
        of_picture = [token for token in tokens if token < seen.weights[key].shape[-1]]
        mass_H = np.asarray(seen.weights[key])[:, query, of_picture].sum(-1)
        place = int(mass_H.argmax())
        best = max(best, (float(mass_H[place]), (at, seen.weight_heads[key][place])))
    return best[1] if best[0] > 0 else None


class Packs(Protocol):
    """A side that can be put into a page."""

    @property
    def said(self) -> Mapping[str, Any]:
        """What needs no bytes."""

    @property
    def plain(self) -> Sequence[str]:
        """What each token shows."""

    def packed(self, blobs: Blobs, wanted: Wanted) -> dict[str, Any]:
        """As the page's JSON has it, numbers added to the blobs."""


def page_of(
    sides: Sequence[Packs],
    plan: Plan,
    about: About,
    align: Align | None = None,
    divergences: Sequence[HeadDivergence] = (),
) -> Page:
    """The page of one text, or of two next to each other; what does not fit is made smaller, and listed in `left_out`.

    align: how the tokens of two texts are paired; as `alignment` says without it. Raises as it does. divergences: of
    heads of two texts, (layer, head, bits, mass that either gives to what the other lacks).

    >>> page_of([Side(seen)], Plan(), About()).save("bank.html")
    """
    pair = (sides[0].plain, sides[1].plain) if len(sides) > 1 else None
    by = alignment(*pair, align) if pair else None
    # whether all weights fit is known when they are packed: deflate makes less of them than any estimate
    packed, blobs = _packed(sides, Wanted(plan.bits, top_k=ALL_KEYS if plan.listed else MOST_KEYS))
    if blobs.size > plan.room:
        heads, tokens = sum(len(side.said["heads"]) for side in sides), max(len(side.plain) for side in sides)
        packed, blobs = _packed(sides, plan.shrunk(heads, tokens))
    # what was left out is in the page too: who reads it may not be who made it
    left_out = tuple(chain.from_iterable(sentences(side) for side in packed))
    title = _title(packed) + (f" | {WORDS[by]}" if by else "")
    shared = None
    if pair and by:
        # The unit of each token of either side, -1 for none, of tokens and of whole words.
        aligned = units(*pair, by)
        spans = ([(start, stop) for start, stop, _ in side["words"]] for side in packed)
        shared = {"tokens": aligned[:2], "words": aligned.whole(*spans)[:2]}
    layers, apart = [(layer["layer"], layer["stack"]) for layer in packed[0]["layers"]], []
    for layer, head, *numbers in divergences:
        js, lost, other_lost = rounded(np.array(numbers, float))
        apart.append({"at": layers.index(layer), "head": head, "js": js, "lost": [lost, other_lost]})
    record = {
        "format": FORMAT,
        "version": __version__,
        "title": title,
        "aligned": WORDS[by] if by else None,
        "sides": packed,
        "units": shared,
        "divergences": apart,
        "left_out": left_out,
        **about.said(),
    }
    return Page(document(record, blobs), title, left_out, array_sizes(packed, blobs))


def array_sizes(sides: Sequence[Mapping[str, Any]], blobs: Blobs) -> dict[str, int]:
    """Bytes that arrays take in the page by what they are for, the largest first."""
    places = {
        "maps": [part for side in sides for part in [*side["maps"], *filter(None, [side["relations"]])]],
        "steps": [head for side in sides for head in (side["steps"] or {}).get("heads", ())],
        "why": [head for side in sides for head in side.get("why", ())],
        "depth": [side["depth"] for side in sides if "depth" in side],
    }
    sizes = {
        name: sum(len(blobs.texts[number]) for number in {place["blob"] for place in of}) for name, of in places.items()
    }
    return dict(sorted(sizes.items(), key=lambda part: -part[1]))


def _packed(sides: Sequence[Packs], wanted: Wanted) -> tuple[list[dict[str, Any]], Blobs]:
    blobs = Blobs()
    return [side.packed(blobs, wanted) for side in sides], blobs


def sentences(side: Mapping[str, Any]) -> Iterator[str]:
    """What a side of the page does not hold, in words."""
    heads, held = len(side["heads"]), side["maps"]
    if side.get("cuts") and not (held or side["relations"]):
        return  # a page of cuts alone is asked for no map
    binned, related = [entry for entry in held if entry["bin"] > 1], side["relations"]
    name, of = brief(side["name"]), f"of {heads} heads"
    kept = related and ("strongest key" if related["k"] == 1 else f"{related['k']} strongest keys")
    strongest = f"with the {kept} of every query" if kept else "without single keys"
    if binned:
        yield (
            f"{name}: the maps of {len(binned)} {of} are in bins of {binned[0]['bin']} tokens, {strongest}; "
            "--select keeps heads whole, --max-mb takes more"
        )
    if heads > len(held):
        yield f"{name}: there are no maps of {heads - len(held)} {of}, {strongest}"


def _title(sides: Sequence[Mapping[str, Any]]) -> str:
    """`demo: “the financial bank”`, `“the bank” → “la banque”` with a target, and what it is compared with."""
    titles = []
    for side in sides:
        # A text for each range of queries and keys, its beginning without special tokens; one where there is one stack.
        tokens, whole, texts = side["tokens"], [0, len(side["tokens"]["plain"])], []
        ranges = {tuple(layer.get(axis, whole)) for layer in side["layers"] for axis in ("queries", "keys")}
        ranges = ranges or {tuple(whole)}
        for start, stop in sorted(ranges):
            pieces = zip(tokens["plain"][start:stop], tokens["special"][start:stop], strict=True)
            line = " ".join("".join(plain for plain, special in pieces if not special).split())
            texts.append(shortened(line, LONGEST_TEXT))
        quoted = " → ".join(f"“{text}”" for text in texts if text) or ("a picture" if side.get("pictures") else "“”")
        titles.append(f"{side['name']}: {side.get('called') or quoted}")
    return " | ".join(titles)


def document(record: Mapping[str, Any], blobs: Blobs) -> bytes:
    """The whole file: the record as JSON, the blobs, the viewer. Text of others is in the JSON and the title alone."""
    script, style = bundle("bundle.js"), bundle("bundle.css")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(in_a_line(str(record['title'])))}</title>\n<style>".encode()
    )
    body = (
        b'</style>\n</head>\n<body>\n<div id="app"><noscript>This page draws with JavaScript, from this file alone.'
        b"</noscript></div>\n"
    )
    data = json.dumps(record, allow_nan=False, separators=(",", ":")).encode()  # in ASCII: all else is escaped
    for char in b"<>&":
        data = data.replace(b"%c" % char, b"\\u%04x" % char)
    parts = [head, style, body, b'<script type="application/json" id="page">', data, b"</script>\n"]
    for number, text in enumerate(blobs.texts):
        parts += [b'<script type="application/octet-stream" id="blob-%d">' % number, text, b"</script>\n"]
    return b"".join([*parts, b"<script>", script, b"</script>\n</body>\n</html>\n"])


@cache
def bundle(name: str) -> bytes:
    """A part of the viewer as `npm run build` made it."""
    return files("attnscope.viewer").joinpath(name).read_bytes()


def _hash(text: bytes) -> str:
    """What a content security policy calls a script or style that may be run."""
    return f"sha256-{b64encode(sha256(text).digest()).decode()}"
