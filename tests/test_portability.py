"""What other systems lack is taken away here: Windows' locks, folders that cannot be opened, flags and signals.

These tests run on Linux. They show which call is made in which order, not that another system takes it.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
import signal
import stat
import subprocess
import sys
import time
import types
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from attnscope.certificate.check import check_parity
from attnscope.errors import ModelError, UsageError
from attnscope.inputs.prompt import from_text
from attnscope.model.loaded import LoadedModel
from attnscope.utils import folders as claim
from attnscope.utils import folders as journal
from attnscope.utils import signals
from attnscope.utils.files import open_regular
from attnscope.utils.folders import LOCK, locked
from helpers.command_line import call

OTHER = f"another run is writing to .*: process {os.getpid()} on"


class Bytes:
    """The locks of `msvcrt`: of single bytes, each taken by one handle until it is closed."""

    LK_NBLCK = 2

    def __init__(self) -> None:
        self.taken: dict[tuple[int, int], int] = {}

    def locking(self, handle: int, mode: int, count: int) -> None:
        assert (mode, count) == (self.LK_NBLCK, 1)
        byte = os.fstat(handle).st_ino, os.lseek(handle, 0, os.SEEK_CUR)
        if self.taken.setdefault(byte, handle) != handle:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> Bytes:
    """No fcntl, no folder that can be opened, and locks of bytes."""
    opened, locks = os.open, Bytes()

    def refusing(path: str | Path, *rest: int, **named: int) -> int:
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *rest, **named)

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(os, "open", refusing)
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", locks)  # type: ignore[misc]
    return locks


def test_a_folder_is_locked_by_a_byte_after_its_text(tmp_path: Path, windows: Bytes) -> None:
    with locked(tmp_path):
        [(_, byte)] = windows.taken
        text = (tmp_path / LOCK).read_text()
        assert text.startswith(f"process {os.getpid()} on ")
        assert byte > len(text)
        with pytest.raises(UsageError, match=OTHER), locked(tmp_path):
            pass
    assert (tmp_path / LOCK).read_text() == text


def test_a_lock_of_fcntl_keeps_a_second_run_out(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(UsageError, match=OTHER), locked(tmp_path):
        pass


def test_a_lock_that_a_killed_run_left_to_a_fork_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork lets go of it as soon as it sees that it is alone; a lock that stays is somebody's all the same."""
    killed = subprocess.Popen(["true"])
    killed.wait()
    waits: list[float] = []
    with ExitStack() as held:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: killed.pid)
            held.enter_context(locked(tmp_path))
        with monkeypatch.context() as patch:
            patch.setattr(claim, "LEFT_SECONDS", 0.01)
            with pytest.raises(UsageError, match=f"process {killed.pid} on"), locked(tmp_path):
                pass
        monkeypatch.setattr(time, "sleep", lambda seconds: (waits.append(seconds), held.close()))
        with locked(tmp_path):
            assert len(waits) == 1


@pytest.mark.usefixtures("windows")
def test_a_journal_is_appended_to_where_no_folder_can_be_opened(tmp_path: Path) -> None:
    journal.append(tmp_path / "journal.jsonl", {"part": 1})
    assert list(journal.read_journal(tmp_path / "journal.jsonl", dict)) == [{"part": 1}]


