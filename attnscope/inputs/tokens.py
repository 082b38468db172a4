"""Expressions that name tokens: the grammar, before any text is known, then an expression and a Prompt -> positions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any, Literal

from attnscope.errors import InputError, UsageError, brief, nearest, visible
from attnscope.inputs.labels import tokens_touching, visible_blanks
from attnscope.inputs.prompt import Prompt
from attnscope.inputs.spans import ends_between
from attnscope.model.selection import OF_TWO_TEXTS, consecutive, sides

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
    rf"""\s*(?P<excluded>\^?)\s*
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
TokenPlace = tuple[int, ...]
SECONDS = 2.0  # for all matches of one regular expression
SPACES = {"\n": "↵", "\t": "⇥", "\r": "⇤"}
MOST, LONG = 8, 32  # places in a header, characters of each
ROOM = 360  # characters of a message for tokens with their numbers
MOST_COMPARED = 2000  # words of a text
ROLES = ("system", "user", "assistant", "tool")
DEEPEST = 64  # groups that are made of groups
LONGEST, MOST_REPEATS = 1000, 10_000  # of a pattern: `regex` unrolls what is repeated a counted number of times


@dataclass(frozen=True)
class Part:
    """One part of an expression: what it is, the word or text in it, and which of its places is meant."""

    written: str
    kind: Kind
    value: str
    place: int | None = None
    excluded: bool = False


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
        assert match is not None  # the plain word takes whatever is there
        at, more = match.end(), match["more"] == ","
        written = match[0].rstrip(",").strip()
        number = int(match["place"]) if match["place"] else None
        if number == 0:
            raise UsageError(f"{written!r} asks for place 0", "the first place is #1, the last #-1")
        kind: Kind = "name"
        if match["pattern"] is not None:
            kind, value = "pattern", match["pattern"]
        elif match["text"] is not None:
            kind = "text"
            value = re.sub(r"\\(.)", lambda sign: _ESCAPES.get(sign[1], sign[0]), match["text"], flags=re.DOTALL)
        else:
            value = match["name"].strip()
        if not value:
            problem = f"{written!r} names no text" if written else f"a part of {expression!r} is empty"
            raise UsageError(problem, 'write bank, 3 or last; in quotes, "#2", what looks like grammar')
        if kind == "name":  # one that begins as a text or pattern is one whose end was forgotten
            if value[0] == '"' or (value[0] == "/" and value.count("/") == 1):
                raise UsageError(f"{value!r} is not closed", f"end it with {value[0]}, or write it in quotes")
            kind = next((kind for kind, shape in _SHAPES.items() if shape.fullmatch(value)), "name")
        parts.append(Part(written, kind, value, number, bool(match["excluded"])))
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
            compile_pattern(name)
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
def compile_pattern(pattern: str) -> Any:
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


