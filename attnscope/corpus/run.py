"""A run over a corpus into a folder: what is done already is skipped, what is not is done, and nothing twice.

`estimate` tells what a run would do, and about what it would take, without writing anything. `run_on_ray` is the same
run on Ray Data: one task reads the corpus and cuts it into shards, one row each; an actor holds a model, measures a
shard with the code of one machine and writes its files; this process commits what comes back. A shard's files have
names and content that depend on the shard alone, so an actor that dies is replaced and its shard is made again, and the
journal takes each shard once. Corpus and output folder must be where every node sees them.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from attnscope.corpus.folder import (
    ALL_TEXT,
    INTEGER_IDS,
    TEXT_IDS,
    DatasetOutput,
    Job,
    Journal,
    Record,
    Shard,
    begun,
    begun_sources,
    item_cost,
    opened,
    say_who_answered,
    shards,
    unfinished,
)
from attnscope.corpus.items import have_integer_ids, read_items, with_ids
from attnscope.corpus.pipeline import Run, Tally, run_shards
from attnscope.corpus.records import STDIN, Corpus, CorpusFile, find_files
from attnscope.corpus.rows import ShardWriter
from attnscope.corpus.worker import Window, Worker
from attnscope.errors import AttnscopeError, UsageError
from attnscope.figures.drawing_process import drawing_pool
from attnscope.model.geometry import geometry_of
from attnscope.model.loading import load_config
from attnscope.utils.isolation import without_stderr
from attnscope.utils.signals import given_back

if TYPE_CHECKING:
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
    output = begun_output(folder, job.output, corpus, files)
    job = replace(job, output=output)
    with opened(folder, options, {"ids": output.ids}) as journal:
        if cluster is not None:
            tally = run_on_ray(Run(job, corpus, files, folder, journal, stop, note), cluster)
        else:
            worker = Worker(job, loaded)
            cost = item_cost(job, worker.loaded.geometry)
            items = with_ids(read_items(corpus, files), output.ids == INTEGER_IDS)
            pending = unfinished(items, cost, job.shard_bytes, journal.records)
            with drawing_pool(workers) as pool:
                write = partial(ShardWriter, folder, output=worker.output, pool=pool)
                tally = run_shards(worker, pending, write, journal.append, stop, note)
        # Shards are committed as they end, on a cluster in any order: what speaks of all of them is written last.
        journal.rewrite_failures()
        say_who_answered(folder, journal.records.values())
        return journal, tally


def begun_output(folder: Path, output: DatasetOutput, corpus: Corpus, files: Sequence[CorpusFile]) -> DatasetOutput:
    """The output in the layout of a folder that is resumed. Of a new one the corpus is read for its ids alone.

    That ends at the first that is no number. Standard input can be read once: its ids are text.
    """
    before = begun(folder)
    if before is None:
        once = any(file.path == STDIN for file in files)
        return replace(
            output, ids=INTEGER_IDS if not once and have_integer_ids(read_items(corpus, files)) else TEXT_IDS
        )
    if before["schema"] == ALL_TEXT:
        return replace(output, layout=ALL_TEXT, keep_text=False, ids=TEXT_IDS)
    return replace(output, ids=str(before.get("ids", TEXT_IDS)))


SAMPLE_TEXTS = 8


@dataclass
class Estimate:
    """What would be read and written; `output_bytes` and `seconds` are rough. failed: items that give no text."""

    model: str
    device: str
    dtype: str
    batch_tokens: int
    files: int
    items: int = 0
    texts: int = 0
    tokens: int = 0
    failed: int = 0
    shards: int = 0
    output_bytes: float = 0.0
    seconds: float = 0.0


def estimate(job: Job, corpus: Corpus) -> Estimate:
    """Read and tokenise the whole corpus, and measure a few texts of it; raises as `run_folder` does.

    >>> estimate(Job(), Corpus(("corpus.jsonl",))).seconds
    """
    files = find_files(corpus)
    worker = Worker(job)
    loaded = worker.loaded
    cost = item_cost(job, loaded.geometry)
    result = Estimate(loaded.name, loaded.device, loaded.dtype, worker.limit, len(files))
    sample: Window | None = None
    for shard in shards(read_items(corpus, files), cost, job.shard_bytes, {}):
        result.shards += 1
        result.output_bytes += sum(map(cost, shard.items))
        for window in worker.windows(shard):
            result.items += window.items
            result.texts += len(window.texts)
            result.failed += len(window.failures)
            result.tokens += sum(len(text.prompt) for text in window.texts)
            sample = sample or (replace(window, texts=window.texts[:SAMPLE_TEXTS]) if window.texts else None)
    if sample:
        worker.measure(replace(sample, texts=sample.texts[:1]))  # the first pass takes longer
        start = time.perf_counter()
        worker.measure(sample)
        seconds = time.perf_counter() - start
        result.seconds = result.tokens * seconds / sum(len(text.prompt) for text in sample.texts)
    return result


CONNECT_SECONDS = 5.0
PATIENCE_SECONDS = 60.0
DRAWING_PROCESSES = 1  # of each actor
LOGGER = logging.getLogger("attnscope")
T = TypeVar("T")


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
class Reply(Generic[T]):
    """What a node made, or the error that a person can act on: Ray would wrap that in its own."""

    made: T | None = None
    error: Exception | None = None

    @classmethod
    def of(cls, make: Callable[..., T], *arguments: Any) -> Reply[T]:
        """What `make` returns or raises."""
        try:
            return cls(make(*arguments))
        except (AttnscopeError, OSError) as error:
            return cls(error=error)

    def get(self) -> T:
        """What was made; raises the error where there is one."""
        if self.error is not None:
            raise self.error
        assert self.made is not None
        return self.made


class ShardActor:
    """Holds a model; measures the shards it is sent, and writes them."""

    def __init__(self, job: Job, folder: str) -> None:
        self.folder = Path(folder)
        workers = DRAWING_PROCESSES if job.output.pictures else 0
        self.pool = drawing_pool(workers).__enter__()  # for as long as the actor lives
        self.worker = Reply.of(Worker, job)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[bytes]]:
        def measure(packed: bytes) -> Record:
            shard: Shard = pickle.loads(packed).get()
            worker, records = self.worker.get(), list[Record]()
            write = partial(ShardWriter, self.folder, output=worker.output, pool=self.pool)
            run_shards(worker, [shard], write, records.append)
            return records[0]

        return {"record": [pickle.dumps(Reply.of(measure, packed)) for packed in batch["shard"]]}


def run_on_ray(run: Run, cluster: Cluster) -> Tally:
    """Measure the corpus on a cluster; every record is committed to the journal once.

    Raises UsageError without Ray, and for what a cluster cannot read.
    """
    if any(file.path == STDIN for file in run.files):
        raise UsageError("a cluster cannot read standard input", "write it to a file that every node sees")
    ray = started(cluster)
    check_room(cluster, ray.cluster_resources())
    tally = Tally()
    while True:
        before = len(run.journal.records)
        try:
            with waiting_said(lambda: len(run.journal.records), lambda: _waits_for(ray, cluster)):
                _commit(_dataset(ray, run, cluster).iter_rows(), run, tally)
            return tally
        except ray.exceptions.RayError as error:  # more died at once than Ray itself replaces: what is left, once more
            if len(run.journal.records) == before:
                why = (str(error).strip().splitlines() or [type(error).__name__])[-1]
                hint = "check its nodes; the same command resumes the run"
                raise AttnscopeError(f"the Ray cluster fails: {why}", hint) from error


def check_room(cluster: Cluster, resources: Mapping[str, float]) -> None:
    """Raise UsageError for more actors than the cluster has cores, or GPUs, for: they would wait for ever."""
    for unit, each in (("CPU", 0.0 if cluster.gpus_per_actor else 1.0), ("GPU", cluster.gpus_per_actor)):
        most = int(resources.get(unit, 0.0) / each) if each else cluster.actors
        if cluster.actors > most:
            raise UsageError(
                f"{cluster.actors} actors take {cluster.actors * each:g} {unit}s, and the cluster has "
                f"{resources.get(unit, 0.0):g}",
                f"give {{num_actors={most}}}" if most else "give fewer GPUs per actor, or another cluster",
            )


@contextmanager
def waiting_said(done: Callable[[], int], waits_for: Callable[[], str]) -> Iterator[None]:
    """While the block runs, warn after every minute in which nothing was done, and say what is waited for."""
    over = threading.Event()

    def watch() -> None:
        before = done()
        while not over.wait(PATIENCE_SECONDS):
            if done() == before:
                LOGGER.warning("no shard was finished for %.0f s: %s", PATIENCE_SECONDS, waits_for())
            before = done()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _waits_for(ray: Any, cluster: Cluster) -> str:
    """What a run on Ray has not got, in words: what its actors take is taken, or it is not."""
    unit, each = ("GPU", cluster.gpus_per_actor) if cluster.gpus_per_actor else ("CPU", 1.0)
    total, free = (resources.get(unit, 0.0) for resources in (ray.cluster_resources(), ray.available_resources()))
    placed = min(cluster.actors, int((total - free) / each))
    doing = "which load the model or measure" if placed == cluster.actors else "others wait for room"
    return f"{placed} of {cluster.actors} actors have their place, {doing}; {free:g} of {total:g} {unit}s are free"


def _commit(rows: Iterable[Mapping[str, Any]], run: Run, tally: Tally) -> None:
    for row in rows:
        run.stop()  # from here on there is something to commit, which a signal lets be done
        record: Record = pickle.loads(row["record"]).get()
        if record.first not in run.journal.records:
            run.journal.append(record)
            tally.add(record)
            run.note(tally)
        if run.stop():
            tally.stopped = True
            return


def started(cluster: Cluster) -> Any:
    """Ray, connected to the cluster. Raises UsageError where it is not installed or there is no cluster."""
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # its C++ side else writes to stderr what it then repairs
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise UsageError("Ray is not installed", "pip install 'attnscope[ray]'") from error
    address = cluster.address or os.environ.get("RAY_ADDRESS")
    missing = UsageError(f"there is no Ray cluster at {address}", "start one, or give {ray=local}")
    if not _answers(address):
        raise missing
    try:
        # Ray installs its own SIGTERM handler, and its C++ side prints its log level on stderr
        with given_back(signal.SIGTERM), without_stderr():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
    except ConnectionError as error:
        raise missing from error
    except (ImportError, RuntimeError, ValueError) as error:  # no ray[client], or another version of Ray or Python
        why = str(error).strip().partition("\n")[0]
        raise UsageError(f"Ray does not take {address or 'the cluster it finds'}: {why}", "check {ray}") from error
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.target_max_block_size = 1  # byte: a shard is a block of its own, without a task that cuts blocks
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


def _dataset(ray: Any, run: Run, cluster: Cluster) -> Any:
    """A row per shard that is left: its record, from an actor. One task streams the corpus, a block per shard."""
    import pyarrow as pa
    from ray.data import Datasource
    from ray.data.block import BlockMetadata
    from ray.data.datasource import ReadTask

    # Only what a node needs may be a part of the closure that is pickled: not the run, which holds locks and files.
    job, corpus, files, records = run.job, run.corpus, run.files, dict(run.journal.records)
    cost = item_cost(job, geometry_of(load_config(job.load), count=False))

    def blocks() -> Iterator[pa.Table]:
        try:
            items = with_ids(read_items(corpus, files), job.output.ids == INTEGER_IDS)
            for shard in unfinished(items, cost, job.shard_bytes, records):
                yield pa.table({"shard": [pickle.dumps(Reply(shard))]})
        except AttnscopeError as error:  # Ray would wrap it in its own
            yield pa.table({"shard": [pickle.dumps(Reply(error=error))]})

    class CorpusSource(Datasource):
        def estimate_inmemory_data_size(self) -> int | None:
            return None

        def get_read_tasks(self, parallelism: int, *limits: Any, **more: Any) -> list[ReadTask]:
            return [ReadTask(blocks, BlockMetadata(None, None, None, None))]

    # The reading takes no core to itself: where every core has its actor, it would wait for one for ever.
    shards = ray.data.read_datasource(CorpusSource(), override_num_blocks=1, num_cpus=0)
    return shards.map_batches(
        ShardActor,
        fn_constructor_kwargs={"job": run.job, "folder": str(run.folder.absolute())},
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=cluster.actors),
        num_gpus=cluster.gpus_per_actor or None,
    )
