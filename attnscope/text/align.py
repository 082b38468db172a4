"""Which tokens of two texts belong together: those at the same position, or those that cover the same characters.

    by = alignment(a, b)            # "position" for a minimal pair
    units(a, b, by).size            # how many tokens they share

By position, tokens are paired one to one. That takes texts of as many tokens: a minimal pair, or IOI, where a name that
is swapped must not take its partner along. By text, tokenizers may differ: both texts are cut into words and marks,
each with the blanks before it. What is the same in both is paired character by character. Where they differ by as many
words on either side, these are paired one by one, with all their tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import accumulate, takewhile
from typing import Literal, NamedTuple

from attnscope.errors import InputError

UNIT = re.compile(r"\s*(\w+|[^\w\s])")
Unit = re.Match[str]
CharacterRange = tuple[int, int]  # characters [start, stop)
Group = tuple[int, int]  # tokens [start, stop)
Align = Literal["position", "text"]
WORDS: Mapping[Align, str] = {"position": "aligned by position", "text": "aligned by characters"}


def alignment(a: Sequence[str], b: Sequence[str], by: Align | None = None) -> Align:
    """How the tokens of two texts are paired: as asked, else by position where different texts have as many tokens.

    One text that two tokenizers cut differently is paired by text, also into as many tokens. Raises InputError where
    positions are asked for and the numbers of tokens differ.

    >>> alignment(["Mary", " saw"], ["John", " saw"]), alignment(["un", "likely"], ["unlike", "ly"])
    ('position', 'text')
    """
    if by == "position" and len(a) != len(b):
        raise InputError(
            f"by position the two texts need as many tokens, expected {len(a)}, got {len(b)}",
            "use {align=text}, or change the words",
        )
    if by is not None:
        return by
    return "position" if len(a) == len(b) and "".join(a) != "".join(b) else "text"


def paired(a: Sequence[str], b: Sequence[str], by: Align) -> list[tuple[int, int]]:
    """Pairs of token numbers, sorted, as `alignment` says."""
    return [(place, place) for place in range(len(a))] if by == "position" else aligned(a, b)


def aligned(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs of token numbers, sorted: a token of the one text and one of the other that cover the same characters.

    a, b: what each token shows, as `Prompt.plain`; a token that shows nothing goes with the character before it. A
    token may be in several pairs, or in none.

    >>> aligned(["un", "likely"], ["unlike", "ly"])
    [(0, 0), (1, 0), (1, 1)]
    """
    owners_a, owners_b = _owners(a), _owners(b)
    pairs = {
        (first, second)
        for place_a, place_b in _same("".join(a), "".join(b))
        for first in _tokens(owners_a, place_a)
        for second in _tokens(owners_b, place_b)
    }
    return sorted(pairs)


class Units(NamedTuple):
    """What two texts share: the unit that each of their tokens belongs to, -1 for none, and how many units there are.

    A unit is a token of either text, or the tokens of both that cannot be separated where tokenizers cut differently.
    """

    of_a: tuple[int, ...]
    of_b: tuple[int, ...]
    size: int

    @property
    def members(self) -> tuple[list[list[int]], list[list[int]]]:
        """The tokens of every unit, of either text."""
        members: tuple[list[list[int]], ...] = ([[] for _ in range(self.size)], [[] for _ in range(self.size)])
        for places, of in zip(members, (self.of_a, self.of_b), strict=True):
            for token, unit in enumerate(of):
                if unit >= 0:
                    places[unit].append(token)
        return members[0], members[1]

    @property
    def moved(self) -> int:
        """How many units begin at another token in the other text."""
        return sum(a[0] != b[0] for a, b in zip(*self.members, strict=True))

    @property
    def alone(self) -> tuple[list[int], list[int]]:
        """The tokens of either text that the other lacks."""
        a, b = ([token for token, unit in enumerate(of) if unit < 0] for of in (self.of_a, self.of_b))
        return a, b

    def whole(self, *groups: Sequence[Group]) -> Units:
        """The same with whole groups, such as words: units that share one are one unit, with all of its tokens.

        groups: of either text, tokens [start, stop), which cover each of its tokens once, in order.

        >>> units(["un", "likely", "."], ["unlike", "ly"]).whole([(0, 3)], [(0, 1), (1, 2)])
        Units(of_a=(0, 0, 0), of_b=(0, 0), size=1)
        """
        of_token = [[at for at, (start, stop) in enumerate(each) for _ in range(start, stop)] for each in groups]
        pairs = {
            (of_token[0][token_a], of_token[1][token_b])
            for tokens_a, tokens_b in zip(*self.members, strict=True)
            for token_a in tokens_a
            for token_b in tokens_b
        }
        whole = _connected(sorted(pairs), *map(len, groups))
        of_a, of_b = (tuple(of[at] for at in each) for of, each in zip(whole[:2], of_token, strict=True))
        return Units(of_a, of_b, whole.size)


