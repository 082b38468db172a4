"""From the options of `attnscope batch` to what the library takes, and to what an output folder is held to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from attnscope.cli.batch_ray import address
from attnscope.cli.settings import Settings
from attnscope.errors import UsageError

if TYPE_CHECKING:
    from attnscope.batch.cluster import Cluster
    from attnscope.batch.corpus import Corpus
    from attnscope.batch.job import Job

TABLES = ("heads", "relations")
FIGURES = ("overview", "layers", "heads", "metrics")


def check(settings: Settings, given: Mapping[str, Any]) -> None:
    """Refuse what cannot be meant, before anything is loaded."""
    if (settings.out is None) == (given["to_stdout"] is None) and not given["dry_run"]:
        raise UsageError("expected one place to write to", "give --out DIR or --to-stdout jsonl")
    if given["to_stdout"] and (given["figures"] or given["save_weights"] or address(given["ray"]) is not None):
        raise UsageError("--to-stdout prints rows alone", "give --out DIR for figures, weights and --ray")
    if given["spreadsheet"] and given["format"] != "csv":
        raise UsageError("--spreadsheet is about csv", "add --format csv")
    names(given["tables"], TABLES, "--tables")
    names(given["figures"], FIGURES, "--figures")


def make_job(settings: Settings, given: Mapping[str, Any]) -> Job:
    """What a worker needs to know."""
    from attnscope.batch.job import DatasetOutput, Job
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
        output=DatasetOutput(
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
    """The options that change the rows, each spelled one way."""
    values = asdict(settings)
    named = {key: given[key] for key in HELD} | {key: values[key] for key in HELD_SETTINGS}
    named["weights"] = named.pop("save_weights")
    named["top_k"] = str(named["top_k"])
    for key, known in (("tables", TABLES), ("figures", FIGURES)):
        named[key] = ",".join(names(named[key], known, key))
    return {key.replace("_", "-"): value for key, value in named.items()}


def held(settings: Settings, given: Mapping[str, Any], job: Job) -> tuple[dict[str, Any], Job]:
    """What an output folder is held to: the options and the checkpoint; and the job that loads just this one."""
    from attnscope.model.loading import identify

    identity, load = identify(job.load)
    options = fingerprint(settings, given) | {"model": f"{settings.model} ({identity})"}
    return options, replace(job, load=load)


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


def make_reading(settings: Settings, given: Mapping[str, Any]) -> Corpus:
    """How the corpus is read."""
    from attnscope.batch.corpus import Corpus

    return Corpus(
        tuple(given["sources"]),
        given["input_format"],
        given["whole"],
        given["text_field"],
        given["id_field"],
        settings.chat,
    )


def cluster(given: Mapping[str, Any]) -> Cluster | None:
    """Where the run goes when --ray was given."""
    where = address(given["ray"])
    if where is None:
        return None
    from attnscope.batch.cluster import Cluster

    return Cluster(where, given["num_actors"], given["num_gpus_per_actor"])
