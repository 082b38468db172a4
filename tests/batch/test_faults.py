"""What goes wrong from outside: kills, signals, full disks, closed pipes, a second run."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attnscope.cli.batch import graceful_stop
from attnscope.corpus.folder import DatasetOutput, Job, Shard
from attnscope.corpus.items import Item
from attnscope.corpus.records import Corpus
from attnscope.corpus.rows import MOST_WAITING, ShardWriter
from attnscope.corpus.run import run_folder
from attnscope.corpus.tables import TableFile
from attnscope.corpus.worker import Worker
from attnscope.errors import AttnscopeError, UsageError
from attnscope.export.drawing import Pictures
from attnscope.figures.drawing_process import drawing_pool
from attnscope.model.options import LoadOptions
from attnscope.utils.folders import locked
from helpers.command_line import HANGS, call
from helpers.corpora import content, jsonl, rows, some_texts
from helpers.forks import Forked, forked, until

KILLS = Path(__file__).parents[1] / "helpers" / "kills.py"


def killed(tmp_path: Path, model: Path, texts: int, kills: int, seed: int) -> None:
    corpus = jsonl(tmp_path / "corpus.jsonl", [*some_texts(texts), ""])
    done = forked(KILLS, model, corpus, tmp_path, kills, seed)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == kills
    whole = content(tmp_path / "whole")
    assert sum(name.startswith("relations/") for name in whole) > 4
    again = [content(folder) for folder in tmp_path.iterdir() if folder.name.isdigit()]
    assert again
    for found in again:
        assert found.keys() == whole.keys()
        assert [name for name in whole if found[name] != whole[name]] == []


@pytest.mark.e2e
def test_killed_at_random_moments_the_dataset_is_the_same_byte_for_byte(tmp_path: Path, tiny_folder: Path) -> None:
    killed(tmp_path, tiny_folder, texts=12, kills=5, seed=1)


class Killed(BaseException):
    """Stands for a kill: whoever would tidy up does not."""


def files_of(run: Callable[[Path], object], folder: Path) -> dict[str, bytes]:
    run(folder)
    return content(folder)


@pytest.mark.parametrize("where", ["rename", "journal"])
def test_broken_off_the_dataset_is_the_same_byte_for_byte(
    tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """In this process: an exception at a rename, or amid a line of the journal, and nothing is tidied behind it."""
    corpus = jsonl(tmp_path / "corpus.jsonl", [*some_texts(4, longest=6), ""])

    def run(folder: Path) -> None:
        job = Job(shard_bytes=4_000)
        run_folder(job, Corpus((str(corpus),)), folder, {"model": "tiny"}, loaded=tiny)

    moved: list[Path] = []
    real, at = os.replace, [0]

    def replace(source: Path, target: Path) -> None:
        moved.append(Path(target))
        if len(moved) == at[0]:
            raise Killed
        real(source, target)

    def append(path: Path, values: Any) -> None:
        with path.open("ab") as stream:
            stream.write(b"0123456789abcdef {half a li")
        raise Killed

    monkeypatch.setattr(os, "replace", replace)
    whole = files_of(run, tmp_path / "whole")
    steps = len(moved)
    assert sum(name.startswith("relations/") for name in whole) > 2
    monkeypatch.setattr(ShardWriter, "abandon", lambda self: None)
    with monkeypatch.context() as patch:
        moved[:], at[0] = [], steps // 2 if where == "rename" else 0
        if where == "journal":
            patch.setattr("attnscope.corpus.folder.append", append)
        with pytest.raises(Killed):
            run(tmp_path / "again")
    at[0] = 0
    again = files_of(run, tmp_path / "again")
    assert again.keys() == whole.keys()
    assert [name for name in whole if again[name] != whole[name]] == []


@pytest.mark.slow
def test_killed_at_fifty_random_moments(tmp_path: Path, tiny_folder: Path) -> None:
    killed(tmp_path, tiny_folder, texts=70, kills=50, seed=2)


SIGNALS = [(signal.SIGTERM, 143), (signal.SIGINT, 130)]


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_ends_the_command_and_the_same_command_goes_on(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    """It comes while the second window is measured."""
    corpus, out, heard = jsonl(tmp_path / "corpus.jsonl", some_texts(9, longest=9)), tmp_path / "out", list[int]()
    monkeypatch.setattr("attnscope.corpus.worker.WINDOW_TEXTS", 3)
    measure = Worker.measure

    def signalled(self: Worker, *given: Any) -> Any:
        heard.append(number)
        if len(heard) == 2:
            signal.raise_signal(number)
        return measure(self, *given)

    monkeypatch.setattr(Worker, "measure", signalled)
    arguments = ("batch", str(corpus), "--model", str(tiny_folder), "--tables", "heads", "--out", str(out))
    before = signal.getsignal(number)
    stopped = call(*arguments)
    assert (stopped.code, signal.getsignal(number)) == (code, before)
    said = stopped.err.splitlines()
    assert said[0].startswith("stopping after this batch")
    assert "resumes" in said[-1]
    kept = [row["item"] for row in rows(out, "texts")]
    assert kept in ([0, 1, 2], [0, 1, 2, 3, 4, 5])
    call(*arguments).ok()
    assert [row["item"] for row in rows(out, "heads")] == [item for item in range(9) for _ in range(16)]


@pytest.mark.e2e
@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_finishes_the_batch_and_the_same_command_goes_on(
    tmp_path: Path, tiny_folder: Path, number: int, code: int
) -> None:
    """The end of the corpus comes only when the signal has been heard."""
    corpus = jsonl(tmp_path / "corpus.jsonl", some_texts(900)).read_bytes()
    cut = corpus.index(b"\n", len(corpus) * 3 // 4)  # behind the first shard, which has 495 texts
    arguments = ("batch", "-", "--input-format", "jsonl", "--model", tiny_folder, "--set", "shard_size=1")
    arguments += ("--tables", "heads", "--out", tmp_path / "out")
    reading, writing = os.pipe()
    run = Forked(arguments, stdin=reading, stderr=subprocess.PIPE)
    os.close(reading)
    with os.fdopen(writing, "wb", buffering=0) as pipe:
        pipe.write(corpus[:cut])
        while not (tmp_path / "out" / "journal.jsonl").exists() and run.poll() is None:
            time.sleep(0.02)
        run.send_signal(number)
        assert run.stderr is not None
        assert any(line.startswith(b"stopping after this batch") for line in run.stderr)
        with suppress(BrokenPipeError):  # it may have read enough
            pipe.write(corpus[cut:])
    _, talk = run.communicate(HANGS)
    assert run.returncode == code, talk
    assert b"resumes" in talk
    before = rows(tmp_path / "out", "texts")
    assert 0 < len(before) < 900
    assert [row["item"] for row in before] == list(range(len(before)))
    with (tmp_path / "corpus.jsonl").open("rb") as whole:
        assert Forked(arguments, stdin=whole.fileno()).wait(HANGS) == 0
    assert [row["item"] for row in rows(tmp_path / "out", "texts")] == list(range(900))
    heads = rows(tmp_path / "out", "heads")
    assert [row["item"] for row in heads] == [item for item in range(900) for _ in range(16)]


class Signals(io.RawIOBase):
    """A stderr during whose first write a signal comes."""

    written = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.written += 1
        if self.written == 1:
            signal.raise_signal(signal.SIGTERM)
        return len(data)


def test_a_signal_amid_a_line_to_stderr_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python refuses a second line there (RuntimeError: reentrant call)."""
    raw = Signals()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BufferedWriter(raw), line_buffering=True))
    with graceful_stop() as stop:
        assert not stop()
        sys.stderr.write("a line\n")
        assert stop()
    assert raw.written


