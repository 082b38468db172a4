"""`attnscope batch`: a corpus in, a dataset out."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from attnscope.cli import output
from attnscope.cli.batch_options import BatchRun
from attnscope.cli.batch_ray import BatchCommand
from attnscope.cli.heads import GROUPS
from attnscope.cli.takes import takes
from attnscope.utils.signals import unwinding

if TYPE_CHECKING:
    from attnscope.cli.batch_report import Outcome
    from attnscope.corpus.folder import Job
    from attnscope.corpus.records import Corpus
    from attnscope.utils.signals import GracefulStop

EXAMPLES = (
    "attnscope batch corpus.jsonl --text-field body --out runs/corpus",
    "attnscope batch corpus.jsonl --text-field body --spans where=river --spans end=last --summary --out runs/spans",
    "attnscope batch corpus.jsonl --text-field body --tables heads --set answer=' the bank' --query made --key first "
    "--out runs/answers && attnscope heads runs/answers",
    "zcat corpus.txt.gz | attnscope batch - --tables heads --to-stdout jsonl > heads.jsonl",
)
COMMAND = BatchCommand


@takes(BatchRun, file=GROUPS)
def batch(asked: BatchRun) -> int:
    """Heads and relations of every text of a corpus, as a dataset.

    The same command resumes a run where it ended, however it ended. What cannot be read or measured goes to
    failures.jsonl, and the exit code is 1.
    """
    from attnscope.cli import batch_report
    from attnscope.model.libraries import silence_libraries

    silence_libraries(asked.verbose)
    output.complain_through_talk(asked.quiet)
    atlas = asked.named_by()
    asked = asked.resolved(atlas)
    corpus, job = asked.corpus(), asked.job(atlas)
    if asked.dry_run:
        return batch_report.dry_run(job, corpus)
    with batch_report.graceful_stop() as stop, batch_report.RunProgress(corpus, asked.quiet) as progress:
        go = _to_stdout if asked.to_stdout else _to_folder
        outcome = go(asked, job, corpus, stop, progress.note)
    code = batch_report.ending(outcome, corpus, stop, asked)
    if asked.summary and not outcome.tally.stopped:
        _summarise(asked, job)
    after = batch_report.next_command(asked.out, job.output) if asked.out and outcome.measured else ""
    output.talk(after, asked.quiet or not after or outcome.tally.stopped)
    return code


def _summarise(asked: BatchRun, job: Job) -> None:
    from attnscope.corpus.tables import summarised, write_summary

    assert asked.out is not None
    with unwinding(), output.progress("summary", len(summarised(job.output)), asked.quiet) as advance:
        path = write_summary(asked.out, job.output, advance)
    output.talk(f"means over the texts in {path}", asked.quiet)


def _to_folder(asked: BatchRun, job: Job, corpus: Corpus, stop: GracefulStop, note: Callable[..., None]) -> Outcome:
    from attnscope.cli.batch_report import Outcome
    from attnscope.corpus.run import run_folder
    from attnscope.model.loading import identify

    assert asked.out is not None
    identity, load = identify(job.load)
    journal, tally = run_folder(
        replace(job, load=load),  # just the checkpoint that the folder is held to
        corpus,
        asked.out,
        asked.held() | {"atlas": job.output.about["atlas"], "model": f"{asked.model} ({identity})"},
        cluster=asked.cluster(),
        workers=drawing_processes() if asked.figure_kinds else 0,
        stop=stop,
        note=note,
    )
    failed = list(journal.failures())
    before = sum(record.texts for record in journal.records.values()) - tally.texts
    lacking, targets = (
        sum((Counter(getattr(record, name)) for record in journal.records.values()), Counter[str]())
        for name in ("lacking", "targets")
    )
    return Outcome(tally, len(journal.records), len(failed), failed[:1], before, lacking, targets)


def _to_stdout(asked: BatchRun, job: Job, corpus: Corpus, stop: GracefulStop, note: Callable[..., None]) -> Outcome:
    from attnscope.cli.batch_report import Outcome
    from attnscope.corpus.folder import item_cost, shards
    from attnscope.corpus.items import read_items
    from attnscope.corpus.pipeline import run_shards
    from attnscope.corpus.records import find_files
    from attnscope.corpus.rows import StreamWriter
    from attnscope.corpus.worker import Worker

    files = find_files(corpus)
    worker = Worker(job)
    pieces = shards(read_items(corpus, files), item_cost(job, worker.loaded.geometry), job.shard_bytes, {})
    stream = output.data_stream("jsonl")
    tally = run_shards(
        worker, pieces, lambda shard: StreamWriter(stream, shard, worker.output), lambda record: None, stop, note
    )
    return Outcome(tally, tally.items, tally.failed, tally.first_failures, lacking=tally.lacking, targets=tally.targets)


def drawing_processes() -> int:
    """Processes that draw, while one core or more runs the model."""
    return max(1, (os.cpu_count() or 2) // 2)
