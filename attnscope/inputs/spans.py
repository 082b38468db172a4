"""Words and sentences over tokens, by short rules on what the tokens say; then which tokens of two texts go together.

What finds words and sentences takes the texts of the tokens (a character that is split over tokens is in its first, the
others are empty) and which tokens are special. It returns half-open token ranges that cover every token once, in order.
Special tokens are ranges of their own; white space alone belongs to what follows it, at the end to what precedes it.

Tokens of two texts belong together at the same position, or where they cover the same characters.

    by = alignment(a, b)            # "position" for a minimal pair
    units(a, b, by).size            # how many tokens they share

By position, tokens are paired one to one. That takes texts of as many tokens: a minimal pair, or IOI, where a name that
is swapped must not take its partner along. By text, tokenizers may differ: both texts are cut into words and marks,
each with the blanks before it. What is the same in both is paired character by character. Where they differ by as many
words on either side, these are paired one by one, with all their tokens.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import accumulate, pairwise, takewhile
from typing import Literal, NamedTuple

from attnscope.errors import InputError

# Scripts that don't put spaces between words: Thai and Lao, Myanmar, Khmer, Han with its radicals, kana.
SPACELESS = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fdf\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf"
    "\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9d\U00020000-\U0003ffff]"
)
FLAG_HALVES = "".join(map(chr, range(0x1F1E6, 0x1F200)))  # regional indicators
STOPS = tuple(".!?…؟۔।॥")
WIDE_STOPS = tuple("。！？｡")
CLOSERS = "\"'”’»)]}」』）】》"
TAIL = 16  # characters of a word or sentence that the rules look back on
UNIT = re.compile(r"\s*(\w+|[^\w\s])")
CharacterRange = tuple[int, int]  # characters [start, stop)
Group = tuple[int, int]  # tokens [start, stop)
Align = Literal["position", "text"]
WORDS: Mapping[Align, str] = {"position": "aligned by position", "text": "aligned by characters"}


def word_ranges(texts: Sequence[str], special: Sequence[bool]) -> list[tuple[int, int]]:
    """Words: a run of tokens up to the next that begins with white space.

    A token of punctuation or symbols alone is a word of its own, except an apostrophe between letters and a point or
    comma between digits; where a script has no spaces each token is a word. Combining marks, joiners and skin
    tones stay with what they modify, two regional indicators make one flag.

    >>> word_ranges(["the", " riv", "er", ".", " End"], [False] * 5)
    [(0, 1), (1, 3), (3, 4), (4, 5)]
    """
    starts: list[int] = []
    word = before = ""
    for place, text in enumerate(texts):
        following = texts[place + 1][:1] if place + 1 < len(texts) and not special[place + 1] else ""
        if place == 0 or special[place] or special[place - 1] or _starts_word(word, before, text, following):
            starts.append(place)
            word = ""
        word, before = (word + text)[-TAIL:], text or before
    return _ranges_from(starts, texts, special)


def sentence_ranges(texts: Sequence[str], special: Sequence[bool]) -> list[tuple[int, int]]:
    """Sentences: they end after . ! ? … (and the marks of Arabic, Urdu and Hindi) with white space or the end next.

    Closing quotes and brackets belong to the sentence they close. The full-width 。！？ need no space after them, and
    two newlines end a sentence without a mark. A token that holds an end and a beginning is not divided.

    >>> sentence_ranges(["Yes", ".", " No", ".", "5"], [False] * 5)
    [(0, 2), (2, 5)]
    """
    starts: list[int] = []
    tail, not_blank = "", False
    for place, text in enumerate(texts):
        fresh = place == 0 or special[place] or special[place - 1]
        if fresh or (not_blank and text and _ended(tail, text)):
            starts.append(place)
            tail, not_blank = "", False
        tail, not_blank = (tail + text)[-TAIL:], not_blank or bool(text.strip())
    return _ranges_from(starts, texts, special)


def ends_between(text: str, at: int) -> bool:
    """Whether a word may end before character `at`: not inside letters and digits, nor before what only modifies.

    >>> [at for at in range(10) if ends_between("to store", at)]
    [0, 2, 3, 8, 9]
    """
    before, after = text[max(0, at - TAIL) : at], text[at : at + 1]
    if not before or not after:
        return True
    if _extends(before, after):
        return False
    if SPACELESS.match(before[-1]) or SPACELESS.match(after):
        return True
    in_word = (char.isalnum() or char == "_" or unicodedata.category(char)[0] == "M" for char in (before[-1], after))
    return not all(in_word)


def _ranges_from(starts: list[int], texts: Sequence[str], special: Sequence[bool]) -> list[tuple[int, int]]:
    """Ranges from their starts; white space that nothing follows goes to the range before it."""
    ranges = pairwise([*starts, len(texts)])
    apart = {start for start, stop in ranges if special[start] or "".join(texts[start:stop]).strip()}
    left = [start for start in starts if start in apart or start == 0 or special[start - 1]]
    return list(pairwise([*left, len(texts)]))


def _starts_word(word: str, before: str, text: str, following: str) -> bool:
    """Whether `text` starts a word after `word`, whose last token says `before`."""
    if not text or not word.strip() or _extends(word, text[0]):
        return False
    if text[0].isspace() or word[-1].isspace() or SPACELESS.match(text[0]) or SPACELESS.match(word[-1]):
        return True
    if _is_mark(text):
        return not _inside(word[-1], text, following)
    return _is_mark(before) and not _inside(word[-len(before) - 1 : -len(before)], before, text[0])


def _extends(word: str, char: str) -> bool:
    """Whether a character only modifies, or is joined to, the end of a word."""
    if word[-1] == "\u200d" or char == "\u200d" or "\U0001f3fb" <= char <= "\U0001f3ff":
        return True
    if word[-1] in FLAG_HALVES and char in FLAG_HALVES:
        return (len(word) - len(word.rstrip(FLAG_HALVES))) % 2 == 1
    return unicodedata.category(char).startswith("M") or "\U000e0020" <= char <= "\U000e007f"


def _is_mark(text: str) -> bool:
    """Punctuation or symbols alone; the underscore ties words together and doesn't count."""
    categories = [unicodedata.category(char) for char in text.strip()]
    return bool(categories) and all(category[0] in "PS" and category != "Pc" for category in categories)


