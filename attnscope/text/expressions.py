"""The grammar in which tokens are named: what an expression is made of, before any text is known."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Literal

from attnscope.errors import UsageError

Kind = Literal["number", "slice", "range", "name", "text", "pattern"]
# What may be written, and the tokens that it names: `attnscope tokens --help` shows it, docs/asking.md explains it.
GRAMMAR = (
    ("8   -1", "a position; one from the end"),
    ("3:7   :3   -2:", "positions 3 to 6, as Python slices; open ends"),
    ("3-7", "positions 3 to 7, as in --select"),
    ("first   last   special", "the first token, the last, all special ones"),
    ("bank", "where this text occurs, as whole words if it does"),
    ("bank*   *ing   *", "words that begin so, or end so; every token"),
    ("/b.nk/", "a regular expression's matches, parts of words too"),
    ("bank#2   bank#-1", "the second place of these, the last"),
    ('"3-7"   "#2"   "a, b"', "a text that looks like grammar; \\n is a newline"),
    ("user   assistant#2", "with --chat: turns of the user, the second answer"),
    ("prompt   answer", "with --generate or --answer: the text, its answer"),
    ("text   pair", "with --pair: the first text, the second"),
    ("made", "the rows that made the answer or target: 1 earlier"),
    ("img   img2", "with --picture: a picture's patches, the second's"),
    ("subject", "what --define subject=Mary says"),
    ("bank,last", "both"),
    ("^special   2:,^bank", "all but these; positions from 2 without these"),
)
PRECEDENCE = (
    "A word is taken for a position, else first, last or special, else a group, else a turn or part, else text."
)

_NUMBER = r"[0-9]{1,18}"
_PART = re.compile(
    rf"""\s*(?P<away>\^?)\s*
    (?:"(?P<text>(?:[^"\\]|\\.)*)"|/(?P<pattern>(?:[^/\\]|\\.)+)/|(?P<name>[^,]*?))
    (?:\#(?P<place>-?{_NUMBER}))?\s*(?P<more>,|\Z)""",
    re.VERBOSE | re.DOTALL,
)
_SHAPES: dict[Kind, re.Pattern[str]] = {
    "number": re.compile(rf"-?{_NUMBER}"),
    "slice": re.compile(rf"(-?{_NUMBER})?:(-?{_NUMBER})?"),
    "range": re.compile(rf"({_NUMBER})-({_NUMBER})"),
}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\"}
_GROUP = re.compile(r"[^\W\d]\w*")
KEYWORDS = ("first", "last", "special")
DEEPEST = 64  # groups that are made of groups
LONGEST, MOST_REPEATS = 1000, 10_000  # of a pattern: `regex` unrolls what is repeated a counted number of times


@dataclass(frozen=True)
class Part:
    """One part of an expression: what it is, the word or text in it, and which of its places is meant."""

    written: str
    kind: Kind
    value: str
    place: int | None = None
    away: bool = False


@lru_cache(maxsize=256)
def parse(expression: str) -> tuple[Part, ...]:
    """The parts of an expression. Raises UsageError for what cannot be read.

    >>> [part.kind for part in parse('3:7,^"#2",bank#2')]
    ['slice', 'text', 'name']
    """
    parts: list[Part] = []
    at, more = 0, True
    while more:
        match = _PART.match(expression, at)
        assert match is not None  # the plain word takes whatever stands there
        parts.append(_part(match, expression))
        at, more = match.end(), match["more"] == ","
    return tuple(parts)


def defined(pairs: Sequence[str]) -> dict[str, str]:
    """The groups that `--define NAME=EXPRESSION` gives, each of which may name the others, but not itself.

    >>> defined(["subject=Mary", "rest=^subject"])
    {'subject': 'Mary', 'rest': '^subject'}
    """
    groups: dict[str, str] = {}
    for pair in pairs:
        name, sign, expression = (piece.strip() for piece in pair.partition("="))
        if not (sign and _GROUP.fullmatch(name)):
            raise UsageError(f"a group is a name and what it means, got {pair!r}", "write {define=subject=Mary}")
        if name in KEYWORDS:
            raise UsageError(f"{name!r} means tokens already", "choose another name for {define}")
        if name in groups:
            raise UsageError(f"the group {name!r} is defined twice", "join both with a comma")
        groups[name] = expression
    for name in groups:
        check_expression(name, groups)
    return groups


