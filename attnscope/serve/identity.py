"""Whether both ends are the same: the code that runs, the environment it runs in, and the files of a model.

Each is taken from what the file system says of files (device, inode, size, time of change), so that nothing is read.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from attnscope.model.libraries import QUIET

LIBRARIES = "torch transformers tokenizers numpy accelerate safetensors peft bitsandbytes numba".split()  # noqa: SIM905
VARIABLES = (  # what begins so
    *("ATTNSCOPE_", "CUDA", "HF_", "HUGGINGFACE_", "KMP_", "MKL_", "NUMBA_", "NVIDIA_", "OMP_", "OPENBLAS_"),
    *("PYTORCH_", "TORCH", "TRANSFORMERS_", "TRITON_", "HOME", "XDG_CACHE_HOME", "TZ"),
)
UNLIKE = {"ATTNSCOPE_NO_SERVER", "ATTNSCOPE_STAGES", "TORCHINDUCTOR_CACHE_DIR", *QUIET}  # that change no number
MOST_FILES = 10_000

Files = dict[str, tuple[int, int, int, int]]  # of each path: device, inode, size, time of change


@cache
def code() -> str:
    """A digest of the package and of the libraries under it, as they lie on the disk."""
    package = Path(__file__).parents[1]
    found = [sys.version, sys.prefix, *(f"{name} {state}" for name, state in sorted(_tree(package, ".py").items()))]
    for name in LIBRARIES:
        spec = find_spec(name)
        if spec is not None and spec.origin:
            found.append(f"{spec.origin} {_state(spec.origin)}")
    return hashlib.sha256("\n".join(found).encode()).hexdigest()


def environment() -> str:
    """A digest of the variables that the libraries read, and of the processors that may be used."""
    names = sorted(name for name in os.environ if name.startswith(VARIABLES) and name not in UNLIKE)
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    said = "\n".join([*(f"{name}={os.environ[name]}" for name in names), str(cpus)])
    return hashlib.sha256(said.encode(errors="surrogateescape")).hexdigest()


def files(*folders: Path | None) -> Files:
    """The files of a model's folders, as the file system has them; of a path that is a file that one."""
    found: Files = {}
    for folder in folders:
        if folder is not None:
            found |= _tree(Path(os.path.realpath(folder)))
    return found


def _tree(folder: Path, ending: str = "") -> Files:
    return {name: _state(name) for name in _walk(folder, ending)}


def _walk(folder: Path, ending: str) -> Iterator[str]:
    if folder.is_file():
        yield str(folder)
        return
    count = 0
    for place, _, names in os.walk(folder):
        for name in names:
            count += 1
            if count > MOST_FILES:
                return
            if name.endswith(ending):
                yield os.path.join(place, name)


def _state(path: str) -> tuple[int, int, int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0, 0, 0
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
