"""Folders of results: which names are of folders, what fills one, who writes to it, and a journal in it.

A path is the name of a file or of a folder by its suffix, on the command line and in Python alike. A JSON document in a
folder says what fills it, and no run resumes the files of another:

before = document(folder / "compare.json", "damaged", OVER)      # None without one
check(folder, "comparison", before, now, force=False)            # UsageError where it is another
refuse_other_kind(folder, "atlas.json", force=False)   # of a scan: refused where a run or a dataset lies

A journal is a file of lines, each a JSON object with a checksum of itself, appended and synced. What was appended
survives a crash of the machine. The end of a line that a crash cut off is dropped when the journal is read next.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from attnscope.errors import InputError, UsageError, brief, visible
from attnscope.utils.files import open_regular, read_json

PICTURES = (".png", ".svg", ".pdf")
TABLES = (".csv", ".tsv", ".jsonl", ".parquet", ".arrow")
# Suffixes of files that attnscope does not write, by what comes closest to them.
OTHER_PICTURES = (".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".eps", ".ps", ".svgz")
OTHER_TABLES = (".txt", ".json", ".ndjson", ".xls", ".xlsx", ".ods", ".feather")
PAPERS = (".html", ".htm", ".md", ".tex", ".doc", ".docx", ".odt", ".ppt", ".pptx", ".ipynb")
OTHERS = (*OTHER_PICTURES, *OTHER_TABLES, *PAPERS, ".npy", ".npz", ".h5", ".hdf5", ".pkl", ".zip", ".gz")
CORPORA = (*TABLES, ".json", ".txt")  # of corpora, by which datasets of them may be called


def suffix_of(path: Path, of_folders: Sequence[str] = ()) -> str:
    """The suffix of a path that is the name of a file, in small letters; "" for what is a folder, or to be one.

    of_folders: suffixes that a folder's name may have, too.
    """
    suffix = path.suffix.lower()
    is_file = suffix in (*PICTURES, *TABLES, *OTHERS) and suffix not in of_folders
    return suffix if is_file and not path.is_dir() else ""


def refuse_file_name(folder: Path, of_folders: Sequence[str] = ()) -> None:
    """Raise UsageError where a folder, which is to be made, has the name of a file; of_folders: as for `suffix_of`."""
    if suffix_of(folder, of_folders):
        raise UsageError(f"{folder}: expected a folder", f"name one: {folder.with_suffix('')}")


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
    content = _object(path)
    if content is not None and is_ours(content):
        return content
    if force:
        return None
    raise UsageError(f"{path} is {otherwise}", hint)


def _object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is another thing."""
    with suppress(OSError, ValueError):
        content = read_json(path)
        return content if isinstance(content, dict) else None
    return None


def check(folder: Path, kind: str, before: Mapping[str, Any] | None, now: Mapping[str, Any], force: bool) -> None:
    """Raise UsageError, which names what differs, where `before` fills the folder and is another than `now`."""
    refuse_file_name(folder)
    if before is not None and not force and (changed := differences(before, now)):
        raise another(folder, kind, changed)


def another(folder: Path, kind: str, changed: Sequence[str]) -> UsageError:
    """The refusal of a folder that another run, scan or comparison fills; changed: what differs, in words."""
    more = f"; {len(changed) - MOST_SAID} more" * (len(changed) > MOST_SAID)
    return UsageError(f"{folder} holds another {kind}: {'; '.join(changed[:MOST_SAID])}{more}", OVER)


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
            # A record, or what holds some, is not spelled out.
            values[label] = f"other {label}" if any(map(_has_fields, (old, new))) else _change(label, old, new)
    return values or hashes


def _are_records(value: Any) -> TypeGuard[list[Mapping[str, Any]]]:
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)


def _has_fields(value: object) -> bool:
    """Whether it is a record or holds some, which a message does not spell out."""
    return isinstance(value, Mapping) or (isinstance(value, list) and any(map(_has_fields, value)))


def _change(label: str, old: object, new: object, shorten: Callable[[object], str] = brief) -> str:
    before, now = ("not given" if value is None else shorten(value) for value in (old, new))
    return f"{label} was {before}, now {now}"


def changes(before: Mapping[str, Any], now: Mapping[str, Any], shorten: Callable[[object], str] = brief) -> list[str]:
    """What two records say differently, in words, in the order of the names.

    >>> changes({"top": 5, "query": None}, {"top": 6, "query": "last"})
    ["query was not given, now 'last'", 'top was 5, now 6']
    """
    return [
        _change(name if PLAIN.fullmatch(name) else shorten(name), before.get(name), now.get(name), shorten)
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
                    message = f"another run is writing to {folder}: {holder or 'it does not say which'}"
                    raise UsageError(message, "wait for it, or name another folder with {out}") from error
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


COMMAND = "command"  # in a manifest: which command line made it; of Python there is none
LONGEST_SAID = 40  # letters of a value in a message

# What each is called, and the files by which it is known: of a finished one, and of one that was started.
KINDS: Mapping[str, tuple[str, ...]] = {
    "a run": ("manifest.json", "unfinished.json"),
    "a dataset": ("run.json", "journal.jsonl"),
    "a scan": ("atlas.json", "checkpoints.parquet", "readings/scan.json", "texts/corpus.json"),
    "an ablation": ("ablation.json", *(f"{name}/{name}.json" for name in ("ablation", "pairs", "prune", "gradient"))),
    "a knockout": ("knockout.json", "knockout/knockout.json"),
    "cache budgets": ("budgets.json", "budgets/budget.json"),
    "patches": ("patching.json", "patching/patch.json"),
    "a comparison": ("compare.json",),
    "the parts of a logit": ("why.json",),
    "a depth": ("depth.json",),
}


def kinds_in(folder: Path) -> dict[str, str]:
    """What fills a folder: of each kind the first of its files that is there.

    >>> kinds_in(Path("runs/ioi"))
    {'a dataset': 'run.json'}
    """
    names = ((kind, name) for kind, own in KINDS.items() for name in reversed(own))
    return {kind: name for kind, name in names if os.path.lexists(folder / name)}


def refuse_other_kind(folder: Path, name: str, force: bool) -> None:
    """Raise UsageError where another kind of result fills the folder than the one with a file of this name.

    force lets it be written next to that.
    """
    own = next((kind for kind, names in KINDS.items() if name in names), None)  # None: a study that is not listed
    others = [(kind, file) for kind, file in kinds_in(folder).items() if kind != own]
    if not others or force:
        return
    kind, file = others[0]
    command = command_of(_object(folder / file) or {})
    filled_by = f"of `{clipped(command)}`" if command else f"({file.rpartition('/')[2]})"
    raise UsageError(f"{folder} holds {kind} {filled_by}", OVER)


def command_of(manifest: Mapping[str, Any]) -> str:
    """The command line that a manifest names, in letters that show; "" where it names none."""
    command = manifest.get(COMMAND)
    return visible(command[: LONGEST_SAID + 1]) if isinstance(command, str) else ""


def clipped(text: str) -> str:
    """A text for a message, at most LONGEST_SAID letters of it."""
    return text if len(text) <= LONGEST_SAID else f"{text[:LONGEST_SAID]}…"


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
            checksum, _, body = line.rstrip(b"\n").partition(b" ")
            value = None
            if line.endswith(b"\n") and _checksum(body).encode() == checksum:
                with suppress(ValueError, TypeError, KeyError, RecursionError):  # whole, and not of ours
                    value = parse(json.loads(body))
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


def _checksum(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:16]