@dataclass(frozen=True)
class TokenMatch:
    """The tokens that an expression means in one prompt, ascending, and what a person should know of them."""

    expression: str
    positions: tuple[int, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TokenSelection:
    """The queries and keys of one text that are asked about, None for all.

    spans: by name, the tokens whose mass on each other is asked about, None for a name that the text has nothing of.
    key_spans: those of the keys, where they are another text's. source: where an encoder-decoder reads two texts, what
    the same expressions mean in the one that its encoder reads; the rest is of its decoder's. What means nothing in
    one of the two is there without positions.
    """

    query: TokenMatch | None = None
    key: TokenMatch | None = None
    spans: Mapping[str, TokenMatch | None] = field(default_factory=dict)
    key_spans: Mapping[str, TokenMatch | None] | None = None
    source: TokenSelection | None = None

    @property
    def nothing(self) -> bool:
        """Whether tokens are asked about, and the text has none of them."""
        return any(match is not None and not match.positions for match in (self.query, self.key))

    @property
    def keys_alone(self) -> bool:
        """Whether keys were chosen, and no queries."""
        return self.query is None and self.key is not None

    def of(self, stack: str) -> TokenSelection:
        """What is asked of one stack: queries of the text that it reads, keys of the text that it looks at."""
        if self.source is None:
            return self
        queries, keys = sides(stack, self.source, self)
        chosen = TokenSelection(queries.query, keys.key, queries.spans, keys.spans)
        return replace(chosen, query=NOWHERE, key=self.key and NOWHERE) if chosen.nothing else chosen

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of how the expressions were read."""
        return tuple(note for match in (self.query, self.key, *self.spans.values()) if match for note in match.notes)


NOWHERE = TokenMatch("", ())


class NotThereError(InputError):
    """An expression that means no token of this text."""


def choose(
    prompt: Prompt,
    query: str | None = None,
    key: str | None = None,
    defined: Mapping[str, str] = {},
    spans: Iterable[str] = (),
    *,
    absent: bool = False,
    parts: Mapping[str, Sequence[int]] = {},
) -> TokenSelection:
    """The queries and keys that two expressions mean in a text, and its spans: groups, by name. Raises as `find`.

    A span that the text has nothing of, or that no group says, is None. absent: queries and keys that are not in the
    text are no tokens of it, and no error. parts: what names mean besides those of the prompt's own parts.
    """

    def match(expression: str | None) -> TokenMatch | None:
        try:
            return None if expression is None else find(prompt, expression, defined, parts)
        except NotThereError:
            if not absent:
                raise
            return TokenMatch(expression or "", ())

    named: dict[str, TokenMatch | None] = dict.fromkeys(spans)
    for name in named:
        if name in defined or name in prompt.parts:
            with suppress(NotThereError):
                named[name] = find(prompt, name, defined, parts)
    return TokenSelection(_with_queries(prompt, match(query)), match(key), named)


def naming(prompt: Prompt, chosen: TokenSelection, tokens: Mapping[str, TokenMatch]) -> TokenSelection:
    """The same with these tokens of the text as its query or key. Raises as `choose`."""
    query, key = tokens.get("query", chosen.query), tokens.get("key", chosen.key)
    return replace(chosen, query=_with_queries(prompt, query), key=key)


def _with_queries(prompt: Prompt, match: TokenMatch | None) -> TokenMatch | None:
    """Those of the tokens that have queries. Raises NotThereError where none has."""
    if match is None or not prompt.medium.unasked or not match.positions:
        return match
    positions = tuple(at for at in match.positions if at >= prompt.medium.unasked)
    if not positions:
        message = f"{match.expression} names tokens that are keys and have no queries"
        raise NotThereError(message, f"name tokens from {prompt.medium.unasked} on")
    return replace(match, positions=positions)


def choose_of_two(target: Prompt, source: Prompt, *options: Any) -> TokenSelection:
    """What expressions mean in the two texts of an encoder-decoder; options: those of `choose` after the prompt.

    Raises as `choose`, and NotThereError where no stack has both queries and keys.
    """
    of_target: dict[str, Sequence[int]] = {"made": range(len(target) - 1)}  # each row predicts the next token
    of_source: dict[str, Sequence[int]] = {"made": ()}
    both = ((target, of_target), (source, of_source))
    chosen, in_source = (choose(prompt, *options, absent=True, parts=parts) for prompt, parts in both)
    chosen = replace(chosen, source=in_source)
    if all(chosen.of(stack).nothing for stack in OF_TWO_TEXTS):
        reasons = []  # of either text, where the expressions mean nothing in it
        for prompt, parts in reversed(both):
            try:
                choose(prompt, *options, parts=parts)
            except NotThereError as error:
                reasons.append(error.message)
        raise NotThereError("; of the target: ".join(reasons))
    return chosen


def find(
    prompt: Prompt, expression: str, defined: Mapping[str, str] = {}, parts: Mapping[str, Sequence[int]] = {}
) -> TokenMatch:
    """The tokens that an expression means. defined: its groups, by name; parts: see `choose`.

    Raises UsageError for an expression that cannot be read, and NotThereError, which shows the tokens with their
    numbers, where a part of it, or all of it, names none.

        >>> find(prompt, "bank#2,last").positions
        (8,)
    """
    check_expression(expression, defined)
    search = _Search(prompt, defined, {**prompt.parts, **parts})
    chosen = {at for place in search.places(expression) for at in place}
    if not chosen:
        raise search.absent(f"nothing is left of {expression!r}")
    return TokenMatch(expression, tuple(sorted(chosen)), tuple(search.notes))


@dataclass
class _Search:
    """One expression over one prompt; a group that is named twice is found once."""

    prompt: Prompt
    groups: Mapping[str, str]
    parts: Mapping[str, Sequence[int]]
    notes: list[str] = field(default_factory=list)
    known: dict[str, list[TokenPlace]] = field(default_factory=dict)

    def places(self, expression: str) -> list[TokenPlace]:
        """The places of every part in order, without the tokens that a part with `^` takes away."""
        parts = parse(expression)
        excluded = {at for part in parts if part.excluded for place in self.places_of(part) for at in place}
        named = [place for part in parts if not part.excluded for place in self.places_of(part)]
        if all(part.excluded for part in parts):
            named = self._each(range(len(self.prompt)))
        left = (tuple(at for at in place if at not in excluded) for place in named)
        return [place for place in dict.fromkeys(left) if place]  # each once: groups of groups would double them

    def places_of(self, part: Part) -> list[TokenPlace]:
        """The places of one part, all of them or the one that `#` asks for."""
        if part.kind == "text":
            places = self._text(part.value)
        elif part.kind == "pattern":
            places = self._touched(self._spans(part.value))
        elif part.kind == "name":
            places = self._name(part)
        else:
            places = self._each(self._positions(part))
        if not places and not (part.excluded and part.value == "special"):  # nothing to take away is as good
            raise self._unmatched(part)
        if part.place is None:
            return places
        if abs(part.place) > len(places):
            many = f"are {len(places)} places" if len(places) > 1 else "is 1 place"
            raise self.absent(f"{part.written!r} asks for place {part.place}, and there {many}", places[-1][0])
        return [places[part.place - (part.place > 0)]]

    def _positions(self, part: Part) -> Iterable[int]:
        every = range(len(self.prompt))
        if part.kind == "slice":
            start, stop = (int(number) if number else None for number in part.value.split(":"))
            return every[start:stop]
        first, _, last = part.value.partition("-") if part.kind == "range" else (part.value, "", "")
        low, high = int(first), int(last or first)
        if high < low:
            raise UsageError(f"the range {part.value!r} runs backwards", f"write {high}-{low}")
        for number in (low, high):
            if not -len(every) <= number < len(every):
                raise self.absent(f"there is no token {number} of {len(every)}", 0 if number < 0 else len(every) - 1)
        return every[low : high + 1] if part.kind == "range" else [every[low]]

    def _name(self, part: Part) -> list[TokenPlace]:
        prompt, word = self.prompt, part.value
        if word in KEYWORDS:
            special = [at for at, is_special in enumerate(prompt.special) if is_special]
            return self._each({"first": [0], "last": [len(prompt) - 1], "special": special}[word])
        if word in self.groups:
            if word not in self.known:
                self.known[word] = self.places(self.groups[word])
            return self.known[word]
        if not word.strip("*"):
            return self._each(range(len(prompt)))
        roles = {turn.name for turn in prompt.turns}
        if roles and word in {*roles, *ROLES}:
            return [tuple(range(turn.start, turn.stop)) for turn in prompt.turns if turn.name == word]
        if word in self.parts:
            return [tuple(self.parts[word])] if self.parts[word] else []
        if "*" not in word:
            return self._text(word)
        return self._touched(self._spans(r"[\w\p{M}]*".join(map(re.escape, re.split(r"\*+", word)))), self._whole)

    def _text(self, text: str) -> list[TokenPlace]:
        """Where the text occurs as whole words; where it never does, parts of words. Special tokens by their names."""
        prompt, spans, at = self.prompt, [], self.prompt.text.find(text)
        while at >= 0:  # also where two of them share letters
            spans.append((at, at + len(text)))
            at = self.prompt.text.find(text, at + 1)
        if not (places := self._touched(spans, self._whole)) and (places := self._touched(spans)):
            self.notes.append(f"{brief(text)} is not a whole word of the text: parts of words were taken")
        unwritten = self._each(  # special tokens that the tokenizer added: the text has no characters of theirs
            at
            for at, (special, (start, stop)) in enumerate(zip(prompt.special, prompt.characters, strict=True))
            if special and start == stop and prompt.tokens[at] == text
        )
        return sorted(places + unwritten)

    def _spans(self, pattern: str) -> list[tuple[int, int]]:
        try:
            return [match.span() for match in compile_pattern(pattern).finditer(self.prompt.text, timeout=SECONDS)]
        except (TimeoutError, MemoryError):
            raise InputError(f"/{pattern}/ takes too long on this text", "write one that repeats less") from None

    def _whole(self, start: int, stop: int) -> bool:
        return ends_between(self.prompt.text, start) and ends_between(self.prompt.text, stop)

    def _touched(
        self, spans: Iterable[tuple[int, int]], accept: Callable[[int, int], bool] = lambda start, stop: True
    ) -> list[TokenPlace]:
        """The tokens that characters touch; a special token only as a whole."""
        characters, special = self.prompt.characters, self.prompt.special
        runs = [(start, stop) for start, stop in spans if start < stop and accept(start, stop)]

        def cut(at: int, start: int, stop: int) -> bool:
            return special[at] and (characters[at][0] < start or characters[at][1] > stop)

        pairs = zip(tokens_touching(characters, runs), runs, strict=True)
        return list(dict.fromkeys(place for place, run in pairs if place and not any(cut(at, *run) for at in place)))

    def _unmatched(self, part: Part) -> NotThereError:
        roles = list(dict.fromkeys(turn.name for turn in self.prompt.turns))
        if part.kind in ("slice", "range"):
            return self.absent(f"{part.value!r} names no token of {len(self.prompt)}")
        if part.kind == "name" and part.value == "special":
            return self.absent("the text has no special token")
        if part.kind == "name" and part.value in self.groups:
            return self.absent(f"nothing is left of the group {part.value!r}")
        if part.kind == "name" and roles and part.value in ROLES:
            return self.absent(f"the chat has turns of {', '.join(roles)}, and none of {part.value}")
        if part.kind != "pattern" and self.prompt.removed and part.value in self.prompt.text:
            return self.absent(f"{brief(part.value)} occurs only in what was cut off")
        name = f"/{part.value}/" if part.kind == "pattern" else brief(part.value)
        # The tokens around the word that is most like it are listed; the first where none is.
        words: dict[str, int] = {}
        for word in self.prompt.words:
            words.setdefault(word.name.casefold()[:LONG], word.start)
        like = nearest(part.value.casefold()[:LONG], list(words)[:MOST_COMPARED])
        return self.absent(f"{name} is not in the text", words[like] if like else 0)

    def absent(self, message: str, near: int = 0) -> NotThereError:
        """The error that shows the tokens with their numbers: as many as fit a message, from before one of them."""
        entries, start = [f"{at} {_short(label)}" for at, label in enumerate(self.prompt.labels)], near
        while start and sum(map(len, entries[start - 1 : near])) < ROOM // 3:
            start -= 1
        stop, room = start, ROOM
        while stop < len(entries) and (room := room - len(entries[stop]) - 2) > 0:
            stop += 1
        part = f"{'… ' * (start > 0)}{', '.join(entries[start:stop])}{' …' * (stop < len(entries))}"
        # Without a hint: hints name options.
        return NotThereError(f"{message}; the tokens are {part} ({len(entries)} tokens)")

    @staticmethod
    def _each(positions: Iterable[int]) -> list[TokenPlace]:
        return [(at,) for at in positions]


def described(prompt: Prompt, match: TokenMatch) -> str:
    """The tokens that were found, for a header: `bank(2), bank(8)`; neighbours together, `river bank(7-8)`.

    >>> described(prompt, find(prompt, "bank"))
    'bank(2), bank(8)'
    """
    runs, words = consecutive(match.positions), list[str]()
    for first, last in ((run[0], run[-1]) for run in runs[:MOST]):
        text = "".join(prompt.plain[first : last + 1]).strip()
        label = visible(text, SPACES) if text else visible_blanks(prompt.tokens[first])
        words.append(_short(label) + (f"({first})" if first == last else f"({first}-{last})"))
    return ", ".join(words) + (f" and {len(runs) - MOST} more" if len(runs) > MOST else "")


def chosen_lines(queries: Prompt, keys: Prompt, chosen: TokenSelection, stack: str = "") -> list[str]:
    """Which tokens were meant, and how they were found; stack: whose queries and keys they are, where it is printed.

    >>> chosen_lines(target, source, chosen, "cross: ")
    ['cross: query last: Bank(3)']
    """
    if chosen.nothing:
        return [f"{stack}not measured: its texts do not have what is named"]
    named = {"query": (queries, chosen.query), "key": (keys, chosen.key)}
    lines = [f"{name} {match.expression}: {described(text, match)}" for name, (text, match) in named.items() if match]
    return [stack + line for line in (*lines, *chosen.notes)]


def _short(text: str) -> str:
    return text if len(text) <= LONG else f"{text[: LONG - 9]}…{text[-8:]}"
