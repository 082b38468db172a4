"""The file that keeps the compiled kernel: nothing is run that another wrote or a crash cut short."""

import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numba
import pytest

import attnscope
from attnscope.attention.kernels_cpu import object_code
from attnscope.errors import UsageError
from attnscope.hooks.engines import engine_named
from helpers.command_line import HANGS, call, spawn
from helpers.homes import without_a_home

KERNEL = "a_name", bytes(range(64))
OTHERS = 54321  # a user that is not us


class Made:
    """A compiler that counts, and the folder that its work is kept in."""

    def __init__(self, base: Path) -> None:
        self.base, self.times = base, 0

    def compiled(self) -> tuple[str, bytes]:
        self.times += 1
        return KERNEL

    @property
    def file(self) -> Path:
        (file,) = (path for path in self.base.rglob("*") if not path.is_dir())
        return file

    def asked(self) -> int:
        """How often one more question for the kernel compiles it."""
        before = self.times
        assert object_code._object() == KERNEL
        return self.times - before


@pytest.fixture(autouse=True)
def not_for_ever() -> Iterator[None]:
    """A FIFO that is read waits for its writer."""

    def give_up(number: int, frame: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(HANGS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    made = Made(tmp_path / "cache")
    made.base.mkdir()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(made.base))
    monkeypatch.setattr(object_code, "_compiled", made.compiled)
    assert (made.asked(), made.asked()) == (1, 0)
    return made


def test_a_flipped_bit_of_any_byte_is_noticed(made: Made) -> None:
    good = made.file.read_bytes()
    for byte in range(len(good)):
        damaged = bytearray(good)
        damaged[byte] ^= 1 << byte % 8
        made.file.write_bytes(damaged)
        assert made.asked() == 1, byte
    assert made.file.read_bytes() == good


@pytest.mark.parametrize(
    "damage",
    [
        lambda good: good[: len(good) // 2],
        lambda good: b"",
        lambda good: good + b"\0",
        lambda good: good.replace(b"a_name", b"\xff_name"),
        lambda good: b"a_name\0" + KERNEL[1],
        lambda good: bytes(1 << 23),
    ],
    ids=["half", "empty", "longer", "name that is no UTF-8", "without a digest", "8 MiB"],
)
def test_a_damaged_file_is_compiled_again_and_replaced(made: Made, damage: Callable[[bytes], bytes]) -> None:
    good = made.file.read_bytes()
    made.file.write_bytes(damage(good))
    assert (made.asked(), made.asked()) == (1, 0)
    assert made.file.read_bytes() == good


def test_a_file_made_for_something_else_is_not_taken(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another processor's code runs into instructions that this one lacks."""
    file = made.file
    monkeypatch.setattr(object_code, "LANES", 1)
    assert made.asked() == 1
    (other,) = set(file.parent.iterdir()) - {file}
    shutil.copyfile(file, other)
    assert (made.asked(), made.asked()) == (1, 0)


def linked(file: Path) -> None:
    kept = file.rename(file.with_name("kept"))
    file.symlink_to(kept)


def piped(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def endless(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


@pytest.mark.parametrize("swap", [linked, piped, endless])
def test_what_is_no_file_of_ours_is_not_opened_for_long(made: Made, swap: Callable[[Path], None]) -> None:
    file = made.file
    swap(file)
    assert (made.asked(), made.asked()) == (1, 0)
    assert file.is_file()
    assert not file.is_symlink()


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Reports another owner of a path from os.lstat and os.fstat: only root could really change it."""

    def give(path: Path) -> None:
        given = os.lstat(path).st_ino

        def told(real: Callable[[Any], os.stat_result], asked: Any) -> os.stat_result:
            found = real(asked)
            return os.stat_result((*found[:4], OTHERS, *found[5:])) if found.st_ino == given else found

        for name in ("lstat", "fstat"):
            monkeypatch.setattr(os, name, partial(told, getattr(os, name)))

    return give


def test_another_users_file_is_not_taken(made: Made, give_away: Callable[[Path], None]) -> None:
    """Whoever else wrote it in time could have us run anything; a root that takes on a user's home included."""
    give_away(made.file)
    assert (made.asked(), made.asked()) == (1, 0)
    assert os.lstat(made.file).st_uid == os.geteuid()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777, 0o755])
def test_a_folder_that_others_can_use_keeps_nothing(made: Made, mode: int) -> None:
    made.file.parent.chmod(mode)
    assert (made.asked(), made.asked()) == (1, 1)


def test_another_users_folder_keeps_nothing(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: OTHERS)
    assert (made.asked(), made.asked()) == (1, 1)


def test_a_folder_that_is_a_link_keeps_nothing(made: Made) -> None:
    folder = made.file.parent
    folder.symlink_to(folder.rename(folder.with_name("elsewhere")))
    assert (made.asked(), made.asked()) == (1, 1)


@pytest.mark.parametrize(("mode", "kept"), [(0o777, False), (0o1777, True), (0o755, True)])
def test_a_folder_above_in_which_others_can_swap_ours_keeps_nothing(made: Made, mode: int, kept: bool) -> None:
    """Where it is sticky, as /tmp is, others cannot."""
    made.base.chmod(mode)
    assert made.asked() == (0 if kept else 1)


def test_links_on_the_way_are_followed_where_no_other_can_bend_them(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home's .cache is often a link to a larger disk."""
    hall = tmp_path / "hall"
    hall.mkdir()
    (hall / "link").symlink_to(Path("..", "hall", "..", made.base.name))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(hall / "link"))
    assert made.asked() == 0
    hall.chmod(0o777)
    assert made.asked() == 1
    (hall / "round").symlink_to("round")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(hall / "round"))
    assert made.asked() == 1


def test_another_users_link_is_not_followed(
    made: Made, give_away: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(made.base)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(link))
    assert made.asked() == 0
    give_away(link)
    assert made.asked() == 1


@pytest.mark.parametrize("variable", ["NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HOME"])
def test_nothing_is_taken_from_the_folder_one_works_in(
    made: Made, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A downloaded model's, for one."""
    work, home = tmp_path / "work", tmp_path / "home"
    for folder in (work, home):
        folder.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(home))
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, ".")
    assert made.asked() == 1
    assert not list(work.iterdir())
    assert bool(list(home.rglob("*.bin"))) == (variable != "HOME")


def test_without_a_home_it_is_compiled_for_the_run(made: Made, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    without_a_home(monkeypatch)
    assert (made.asked(), made.asked()) == (1, 1)
    assert caplog.messages[-1] == (
        "compiling the CPU kernel, for this run alone: there is no home folder to keep it in; set NUMBA_CACHE_DIR"
    )


def test_it_reaches_the_disk_before_it_has_its_name(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that crashes in between keeps the old file, or none."""
    done: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, real=real: (done.append(name), real(*given))[1])
    made.file.unlink()
    assert made.asked() == 1
    assert done == ["fsync", "replace"]


def test_a_full_disk_leaves_no_rest(made: Made, caplog) -> None:
    made.file.unlink()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # EFBIG, as ENOSPC
    try:
        assert (made.asked(), made.asked()) == (1, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    not_kept = f"the CPU kernel is not kept, and the next run compiles it again: {made.base}/attnscope/kernel: File too"
    assert [message.startswith(not_kept) for message in caplog.messages][-2:] == [False, True]
    assert not [path for path in made.base.rglob("*") if path.is_file()]
    assert made.asked() == 1


def test_the_folder_is_ours_alone_whatever_the_umask(made: Made, tmp_path: Path) -> None:
    shutil.rmtree(made.base)
    before = os.umask(0)
    try:
        assert (made.asked(), made.asked()) == (1, 0)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in made.file.parents[:2]} == {0o700}


def test_an_unknown_name_is_not_called() -> None:
    _, code = object_code._object()
    with pytest.raises(RuntimeError, match="has no function 'other'"):
        object_code._loaded("other", code)


@pytest.mark.e2e
def test_half_of_the_kernel_does_not_crash_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = object_code._object()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(object_code, "_compiled", lambda: whole)
    object_code._object()
    (file,) = tmp_path.rglob("*.bin")
    os.truncate(file, file.stat().st_size // 2)
    done = spawn("heads", "a bank by the river", "--engine", "numba", "--format", "csv")
    assert (done.code, done.err.count("compiling the CPU kernel")) == (0, 1)
    assert file.stat().st_size > len(whole[1])


def test_without_its_compiler_the_tiles_answer_and_the_name_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    with pytest.raises(UsageError, match="NUMBA_DISABLE_JIT"):
        engine_named("numba")
    done = call("heads", "a bank", "--engine", "numba")
    assert done.code == 2
    assert done.err.endswith("use --engine tiles\n")
    monkeypatch.setattr("attnscope.attention.kernels_cpu.sweep.PAYS", 0)
    seen = attnscope.capture(attnscope.load("demo"), "a bank by the river", engine="fused")
    assert seen.heads[0].score["entropy"] >= 0


def test_a_file_in_the_working_folder_that_switches_it_off_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba reads `.numba_config.yaml` there."""
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    with pytest.raises(UsageError, match="switches it off"):
        object_code._compiled()
