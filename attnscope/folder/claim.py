"""What fills a folder: a JSON document in it says so, and no run resumes the files of another.

before = document(folder / "compare.json", "damaged", OVER)      # None without one
check(folder, "comparison", before, now, force=False)            # UsageError where it is another
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

from attnscope.errors import UsageError
from attnscope.files import open_regular, read_json
from attnscope.folder.suffix import refuse_file_name
from attnscope.shown import brief

OVER = "name another folder, or write over it with {force=True}"
LOCK = ".lock"
LEFT_SECONDS, HOLDER_LETTERS = 2.0, 300
HOLDER = re.compile(r"process (?P<process>[1-9]\d{0,8}) on (?P<host>\S+), since ")  # as `locked` writes it
LOCKED_BYTE = 2**30  # on Windows, where no other process can read a locked byte: after all that the file holds
HASH = "sha256"  # how the name of a hash ends
MOST_SAID = 4  # differences that a message names
PLAIN = re.compile(r"[\w-]{1,40}")  # a name that a message shows as it is


def document(
    path: Path,
    otherwise: str,
    hint: str,
    is_ours: Callable[[Mapping[str, Any]], bool] = lambda content: True,
    force: bool = False,
) -> dict[str, Any] | None:
    """What says in a folder what fills it; None without one, and with force where it is not ours.

    Raises UsageError, `PATH is OTHERWISE`, where it is not ours.
    """
    if not path.exists():
        return None
    try:
        content = read_json(path)
    except (OSError, ValueError):
        content = None
    if isinstance(content, dict) and is_ours(content):
        return content
    if force:
        return None
    raise UsageError(f"{path} is {otherwise}", hint)


def check(folder: Path, kind: str, before: Mapping[str, Any] | None, now: Mapping[str, Any], force: bool) -> None:
    """Raise UsageError, which names what differs, where `before` fills the folder and is another than `now`."""
    refuse_file_name(folder)
    changed = [] if before is None or force else differences(before, now)
    if changed:
        more = f"; {len(changed) - MOST_SAID} more" * (len(changed) > MOST_SAID)
        raise another(folder, kind, f": {'; '.join(changed[:MOST_SAID])}{more}")


def another(folder: Path, kind: str, how: str = "") -> UsageError:
    """The refusal of a folder that another run, scan or comparison fills."""
    return UsageError(f"{folder} holds another {kind}{how}", OVER)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What the fields of `now` say otherwise than `before`, in words, each name once.

    Hashes follow from values that a person gave: they are named where no value next to them differs.

    >>> differences({"seed": 0, "ids_sha256": "ab"}, {"seed": 1, "ids_sha256": "cd"})
    ['seed was 0, now 1']
    >>> differences({"seed": 0, "ids_sha256": "ab"}, {"seed": 0, "ids_sha256": "cd"})
    ['other ids']
    """
    return list(_differing(before, now, tuple(now)).values())


def _differing(before: Mapping[str, Any], now: Mapping[str, Any], names: Sequence[str], of: str = "") -> dict[str, str]:
    """What differs, in words by name; of: the field that both are of."""
    values, hashes = dict[str, str](), dict[str, str]()
    for name in (name for name in names if before.get(name) != now.get(name)):
        old, new = before.get(name), now.get(name)
        if name.endswith(HASH):
            label = name.removesuffix(HASH).rstrip("_") or "text"
            hashes[label] = f"other {label}"
        elif isinstance(old, Mapping) and isinstance(new, Mapping):
            values |= _differing(old, new, tuple({**new, **old}), name)
        elif _are_records(old) and _are_records(new) and len(old) == len(new):
            for old_record, new_record in zip(old, new, strict=True):
                values |= _differing(old_record, new_record, tuple(new_record))
        else:
            label = of if name == "name" else name if PLAIN.fullmatch(name) else brief(name)
            change = f"{label} was {_given(old)}, now {_given(new)}"
            values[label] = f"other {label}" if any(map(_has_fields, (old, new))) else change
    return values or hashes


def _are_records(value: Any) -> TypeGuard[list[Mapping[str, Any]]]:
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)


def _has_fields(value: object) -> bool:
    """Whether it is a record or holds some, which a message does not spell out."""
    return isinstance(value, Mapping) or (isinstance(value, list) and any(map(_has_fields, value)))


def _given(value: object, shown: Callable[[object], str] = brief) -> str:
    return "not given" if value is None else shown(value)


def changes(before: Mapping[str, Any], now: Mapping[str, Any], shown: Callable[[object], str] = brief) -> list[str]:
    """What two records say differently, in words, in the order of the names.

    >>> changes({"top": 5, "query": None}, {"top": 6, "query": "last"})
    ["query was not given, now 'last'", 'top was 5, now 6']
    """
    return [
        f"{name if PLAIN.fullmatch(name) else shown(name)} was "
        f"{_given(before.get(name), shown)}, now {_given(now.get(name), shown)}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]


@contextmanager
def writable(folder: Path, hint: str = "name another folder") -> Iterator[None]:
    """While the block writes into the folder, an OSError with words is a UsageError."""
    try:
        yield
    except OSError as error:
        if error.strerror is None:
            raise
        raise UsageError(f"cannot write to {folder}: {error.strerror}", hint) from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a second run out of the folder while this one writes. Raises UsageError that says who holds it.

    A run that was killed may leave a fork, which holds the lock until it sees that it is alone: for that the next run
    waits a moment.
    """
    with open_regular(folder / LOCK, "a+", follow=False) as stream:
        until = time.monotonic() + LEFT_SECONDS
        while True:
            try:
                _take(stream.fileno())
                break
            except BlockingIOError as error:
                stream.seek(0)
                holder = stream.read(HOLDER_LETTERS).strip()
                if time.monotonic() > until or not _has_ended(holder):
                    raise UsageError(
                        f"another run is writing to {folder}: {holder or 'it does not say which'}",
                        "wait for it, or name another folder with {out}",
                    ) from error
                time.sleep(LEFT_SECONDS / 100)
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        stream.flush()
        yield


def _has_ended(holder: str) -> bool:
    """Whether the process that a lock names ran on this machine and is there no more."""
    match = HOLDER.match(holder)
    if match is None or match["host"] != socket.gethostname() or sys.platform == "win32":
        return False
    try:
        os.kill(int(match["process"]), 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's
        pass
    return False


def _take(handle: int) -> None:
    """Lock an open file until it is closed. Raises BlockingIOError where another process has the lock."""
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    import msvcrt

    position = os.lseek(handle, 0, os.SEEK_CUR)
    os.lseek(handle, LOCKED_BYTE, os.SEEK_SET)
    try:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    except OSError as error:
        raise BlockingIOError(*error.args) from error
    finally:
        os.lseek(handle, position, os.SEEK_SET)
