"""The compiled kernel: made once per machine by Numba, kept as object code, and loaded without Numba after that.

Importing Numba takes longer than a page of text, and LLVM takes 48 MiB. An ELF object with plain addresses needs
neither: `linked` puts it into memory. Any other object is loaded by LLVM. The file is run as machine code, so only we
may have written it, and all of it: only we and root may change the file, its folder, or where the path of the folder
leads, and a digest finds what a crash or a disk did to the rest.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import mmap
import os
import stat
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attnscope.attention.kernels_cpu.layout import LANES
from attnscope.errors import UsageError
from attnscope.utils.files import open_regular, whole_file

MOST_BYTES = 1 << 22  # the kernel takes a hundredth of that
PROCESSORS = "/proc/cpuinfo"  # of Linux
MOST_DESCRIPTION = 1 << 14  # characters of its first core
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
        # All on the way to it, links included, must be ours or root's, and none such that others can replace it.
        at, remaining = Path(folder.anchor), list(folder.parts[:0:-1])
        for _ in range(MOST_STEPS):
            if not remaining:
                status = os.lstat(folder)
                return stat.S_ISDIR(status.st_mode) and status.st_uid == _us() and not status.st_mode & 0o077
            step = at / remaining.pop()
            if not os.path.lexists(step):
                with suppress(FileExistsError):  # another process was quicker
                    os.mkdir(step, 0o700)
            status = os.lstat(step)
            if status.st_uid not in (0, _us()):
                return False
            if stat.S_ISLNK(status.st_mode):
                remaining += reversed(Path(os.readlink(step)).parts)
            elif status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
                return False
            else:
                at = step
    return False


def read_object(path: Path) -> bytes | None:
    """What `keep` wrote there; None where there is no such file, or another one."""
    with suppress(OSError), open_regular(path, follow=False) as file:
        status = os.fstat(file.fileno())
        if status.st_uid == _us() and status.st_size <= MOST_BYTES:
            digest, content = file.read(DIGEST().digest_size), file.read(MOST_BYTES)
            return content if digest == _digest(path, content) else None
    return None


def keep(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, through to the disk; where that fails it is not kept, with a warning."""
    try:
        with whole_file(path) as file:
            file.write(_digest(path, content) + content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        why = error.strerror or error
        logger.warning("the CPU kernel is not kept, and the next run compiles it again: %s: %s", path.parent, why)


def _digest(path: Path, content: bytes) -> bytes:
    """Of the content and of what it was made for, which the file's name says."""
    return DIGEST(path.name.encode() + b"\0" + content).digest()


def _us() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0  # Windows says 0 of every file


# What the compiled code depends on.
SOURCES = ("kernel.py", "vector_registers.py", "layout.py", "object_code.py")
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
    return function_at(_loaded(*_object()))


def function_at(address: int) -> Callable[[int, int], int]:
    """The kernel that lies at an address."""
    function = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2)(address)
    unused = (ctypes.c_int64 * 2)()  # where Numba's own callers find an error: nothing here raises one
    place = ctypes.addressof(unused)
    _kept.append(unused)
    return lambda records, count: function(place, place, records, count)


def _object() -> tuple[str, bytes]:
    """The kernel's name and object code for this machine: as kept, or compiled."""
    folder = wanted_folder()
    path = folder / f"sweep-{_key()}.bin" if folder and is_private(folder) else None
    if path and (content := read_object(path)):
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
        keep(path, symbol.encode() + b"\0" + code)
    return symbol, code


