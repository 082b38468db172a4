"""How much goes together: texts of a window, tokens of a batch, items of a shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attnscope.memory import DTYPE_BYTES, free_memory
from attnscope.model.geometry import Geometry, eager_bytes

if TYPE_CHECKING:
    from attnscope.batch.job import Job
    from attnscope.batch.reading import Item
    from attnscope.model.loading import LoadedModel

WINDOW_BYTES = 96 * 2**20  # kept results of the texts that are bucketed together
WINDOW_TEXTS = 512
BATCH_BYTES = 12 * 2**20  # of one layer's matrices: beyond a few caches' size a CPU gains nothing
LETTERS_A_TOKEN = 3.0  # about; shards are cut before anything is tokenised


def batch_limit(loaded: LoadedModel) -> int:
    """The token budget that memory suggests: a batch's matrices take an eighth of what is free, at most."""
    room = free_memory(loaded.device) // 8
    room = room if loaded.device.startswith("cuda") else min(room, BATCH_BYTES)
    a_text = max(1, eager_bytes(loaded.geometry, 128, DTYPE_BYTES[loaded.dtype]))
    wanted = max(128, min(65_536, 128 * room // a_text))
    return 1 << (wanted.bit_length() - 1)  # a little more or less free memory is the same batches


def kept_bytes(job: Job, heads: int, tokens: int) -> float:
    """About what the results of one text take while they wait to be written."""
    entries = tokens * min(tokens, job.request.top_k or tokens) * heads if job.request.relations else 0
    squares = tokens * tokens * heads if job.request.weights or job.request.maps else 0
    return 12.0 * entries + 4.0 * squares + 400.0 * heads + 200.0 * tokens


def item_cost(job: Job, geometry: Geometry) -> Callable[[Item], float]:
    """About what the files hold of an item, from its length in letters: what shards are cut by."""
    heads = sum(layer.heads for layer in geometry.attention_layers)

    def cost(item: Item) -> float:
        tokens = max(1, round(len(item.text) / LETTERS_A_TOKEN))
        relations = "relations" in job.output.tables
        rows = tokens * min(tokens / 2, job.request.top_k or tokens) if relations else 0
        squares = tokens * tokens if job.output.weights else 0
        return heads * (6.0 * rows + squares + 120.0) + 200.0

    return cost
