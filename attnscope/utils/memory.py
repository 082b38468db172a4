"""How much memory there is, in bytes and in words."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from attnscope.errors import MemoryLimitError, UsageError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
SURELY_FREE = 2**20  # bytes that are not asked after: to ask takes longer than to fill them
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def free_memory(device: str) -> int:
    """Free bytes on a device: `cpu` (the machine's, or what its cgroup leaves), `cuda`, `cuda:N`, `mps`.

    Several devices, comma-joined, answer with the least.

    Example:
        free_memory("cpu")  # 24_018_821_120
    """
    return min(_free(name.strip()) for name in device.split(","))


def check_free(takes: str, needed: int, hint: str) -> None:
    """Raise MemoryLimitError where the machine has fewer bytes; takes: the words before their number.

    Example:
        check_free("the mask takes", 4 * tokens**2, "save fewer queries")
    """
    if needed > SURELY_FREE and needed > (room := free_memory("cpu")):
        raise MemoryLimitError(f"{takes} {human_bytes(needed)}, and this machine has {human_bytes(room)} free", hint)


def second_cache() -> int:
    """Bytes of a core's second-level cache; a common size where the system does not say.

    Example:
        second_cache()  # 2_097_152
    """
    base = Path("/sys/devices/system/cpu/cpu0/cache")
    for index in sorted(base.glob("index*")):
        try:
            level, size = ((index / name).read_text().strip() for name in ("level", "size"))
        except OSError:
            continue
        if level == "2" and size.endswith("K"):
            return int(size[:-1]) * 1024
    return 2**20


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, as Python, CUDA, MPS or PyTorch's CPU allocator says it, or was foreseen to.

    Example:
        is_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"))  # True
    """
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, MemoryError | MemoryLimitError) or any(word in str(error).lower() for word in words)


def keep_freed_memory() -> None:
    """Let the C library keep freed blocks for the next ones, for work that frees and takes the same megabytes again.

    Otherwise every large block is fresh pages, which the kernel zeroes: a sixth of the time of a batch run. glibc only;
    elsewhere nothing happens.

    Example:
        keep_freed_memory()
    """
    tune = _of_c_library("mallopt")
    tune(M_MMAP_THRESHOLD, 32 * 2**20)
    tune(M_TRIM_THRESHOLD, 64 * 2**20)


def give_back_memory() -> None:
    """Let the C library give freed pages of all threads back to the system. glibc only, as above.

    Example:
        give_back_memory()
    """
    _of_c_library("malloc_trim")(0)


def _of_c_library(name: str) -> Callable[..., object]:
    """A function of the C library; one that does nothing where it has none of that name."""
    import ctypes

    try:
        function: Callable[..., object] = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return lambda *arguments: None
    return function


def read_size(text: str) -> int:
    """Bytes of "4GB", "512M", "1e9". Raises UsageError for anything else."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?)i?b?\s*", text.lower())
    try:
        size = float(match[1]) * UNITS[match[2]] if match else 0.0
    except ValueError:
        size = 0.0
    if not 1 <= size < math.inf:
        raise UsageError(f"expected a size of memory, got {text!r}", "write {memory=4GB}")
    return int(size)


def human_bytes(count: int) -> str:
    """Bytes for people: `human_bytes(3 << 30)` is `3.0 GiB`."""
    size = float(min(count, 2**1000))  # no float is larger
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{count} bytes" if unit == "bytes" else f"{size:.1f} {unit}"


def _free(device: str) -> int:
    kind = device.partition(":")[0]
    if kind in ("cuda", "mps"):
        import torch

        if kind == "mps":
            return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved  # what PyTorch keeps for the next tensors is free to us
    limit = _cgroup_free(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    machine = _machine_free()
    return machine if limit is None else min(machine, limit)


def _machine_free() -> int:
    """What the machine could give a process now, without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    if sys.platform == "win32":
        return sys.maxsize  # no answer without a further package: never refuse on a guess
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_free(root: Path, membership: Path) -> int | None:
    """What the tightest cgroup around this process leaves, page cache counted as free; None without a limit."""
    try:
        memberships = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return None
    left = []
    for _, controllers, group in memberships:
        if controllers == "":
            base, limit, usage = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # Inside a container the path may be the host's: what can't be found there is then read at the base.
        parts = Path(group.lstrip("/")).parts
        folders = [base.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
        left += [free for folder in folders if (free := _left(folder / limit, folder / usage)) is not None]
    return min(left, default=None)


def _left(limit: Path, usage: Path) -> int | None:
    try:
        allowed = limit.read_text().strip()
        if allowed == "max":
            return None
        used = int(usage.read_text())
        statistics = dict(line.split() for line in (limit.parent / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    cache = int(statistics.get("inactive_file", 0)) + int(statistics.get("active_file", 0))
    return max(int(allowed) - max(used - cache, 0), 0)
