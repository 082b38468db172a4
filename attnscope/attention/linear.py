"""A linear layer's map of its values, y = M v: signed, before gate and norm, without a softmax.

The state of such a layer (a gated delta rule, Kimi's delta attention, Mamba-2) is linear in its values. The layer's own
rule, run once more with unit vectors in their place, gives the map itself.

    M = LinearMap(rule)
    M.rows(0, M.queries) @ values_BHKV    # the rule's own output

Where a number says how a row is spread, it is of |w| as a share of the row's sum of |w|; a single weight is signed.

Shapes: B text, T token, H head, Q query, K key, V width of a value, D width of the state on the key's side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnscope.attention import questions as ask
from attnscope.attention.operator import AttentionOperator
from attnscope.attention.questions import Question
from attnscope.attention.spec import Visibility

Apply = Callable[[Mapping[str, Tensor], Tensor, Tensor | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class LinearRule:
    """How one linear layer mixes its values: linear in them, and in the state that it begins with.

    name: of the rule, `gated delta rule`. tokens: what the rule is given for each token but the values, (B, T, ...).
    apply: tokens, values (B, T, H, V) and the state (B, H, D, V) before the first token, None for zeros, to the output
    (B, T, H, V) and the state after the last token. values_BTHV: the layer's own. state: D. decay_BTH: how much of the
    state each token leaves, from 0 to 1, before what it erases by its key; a mean where it differs by channel; None
    where the layer has none. write_BTH: how much of its value each token writes, None for all.
    """

    name: str
    tokens: Mapping[str, Tensor]
    apply: Apply
    values_BTHV: Tensor
    state: int
    decay_BTH: Tensor | None = None
    write_BTH: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Texts, tokens and heads."""
        B, T, H, _ = self.values_BTHV.shape
        return B, T, H

    def run(self, values_BTHV: Tensor) -> Tensor:
        """The output of other values, (B, T, H, V)."""
        return self.apply(self.tokens, values_BTHV, None)[0]


class LinearMap(AttentionOperator):
    """The map of a linear layer, (B, H, Q, K) signed; what lies after a query is 0."""

    def __init__(self, rule: LinearRule) -> None:
        B, T, H = rule.shape
        device = rule.values_BTHV.device
        super().__init__(B, H, Visibility(T, T, device=device), None, device)
        self.rule = rule
        self._dense: Tensor | None = None

    def rows(self, start: int, stop: int) -> Tensor:
        if self._dense is None:
            B, T, H = self.rule.shape
            unit = torch.eye(T, dtype=torch.float32, device=self.device)[None, :, None]
            self._dense = self.rule.run(unit.expand(B, T, H, T).contiguous()).float().transpose(1, 2)
        return self._dense[:, :, start:stop]

    def together(self, questions: Iterable[Question]) -> Mapping[Question, Any]:
        distinct = list(dict.fromkeys(questions))
        signed = [question for question in distinct if isinstance(question, SIGNED)]
        spread = [question for question in distinct if not isinstance(question, SIGNED)]
        return {**super().together(signed), **(Shares(self).together(spread) if spread else {})}


# Questions about single weights, which have a sign; the others ask how a row is spread.
SIGNED = (ask.RowSum, ask.Features)


class Shares(AttentionOperator):
    """|w| of a signed map as a share of its row's sum of |w|: rows that sum to 1."""

    def __init__(self, of: AttentionOperator) -> None:
        super().__init__(of.batch, of.heads, of.visible, None, of.device)
        self.of = of

    def rows(self, start: int, stop: int) -> Tensor:
        size = self.of.rows(start, stop).abs()
        return size / size.sum(-1, keepdim=True).clamp_min(torch.finfo(size.dtype).tiny)
