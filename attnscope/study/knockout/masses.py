"""How much weight the asked rows give to each key, in a pass of the intact texts.

Shapes: B text of a pass, S text of the task, P head of a layer, r row of a block, K key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from attnscope.attention.rows import RowBlock
from attnscope.hooks.calls import AttentionCall
from attnscope.interventions.knockout import Knockout
from attnscope.interventions.passes import Passes
from attnscope.metrics.roles import SINK_MASS as RESTS
from attnscope.study.knockout.records import Masses


class MassReader:
    """Fills Masses from the blocks of the intact rows of passes; rests: whether it also asks where heads rest."""

    def __init__(self, masses: Masses, rests: bool) -> None:
        self.masses, self.rests = masses, rests

    def __call__(self, call: AttentionCall, texts: Sequence[int], heads: Sequence[int], block: RowBlock) -> None:
        if call.place.call:  # a layer that attends twice is read once
            return
        # A pass of shared layers has the intact texts first; rows that pad a block are of no query.
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
