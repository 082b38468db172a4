"""Several batches at once on the cores of one machine: threads that share a model's weights.

On a CPU the operators of a small model are too short to be split over cores, so each batch runs on one core and the
batches run side by side. A batch's numbers do not depend on which replica runs it.
"""

from __future__ import annotations

import copy
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch

from attnscope.model.loaded import LoadedModel
from attnscope.utils.signals import ProcessWide

MOST_REPLICAS = 4
T = TypeVar("T")
G = TypeVar("G")


class Replicas:
    """A loaded model and copies of it that share its weights, as many as there are cores for.

    >>> Replicas(loaded).each(lambda loaded, batch: observe(loaded, batch, request), batches, stop)
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.threads = min(MOST_REPLICAS, _cores()) if loaded.device == "cpu" else 1
        self._free: queue.Queue[LoadedModel] = queue.Queue()
        self._pool: ThreadPoolExecutor | None = None

    def each(
        self, work: Callable[[LoadedModel, G], T], groups: Sequence[G], stop: Callable[[], bool]
    ) -> list[T] | None:
        """`work` on every group, results in the groups' order; None where `stop` answers so before the last began."""
        # One at a time there is nothing to share, and no copy of the model to make.
        if len(groups) < 2 or self.threads < 2:
            done = []
            for group in groups:
                if stop():
                    return None
                done.append(work(self.loaded, group))
            return done
        pool = self._pool = self._pool or self._made()

        def on_free_replica(group: G) -> T | None:
            if stop():
                return None
            loaded = self._free.get()
            try:
                return work(loaded, group)
            finally:
                self._free.put(loaded)

        with _one_core_each(self.threads):
            futures = [pool.submit(on_free_replica, group) for group in groups]
            try:
                results = [future.result() for future in futures]
            finally:  # where one fails, none continues after the caller has returned
                for future in futures:
                    future.cancel()
                wait(futures)
        left = [result for result in results if result is not None]
        return left if len(left) == len(groups) else None

    def _made(self) -> ThreadPoolExecutor:
        """The replicas, and the threads that run them until no one holds them."""
        self._free.put(self.loaded)
        for _ in range(self.threads - 1):
            shared = {id(weights): weights for weights in self.loaded.model.parameters()}
            self._free.put(replace(self.loaded, model=copy.deepcopy(self.loaded.model, shared)))
        return ThreadPoolExecutor(self.threads, "replica")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@ProcessWide
@contextmanager
def _one_core_each(threads: int) -> Iterator[None]:
    """Share the cores between the replicas instead of giving all of them to each operator."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before // threads))
    try:
        yield
    finally:
        torch.set_num_threads(before)
