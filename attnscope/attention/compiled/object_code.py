"""The compiled kernel: made once per machine by Numba, kept as object code, and loaded without Numba after that.

Importing Numba takes longer than a page of text; LLVM alone loads in a twentieth of a second.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attnscope.attention.compiled import cache
from attnscope.attention.compiled.shapes import LANES
from attnscope.errors import UsageError

# What the compiled code depends on.
SOURCES = ("kernel.py", "panel_rows.py", "vectors.py", "shapes.py", "object_code.py")
SWITCHED_OFF = (
    "the engine numba needs Numba's compiler, and NUMBA_DISABLE_JIT switches it off",
    "unset it, or use {engine=tiles}",
)
_kept: list[Any] = []  # what owns the code

logger = logging.getLogger("attnscope")


def installed() -> bool:
    """Whether Numba is there, and may compile."""
    return find_spec("numba") is not None and not switched_off()


def switched_off() -> bool:
    """Whether the environment tells Numba to compile nothing."""
    return os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")


@lru_cache(maxsize=1)
def sweep() -> Callable[[int, int], int]:
    """The kernel, as a function of the address of its records and their number; the interpreter is free meanwhile."""
    name, code = _object()
    function = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2)(_loaded(name, code))
    unused = (ctypes.c_int64 * 2)()  # where Numba's own callers find an error: nothing here raises one
    place = ctypes.addressof(unused)
    _kept.append(unused)
    return lambda records, count: function(place, place, records, count)


def _object() -> tuple[str, bytes]:
    """The kernel's name and object code for this machine: as kept, or compiled."""
    folder = cache.wanted_folder()
    path = folder / f"sweep-{_key()}.bin" if folder and cache.is_private(folder) else None
    if path and (content := cache.read_object(path)):
        name, _, code = content.partition(b"\0")
        return name.decode(), code
    if path:
        where = f"once per machine: {path.parent}"
    else:
        why = f"{folder} is not a folder that only you can use" if folder else "there is no home folder to keep it in"
        where = f"for this run alone: {why}; set NUMBA_CACHE_DIR"
    logger.warning("compiling the CPU kernel, %s", where)
    symbol, code = _compiled()
    if path:
        cache.keep(path, symbol.encode() + b"\0" + code)
    return symbol, code


def _key() -> str:
    """Of what the code depends on: the sources, the compilers, the processor."""
    parts = [Path(__file__).with_name(name).read_bytes() for name in SOURCES]
    parts += [text.encode() for text in (version("numba"), version("llvmlite"), str(LANES), *_processor())]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _processor() -> tuple[str, str]:
    """Name and features of the processor at hand, or those that Numba is set to compile for."""
    from llvmlite import binding

    name = os.environ.get("NUMBA_CPU_NAME") or binding.get_host_cpu_name()
    return name, os.environ.get("NUMBA_CPU_FEATURES") or binding.get_host_cpu_features().flatten()


def _machine() -> Any:
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple()
    return target.create_target_machine(*_processor(), opt=3, jit=True)


def _compiled() -> tuple[str, bytes]:
    import numba
    from llvmlite import binding
    from numba import types

    if numba.config.DISABLE_JIT:  # which a file in the working folder can say, too
        raise UsageError(*SWITCHED_OFF)
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
    if not (address := engine.get_function_address(name)):
        raise RuntimeError(f"the compiled kernel has no function {name!r}")
    return address
