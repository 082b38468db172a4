"""The same run on Ray Data: read, `map_batches` over actors that each hold a model, write.

One task reads the corpus and cuts it into shards, one row each; an actor measures a shard with the code of one machine
and writes its files; this process commits what comes back. A shard's files have names and content that depend on the
shard alone, so an actor that dies is replaced and its shard is made again, and the journal takes each shard once.

Corpus and output folder must be where every node sees them.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnscope import errors
from attnscope.batch.corpus import STDIN, Corpus, CorpusFile
from attnscope.batch.items import read_items
from attnscope.batch.job import Job
from attnscope.batch.journal import Journal, Record
from attnscope.batch.painters import painting
from attnscope.batch.shards import Shard, item_cost, unfinished
from attnscope.batch.worker import Tally, Worker, run_shards
from attnscope.batch.writers import ShardWriter
from attnscope.errors import AttnscopeError, UsageError
from attnscope.model.geometry import geometry_of
from attnscope.model.loading import load_config

CONNECT_SECONDS = 5.0
PAINTERS = 1  # processes an actor draws in


@dataclass(frozen=True)
class Cluster:
    """Where and how widely: a Ray address, and its actors.

    address: `local` starts a cluster here, `auto` finds one; empty is Ray's own default, which is RAY_ADDRESS, a
    cluster that runs here, or a new one.
    """

    address: str = ""
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
        self.pool = painting(PAINTERS if job.output.pictures else 0).__enter__()  # for as long as the actor lives
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
            run_shards(
                self.worker, [shard], lambda one: ShardWriter(self.folder, one, self.output, self.pool), records.append
            )
        except (AttnscopeError, OSError) as error:
            return Trouble.of(error)
        return records[0]


def run_on_ray(
    job: Job,
    reading: Corpus,
    sources: Sequence[CorpusFile],
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
    ray = started(cluster)
    tally, whole_before = Tally(), -1
    while len(journal.records) > whole_before:
        whole_before = len(journal.records)
        try:
            rows = _dataset(ray, job, reading, sources, folder, journal, cluster).iter_rows()
            _commit(rows, journal, tally, stop, note)
            return tally
        except ray.exceptions.RayError as error:  # more died at once than Ray itself replaces: what is left, once more
            last = error
    why = (str(last).strip().splitlines() or [type(last).__name__])[-1]
    raise AttnscopeError(f"the Ray cluster fails: {why}", "see that its nodes are well; the same command goes on")


def _commit(
    rows: Iterable[Mapping[str, Any]],
    journal: Journal,
    tally: Tally,
    stop: Callable[[], bool],
    note: Callable[[Tally], None],
) -> None:
    for row in rows:
        record = pickle.loads(row["record"])
        if isinstance(record, Trouble):
            raise record.error()
        if record.first not in journal.records:
            journal.append(record)
            _add(tally, record)
            note(tally)
        if stop():
            tally.stopped = True
            return


def started(cluster: Cluster) -> Any:
    """Ray, connected to the cluster. Raises UsageError where it is not installed or there is no cluster."""
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # its C++ side else writes to stderr what it then mends
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise UsageError("Ray is not installed", "pip install 'attnscope[ray]'") from error
    address = cluster.address or os.environ.get("RAY_ADDRESS")
    missing = UsageError(f"there is no Ray cluster at {address}", "start one, or give --ray local")
    if not _answers(address):
        raise missing
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with _hushed():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
    except ConnectionError as error:
        raise missing from error
    except (ImportError, RuntimeError, ValueError) as error:  # no ray[client], or another version of Ray or Python
        why = str(error).strip().partition("\n")[0]
        raise UsageError(f"Ray does not take {address or 'the cluster it finds'}: {why}", "see --help") from error
    finally:
        _give_back(handler)
    ray.data.DataContext.get_current().enable_progress_bars = False
    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return ray


def _answers(address: str | None) -> bool:
    """Whether anything listens at HOST:PORT; Ray itself waits there for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return True
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError):
        return False
    return True


@contextmanager
def _hushed() -> Iterator[None]:
    """Without stderr: Ray's C++ side says there that it was told to be quiet."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _give_back(handler: Any) -> None:
    """Ray takes SIGTERM for itself; the run is to end after the batch at hand."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _dataset(
    ray: Any,
    job: Job,
    reading: Corpus,
    sources: Sequence[CorpusFile],
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


def _corpus_source(job: Job, reading: Corpus, sources: Sequence[CorpusFile], journal: Journal) -> Any:
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
