"""Words and sentences over tokens: which token starts one, by short rules on what the tokens say.

Each function takes the texts of the tokens (a character that is split over tokens is in its first, the others are
empty) and which tokens are special. It returns half-open token ranges that cover every token once, in order.
Special tokens are ranges of their own; white space alone belongs to what follows it, at the end to what precedes it.
"""

import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

# Scripts that don't put spaces between words: Thai and Lao, Myanmar, Khmer, Han with its radicals, kana.
SPACELESS = (
    (0x0E00, 0x0EFF),
    (0x1000, 0x109F),
    (0x1780, 0x17FF),
    (0x2E80, 0x2FDF),
    (0x3005, 0x3007),
    (0x3040, 0x30FF),
    (0x31F0, 0x31FF),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0xFF66, 0xFF9D),
    (0x20000, 0x3FFFF),
)
STOPS = tuple(".!?…؟۔।॥")
WIDE_STOPS = tuple("。！？｡")
CLOSERS = "\"'”’»)]}」』）】》"
TAIL = 16  # characters of a word or sentence that the rules look back on


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
        if _fresh(place, special) or _new_word(word, before, text, following):
            starts.append(place)
            word = ""
        word, before = (word + text)[-TAIL:], text or before
    return _closed(starts, texts, special)


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
        if _fresh(place, special) or (not_blank and text and _ended(tail, text)):
            starts.append(place)
            tail, not_blank = "", False
        tail, not_blank = (tail + text)[-TAIL:], not_blank or bool(text.strip())
    return _closed(starts, texts, special)


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
    return not (_in_word(before[-1]) and _in_word(after)) or _spaceless(before[-1]) or _spaceless(after)


def _in_word(char: str) -> bool:
    return char.isalnum() or char == "_" or unicodedata.category(char).startswith("M")


def _fresh(place: int, special: Sequence[bool]) -> bool:
    return place == 0 or special[place] or special[place - 1]


def _closed(starts: list[int], texts: Sequence[str], special: Sequence[bool]) -> list[tuple[int, int]]:
    """Ranges from their starts; white space that nothing follows goes to the range before it."""
    left: list[int] = []
    stop = len(texts)
    for start in reversed(starts):
        blank = not special[start] and not "".join(texts[start:stop]).strip()
        stop = start
        if not (blank and start > 0 and not special[start - 1]):
            left.append(start)
    left.reverse()
    return list(pairwise([*left, len(texts)]))


def _new_word(word: str, before: str, text: str, following: str) -> bool:
    """Whether `text` starts a word after `word`, whose last token says `before`."""
    if not text or not word.strip() or _extends(word, text[0]):
        return False
    if text[0].isspace() or word[-1].isspace() or _spaceless(text[0]) or _spaceless(word[-1]):
        return True
    if _is_mark(text):
        return not _inside(word[-1], text, following)
    return _is_mark(before) and not _inside(word[-len(before) - 1 : -len(before)], before, text[0])


def _extends(word: str, char: str) -> bool:
    """Whether a character only modifies, or is joined to, the end of a word."""
    if word[-1] == "\u200d" or char == "\u200d" or "\U0001f3fb" <= char <= "\U0001f3ff":
        return True
    if _is_flag_half(word[-1]) and _is_flag_half(char):
        halves = len(word) - len(word.rstrip("".join(map(chr, range(0x1F1E6, 0x1F200)))))
        return halves % 2 == 1
    return unicodedata.category(char).startswith("M") or "\U000e0020" <= char <= "\U000e007f"


def _is_flag_half(char: str) -> bool:
    return "\U0001f1e6" <= char <= "\U0001f1ff"


@lru_cache(4096)
def _spaceless(char: str) -> bool:
    return any(first <= ord(char) <= last for first, last in SPACELESS)


def _is_mark(text: str) -> bool:
    """Punctuation or symbols alone; the underscore ties words together and doesn't count."""
    return bool(text.strip()) and all(
        (category := unicodedata.category(char))[0] in "PS" and category != "Pc" for char in text.strip()
    )


def _inside(left: str, mark: str, right: str) -> bool:
    """The apostrophe in don't, the point in 3.14."""
    return (mark in "'’" and left.isalpha() and right.isalpha()) or (
        mark in ".," and left.isdigit() and right.isdigit()
    )


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
