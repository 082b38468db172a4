"""Text that somebody else wrote, as a person may see it: nothing that steers a terminal, no more than fits a line.

What is printed for people goes through here: messages, cells of tables, titles. Data keeps its text as it is.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

LINE = 120  # characters of one value
MESSAGE = 6 * LINE  # characters of a message, whatever it quotes
LINES: Mapping[str, str] = {"\n": "\n"}  # signs of a text that stays in its lines
# Of one whose blanks of any width stay, too, as in a title in Chinese.
BLANKS: Mapping[str, str] = {
    char: char for char in "\n\t\xa0\u1680\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
}
BREAKS = re.compile(r"[\r\n\t]+")
# A value that no blank interrupts, or one in quotes.
VALUE = re.compile(rf"""\S{{{LINE + 1},}}|(?<!\w)(["'])(?:(?!\1).){{{LINE - 1},}}\1(?!\w)""")
# Number signs of Arabic, Syriac and Kaithi: format characters by category, but they have a shape.
SHOWN_FORMATS = frozenset("\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd")
EMOJI_TAGS = "".join(map(chr, range(0xE0020, 0xE0080)))
# Letters, marks and symbols by category, but without a shape; and two that are no characters, which XML forbids.
FILLERS = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0\ufffe\uffff")
SHAPELESS = {"Cc", "Cf", "Cs", "Zs", "Zl", "Zp"}


def in_a_line(text: str) -> str:
    """A message as one line, whatever it quotes: long values and long messages lose their middle.

    >>> in_a_line("there is no file a\\x1b[2J\\nb")
    'there is no file a⟨001B⟩[2J b'
    """
    text = visible(BREAKS.sub(" ", _cut(text, 100 * MESSAGE)))
    return _cut(VALUE.sub(lambda value: _cut(value[0], LINE), text), MESSAGE)


def brief(value: object) -> str:
    """A value as Python writes it, at most a line of it."""
    return _cut(repr(value), LINE)


def listed(words: Sequence[str], most: int = 4) -> str:
    """The first of some words, and how many more there are.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    more = len(words) - most
    return ", ".join(words[:most]) + (f" and {more} more" if more > 0 else "")


def numbered(char: str) -> str:
    """A character by its number: ⟨200B⟩."""
    return f"⟨{ord(char):04X}⟩"


def visible(text: str, signs: Mapping[str, str] | None = None, written: Callable[[str], str] = numbered) -> str:
    """Text whose controls, directions and blanks without a shape are written as `⟨200B⟩`; signs: how some are drawn.

    A space stays, and so do a joiner between emoji, a variation selector after its base and the tags of a flag.
    written: how a hidden character is written otherwise.

    >>> visible("a\\u200b\\n b", {"\\n": "↵"})
    'a⟨200B⟩↵ b'
    """
    signs = signs or {}
    if text.isascii() and text.isprintable() and not signs.keys() & set(text):
        return text
    return "".join(
        signs[char] if char in signs else written(char) if _is_hidden(text, at) else char
        for at, char in enumerate(text)
    )


def _cut(text: str, most: int) -> str:
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}…{text[len(text) - most + half + 1 :]}"


def _is_hidden(text: str, at: int) -> bool:
    char = text[at]
    if char == " ":
        return False
    if char == "\u200d":
        return not (0 < at < len(text) - 1 and _is_emoji(text[at - 1]) and _is_emoji(text[at + 1]))
    if char in EMOJI_TAGS:
        return not text[:at].rstrip(EMOJI_TAGS).endswith("\U0001f3f4")
    if _selects_variant(char):
        return at == 0 or text[at - 1].isspace() or _selects_variant(text[at - 1])
    return (_shapeless(char) and char not in SHOWN_FORMATS) or char in FILLERS


@lru_cache(maxsize=1 << 12)
def _shapeless(char: str) -> bool:
    """Separators, controls, formats and surrogates have no shape of their own."""
    return unicodedata.category(char) in SHAPELESS


def _selects_variant(char: str) -> bool:
    return "\ufe00" <= char <= "\ufe0f" or "\U000e0100" <= char <= "\U000e01ef"


def _is_emoji(char: str) -> bool:
    return unicodedata.category(char) in {"So", "Sk"} or char in "\ufe0f\u20e3"
