"""The same run on Ray: the same files as on one machine, also when workers and nodes die."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnscope.batch.folders import run_folder
from attnscope.batch.reading import Reading
from attnscope.batch.running import Job
from attnscope.errors import InputError, UsageError
from attnscope.models import LoadOptions
from batch.corpora import content, jsonl, rows, some_texts

ray = pytest.importorskip("ray")
from attnscope.batch.cluster import Cluster  # noqa: E402

ONE_THREAD = {"env_vars": {"OMP_NUM_THREADS": "1"}}


@pytest.fixture
def stopped() -> Iterator[None]:
    """Leave no Ray behind."""
    yield
    ray.shutdown()


def job_of(model: Path, shard_bytes: int) -> Job:
    return Job(LoadOptions(model=str(model), device="cpu"), shard_bytes=shard_bytes)


def test_one_node_writes_the_same_files(tmp_path: Path, tiny_folder: Path, stopped: None) -> None:
    corpus = jsonl(tmp_path / "c.jsonl", [*some_texts(40), ""])
    job, reading = job_of(tiny_folder, 40_000), Reading((str(corpus),))
    run_folder(job, reading, tmp_path / "here", {})
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=ONE_THREAD)
    journal, tally = run_folder(job, reading, tmp_path / "ray", {}, cluster=Cluster(actors=1))
    assert (tally.texts, tally.failed) == (40, 1)
    assert len(journal.records) > 3
    here, there = content(tmp_path / "here"), content(tmp_path / "ray")
    assert here.keys() == there.keys()
    assert [name for name in here if here[name] != there[name] and name != "journal.jsonl"] == []
    again = run_folder(job, reading, tmp_path / "ray", {}, cluster=Cluster(actors=1))[1]
    assert again.texts == 0  # nothing twice
    with pytest.raises(InputError, match="line 41: empty"):
        run_folder(replace(job, strict=True), reading, tmp_path / "strict", {}, cluster=Cluster(actors=1))


def test_a_cluster_does_not_read_standard_input(tmp_path: Path, tiny_folder: Path) -> None:
    with pytest.raises(UsageError, match="cannot read standard input"):
        run_folder(job_of(tiny_folder, 1), Reading(("-",)), tmp_path / "out", {}, cluster=Cluster())


def children(name: str) -> list[int]:
    """Processes whose title holds the name."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                title = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if name.encode() in title:
                found.append(int(folder.name))
    return found


@pytest.mark.slow
def test_a_worker_and_then_a_node_are_killed_and_nothing_is_lost_or_doubled(
    tmp_path: Path, tiny_folder: Path, stopped: None
) -> None:
    from ray.cluster_utils import Cluster as Nodes

    corpus = jsonl(tmp_path / "c.jsonl", some_texts(1000))
    job, reading = job_of(tiny_folder, 200_000), Reading((str(corpus),))
    run_folder(job, reading, tmp_path / "here", {})
    before = set(children("ray::"))
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
                busy = [one for one in children("ray::MapWorker") if one not in before]
                os.kill(busy[0], signal.SIGKILL)
            else:
                nodes.remove_node(second, allow_graceful=False)
            done.append(what)

    trouble = threading.Thread(target=disturb, daemon=True)
    trouble.start()
    try:
        _, tally = run_folder(job, reading, tmp_path / "ray", {}, cluster=Cluster("auto", actors=2))
    finally:
        trouble.join(timeout=10)
        ray.shutdown()
        nodes.shutdown()
    assert done == ["worker", "node"]
    assert tally.texts == 1000
    here: dict[str, Any] = content(tmp_path / "here")
    there = content(tmp_path / "ray")
    assert here.keys() == there.keys()
    assert [name for name in here if here[name] != there[name] and name != "journal.jsonl"] == []
    assert [row["item"] for row in rows(tmp_path / "ray", "texts")] == list(range(1000))
