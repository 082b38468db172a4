"""What a record says of its text as ranges of characters: `"spans": {"subject": [[5, 9]]}`, `"key": [[5, 9]]`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from attnscope.batch.items import Item
from attnscope.errors import InputError, brief
from attnscope.inputs.labels import touched
from attnscope.inputs.prompt import Prompt
from attnscope.inputs.tokens import TokenMatch as Found

FIELD = "spans"


def given_spans(item: Item, prompt: Prompt, names: Sequence[str], chat: bool = False) -> dict[str, Found | None]:
    """Those of the names that the item's record gives: their tokens, None where it gives no range, or cut ones.

    A cell of csv holds them as JSON; null is as if nothing was there. Raises InputError for what are no ranges of
    characters of the text.
    """
    value: Any = _unpacked(item.fields.get(FIELD))
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InputError(f'field {FIELD!r}: expected {{"subject": [[5, 9]]}}, got {brief(value)}')
    named = {name: value[name] for name in names if value.get(name) is not None}
    spans = dict[str, Found | None]()
    for name, value in named.items():
        ranges = ranges_of(value)
        if ranges is None:
            raise InputError(f"span {name!r}: expected ranges like [[5, 9]], got {brief(value)}")
        places = _found(prompt, f"span {name!r}", ranges, chat)
        spans[name] = None if places is None else Found(name, places)
    return spans


def given_tokens(item: Item, prompt: Prompt, field: str, chat: bool = False) -> Found | None:
    """The tokens of the ranges in a field of the item's record; None where it names tokens by an expression.

    Raises InputError for what are no ranges of characters of the text, and where no token is left of them.
    """
    ranges = ranges_of(item.says(field))
    if ranges is None:
        return None
    places = _found(prompt, f"field {field!r}", ranges, chat)
    if places is None:
        raise InputError(f"field {field!r}: no token is left of the characters {ranges}")
    return Found(json.dumps(ranges), places)


def ranges_of(value: object) -> list[list[int]] | None:
    """The ranges of characters that a value gives, a list of them or one; None for what is neither.

    >>> ranges_of([[5, 9]]), ranges_of("[5, 9]"), ranges_of("Mary")
    ([[5, 9]], [[5, 9]], None)
    """
    value = _unpacked(value)
    ranges = [value] if _is_pair(value) else value
    return ranges if isinstance(ranges, list) and all(map(_is_pair, ranges)) else None


def _unpacked(value: Any) -> Any:
    """A value of a record; of a cell of csv, what its JSON says, if it is that."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.loads(value or "null")
    return value


def _found(prompt: Prompt, where: str, ranges: list[list[int]], chat: bool) -> tuple[int, ...] | None:
    """The tokens that hold one of the characters, or a part of one; None where there is none. where: says which."""
    if prompt.medium.sha256:
        raise InputError(f"{where} counts characters of a text that is read alone: name tokens instead")
    if chat:
        raise InputError(f"{where} counts characters of a text, and the chat template writes another")
    for start, stop in ranges:
        if not 0 <= start < stop <= len(prompt.text):
            raise InputError(f"{where}: {[start, stop]} is not a range of the text's {len(prompt.text)} characters")
    places = touched(prompt.characters, [(start, stop) for start, stop in ranges])
    return tuple(sorted({at for place in places for at in place})) or None


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(end) is int for end in value)