PAINTING = """
import os, signal, sys, time
from attnscope.figures.drawing_process import drawing_pool

if __name__ == "__main__":
    with drawing_pool(1) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_painter_ends_with_the_run_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(PAINTING)
    done = subprocess.run([sys.executable, tmp_path / "run.py"], stdout=subprocess.PIPE, timeout=HANGS)
    assert done.returncode == -signal.SIGKILL
    until(lambda: not Path(f"/proc/{int(done.stdout)}").exists())


class Lazy(Executor):
    """Draws nothing until it is asked for a result; counts what waits."""

    def __init__(self) -> None:
        self.waiting = self.most = self.drawn = 0

    def submit(self, paint, job, folder):
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        return SimpleNamespace(result=lambda: self._draw(folder))

    def _draw(self, folder: Path) -> None:
        self.waiting -= 1
        self.drawn += 1
        folder.mkdir(parents=True)
        (folder / "overview.png").touch()


def test_few_texts_wait_for_slow_painters(tmp_path: Path, tiny) -> None:
    items = tuple(Item(n, "f", n + 1, str(n), "the bank") for n in range(3 * MOST_WAITING))
    output = DatasetOutput(tables=("heads",), pictures=Pictures(()))
    worker = Worker(Job(output=output), tiny)
    [window] = worker.windows(Shard(items))
    measured = worker.measure(window)
    assert measured is not None
    (tmp_path / ".partial").mkdir()
    pool = Lazy()
    writer = ShardWriter(tmp_path, Shard(items), output, pool)
    writer.add(measured)
    assert (pool.most, pool.drawn) == (MOST_WAITING, len(items) - MOST_WAITING)
    writer.commit()
    assert (pool.waiting, pool.drawn) == (0, len(items))
    assert len(list((tmp_path / "figures").glob("*/overview.png"))) == len(items)


def test_a_killed_painter_is_said_in_one_line(tmp_path: Path, tiny) -> None:
    items = tuple(Item(n, "f", n + 1, str(n), "the bank") for n in range(2))
    output = DatasetOutput(tables=("heads",), pictures=Pictures(()))
    worker = Worker(Job(output=output), tiny)
    [window] = worker.windows(Shard(items))
    measured = worker.measure(window)
    assert measured is not None
    (tmp_path / ".partial").mkdir()
    with drawing_pool(1) as pool:
        assert pool is not None
        os.kill(pool.submit(os.getpid).result(), signal.SIGKILL)
        writer = ShardWriter(tmp_path, Shard(items), output, pool)

        def written() -> None:
            writer.add(measured)
            writer.commit()

        with pytest.raises(AttnscopeError, match=r"a process that draws pictures was killed; .* resumes the run"):
            written()


def test_a_shard_that_is_written_after_its_run_has_ended_finds_no_place(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ShardWriter(tmp_path, Shard((Item(0, "f", 1, "0", "a"),)), DatasetOutput())
    assert list(tmp_path.iterdir()) == []


def test_pictures_are_replaced_one_by_one_by_another_attempt(
    tmp_path: Path, tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt that dies half way through its renames leaves every picture of the attempt before."""
    shard = Shard((Item(7, "f", 1, "7", "the bank"),))
    output = DatasetOutput(tables=(), pictures=Pictures(()))
    worker = Worker(Job(output=output), tiny)
    [window] = worker.windows(shard)
    (tmp_path / ".partial").mkdir()

    def attempt(content: str) -> ShardWriter:
        writer = ShardWriter(tmp_path, shard, output, Lazy())
        writer.add(worker.measure(window))
        writer._wait_for_pictures(0)
        for name in ("a.png", "heads/b.png"):
            path = writer.partial / "figures" / "000007" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)
        return writer

    attempt("first").commit()
    second, real, moved = attempt("second"), os.replace, []

    def dies(source: Path, target: Path) -> None:
        moved.append(target)
        if len(moved) > 2:  # texts, a.png
            raise OSError("died")
        real(source, target)

    monkeypatch.setattr(os, "replace", dies)
    with pytest.raises(OSError, match="died"):
        second.commit()
    drawn = tmp_path / "figures" / "000007"
    assert {path.name: path.read_text() for path in drawn.rglob("*.png") if path.name != "overview.png"} == {
        "a.png": "second",
        "b.png": "first",
    }