def _inside(left: str, mark: str, right: str) -> bool:
    """The apostrophe in don't, the point in 3.14."""
    letters, digits = left.isalpha() and right.isalpha(), left.isdigit() and right.isdigit()
    return (mark in "'’" and letters) or (mark in ".," and digits)


def _ended(tail: str, text: str) -> bool:
    """Whether the sentence that ends in `tail` is over before `text`."""
    body = tail.rstrip()
    lead = text[: len(text) - len(text.lstrip())]
    space = tail[len(body) :] + lead
    if text.strip() and space.count("\n") >= 2:
        return True
    core = body.rstrip(CLOSERS)
    if core.endswith(WIDE_STOPS):
        return bool(space) or not text.startswith((*CLOSERS, *WIDE_STOPS))
    return core.endswith(STOPS) and bool(space)


def alignment(a: Sequence[str], b: Sequence[str], by: Align | None = None) -> Align:
    """How the tokens of two texts are paired: as asked, else by position where different texts have as many tokens.

    One text that two tokenizers cut differently is paired by text, also into as many tokens. Raises InputError where
    positions are asked for and the numbers of tokens differ.

    >>> alignment(["Mary", " saw"], ["John", " saw"]), alignment(["un", "likely"], ["unlike", "ly"])
    ('position', 'text')
    """
    if by == "position" and len(a) != len(b):
        message = f"by position the two texts need as many tokens, expected {len(a)}, got {len(b)}"
        raise InputError(message, "use {align=text}, or change the words")
    if by is not None:
        return by
    return "position" if len(a) == len(b) and "".join(a) != "".join(b) else "text"


def pair_tokens(a: Sequence[str], b: Sequence[str], by: Align = "text") -> list[tuple[int, int]]:
    """Pairs of token numbers, sorted: by text a token of the one and one of the other that cover the same characters.

    a, b: what each token shows, as `Prompt.plain`; a token that shows nothing goes with the character before it. A
    token may be in several pairs, or in none.

    >>> pair_tokens(["un", "likely"], ["unlike", "ly"])
    [(0, 0), (1, 0), (1, 1)]
    """
    if by == "position":
        return [(place, place) for place in range(len(a))]
    owners_a, owners_b = _tokens_by_character(a), _tokens_by_character(b)
    pairs = {
        (first, second)
        for place_a, place_b in _shared_runs("".join(a), "".join(b))
        for first in {token for place in range(*place_a) for token in owners_a[place]}
        for second in {token for place in range(*place_b) for token in owners_b[place]}
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
    """The tokens of two texts put together as `pair_tokens` pairs them, in order; the same tokens one by one.

    >>> units(["un", "likely", "."], ["unlike", "ly"])
    Units(of_a=(0, 0, -1), of_b=(0, 0), size=1)
    """
    return _connected(pair_tokens(a, b, "position" if list(a) == list(b) else by), len(a), len(b))


def _connected(pairs: Sequence[tuple[int, int]], count_a: int, count_b: int) -> Units:
    """The connected parts of sorted pairs, in which neither side ever steps back."""
    of_a, of_b, count = [-1] * count_a, [-1] * count_b, 0
    for token_a, token_b in pairs:  # in order: a token of a unit is met before the next unit begins
        unit = max(of_a[token_a], of_b[token_b])
        unit = count if unit < 0 else unit
        of_a[token_a] = of_b[token_b] = unit
        count = max(count, unit + 1)
    return Units(tuple(of_a), tuple(of_b), count)


def _shared_runs(a: str, b: str) -> Iterator[tuple[CharacterRange, CharacterRange]]:
    """Runs of characters of both texts that belong together."""
    units_a, units_b = list(UNIT.finditer(a)), list(UNIT.finditer(b))
    words_a, words_b = [unit[1] for unit in units_a], [unit[1] for unit in units_b]
    # What both begin with is paired without the matcher, which is quadratic.
    first = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(words_a, words_b, strict=False)))
    pairs = [(True, *pair) for pair in zip(units_a[:first], units_b[:first], strict=True)]
    matcher = SequenceMatcher(None, words_a[first:], words_b[first:], autojunk=False)
    for operation, a0, a1, b0, b1 in matcher.get_opcodes():
        if a1 - a0 == b1 - b0:
            both = zip(units_a[first + a0 : first + a1], units_b[first + b0 : first + b1], strict=True)
            pairs += [(operation == "equal", *pair) for pair in both]
    for alike, unit_a, unit_b in pairs:
        if not alike:
            yield unit_a.span(), unit_b.span()
            continue
        for back in range(min(len(unit_a[0]), len(unit_b[0]))):  # from the end: blanks before a word may be fewer
            yield (unit_a.end() - back - 1, unit_a.end() - back), (unit_b.end() - back - 1, unit_b.end() - back)


def _tokens_by_character(plain: Sequence[str]) -> list[list[int]]:
    """For each character the tokens that cover it."""
    stops = list(accumulate(map(len, plain)))
    owners: list[list[int]] = [[] for _ in range(stops[-1] if stops else 0)]
    for token, stop in enumerate(stops):
        start = stop - len(plain[token])
        for place in range(max(0, min(start, stop - 1)), stop):
            owners[place].append(token)
    return owners
