"""What can go wrong, in words a person can act on, and text that somebody else wrote, as a person may see it.

What is printed for people goes through here: messages, cells of tables, titles. Nothing in it steers a terminal, and it
is no more than fits a line. Data keeps its text as it is. The library raises the errors; the command line prints each
as one line and leaves with its `exit_code`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache, wraps
from inspect import get_annotations, signature
from typing import ParamSpec, TypeVar

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
SHAPELESS = {"Cc", "Cf", "Cs", "Zs", "Zl", "Zp"}  # controls, formats, surrogates and separators
_category = lru_cache(maxsize=1 << 12)(unicodedata.category)


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
    return (_category(char) in SHAPELESS and char not in SHOWN_FORMATS) or char in FILLERS


def _selects_variant(char: str) -> bool:
    return "\ufe00" <= char <= "\ufe0f" or "\U000e0100" <= char <= "\U000e01ef"


def _is_emoji(char: str) -> bool:
    return _category(char) in {"So", "Sk"} or char in "\ufe0f\u20e3"


P = ParamSpec("P")
T = TypeVar("T")

_OPTION = re.compile(r"\{(\w+)(?:=([^{}]*))?\}")
NEAR = 0.66  # of difflib's ratio: one of three letters may be wrong (dpy, dpi), and `font_size` is not `quantize`
_OR = re.compile(r"(; |,? or )(?!\{)")  # before a step that may be taken instead; `use {x} or {y}` is one


class AttnscopeError(Exception):
    """Something a person can act on: what happened, and the next step.

    `message` says what was expected and what it got; `hint` says what to do next. A hint names an option as
    `{engine=eager}` or `{truncate}`; in Python that reads engine="eager", on the command line --engine eager.
    `in_python` is the hint as the public call says it that raised the error, see `hints_of`; None outside of one.

        >>> try:
        ...     attnscope.load("no/such")
        ... except attnscope.AttnscopeError as error:
        ...     print(error)
    """

    exit_code = 1
    in_python: str | None = None

    def __init__(self, message: str, hint: str = "") -> None:
        self.message = message
        self.hint = hint
        super().__init__(message, hint)

    def __str__(self) -> str:
        def spell(name: str, value: str | None) -> str:
            if value is None:
                return name
            return f"{name}={value}" if value.isdecimal() or value == "True" else f'{name}="{value}"'

        return self._line(self.hint if self.in_python is None else self.in_python, spell)

    def for_shell(self) -> str:
        """The same line in the words of the command line."""

        def spell(name: str, value: str | None) -> str:
            return f"--{name.replace('_', '-')}" + ("" if value in (None, "True") else f" {value}")

        return self._line(self.hint, spell)

    def steps(self, options: Collection[str]) -> str:
        """The hint without the steps that name another option than these.

        >>> UsageError("it is too long", "shorten it, or use {truncate=left}").steps({"text"})
        'shorten it'
        """
        parts = ["", *_OR.split(self.hint)]  # a separator before each step
        steps = zip(parts[::2], parts[1::2], strict=True)
        left = [step for step in steps if all(option[1] in options for option in _OPTION.finditer(step[1]))]
        return "".join(separator * (place > 0) + step for place, (separator, step) in enumerate(left))

    def _line(self, hint: str, spell: Callable[[str, str | None], str]) -> str:
        hint = _OPTION.sub(lambda option: spell(option[1], option[2]), hint)
        return in_a_line(f"{self.message}; {hint}" if hint else self.message)


def hints_of(*records: type) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A public call whose errors name, in Python, its own options and those of the records.

    records: the dataclasses or typed dictionaries of its keywords, and of how its model was loaded. Where no step is
    left, the hint says that the call has no such option. `hint` stays whole: the command line has other options.

    >>> @hints_of(WhyOptions, LoadOptions)
    ... def why(model, text, head, **options): ...
    """

    def give(call: Callable[P, T]) -> Callable[P, T]:
        options = {*signature(call).parameters, *(name for record in records for name in get_annotations(record))}

        @wraps(call)
        def hinted(*arguments: P.args, **named: P.kwargs) -> T:
            try:
                return call(*arguments, **named)
            except AttnscopeError as error:
                error.in_python = error.steps(options)
                if error.hint and not error.in_python:
                    error.in_python = f"{error.hint}, which is no option of {call.__name__}"
                raise

        return hinted

    return give


def first_line(error: BaseException) -> str:
    """The first line of an error that is not ours, with the next where it only announces that one, of 200 characters.

    >>> first_line(ValueError("no such layer\\nlayers: 0 to 3"))
    'no such layer'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = (" ".join(lines[:2]) if lines[0].endswith(":") else lines[0]).rstrip(".")
    return text if len(text) <= 200 else text[:197] + "..."


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The known word that somebody probably meant who wrote another; None where none is near.

    Of near ones that with the same letters in another order, else the most alike.

    >>> nearest("focsu", ["focus", "entropy"]), nearest("modle", ["module", "model"])
    ('focus', 'model')
    """
    from difflib import get_close_matches

    near = get_close_matches(word, list(words), cutoff=NEAR)
    return next((other for other in near if sorted(other) == sorted(word)), next(iter(near), None))


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust gave up: that is no `Exception`."""
    return type(error).__name__ == "PanicException"


class UsageError(AttnscopeError):
    """An argument, a selection or a configuration that cannot be meant."""

    exit_code = 2


class UnknownOptionError(UsageError, TypeError):
    """A keyword that a function does not have: a TypeError too, as Python's own refusal is."""


class UnknownLayerError(UsageError, KeyError):
    """A layer of which nothing was kept: a KeyError too, as a mapping's own refusal is."""


class ModelError(AttnscopeError):
    """A model that cannot be found, loaded or read."""

    exit_code = 3


class ForwardError(ModelError):
    """A model whose own code failed over what it was given; over something else it may not."""


class InputError(AttnscopeError):
    """A text that cannot be read, or that does not fit the model."""

    exit_code = 4


class MemoryLimitError(AttnscopeError):
    """More memory than there is; the hint says what would fit."""

    exit_code = 5
