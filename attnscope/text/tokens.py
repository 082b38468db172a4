"""Which tokens are meant: `8`, `-1`, `3:7`, `last`, `bank#2`, joined by commas.

find(prompt, "bank#2").positions     # (8,)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attnscope.errors import InputError, UsageError
from attnscope.text.prompt import Prompt


@dataclass(frozen=True)
class Found:
    """The tokens that an expression means: their positions, ascending, each once; notes: what a person should know."""

    expression: str
    positions: tuple[int, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chosen:
    """The queries and keys of one text that are asked about, None for all."""

    query: Found | None = None
    key: Found | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of how the expressions were read."""
        return tuple(note for found in (self.query, self.key) if found for note in found.notes)


def choose(prompt: Prompt, query: str | None = None, key: str | None = None, defined: Mapping[str, str] = {}) -> Chosen:
    """The queries and keys that two expressions mean in a text. Raises as `find`."""
    query_found, key_found = (None if one is None else find(prompt, one, defined) for one in (query, key))
    return Chosen(query_found, key_found)


def find(prompt: Prompt, expression: str, defined: Mapping[str, str] = {}) -> Found:
    """The tokens that an expression means. Raises InputError where it means none, with the tokens and their numbers."""
    words = {"first": "0", "last": "-1"}
    wanted = words.get(expression, defined.get(expression, expression))
    if wanted.lstrip("-").isdigit():
        found = [range(len(prompt))[int(wanted)]]
    else:
        found = [place for place, text in enumerate(prompt.plain) if text.strip() == wanted]
    if not found:
        tokens = ", ".join(f"{place} {label}" for place, label in enumerate(prompt.labels))
        raise InputError(f"{expression!r} stands nowhere in the text", f"its tokens are {tokens}")
    return Found(expression, tuple(found))


def defined(pairs: Sequence[str]) -> dict[str, str]:
    """`["subject=Mary"]` -> {"subject": "Mary"}. Raises UsageError for a pair without a name or a meaning."""
    found = {}
    for pair in pairs:
        name, _, meaning = pair.partition("=")
        if not name or not meaning:
            raise UsageError(f"--define takes NAME=TOKENS; {pair!r} came", "write --define subject=Mary")
        found[name] = meaning
    return found


def described(prompt: Prompt, found: Found) -> str:
    """The tokens for a header: `bank(2), bank(8)`."""
    return ", ".join(f"{prompt.labels[place].strip('·')}({place})" for place in found.positions)
