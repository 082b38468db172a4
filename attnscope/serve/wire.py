"""Frames on a socket: a header in JSON, and bytes after it, each with its length before it.

send(link, {"ask": {...}})
header, blobs = receive(link, most=REQUEST_BYTES)
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

MAGIC = b"ATN1"
FORM = struct.Struct("!4sBIQ")  # magic, whether it is the last of an answer, bytes of the header, bytes after it
REQUEST_BYTES = 2**26  # of a question: the longest text is 8 million characters
ANSWER_BYTES = 2**36
PIECE = 2**20


class WireError(Exception):
    """There is no frame, or the other end has gone."""


class UnansweredError(Exception):
    """A question is for a process of its own, or no server is there: the reason."""


class SilentServerError(UnansweredError):
    """A server is there, and says nothing; process: its number, where the system tells."""

    def __init__(self, message: str, process: int | None) -> None:
        super().__init__(message)
        self.process = process


class Frame(NamedTuple):
    """One message: its header, the bytes after it, and whether an answer ends with it."""

    header: Any
    blobs: list[bytes]
    last: bool = False


def framed(header: Any, blobs: Sequence[bytes | memoryview] = (), last: bool = False) -> bytes:
    """The beginning of a frame; its blobs follow."""
    document = json.dumps({"said": header, "sizes": [len(blob) for blob in blobs]}).encode()
    return FORM.pack(MAGIC, last, len(document), sum(map(len, blobs))) + document


def send(link: socket.socket, header: Any, blobs: Sequence[bytes | memoryview] = (), last: bool = False) -> None:
    """Send one frame. Raises OSError where the other end has gone, or takes nothing while the link's timeout passes."""
    for data in (framed(header, blobs, last), *blobs):
        left = memoryview(data)
        while left:
            left = left[link.send(left) :]


def receive(link: socket.socket, most: int = ANSWER_BYTES, seconds: float | None = None) -> Frame:
    """The next frame. seconds: within which it has to be here whole; else each part within the link's timeout.

    Raises WireError for what is none, for one of more bytes, and where the other end has gone or says no more.
    """
    end = None if seconds is None else time.monotonic() + seconds
    last, header, behind = _sizes(_exactly(link, FORM.size, end), most)
    head, blobs = _exactly(link, header, end), _exactly(link, behind, end)
    try:
        document = json.loads(head)
        sizes = document["sizes"]
        if not all(isinstance(size, int) and size >= 0 for size in sizes) or sum(sizes) != len(blobs):
            raise WireError("the sizes are not those of the bytes")
        parts, at = [], 0
        for size in sizes:
            parts.append(blobs[at : at + size])
            at += size
        return Frame(document["said"], parts, last)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError("expected a frame, got another thing") from error


def is_readable(link: socket.socket, seconds: float) -> bool:
    """Whether the other end says something, or goes, within so many seconds."""
    before = link.gettimeout()
    link.settimeout(seconds)
    try:
        link.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return False
    except OSError:  # it has gone
        return True
    finally:
        link.settimeout(before)
    return True


class Passing:
    """The frames of one answer, handed on in pieces as they come, without a look at what they hold.

    between: whether one has ended and the next has not started. ended: whether the last has.
    """

    def __init__(self) -> None:
        self._left, self._last = 0, False

    @property
    def between(self) -> bool:
        return not self._left

    @property
    def ended(self) -> bool:
        return self._last and not self._left

    def piece(self, link: socket.socket) -> bytes:
        """What comes next. Raises WireError as `receive`."""
        form = b""
        if not self._left:
            form = _exactly(link, FORM.size)
            self._last, header, behind = _sizes(form, ANSWER_BYTES)
            self._left = header + behind
        part = _some(link, self._left) if self._left else b""
        self._left -= len(part)
        return form + part


def _sizes(form: bytes, most: int) -> tuple[bool, int, int]:
    """Of a frame: whether an answer ends with it, the bytes of its header, and those of its blobs."""
    magic, last, header, behind = FORM.unpack(form)
    if magic != MAGIC or last > 1:
        raise WireError("expected a frame, got another thing")
    if header + behind > most:
        raise WireError(f"expected at most {most} bytes, got {header + behind}")
    return bool(last), header, behind


def _exactly(link: socket.socket, count: int, end: float | None = None) -> bytes:
    parts, left = list[bytes](), count
    while left:
        if end is not None:
            rest = end - time.monotonic()
            if rest <= 0:
                raise WireError("the other end takes too long")
            link.settimeout(rest)
        part = _some(link, left)
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _some(link: socket.socket, most: int) -> bytes:
    try:
        part = link.recv(min(most, PIECE))
    except TimeoutError as error:
        raise WireError("the other end says no more") from error
    except OSError as error:
        raise WireError("the other end has gone") from error
    if not part:
        raise WireError("the other end has gone")
    return part
