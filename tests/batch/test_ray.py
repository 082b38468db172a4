"""The same run on Ray: the same files as on one machine, also when workers and nodes die."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from attnscope.corpus import run as cluster
from attnscope.corpus.folder import DatasetOutput, Job, Journal, Record, digest
from attnscope.corpus.items import Item
from attnscope.corpus.pipeline import Run
from attnscope.corpus.records import Corpus
from attnscope.corpus.run import Cluster, _waits_for, check_room, run_folder, started, waiting_said
from attnscope.corpus.tables import write_summary
from attnscope.errors import AttnscopeError, InputError, UsageError
from attnscope.export.drawing import Pictures
from attnscope.model.options import LoadOptions
from attnscope.observe.request import Request
from helpers.corpora import content, jsonl, rows, some_texts
from helpers.forks import HANGS, until

ONE_THREAD = {"env_vars": {"OMP_NUM_THREADS": "1"}}


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Ray itself; none is left behind."""
    ray = pytest.importorskip("ray")
    yield ray
    ray.shutdown()


@pytest.fixture
def stopped(ray: Any) -> Iterator[None]:
    """No Ray before and after."""
    ray.shutdown()
    yield
    ray.shutdown()


class Shards:
    """Stands for a Ray dataset: what Ray does on its nodes is done here, and what travels is pickled."""

    def __init__(self, blocks: Callable[[], Iterator[pa.Table]], options: dict[str, Any]) -> None:
        self.blocks, self.options = blocks, options

    def map_batches(self, actor: type, **how: Any) -> "Shards":
        made = pickle.loads(pickle.dumps(how.pop("fn_constructor_kwargs")))
        return Shards(lambda: map(actor(**made), self._batches(how["batch_size"])), self.options | how)

    def _batches(self, size: int) -> Iterator[dict[str, list[bytes]]]:
        for block in self.blocks():
            assert len(block) == size
            yield pickle.loads(pickle.dumps(block.to_pydict()))

    def iter_rows(self) -> Iterator[dict[str, bytes]]:
        for batch in self.blocks():
            assert self.options["num_cpus"] == 0
            yield from ({"record": one} for one in batch["record"])