def units(a: Sequence[str], b: Sequence[str], by: Align = "text") -> Units:
    """The tokens of two texts put together as `paired` pairs them, in order; the same tokens one by one.

    >>> units(["un", "likely", "."], ["unlike", "ly"])
    Units(of_a=(0, 0, -1), of_b=(0, 0), size=1)
    """
    return _connected(paired(a, b, "position" if list(a) == list(b) else by), len(a), len(b))


def _connected(pairs: Sequence[tuple[int, int]], count_a: int, count_b: int) -> Units:
    """The connected parts of sorted pairs, in which neither side ever steps back."""
    of_a, of_b, count = [-1] * count_a, [-1] * count_b, 0
    for token_a, token_b in pairs:  # in order: a token of a unit is met before the next unit begins
        unit = max(of_a[token_a], of_b[token_b])
        unit = count if unit < 0 else unit
        of_a[token_a] = of_b[token_b] = unit
        count = max(count, unit + 1)
    return Units(tuple(of_a), tuple(of_b), count)


def _same(a: str, b: str) -> Iterator[tuple[CharacterRange, CharacterRange]]:
    """Runs of characters of both texts that belong together."""
    units_a, units_b = list(UNIT.finditer(a)), list(UNIT.finditer(b))
    for alike, unit_a, unit_b in _pairs(units_a, units_b):
        if not alike:
            yield unit_a.span(), unit_b.span()
            continue
        for back in range(min(len(unit_a[0]), len(unit_b[0]))):  # from the end: blanks before a word may be fewer
            yield (unit_a.end() - back - 1, unit_a.end() - back), (unit_b.end() - back - 1, unit_b.end() - back)


def _pairs(a: list[Unit], b: list[Unit]) -> Iterator[tuple[bool, Unit, Unit]]:
    """Units that belong together, and whether they are the same."""
    words_a, words_b = [unit[1] for unit in a], [unit[1] for unit in b]
    first = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(words_a, words_b, strict=False)))
    # What both begin with is paired without the matcher, which is quadratic.
    yield from ((True, unit_a, unit_b) for unit_a, unit_b in zip(a[:first], b[:first], strict=True))
    a, b, matcher = a[first:], b[first:], SequenceMatcher(None, words_a[first:], words_b[first:], autojunk=False)
    for operation, a0, a1, b0, b1 in matcher.get_opcodes():
        if a1 - a0 == b1 - b0:
            yield from ((operation == "equal", *pair) for pair in zip(a[a0:a1], b[b0:b1], strict=True))


def _owners(plain: Sequence[str]) -> list[list[int]]:
    """For each character the tokens that cover it."""
    stops = list(accumulate(map(len, plain)))
    owners: list[list[int]] = [[] for _ in range(stops[-1] if stops else 0)]
    for token, stop in enumerate(stops):
        start = stop - len(plain[token])
        for place in range(min(start, stop - 1), stop):
            if place >= 0:
                owners[place].append(token)
    return owners


def _tokens(owners: list[list[int]], run: CharacterRange) -> set[int]:
    return {token for place in range(*run) for token in owners[place]}
