"""What a server and those who ask it share: whether both are the same, frames on a socket, the socket, and its status.

Whether both ends are the same: the code that runs, the environment it runs in, and the files of a model. Files are
compared by what the file system says of them (`FileState`), so that nothing is read. Where nothing but the time of
change is another, which chmod and links move too, they are compared by their content (`Contents`).

A frame is a header in JSON, and bytes after it, each with its length before it:

send(link, {"ask": {...}})
header, blobs = receive(link, most=REQUEST_BYTES)

The socket is in a folder of this user's, which no other can enter; it says who is at the other end.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from attnscope.errors import UsageError
from attnscope.model.libraries import QUIET
from attnscope.model.options import LoadOptions
from attnscope.utils.files import FileState, sha256_of, state_of

LIBRARIES = "torch transformers tokenizers numpy accelerate safetensors peft bitsandbytes numba".split()  # noqa: SIM905
VARIABLES = (  # what begins so
    *("ATTNSCOPE_", "CUDA", "HF_", "HUGGINGFACE_", "KMP_", "MKL_", "NUMBA_", "NVIDIA_", "OMP_", "OPENBLAS_"),
    *("PYTORCH_", "TORCH", "TRANSFORMERS_", "TRITON_", "HOME", "XDG_CACHE_HOME", "TZ"),
)
UNLIKE = {"ATTNSCOPE_NO_SERVER", "ATTNSCOPE_STAGES", "TORCHINDUCTOR_CACHE_DIR", *QUIET}  # that change no number
MOST_FILES = 10_000
MOST_HASHED = 2**34  # bytes of files that are hashed in advance, the smallest first
NO_FILE = FileState(0, 0, 0, 0, 0)

Files = dict[str, FileState]  # by path


@cache
def code() -> str:
    """A digest of the package and of the libraries under it, as they lie on the disk."""
    return code_of(code_files())


def code_of(files: Files) -> str:
    """The digest of code whose files have these states."""
    parts = [sys.version, sys.prefix, *(f"{name} {state}" for name, state in sorted(files.items()))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def code_files() -> Files:
    """The files of the package, and the first of each library under it."""
    specs = [spec for name in LIBRARIES if (spec := find_spec(name))]
    origins = [spec.origin for spec in specs if spec.origin]
    return _tree(Path(__file__).parents[1], ".py") | {origin: _state(origin) for origin in origins}


def environment() -> str:
    """A digest of the variables that the libraries read, and of the processors that may be used."""
    names = sorted(name for name in os.environ if name.startswith(VARIABLES) and name not in UNLIKE)
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    text = "\n".join([*(f"{name}={os.environ[name]}" for name in names), str(cpus)])
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def files(*folders: Path | None) -> Files:
    """The files of a model's folders, as the file system has them; of a path that is a file that one.

    Raises UsageError for a folder of more than MOST_FILES: whether one of them changes takes too long to see.
    """
    trees = [_tree(Path(os.path.realpath(folder))) for folder in folders if folder is not None]
    return {path: state for tree in trees for path, state in tree.items()}


class Contents:
    """Files as they were when they were read, and hashes of them, which a thread makes.

    >>> held = Contents(files(folder))
    >>> held.same(files(folder))
    True
    """

    def __init__(self, files: Files) -> None:
        self.files = files
        self._digests: dict[str, str] = {}
        self._turn = threading.Lock()
        self.hashing = threading.Thread(target=self._hash, daemon=True)
        self.hashing.start()

    def same(self, now: Files) -> bool:
        """Whether the files hold what they held; False too where only their content would tell and has no hash yet."""
        with self._turn:
            if now.keys() != self.files.keys():
                return False
            for path, state in self.files.items():
                if state == now[path]:
                    continue
                # Only the time of change may be another: then the content tells.
                digest, same = self._digests.get(path), state._replace(changed_ns=now[path].changed_ns) == now[path]
                if digest is None or not same or _digest(path, now[path]) != digest:
                    return False
            self.files = now
            return True

    def _hash(self) -> None:
        left, files = MOST_HASHED, self.files
        for path, state in sorted(files.items(), key=lambda item: item[1].size):
            left -= state.size
            digest = _digest(path, state) if left >= 0 else None
            if digest is not None:
                self._digests[path] = digest


def _digest(path: str, state: FileState) -> str | None:
    """The hash of a file that is in this state when it has been read, else None."""
    with suppress(OSError):
        digest = sha256_of(Path(path))
        if state_of(path) == state:
            return digest
    return None


def _tree(folder: Path, ending: str = "") -> Files:
    """The files in a folder and in those below it; a folder that links lead to is entered once."""
    if folder.is_file():
        return {str(folder): _state(str(folder))}
    states, count, entered = Files(), 0, set[str]()
    for place, below, names in os.walk(folder, followlinks=True):
        count += len(names)
        if count > MOST_FILES:
            message = f"{folder} has more than {MOST_FILES:,} files, which cannot be watched for changes"
            raise UsageError(message, "put the files of the model in a folder of their own")
        for link in [name for name in below if os.path.islink(os.path.join(place, name))]:
            target = os.path.realpath(os.path.join(place, link))
            if target in entered:
                below.remove(link)
            entered.add(target)
        paths = [os.path.join(place, name) for name in names if name.endswith(ending)]
        states |= {path: _state(path) for path in paths}
    return states


def _state(path: str) -> FileState:
    try:
        return state_of(path)
    except OSError:
        return NO_FILE


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
        stream = BytesIO(blobs)
        return Frame(document["said"], [stream.read(size) for size in sizes], last)
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
        self.between, self.ended, self._left, self._last = True, False, 0, False

    def piece(self, link: socket.socket) -> bytes:
        """What comes next. Raises WireError as `receive`."""
        form = b""
        if self.between:
            form = _exactly(link, FORM.size)
            self._last, header, behind = _sizes(form, ANSWER_BYTES)
            self._left = header + behind
        part = _some(link, self._left) if self._left else b""
        self._left -= len(part)
        self.between = not self._left
        self.ended = self._last and self.between
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
        if part := link.recv(min(most, PIECE)):
            return part
        raise ConnectionResetError
    except TimeoutError as error:
        raise WireError("the other end says no more") from error
    except OSError as error:
        raise WireError("the other end has gone") from error


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
        message = f"expected {place} to be a folder of yours alone"
        raise UsageError(message, "remove it, or set XDG_RUNTIME_DIR to another folder")
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
    return peer(link)[1] == os.getuid()


def peer(link: socket.socket) -> tuple[int | None, int]:
    """The number of the process at the other end, None where the system does not say, and that of its user."""
    if hasattr(socket, "SO_PEERCRED"):
        size = struct.calcsize("3i")
        pid, uid, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        return int(pid), int(uid)
    _, uid = struct.unpack("2I", link.getsockopt(0, LOCAL_PEERCRED, 76)[:8])
    return None, int(uid)


@dataclass(frozen=True)
class HeldModel:
    """A model that is held; bytes: of its weights, None where they cannot be counted."""

    name: str
    device: str = ""
    dtype: str = ""
    bytes: int | None = None


@dataclass(frozen=True)
class Status:
    """A server: its process, how old it is, how many questions it answered, whether it answers one now.

    memory_bytes: of the process with the models, None where the system does not say. ready: whether all its models are
    loaded. loading: the model that is loaded now, for `loading_seconds`; else empty. pages: for browsers, that ask it.
    """

    pid: int
    seconds: int
    answered: int
    busy: bool
    memory_bytes: int | None
    models: tuple[HeldModel, ...]
    ready: bool = True
    loading: str = ""
    loading_seconds: int = 0
    pages: int = 0


@dataclass(frozen=True)
class Holdings:
    """The models of a server, with the options that they were loaded with in the folder where it runs."""

    folder: str
    options: tuple[LoadOptions, ...]
