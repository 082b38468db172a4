"""A run over a corpus into a folder: what is done already is skipped, what is not is done, and nothing twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.batch.corpus import Corpus, CorpusFile, find_files
from attnscope.batch.folder import opened
from attnscope.batch.items import read_items
from attnscope.batch.journal import Journal
from attnscope.batch.painters import painting
from attnscope.batch.shards import unfinished

if TYPE_CHECKING:
    from attnscope.batch.cluster import Cluster
    from attnscope.batch.job import Job
    from attnscope.batch.worker import Tally


def run_folder(
    job: Job,
    reading: Corpus,
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

        >>> journal, tally = run_folder(Job(), Corpus(("corpus.jsonl",)), Path("runs/corpus"), {"model": "demo"})
    """
    sources = find_files(reading)
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
    reading: Corpus,
    sources: Sequence[CorpusFile],
    folder: Path,
    journal: Journal,
    workers: int,
    stop: Callable[[], bool],
    note: Callable[[Tally], None],
) -> Tally:
    from attnscope.batch.shards import item_cost
    from attnscope.batch.worker import Worker, run_shards
    from attnscope.batch.writers import ShardWriter

    worker = Worker(job)
    items = read_items(reading, sources)
    pending = unfinished(items, item_cost(job, worker.loaded.geometry), job.shard_bytes, journal.records)
    with painting(workers) as pool:
        return run_shards(
            worker, pending, lambda shard: ShardWriter(folder, shard, job.output, pool), journal.append, stop, note
        )
