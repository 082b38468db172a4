"""Files written whole or not at all, small files read within bounds, and texts of a flag, a file or standard input.

A file is written under a hidden name next to its place, then moved there. What is read may be anybody's: it has to be a
regular file of bounded size, so that no pipe is waited for and no device fills the memory.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import stat
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, NamedTuple

from attnscope.errors import AttnscopeError, InputError, UsageError, brief
from attnscope.utils.isolation import seconds, within

if TYPE_CHECKING:
    from pyarrow import NativeFile

SMALL_BYTES = 64 * 2**20  # of a file that is read whole; a manifest takes about 250 bytes per token
LONGEST_TEXT = 1000  # letters of a name, or of words, in a document or table
# What Python and libraries raise over a file that is none of ours.
FOREIGN = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)

_unfinished: set[Path] = set()


class FileState(NamedTuple):
    """What the file system says of a file: where this is the same, the content is.

    written_ns: when it was last written, which anybody may set back (`touch -r`, `cp -p`, `rsync -t --inplace`).
    changed_ns: when the file or this entry last changed, which no one sets; chmod and links move it too.
    """

    device: int
    inode: int
    size: int
    written_ns: int
    changed_ns: int


def state_of(path: Path | str) -> FileState:
    """The state of a file, that of its target where it is a link. Raises OSError where there is none."""
    status = os.stat(path)
    return FileState(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def open_regular(path: Path, mode: str = "rb", buffering: int = -1, *, follow: bool = True) -> IO[Any]:
    """Open a regular file as `open` does; follow: whether it may be a link.

    Raises OSError at once for a pipe, a device or a socket, which `open` may wait for without end.
    """

    def opener(name: str, flags: int) -> int:
        # Windows has neither flag: a link is looked for before
        if not follow and not hasattr(os, "O_NOFOLLOW") and os.path.islink(name):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)
        bounds = getattr(os, "O_NONBLOCK", 0) | (0 if follow else getattr(os, "O_NOFOLLOW", 0))
        handle = os.open(name, flags | bounds, 0o666)
        kind = os.fstat(handle).st_mode
        if stat.S_ISREG(kind):
            return handle
        os.close(handle)
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        raise OSError(errno.EINVAL, "not a regular file", name)

    return open(path, mode, buffering, opener=opener)


@contextmanager
def open_native(path: Path, mapped: bool = False) -> Iterator[NativeFile]:
    """A regular file as Arrow reads it; mapped: into memory. Raises OSError as `open_regular`."""
    import pyarrow as pa

    with open_regular(path):
        pass
    with pa.memory_map(str(path)) if mapped else pa.OSFile(str(path)) as stream:
        yield stream


def read_small(path: Path, most: int = SMALL_BYTES) -> bytes:
    """All bytes of a regular file. Raises OSError for another kind of file, for more bytes, and past the deadline."""

    def read() -> bytes:
        with open_regular(path) as stream:
            data: bytes = stream.read(most + 1)
        if len(data) > most:
            raise OSError(errno.EFBIG, f"larger than {most // 2**20} MiB", str(path))
        return data

    try:
        return within(seconds(), read)
    except TimeoutError as error:  # of a file system that does not answer
        raise OSError(errno.ETIMEDOUT, f"no answer within {seconds()} seconds", str(path)) from error


def read_json(path: Path) -> Any:
    """What a JSON document holds. Raises OSError as `read_small`, ValueError for a file that is no JSON in UTF-8."""
    try:
        return json.loads(read_small(path).decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None


def check_schema(
    document: Mapping[str, Any], expected: object, where: Path, hint: str, error: type[AttnscopeError] = UsageError
) -> None:
    """Raise an error for what another version of attnscope wrote."""
    if document["schema"] != expected:
        raise error(f"{where} has schema {brief(document['schema'])}, expected {brief(expected)}", hint)


@contextmanager
def damaged(message: str, hint: str) -> Iterator[None]:
    """What a block raises over a file that anybody may have written is an InputError."""
    try:
        yield
    except FOREIGN as error:
        raise InputError(message, hint) from error


def check_types(value: Any, expected: Any, name: str = "the document") -> None:
    """Raise ValueError where a value of a document is of another type; name: of the value.

    expected: a type, several, or {field: what it holds}. Texts have at most LONGEST_TEXT letters, since they are drawn.

        >>> check_types(json.loads('{"task": {"name": "copy"}}'), {"task": {"name": str, "sequences": int}})
    """
    if isinstance(expected, Mapping):
        check_types(value, dict, name)
        for field, of_field in expected.items():
            check_types(value.get(field), of_field, field)
        return
    if not isinstance(value, expected) or isinstance(value, bool):
        raise ValueError(f"{name} is {brief(value)}, expected {expected}")
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        raise ValueError(f"{name} has {len(value)} letters")


def varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of 7 bits a byte, the least first, and where it ends, as Thrift and Protocol Buffers write it.

    Raises IndexError where the data ends before it, ValueError for one of more than 70 bits.
    """
    value = shift = 0
    while (byte := data[at]) & 128:
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if shift > 63:
            raise ValueError("a number of too many bytes")
    return value | byte << shift, at + 1


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def refuse_links(paths: Iterable[Path]) -> None:
    """Raise UsageError where a link is in the place of a file or a folder of ours: it would be written through."""
    for path in paths:
        if path.is_symlink():
            message = f"{path} is a link, expected a file or folder of this run"
            raise UsageError(message, "remove it, or name another folder")


