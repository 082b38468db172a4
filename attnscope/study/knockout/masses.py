"""How much weight the asked rows give to each key, in a pass of the intact texts.

Shapes: B text of a pass, S text of the task, P head of a layer, r row of a block, K key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from attnscope.attention.again import RowBlock
from attnscope.intervene.knockout import Cut, Knockout
from attnscope.intervene.passes import Passes
from attnscope.measure.roles import RESTS
from attnscope.seam.call import AttentionCall

TextLayer = tuple[int, int]  # text of the task, layer


@dataclass
class Masses:
    """What asked rows give to keys. heads: of each layer.

    mass: of a text and layer (P, K), the mean over its rows; seen: in how many rows a key is seen, (P, K); alone:
    whether a row sees nothing but this key, (P, K); emptied: whether a row sees nothing but the keys that are asked,
    (P,); rests: the sink of a head in the whole text, -1 for none, (P,).
    """

    heads: Mapping[int, tuple[int, ...]]
    keys: Sequence[Sequence[int]]
    lengths: Sequence[int]
    mass: dict[TextLayer, np.ndarray] = field(default_factory=dict)
    seen: dict[TextLayer, np.ndarray] = field(default_factory=dict)
    alone: dict[TextLayer, np.ndarray] = field(default_factory=dict)
    emptied: dict[TextLayer, np.ndarray] = field(default_factory=dict)
    rests: dict[TextLayer, np.ndarray] = field(default_factory=dict)

    def of(self, cut: Cut, text: int, key: Sequence[int] | None = None) -> float:
        """The mean weight that the rows of a cut's heads give to its keys, or to others; NaN where no row sees one."""
        keys = list(cut.keys[text] if key is None else key)
        total, seen = 0.0, 0
        for layer, place in self._places(cut):
            if (text, layer) in self.mass:
                total += float(self.mass[text, layer][place, keys].sum())
                seen += int(self.seen[text, layer][place, keys].sum())
        return total / len(cut.heads) if seen else np.nan

    def per_key(self, cut: Cut, text: int) -> tuple[np.ndarray, np.ndarray, set[int]]:
        """(K,) the mean weight of each key in a cut's heads and rows; whether any row sees it; where the heads rest."""
        mass_K, seen_K, rests = np.zeros(self.lengths[text]), np.zeros(self.lengths[text], bool), set[int]()
        for layer, place in self._places(cut):
            if (text, layer) in self.mass:
                mass_K += self.mass[text, layer][place] / len(cut.heads)
                seen_K |= self.seen[text, layer][place] > 0
                rests.add(int(self.rests[text, layer][place]))
        return mass_K, seen_K, rests - {-1}

    def left_empty(self, cut: Cut) -> list[tuple[int, int]]:
        """The heads with a row that is left without keys, in any text; the cut is of all asked keys, or of one."""
        return [
            (layer, self.heads[layer][place])
            for layer, place in self._places(cut)
            if any(
                (text, layer) in self.emptied and self._empties(cut, text, layer, place)
                for text in range(len(self.lengths))
            )
        ]

    def _empties(self, cut: Cut, text: int, layer: int, place: int) -> bool:
        keys = list(cut.keys[text])
        if len(keys) == len(self.keys[text]):
            return bool(self.emptied[text, layer][place])
        return bool(self.alone[text, layer][place, keys].any())

    def _places(self, cut: Cut) -> list[tuple[int, int]]:
        return [(layer, self.heads[layer].index(head)) for layer, head in cut.heads]


class MassReader:
    """Fills Masses from the blocks of the intact rows of passes; rests: whether it also asks where heads rest."""

    def __init__(self, masses: Masses, rests: bool) -> None:
        self.masses, self.rests = masses, rests

    def __call__(self, call: AttentionCall, texts: Sequence[int], heads: Sequence[int], block: RowBlock) -> None:
        if call.place.call:  # a layer that attends twice is read once
            return
        batch = len(texts)
        asked_B1r1 = (block.query_Nr[:batch] >= 0)[:, None, :, None]
        weights_BPrK = block.weights_NPrK[:batch] * asked_B1r1
        seen = block.seen_NPrK if len(block.seen_NPrK) == 1 else block.seen_NPrK[:batch]
        seen_BPrK = seen.expand(weights_BPrK.shape) & asked_B1r1
        mass_BPK = weights_BPrK.sum(2).double().cpu().numpy()
        seen_BPK = seen_BPrK.sum(2).cpu().numpy()
        rests_BP = self._rests(call, texts, heads) if block.start == 0 else None
        for number, text in enumerate(texts):
            of, length = (text, call.layer), self.masses.lengths[text]
            rows = int((block.query_Nr[number] >= 0).sum())
            if not rows:
                continue
            other = seen_BPrK[number].clone()
            other[..., list(self.masses.keys[text])] = False
            alone_PrK = seen_BPrK[number] & (seen_BPrK[number].sum(-1, keepdim=True) == 1)
            emptied_P = (seen_BPrK[number].any(-1) & ~other.any(-1)).any(1).cpu().numpy()
            if rests_BP is not None:
                self.masses.mass[of] = np.zeros((len(heads), length))
                self.masses.seen[of] = np.zeros((len(heads), length), np.int64)
                self.masses.alone[of] = np.zeros((len(heads), length), bool)
                self.masses.emptied[of] = np.zeros(len(heads), bool)
                self.masses.rests[of] = rests_BP[number]
            self.masses.mass[of] += mass_BPK[number, :, :length]
            self.masses.seen[of] += seen_BPK[number, :, :length]
            self.masses.alone[of] |= alone_PrK.any(1).cpu().numpy()[:, :length]
            self.masses.emptied[of] |= emptied_P

    def _rests(self, call: AttentionCall, texts: Sequence[int], heads: Sequence[int]) -> np.ndarray:
        """Each head's sink, (B, P): the key with the largest mean weight over all queries, if above RESTS."""
        if not self.rests:
            return np.full((len(texts), len(heads)), -1)
        share_BQ = torch.zeros(call.P.batch, call.P.queries, device=call.P.device)
        for number, text in enumerate(texts):
            length = self.masses.lengths[text]
            share_BQ[number, :length] = 1 / length
        largest = call.P.received(share_BQ)[: len(texts), list(heads)].max(-1)
        return torch.where(largest.values > RESTS, largest.indices, -1).cpu().numpy()

    def done(self, rows: Sequence[int]) -> Masses:
        """The means; rows: how many are asked of each text."""
        for (text, _), mass_PK in self.masses.mass.items():
            mass_PK /= rows[text]
        return self.masses


def read_masses(passes: Passes, keys: Sequence[Sequence[int]], rests: bool) -> Masses:
    """The masses of every text, in one pass over each."""
    knockout = passes.intervention
    assert isinstance(knockout, Knockout)
    reader = MassReader(Masses(knockout.heads, keys, passes.task.lengths), rests)
    reading = replace(passes, intervention=replace(knockout, read=reader), layers=None)
    for batch in reading.batches(0):
        reading.run(batch, [])
    return reader.done([len(one) for one in knockout.queries])
