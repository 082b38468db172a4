"""A text from a flag, a file or standard input."""

import os
import sys

from attnscope.errors import InputError, UsageError


def decode_utf8(data: bytes, source: str) -> str:
    """Bytes to text, without a byte order mark; InputError names the offset of the first byte that isn't UTF-8.

    >>> decode_utf8(b"caf\xc3\xa9", "standard input")
    'café'
    """
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        wide = data[:2] in (b"\xff\xfe", b"\xfe\xff")
        raise InputError(
            f"{source} is not UTF-8: byte 0x{data[error.start]:02X} at offset {error.start}",
            f"convert it, for example with iconv -f {'UTF-16' if wide else 'LATIN1'} -t UTF-8",
        ) from error


def read_text(text: str | None, file: str | None) -> str:
    """The text itself, of a file, or of standard input where either of them is `-`.

    UsageError unless exactly one is given; InputError for a file that can't be read, for bytes that aren't UTF-8 and
    for white space alone.

    >>> read_text("the bank", None)
    'the bank'
    """
    if (text is None) == (file is None):
        raise UsageError("expected one text", "give --text TEXT, --file FILE, or - for standard input")
    if "-" in (text, file):
        found, source = decode_utf8(_read_stdin(), "standard input"), "standard input"
    elif file is not None:
        found, source = decode_utf8(_read_file(file), file), file
    else:
        # Bytes of the command line that aren't UTF-8 arrive as escapes.
        found, source = decode_utf8(os.fsencode(text or ""), "--text"), "--text"
    if not found.strip():
        raise InputError(f"{source} is empty", "give a text with at least one word")
    return found


def _read_stdin() -> bytes:
    if sys.stdin is None:
        raise InputError("standard input is closed", "pipe a text into it, or give --text")
    try:
        return sys.stdin.buffer.read()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"standard input can't be read: {reason}", "pipe a text into it, or give --text") from error


def _read_file(file: str) -> bytes:
    try:
        with open(file, "rb") as stream:
            return stream.read()
    except FileNotFoundError as error:
        raise InputError(f"there is no file {file}", "check the path, or give --text") from error
    except IsADirectoryError as error:
        raise InputError(f"{file} is a folder", "name a file in it") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{file} can't be read: {reason}", "check the path and its permissions") from error
