"""Two texts, or two models on the same texts, head by head: two forward passes per pair, compared layer by layer.

    found = compare([(Reading(loaded, one, engine), Reading(loaded, other, engine))])
    found.js.effect          # (N,) bits, per head

Of the first pass q, k and v of every layer are kept, never a matrix; the second is compared while it runs, in blocks of
rows. Shapes: S text, N head of all layers, C cell of a map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from attnscope.errors import InputError, MemoryLimitError, UsageError
from attnscope.measure.divergence import Divergence, Side, diverge, readable
from attnscope.measure.maps import MAP_SIDE, Cells
from attnscope.measure.metrics import METRICS, Texts, measure
from attnscope.memory import DTYPE_BYTES, free_memory, human_bytes
from attnscope.seam.call import CaptureReport
from attnscope.seam.choice import read_size
from attnscope.seam.listen import calls_interface, listen
from attnscope.stacks import DECODER, ENCODER
from attnscope.study.statistics import Effects, paired
from attnscope.text.align import Units, units

if TYPE_CHECKING:
    from attnscope.attention.operator import AttentionOperator
    from attnscope.model.loading import LoadedModel
    from attnscope.seam.call import AttentionCall
    from attnscope.seam.engines import Engine
    from attnscope.text.prompt import Prompt

Advance = Callable[[int], object]
Heads = Mapping[int, Sequence[int]]
OfLayers = dict[int, Mapping[str, torch.Tensor]]  # of each layer {metric: (1, H)}


class Reading(NamedTuple):
    """One text that a model is about to read."""

    loaded: LoadedModel
    prompt: Prompt
    engine: Engine


class Drawn(NamedTuple):
    """What can be drawn of two texts: the heads of each layer, their maps (h, C, C), the units that cells stand for."""

    heads: Heads
    values: Mapping[int, np.ndarray]
    cells: Cells


class Pair(NamedTuple):
    """Two texts, what they share, and what can be drawn of them where maps were asked for."""

    first: Reading
    other: Reading
    shared: Units
    drawn: Drawn | None


@dataclass(frozen=True)
class Comparison:
    """What two sides differ in: heads as (layer, head), and per text and head (S, N) arrays of `Divergence`'s numbers.

    metrics: {id: (first, other)}, NaN for null. failures: what did not hold in a pass, in words. pair: where there is
    but one.
    """

    heads: tuple[tuple[int, int], ...]
    js_SN: np.ndarray
    rows_SN: np.ndarray
    lost_SN: np.ndarray
    other_lost_SN: np.ndarray
    metrics: Mapping[str, tuple[np.ndarray, np.ndarray]]
    failures: Sequence[str]
    pair: Pair | None = None

    @property
    def texts(self) -> int:
        return len(self.js_SN)

    @cached_property
    def js(self) -> Effects:
        """The mean divergence of each head, with an interval over the texts."""
        return paired(self.js_SN, np.zeros_like(self.js_SN), flips=0)

    def metric(self, name: str) -> Effects:
        """The other side's metric minus the first's, over the texts in which it can show on both."""
        return self._metrics[name]

    @cached_property
    def _metrics(self) -> dict[str, Effects]:
        found = {}
        for name, (first_SN, other_SN) in self.metrics.items():
            there_S = np.isfinite(other_SN - first_SN).any(1)
            there_S |= not there_S.any()
            found[name] = paired(other_SN[there_S], first_SN[there_S], flips=0)
        return found

    @property
    def order(self) -> list[int]:
        """Places of the heads, largest divergence first, those without one last."""
        return np.argsort(-np.nan_to_num(self.js.effect, nan=-1.0), kind="stable").tolist()


def compare(
    pairs: Iterable[tuple[Reading, Reading]],
    *,
    maps: Heads | None = None,
    memory: str | None = None,
    advance: Advance = lambda layers: None,
) -> Comparison:
    """Read both sides of every pair and compare each head with the one of the same place.

    maps: the heads whose difference is kept to be drawn, binned to at most MAP_SIDE cells a side; of one pair alone.
    memory: what may be kept of the first side, such as "4GB"; what is free without it. advance: called with 1 whenever
    a layer was read. Raises UsageError for models of other layers or heads, InputError for texts that share nothing,
    MemoryLimitError for one that is too long.
    """
    found = [_Passes(first, other, maps or {}, memory, advance) for first, other in pairs]
    if not found:
        raise InputError("there is no text to compare", "give at least one")
    heads = found[0].heads
    if any(one.heads != heads for one in found):
        raise InputError("not all texts are attended to by the same layers", "give texts of about one length")
    return Comparison(
        heads=heads,
        **{f"{name}_SN": np.stack([one.column(name) for one in found]) for name in Divergence._fields[:4]},
        metrics={
            name: (np.stack([one.scores(0, name) for one in found]), np.stack([one.scores(1, name) for one in found]))
            for name in METRICS
        },
        failures=list(dict.fromkeys(line for one in found for line in one.failures)),
        pair=found[0].pair if len(found) == 1 else None,
    )


def check_alike(first: LoadedModel, other: LoadedModel) -> None:
    """Raise UsageError where heads have no counterpart: other layers, or other numbers of heads."""
    for loaded in (first, other):
        loaded.check_task("a comparison", DECODER, ENCODER)
    if first.geometry.heads_by_layer != other.geometry.heads_by_layer:
        raise UsageError(
            f"{first.name} has {first.geometry.in_words}, {other.name} {other.geometry.in_words}: their heads have no "
            "counterparts",
            "compare models with the same layers and heads",
        )


class _Passes:
    """Two passes: the first keeps every layer, the second compares with it."""

    def __init__(self, first: Reading, other: Reading, maps: Heads, memory: str | None, advance: Advance) -> None:
        check_alike(first.loaded, other.loaded)
        self.readings, self.shared = (first, other), units(first.prompt.plain, other.prompt.plain)
        if not self.shared.size:
            raise InputError("the two texts share no word", "compare texts that have some in common")
        _check_room(first, memory)
        self.cells, self.maps = Cells.of(range(self.shared.size), MAP_SIDE), maps
        self.kept: dict[int, AttentionOperator] = {}
        self.found: dict[int, Divergence] = {}
        self.values: tuple[OfLayers, OfLayers] = ({}, {})
        reports = [_read(first, self.keep, advance), _read(other, self.hold_against, advance)]
        if not self.found:
            raise InputError("no layer attends to the tokens of both texts themselves", "take shorter texts")
        self.failures = [
            line
            for reading, report in zip(self.readings, reports, strict=True)
            for check in report.calls
            for line in check.failures(reading.loaded.model.dtype)
        ]

    def keep(self, index: int, P: AttentionOperator, values: Mapping[str, torch.Tensor]) -> None:
        self.kept[index], self.values[0][index] = readable(P), values

    def hold_against(self, index: int, P: AttentionOperator, values: Mapping[str, torch.Tensor]) -> None:
        before, self.values[1][index] = self.kept.pop(index, None), values
        if before is None:
            return
        first, other = (
            Side(one, torch.tensor(unit_T, device=one.device))
            for one, unit_T in ((before, self.shared.of_a), (readable(P), self.shared.of_b))
        )
        self.found[index] = diverge(first, other, self.shared.size, self.cells, self.maps.get(index, ()))

    @property
    def heads(self) -> tuple[tuple[int, int], ...]:
        return tuple((layer, head) for layer, found in self.found.items() for head in range(len(found.js)))

    def column(self, name: str) -> np.ndarray:
        """One number of every head, (N,)."""
        return np.concatenate([getattr(found, name) for found in self.found.values()])

    def scores(self, side: int, name: str) -> np.ndarray:
        """A metric of every head on one side, (N,)."""
        values = self.values[side]
        return np.concatenate(
            [values[at][name].expand(1, len(one.js))[0].cpu().numpy() for at, one in self.found.items()]
        )

    @property
    def pair(self) -> Pair:
        values = {index: one.map for index, one in self.found.items() if one.map is not None}
        return Pair(*self.readings, self.shared, Drawn(self.maps, values, self.cells) if values else None)


def _read(
    reading: Reading, keep: Callable[[int, AttentionOperator, Mapping[str, torch.Tensor]], None], advance: Advance
) -> CaptureReport:
    """One forward pass over one text; each layer that attends to its tokens is kept once, with its heads' metrics."""
    loaded, tokens = reading.loaded, len(reading.prompt)
    ids_BT = torch.tensor([reading.prompt.ids], device=loaded.device)
    texts = Texts(ids_BT, torch.tensor([tokens], device=loaded.device))
    layers, windows = tuple(loaded.geometry.heads_by_layer), loaded.geometry.windows

    def on_call(call: AttentionCall) -> None:
        if call.call == 0 and call.P.keys == tokens:
            keep(call.layer, call.P, measure(call.P, texts, tuple(METRICS)))
            advance(1)

    return listen(loaded.model, ids_BT, on_call, engine=reading.engine, expected_layers=layers, windows=windows)


def _check_room(reading: Reading, memory: str | None) -> None:
    """Refuse a text whose first pass leaves more than there is room for."""
    loaded, tokens = reading.loaded, len(reading.prompt)
    needed, room = kept_bytes(loaded, tokens), free_memory(loaded.device) if memory is None else read_size(memory)
    if needed > room:
        raise MemoryLimitError(
            f"what is kept of {tokens} tokens while the other side is read takes {human_bytes(needed)}, and "
            f"{human_bytes(room)} are free for it",
            "shorten the text, or take a smaller model or dtype",
        )


def kept_bytes(loaded: LoadedModel, tokens: int) -> int:
    """What the first pass leaves: q, k and v of every layer; of a family that shows none, its matrices."""
    layers = loaded.geometry.attention_layers
    numbers = sum(
        layer.heads * layer.head_dim + layer.kv_heads * (layer.head_dim + layer.value_dim)
        if calls_interface(loaded.model)
        else layer.heads * tokens
        for layer in layers
    )
    return tokens * numbers * DTYPE_BYTES[loaded.dtype]