def names_of_spans(options: Sequence[str]) -> tuple[str, ...]:
    """The names, each once, in what `--spans NAME=EXPRESSION` and `--spans NAME,NAME` give.

    >>> names_of_spans(["subject=Mary", "object,end"])
    ('subject', 'object', 'end')
    """
    listed = (option.partition("=")[:1] if "=" in option else option.split(",") for option in options)
    names = [name.strip() for part in listed for name in part]
    for name in names:
        if not _GROUP.fullmatch(name):
            raise UsageError(f"a span is a name, or a name and what it means, got {name!r}", "write {spans=end=last}")
        if name in KEYWORDS:
            raise UsageError(f"{name!r} means tokens already", "give them a name, as in {spans=end=last}")
    return tuple(dict.fromkeys(names))


def check_expression(expression: str, groups: Mapping[str, str] = {}) -> None:
    """Raise UsageError for what no text could make right: syntax, a regular expression, groups in a circle."""
    _depth(expression, groups, (), {})


def _depth(expression: str, groups: Mapping[str, str], within: tuple[str, ...], known: dict[str, int]) -> int:
    """How many groups an expression holds one within the other; known: the depth of those that were checked."""
    deepest = 0
    for part in parse(expression):
        name = part.value
        if part.kind == "pattern":
            compiled(name)
        if part.kind != "name" or name not in groups:
            continue
        if name in within:
            way = " -> ".join((*within[within.index(name) :], name))
            raise UsageError(f"the group {name!r} is made of itself: {way}", "define it by other words")
        if name not in known and len(within) < DEEPEST:
            known[name] = 1 + _depth(groups[name], groups, (*within, name), known)
        deepest = max(deepest, known.get(name, 1))
    if len(within) + deepest > DEEPEST:  # what finds their tokens goes as deep
        raise UsageError(f"groups lie more than {DEEPEST} deep in each other", "define some by other words")
    return deepest


@lru_cache(maxsize=256)
def compiled(pattern: str) -> Any:
    """The regular expression, of the library `regex`, whose matches can be given a deadline."""
    import regex

    counts = re.findall(r"[{,]\s*0*([0-9]+)(?=\s*[,}])", pattern)
    repeats = prod(max(int(count[:9]), 1) for count in counts)
    if len(pattern) > LONGEST or repeats > MOST_REPEATS:
        raise UsageError(
            f"/{pattern}/ is too long or repeats too often",
            f"write at most {LONGEST} characters, and counts with a product of at most {MOST_REPEATS}",
        )
    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError, MemoryError, OverflowError, ValueError) as error:
        raise UsageError(f"/{pattern}/ is not a regular expression: {error}", "write a text in quotes") from None


def _part(match: re.Match[str], expression: str) -> Part:
    written, place, away = match[0].rstrip(",").strip(), match["place"], bool(match["away"])
    number = None if place is None else int(place)
    if number == 0:
        raise UsageError(f"{written!r} asks for place 0", "the first place is #1, the last #-1")
    if match["pattern"] is not None:
        return Part(written, "pattern", match["pattern"], number, away)
    if match["text"] is not None:
        value = re.sub(r"\\(.)", lambda sign: _ESCAPES.get(sign[1], sign[0]), match["text"], flags=re.DOTALL)
        return Part(written, "text", _not_empty(value, written, expression), number, away)
    word = _not_empty(match["name"].strip(), written, expression)
    if word[0] == '"' or (word[0] == "/" and word.count("/") == 1):
        raise UsageError(f"{word!r} is not closed", f"end it with {word[0]}, or write it in quotes")
    kind = next((kind for kind, shape in _SHAPES.items() if shape.fullmatch(word)), None)
    return Part(written, kind or "name", word, number, away)


def _not_empty(value: str, written: str, expression: str) -> str:
    if not value:
        problem = f"{written!r} names no text" if written else f"a part of {expression!r} is empty"
        raise UsageError(problem, 'write bank, 3 or last; in quotes, "#2", what looks like grammar')
    return value
