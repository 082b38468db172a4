"""The kernel's cache: files that are damaged, or that somebody else wrote. Each run has the same numbers, or exit 1."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path

from fuzzing.judging import lay_out
from fuzzing.made import kernel, ran, room
from fuzzing.trying import Ended, Try, fork, full_disk, kind
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
FOREIGN = ("owner", "writable", "linked", "odd", "odd", "elsewhere", "elsewhere", "full", "off")
# The environment's names, and the base under the working folder that they lead to.
ELSEWHERE: tuple[tuple[Mapping[str, str | None], str], ...] = (
    ({"NUMBA_CACHE_DIR": None, "XDG_CACHE_HOME": "."}, "."),
    ({"NUMBA_CACHE_DIR": None, "XDG_CACHE_HOME": "x/.."}, "."),
    ({"NUMBA_CACHE_DIR": None, "HOME": "."}, ".cache"),
    ({"NUMBA_CACHE_DIR": "."}, "."),
)


@cache
def good() -> tuple[Path, bytes]:
    """The file of the kernel: where it is in the folder of NUMBA_CACHE_DIR, and its content."""
    [path] = kernel().rglob("sweep-*.bin")
    return path.relative_to(kernel()), path.read_bytes()


@cache
def numbers() -> bytes:
    """What a run with the kernel prints."""
    return ran("numbers", Try(ASKED))


@cache
def compiled() -> tuple[str, bytes]:
    """The kernel's name and machine code."""
    from attnscope.attention.kernels_cpu import object_code

    return object_code._object()  # as kept in NUMBA_CACHE_DIR


@cache
def evil() -> bytes:
    """A file of the cache, whole by all its marks, whose code leaves a folder where it is run."""
    from llvmlite import binding

    from attnscope.attention.kernels_cpu import object_code

    assembly = LEAVES_A_FOLDER.format(size=len(TRAPPED) + 1, name=TRAPPED)
    code = object_code._machine().emit_object(binding.parse_assembly(assembly))
    folder = lay_out(room() / "evil")
    fork(Try(ASKED, environment={"NUMBA_CACHE_DIR": str(folder)}, before=lambda: made_of("evil", code)), folder)
    return (folder / good()[0]).read_bytes()


def made_of(name: str, code: bytes) -> None:
    """Compiling has this result, without its 15 seconds."""
    from attnscope.attention.kernels_cpu import object_code

    object_code._compiled = lambda: (name, code)


def damaged(rng: random.Random) -> bytes:
    """The file with one thing wrong with it."""
    content, (name, code) = good()[1], compiled()
    at = rng.randrange(len(content))
    flipped = content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    cut = (b"", content[:at], content[: len(content) // 2], content[: -len(code)], code)
    others = (*cut, content + b"x", bytes(len(content)))
    names = (content.replace(name.encode(), other, 1) for other in (b"\xff\xfe", b"nothing", b"", b"x" * 9999))
    return rng.choice((*(flipped,) * 12, *others, *names))


def same(folder: Path) -> Callable[[Ended], Iterable[str]]:
    """The numbers are those of a sound kernel, or the run says that they are not; no half file is left."""

    def after(ended: Ended) -> Iterable[str]:
        if ended.code == 0 and ended.out != numbers():
            yield "other numbers"
        if left := [path.name for path in folder.rglob("*") if path.name.startswith(("tmp", ".sweep"))]:
            yield f"left {left[0]}"

    return after


@kind
def kernels(rng: random.Random, folder: Path) -> Try:
    base, inside = folder / "base", good()[0]
    what = rng.choice(("damaged",) * 8 + FOREIGN)
    environment: dict[str, str | None] = {"NUMBA_CACHE_DIR": str(base)}
    if what == "elsewhere":
        more, within = rng.choice(ELSEWHERE)
        environment |= more
        base = folder / within
    path, most, sound = base / inside, rng.choice((0, 1000, 30_000)), compiled()
    path.parent.mkdir(parents=True, mode=0o700)
    if what not in ("full", "off"):
        path.write_bytes(damaged(rng) if what == "damaged" else evil())
    if what == "owner" and os.getuid() == 0:
        os.chown(path, NOBODY, NOBODY)
    elif what == "writable":
        path.parent.chmod(0o777)
    elif what == "linked":
        theirs = path.parent.rename(folder / "theirs")
        theirs.chmod(0o777)
        path.parent.symlink_to(theirs)
    elif what == "odd":
        odd_file(rng, path)
    elif what == "off":
        environment["NUMBA_DISABLE_JIT"] = "1"

    def before() -> None:
        if what != "off":
            made_of(*sound)
        if what == "full":
            full_disk(most)

    return Try(ASKED, environment=environment, before=before, after=same(folder))
