"""`attnscope batch`: a corpus in, a dataset out."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from attnscope.cli import options, output
from attnscope.cli.settings import Settings, gather
from attnscope.errors import UsageError

if TYPE_CHECKING:
    from attnscope.batch.cluster import Cluster
    from attnscope.batch.reading import Reading
    from attnscope.batch.running import Job, Tally

EXAMPLES = (
    "attnscope batch corpus.jsonl --text-field body --out runs/corpus",
    "zcat corpus.txt.gz | attnscope batch - --tables heads --to-stdout jsonl > heads.jsonl",
)
TABLES = ("heads", "relations")
FIGURES = ("overview", "layers", "heads", "metrics")
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
    ray: Annotated[str | None, typer.Option(help="Run on Ray: an address, auto, or local.", metavar="ADDRESS")] = None,
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
    given = locals()
    settings = gather(context, given)
    check(settings, given)
    return run(settings, given)


def check(settings: Settings, given: Mapping[str, Any]) -> None:
    """Refuse what cannot be meant, before anything is loaded."""
    if (settings.out is None) == (given["to_stdout"] is None) and not given["dry_run"]:
        raise UsageError("expected one place to write to", "give --out DIR or --to-stdout jsonl")
    if given["to_stdout"] and (given["figures"] or given["save_weights"] or given["ray"]):
        raise UsageError("--to-stdout prints rows alone", "give --out DIR for figures, weights and --ray")
    if given["spreadsheet"] and given["format"] != "csv":
        raise UsageError("--spreadsheet is about csv", "add --format csv")
    names(given["tables"], TABLES, "--tables")
    names(given["figures"], FIGURES, "--figures")


def run(settings: Settings, given: Mapping[str, Any]) -> int:
    """Read, measure, write; say how it went."""
    from attnscope.cli import batch_talk
    from attnscope.quiet import quiet_libraries

    quiet_libraries(settings.verbose)
    output.complain_through_talk(settings.quiet)
    reading, job = _reading(settings, given), make_job(settings, given)
    if given["dry_run"]:
        return batch_talk.dry_run(job, reading)
    with batch_talk.Stopper() as stop, batch_talk.Meter(reading, settings.quiet) as meter:
        if given["to_stdout"]:
            tally = _to_stdout(job, reading, stop, meter.note)
            failed = tally.failed
        else:
            tally, failed = _to_folder(settings, given, job, reading, stop, meter.note)
    return batch_talk.ending(tally, failed, stop, settings)


def _to_folder(settings: Settings, given: Mapping[str, Any], job: Job, reading: Reading, stop: Any, note: Any) -> Any:
    from attnscope.batch.folders import run_folder

    assert settings.out is not None
    workers = painters() if job.output.pictures else 0
    held = fingerprint(settings, given)
    journal, tally = run_folder(
        job, reading, settings.out, held, cluster=_cluster(given), workers=workers, stop=stop, note=note
    )
    return tally, sum(1 for _ in journal.failures())


def _to_stdout(job: Job, reading: Reading, stop: Any, note: Any) -> Tally:
    from attnscope.batch.bucketing import shards
    from attnscope.batch.reading import find_sources, read_items
    from attnscope.batch.running import Worker, item_cost, run_shards
    from attnscope.batch.writing import StreamWriter

    sources = find_sources(reading)
    worker = Worker(job)
    pieces = shards(read_items(reading, sources), item_cost(job, worker.loaded.geometry), job.shard_bytes, {})
    stream = sys.stdout.buffer
    return run_shards(
        worker, pieces, lambda shard: StreamWriter(stream, shard, job.output), lambda record: None, stop, note
    )


def make_job(settings: Settings, given: Mapping[str, Any]) -> Job:
    """What a worker needs to know."""
    from attnscope.batch.rows import Output
    from attnscope.batch.running import Job
    from attnscope.observe import Request

    tables, drawn = names(given["tables"], TABLES, "--tables"), names(given["figures"], FIGURES, "--figures")
    pictures = None
    if drawn:
        from attnscope.cli.batch_figures import Pictures

        pictures = Pictures(drawn, settings)
    about = {key: value for key, value in fingerprint(settings, given).items() if key != "sources"}
    return Job(
        load=settings.load_options(),
        request=Request(
            view=settings.view(None),
            relations="relations" in tables,
            top_k=settings.keys_per_query,
            group=settings.group,  # type: ignore[arg-type]
            maps="all" if drawn else None,
            weights=given["save_weights"],
        ),
        select=settings.select,
        output=Output(
            tables=tables,
            format=given["format"],
            min_weight=settings.min_weight,
            weights=given["save_weights"],
            spreadsheet=given["spreadsheet"],
            pictures=pictures,
            paint=pictures.paint if pictures else None,
            about=about,
        ),
        chat=settings.chat,
        truncate=settings.truncate,  # type: ignore[arg-type]
        batch_tokens=given["batch_tokens"],
        shard_bytes=given["shard_size"] * 2**20,
        strict=given["strict"],
    )


HELD = (
    *("sources", "input_format", "whole", "text_field", "id_field", "tables", "format", "save_weights", "figures"),
    *("spreadsheet", "shard_size"),
)
HELD_SETTINGS = (
    *("model", "revision", "dtype", "device", "device_map", "quantize", "chat", "truncate", "select", "top_k"),
    *("min_weight", "group", "by", "image"),
)


def fingerprint(settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
    """What an output folder is held to: everything that changes its rows."""
    values = asdict(settings)
    named = {key: given[key] for key in HELD} | {key: values[key] for key in HELD_SETTINGS}
    named["weights"] = named.pop("save_weights")
    return {key.replace("_", "-"): value for key, value in named.items()}


def names(text: str | None, known: tuple[str, ...], option: str) -> tuple[str, ...]:
    """The parts of a comma-joined option, each known, in the order of `known`."""
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    for part in parts:
        if part not in known:
            raise UsageError(f"{option} knows {', '.join(known)}; {part!r} came", "see --help")
    return tuple(name for name in known if name in parts)


def painters() -> int:
    """Processes that draw, while one core or more runs the model."""
    import os

    return max(1, (os.cpu_count() or 2) // 2)


def _reading(settings: Settings, given: Mapping[str, Any]) -> Reading:
    from attnscope.batch.reading import Reading

    return Reading(
        tuple(given["sources"]),
        given["input_format"],
        given["whole"],
        given["text_field"],
        given["id_field"],
        settings.chat,
    )


def _cluster(given: Mapping[str, Any]) -> Cluster | None:
    if given["ray"] is None:
        return None
    from attnscope.batch.cluster import Cluster

    return Cluster(given["ray"], given["num_actors"], given["num_gpus_per_actor"])
