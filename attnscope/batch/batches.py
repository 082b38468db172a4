"""Which texts run together: batches of like lengths within a token budget.

Texts of different length are padded on the right, except where that changes how a model reads them
(`model/loaded.py`): there a batch has one length.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from attnscope.hooks.engines import eager_bytes
from attnscope.utils.memory import DTYPE_BYTES, free_memory

if TYPE_CHECKING:
    from attnscope.batch.job import Job
    from attnscope.model.loaded import LoadedModel

# Texts that are sorted into batches together, and what is kept of them: the first are read, and the last written, while
# the model waits
WINDOW_BYTES = 48 * 2**20
WINDOW_TEXTS = 256
BATCH_BYTES = 12 * 2**20  # of one layer's matrices: beyond a few caches' size a CPU gains nothing


def batches(
    lengths: Sequence[int], budget: int, alike: Sequence[Hashable] | None = None, most: int | None = None
) -> list[list[int]]:
    """Positions of texts, grouped by like length: padded to its longest, no batch exceeds `budget` tokens.

    Longest first. A text longer than the budget is a batch of its own; texts of a batch are `alike`, where
    that is given: equal in it. `most` is the number of texts in a batch.

        >>> batches([5, 100, 6], budget=100)
        [[1], [0, 2]]
    """
    grouped: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: (lengths[place], alike and alike[place], place)):
        length, last = lengths[place], grouped[-1] if grouped else []
        fits = last and (len(last) + 1) * length <= budget and (most is None or len(last) < most)
        if fits and (alike is None or alike[last[0]] == alike[place]):
            last.append(place)
        else:
            grouped.append([place])
    return grouped[::-1]


def batch_limit(loaded: LoadedModel) -> int:
    """The token budget that memory suggests: a batch's matrices take an eighth of what is free, at most."""
    room = free_memory(loaded.devices) // 8
    room = room if loaded.device.startswith("cuda") else min(room, BATCH_BYTES)
    of_a_text = max(1, eager_bytes(loaded.geometry, 128, DTYPE_BYTES[loaded.dtype]))
    tokens = max(128, min(65_536, 128 * room // of_a_text))
    return 1 << (tokens.bit_length() - 1)  # a little more or less free memory is the same batches


def kept_bytes(job: Job, heads: int, tokens: int) -> float:
    """About how many bytes the results of one text take while they wait to be written."""
    entries = tokens * min(tokens, job.request.top_k or tokens) * heads if job.request.relations else 0
    squares = tokens * tokens * heads if job.request.weights or job.request.maps else 0
    pairs = len(job.request.spans) ** 2 * heads
    return 12.0 * entries + 4.0 * squares + 16.0 * pairs + 400.0 * heads + 200.0 * tokens
