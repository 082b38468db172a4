"""What each token of a text has to do with the tokens that are asked about: the text itself, to be coloured.

Shapes: B text, H head (or kv head, where a view averages them), Q query, K key, T token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attnscope.attention.questions import Features, Question, Received
from attnscope.attention.uniform import UniformAttention
from attnscope.keep.probe import Answers, Layer, OfMasks
from attnscope.keep.records import TokenWeights
from attnscope.keep.request import Asked, Request, nothing_named
from attnscope.keep.thing import Thing, text_by_text
from attnscope.keep.view import View

HIDDEN = 1e-12  # below what uniform attention gives any token that is seen: 1 / (queries x keys)


@dataclass
class PerToken:
    """Every token's weight, of each head: one question in the layer's pass, whose answer grows with the tokens alone.

    Received: what the token gets as a key from the chosen queries, on average over them. Features of one column: the
    mass that the token, as a query, gives to the chosen keys.
    """

    question: Received | Features
    view: View = View()
    _uniform: OfMasks[Tensor] = field(default_factory=WeakKeyDictionary)  # layers that share a mask share it

    def asks(self, layer: Layer) -> Sequence[Question]:
        return [self.question] if self.view.kept(layer) else []

    def keep(self, layer: Layer, answers: Answers) -> TokenWeights | None:
        heads = self.view.kept(layer)
        if not heads:
            return None
        weight_BHT, uniform_BHT = self._answer(answers[self.question]), self._null(layer)
        if self.view.by_kv:
            weight_BHT, uniform_BHT = layer.per_kv_head(weight_BHT), layer.per_kv_head(uniform_BHT)
        weight_BHT, uniform_BHT = weight_BHT[:, heads], uniform_BHT[:, heads]
        hidden_BHT = uniform_BHT < HIDDEN
        if isinstance(self.question, Features) and layer.texts.unasked:
            hidden_BHT |= ~layer.texts.has_query_T
        return TokenWeights(heads, *(one.masked_fill(hidden_BHT, torch.nan) for one in (weight_BHT, uniform_BHT)))

    def _answer(self, found: Tensor) -> Tensor:
        return found[..., 0] if isinstance(self.question, Features) else found

    def _null(self, layer: Layer) -> Tensor:
        visible = layer.P.visible
        if visible not in self._uniform:
            self._uniform[visible] = self._answer(UniformAttention(visible).ask(self.question))
        return self._uniform[visible].expand(layer.P.batch, layer.P.heads, -1).contiguous().to(layer.P.device)


def wanted(asked: Sequence[Asked], request: Request) -> Thing | None:
    """What every token has to do with those that are named; none where no text has what is named."""
    if nothing_named(asked):
        return None

    counts = [len(one.prompt if one.chosen.keys_alone else one.looked_at) for one in asked]

    def of_text(kept: TokenWeights, row: int) -> TokenWeights:
        return TokenWeights(kept.heads, kept.weight[row, :, : counts[row]], kept.uniform[row, :, : counts[row]])

    probe = PerToken(_question(asked), request.view)
    return Thing(probe, lambda found: text_by_text(found, len(asked), of_text))


def _question(asked: Sequence[Asked]) -> Received | Features:
    """What is asked of every token: its mean weight as a key of the chosen queries, or its mass on the chosen keys."""
    on_keys = all(one.chosen.keys_alone for one in asked)
    texts = [one.looked_at if on_keys else one.prompt for one in asked]
    share_BT = torch.zeros(len(asked), max(map(len, texts)))
    for row, one in enumerate(asked):
        positions = list(one.key_positions if on_keys else one.queries)
        share_BT[row, positions] = 1.0 if on_keys else 1 / max(1, len(positions))
    return Features(share_BT[..., None]) if on_keys else Received(share_BT)
