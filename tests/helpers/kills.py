"""Run a batch again and again, killed at random moments: `python kills.py MODEL CORPUS FOLDER KILLS SEED`.

It is forked from a process that has imported everything, and forks a child for each run, so that a kill costs no start.
FOLDER/whole holds the uninterrupted run, FOLDER/0, FOLDER/1, ... the killed ones; the number of kills that hit a live
child is printed.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from attnscope.corpus.folder import DatasetOutput, Job
from attnscope.corpus.records import Corpus
from attnscope.corpus.run import run_folder
from attnscope.model.options import LoadOptions
from attnscope.observe.request import Request


def one_run(model: str, corpus: str, folder: Path) -> int:
    """Start a run in a forked child; its process id."""
    child = os.fork()
    if child:
        return child
    try:
        torch.set_num_threads(1)
        load = LoadOptions(model=model, device="cpu")
        job = Job(
            load=load, request=Request(relations=True), output=DatasetOutput(format="parquet"), shard_bytes=12_000
        )
        run_folder(job, Corpus((corpus,)), folder, {"model": model})
        os._exit(0)
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        os._exit(9)


def wait_for(child: int, seconds: float) -> None:
    """Until the child has ended, which stays to be waited for, or some seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        time.sleep(0.005)


def main() -> None:
    model, corpus, base = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    wanted, pick = int(sys.argv[4]), random.Random(int(sys.argv[5]))
    start = time.monotonic()
    assert os.waitpid(one_run(model, corpus, base / "whole"), 0)[1] == 0
    full, hits, folder, fresh = time.monotonic() - start, 0, 0, True
    while True:
        start = time.monotonic()
        child = one_run(model, corpus, base / str(folder))
        if hits < wanted:
            wait_for(child, pick.uniform(0.1, 0.9) * full)
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        took = time.monotonic() - start
        if os.WIFSIGNALED(status):
            hits, fresh = hits + 1, False
            continue
        assert status == 0, status
        full, fresh = min(full, took) if fresh else full, True  # the first of all may have waited for what it imports
        if hits >= wanted:
            break
        folder += 1
    sys.stdout.write(str(hits))


if __name__ == "__main__":
    main()
