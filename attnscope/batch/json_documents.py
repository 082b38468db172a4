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

    # Values follow one another, in an array or, as of JSON lines, without one.
    in_array = skip() == "["
    at, first = at + in_array, True
    while (begins := skip()) and not (in_array and begins == "]"):
        while True:  # until the text that is held has all of the value
            try:
                value, stop = DECODER.raw_decode(text, at)
            except json.JSONDecodeError as error:
                if ended:
                    raise ValueError(error.msg) from error
            else:
                if stop < len(text) or ended:  # a number may continue
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
    # A file that was cut off, or that has more than its array, is damaged: what was read of it stays.
    if in_array and not begins:
        raise ValueError("the array does not end")
    at += in_array
    if skip():
        raise ValueError("something follows the array")


def _inside(value: dict[str, Any]) -> Iterator[Any]:
    """The records of one object, which may be the only one."""
    columns = list(value.values())
    tables = columns and all(isinstance(rows, Mapping) and rows.keys() == columns[0].keys() for rows in columns)
    if tables and columns[0] and all(row.isdecimal() for row in columns[0]):  # pandas numbers its rows
        for row in columns[0]:
            yield {name: column[row] for name, column in value.items()}
        return
    # The records are the one list of objects in it that are not a chat's messages.
    lists = [column for column in columns if isinstance(column, list) and column]
    lists = [rows for rows in lists if all(isinstance(row, dict) and not {"role", "from"} & row.keys() for row in rows)]
    if len(lists) == 1:
        yield from lists[0]
    else:
        yield value