def test_a_second_run_on_the_same_folder_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    corpus = jsonl(tmp_path / "corpus.jsonl", some_texts(3))
    (tmp_path / "out").mkdir()
    with locked(tmp_path / "out"):
        with pytest.raises(UsageError, match=f"another run is writing to .*process {os.getpid()} on "):
            run_folder(Job(LoadOptions(model=str(tiny_folder))), Corpus((str(corpus),)), tmp_path / "out", {})
        assert not (tmp_path / "out" / "journal.jsonl").exists()


def test_a_closed_pipe_ends_silently(tmp_path: Path, tiny_folder: Path) -> None:
    corpus = jsonl(tmp_path / "corpus.jsonl", some_texts(60))
    arguments = ("batch", corpus, "--model", tiny_folder, "--to-stdout", "jsonl", "--tables", "heads", "-q")
    run = Forked(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout is not None
    assert json.loads(run.stdout.readline())["item"] == 0
    run.stdout.close()
    assert run.wait(HANGS) == 0
    assert run.stderr is not None
    assert run.stderr.read() == b""


@contextmanager
def mounted(disk: Path, options: str) -> Iterator[None]:
    """A tmpfs at this place; skips where this user may not mount one."""
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk], capture_output=True)
    if done.returncode != 0:
        pytest.skip("this user may not mount a tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_write_without_room_stops_cleanly_and_the_run_goes_on(
    tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, written = Job(shard_bytes=12_000), list[str]()
    reading, real = Corpus((str(jsonl(tmp_path / "corpus.jsonl", some_texts(6, longest=12))),)), TableFile.write

    def full(self: TableFile, table: Any) -> None:
        written.append(self.name)
        if len(written) == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out")
        real(self, table)

    with monkeypatch.context() as patch:
        patch.setattr(TableFile, "write", full)
        with pytest.raises(UsageError, match="No space left on device"):
            run_folder(job, reading, tmp_path / "out", {}, loaded=tiny)
    assert len((tmp_path / "out" / "journal.jsonl").read_bytes().splitlines()) == 1
    assert not list((tmp_path / "out" / ".partial").glob("*"))
    run_folder(job, reading, tmp_path / "out", {}, loaded=tiny)
    run_folder(job, reading, tmp_path / "whole", {}, loaded=tiny)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


@pytest.mark.e2e
def test_a_full_disk_stops_cleanly_and_the_run_goes_on_when_there_is_room(tmp_path: Path, tiny_folder: Path) -> None:
    disk = tmp_path / "disk"
    corpus = jsonl(tmp_path / "corpus.jsonl", some_texts(120))
    job = Job(LoadOptions(model=str(tiny_folder), device="cpu"), shard_bytes=60_000)
    reading = Corpus((str(corpus),))
    with mounted(disk, "size=400k"):
        with pytest.raises(UsageError, match="No space left on device"):
            run_folder(job, reading, disk / "out", {})
        subprocess.run(["mount", "-o", "remount,size=50m", disk], check=True)
        committed = len((disk / "out" / "journal.jsonl").read_bytes().splitlines())
        assert committed > 0
        run_folder(job, reading, disk / "out", {})
        found = content(disk / "out")
    run_folder(job, reading, tmp_path / "whole", {})
    assert found == content(tmp_path / "whole")


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, out, mkdir = jsonl(tmp_path / "corpus.jsonl", ["the bank"]), tmp_path / "out", os.mkdir

    def read_only(path: Any, *mode: Any, **how: Any) -> None:
        if Path(path) == out:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        mkdir(path, *mode, **how)

    monkeypatch.setattr(os, "mkdir", read_only)
    with pytest.raises(UsageError, match=rf"cannot write to {out}: Read-only file system"):
        run_folder(Job(), Corpus((str(corpus),)), out, {})


@pytest.mark.e2e
def test_a_folder_on_a_disk_that_is_mounted_read_only_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    disk, corpus = tmp_path / "disk", jsonl(tmp_path / "corpus.jsonl", some_texts(3))
    with mounted(disk, "ro"), pytest.raises(UsageError, match=r"cannot write to .*: Read-only file system"):
        run_folder(Job(LoadOptions(model=str(tiny_folder))), Corpus((str(corpus),)), disk / "out", {})


def test_memory_that_runs_out_halves_the_batch_and_fails_only_the_giant(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnscope.corpus import worker

    real, sizes = worker.observe, []

    def small_machine(loaded, prompts, request, **how):
        size = len(prompts) * max(map(len, prompts))
        sizes.append(size)
        if size > 120:
            raise MemoryError
        return real(loaded, prompts, request, **how)

    monkeypatch.setattr(worker, "observe", small_machine)
    texts = [*some_texts(16, longest=8), "the bank " * 100]
    corpus = jsonl(tmp_path / "corpus.jsonl", texts)
    job = Job(LoadOptions(model=str(tiny_folder), device="cpu"))
    journal, tally = run_folder(job, Corpus((str(corpus),)), tmp_path / "out", {})
    [failure] = journal.failures()
    assert (failure.item, "memory" in failure.reason, "alone" in failure.reason) == (16, True, True)
    assert tally.texts == 16
    assert [row["item"] for row in rows(tmp_path / "out", "texts")] == list(range(16))
    assert max(sizes) > 120  # it was tried
