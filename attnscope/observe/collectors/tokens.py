"""What each token of a text has to do with the tokens that are asked about: the text itself, to be coloured.

And the mass that spans of a text give each other: every one as query with every one as key, of every head.

Shapes: B text, H head (or kv head, where a view averages them), Q query, K key, T token, S span.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnscope.attention.operator import UniformAttention
from attnscope.attention.questions import Features, Question, Received
from attnscope.observe.collector import Answers, OfMasks, ViewCollector, marked
from attnscope.observe.records import SpanPairs, TokenWeights
from attnscope.observe.request import Layer, Request, TextInputs, View, nothing_named

HIDDEN = 1e-12  # below what uniform attention gives any token that is seen: 1 / (queries x keys)


@dataclass
class TokenCollector(ViewCollector):
    """Every token's weight, of each head: one question in the layer's pass, whose answer grows with the tokens alone.

    Received: what the token gets as a key from the chosen queries, on average over them. Features of one column: the
    mass that the token, as a query, gives to the chosen keys.
    """

    question: Received | Features
    view: View = View()
    _uniform: OfMasks[Tensor] = field(default_factory=OfMasks)

    name = "per_token"
    cuts = True

    @classmethod
    def of(cls, texts: Sequence[TextInputs], request: Request) -> TokenCollector | None:
        """What every token has to do with those that are named; none where no text has what is named.

        Asked is its mean weight as a key of the chosen queries, or its mass on the chosen keys where keys alone are.
        """
        if nothing_named(texts):
            return None
        on_keys = all(text.chosen.keys_alone for text in texts)
        sides = [text.key_prompt if on_keys else text.prompt for text in texts]
        share_BT = torch.zeros(len(texts), max(map(len, sides)))
        for row, text in enumerate(texts):
            positions = list(text.key_positions if on_keys else text.queries)
            share_BT[row, positions] = 1.0 if on_keys else 1 / max(1, len(positions))
        return cls(Features(share_BT[..., None]) if on_keys else Received(share_BT), request.view)

    def ask(self, layer: Layer) -> Sequence[Question]:
        return [self.question]

    def keep(self, layer: Layer, heads: list[int], answers: Answers) -> TokenWeights:
        each = self._answer(answers[self.question]), self._null(layer)
        weight_BHT, uniform_BHT = (self.view.select(layer, heads, values) for values in each)
        hidden_BHT = uniform_BHT < HIDDEN
        if isinstance(self.question, Features) and layer.texts.unasked:
            hidden_BHT |= ~layer.texts.has_query_T
        return TokenWeights(heads, *(part.masked_fill(hidden_BHT, torch.nan) for part in (weight_BHT, uniform_BHT)))

    def part(self, collected: TokenWeights, places: slice, heads: list[int]) -> TokenWeights:
        return TokenWeights(heads, collected.weight[:, places], collected.uniform[:, places])

    def of_text(self, collected: TokenWeights, row: int, text: TextInputs) -> TokenWeights:
        count = len(text.prompt if text.chosen.keys_alone else text.key_prompt)
        return TokenWeights(collected.heads, collected.weight[row, :, :count], collected.uniform[row, :, :count])

    def _answer(self, answer: Tensor) -> Tensor:
        return answer[..., 0] if isinstance(self.question, Features) else answer

    def _null(self, layer: Layer) -> Tensor:
        visible = layer.P.visible

        def make() -> Tensor:
            uniform = self._answer(UniformAttention(visible).ask(self.question))
            return uniform if visible.known else torch.full_like(uniform, torch.nan)

        null = self._uniform.of(visible, make)
        return null.expand(layer.P.batch, layer.P.heads, -1).contiguous().to(layer.P.device)


@dataclass
class SpanCollector(ViewCollector):
    """The mass of every span on every span: the sum over the keys, the mean over the queries that see one of them.

    So it is `mass` as `metrics.MASS` has it, of all pairs at once: a question whose answer grows with the tokens alone.
    spans_BTS: True on the tokens of each span, which may overlap; a span without a token has no mass. keys_BTS: on
    those of the keys, where they are another text's.
    """

    spans_BTS: Tensor
    view: View = View()
    keys_BTS: Tensor | None = None
    _uniform: OfMasks[Tensor] = field(default_factory=OfMasks)

    name = "spans"
    cuts = True

    @classmethod
    def of(cls, texts: Sequence[TextInputs], request: Request) -> SpanCollector:
        """The mass of every pair of the spans that the request names."""
        keys_BTS = None if texts[0].keys is None else _spans(texts, request.spans, of_keys=True)
        return cls(_spans(texts, request.spans), request.view, keys_BTS)

    def __post_init__(self) -> None:
        self._features_BTS = (self.spans_BTS if self.keys_BTS is None else self.keys_BTS).float()

    def ask(self, layer: Layer) -> Sequence[Question]:
        return [self._here(layer)]

    def keep(self, layer: Layer, heads: list[int], answers: Answers) -> SpanPairs:
        uniform_BHQS = self._null(layer)
        sees_BHQS = uniform_BHQS > 0
        if layer.texts.unasked:
            sees_BHQS = sees_BHQS & layer.texts.has_query_T[:, None]
        expected_BHQS = uniform_BHQS if layer.P.visible.known else torch.full_like(uniform_BHQS, torch.nan)
        means = (self._means(mass, sees_BHQS) for mass in (answers[self._here(layer)], expected_BHQS))
        pairs = (mean.expand(layer.P.batch, layer.P.heads, -1, -1).contiguous() for mean in means)
        return SpanPairs(heads, *(self.view.select(layer, heads, pair) for pair in pairs))

    def part(self, collected: SpanPairs, places: slice, heads: list[int]) -> SpanPairs:
        return SpanPairs(heads, collected.mass[:, places], collected.uniform[:, places])

    def of_text(self, collected: SpanPairs, row: int, text: TextInputs) -> SpanPairs:
        return SpanPairs(collected.heads, collected.mass[row], collected.uniform[row])

    def _here(self, layer: Layer) -> Features:
        return Features(layer.here(self._features_BTS))

    def _null(self, layer: Layer) -> Tensor:
        """(B, H or 1, Q, S): what uniform attention gives each span, above 0 where a query sees a token of it."""
        visible = layer.P.visible
        null = self._uniform.of(visible, lambda: UniformAttention(visible).ask(self._here(layer)))
        return null.to(layer.P.device)

    def _means(self, mass_BHQS: Tensor, sees_BHQS: Tensor) -> Tensor:
        """(B, H, S, S) float64: over the queries of a span, of those that see the key span."""
        query_BSQ = self.spans_BTS.to(mass_BHQS.device, torch.float64).transpose(1, 2)[:, None]
        sums_BHSS = query_BSQ @ torch.where(sees_BHQS, mass_BHQS, 0.0).double()
        return sums_BHSS / (query_BSQ @ sees_BHQS.double())


def _spans(texts: Sequence[TextInputs], names: Sequence[str], of_keys: bool = False) -> Tensor:
    """True on the tokens of each text's spans, (B, T, S)."""
    longest = max(len(text.key_prompt if of_keys else text.prompt) for text in texts)
    spans = [(text.chosen.key_spans if of_keys else text.chosen.spans) or {} for text in texts]
    on = [marked([of_text.get(name) for of_text in spans], longest, default=False) for name in names]
    nowhere_BT = torch.zeros(len(texts), longest, dtype=torch.bool)
    return torch.stack([nowhere_BT if mask_BT is None else mask_BT for mask_BT in on], -1)
