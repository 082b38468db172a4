"""Where a server listens, and who is at the other end: a socket in a folder of this user's, that no other can enter."""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
import tempfile
from pathlib import Path

from attnscope.errors import UsageError

SOCKET = "serve.sock"
LOCAL_PEERCRED = 1  # of <sys/un.h>, on macOS
SHORTER = "set XDG_RUNTIME_DIR to a folder of yours with a short path"
LONGEST = 100  # bytes of a socket's path: the kernel takes 104 or 108


def supported() -> bool:
    """Whether this system has sockets that say who is at the other end."""
    return hasattr(socket, "AF_UNIX") and (hasattr(socket, "SO_PEERCRED") or sys.platform == "darwin")


def folder() -> Path:
    """The folder of the socket: in that of this user's sockets, else among temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "attnscope" if runtime else Path(tempfile.gettempdir()) / f"attnscope-{os.getuid()}"


def address() -> Path:
    """The socket. Raises UsageError where the folder is not this user's alone, or the path is too long."""
    place = folder()
    status = os.lstat(place)  # not through a link, which another user may have put there
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise UsageError(
            f"expected {place} to be a folder of yours alone", "remove it, or set XDG_RUNTIME_DIR to another folder"
        )
    if len(os.fsencode(place / SOCKET)) > LONGEST:
        raise UsageError(f"the path of the socket is too long: {place / SOCKET}", SHORTER)
    return place / SOCKET


def make_folder() -> None:
    """Make the folder, for this user alone, where it is not there yet."""
    try:
        os.mkdir(folder(), 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise UsageError(f"cannot make {folder()}: {error.strerror}", SHORTER) from None


def is_own(link: socket.socket) -> bool:
    """Whether a process of this user is at the other end."""
    return _peer(link)[1] == os.getuid()


def process_of(link: socket.socket) -> int | None:
    """The number of the process at the other end; None where the system does not say."""
    return _peer(link)[0]


def _peer(link: socket.socket) -> tuple[int | None, int]:
    if hasattr(socket, "SO_PEERCRED"):
        size = struct.calcsize("3i")
        pid, uid, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        return int(pid), int(uid)
    _, uid = struct.unpack("2I", link.getsockopt(0, LOCAL_PEERCRED, 76)[:8])
    return None, int(uid)