class RayError(Exception):
    """Stands for every error of Ray's own."""


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module in place of Ray, with a cluster of two cores in this process."""
    parts = {name: ModuleType(name) for name in ("ray", "ray.data", "ray.data.block", "ray.data.datasource")}
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, name, part)
    ray, data = parts["ray"], parts["ray.data"]
    context = SimpleNamespace()
    ray.data, ray.init = data, lambda **options: None
    ray.exceptions = SimpleNamespace(RayError=RayError)
    ray.cluster_resources = lambda: {"CPU": 2.0}
    data.DataContext = SimpleNamespace(get_current=lambda: context)
    data.Datasource = object
    data.ActorPoolStrategy = lambda size: ("actors", size)
    data.read_datasource = lambda source, **how: Shards(source.get_read_tasks(1)[0], how)
    parts["ray.data.block"].BlockMetadata = lambda *sizes: None
    parts["ray.data.datasource"].ReadTask = lambda blocks, metadata: blocks
    return ray


@pytest.fixture
def local(ray: Any) -> None:
    """A cluster of two cores, both free: the one of the test before where there is one."""
    if not ray.is_initialized():
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=ONE_THREAD)
    until(lambda: ray.available_resources().get("CPU") == 2)


def job_of(model: Path, shard_bytes: int) -> Job:
    request = Request(relations=True, define={"place": "bank", "end": "last"}, spans=("place", "end"))
    output = DatasetOutput(spans=("place", "end"))
    return Job(LoadOptions(model=str(model), device="cpu"), request, output=output, shard_bytes=shard_bytes)


@pytest.mark.parametrize(
    ("cluster", "texts", "longest"),
    [pytest.param(*one, marks=pytest.mark.e2e) for one in (("pretended", 4, 8), ("local", 40, 30))],
    ids=["pretended", "ray"],
)
def test_one_node_writes_the_same_files(
    tmp_path: Path, tiny_folder: Path, cluster: str, texts: int, longest: int, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(cluster)
    corpus = jsonl(tmp_path / "c.jsonl", [*some_texts(texts - 1, longest=longest), "the fox", ""])
    job, reading = job_of(tiny_folder, 33 * texts * longest), Corpus((str(corpus),))
    run_folder(job, reading, tmp_path / "here", {})
    journal, tally = run_folder(job, reading, tmp_path / "ray", {}, cluster=Cluster(actors=1))
    assert (tally.texts, tally.failed) == (texts, 1)
    assert len(journal.records) > 3
    assert same(tmp_path / "here", tmp_path / "ray")
    assert {path.parent.name for path in (tmp_path / "ray").glob("*/part-*")} == {*job.output.names}
    assert tally.lacking["place"] == sum(record.lacking.get("place", 0) for record in journal.records.values()) > 0
    here, there = (write_summary(tmp_path / name, job.output).read_bytes() for name in ("here", "ray"))
    assert here == there


def test_a_pretended_node_does_nothing_twice_and_a_strict_run_ends_at_a_bad_item(
    tmp_path: Path, tiny_folder: Path, pretended: Any
) -> None:
    corpus = jsonl(tmp_path / "c.jsonl", [*some_texts(2, longest=5), ""])
    job, reading = job_of(tiny_folder, 4_000), Corpus((str(corpus),))
    run_folder(job, reading, tmp_path / "ray", {}, cluster=Cluster())
    before = content(tmp_path / "ray")
    assert run_folder(job, reading, tmp_path / "ray", {}, cluster=Cluster())[1].texts == 0
    assert content(tmp_path / "ray") == before
    with pytest.raises(InputError, match="line 3: empty"):
        run_folder(replace(job, strict=True), reading, tmp_path / "strict", {}, cluster=Cluster())
    with pytest.raises(UsageError, match=r"3 actors .* num_actors=2"):
        run_folder(job, reading, tmp_path / "more", {}, cluster=Cluster(actors=3))


@pytest.mark.slow
def test_a_finished_run_does_nothing_twice_and_a_strict_one_ends_at_a_bad_item(
    tmp_path: Path, tiny_folder: Path, local: None
) -> None:
    corpus = jsonl(tmp_path / "c.jsonl", [*some_texts(40), ""])
    job, reading = job_of(tiny_folder, 40_000), Corpus((str(corpus),))
    run_folder(job, reading, tmp_path / "ray", {})
    assert run_folder(job, reading, tmp_path / "ray", {}, cluster=Cluster(actors=1))[1].texts == 0
    with pytest.raises(InputError, match="line 41: empty"):
        run_folder(replace(job, strict=True), reading, tmp_path / "strict", {}, cluster=Cluster(actors=1))


@pytest.mark.slow
def test_every_core_may_have_an_actor_and_no_more(tmp_path: Path, tiny_folder: Path, ray: Any, local: None) -> None:
    corpus = jsonl(tmp_path / "c.jsonl", some_texts(30))
    job, reading = job_of(tiny_folder, 40_000), Corpus((str(corpus),))
    run_folder(job, reading, tmp_path / "here", {})
    assert _waits_for(ray, Cluster(actors=2)).startswith("0 of 2 actors have their place, others wait for room")
    journal, tally = run_folder(job, reading, tmp_path / "ray", {}, cluster=Cluster(actors=2))
    assert (tally.texts, len(journal.records) > 2) == (30, True)
    assert same(tmp_path / "here", tmp_path / "ray")
    with pytest.raises(UsageError, match=r"3 actors .* num_actors=2"):
        run_folder(job, reading, tmp_path / "more", {}, cluster=Cluster(actors=3))


@pytest.mark.parametrize(
    ("cluster", "there", "says"),
    [
        (Cluster(actors=4), {"CPU": 4.0}, None),
        (Cluster(actors=5), {"CPU": 4.0}, "5 actors take 5 CPUs, and the cluster has 4; give num_actors=4"),
        (Cluster(actors=4, gpus_per_actor=0.5), {"CPU": 1.0, "GPU": 2.0}, None),
        (Cluster(actors=3, gpus_per_actor=1), {"CPU": 8.0, "GPU": 2.0}, "3 GPUs, and the cluster has 2"),
        (Cluster(actors=1, gpus_per_actor=1), {"CPU": 8.0}, "1 actors take 1 GPUs, and the cluster has 0; give fewer"),
    ],
)
def test_more_than_a_cluster_has_is_refused(cluster: Cluster, there: dict[str, float], says: str | None) -> None:
    if says is None:
        check_room(cluster, there)
        return
    with pytest.raises(UsageError, match=says):
        check_room(cluster, there)


def test_a_run_that_does_nothing_says_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("attnscope.corpus.run.PATIENCE_SECONDS", 0.05)
    done: list[int] = []

    def said() -> int:
        return len(caplog.records)

    with waiting_said(lambda: len(done), lambda: "2 actors wait for room"):
        until(lambda: said() >= 2)
    assert "no shard was finished for 0 s: 2 actors wait for room" in caplog.text
    caplog.clear()
    looked: list[int] = []
    with waiting_said(lambda: looked.append(0) or len(looked), lambda: "nothing"):
        until(lambda: len(looked) >= 5)
    assert said() == 0


def drawing_job(model: Path, shard_bytes: int) -> Job:
    """A job that draws every text, as `--figures overview,heads --select 1.*` makes it."""
    pictures = Pictures(("overview", "heads"))
    job = job_of(model, shard_bytes)
    output = replace(job.output, tables=("heads",), pictures=pictures)
    return replace(job, request=replace(job.request, relations=False, maps="all"), output=output, select="1.*")


def same(here: Path, there: Path) -> bool:
    """Whether two folders hold the same files, the journals the same shards in any order."""
    ours, theirs = content(here), content(there)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name] and name != "journal.jsonl"] == []
    shards, others = (sorted(one["journal.jsonl"].splitlines()) for one in (ours, theirs))
    return shards == others


@pytest.mark.slow
def test_figures_are_drawn_by_the_actors(tmp_path: Path, tiny_folder: Path, local: None) -> None:
    corpus = jsonl(tmp_path / "c.jsonl", [*some_texts(3, longest=4), ""])
    job, reading = drawing_job(tiny_folder, 2_000), Corpus((str(corpus),))
    run_folder(job, reading, tmp_path / "here", {}, workers=1)
    assert len(list((tmp_path / "here" / "figures").rglob("*.png"))) == 3 * (1 + 4)
    run_folder(job, reading, tmp_path / "ray", {}, cluster=Cluster())
    assert same(tmp_path / "here", tmp_path / "ray")


@pytest.mark.slow
def test_an_actor_is_killed_while_it_draws(tmp_path: Path, tiny_folder: Path, stopped: None, local: None) -> None:
    corpus = jsonl(tmp_path / "c.jsonl", some_texts(40, longest=4))
    job, reading = drawing_job(tiny_folder, 6_000), Corpus((str(corpus),))
    run_folder(job, reading, tmp_path / "here", {}, workers=1)
    killed: list[int] = []
    painters: list[int] = []

    def disturb() -> None:
        partial = tmp_path / "ray" / ".partial"
        dead: set[Path] = set()  # attempts of actors that were killed; they lie there until the run ends
        for _ in range(2):
            while not any(path for path in partial.glob("*/figures/*/*.png") if path.parents[2] not in dead):
                time.sleep(0.01)
            [actor] = set(children("ray::MapWorker")) - {*killed}
            painters.extend(one for one in children("spawn_main") if actor in ancestors(one))
            os.kill(actor, signal.SIGKILL)
            killed.append(actor)
            dead = set(partial.iterdir())

    trouble = threading.Thread(target=disturb, daemon=True)
    trouble.start()
    run_folder(job, reading, tmp_path / "ray", {}, cluster=Cluster())
    trouble.join(HANGS)
    assert len(killed) == 2
    assert same(tmp_path / "here", tmp_path / "ray")
    assert len(painters) >= 2
    until(lambda: not any(Path(f"/proc/{one}").exists() for one in painters))  # painters end with their actor


def test_what_ray_cannot_mend_is_begun_again_and_given_up_without_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pretended: Any
) -> None:

    texts = [Item(n, "f", n + 1, str(n), "a") for n in range(3)]
    done = [Record(n, 1, 1, 1, digest([texts[n]])) for n in range(3)]
    runs: list[list[Record]] = [done[:1], done[:2], [], [], done]

    class Rows:
        def iter_rows(self) -> Iterator[dict[str, bytes]]:
            for record in runs.pop(0):
                yield {"record": pickle.dumps(cluster.Reply(record))}
            raise RayError

    monkeypatch.setattr(cluster, "_dataset", lambda *arguments: Rows())
    journal = Journal(tmp_path)
    with pytest.raises(AttnscopeError, match=r"the Ray cluster fails: .*; check its nodes"):
        cluster.run_on_ray(Run(Job(), Corpus(()), [], tmp_path, journal), Cluster())
    assert list(journal.records) == [0, 1]  # once each
    assert len(runs) == 2  # the third attempt was the first without progress


def test_a_cluster_that_is_not_there_is_said_at_once(pretended: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UsageError, match=f"there is no Ray cluster at {address}; start one"):
            started(Cluster(address))


def test_what_ray_refuses_is_said(monkeypatch: pytest.MonkeyPatch, pretended: Any) -> None:
    handler = signal.getsignal(signal.SIGTERM)

    def init(**options: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Ray's own does
        raise RuntimeError("Version mismatch: the cluster was started with\nRay: 2.9")

    monkeypatch.setattr(pretended, "init", init)
    with pytest.raises(
        UsageError, match="Ray does not take auto: Version mismatch: the cluster was started with; check "
    ):
        started(Cluster("auto"))
    assert signal.getsignal(signal.SIGTERM) == handler


def test_a_cluster_does_not_read_standard_input(tmp_path: Path, tiny_folder: Path) -> None:
    with pytest.raises(UsageError, match="cannot read standard input"):
        run_folder(job_of(tiny_folder, 1), Corpus(("-",)), tmp_path / "out", {}, cluster=Cluster())


def children(name: str) -> list[int]:
    """The processes below this one whose title holds the name: another run on this machine has workers too."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                title = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if name.encode() in title and os.getpid() in ancestors(int(folder.name)):
                found.append(int(folder.name))
    return found


