"""Files written whole or not at all: beside their place under a hidden name, then moved there."""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from attnscope.errors import UsageError

_unfinished: set[Path] = set()


@contextmanager
def whole_path(path: Path) -> Iterator[Path]:
    """A path whose file becomes `path` when the block ends well, and vanishes when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")  # beside it: a rename does not cross file systems
    _unfinished.add(temp)
    try:
        yield temp
        os.replace(temp, path)
    finally:
        with suppress(OSError):
            temp.unlink(missing_ok=True)
        _unfinished.discard(temp)


def remove_unfinished() -> None:
    """Remove what a signal left behind: one that comes while a block of `whole_path` ends keeps it from cleaning up."""
    for temp in list(_unfinished):
        with suppress(OSError):
            temp.unlink(missing_ok=True)
        _unfinished.discard(temp)


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A stream whose content becomes `path` when the block ends well, and vanishes when it does not."""
    with whole_path(path) as temp, open(temp, "xb") as stream:
        yield stream


def write_whole(path: Path, write: Callable[[Path], object]) -> Path:
    """Write a file with a function of a path, whole or not at all. UsageError where the folder cannot be written.

    >>> write_whole(Path("a.txt"), lambda temp: temp.write_text("whole"))
    """
    try:
        with whole_path(path) as temp:
            write(temp)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror or error}", "name a folder that can be written"
        ) from error
    return path


def save_json(value: Any, path: Path) -> Path:
    """Write one JSON document, whole or not at all; numbers that JSON has no word for become null."""
    with whole_file(path) as stream:
        document = json.dumps(jsonable(value), indent=2, ensure_ascii=False) + "\n"
        stream.write(document.encode(errors="backslashreplace"))  # a path that is not UTF-8: JSON's own escapes
    return path


def json_line(value: Any) -> bytes:
    """One line of a JSON lines file."""
    return (json.dumps(value, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


def jsonable(value: Any) -> Any:
    """The value in JSON's own words: NaN is null, an infinite number a string."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return value
