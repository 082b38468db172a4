"""The keys of a text: what each of them receives, and which heads rest on it.

Shapes: B text, H head (or kv head, where a view averages them), K key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnscope.attention.questions import Question, Received
from attnscope.keep.probe import Answers, Layer
from attnscope.keep.view import View


class KeyMass(NamedTuple):
    """Of each head (kv head, when averaged) the key that receives most: its mean mass and position, (B, H) each.

    received: the mean mass that every key receives, (B, K), summed over the `kept` heads of the view.
    """

    mass: Tensor
    key: Tensor
    received: Tensor
    kept: int


@dataclass(frozen=True)
class TopKey:
    """What keys receive: sum over the n queries i that are asked of A[i,j] / n, for key 0 the `sink` of a head."""

    view: View = View()

    def asks(self, layer: Layer) -> Sequence[Question]:
        return [Received(layer.texts.mean_BT)]

    def keep(self, layer: Layer, answers: Answers) -> KeyMass:
        [asked] = self.asks(layer)
        mass_BHK = layer.per_kv_head(answers[asked]) if self.view.by_kv else answers[asked]
        top, kept = mass_BHK.max(-1), self.view.kept(layer)
        kept_BHK = mass_BHK if len(kept) == mass_BHK.shape[1] else mass_BHK[:, kept]
        return KeyMass(top.values, top.indices, kept_BHK.sum(1), len(kept))


def received(found: Sequence[KeyMass], texts: int, keys: int) -> np.ndarray:
    """The mean mass that each key of each text receives, over the kept heads of all layers, (B, K)."""
    total_BK = sum((one.received for one in found), torch.zeros(texts, keys))
    return (total_BK / max(sum(one.kept for one in found), 1)).numpy()
