"""Tiles shared out among the cores: on a CPU each takes the next one, instead of every operator being split."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor


def work_through(items: Iterator[Any], begin: Callable[[], Callable[[Any], None]], most: int) -> None:
    """Call what `begin` gives each of at most so many workers with the next item, until none is left."""
    cores = torch.get_num_threads()
    workers, shared = min(cores, most), _Items(items)
    work = partial(_work, shared, begin, torch.is_inference_mode_enabled())
    if workers == 1:
        work()
        return
    try:
        working = [_pool(workers, cores, os.getpid()).submit(work) for _ in range(workers)]
        for worker in working:
            worker.result()
    finally:
        shared.close()
        torch.set_num_threads(cores)  # a worker's own number is what later threads would begin with


class Room:
    """Memory that a worker uses again from tile to tile: fresh memory costs more than the arithmetic."""

    def __init__(self) -> None:
        self._numbers = torch.empty(0)

    def of(self, shape: Sequence[int], device: torch.device) -> Tensor:
        size = math.prod(shape)
        if self._numbers.numel() < size:
            self._numbers = torch.empty(size, device=device)
        return self._numbers[:size].view(*shape)


def _work(items: _Items, begin: Callable[[], Callable[[Any], None]], inference: bool) -> None:
    """Take item after item, until none is left."""
    try:
        with torch.inference_mode(inference), torch.no_grad():  # threads inherit neither
            take = begin()
            for item in items:
                take(item)
    except BaseException:
        items.close()
        raise


class _Items:
    """An iterator that several threads take from."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source, self._lock, self._closed = source, threading.Lock(), False

    def __iter__(self) -> _Items:
        return self

    def __next__(self) -> Any:
        with self._lock:
            if self._closed:
                raise StopIteration
            return next(self._source)

    def close(self) -> None:
        """No more, for anybody."""
        self._closed = True


@lru_cache(maxsize=1)
def _pool(workers: int, cores: int, process: int) -> ThreadPoolExecutor:
    """Threads that stay from layer to layer, each with its share of the cores; a forked process makes its own."""
    return ThreadPoolExecutor(workers, "tiles", torch.set_num_threads, (cores // workers,))
