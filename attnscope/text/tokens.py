"""Which tokens are meant: an expression (`expressions`) and a Prompt -> positions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from attnscope import errors as shown
from attnscope.errors import InputError, UsageError, nearest
from attnscope.model.selection import OF_TWO_TEXTS, sides
from attnscope.text.characters import touched
from attnscope.text.expressions import KEYWORDS, Part, check_expression, compiled, defined, parse
from attnscope.text.labels import visible_blanks
from attnscope.text.prompt import Prompt
from attnscope.text.spans import ends_between

__all__ = ["Chosen", "Found", "check_expression", "choose", "defined", "described", "find"]

TokenPlace = tuple[int, ...]
SECONDS = 2.0  # for all matches of one regular expression
SPACES = {"\n": "↵", "\t": "⇥", "\r": "⇤"}
MOST, LONG = 8, 32  # places in a header, characters of each
ROOM = 360  # characters of a message for tokens with their numbers
MOST_COMPARED = 2000  # words of a text
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Found:
    """The tokens that an expression means in one prompt, ascending, and what a person should know of them."""

    expression: str
    positions: tuple[int, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chosen:
    """The queries and keys of one text that are asked about, None for all.

    spans: by name, the tokens whose mass on each other is asked about, None for a name that the text has nothing of.
    key_spans: those of the keys, where they are another text's. source: where an encoder-decoder reads two texts, what
    the same expressions mean in the one that its encoder reads; the rest is of its decoder's. What means nothing in
    one of the two is there without positions.
    """

    query: Found | None = None
    key: Found | None = None
    spans: Mapping[str, Found | None] = field(default_factory=dict)
    key_spans: Mapping[str, Found | None] | None = None
    source: Chosen | None = None

    @property
    def nothing(self) -> bool:
        """Whether tokens are asked about, and the text has none of them."""
        return any(match is not None and not match.positions for match in (self.query, self.key))

    @property
    def keys_alone(self) -> bool:
        """Whether keys were chosen, and no queries."""
        return self.query is None and self.key is not None

    def of(self, stack: str) -> Chosen:
        """What is asked of one stack: queries of the text that it reads, keys of the text that it looks at."""
        if self.source is None:
            return self
        queries, keys = sides(stack, self.source, self)
        chosen = Chosen(queries.query, keys.key, queries.spans, keys.spans)
        return replace(chosen, query=NOWHERE, key=self.key and NOWHERE) if chosen.nothing else chosen

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of how the expressions were read."""
        return tuple(note for match in (self.query, self.key, *self.spans.values()) if match for note in match.notes)


NOWHERE = Found("", ())


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
) -> Chosen:
    """The queries and keys that two expressions mean in a text, and its spans: groups, by name. Raises as `find`.

    A span that the text has nothing of, or that no group says, is None. absent: queries and keys that are not in the
    text are no tokens of it, and no error. parts: what names mean besides those of the prompt's own parts.
    """

    def match(expression: str | None) -> Found | None:
        try:
            return None if expression is None else find(prompt, expression, defined, parts)
        except NotThereError:
            if not absent:
                raise
            return Found(expression or "", ())

    named: dict[str, Found | None] = dict.fromkeys(spans)
    for name in named:
        if name in defined or name in prompt.parts:
            with suppress(NotThereError):
                named[name] = find(prompt, name, defined, parts)
    return Chosen(_asking(prompt, match(query)), match(key), named)


def naming(prompt: Prompt, chosen: Chosen, tokens: Mapping[str, Found]) -> Chosen:
    """The same with these tokens of the text as its query or key. Raises as `choose`."""
    query, key = tokens.get("query", chosen.query), tokens.get("key", chosen.key)
    return replace(chosen, query=_asking(prompt, query), key=key)


def _asking(prompt: Prompt, match: Found | None) -> Found | None:
    """Those of the tokens that have queries. Raises NotThereError where none has."""
    if match is None or not prompt.medium.unasked or not match.positions:
        return match
    positions = tuple(at for at in match.positions if at >= prompt.medium.unasked)
    if not positions:
        raise NotThereError(
            f"{match.expression} names virtual tokens alone, which are keys and have no queries",
            f"name tokens from {prompt.medium.unasked} on",
        )
    return replace(match, positions=positions)