def test_a_folder_is_synced_where_it_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
    journal.sync(tmp_path)
    assert synced == [tmp_path.stat().st_ino]


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are synced; as on Windows, each has to be open for writing. Folders are synced elsewhere alone."""
    files: list[str] = []

    def strict(handle: int) -> None:
        if not stat.S_ISDIR(os.fstat(handle).st_mode):
            if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            files.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)

    monkeypatch.setattr(os, "fsync", strict)
    return files


def test_what_is_synced_is_open_for_writing(tmp_path: Path, synced: list[str]) -> None:
    path = tmp_path / "part"
    path.write_bytes(b"kept")
    with open(path, "rb") as stream, pytest.raises(OSError, match="Bad file"):
        os.fsync(stream.fileno())
    journal.sync_file(path)
    assert (path.read_bytes(), synced) == (b"kept", ["part"])


def test_what_a_dataset_syncs_is_open_for_writing(tmp_path: Path, synced: list[str]) -> None:
    (tmp_path / "corpus.txt").write_text("the bank\n")
    told = ("batch", str(tmp_path / "corpus.txt"), "-q", "--out", str(tmp_path / "out"))
    call(*told, "--tables", "heads", "--matrices").ok()
    assert {"heads", "texts", "weights", "weights_index", "journal.jsonl"} <= set(synced)


def test_a_link_is_refused_without_the_flag_that_refuses_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("keep")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    monkeypatch.delattr(os, "O_NOFOLLOW")
    with pytest.raises(OSError, match="symbolic link"):
        open_regular(tmp_path / "link", "ab", follow=False)
    with open_regular(tmp_path / "link") as followed, open_regular(tmp_path / "file", follow=False) as file:
        assert followed.read() == file.read() == b"keep"


def test_a_second_instance_that_fails_is_reported_without_sigkill(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = types.SimpleNamespace(returncode=1, stderr="ValueError: no such layer\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    monkeypatch.delattr(signal, "SIGKILL")
    with pytest.raises(ModelError, match="no second instance of demo could be run: ValueError: no such layer"):
        check_parity(demo, from_text(demo.tokenizer, "the bank"), whole=True)


@pytest.mark.parametrize("lacks", ["", "pthread_kill"])
def test_the_main_thread_gets_a_signal_from_another(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    if lacks:
        monkeypatch.delattr(signal, lacks)
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        other = threading.Thread(target=signals._signal_main, args=[signal.SIGTERM])
        other.start()
        other.join()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our modules open no text without an encoding: Python's own warning of it is there from a process' start alone."""
    opened, text_encoding = builtins.open, io.text_encoding

    def ours(depth: int) -> bool:
        return sys._getframe(depth).f_globals.get("__name__", "").startswith("attnscope")

    def asked(file: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None, **how: Any) -> Any:
        assert "b" in mode or encoding or not ours(2), f"{file} is opened without an encoding"
        return opened(file, mode, buffering, encoding, **how)

    def named(encoding: str | None, stacklevel: int = 2) -> str:
        assert encoding or not ours(3), "a path is read or written without an encoding"
        return text_encoding(encoding, stacklevel)

    monkeypatch.setattr("builtins.open", asked)
    monkeypatch.setattr("io.text_encoding", named)


@pytest.mark.usefixtures("strict")
def test_no_run_reads_or_writes_in_the_systems_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnscope.utils.memory._free", lambda device: 2**33)  # the kernel's files are ASCII
    call("relations", "the bank", "--out", str(tmp_path / "run"), "-q").ok()
    call("relations", str(tmp_path / "run"), "-q").ok()
    call("view", str(tmp_path / "run"), "--out", str(tmp_path / "page.html"), "-q").ok()


@pytest.mark.usefixtures("strict")
def test_a_text_without_an_encoding_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")  # not of ours
    for code in ("open(path)", "path.read_text()", "path.write_text('a')", "path.open()"):
        with pytest.raises(AssertionError, match="without an encoding"):
            exec(code, {"__name__": "attnscope.utils.files", "path": tmp_path / "a"})
    exec(
        "open(path, 'rb').close(), path.read_text('utf-8')",
        {"__name__": "attnscope.utils.files", "path": tmp_path / "a"},
    )


@pytest.mark.e2e
def test_no_file_is_read_or_written_in_the_systems_encoding(tmp_path: Path) -> None:
    """Python's own warning of it, as an error, over a run that writes and one that reads."""
    code = """
import warnings
warnings.filterwarnings("error", category=EncodingWarning, module="attnscope")
from attnscope.cli import run
import sys
import time
out = sys.argv[1]
assert run(["heads", "the bank", "--out", out + "/run", "--top", "1", "-q"]) == 0
assert run(["heads", out + "/run", "-q"]) == 0
assert run(["view", out + "/run", "--out", out + "/page.html", "-q"]) == 0
"""
    strict = [sys.executable, "-X", "warn_default_encoding", "-c", code, str(tmp_path)]
    done = subprocess.run(strict, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.html").stat().st_size > 1000


def test_a_signal_that_is_sent_again_too_late_is_not_said_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was swallowed while files were written, and has ended that block in another way meanwhile."""
    left: list[int] = []
    sent: list[int] = []
    monkeypatch.setattr(signals, "_leave", left.append)
    monkeypatch.setattr(signals, "_signal_main", sent.append)
    signals._send_again(signal.SIGINT)
    assert sent == []
    with signals.unwinding():
        signals._send_again(signal.SIGINT)
    assert sent == [signal.SIGINT]
    signals._stop(signal.SIGINT, None)
    assert left == []
    signals._stop(signal.SIGINT, None)
    assert left == [signal.SIGINT]