def ancestors(process: int) -> Iterator[int]:
    """The parent's process id, its parent's, and so on."""
    while process > 1:
        try:
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return
        yield process


@pytest.mark.slow
def test_a_worker_and_then_a_node_are_killed_and_nothing_is_lost_or_doubled(
    tmp_path: Path, tiny_folder: Path, ray: Any, stopped: None
) -> None:
    from ray.cluster_utils import Cluster as Nodes

    corpus = jsonl(tmp_path / "c.jsonl", some_texts(1000))
    job, reading = job_of(tiny_folder, 200_000), Corpus((str(corpus),))
    run_folder(job, reading, tmp_path / "here", {})
    nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    second = nodes.add_node(num_cpus=2)
    ray.init(address=nodes.address, log_to_driver=False, runtime_env=ONE_THREAD)
    done: list[str] = []

    def disturb() -> None:
        journal = tmp_path / "ray" / "journal.jsonl"
        for wanted, what in ((2, "worker"), (6, "node")):
            while not journal.exists() or len(journal.read_bytes().splitlines()) < wanted:
                time.sleep(0.05)
            if what == "worker":
                while not (busy := children("ray::MapWorker")):
                    time.sleep(0.05)
                os.kill(busy[0], signal.SIGKILL)
            else:
                nodes.remove_node(second, allow_graceful=False)
            done.append(what)

    trouble = threading.Thread(target=disturb, daemon=True)
    trouble.start()
    try:
        _, tally = run_folder(job, reading, tmp_path / "ray", {}, cluster=Cluster("auto", actors=2))
    finally:
        trouble.join(HANGS)
        ray.shutdown()
        nodes.shutdown()
    assert done == ["worker", "node"]
    assert tally.texts == 1000
    assert same(tmp_path / "here", tmp_path / "ray")
    assert [row["item"] for row in rows(tmp_path / "ray", "texts")] == list(range(1000))


