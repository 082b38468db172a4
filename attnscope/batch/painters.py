"""Processes that draw beside the model."""

from __future__ import annotations

from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext


def painting(workers: int) -> AbstractContextManager[Executor | None]:
    """Processes for figures: fresh ones, not forks of a process that holds torch's threads."""
    if not workers:
        return nullcontext()
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _end_with_parent)


def _end_with_parent() -> None:
    """A painter whose run was killed would wait for work for ever, and draw into a folder that is no longer its own."""
    import multiprocessing
    import os
    import threading

    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
