"""`attnscope batch`: a corpus in, a dataset out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from attnscope.cli import options, output
from attnscope.cli.batch_job import check, cluster, held, make_job, make_reading, painters
from attnscope.cli.batch_ray import BatchCommand
from attnscope.cli.config import BATCH_KEYS
from attnscope.cli.settings import Settings, configured, settings_of

if TYPE_CHECKING:
    from attnscope.batch.corpus import Corpus
    from attnscope.batch.job import Job
    from attnscope.cli.batch_report import GracefulStop, Outcome

__all__ = ["EXAMPLES", "BatchCommand", "batch"]

EXAMPLES = (
    "attnscope batch corpus.jsonl --text-field body --out runs/corpus",
    "zcat corpus.txt.gz | attnscope batch - --tables heads --to-stdout jsonl > heads.jsonl",
)
Sources = Annotated[list[str], typer.Argument(help="Files, folders, globs; - reads stdin.", metavar="SOURCE...")]


def batch(
    context: typer.Context,
    sources: Sources,
    model: options.Model = "demo",
    out: options.Out = None,
    tables: Annotated[str, typer.Option(help="heads, relations; joined by commas.")] = "heads,relations",
    format: Annotated[Literal["parquet", "csv", "jsonl"], typer.Option(help="Format of the tables.")] = "parquet",
    to_stdout: Annotated[Literal["jsonl"] | None, typer.Option(help="Print one JSON object a text instead.")] = None,
    input_format: Annotated[
        Literal["txt", "jsonl", "csv", "parquet"] | None, typer.Option(help="What stdin, or an odd suffix, is.")
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="A .txt file is one text, not a text a line.")] = False,
    text_field: Annotated[str | None, typer.Option(help="Field of the text (default: text).", metavar="NAME")] = None,
    id_field: Annotated[str | None, typer.Option(help="Field of the id (default: id).", metavar="NAME")] = None,
    chat: options.Chat = False,
    truncate: options.Truncate = None,
    select: options.Select = None,
    top_k: options.TopK = "5",
    min_weight: options.MinWeight = None,
    group: options.Group = None,
    by: options.By = None,
    save_weights: Annotated[bool, typer.Option("--weights", help="Matrices too, float16 safetensors.")] = False,
    figures: Annotated[
        str | None, typer.Option(help="overview, layers, heads, metrics; joined by commas.", metavar="KINDS")
    ] = None,
    image: options.Image = "png",
    spreadsheet: Annotated[bool, typer.Option("--spreadsheet", help="Csv cells that no program runs.")] = False,
    batch_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens a batch (default: by memory).")] = None,
    shard_size: Annotated[int, typer.Option(min=1, help="MiB of a shard, about.")] = 64,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first item that fails.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and its cost.")] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            help="Run on Ray: auto, local, HOST:PORT, ray://HOST:PORT; alone, as Ray finds.", metavar="[ADDRESS]"
        ),
    ] = None,
    num_actors: Annotated[int, typer.Option(min=1, help="With --ray: models side by side.")] = 1,
    num_gpus_per_actor: Annotated[float, typer.Option(min=0, help="With --ray: GPUs of each.")] = 0,
    config: options.Config = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    device_map: options.DeviceMap = None,
    revision: options.Revision = None,
    offline: options.Offline = False,
    quantize: options.Quantize = None,
    trust_remote_code: options.RemoteCode = False,
    allow_pickle: options.Pickle = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Many texts: heads and relations of every text of a corpus, as a dataset.

    The same command again goes on where a run ended, however it ended. What cannot be read or measured goes to
    failures.jsonl, and the exit code is 1.
    """
    given = configured(context, locals(), BATCH_KEYS)
    settings = settings_of(given)
    check(settings, given)
    return run(settings, given)


def run(settings: Settings, given: Mapping[str, Any]) -> int:
    """Read, measure, write; say how it went."""
    from attnscope.cli import batch_report
    from attnscope.model.libraries import silence_libraries

    silence_libraries(settings.verbose)
    output.complain_through_talk(settings.quiet)
    reading, job = make_reading(settings, given), make_job(settings, given)
    if given["dry_run"]:
        return batch_report.dry_run(job, reading)
    with batch_report.GracefulStop() as stop, batch_report.RunProgress(reading, settings.quiet) as meter:
        go = _to_stdout if given["to_stdout"] else _to_folder
        outcome = go(settings, given, job, reading, stop, meter.note)
    return batch_report.ending(outcome, reading, stop, settings)


def _to_folder(
    settings: Settings,
    given: Mapping[str, Any],
    job: Job,
    reading: Corpus,
    stop: GracefulStop,
    note: Callable[..., None],
) -> Outcome:
    from attnscope.batch.run import run_folder
    from attnscope.cli.batch_report import Outcome

    assert settings.out is not None
    workers = painters() if job.output.pictures else 0
    options, job = held(settings, given, job)
    journal, tally = run_folder(
        job, reading, settings.out, options, cluster=cluster(given), workers=workers, stop=stop, note=note
    )
    failed = list(journal.failures())
    return Outcome(tally, len(journal.records), len(failed), failed[:1])


def _to_stdout(
    settings: Settings,
    given: Mapping[str, Any],
    job: Job,
    reading: Corpus,
    stop: GracefulStop,
    note: Callable[..., None],
) -> Outcome:
    from attnscope.batch.corpus import find_files
    from attnscope.batch.items import read_items
    from attnscope.batch.pipeline import run_shards
    from attnscope.batch.shards import item_cost, shards
    from attnscope.batch.worker import Worker
    from attnscope.batch.writers import StreamWriter
    from attnscope.cli.batch_report import Outcome

    sources = find_files(reading)
    worker = Worker(job)
    pieces = shards(read_items(reading, sources), item_cost(job, worker.loaded.geometry), job.shard_bytes, {})
    stream = sys.stdout.buffer
    tally = run_shards(
        worker, pieces, lambda shard: StreamWriter(stream, shard, job.output), lambda record: None, stop, note
    )
    return Outcome(tally, tally.items, tally.failed, tally.first_failures)
