"""The spans that a record gives of its text: `"spans": {"subject": [[5, 9]]}`, as ranges of characters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from attnscope.batch.items import Item
from attnscope.errors import InputError
from attnscope.shown import brief
from attnscope.text.characters import touched
from attnscope.text.prompt import Prompt
from attnscope.text.tokens import Found

FIELD = "spans"


def given_spans(item: Item, prompt: Prompt, names: Sequence[str], chat: bool = False) -> dict[str, Found | None]:
    """Those of the names that the item's record gives: their tokens, None where it gives no range, or cut ones.

    A cell of csv holds them as JSON; null is as if nothing stood there. Raises InputError for what are no ranges of
    characters of the text.
    """
    given: Any = item.fields.get(FIELD)
    if isinstance(given, str):
        with suppress(ValueError, RecursionError):
            given = json.loads(given or "null")
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InputError(f'field {FIELD!r}: expected {{"subject": [[5, 9]]}}, got {brief(given)}')
    ranges = {name: given[name] for name in names if given.get(name) is not None}
    if prompt.medium.sha256 and ranges:
        raise InputError(f"field {FIELD!r} counts characters of a text that is read alone: name tokens instead")
    if chat and ranges:
        raise InputError(f"field {FIELD!r} counts characters of a text, and the chat template writes another")
    return {name: _found(prompt, name, one) for name, one in ranges.items()}


def _found(prompt: Prompt, name: str, ranges: Any) -> Found | None:
    if not (isinstance(ranges, list) and all(map(_is_pair, ranges))):
        raise InputError(f"span {name!r}: expected ranges like [[5, 9]], got {brief(ranges)}")
    for start, stop in ranges:
        if not 0 <= start < stop <= len(prompt.text):
            raise InputError(
                f"span {name!r}: {[start, stop]} is not a range of the text's {len(prompt.text)} characters"
            )
    positions = {at for place in touched(prompt.characters, ranges) for at in place}
    return Found(name, tuple(sorted(positions))) if positions else None


def _is_pair(one: Any) -> bool:
    return isinstance(one, list) and len(one) == 2 and all(type(end) is int for end in one)
