"""The file that keeps the compiled kernel. It is run as machine code, so only we may have written it, and all of it.

Only we and root may change the file, its folder, or where the path of the folder leads; a digest finds what a crash or
a disk did to the rest.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from contextlib import suppress
from pathlib import Path

from attnscope.utils.files import whole_file

MOST_BYTES = 1 << 22  # the kernel takes a hundredth of that
MOST_STEPS = 256  # of a path, those of its links included
DIGEST = hashlib.sha256


def wanted_folder() -> Path | None:
    """The folder in NUMBA_CACHE_DIR, or in the user's own cache; None where there is no home.

    A relative base is skipped: it would be whatever folder one works in, a downloaded model's for one.
    """
    variable, below = {"win32": ("LOCALAPPDATA", "AppData/Local"), "darwin": ("", "Library/Caches")}.get(
        sys.platform, ("XDG_CACHE_HOME", ".cache")
    )
    home = os.path.join(os.path.expanduser("~"), below)  # "~" stays where there is no home
    bases = os.environ.get("NUMBA_CACHE_DIR"), os.environ.get(variable), home
    return next((Path(base, "attnscope", "kernel") for base in bases if base and os.path.isabs(base)), None)


def is_private(folder: Path) -> bool:
    """Whether the folder, made where it is missing, is our own and closed to all others, and no other can swap it."""
    if sys.platform == "win32":  # the local application data have an access list
        return True
    with suppress(OSError):
        if _leads_safely(folder):
            status = os.lstat(folder)
            return stat.S_ISDIR(status.st_mode) and status.st_uid == _us() and not status.st_mode & 0o077
    return False


def _leads_safely(folder: Path) -> bool:
    """Whether all on the way to a folder, links included, is ours or root's, and none can be replaced by others."""
    at, remaining = Path(folder.anchor), list(folder.parts[:0:-1])
    for _ in range(MOST_STEPS):
        if not remaining:
            return True
        step = at / remaining.pop()
        status = _made(step)
        if status.st_uid not in (0, _us()):
            return False
        if stat.S_ISLNK(status.st_mode):
            remaining += reversed(Path(os.readlink(step)).parts)
        elif status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            return False
        else:
            at = step
    return False


def _made(folder: Path) -> os.stat_result:
    """What is at a path; a folder is made where nothing is."""
    with suppress(FileNotFoundError):
        return os.lstat(folder)
    with suppress(FileExistsError):  # another process was quicker
        os.mkdir(folder, 0o700)
    return os.lstat(folder)


def read_object(path: Path) -> bytes | None:
    """What `keep` wrote there; None where there is no such file, or another one."""
    with suppress(OSError), open(path, "rb", opener=_without_waiting) as file:
        status = os.fstat(file.fileno())
        if stat.S_ISREG(status.st_mode) and status.st_uid == _us() and status.st_size <= MOST_BYTES:
            digest, content = file.read(DIGEST().digest_size), file.read(MOST_BYTES)
            return content if digest == _digest(path, content) else None
    return None


def keep(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, through to the disk; where that fails it is not kept."""
    with suppress(OSError), whole_file(path) as file:
        file.write(_digest(path, content) + content)
        file.flush()
        os.fsync(file.fileno())


def _digest(path: Path, content: bytes) -> bytes:
    """Of the content and of what it was made for, which the file's name says."""
    return DIGEST(path.name.encode() + b"\0" + content).digest()


def _without_waiting(path: str, flags: int) -> int:
    """Open a file that is no link; a pipe without a writer does not hold us up."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def _us() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0  # Windows says 0 of every file
