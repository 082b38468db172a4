"""What can go wrong, in words a person can act on.

The library raises these; the command line prints each as one line and leaves with its `exit_code`.
"""

import re
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from inspect import get_annotations, signature
from typing import ParamSpec, TypeVar

from attnscope.shown import in_a_line

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
        hint = self.hint if self.in_python is None else self.in_python
        return self._line(hint, lambda name, value: name if value is None else f"{name}={_python(value)}")

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
        first, *rest = _OR.split(self.hint)
        steps = [("", first), *zip(rest[::2], rest[1::2], strict=True)]
        left = [step for step in steps if all(option[1] in options for option in _OPTION.finditer(step[1]))]
        return "".join(step if place == 0 else separator + step for place, (separator, step) in enumerate(left))

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

    >>> nearest("focsu", ["focus", "entropy"])
    'focus'
    """
    from difflib import get_close_matches

    return next(iter(get_close_matches(word, list(words), n=1, cutoff=NEAR)), None)


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust gave up: that is no `Exception`."""
    return type(error).__name__ == "PanicException"


def _python(value: str) -> str:
    return value if value.isdecimal() or value == "True" else f'"{value}"'


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
