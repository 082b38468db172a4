"""Shards of items in, committed shards out, on one machine and in each actor of a cluster alike.

Reading and tokenising run in one thread, writing in another, the model in the caller's. Whatever is wrong with one text
is that text's failure; what is wrong with the disk or the model ends the run, with everything committed so far safe.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from attnscope.corpus.folder import Failure, Journal, Record, Shard
from attnscope.corpus.rows import Measured
from attnscope.errors import InputError
from attnscope.model.libraries import ProcessWide

if TYPE_CHECKING:
    from attnscope.corpus.folder import Job
    from attnscope.corpus.records import Corpus, CorpusFile
    from attnscope.corpus.worker import Worker

FIRST_FAILURES = 3
TURN_SECONDS = 2e-4
T = TypeVar("T")


@dataclass
class Tally:
    """How far a run has come; `read` is how many bytes of the corpus, `lacking` how many texts lack a span, by name.

    targets: as a Record's.
    """

    items: int = 0
    texts: int = 0
    tokens: int = 0
    failed: int = 0
    read: int = 0
    stopped: bool = False
    lacking: Counter[str] = field(default_factory=Counter)
    targets: Counter[str] = field(default_factory=Counter)
    first_failures: list[Failure] = field(default_factory=list)

    def add(self, done: Measured | Record) -> None:
        """Count some more items."""
        self.items += done.items
        self.texts += done.texts
        self.tokens += done.tokens
        self.failed += len(done.failures)
        self.lacking.update(done.lacking)
        self.targets.update(done.targets)
        self.first_failures += done.failures[: max(0, FIRST_FAILURES - len(self.first_failures))]


@dataclass(frozen=True)
class Run:
    """A run over a corpus into a folder; stop is asked after every batch, note is called after every window."""

    job: Job
    corpus: Corpus
    files: Sequence[CorpusFile]
    folder: Path
    journal: Journal
    stop: Callable[[], bool] = lambda: False
    note: Callable[[Tally], None] = lambda tally: None


class Writer(Protocol):
    """Where a shard's rows go: all of them at `commit`, none at `abandon`."""

    def add(self, measured: Measured) -> None: ...
    def commit(self) -> Record: ...
    def abandon(self) -> None: ...


def run_shards(
    worker: Worker,
    shards: Iterable[Shard],
    open_writer: Callable[[Shard], Writer],
    commit: Callable[[Record], None],
    stop: Callable[[], bool] = lambda: False,
    note: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Measure shard after shard and hand each one's record to `commit` once its files are there.

    When `stop` says so, the batch that runs is finished and the whole windows so far are committed as a shorter shard.
    With `job.strict` the first failed item ends the run the same way, and is an InputError.
    """
    tally = Tally()
    windows = ahead(window for shard in shards for window in worker.windows(shard))
    # the writer ends first: what is measured is committed also where the corpus is a pipe that says nothing more
    with _undisturbed(), closing(windows), Writing(open_writer, commit) as writing:
        for window in windows:
            # A window that was broken off is not written: what a shard holds is whole windows.
            measured = worker.measure(window, stop)
            if measured is None:
                tally.stopped = True
                break
            if worker.job.strict and measured.failures:
                writing.finish()
                failed = measured.failures[0]
                where = failed.file if failed.line is None else f"{failed.file}, line {failed.line}"
                hint = "correct it, or leave {strict} out and read failures.jsonl"
                raise InputError(f"{where}: {failed.reason}", hint)
            # Its rows are written while the next window is measured.
            writing.put(window.shard, measured, window.last)
            tally.add(measured)
            tally.read = window.read
            note(tally)
            if stop():
                tally.stopped = True
                break
        writing.finish()
    return tally


def ahead(source: Iterable[T], depth: int = 2) -> Generator[T, None, None]:
    """The same items; each is made in a thread while the ones before it are used.

    An error comes out where its item would. Closed, it makes no more of them.
    """
    end, items = object(), iter(source)
    pool = ThreadPoolExecutor(1, "ahead")
    try:
        waiting: deque[Future[Any]] = deque(pool.submit(next, items, end) for _ in range(depth))
        while (item := waiting.popleft().result()) is not end:
            waiting.append(pool.submit(next, items, end))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)


class Writing:
    """Writes windows in a thread, one while the next is measured; an error comes out at the next `put` or `finish`.

    A shard that is not committed when the block ends leaves nothing.
    """

    def __init__(self, open_writer: Callable[[Shard], Writer], commit: Callable[[Record], None]) -> None:
        self._open, self._commit = open_writer, commit
        self._pool = ThreadPoolExecutor(1, "writing")
        self._write: Future[None] | None = None
        self._writer: Writer | None = None

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()
        if self._writer is not None:
            self._writer.abandon()

    def put(self, shard: Shard, measured: Measured, last: bool) -> None:
        """Write some more of a shard; `last` commits it."""

        def write() -> None:
            self._writer = self._writer or self._open(shard)
            self._writer.add(measured)
            if last:
                self._end_shard()

        self._wait()
        self._write = self._pool.submit(write)

    def finish(self) -> None:
        """Commit what is whole, also of a shard that is not at its end."""
        self._wait()
        self._end_shard()

    def _wait(self) -> None:
        write, self._write = self._write, None
        if write is not None:
            write.result()

    def _end_shard(self) -> None:
        if self._writer is not None:
            self._commit(self._writer.commit())
            self._writer = None


@ProcessWide
@contextmanager
def _undisturbed() -> Iterator[None]:
    """Let neither the garbage collector nor the reading of texts hold up the model.

    The collector is kept off the libraries' million objects: they are there to stay. No thread holds the interpreter
    for long while another waits for it. Reading a text is all Python: at the usual five milliseconds a turn, every
    operator of the model, most of them shorter, waits that long for it, and a core has nothing to do.
    """
    freezes = not gc.get_freeze_count()  # else whoever called did: to thaw ours would thaw theirs
    if freezes:
        gc.freeze()
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, TURN_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        if freezes:
            gc.unfreeze()
