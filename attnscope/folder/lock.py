"""One run in a folder at a time."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attnscope.errors import UsageError
from attnscope.files import open_regular

LOCK = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a second run out of the folder while this one writes. Raises UsageError that says who holds it."""
    with open_regular(folder / LOCK, "a+", follow=False) as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            stream.seek(0)
            raise UsageError(
                f"another run is writing to {folder}: {stream.read().strip() or 'it does not say which'}",
                "wait for it, or name another folder with --out",
            ) from error
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        stream.flush()
        yield
