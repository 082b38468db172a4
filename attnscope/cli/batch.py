"""`attnscope batch`: a corpus in, a dataset out; how far it is, how it ended, and what it would take (`--dry-run`)."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from attnscope.cli import output
from attnscope.cli.batch_options import BatchCommand, BatchRun
from attnscope.cli.config import with_options
from attnscope.errors import InputError, visible
from attnscope.utils.signals import GracefulStop, unwinding
from attnscope.utils.stages import Stage, clock

if TYPE_CHECKING:
    from attnscope.cli.output import Writing
    from attnscope.corpus.folder import Job
    from attnscope.corpus.pipeline import Tally
    from attnscope.corpus.records import Corpus

EXAMPLES = (
    "attnscope batch corpus.jsonl --text-field body --out runs/corpus",
    "attnscope batch corpus.jsonl --text-field body --spans where=river --spans end=last --summary --out runs/spans",
    "attnscope batch corpus.jsonl --text-field body --tables heads --set answer=' the bank' --query made --key first "
    "--out runs/answers && attnscope heads runs/answers",
    "zcat corpus.txt.gz | attnscope batch - --tables heads --to-stdout jsonl > heads.jsonl",
)
COMMAND = BatchCommand


@with_options(BatchRun)
def batch(asked: BatchRun) -> int:
    """Measure heads and relations of every text of a corpus.

    The result is a dataset in --out. The same command resumes an unfinished run. Texts without a result are listed
    in failures.jsonl, and the exit code is then 1.
    """
    from attnscope.model.libraries import silence_libraries

    silence_libraries(asked.verbose)
    atlas = asked.named_by()
    asked = asked.resolved(atlas)
    corpus, job = asked.corpus(), asked.job(atlas)
    if asked.dry_run:
        return dry_run(job, corpus)
    with graceful_stop() as stop, run_progress(corpus, asked.quiet) as note:
        go = _to_stdout if asked.to_stdout else _to_folder
        tally, whole = go(asked, job, corpus, stop, note)
    code = ending(tally, whole, corpus, stop, asked)
    if asked.summary and asked.out is not None and not tally.stopped:
        from attnscope.corpus.tables import summarised, write_summary

        with unwinding(), output.progress("summary", len(summarised(job.output)), asked.quiet) as advance:
            path = write_summary(asked.out, job.output, advance)
        output.log(f"means over the texts in {path}", asked.quiet)
    # What ranks the heads of the dataset over its texts, where anything of heads is written.
    tables, spans = job.output.tables, job.output.spans
    if asked.out and whole.texts and ("heads" in tables or spans) and not tally.stopped:
        named = "" if "heads" in tables else f" --query {spans[-1]} --key {spans[0]}"
        command = f"attnscope heads {shlex.quote(str(asked.out))}{named}"
        output.log(f"heads ranked over these texts: {command}", asked.quiet)
    return code


def _to_folder(
    asked: BatchRun, job: Job, corpus: Corpus, stop: GracefulStop, note: Callable[..., None]
) -> tuple[Tally, Tally]:
    """What this run did, and what all runs into this folder did."""
    from attnscope.corpus.pipeline import Tally
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
        workers=max(1, (os.cpu_count() or 2) // 2) if asked.figure_kinds else 0,  # a core or more runs the model
        stop=stop,
        note=note,
    )
    whole = Tally()
    for first in sorted(journal.records):
        whole.add(journal.records[first])
    return tally, whole


def _to_stdout(
    asked: BatchRun, job: Job, corpus: Corpus, stop: GracefulStop, note: Callable[..., None]
) -> tuple[Tally, Tally]:
    """What this run did, which is all."""
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
    return tally, tally


def graceful_stop() -> GracefulStop:
    """A stop after the batch at hand, which is announced on stderr."""
    return GracefulStop(lambda: output.log("stopping after this batch; interrupt again to stop at once", False))


@contextmanager
def run_progress(corpus: Corpus, quiet: bool) -> Iterator[Callable[[Tally], None]]:
    """How far a run is, on stderr, over the bytes of the corpus; yields what is called with what was done so far."""
    from attnscope.corpus.records import find_files

    sizes = [file.size for file in find_files(corpus)]
    size = None if None in sizes else sum(size or 0 for size in sizes)
    stage = Stage("loading the model, then measuring the first texts")

    def note(tally: Tally) -> None:
        # `1,200 texts  85 texts/s  8,300 tokens/s  3 failed`
        rates = f"{tally.texts / stage.seconds:,.0f} texts/s  {tally.tokens / stage.seconds:,.0f} tokens/s"
        stage.title = f"{tally.texts:,} texts  {rates}{f'  {tally.failed:,} failed' * bool(tally.failed)}"
        stage.total, stage.unit = size if tally.read else None, "bytes"  # a cluster does not say how much it has read
        stage.advance(tally.read - stage.done)

    with output.show_stage(stage, quiet):
        yield note


def ending(tally: Tally, whole: Tally, corpus: Corpus, stop: GracefulStop, writing: Writing) -> int:
    """Say how it went; the exit code. Raises InputError where there was nothing to read.

    tally: of this run. whole: of all runs into the folder.
    """
    if not tally.stopped:
        check_items(whole.items, corpus)
    # What this run measured, and what was there before it.
    before, where = whole.texts - tally.texts, f" in {writing.out}" * bool(writing.out)
    there = f"; {several(before, 'text')} {'were' if before > 1 else 'was'} there already" * bool(before)
    done = f"{several(tally.texts, 'text')}, {several(tally.tokens, 'token')} measured{where}{there}"
    output.log(done if tally.items or not before else f"all {before:,} are there already{where}", writing.quiet)
    for name, texts in sorted(whole.lacking.items()):  # a run that goes on counts them in another order
        every = f'; a record gives it as "spans": {{"{name}": [[0, 4]]}}, in characters of its text'
        how = every * (texts == whole.texts)
        output.log(f"span {name!r} is not in {texts:,} of {several(whole.texts, 'text')}{how}", writing.quiet)
    if cut := whole.targets.get("cut"):
        from attnscope.hooks.generation import MOST_MADE

        made = several(whole.targets["generated"], "generated target")
        output.log(f"{cut:,} of {made} cut at {MOST_MADE} tokens, or at as many as the decoder reads", writing.quiet)
    first = whole.first_failures
    reasons = [f"{item.file}{f', line {item.line}' * (item.line is not None)}: {item.reason}" for item in first]
    if whole.failed:
        listed = f", the first {reasons[0]}; all in {writing.out}/failures.jsonl" if writing.out else ""
        no_text = f"no field {corpus.text_field or 'text'!r}"
        field = "; --text-field NAME names that of the text" * first[0].reason.startswith(no_text)
        output.log(f"{several(whole.failed, 'item')} failed{listed}{field}", False)
        for reason in reasons if not writing.out else ():
            output.log(f"failed: {reason}", False)
    if tally.stopped:
        output.log("stopped; the same command resumes from here", writing.quiet)
        return stop.code
    return 1 if whole.failed else 0


def check_items(items: int, corpus: Corpus) -> None:
    """Raise InputError where a corpus has no item: a pipe that broke before us, or the wrong file."""
    if not items:
        names = ", ".join("standard input" if name == "-" else name for name in corpus.sources)
        raise InputError(f"there is no text in {names}", "give a corpus with at least one line")


def several(number: int, name: str) -> str:
    """`1 text`, `1,200 texts`."""
    return f"{number:,} {name}{'s' * (number != 1)}"


def dry_run(job: Job, corpus: Corpus) -> int:
    """Print what would be done and what it would take; the exit code."""
    from attnscope.corpus.run import estimate

    expected = estimate(job, corpus)
    check_items(expected.items, corpus)
    lines = {
        "model": expected.model,
        "device": f"{expected.device} {expected.dtype}",
        "files": expected.files,
        **{name: getattr(expected, name) for name in ("items", "texts", "tokens", "failed", "shards")},
        "tables": ", ".join(job.output.names),
        "tokens per batch": expected.batch_tokens,
        "output, about": f"{expected.output_bytes / 2**20:,.0f} MiB",
        "time, about": clock(expected.seconds),
    }
    for name, value in lines.items():
        print(visible(f"{name:18}{value:,}" if isinstance(value, int) else f"{name:18}{value}"))  # noqa: T201
    return 1 if expected.failed else 0
