"""The compiled kernel: made once per machine by Numba, kept as object code, and loaded without Numba after that.

Importing Numba takes longer than a page of text; LLVM alone loads in a twentieth of a second.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attnscope.attention.compiled.shapes import LANES

# What the compiled code depends on.
SOURCES = ("kernel.py", "panel_rows.py", "vectors.py", "shapes.py", "object_code.py")
_kept: list[Any] = []  # what owns the code


def installed() -> bool:
    """Whether Numba is there."""
    return find_spec("numba") is not None


@lru_cache(maxsize=1)
def sweep() -> Callable[[int, int], int]:
    """The kernel, as a function of the address of its records and their number; the interpreter is free meanwhile."""
    name, code = _object()
    function = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2)(_loaded(name, code))
    unused = (ctypes.c_int64 * 2)()  # where Numba's own callers find an error: nothing here raises one
    place = ctypes.addressof(unused)
    _kept.append(unused)
    return lambda records, count: function(place, place, records, count)


def cache_folder() -> Path:
    """Where the compiled kernel is kept: NUMBA_CACHE_DIR, or the user's own cache."""
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(chosen) / "attnscope"
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "attnscope"


def _object() -> tuple[str, bytes]:
    """The kernel's name and object code for this machine."""
    path = cache_folder() / f"sweep-{_key()}.bin"
    with suppress(OSError):
        name, _, code = path.read_bytes().partition(b"\0")
        if code:
            return name.decode(), code
    logging.getLogger("attnscope").warning("compiling the CPU kernel, once per machine: %s", path.parent)
    name_, code = _compiled()
    _keep(path, name_.encode() + b"\0" + code)
    return name_, code


def _key() -> str:
    """Of what the code depends on: the sources, the compilers, the processor."""
    parts = [Path(__file__).with_name(name).read_bytes() for name in SOURCES]
    parts += [text.encode() for text in (version("numba"), version("llvmlite"), str(LANES), *_processor())]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _processor() -> tuple[str, str]:
    """Name and features of the processor at hand, or those that Numba is told to compile for."""
    from llvmlite import binding

    name = os.environ.get("NUMBA_CPU_NAME") or binding.get_host_cpu_name()
    return name, os.environ.get("NUMBA_CPU_FEATURES") or binding.get_host_cpu_features().flatten()


def _keep(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; a folder that can't be written to means compiling again next time."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)


def _machine() -> Any:
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple()
    return target.create_target_machine(*_processor(), opt=3, jit=True)


def _compiled() -> tuple[str, bytes]:
    from llvmlite import binding
    from numba import types

    from attnscope.attention.compiled import kernel

    signature = (types.int64, types.int64)
    kernel.sweep.compile(signature)
    name = kernel.sweep.overloads[signature].fndesc.llvm_func_name
    module = binding.parse_assembly(kernel.sweep.inspect_llvm(signature))
    return name, _machine().emit_object(module)


def _loaded(name: str, code: bytes) -> int:
    """The address of the function in object code."""
    from llvmlite import binding

    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine())
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _kept.append(engine)
    return engine.get_function_address(name)