@contextmanager
def whole_path(path: Path) -> Iterator[Path]:
    """A path whose file becomes `path` when the block ends well, and vanishes when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")  # next to it: a rename does not cross file systems
    _unfinished.add(temp)
    try:
        yield temp
        os.replace(temp, path)
    finally:
        with suppress(OSError):
            temp.unlink(missing_ok=True)
        _unfinished.discard(temp)


def remove_unfinished() -> None:
    """Remove what a signal left: one that comes while a block of `whole_path` ends keeps it from cleaning up."""
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
        message = f"cannot write {path}: {error.strerror or error}"
        raise UsageError(message, "name a folder that can be written") from error
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


MOST_BYTES = 64 * 2**20  # of what is read as one text
ID = re.compile(r"-?[0-9]{1,18}")
IDS_THEMSELVES = re.compile(r"\[?\s*[0-9]+(\s*[,\s]\s*[0-9]+)*\s*\]?")  # where the name of a file belongs
IDS = "give whole numbers, between spaces or commas or as a JSON list"


def decode_utf8(data: bytes, source: str, otherwise: str = "give a text, or convert it from UTF-16") -> str:
    """Bytes to text, without a byte order mark; InputError names the offset of the first byte that isn't UTF-8.

    otherwise: the next step for what is no text in any encoding of single bytes, such as an archive.

    >>> decode_utf8(b"caf\xc3\xa9", "standard input")
    'café'
    """
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        wide = data[:2] in (b"\xff\xfe", b"\xfe\xff")
        if b"\0" in data and not wide:
            raise InputError(f"{source} is no text: byte 0x00 at offset {data.index(0)}", otherwise) from error
        raise InputError(
            f"{source} is not UTF-8: byte 0x{data[error.start]:02X} at offset {error.start}",
            f"convert it, for example with iconv -f {'UTF-16' if wide else 'LATIN1'} -t UTF-8",
        ) from error


def piped_text() -> str:
    """The text that is piped in, where no one named a place to read it; "" where there is none."""
    return decode_utf8(_piped(), "standard input")


def read_text(text: str | None, file: str | None, unasked: bool = False) -> str:
    """The text itself, of a file, or of standard input where either of them is `-`.

    unasked: where neither is given, take standard input, unless it is a terminal or empty.
    UsageError unless exactly one is given; InputError for a file that can't be read, for bytes that aren't UTF-8 and
    for white space alone.

    >>> read_text("the bank", None)
    'the bank'
    """
    piped = unasked and text is file is None and _piped()
    if not piped and (text is None) == (file is None):
        raise UsageError("expected one text", "give {text=TEXT}, {file=FILE}, or - for standard input")
    if piped:
        data, source = piped, "standard input"
    elif file is not None or text == "-":
        data, source = _read("-" if file is None else file)
    else:
        data, source = os.fsencode(text or ""), "--text"  # bytes that aren't UTF-8 arrive as escapes
    result = decode_utf8(data, source)
    if not result.strip():
        raise InputError(f"{source} is empty", "give a text with at least one word")
    return result


def read_ids(file: str) -> list[int]:
    """Token ids from a file, or from standard input where it is `-`: a JSON list, or numbers between spaces or commas.

    InputError for a file that can't be read, and for what is no list of whole numbers.

    >>> read_ids("ids.json")
    [1, 265, 903]
    """
    if IDS_THEMSELVES.fullmatch(file) and not os.path.exists(file):
        numbers = ", ".join(re.findall("[0-9]+", file))
        message = f"expected a file of token ids, got {file!r}"
        raise InputError(message, f"pipe the ids: echo '[{numbers}]' | attnscope ... {{ids=-}}")
    data, source = _read(file)
    text = decode_utf8(data, source, IDS).strip()
    inside = re.fullmatch(r"\[(.*)\]", text, re.DOTALL)
    parts = re.split(r"\s*,\s*|\s+", (inside[1] if inside else text).strip())
    wrong = next((part for part in parts if not ID.fullmatch(part)), None)
    if wrong is not None:
        problem = f"{wrong[:20]!r} in {source} is not a token id" if any(parts) else f"{source} holds no token ids"
        raise InputError(problem, IDS)
    return [int(part) for part in parts]


def parsed_line(line: str, where: str, hint: str) -> Any:
    """The value of a line of JSON. Raises InputError for another, and for one that UTF-8 cannot hold."""
    try:
        value = json.loads(line)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where} holds half of a surrogate pair", "write the character itself") from error
    except (ValueError, RecursionError) as error:  # the latter of 100,000 brackets
        raise InputError(f"{where} is not JSON", hint) from error
    return value


def _piped() -> bytes:
    """What is piped in; nothing where that is a terminal, white space, closed or a folder."""
    with suppress(OSError, ValueError):
        data = b"" if sys.stdin is None or sys.stdin.isatty() else _bounded(sys.stdin.buffer, "standard input")
        return data if data.strip() else b""
    return b""


def _bounded(stream: BinaryIO, source: str, most: int = MOST_BYTES) -> bytes:
    """All bytes of a stream, which may be a pipe without an end. Raises InputError for more than `most`."""
    data = stream.read(most + 1)
    if len(data) > most:
        raise InputError(f"{source} is larger than {most // 2**20} MiB", "shorten it; `batch` reads a corpus")
    return data


@contextmanager
def opened(file: str, otherwise: str = "check the path, or give {text}", most: int = MOST_BYTES) -> Iterator[BinaryIO]:
    """The bytes of a file, or of standard input where it is `-`; otherwise: the next step for a file that is not there.

    most: bytes of standard input. Raises InputError for more, and for what can't be read, also where that is seen in
    the block.
    """
    if file == "-":
        with standard_input("pipe a text into it, or give {text}") as stream:
            data = _bounded(stream, "standard input", most)
        yield BytesIO(data)
        return
    try:
        with open(file, "rb") as stream:
            yield stream
    except FileNotFoundError as error:
        raise InputError(f"there is no file {file}", otherwise) from error
    except IsADirectoryError as error:
        raise InputError(f"{file} is a folder", "name a file in it") from error
    except (OSError, ValueError) as error:
        raise _unreadable(file, error, "check the path and its permissions") from error


@contextmanager
def standard_input(otherwise: str) -> Iterator[BinaryIO]:
    """The bytes of standard input as they come; otherwise: the next step where there are none.

    Raises InputError where it is closed, and where it can't be read in the block.
    """
    if sys.stdin is None:
        raise InputError("standard input is closed", otherwise)
    try:
        yield sys.stdin.buffer
    except (OSError, ValueError) as error:
        raise _unreadable("standard input", error, otherwise) from error


def _unreadable(source: str, error: Exception, otherwise: str) -> InputError:
    return InputError(f"{source} can't be read: {getattr(error, 'strerror', None) or error}", otherwise)


def _read(file: str) -> tuple[bytes, str]:
    """The bytes of a file, or of standard input where it is `-`, and what messages call it."""
    source = "standard input" if file == "-" else file
    with opened(file) as stream:
        return _bounded(stream, source), source
