"""Whole matrices, for those who ask for them.

Shapes: B text, H head (or kv head, where a view averages them), Q query, K key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnscope.attention.questions import Question
from attnscope.keep.probe import Answers, Layer
from attnscope.keep.records import Matrices
from attnscope.keep.request import Asked, Request
from attnscope.keep.thing import Thing, text_by_text
from attnscope.keep.view import View


@dataclass(frozen=True)
class Weights:
    """The whole matrices, for those who ask: (B, H, Q, K) fp32 on the CPU; 0 in rows of tokens without a query."""

    view: View = View()

    def asks(self, layer: Layer) -> Sequence[Question]:
        return []

    def keep(self, layer: Layer, answers: Answers) -> Matrices | None:
        heads = self.view.kept(layer)
        blocks = [self.view.rows(layer, heads, a, b).cpu() for a, b in layer.P.blocks()] if heads else []
        if not blocks:
            return None
        found = torch.cat(blocks, 2) if len(blocks) > 1 else blocks[0]
        if layer.texts.unasked:
            found = found.masked_fill(~layer.texts.has_query_T.cpu()[:, None], 0)
        return Matrices(heads, found)


def wanted(asked: Sequence[Asked], request: Request) -> Thing:
    """The matrices of the heads that the request names."""

    def of_text(kept: Matrices, row: int) -> Matrices:
        queries, keys = len(asked[row].prompt), len(asked[row].looked_at)
        return Matrices(kept.heads, kept.weights[row, :, :queries, :keys])

    probe = Weights(request.view_of(request.weights))
    return Thing(probe, lambda found: text_by_text(found, len(asked), of_text))
