"""Which items are written, and committed, together: shards, cut by the items alone and the same in every run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnscope.batch.items import Item
from attnscope.batch.journal import Record, digest
from attnscope.errors import InputError
from attnscope.model.geometry import Geometry

if TYPE_CHECKING:
    from attnscope.batch.job import Job

LETTERS_PER_TOKEN = 3.0  # about; shards are cut before anything is tokenised
MEDIA_TOKENS = 1500  # about, of a sound or of pictures: as Whisper's encoder reads


@dataclass(frozen=True)
class Shard:
    """Consecutive items that are written, and committed, together."""

    items: tuple[Item, ...]

    @property
    def first(self) -> int:
        """The number of its first item."""
        return self.items[0].number


def shards(
    items: Iterable[Item], cost: Callable[[Item], float], limit: float, sizes: Mapping[int, int]
) -> Iterator[Shard]:
    """Cut a corpus into shards with an output of about `limit` bytes; the cut depends on the items alone.

    cost: about how many bytes an item's output takes. known: {first item: items} of shards that an earlier run
    committed, which are cut as they were then.
    """
    taken_items: list[Item] = []
    total = 0.0
    for item in items:
        taken_items.append(item)
        total += cost(item)
        size = sizes.get(taken_items[0].number)
        if len(taken_items) == size if size else total >= limit:
            yield Shard(tuple(taken_items))
            taken_items, total = [], 0.0
    if taken_items:
        yield Shard(tuple(taken_items))


def unfinished(
    items: Iterable[Item], cost: Callable[[Item], float], limit: float, records: Mapping[int, Record]
) -> Iterator[Shard]:
    """The shards of a corpus that no record covers. Raises InputError where the corpus differs from a record."""
    before = dict(records)
    for shard in shards(items, cost, limit, {first: record.items for first, record in before.items()}):
        record = before.pop(shard.first, None)
        if record is None:
            yield shard
        elif digest(shard.items) != record.digest:
            last = shard.first + len(shard.items) - 1
            raise InputError(
                f"the corpus has changed: items {shard.first} to {last} are not those that were read before",
                "name another folder with {out}",
            )
    if before:
        raise InputError(
            f"the corpus has changed: item {min(before)} was read before, and now it ends earlier",
            "name another folder with {out}",
        )


def item_cost(job: Job, geometry: Geometry) -> Callable[[Item], float]:
    """About how many bytes the files hold of an item, from its length in letters: what shards are cut by."""
    heads, pairs = sum(sum(of.values()) for of in geometry.heads_of_stacks.values()), len(job.output.spans) ** 2

    def cost(item: Item) -> float:
        tokens = min(max(1, round(len(item.text) / LETTERS_PER_TOKEN)), job.max_tokens or sys.maxsize)
        tokens += MEDIA_TOKENS * job.media
        relations = "relations" in job.output.tables
        rows = tokens * min(tokens / 2, job.request.top_k or tokens) if relations else 0
        squares = tokens * tokens if job.output.weights else 0
        return heads * (6.0 * rows + squares + 8.0 * pairs + 120.0) + 200.0

    return cost
