"""Attention over a short text, whose whole matrix is smaller than a tile: it is made once, and rows answer.

Shapes: B text, H head, G kv head, Q query, K key, V width of v.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from attnscope.attention.operator import DenseAttention
from attnscope.attention.questions import Question
from attnscope.attention.spec import AttentionSpec
from attnscope.attention.tiled.operator import TiledAttention

SMALL = 2**17  # weights of a call, over all texts and heads; beyond, tiles are shared out among the cores


class SmallAttention(TiledAttention):
    """P of a short text, known by q, k and how the family makes its logits; its rows answer every question."""

    kernel = "rows"

    def rows(self, start: int, stop: int) -> Tensor:
        return self.matrix.weights_BHQK[:, :, start:stop]

    @cached_property
    def matrix(self) -> DenseAttention:
        return DenseAttention(self.spec.weights(0, self.queries), self.visible, self.spec)

    def swept(self, questions: Sequence[Question]) -> dict[Question, Any]:
        if self.with_output and self._output is None:
            weights_BGRK = self.matrix.weights_BHQK.reshape(self.batch, self.spec.kv_heads, -1, self.keys)
            output_BHQV = (weights_BGRK @ self.spec.v_BGKV.float()).view(self.batch, self.heads, self.queries, -1)
            self._output = output_BHQV.transpose(1, 2).to(self.spec.q_BHQD.dtype)
        return dict(self.matrix.together(questions))

    def answered(self, questions: Iterable[Question]) -> None:
        """Note that rows of the matrix were read for these elsewhere, with those of other layers."""
        self._noted(dict.fromkeys(questions), self.kernel)


def is_short(spec: AttentionSpec) -> bool:
    """Whether a call's matrix is small, on a CPU, and gives the call's output."""
    size = spec.batch * spec.heads * spec.visible.queries * spec.visible.keys
    return size <= SMALL and spec.device.type == "cpu" and not spec.sinks_scale_output
