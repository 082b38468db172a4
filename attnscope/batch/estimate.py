"""What a run over a corpus would do, and about what it would take, without writing anything."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from attnscope.batch.corpus import Corpus, find_files
from attnscope.batch.items import read_items
from attnscope.batch.job import Job
from attnscope.batch.shards import item_cost, shards
from attnscope.batch.worker import Window, Worker

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
