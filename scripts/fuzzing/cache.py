"""The kernel's cache: files that are damaged, or that somebody else wrote. Each run has the same numbers, or exit 1."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path

from fuzzing.made import kernel, ran
from fuzzing.trying import Ended, Try, full_disk, kind, outside
from fuzzing.words import TEXT, TRAPPED, odd_file

ASKED = ["heads", "-q", "--engine", "numba", "--format", "csv", "--text", TEXT]
NOBODY = 65534
LEAVES_A_FOLDER = """
@path = private constant [{size} x i8] c"{name}\\00"
declare i32 @mkdir(ptr, i32)
define i32 @evil(ptr %records, ptr %info, i64 %start, i64 %count) {{
  call i32 @mkdir(ptr @path, i32 493)
  ret i32 1
}}
"""
# The environment's names, and the folder under the working folder that they lead to.
ELSEWHERE: tuple[tuple[Mapping[str, str | None], str], ...] = (
    ({"NUMBA_CACHE_DIR": None, "XDG_CACHE_HOME": "."}, "attnscope"),
    ({"NUMBA_CACHE_DIR": None, "XDG_CACHE_HOME": "x/.."}, "attnscope"),
    ({"NUMBA_CACHE_DIR": None, "HOME": "."}, ".cache/attnscope"),
    ({"NUMBA_CACHE_DIR": "."}, "attnscope"),
)


@cache
def good() -> tuple[str, bytes]:
    """The file of the kernel, by its name and its content."""
    [path] = (kernel() / "attnscope").glob("sweep-*.bin")
    return path.name, path.read_bytes()


@cache
def numbers() -> bytes:
    """What a run with the kernel prints."""
    return ran("numbers", Try(ASKED))


@cache
def evil() -> bytes:
    """Object code that leaves a folder where it is run, as a file of the cache."""
    from llvmlite import binding

    from attnscope.attention.compiled import object_code

    machine = object_code._machine()
    assembly = LEAVES_A_FOLDER.format(size=len(TRAPPED) + 1, name=TRAPPED)
    return packed(b"evil", machine.emit_object(binding.parse_assembly(assembly)))


def packed(name: bytes, code: bytes) -> bytes:
    """A file of the cache."""
    return name + b"\0" + code


def _parts() -> tuple[bytes, bytes]:
    name, _, code = good()[1].partition(b"\0")
    return name, code


def damaged(rng: random.Random) -> bytes:
    """The file with one thing wrong with it."""
    content, (name, code) = good()[1], _parts()
    at = rng.randrange(len(content))
    flipped = content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    others = (content[:at], content[: len(content) // 2], b"", content + b"x", bytes(len(content)), code, name + b"\0")
    names = (packed(b"\xff\xfe", code), packed(b"nothing", code), packed(b"", code), packed(name * 99, code))
    return rng.choice((flipped,) * 12 + others + names)


def not_compiled() -> None:
    """Compiling has the result that it had before, without its 15 seconds."""
    from attnscope.attention.compiled import object_code

    name, code = _parts()
    object_code._compiled = lambda: (name.decode(), code)


def same(folder: Path) -> Callable[[Ended], Iterable[str]]:
    """The numbers are those of a sound kernel, or the run says that they are not; no half file is left."""

    def after(ended: Ended) -> Iterable[str]:
        if ended.code == 0 and ended.out != numbers():
            yield "other numbers"
        if left := [path.name for path in folder.rglob("tmp*")]:
            yield f"left {left[0]}"

    return after


@kind
def kernels(rng: random.Random, folder: Path) -> Try:
    base, environment = folder / "base", {}
    what = rng.choice(
        ("damaged",) * 8 + ("owner", "writable", "linked", "odd", "odd", "elsewhere", "elsewhere", "full", "off")
    )
    place, content = base / "attnscope", damaged(rng) if what == "damaged" else evil()
    if what == "elsewhere":
        environment, within = rng.choice(ELSEWHERE)
        place = folder / within
    elif what == "linked":
        place = outside(folder) / "kernels"
    place.mkdir(parents=True, mode=0o700)
    path = place / good()[0]
    if what not in ("full", "off"):
        path.write_bytes(content)
    before: Callable[[], object] = not_compiled
    if what == "owner" and os.getuid() == 0:
        os.chown(path, NOBODY, NOBODY)
    elif what == "writable":
        place.chmod(0o777)
    elif what == "linked":
        base.mkdir()
        (base / "attnscope").symlink_to(place)
    elif what == "odd":
        odd_file(rng, path)
    elif what == "full":
        most = rng.choice((0, 1000, 30_000))
        before = lambda: (not_compiled(), full_disk(most))  # noqa: E731
    elif what == "off":
        environment, before = {"NUMBA_DISABLE_JIT": "1"}, lambda: None
    return Try(ASKED, environment={"NUMBA_CACHE_DIR": str(base), **environment}, before=before, after=same(folder))
