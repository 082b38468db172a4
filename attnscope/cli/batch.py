"""`attnscope batch`: a corpus in, a dataset out."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from attnscope.cli import output
from attnscope.cli.batch_options import BatchRun
from attnscope.cli.takes import takes

if TYPE_CHECKING:
    from attnscope.batch.job import Job
    from attnscope.batch.reading import Reading
    from attnscope.cli.batch_talk import Outcome, Stopper

EXAMPLES = (
    "attnscope batch corpus.jsonl --text-field body --out runs/corpus",
    "zcat corpus.txt.gz | attnscope batch - --tables heads --to-stdout jsonl > heads.jsonl",
)


@takes(BatchRun)
def batch(asked: BatchRun) -> int:
    """Heads and relations of every text of a corpus, as a dataset.

    The same command again goes on where a run ended, however it ended. What cannot be read or measured goes to
    failures.jsonl, and the exit code is 1.
    """
    from attnscope.cli import batch_talk
    from attnscope.model.libraries import silence_libraries

    silence_libraries(asked.verbose)
    output.complain_through_talk(asked.quiet)
    reading, job = asked.reading(), asked.job()
    if asked.dry_run:
        return batch_talk.dry_run(job, reading)
    with batch_talk.Stopper() as stop, batch_talk.Meter(reading, asked.quiet) as meter:
        go = _to_stdout if asked.to_stdout else _to_folder
        outcome = go(asked, job, reading, stop, meter.note)
    return batch_talk.ending(outcome, reading, stop, asked)


def _to_folder(asked: BatchRun, job: Job, reading: Reading, stop: Stopper, note: Callable[..., None]) -> Outcome:
    from attnscope.batch.folders import run_folder
    from attnscope.cli.batch_talk import Outcome
    from attnscope.model.loading import identify

    assert asked.out is not None
    identity, load = identify(job.load)
    journal, tally = run_folder(
        replace(job, load=load),  # just the checkpoint that the folder is held to
        reading,
        asked.out,
        asked.held() | {"model": f"{asked.model} ({identity})"},
        cluster=asked.cluster(),
        workers=painters() if asked.figure_kinds else 0,
        stop=stop,
        note=note,
    )
    failed = list(journal.failures())
    return Outcome(tally, len(journal.records), len(failed), failed[:1])


def _to_stdout(asked: BatchRun, job: Job, reading: Reading, stop: Stopper, note: Callable[..., None]) -> Outcome:
    from attnscope.batch.bucketing import shards
    from attnscope.batch.reading import find_sources, read_items
    from attnscope.batch.running import Worker, run_shards
    from attnscope.batch.sizes import item_cost
    from attnscope.batch.writing import StreamWriter
    from attnscope.cli.batch_talk import Outcome

    sources = find_sources(reading)
    worker = Worker(job)
    pieces = shards(read_items(reading, sources), item_cost(job, worker.loaded.geometry), job.shard_bytes, {})
    stream = sys.stdout.buffer
    tally = run_shards(
        worker, pieces, lambda shard: StreamWriter(stream, shard, job.output), lambda record: None, stop, note
    )
    return Outcome(tally, tally.items, tally.failed, tally.first_failures)


def painters() -> int:
    """Processes that draw, while one core or more runs the model."""
    return max(1, (os.cpu_count() or 2) // 2)
