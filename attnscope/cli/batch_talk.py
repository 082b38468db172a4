"""What `attnscope batch` says while it runs, before (`--dry-run`), and at the end; and how it is stopped."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from attnscope.cli import output
from attnscope.errors import InputError

if TYPE_CHECKING:
    from attnscope.batch.job import Job
    from attnscope.batch.journal import Failure
    from attnscope.batch.reading import Reading
    from attnscope.batch.running import Tally
    from attnscope.cli.options import Writing
    from attnscope.text.prompt import Prompt

INTERRUPTED, TERMINATED = 130, 143
A_MINUTE = 60.0
SAMPLE_TEXTS = 8
STDIN = "-"


class Stopper:
    """While open, the first SIGINT or SIGTERM asks for an end after the batch at hand; the second ends at once.

    Called, it says whether an end was asked for. Until it is first called nothing is under way, and a signal ends the
    run as it would any command.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._armed = False
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        self._armed = True
        return self.signal is not None

    def __enter__(self) -> Stopper:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self._armed and self.signal is None:
            self.signal = number
            output.talk("stopping after the batch at hand; once more stops at once", False)
            return
        before = self._before[number]
        if callable(before):
            before(number, frame)


class Meter:
    """Progress on stderr: one line that moves on a terminal, a plain line a minute otherwise."""

    def __init__(self, reading: Reading, quiet: bool) -> None:
        self.quiet, self.reading = quiet, reading
        self.terminal = sys.stderr.isatty()
        self._size: int | None = None
        self._start = self._said = time.monotonic()

    def __enter__(self) -> Meter:
        from attnscope.batch.reading import find_sources

        sizes = [source.size for source in find_sources(self.reading)]
        self._size = None if None in sizes else sum(size or 0 for size in sizes)
        return self

    def __exit__(self, *error: object) -> None:
        if self.terminal and not self.quiet:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)  # noqa: T201

    def note(self, tally: Tally) -> None:
        """Say how far it is, if it is time to."""
        now = time.monotonic()
        if self.quiet or now - self._said < (0.5 if self.terminal else A_MINUTE):
            return
        self._said = now
        line = progress_line(tally, now - self._start, self._size)
        if self.terminal:
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)  # noqa: T201
        else:
            output.talk(line, False)


def progress_line(tally: Tally, seconds: float, size: int | None) -> str:
    """`1,200 texts  85 texts/s  8,300 tokens/s  3 failed  2:10 left`."""
    parts = [
        f"{tally.texts:,} texts",
        f"{tally.texts / seconds:,.0f} texts/s",
        f"{tally.tokens / seconds:,.0f} tokens/s",
    ]
    if tally.failed:
        parts.append(f"{tally.failed:,} failed")
    if size and tally.read:
        parts.append(f"{clock(seconds * max(0.0, size / tally.read - 1))} left")
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """Seconds as 0:07, 2:10, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@dataclass(frozen=True)
class Outcome:
    """How it went: what this run did, and, of a folder over all its runs, how many items failed, and the first."""

    tally: Tally
    items: int
    failed: int
    first: Sequence[Failure]


def ending(outcome: Outcome, reading: Reading, stop: Stopper, writing: Writing) -> int:
    """Say how it went; the exit code. Raises InputError where there was nothing to read."""
    tally = outcome.tally
    if not tally.stopped:
        check_items(outcome.items, reading)
    where = f" in {writing.out}" if writing.out else ""
    output.talk(f"{several(tally.texts, 'text')}, {several(tally.tokens, 'token')} measured{where}", writing.quiet)
    reasons = [f"{one.file}{f', line {one.line}' * (one.line is not None)}: {one.reason}" for one in outcome.first]
    if outcome.failed and writing.out:
        listed = f"the first {reasons[0]}; all in {writing.out}/failures.jsonl"
        output.talk(f"{several(outcome.failed, 'item')} failed, {listed}", False)
    elif outcome.failed:
        output.talk(f"{several(outcome.failed, 'item')} failed", False)
        for reason in reasons:
            output.talk(f"failed: {reason}", False)
    if tally.stopped:
        output.talk("stopped; the same command goes on from here", writing.quiet)
        return TERMINATED if stop.signal == signal.SIGTERM else INTERRUPTED
    return 1 if outcome.failed else 0


def check_items(items: int, reading: Reading) -> None:
    """Raise InputError where a corpus has no item: a pipe that broke before us, or the wrong file."""
    if not items:
        names = ", ".join("standard input" if name == STDIN else name for name in reading.sources)
        raise InputError(f"there is no text in {names}", "give a corpus with at least one line")


def several(number: int, name: str) -> str:
    """`1 text`, `1,200 texts`."""
    return f"{number:,} {name}{'s' * (number != 1)}"


def dry_run(job: Job, reading: Reading) -> int:
    """Print what would be done and what it would take: the corpus is read and tokenised, a few texts are measured."""
    from attnscope.batch.bucketing import shards
    from attnscope.batch.reading import find_sources, read_items
    from attnscope.batch.running import Worker
    from attnscope.batch.sizes import item_cost

    sources = find_sources(reading)
    worker = Worker(job)
    cost = item_cost(job, worker.loaded.geometry)
    counted = {"items": 0, "texts": 0, "tokens": 0, "failed": 0, "shards": 0}
    size = 0.0
    sample: list[Prompt] = []
    for shard in shards(read_items(reading, sources), cost, job.shard_bytes, {}):
        counted["shards"] += 1
        size += sum(map(cost, shard.items))
        for window in worker.windows(shard):
            counted["items"] += window.items
            counted["texts"] += len(window.prompts)
            counted["failed"] += len(window.failures)
            counted["tokens"] += sum(len(prompt) for _, prompt in window.prompts)
            sample = sample or [prompt for _, prompt in window.prompts[:SAMPLE_TEXTS]]
    check_items(counted["items"], reading)
    seconds = _seconds_a_token(worker, sample) * counted["tokens"]
    lines = {
        "model": worker.loaded.name,
        "device": f"{worker.loaded.device} {worker.loaded.dtype}",
        "files": len(sources),
        **counted,
        "tables": ", ".join(job.output.names),
        "tokens a batch": worker.limit,
        "output, about": f"{size / 2**20:,.0f} MiB",
        "time, about": clock(seconds),
    }
    for name, value in lines.items():
        print(f"{name:16}{value:,}" if isinstance(value, int) else f"{name:16}{value}")  # noqa: T201
    return 1 if counted["failed"] else 0


def _seconds_a_token(worker: Any, prompts: list[Prompt]) -> float:
    from attnscope.observe import observe

    if not prompts:
        return 0.0
    observe(worker.loaded, prompts[:1], worker.request)
    start = time.perf_counter()
    for prompt in prompts:
        observe(worker.loaded, [prompt], worker.request)
    return (time.perf_counter() - start) / sum(map(len, prompts))