def choose_of_two(target: Prompt, source: Prompt, *options: Any) -> Chosen:
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
) -> Found:
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
        raise search.nothing(f"nothing is left of {expression!r}")
    return Found(expression, tuple(sorted(chosen)), tuple(search.notes))


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
        away = {at for part in parts if part.away for place in self.of(part) for at in place}
        named = [place for part in parts if not part.away for place in self.of(part)]
        if all(part.away for part in parts):
            named = self._each(range(len(self.prompt)))
        left = (tuple(at for at in place if at not in away) for place in named)
        return [place for place in dict.fromkeys(left) if place]  # each once: groups of groups would double them

    def of(self, part: Part) -> list[TokenPlace]:
        """The places of one part, all of them or the one that `#` asks for."""
        if part.kind == "text":
            places = self._text(part.value)
        elif part.kind == "pattern":
            places = self._touched(self._spans(part.value))
        elif part.kind == "name":
            places = self._name(part)
        else:
            places = self._each(self._positions(part))
        if not places and not (part.away and part.value == "special"):  # nothing to take away is as good
            raise self._unmatched(part)
        if part.place is None:
            return places
        if abs(part.place) > len(places):
            many = f"are {len(places)} places" if len(places) > 1 else "is 1 place"
            raise self.nothing(f"{part.written!r} asks for place {part.place}, and there {many}", places[-1][0])
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
                raise self.nothing(f"there is no token {number} of {len(every)}", 0 if number < 0 else len(every) - 1)
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
            self.notes.append(f"{shown.brief(text)} is not a whole word of the text: parts of words were taken")
        unwritten = self._each(  # special tokens that the tokenizer added: the text has no characters of theirs
            at
            for at, (special, (start, stop)) in enumerate(zip(prompt.special, prompt.characters, strict=True))
            if special and start == stop and prompt.tokens[at] == text
        )
        return sorted(places + unwritten)

    def _spans(self, pattern: str) -> list[tuple[int, int]]:
        try:
            return [match.span() for match in compiled(pattern).finditer(self.prompt.text, timeout=SECONDS)]
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

        pairs = zip(touched(characters, runs), runs, strict=True)
        return list(dict.fromkeys(place for place, run in pairs if place and not any(cut(at, *run) for at in place)))

    def _unmatched(self, part: Part) -> NotThereError:
        roles = list(dict.fromkeys(turn.name for turn in self.prompt.turns))
        if part.kind in ("slice", "range"):
            return self.nothing(f"{part.value!r} names no token of {len(self.prompt)}")
        if part.kind == "name" and part.value == "special":
            return self.nothing("the text has no special token")
        if part.kind == "name" and part.value in self.groups:
            return self.nothing(f"nothing is left of the group {part.value!r}")
        if part.kind == "name" and roles and part.value in ROLES:
            return self.nothing(f"the chat has turns of {', '.join(roles)}, and none of {part.value}")
        if part.kind != "pattern" and self.prompt.removed and part.value in self.prompt.text:
            return self.nothing(f"{shown.brief(part.value)} occurs only in what was cut off")
        name = f"/{part.value}/" if part.kind == "pattern" else shown.brief(part.value)
        return self.nothing(f"{name} is not in the text", _near(self.prompt, part.value))

    def nothing(self, message: str, near: int = 0) -> NotThereError:
        """The error that shows the tokens with their numbers, of a long text those around one."""
        return NotThereError(f"{message}; the tokens are {_listed(self.prompt, near)}")  # no hint: those name options

    @staticmethod
    def _each(positions: Iterable[int]) -> list[TokenPlace]:
        return [(at,) for at in positions]


def described(prompt: Prompt, match: Found) -> str:
    """The tokens that were found, for a header: `bank(2), bank(8)`; neighbours together, `river bank(7-8)`.

    >>> described(prompt, find(prompt, "bank"))
    'bank(2), bank(8)'
    """
    runs = [[match.positions[0]]]
    for before, at in pairwise(match.positions):
        if at == before + 1:
            runs[-1].append(at)
        else:
            runs.append([at])
    words = [_run(prompt, run[0], run[-1]) for run in runs[:MOST]]
    return ", ".join(words) + (f" and {len(runs) - MOST} more" if len(runs) > MOST else "")


def chosen_lines(queries: Prompt, keys: Prompt, chosen: Chosen, stack: str = "") -> list[str]:
    """Which tokens were meant, and how they were found; stack: whose queries and keys they are, where it is printed.

    >>> chosen_lines(target, source, chosen, "cross: ")
    ['cross: query last: Bank(3)']
    """
    if chosen.nothing:
        return [f"{stack}not measured: its texts do not have what is named"]
    named = {"query": (queries, chosen.query), "key": (keys, chosen.key)}
    lines = [f"{name} {match.expression}: {described(text, match)}" for name, (text, match) in named.items() if match]
    return [stack + line for line in (*lines, *chosen.notes)]


def _run(prompt: Prompt, first: int, last: int) -> str:
    words = "".join(prompt.plain[first : last + 1]).strip()
    number = f"({first})" if first == last else f"({first}-{last})"
    return _short(shown.visible(words, SPACES) if words else visible_blanks(prompt.tokens[first])) + number


def _short(text: str) -> str:
    return text if len(text) <= LONG else f"{text[: LONG - 9]}…{text[-8:]}"


def _near(prompt: Prompt, name: str) -> int:
    """The token of the word that is most like what was wanted; the first where none is."""
    words: dict[str, int] = {}
    for word in prompt.words:
        words.setdefault(word.name.casefold()[:LONG], word.start)
    like = nearest(name.casefold()[:LONG], list(words)[:MOST_COMPARED])
    return words[like] if like else 0


def _listed(prompt: Prompt, near: int) -> str:
    """The tokens with their numbers, as many as fit a message, from a few before the one that matters."""
    entries, start = [f"{at} {_short(label)}" for at, label in enumerate(prompt.labels)], near
    while start and sum(map(len, entries[start - 1 : near])) < ROOM // 3:
        start -= 1
    stop, room = start, ROOM
    while stop < len(entries) and (room := room - len(entries[stop]) - 2) > 0:
        stop += 1
    listed = ", ".join(entries[start:stop])
    return f"{'… ' * (start > 0)}{listed}{' …' * (stop < len(entries))} ({len(entries)} tokens)"
