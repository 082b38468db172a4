"""The mass that spans of a text give each other: every one as query with every one as key, of every head.

Shapes: B text, H head (or kv head, where a view averages them), Q query, K key, T token, S span.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attnscope.attention.questions import Features, Question
from attnscope.attention.uniform import UniformAttention
from attnscope.keep.groups import marked
from attnscope.keep.probe import Answers, Layer, OfMasks
from attnscope.keep.records import SpanPairs
from attnscope.keep.request import Asked, Request
from attnscope.keep.thing import Thing, text_by_text
from attnscope.keep.view import View


@dataclass
class SpanMass:
    """The mass of every span on every span: the sum over the keys, the mean over the queries that see one of them.

    So it is `mass` as `metrics.MASS` has it, of all pairs at once: a question whose answer grows with the tokens alone.
    spans_BTS: True on the tokens of each span, which may overlap; a span without a token has no mass. keys_BTS: on
    those of the keys, where they are another text's.
    """

    spans_BTS: Tensor
    view: View = View()
    keys_BTS: Tensor | None = None
    _uniform: OfMasks[Tensor] = field(default_factory=WeakKeyDictionary)  # layers that share a mask share it

    @cached_property
    def _question(self) -> Features:
        return Features((self.spans_BTS if self.keys_BTS is None else self.keys_BTS).float())

    def asks(self, layer: Layer) -> Sequence[Question]:
        return [self._here(layer)] if self.view.kept(layer) else []

    def keep(self, layer: Layer, answers: Answers) -> SpanPairs | None:
        heads = self.view.kept(layer)
        if not heads:
            return None
        uniform_BHQS = self._null(layer)
        sees_BHQS = uniform_BHQS > 0
        if layer.texts.unasked:
            sees_BHQS = sees_BHQS & layer.texts.has_query_T[:, None]
        found = (self._means(one, sees_BHQS) for one in (answers[self._here(layer)], uniform_BHQS))
        pairs = (one.expand(layer.P.batch, layer.P.heads, -1, -1) for one in found)
        if self.view.by_kv:
            pairs = (layer.per_kv_head(one.contiguous()) for one in pairs)
        return SpanPairs(heads, *(one[:, heads] for one in pairs))

    def _here(self, layer: Layer) -> Features:
        return Features(layer.here(self._question.features))

    def _null(self, layer: Layer) -> Tensor:
        """(B, H or 1, Q, S): what uniform attention gives each span, above 0 where a query sees a token of it."""
        visible = layer.P.visible
        if visible not in self._uniform:
            self._uniform[visible] = UniformAttention(visible).ask(self._here(layer))
        return self._uniform[visible].to(layer.P.device)

    def _means(self, mass_BHQS: Tensor, sees_BHQS: Tensor) -> Tensor:
        """(B, H, S, S) float64: over the queries of a span, of those that see the key span."""
        query_BSQ = self.spans_BTS.to(mass_BHQS.device, torch.float64).transpose(1, 2)[:, None]
        sums_BHSS = query_BSQ @ torch.where(sees_BHQS, mass_BHQS, 0.0).double()
        return sums_BHSS / (query_BSQ @ sees_BHQS.double())


def wanted(asked: Sequence[Asked], request: Request) -> Thing:
    """The mass of every pair of the spans that the request names."""
    keys = None if asked[0].keys is None else _spans(asked, request.spans, of_keys=True)
    probe = SpanMass(_spans(asked, request.spans), request.view, keys)

    def of_text(kept: SpanPairs, row: int) -> SpanPairs:
        return SpanPairs(kept.heads, kept.mass[row], kept.uniform[row])

    return Thing(probe, lambda found: text_by_text(found, len(asked), of_text))


def _spans(asked: Sequence[Asked], names: Sequence[str], of_keys: bool = False) -> Tensor:
    """True on the tokens of each text's spans, (B, T, S)."""
    longest = max(len(one.looked_at if of_keys else one.prompt) for one in asked)
    spans = [(one.chosen.key_spans if of_keys else one.chosen.spans) or {} for one in asked]
    on = [marked([of_text.get(name) for of_text in spans], longest, default=False) for name in names]
    nowhere_BT = torch.zeros(len(asked), longest, dtype=torch.bool)
    return torch.stack([nowhere_BT if one is None else one for one in on], -1)