@pytest.mark.slow
def test_sigterm_ends_a_run_on_ray_and_the_same_command_goes_on(tmp_path: Path, tiny_folder: Path, ray: Any) -> None:
    corpus, out = jsonl(tmp_path / "c.jsonl", some_texts(3000, longest=60)), tmp_path / "out"
    command = [sys.executable, "-m", "attnscope", "batch", str(corpus), "--model", str(tiny_folder), "--out", str(out)]
    command += ["--ray", "local", "--set", "shard_size=1", "--device", "cpu"]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | ONE_THREAD["env_vars"])
    while not (out / "journal.jsonl").exists() or (out / "journal.jsonl").stat().st_size == 0:
        assert run.poll() is None
        time.sleep(0.05)
    run.terminate()
    said = run.communicate(timeout=HANGS)[1].splitlines()
    assert run.returncode == 143, said
    assert said[0].startswith("stopping after this batch")
    assert "resumes" in said[-1]
    assert len(said) == 3  # nothing of Ray's own
    assert not (out / ".partial").exists()
    assert 0 < len(rows(out, "texts")) < 3000
    again = subprocess.run([*command, "-q"], stderr=subprocess.PIPE, env=os.environ | ONE_THREAD["env_vars"])
    assert (again.returncode, again.stderr) == (0, b"")
    assert [row["item"] for row in rows(out, "texts")] == list(range(3000))
