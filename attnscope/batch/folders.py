"""A run over a corpus into a folder: what is done already is skipped, what is not is done, and nothing twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.batch.bucketing import unfinished
from attnscope.batch.journal import PARTIAL, Journal, check_options, check_ours, locked
from attnscope.batch.reading import Progress, Reading, Source, find_sources, read_items
from attnscope.errors import UsageError
from attnscope.figures.pool import drawing_pool as painting

if TYPE_CHECKING:
    from attnscope.batch.cluster import Cluster
    from attnscope.batch.job import Job
    from attnscope.batch.running import Tally


def run_folder(
    job: Job,
    reading: Reading,
    folder: Path,
    options: Mapping[str, Any],
    *,
    cluster: Cluster | None = None,
    workers: int = 0,
    stop: Callable[[], bool] = lambda: False,
    note: Callable[[Tally], None] = lambda tally: None,
) -> tuple[Journal, Tally]:
    """Measure every text of a corpus into a folder; the same call again goes on where the last one ended.

    options: what the folder is held to. cluster: run on Ray. workers: processes that draw figures. stop: asked after
    every batch. note: told after every window. Returns the journal and what this run did. Raises UsageError for a
    folder that another run holds, that was begun with other options, or that cannot be written; InputError where the
    corpus is no longer the one that was read.

        >>> journal, tally = run_folder(Job(), Reading(("corpus.jsonl",)), Path("runs/corpus"), {"model": "demo"})
    """
    sources = find_sources(reading)
    with opened(folder, options) as journal:
        if cluster is not None:
            from attnscope.batch.cluster import run_on_ray

            tally = run_on_ray(job, reading, sources, folder, journal, cluster, stop, note)
        else:
            tally = _run_here(job, reading, sources, folder, journal, workers, stop, note)
        journal.rewrite_failures()
        return journal, tally


def _run_here(
    job: Job,
    reading: Reading,
    sources: Sequence[Source],
    folder: Path,
    journal: Journal,
    workers: int,
    stop: Callable[[], bool],
    note: Callable[[Tally], None],
) -> Tally:
    from attnscope.batch.running import Worker, run_shards
    from attnscope.batch.sizes import item_cost
    from attnscope.batch.writing import ShardWriter

    worker = Worker(job)
    items = read_items(reading, sources, Progress())
    pending = unfinished(items, item_cost(job, worker.loaded.geometry), job.shard_bytes, journal.records)
    with painting(workers) as pool:
        return run_shards(
            worker, pending, lambda shard: ShardWriter(folder, shard, job.output, pool), journal.append, stop, note
        )


@contextmanager
def opened(folder: Path, options: Mapping[str, Any]) -> Iterator[Journal]:
    """The folder's journal, with the folder locked, held to its options and swept."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_ours(folder)
        with locked(folder):
            check_options(folder, options, {"about": "written by attnscope batch; docs/schemas.md says what is here"})
            journal = Journal(folder)
            journal.sweep()
            (folder / PARTIAL).mkdir(exist_ok=True)
            try:
                yield journal
            finally:
                journal.sweep()  # what actors that died on other machines left half made
    except OSError as error:
        if error.strerror is None:
            raise
        raise UsageError(
            f"cannot write to {folder}: {error.strerror}",
            "make room or name another folder; the same command again goes on from what is whole",
        ) from error
