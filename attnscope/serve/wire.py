"""Frames on a socket: a header in JSON, and bytes behind it, each with its length before it.

send(link, {"ask": {...}})
header, blobs = receive(link, most=REQUEST_BYTES)
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

MAGIC = b"ATN1"
FORM = struct.Struct("!4sBIQ")  # magic, whether it is the last of an answer, bytes of the header, bytes behind it
REQUEST_BYTES = 2**26  # of a question: the longest text is 8 million characters
ANSWER_BYTES = 2**36
PIECE = 2**20


class WireError(Exception):
    """There is no frame, or the other end has gone."""


class UnansweredError(Exception):
    """A question is for a process of its own, or no server is there: the reason."""


class Frame(NamedTuple):
    """One message: its header, the bytes behind it, and whether an answer ends with it."""

    header: Any
    blobs: list[bytes]
    last: bool = False


def send(link: socket.socket, header: Any, blobs: Sequence[bytes | memoryview] = (), last: bool = False) -> None:
    """Send one frame. Raises OSError where the other end has gone."""
    said = json.dumps({"said": header, "sizes": [len(one) for one in blobs]}).encode()
    link.sendall(FORM.pack(MAGIC, last, len(said), sum(map(len, blobs))) + said)
    for one in blobs:
        link.sendall(one)


def receive(link: socket.socket, most: int = ANSWER_BYTES) -> Frame:
    """The next frame. Raises WireError for what is none, for one of more bytes, and where the other end has gone."""
    form, header, blobs = receive_raw(link, most)
    _, last, _, _ = FORM.unpack(form)
    try:
        said = json.loads(header)
        sizes = said["sizes"]
        if not all(isinstance(size, int) and size >= 0 for size in sizes) or sum(sizes) != len(blobs):
            raise WireError("the sizes are not those of the bytes")
        parts, at = [], 0
        for size in sizes:
            parts.append(blobs[at : at + size])
            at += size
        return Frame(said["said"], parts, bool(last))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError("expected a frame, got another thing") from error


def receive_raw(link: socket.socket, most: int = ANSWER_BYTES) -> tuple[bytes, bytes, bytes]:
    """The next frame as bytes: its form, its header, and what follows."""
    form = _exactly(link, FORM.size)
    magic, last, header, behind = FORM.unpack(form)
    if magic != MAGIC or last > 1:
        raise WireError("expected a frame, got another thing")
    if header + behind > most:
        raise WireError(f"expected at most {most} bytes, got {header + behind}")
    return form, _exactly(link, header), _exactly(link, behind)


def is_last(form: bytes) -> bool:
    """Whether an answer ends with the frame of this form."""
    return bool(FORM.unpack(form)[1])


def _exactly(link: socket.socket, count: int) -> bytes:
    parts, left = list[bytes](), count
    while left:
        try:
            part = link.recv(min(left, PIECE))
        except OSError as error:
            raise WireError("the other end has gone") from error
        if not part:
            raise WireError("the other end has gone")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
