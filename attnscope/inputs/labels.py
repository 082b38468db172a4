"""Token ids to readable text: what each token represents, how it is drawn, and which characters it covers.

A tokenizer describes a token twice: by the characters of the text it covers (offsets) and by its piece of the
vocabulary, in which spaces and bytes are written as `Ġ`, `▁` or `<0xE6>`. The offsets are what the text says, also
where a normaliser changed it, so they are taken wherever they are clear. Where tokens share a character, only the
bytes of the pieces tell them apart.

Characters are ranges [start, stop) in order; two tokens share a character that is split between them. A token that no
character belongs to, such as a begin token that the tokenizer adds, has [at, at) after those before it.
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple
from unicodedata import category

from attnscope.errors import visible

Style = Literal["byte", "latin1", "metaspace", "wordpiece", "suffix", "joiner", "plain"]
Characters = tuple[tuple[int, int], ...]
Entry = tuple[str, str, tuple[int, int] | None]  # exact, plain, and which characters of its run, where that is known
DECODERS: dict[str, Style] = {  # of the library tokenizers, by type
    "ByteLevel": "byte",
    "Metaspace": "metaspace",
    "ByteFallback": "metaspace",
    "WordPiece": "wordpiece",
    "BPEDecoder": "suffix",
}
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
LATER_PIECE = re.compile(r".·[2-9]/[2-9]", re.DOTALL)
REACH = 16  # characters of the text that no token may say before a token counts as lost
NUMBERED = {chr(byte) for byte in range(256)}
SIGNS = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "⇤"}
# GPT-2's letters for the 256 bytes: printable Latin-1 as itself, the others from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + place): byte for place, byte in enumerate(_HIDDEN)}
LETTERS = {byte: letter for letter, byte in BYTES.items()}


class Piece(NamedTuple):
    """What the tokenizer says of one token.

    `name` is the vocabulary's entry, `data` the bytes it represents, `span` the characters of the text it covers
    (None where the tokenizer doesn't tell), `gap` whether the piece itself says that a space comes before it.
    """

    name: str
    data: bytes
    span: tuple[int, int] | None = None
    special: bool = False
    unknown: bool = False
    gap: bool = False


class TokenReading(NamedTuple):
    """What one token represents.

    `exact` is for tables, `label` for pictures. `plain` joins up to the text: a character that is split over several
    tokens is in its first, and a space that no token holds comes before the next. `span` is the characters of the
    text that the token holds a part of, None where the tokenizer doesn't tell.
    """

    exact: str
    label: str
    plain: str
    span: tuple[int, int] | None = None


def byte_name(data: bytes) -> str:
    """Bytes in GPT-2's letters, for tokenizers with a vocabulary of bytes."""
    return "".join(LETTERS[byte] for byte in data)


@lru_cache(maxsize=8)
def piece_style(tokenizer: Any) -> Style:
    """How a tokenizer writes spaces and bytes in its vocabulary: from its decoder, else from the vocabulary itself.

    A vocabulary without any marks is plain text.

    >>> piece_style(AutoTokenizer.from_pretrained("gpt2"))
    'byte'
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is not None:
        rule = json.loads(decoder.__getstate__())
        for step in rule.get("decoders", [rule]):
            if step["type"] == "Replace" and "▁" in str(step.get("pattern")):
                return "metaspace"
            if style := DECODERS.get(step["type"]):
                return style
    # Where the single characters are 256, each represents a byte: in GPT-2's letters, or of its number, as in ByT5.
    vocabulary = tokenizer.get_vocab()
    single = {name for name in vocabulary if len(name) == 1}
    if single in (NUMBERED, BYTES.keys()):
        return "latin1" if single == NUMBERED else "byte"
    return marks_of([byte_name(name) if isinstance(name, bytes) else name for name in vocabulary])


def marks_of(names: Iterable[str]) -> Style:
    """The style whose mark most of some entries have: a few entries of any vocabulary look like another's.

    >>> marks_of(["the", "▁bank"])
    'metaspace'
    """
    counts: Counter[Style] = Counter()
    for name in names:
        counts["byte"] += name.startswith("Ġ") and len(name) > 1
        counts["metaspace"] += name.startswith("▁") and len(name) > 1
        counts["wordpiece"] += name.startswith("##") and len(name) > 2
        counts["suffix"] += name.endswith("</w>") and len(name) > 4
        counts["joiner"] += name.endswith("@@") and len(name) > 2
    style, count = max(counts.items(), key=lambda item: item[1], default=("plain", 0))
    return style if count else "plain"


@lru_cache(maxsize=1 << 16)
def piece_bytes(name: str, style: Style) -> bytes:
    """The bytes one entry of the vocabulary represents, in UTF-8.

    >>> piece_bytes("Ġthe", "byte"), piece_bytes("<0xE6>", "metaspace")
    (b' the', b'\\xe6')
    """
    if style == "byte" and all(char in BYTES for char in name):
        return bytes(BYTES[char] for char in name)
    if style == "latin1" and name in NUMBERED:
        return name.encode("latin-1")
    if style == "metaspace":
        if byte := BYTE_TOKEN.fullmatch(name):
            return bytes([int(byte[1], 16)])
        name = name.replace("▁", " ")
    ends = {"suffix": "</w>", "joiner": "@@"}
    name = name.removeprefix("##") if style == "wordpiece" else name.removesuffix(ends.get(style, ""))
    return name.encode("utf-8", "replace")


def piece_gap(name: str, before: str | None, style: Style) -> bool:
    """Whether a piece follows a space that no piece holds, by the marks of its style alone."""
    if before is None:
        return False
    if style == "wordpiece":
        return not name.startswith("##")
    if style == "joiner":
        return not before.endswith("@@")
    return style == "suffix" and before.endswith("</w>")


class TextTokens(NamedTuple):
    """The tokens of a whole text, each with its `TokenReading`, and whether it is a special one."""

    exact: tuple[str, ...]
    labels: tuple[str, ...]
    plain: tuple[str, ...]
    special: tuple[bool, ...]
    characters: Characters

    def at(self, places: Sequence[int]) -> "TextTokens":
        """Some of the tokens."""
        if len(places) == len(self.exact):
            return self
        return TextTokens._make(tuple([column[place] for place in places]) if column else () for column in self)


def read_tokens(tokenizer: Any, ids: Sequence[int], text: str, spans: Sequence[tuple[int, int]] | None) -> TextTokens:
    """What the tokens of a text are; spans: the characters that each covers, None where the tokenizer does not tell.

    >>> read_tokens(tokenizer, [265, 586], "the new", [(0, 3), (3, 7)]).labels
    ('the', '·new')
    """
    names, odd = _names(tokenizer, ids), _OddTokens.of(tokenizer)
    spans = spans and spans_with_marks(spans, text)
    if spans and text and (apart := _read_apart(ids, text, spans, names, odd)):
        return apart
    pieces = pieces_of(ids, text, spans, names, odd)
    readings = read_pieces(pieces, text)
    exact, labels, plain, covered = zip(*readings, strict=True)
    characters: Characters = ()
    if text:  # where the tokenizer does not tell of all, what the tokens say is looked for in the text
        known = [span for span in covered if span is not None]
        characters = ordered_spans(known) if len(known) == len(ids) else locate_tokens(plain, exact, text)
    return TextTokens(exact, labels, plain, tuple([piece.special for piece in pieces]), characters)


class _OddTokens(NamedTuple):
    """The tokens that are no plain entries of a vocabulary, and how it writes the others."""

    special: Container[int]
    added: Container[int]
    unknown: int | None
    every: Container[int | None]
    style: Style

    @classmethod
    def of(cls, tokenizer: Any) -> "_OddTokens":
        added = tokenizer.added_tokens_decoder
        special = {*tokenizer.all_special_ids, *(token for token, entry in added.items() if entry.special)}
        unknown: int | None = getattr(tokenizer, "unk_token_id", None)
        return cls(special, added, unknown, {*special, *added, unknown}, piece_style(tokenizer))


def _read_apart(
    ids: Sequence[int], text: str, spans: Sequence[tuple[int, int]], names: Mapping[int, str], odd: _OddTokens
) -> TextTokens | None:
    """The tokens of a text in which each has characters of its own, but for special ones without; None for another.

    Most texts are such: they are read without what tokens that share a character need.
    """
    texts, characters, reached, style, odd_ids = list[tuple[str, str, str]](), list(spans), 0, odd.style, odd.every
    for place, (token, (start, stop)) in enumerate(zip(ids, spans, strict=True)):
        name = names[token]
        if token in odd_ids:
            if start < stop or stop > reached or token not in odd.special or BYTE_TOKEN.fullmatch(name):
                return None
            texts.append((name, _special_label(name), name))
            characters[place] = reached, reached
            continue
        if not reached <= start < stop:
            return None
        lead = _lead(name, style)
        before = text[max(0, start - len(lead)) : start] if lead else ""
        gap = start > reached and any(map(str.isspace, text[reached:start]))
        texts.append(_texts_alone(name, lead, before, text[start:stop], gap, False))
        reached = stop
    exact, labels, plain = zip(*texts, strict=True)
    return TextTokens(exact, labels, plain, tuple([token in odd.special for token in ids]), tuple(characters))


def pieces_of(
    ids: Sequence[int], text: str, offsets: Sequence[tuple[int, int]] | None, names: Mapping[int, str], odd: _OddTokens
) -> list[Piece]:
    """The pieces of token ids.

    text: what they were read from, if anything. offsets: the characters of it that each token covers, None where the
    tokenizer does not tell. names: of each id its entry of the vocabulary.
    """
    pieces: list[Piece] = []
    before: str | None = None
    for place, token in enumerate(ids):
        # Most tokens are plain entries of the vocabulary: of these a tokenizer that gives spans says no more than that.
        name, span = names[token], offsets[place] if offsets is not None else None
        if span is not None and token not in odd.every:
            pieces.append(Piece(name, piece_bytes(name, odd.style), span))
            continue
        covered = text[span[0] : span[1]] if span else ""
        # An unknown token represents a piece of the text; only its name written out is the special token itself.
        unknown = token == odd.unknown and covered != "" and covered.strip() != name
        is_special = token in odd.special and not unknown and not BYTE_TOKEN.fullmatch(name)
        literal = unknown or (odd.style in ("byte", "latin1") and token in odd.added)
        data = (covered or name).encode() if literal else piece_bytes(name, odd.style)
        gap = offsets is None and not is_special and piece_gap(name, before, odd.style)
        pieces.append(Piece(name, data, span, is_special, unknown, gap))
        before = None if is_special else name
    return pieces


def bytes_of(tokenizer: Any, ids: Sequence[int]) -> list[bytes]:
    """The bytes that each token adds to a text, in UTF-8, with a space where the tokenizer puts one before it.

    >>> bytes_of(tokenizer, [265, 586])
    [b' the', b' new']
    """
    return [
        b" " * piece.gap + (piece.name.encode() if piece.special else piece.data)
        for piece in pieces_of(ids, "", None, _names(tokenizer, ids), _OddTokens.of(tokenizer))
    ]


def _names(tokenizer: Any, ids: Sequence[int]) -> dict[int, str]:
    """The vocabulary's entry of each id; checkpoints often have more rows than their tokenizer has entries."""
    tokens = list(set(ids))
    try:
        names = tokenizer.convert_ids_to_tokens(tokens)
    except Exception:  # one of them has none, and which one tokenizers do not say
        names = []
    if len(names) == len(tokens) and all(type(name) is str for name in names):
        return dict(zip(tokens, names, strict=True))
    entries: dict[int, str] = {}
    for token in tokens:
        try:
            name = tokenizer.convert_ids_to_tokens(token)
        except (IndexError, KeyError, OverflowError):
            name = None
        entries[token] = byte_name(name) if isinstance(name, bytes) else f"<id {token}>" if name is None else name
    return entries


def read_pieces(pieces: Sequence[Piece], text: str = "") -> list[TokenReading]:
    """What each token represents, in order; `text` is what the spans count in. Time grows linearly.

    A span that no other token shares is read from the text; tokens that share a character are read from their
    bytes, and the pieces of one character are numbered. Bytes that make no character are written `<0xE6>`.

    >>> [reading.exact for reading in read_pieces([Piece("æĹ", b"\\xe6\\x97"), Piece("¥", b"\\xa5")])]
    ['日·1/2', '日·2/2']
    """
    readings: list[TokenReading] = []
    reached = 0
    for start, stop in _runs(pieces):
        piece = pieces[start]
        span = piece.span
        # Nearly every token has characters of its own, and is read without what a run needs.
        if stop - start == 1 and span and span[0] < span[1] and not piece.special:
            lead = _leading_space(piece.data)
            before = text[max(0, span[0] - len(lead)) : span[0]] if lead else ""
            gap = piece.gap or (span[0] > reached and any(map(str.isspace, text[reached : span[0]])))
            texts = _texts_alone(piece.name, lead, before, text[span[0] : span[1]], gap, piece.unknown)
            readings.append(TokenReading(*texts, span))
            reached = max(reached, span[1])
            continue
        run = pieces[start:stop]
        ends = [piece.span for piece in run if piece.span and piece.span[0] < piece.span[1]]
        first, last = (min(a for a, _ in ends), max(b for _, b in ends)) if ends else (reached, reached)
        name = piece.name
        entries: list[Entry] = [(name, name, None)] if piece.special else _read_bytes(run, text[first:last])
        space = any(map(str.isspace, text[reached:first]))
        for place, (piece, (exact, plain, part)) in enumerate(zip(run, entries, strict=True)):
            gap = (piece.gap or (space and place == 0)) and not plain[:1].isspace()
            span = (first + part[0], first + part[1]) if piece.span and part else piece.span
            readings.append(TokenReading(exact, _label(piece, exact), " " + plain if gap else plain, span))
            # An empty span says where it is: behind the space trimmed from it.
            last = max(last, piece.span[1]) if piece.span else last
        reached = max(reached, last)
    return readings


@lru_cache(maxsize=1 << 14)
def _texts_alone(name: str, lead: str, before: str, under: str, gap: bool, unknown: bool) -> tuple[str, str, str]:
    """Exact text, label and plain text of such a token.

    lead: the white space that the piece begins with. under: the text of its span; before: as many characters before it.
    """
    # SentencePiece puts a space before the text that isn't there; RoBERTa trims spaces from its spans. What the piece
    # holds and its span leaves out is put back, from the text where that has it.
    left_out = "" if under[:1].isspace() or under.startswith("▁") else lead
    exact = (before if left_out and before.isspace() else left_out) + under
    label = visible_blanks(exact) + (visible(name) if unknown else "")
    return exact, label, " " + exact if gap and not exact[:1].isspace() else exact


def _runs(pieces: Sequence[Piece]) -> Iterator[tuple[int, int]]:
    """Token ranges to be read together: tokens whose spans overlap, or neighbours without spans."""
    cuts = [0]
    reached = pieces[0].span[1] if pieces and pieces[0].span else 0
    for place, (left, right) in enumerate(pairwise(pieces), start=1):
        span = right.span
        apart = left.span is not None if span is None else span[0] >= min(reached, span[1])
        if apart or left.special or right.special:
            cuts.append(place)
        reached = max(reached, span[1]) if span else reached
    return pairwise([*cuts, len(pieces)]) if pieces else iter(())


@lru_cache(maxsize=1 << 16)
def _lead(name: str, style: Style) -> str:
    """The white space that an entry of the vocabulary begins with."""
    return _leading_space(piece_bytes(name, style))


@lru_cache(maxsize=1 << 16)
def _leading_space(data: bytes) -> str:
    """The white space that a piece begins with."""
    text = data.decode("utf-8", "ignore")
    return text[: len(text) - len(text.lstrip())]


def _read_bytes(run: Sequence[Piece], source: str) -> list[Entry]:
    """What each token of a run says; `source` is the part of the text that the run covers."""
    # Each character of the joined bytes, with the places of the tokens that hold a part of it.
    datas, chars = [piece.data for piece in run], list[tuple[str, list[int]]]()
    data, holders = b"".join(datas), [place for place, part in enumerate(datas) for _ in part]
    at = 0
    while at < len(data):
        size = 1 + sum(data[at] >= lead for lead in (0xC0, 0xE0, 0xF0))
        try:
            char = data[at : at + size].decode()
        except UnicodeDecodeError:
            size, char = 1, f"<0x{data[at]:02X}>"
        chars.append((char, list(dict.fromkeys(holders[at : at + size]))))
        at += size
    exact, plain = [""] * len(datas), [""] * len(datas)
    added = bool(chars) and chars[0][0] == " " and len(source) == len(chars) - 1
    source = " " * added + source
    # The bytes are the normalised text; where it has one character for each of the source's, the source is shown.
    aligned = len(source) == len(chars)
    held_places: list[list[int]] = [[] for _ in datas]
    for place, (char, (_, owners)) in enumerate(zip(source if aligned else [c for c, _ in chars], chars, strict=True)):
        plain[owners[0]] += char
        for number, token in enumerate(owners, start=1):
            exact[token] += char if len(owners) == 1 else f"{char}·{number}/{len(owners)}"
            held_places[token].append(place - added)
    parts = [(max(places[0], 0), places[-1] + 1) if aligned and places else None for places in held_places]
    return list(zip(exact, plain, parts, strict=True))


def _label(piece: Piece, exact: str) -> str:
    if piece.special or not exact:
        return _special_label(piece.name)
    return visible_blanks(exact) + (visible(piece.name) if piece.unknown else "")


@lru_cache(maxsize=1 << 10)
def _special_label(name: str) -> str:
    return visible(name).replace("▁", "·")


@lru_cache(maxsize=1 << 16)
def visible_blanks(text: str) -> str:
    """Text with spaces and controls one can see: `·` space, `↵` newline, `⇥` tab, `⇤` return, `⟨200B⟩` any other.

    >>> visible_blanks(" a\\u200b\\n")
    '·a⟨200B⟩↵'
    """
    return visible(text, SIGNS)


def ordered_spans(spans: Sequence[tuple[int, int]]) -> Characters:
    """What a tokenizer says, made to run forward: where it says (0, 0) of a token, that one follows the others.

    >>> ordered_spans([(0, 0), (0, 3), (3, 8), (0, 0)])
    ((0, 0), (0, 3), (3, 8), (8, 8))
    """
    result: list[tuple[int, int]] = []
    first = reached = 0
    for start, stop in spans:
        first, reached = (max(start, first), max(stop, reached)) if start < stop else (reached, reached)
        result.append((first, reached))
    return tuple(result)


def spans_with_marks(spans: Sequence[tuple[int, int]], text: str) -> Sequence[tuple[int, int]]:
    """What a tokenizer says, with the combining marks that no token covers given to the tokens before them.

    A normaliser that composes a letter and its mark, or drops the mark, leaves it out of every span.

    >>> spans_with_marks([(0, 4), (5, 7)], "cafe\u0301 x")
    [(0, 5), (5, 7)]
    """
    marks = [] if text.isascii() else [at for at, char in enumerate(text) if category(char)[0] == "M"]
    if not marks:
        return spans
    by_start = sorted((start, stop) for start, stop in spans if start < stop)
    starts, reached = [start for start, _ in by_start], list(accumulate((stop for _, stop in by_start), max))
    further: dict[int, int] = {}  # where a span ends -> where it ends with the marks that follow
    for at in reversed(marks):
        before = bisect_right(starts, at)
        if before and reached[before - 1] <= at:
            further[at] = further.get(at + 1, at + 1)
    return [(start, further.get(stop, stop) if start < stop else stop) for start, stop in spans]


def locate_tokens(plain: Sequence[str], tokens: Sequence[str], text: str) -> Characters:
    """The same by what the tokens say, for tokenizers that don't tell: `plain` and `tokens` as a Prompt has them.

    A token that the text does not say within reach has no characters.

    >>> locate_tokens(["a", " 日", ""], ["a", " 日·1/2", "日·2/2"], "a 日")
    ((0, 1), (1, 3), (2, 3))
    """
    result: list[tuple[int, int]] = []
    at = 0
    for written, token in zip(plain, tokens, strict=True):
        split = written != token and LATER_PIECE.match(token) and result and result[-1][0] < result[-1][1]
        start, stop = _place(written, text, at) if written else (at, at)
        result.append((result[-1][1] - 1 if split else start, stop))
        at = stop
    return tuple(result)


def tokens_touching(characters: Characters, spans: Iterable[tuple[int, int]]) -> list[tuple[int, ...]]:
    """Of each run of characters [start, stop), the tokens that hold one of them, or a part of one.

    >>> tokens_touching(((0, 0), (0, 3), (3, 8)), [(2, 5), (0, 1)])
    [(1, 2), (1,)]
    """
    starts, stops = [start for start, _ in characters], [stop for _, stop in characters]
    near = (range(bisect_right(stops, start), bisect_left(starts, stop)) for start, stop in spans)
    return [tuple(at for at in places if starts[at] < stops[at]) for places in near]


def _place(written: str, text: str, at: int) -> tuple[int, int]:
    """Where a token's text comes next, with its own white space where the text has it; [at, at) where it doesn't."""
    if text.startswith(written, at):
        return at, at + len(written)
    word, begin = written.strip(), at
    while begin < len(text) and text[begin].isspace() and not text.startswith(word, begin):
        begin += 1
    start = text.find(word, begin, begin + len(word) + REACH) if word else -1
    return (at, at) if start < 0 else (start, start + len(word))