def _key() -> str:
    """Of what the code depends on: the sources, the compilers, the processor."""
    parts = [Path(__file__).with_name(name).read_bytes() for name in SOURCES]
    parts += [text.encode() for text in (version("numba"), version("llvmlite"), str(LANES), *_description())]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _description() -> tuple[str, ...]:
    """The processor as Linux describes it and as Numba is set to compile for it; elsewhere as LLVM describes it."""
    try:
        with open(PROCESSORS, encoding="utf-8", errors="replace") as file:
            rows = dict(line.split(":", 1) for line in file.read(MOST_DESCRIPTION).split("\n\n")[0].splitlines())
        rows = {name.strip(): value for name, value in rows.items()}
        linux = [rows[name] for name in ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")]
    except (OSError, ValueError, KeyError):  # not Linux, or a processor with other rows
        return _processor()
    return (*linux, os.environ.get("NUMBA_CPU_NAME", ""), os.environ.get("NUMBA_CPU_FEATURES", ""))


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
    from attnscope.attention.kernels_cpu import kernel

    signature = (types.int64, types.int64)
    kernel.sweep.compile(signature)
    name = kernel.sweep.overloads[signature].fndesc.llvm_func_name
    return name, _machine().emit_object(binding.parse_assembly(kernel.sweep.inspect_llvm(signature)))


def _loaded(name: str, code: bytes) -> int:
    """The address of the function in object code."""
    return linked(name, code) or _loaded_by_llvm(name, code)


# Of <elf.h>: a header's first bytes on x86-64, the types of sections, a section in memory, a whole address.
ELF, X86_64 = b"\x7fELF\x02\x01\x01", 62
SYMBOLS, RELOCATIONS, ZEROS, ALLOCATED, ADDRESS = 2, 4, 8, 2, 1
MOST_SECTIONS = 1 << 10


def linked(name: str, code: bytes) -> int | None:
    """The address of a function of an ELF object of x86-64, put into memory here; None for any other object.

    An object for a large address space refers to its own parts by whole addresses, and each is a sum.
    """
    try:
        image, addresses, functions = _laid_out(code)
        memory = mmap.mmap(-1, len(image), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for place, target in addresses:
            struct.pack_into("<Q", image, place, base + target)
        memory.write(image)
        # No page can be written and run at once.
        executable = mmap.PROT_READ | mmap.PROT_EXEC
        if ctypes.CDLL(None).mprotect(ctypes.c_void_p(base), ctypes.c_size_t(len(memory)), executable):
            return None
        _kept.append(memory)
        return base + functions[name.encode()]
    except (struct.error, ValueError, LookupError, ArithmeticError, OSError, AttributeError, TypeError):
        return None


def _laid_out(code: bytes) -> tuple[bytearray, list[tuple[int, int]], dict[bytes, int]]:
    """An object's sections one behind the other; where in them which address belongs, and the places of its functions.

    Raises ValueError for an object that refers to anything else.
    """
    sections = _sections(code)
    image, starts = bytearray(), dict[int, int]()
    for at, (_, kind, flags, _, offset, length, _, _, align, _) in enumerate(sections):
        if flags & ALLOCATED and length:
            if kind == ZEROS or not 0 < align <= mmap.PAGESIZE or offset + length > len(code):
                raise ValueError("a section of another kind")
            image += bytes(-len(image) % align)
            starts[at] = len(image)
            image += code[offset : offset + length]
    symbols, functions = _symbols(code, sections, starts)
    addresses = []
    for _, kind, _, _, offset, length, _, changed, _, _ in sections:
        if kind == RELOCATIONS and changed in starts:
            for place, what, addend in struct.iter_unpack("<QQq", code[offset : offset + length]):
                target = symbols[what >> 32]
                if what & 0xFFFFFFFF != ADDRESS or target is None or not 0 <= target + addend < len(image):
                    raise ValueError("an address outside of the object")
                addresses.append((starts[changed] + place, target + addend))
    return image, addresses, functions


def _sections(code: bytes) -> list[tuple[int, ...]]:
    """The table of an object's sections. Raises ValueError for another kind of file."""
    if code[: len(ELF)] != ELF or struct.unpack_from("<H", code, 18) != (X86_64,):
        raise ValueError("no object of x86-64")
    (table,), (size, count) = struct.unpack_from("<Q", code, 40), struct.unpack_from("<HH", code, 58)
    if count > MOST_SECTIONS:
        raise ValueError("too many sections")
    return [struct.unpack_from("<IIQQQQIIQQ", code, table + size * at) for at in range(count)]


def _symbols(
    code: bytes, sections: Sequence[tuple[int, ...]], starts: Mapping[int, int]
) -> tuple[list[int | None], dict[bytes, int]]:
    """Where each symbol is in the image, None for one outside of it; and by name those that are in it.

    starts: where in the image a section begins.
    """
    symbols, functions = list[int | None](), {}
    for _, kind, _, _, offset, length, names, _, _, _ in sections:
        if kind == SYMBOLS:
            strings = sections[names][4]
            for word, _, _, section, value, _ in struct.iter_unpack("<IBBHQQ", code[offset : offset + length]):
                place = starts[section] + value if section in starts else None
                symbols.append(place)
                if place is not None:
                    functions[code[strings + word : code.index(b"\0", strings + word)]] = place
    return symbols, functions


def _loaded_by_llvm(name: str, code: bytes) -> int:
    from llvmlite import binding

    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine())
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _kept.append(engine)
    if not (address := engine.get_function_address(name)):
        raise RuntimeError(f"the compiled kernel has no function {name!r}")
    return address
