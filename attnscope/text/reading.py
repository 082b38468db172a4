"""A text from a flag, a file or standard input."""

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from typing import Any, BinaryIO

from attnscope.errors import InputError, UsageError

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
        result, source = decode_utf8(piped, "standard input"), "standard input"
    elif "-" in (text, file):
        result, source = decode_utf8(_read_stdin(), "standard input"), "standard input"
    elif file is not None:
        result, source = decode_utf8(_read_file(file), file), file
    else:
        # Bytes of the command line that aren't UTF-8 arrive as escapes.
        result, source = decode_utf8(os.fsencode(text or ""), "--text"), "--text"
    if not result.strip():
        raise InputError(f"{source} is empty", "give a text with at least one word")
    return result


def read_ids(file: str) -> list[int]:
    """Token ids from a file, or from standard input where it is `-`: a JSON list, or numbers between spaces or commas.

    InputError for a file that can't be read, and for what is no list of whole numbers.

    >>> read_ids("ids.json")
    [1, 265, 903]
    """
    source = "standard input" if file == "-" else file
    if IDS_THEMSELVES.fullmatch(file) and not os.path.exists(file):
        numbers = ", ".join(re.findall("[0-9]+", file))
        raise InputError(
            f"expected a file of token ids, got {file!r}", f"pipe the ids: echo '[{numbers}]' | attnscope ... {{ids=-}}"
        )
    text = decode_utf8(_read_stdin() if file == "-" else _read_file(file), source, IDS).strip()
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
        yield BytesIO(_read_stdin(most))
        return
    try:
        with open(file, "rb") as stream:
            yield stream
    except FileNotFoundError as error:
        raise InputError(f"there is no file {file}", otherwise) from error
    except IsADirectoryError as error:
        raise InputError(f"{file} is a folder", "name a file in it") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{file} can't be read: {reason}", "check the path and its permissions") from error


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
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"standard input can't be read: {reason}", otherwise) from error


def _read_stdin(most: int = MOST_BYTES) -> bytes:
    with standard_input("pipe a text into it, or give {text}") as stream:
        return _bounded(stream, "standard input", most)


def _read_file(file: str) -> bytes:
    with opened(file) as stream:
        return _bounded(stream, file)
