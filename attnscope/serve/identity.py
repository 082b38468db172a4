"""Whether both ends are the same: the code that runs, the environment it runs in, and the files of a model.

Files are compared by what the file system says of them (`FileState`), so that nothing is read. Where nothing but the
time of change is another, which chmod and links move too, they are compared by their content (`Contents`).
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from attnscope.errors import UsageError
from attnscope.model.libraries import QUIET
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
    states = _tree(Path(__file__).parents[1], ".py")
    for name in LIBRARIES:
        spec = find_spec(name)
        if spec is not None and spec.origin:
            states[spec.origin] = _state(spec.origin)
    return states


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
    states: Files = {}
    for folder in folders:
        if folder is not None:
            states |= _tree(Path(os.path.realpath(folder)))
    return states


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
            if not all(state == now[path] or self._kept(path, now[path]) for path, state in self.files.items()):
                return False
            self.files = now
            return True

    def _kept(self, path: str, now: FileState) -> bool:
        """Whether a file in another state holds what it held."""
        digest = self._digests.get(path)
        return (
            digest is not None
            and now._replace(changed_ns=0) == self.files[path]._replace(changed_ns=0)
            and _digest(path, now) == digest
        )

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
    return {name: _state(name) for name in _walk(folder, ending)}


def _walk(folder: Path, ending: str) -> Iterator[str]:
    """The files in a folder and in those below it; a folder that links lead to is entered once."""
    if folder.is_file():
        yield str(folder)
        return
    count, entered = 0, set[str]()
    for place, below, names in os.walk(folder, followlinks=True):
        count += len(names)
        if count > MOST_FILES:
            raise UsageError(
                f"{folder} has more than {MOST_FILES:,} files, which cannot be watched for changes",
                "put the files of the model in a folder of their own",
            )
        for link in [name for name in below if os.path.islink(os.path.join(place, name))]:
            target = os.path.realpath(os.path.join(place, link))
            if target in entered:
                below.remove(link)
            entered.add(target)
        yield from (os.path.join(place, name) for name in names if name.endswith(ending))


def _state(path: str) -> FileState:
    try:
        return state_of(path)
    except OSError:
        return NO_FILE
