"""A run over a corpus into a folder: what is done already is skipped, what is not is done, and nothing twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.batch.corpus import Corpus, find_files
from attnscope.batch.folder import begun_sources, opened, say_who_answered
from attnscope.batch.items import read_items
from attnscope.batch.job import Job
from attnscope.batch.journal import Journal
from attnscope.batch.pipeline import Run, Tally, run_shards
from attnscope.batch.shards import item_cost, unfinished
from attnscope.batch.worker import Worker
from attnscope.batch.writers import ShardWriter
from attnscope.figures.pool import drawing_pool

if TYPE_CHECKING:
    from attnscope.batch.cluster import Cluster
    from attnscope.model.loaded import LoadedModel


def run_folder(
    job: Job,
    corpus: Corpus,
    folder: Path,
    options: Mapping[str, Any],
    *,
    cluster: Cluster | None = None,
    workers: int = 0,
    loaded: LoadedModel | None = None,
    stop: Callable[[], bool] = lambda: False,
    note: Callable[[Tally], None] = lambda tally: None,
) -> tuple[Journal, Tally]:
    """Measure every text of a corpus into a folder; the same call again resumes where the last one ended.

    options: with which the folder must be run again. cluster: run on Ray. workers: processes that draw figures.
    loaded: the job's model, if it is loaded already. stop: asked after every batch. note: called after every window.
    Returns the journal and what this run did. Raises UsageError for a folder that another run writes to, that was
    started with other options, or that cannot be written; InputError where the corpus is not the one that was read.

        >>> journal, tally = run_folder(Job(), Corpus(("corpus.jsonl",)), Path("runs/corpus"), {"model": "demo"})
    """
    # A resumed run names its files as the first did, also where the same paths are spelled otherwise now.
    if "sources" in options and corpus.sources:
        corpus = replace(corpus, sources=begun_sources(folder, corpus.sources))
        options = {**options, "sources": list(corpus.sources)}
    files = find_files(corpus)
    with opened(folder, options) as journal:
        if cluster is not None:
            from attnscope.batch.cluster import run_on_ray

            run = Run(job, corpus, files, folder, journal, stop, note)
            tally = run_on_ray(run, cluster)
        else:
            worker = Worker(job, loaded)
            cost = item_cost(job, worker.loaded.geometry)
            pending = unfinished(read_items(corpus, files), cost, job.shard_bytes, journal.records)
            with drawing_pool(workers) as pool:
                write = partial(ShardWriter, folder, output=worker.output, pool=pool)
                tally = run_shards(worker, pending, write, journal.append, stop, note)
        # Shards are committed as they end, on a cluster in any order: what speaks of all of them is written last.
        journal.rewrite_failures()
        say_who_answered(folder, journal.records.values())
        return journal, tally
