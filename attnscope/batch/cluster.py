"""The same run on Ray Data: read, `map_batches` over actors that each hold a model, write.

One task reads the corpus and cuts it into shards, one row each; an actor measures a shard with the code of one machine
and writes its files; this process commits what comes back. A shard's files have names and content that depend on the
shard alone, so an actor that dies is replaced and its shard is made again, and the journal takes each shard once.

Corpus and output folder must be where every node sees them.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnscope import errors
from attnscope.batch.bucketing import Shard
from attnscope.batch.folders import unfinished
from attnscope.batch.journal import Journal, Record
from attnscope.batch.reading import STDIN, Reading, Source, read_items
from attnscope.batch.running import Job, Tally, Worker, item_cost, run_shards
from attnscope.batch.writing import ShardWriter
from attnscope.errors import AttnscopeError, UsageError
from attnscope.geometry import geometry_of
from attnscope.models import load_config

LOCAL = "local"


@dataclass(frozen=True)
class Cluster:
    """Where and how widely: a Ray address (`local` starts one here, `auto` finds one), and its actors."""

    address: str = LOCAL
    actors: int = 1
    gpus_per_actor: float = 0.0


@dataclass(frozen=True)
class Trouble:
    """An error that a person can act on, on its way from a node to the command line: Ray would wrap it in its own."""

    kind: str
    words: tuple[Any, ...]

    @classmethod
    def of(cls, error: AttnscopeError | OSError) -> Trouble:
        """What an error says."""
        if isinstance(error, AttnscopeError):
            return cls(type(error).__name__, (error.message, error.hint))
        return cls("OSError", (error.errno, error.strerror, error.filename))

    def error(self) -> Exception:
        """The error again."""
        if self.kind == "OSError":
            return OSError(*self.words)
        again: Exception = getattr(errors, self.kind, AttnscopeError)(*self.words)
        return again


class ShardActor:
    """Holds a model; measures the shards it is sent, and writes them."""

    def __init__(self, job: Job, folder: str) -> None:
        self.folder = Path(folder)
        self.output = job.output
        try:
            self.worker: Worker | Trouble = Worker(job)
        except AttnscopeError as error:
            self.worker = Trouble.of(error)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[bytes]]:
        return {"record": [pickle.dumps(self._measured(pickle.loads(packed))) for packed in batch["shard"]]}

    def _measured(self, shard: Shard | Trouble) -> Record | Trouble:
        if isinstance(shard, Trouble):
            return shard
        if isinstance(self.worker, Trouble):
            return self.worker
        records: list[Record] = []
        try:
            run_shards(self.worker, [shard], lambda one: ShardWriter(self.folder, one, self.output), records.append)
        except (AttnscopeError, OSError) as error:
            return Trouble.of(error)
        return records[0]


def run_on_ray(
    job: Job,
    reading: Reading,
    sources: Sequence[Source],
    folder: Path,
    journal: Journal,
    cluster: Cluster,
    stop: Callable[[], bool],
    note: Callable[[Tally], None],
) -> Tally:
    """Measure the corpus on a cluster; every record is committed to the journal once.

    Raises UsageError without Ray, and for what a cluster cannot read.
    """
    if any(source.path == STDIN for source in sources):
        raise UsageError("a cluster cannot read standard input", "write it to a file that every node sees")
    if job.output.pictures:
        raise UsageError("figures are drawn on one machine only", "leave --figures or --ray out")
    ray = started(cluster)
    tally = Tally()
    for row in _dataset(ray, job, reading, sources, folder, journal, cluster).iter_rows():
        record = pickle.loads(row["record"])
        if isinstance(record, Trouble):
            raise record.error()
        if record.first not in journal.records:
            journal.append(record)
            _add(tally, record)
            note(tally)
        if stop():
            tally.stopped = True
            break
    return tally


def started(cluster: Cluster) -> Any:
    """Ray, connected to the cluster. Raises UsageError where it is not installed or there is no cluster."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise UsageError("Ray is not installed", "pip install 'attnscope[ray]'") from error
    address = None if cluster.address == LOCAL else cluster.address
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
    except ConnectionError as error:
        raise UsageError(f"there is no Ray cluster at {cluster.address}", "start one, or give --ray local") from error
    ray.data.DataContext.get_current().enable_progress_bars = False
    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return ray


def _dataset(
    ray: Any,
    job: Job,
    reading: Reading,
    sources: Sequence[Source],
    folder: Path,
    journal: Journal,
    cluster: Cluster,
) -> Any:
    source = _corpus_source(job, reading, sources, journal)
    shards = ray.data.read_datasource(source, override_num_blocks=1).repartition(target_num_rows_per_block=1)
    return shards.map_batches(
        ShardActor,
        fn_constructor_kwargs={"job": job, "folder": str(folder.absolute())},
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=cluster.actors),
        num_gpus=cluster.gpus_per_actor or None,
    )


def _corpus_source(job: Job, reading: Reading, sources: Sequence[Source], journal: Journal) -> Any:
    """The corpus as a Ray datasource: one task that streams it, a block a shard."""
    import pyarrow as pa
    from ray.data import Datasource
    from ray.data.block import BlockMetadata
    from ray.data.datasource import ReadTask

    geometry = geometry_of(load_config(job.load), count=False)
    records = dict(journal.records)

    def blocks() -> Iterator[pa.Table]:
        try:
            for shard in unfinished(read_items(reading, sources), item_cost(job, geometry), job.shard_bytes, records):
                yield pa.table({"shard": [pickle.dumps(shard)]})
        except AttnscopeError as error:
            yield pa.table({"shard": [pickle.dumps(Trouble.of(error))]})

    class Corpus(Datasource):
        def estimate_inmemory_data_size(self) -> int | None:
            return None

        def get_read_tasks(self, parallelism: int, *limits: Any, **more: Any) -> list[ReadTask]:
            return [ReadTask(blocks, BlockMetadata(None, None, None, None))]

    return Corpus()


def _add(tally: Tally, record: Record) -> None:
    tally.items += record.items
    tally.texts += record.texts
    tally.tokens += record.tokens
    tally.failed += len(record.failures)
