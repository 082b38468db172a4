"""A JSON file -> its records, one at a time: those of an array, one after another, or of the one list in an object.

Only the value that is being read is held, so that an array of any length costs the memory of its largest record.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

CHUNK = 1 << 16
BLANK = re.compile(r"[\s,]*")
DECODER = json.JSONDecoder()


def values_in(stream: IO[str], most: int, is_record: Callable[[Mapping[str, Any]], bool]) -> Iterator[Any]:
    """The values of a JSON file. Raises ValueError for what is no JSON, and for a value of more than `most` characters.

    An object alone that is no record may have the list of them in one of its fields (SQuAD's `data`), or its fields are
    columns (as pandas writes them).

    >>> list(values_in(io.StringIO('[{"text": "a"}, {"text": "b"}]'), 100, lambda value: "text" in value))
    [{'text': 'a'}, {'text': 'b'}]
    """
    text, at, ended = "", 0, False

    def more(size: int) -> None:
        nonlocal text, at, ended
        chunk = stream.read(size)
        text, at, ended = text[at:] + chunk, 0, not chunk

    def skip() -> str:
        """The next character that is no blank and no comma; "" at the end."""
        nonlocal at
        while True:
            at = BLANK.match(text, at).end()  # type: ignore[union-attr]
            if at < len(text) or ended:
                return text[at : at + 1]
            more(CHUNK)

    in_array = skip() == "["
    at, first = at + in_array, True
    while (begins := skip()) and not (in_array and begins == "]"):
        while True:
            try:
                value, stop = DECODER.raw_decode(text, at)
            except json.JSONDecodeError as error:
                if ended:
                    raise ValueError(error.msg) from error
            else:
                if stop < len(text) or ended:  # a number may go on
                    break
            if len(text) - at > most:
                raise ValueError(f"too long: over {most} characters, or broken")
            more(max(CHUNK, len(text) - at))  # twice as much each time: what is long is tried a few times
        at = stop
        if first and not in_array and isinstance(value, dict) and not skip():
            yield from [value] if is_record(value) else _inside(value)
            return
        first = False
        yield value
    if in_array and not begins:
        raise ValueError("the array does not end")
    at += in_array
    if skip():
        raise ValueError("something follows the array")


def _inside(value: dict[str, Any]) -> Iterator[Any]:
    """The records of one object, which may be the only one."""
    columns = list(value.values())
    tables = bool(columns) and all(isinstance(one, Mapping) and one.keys() == columns[0].keys() for one in columns)
    if tables and columns[0] and all(row.isdecimal() for row in columns[0]):  # pandas numbers its rows
        for row in columns[0]:
            yield {name: column[row] for name, column in value.items()}
        return
    lists = [one for one in columns if _holds_records(one)]
    if len(lists) == 1:
        yield from lists[0]
    else:
        yield value


def _holds_records(value: Any) -> bool:
    """Whether this is a list of objects, and not of a chat's messages."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(one, dict) and not {"role", "from"} & one.keys() for one in value)
