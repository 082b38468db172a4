"""A journal: a file of lines, each a JSON object with a checksum of itself, appended and synced.

What was appended survives a crash of the machine. The end of a line that a crash cut off is dropped when the journal is
read next.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from attnscope.errors import InputError
from attnscope.files import open_regular

LINE_BYTES = 2**28  # at most
T = TypeVar("T")


def read_journal(path: Path, parse: Callable[[Mapping[str, Any]], T | None], *, cut: bool = True) -> Iterator[T]:
    """What `parse` makes of every line; the last one is dropped if it is not whole.

    parse: None, ValueError, TypeError or KeyError for what is none of ours. cut: remove from the file the end of a
    line that a crash cut off; not while another run may be writing it. Raises InputError for a damaged line.
    """
    if not path.exists():
        return
    with open_regular(path, "r+b" if cut else "rb", follow=False) as stream:
        whole, size = 0, os.fstat(stream.fileno()).st_size
        for number, line in enumerate(iter(partial(stream.readline, LINE_BYTES), b""), start=1):
            value = _read_line(line, parse)
            if value is None and whole + len(line) < size:
                raise InputError(f"{path} is damaged in line {number}", "name another folder with {out}")
            if value is None:  # the end of a line that a crash cut off
                break
            yield value
            whole += len(line)
        if cut and whole < size:
            stream.truncate(whole)


def append(path: Path, value: Mapping[str, Any]) -> None:
    """Append a line; on return it survives a crash of the machine."""
    body = json.dumps(value, sort_keys=True)
    line = f"{_checksum(body.encode())} {body}\n".encode()
    with open_regular(path, "ab", buffering=0, follow=False) as stream:
        start = stream.tell()
        try:
            if stream.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.fsync(stream.fileno())
        except OSError:  # a full disk: half a line must not stay before the next one
            with suppress(OSError):
                os.truncate(path, start)
            raise
    sync(path.parent)


def sync_file(path: Path) -> None:
    """Make a file that was written survive a crash of the machine."""
    with open(path, "r+b") as stream:  # Windows syncs only what is open for writing
        os.fsync(stream.fileno())


def sync(folder: Path) -> None:
    """Make renames in a folder survive a crash of the machine, where a folder can be opened."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_line(line: bytes, parse: Callable[[Mapping[str, Any]], T | None]) -> T | None:
    """What a line says; None where its checksum does not hold, and where it is none of ours."""
    checksum, _, body = line.rstrip(b"\n").partition(b" ")
    if not line.endswith(b"\n") or _checksum(body).encode() != checksum:
        return None
    try:
        return parse(json.loads(body))
    except (ValueError, TypeError, KeyError, RecursionError):  # whole, and not of ours
        return None


def _checksum(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:16]
