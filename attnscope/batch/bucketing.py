"""Which texts run together: batches of like lengths within a token budget, and shards of a corpus.

Texts of different length are padded on the right without a mask, which leaves causal rows exact, except where a
family's positions depend on the longest text of the batch, or where it looks ahead: there a batch has one length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnscope.batch.journal import Record, digest
from attnscope.batch.reading import Item
from attnscope.errors import InputError
from attnscope.model.families import family

if TYPE_CHECKING:
    from torch import nn

ONE_LENGTH_ROTARY = ("dynamic", "longrope")


@dataclass(frozen=True)
class Shard:
    """Consecutive items that are written, and committed, together."""

    items: tuple[Item, ...]

    @property
    def first(self) -> int:
        """The number of its first item."""
        return self.items[0].number


def pads_exactly(config: Any) -> bool:
    """Whether right padding without a mask leaves the real rows of this model as they are.

    >>> pads_exactly(LlamaConfig())
    True
    """
    text = config.get_text_config(decoder=True)
    if any(family(one.model_type).one_length for one in (config, text)):
        return False
    rotary = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return not any(kind in ONE_LENGTH_ROTARY for kind in _rotary_types(rotary))


def _rotary_types(rotary: Mapping[str, Any]) -> Iterator[str]:
    for key, value in rotary.items():
        if isinstance(value, Mapping):  # some families have one kind a layer type
            yield from _rotary_types(value)
        elif key in ("rope_type", "type"):
            yield str(value)


def settle_rotary(model: nn.Module) -> None:
    """Make dynamic rotary frequencies forget the longest text so far: each batch then reads as if it came first."""
    for module in model.modules():
        names = [name for name in vars(module) if name.endswith("max_seq_len_cached")]
        for name in names:
            prefix = name.removesuffix("max_seq_len_cached")
            original = getattr(module, f"{prefix}original_inv_freq", None)
            if original is not None:
                setattr(module, name, getattr(module, "original_max_seq_len", getattr(module, name)))
                frequencies = getattr(module, f"{prefix}inv_freq")
                setattr(module, f"{prefix}inv_freq", original.to(frequencies.device).clone())


def batches(lengths: Sequence[int], budget: int, one_length: bool = False, most: int | None = None) -> list[list[int]]:
    """Positions of texts, grouped by like length: padded to its longest, no batch exceeds `budget` tokens.

    A text longer than the budget is a batch of its own; `one_length` keeps lengths apart; `most` texts a batch.

        >>> batches([5, 100, 6], budget=100)
        [[0, 2], [1]]
    """
    grouped: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: (lengths[place], place)):
        length, last = lengths[place], grouped[-1] if grouped else []
        fits = last and (len(last) + 1) * length <= budget and (most is None or len(last) < most)
        if fits and not (one_length and lengths[last[0]] != length):
            last.append(place)
        else:
            grouped.append([place])
    return grouped


def shards(
    items: Iterable[Item], cost: Callable[[Item], float], limit: float, known: Mapping[int, int]
) -> Iterator[Shard]:
    """Cut a corpus into shards whose output is about `limit` bytes; the cut depends on the items alone.

    cost: about how many bytes an item's output takes. known: {first item: items} of shards that an earlier run
    committed, which are cut as they were then.
    """
    taken: list[Item] = []
    total = 0.0
    for item in items:
        taken.append(item)
        total += cost(item)
        wanted = known.get(taken[0].number)
        if len(taken) == wanted if wanted else total >= limit:
            yield Shard(tuple(taken))
            taken, total = [], 0.0
    if taken:
        yield Shard(tuple(taken))


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
                "name another folder with --out",
            )
    if before:
        raise InputError(
            f"the corpus has changed: item {min(before)} was read before, and now it ends earlier",
            "name another folder with --out",
        )
