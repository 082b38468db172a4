"""What each token of a text has to do with the tokens that are asked about: the text itself, to be coloured.

And the mass that spans of a text give each other: every one as query with every one as key, of every head. And
attention rollout: how much of each token's final state is attributed to each input token, by attention alone.

Abnar & Zuidema 2020, arXiv 2005.00928: A_L ... A_1 with A = mean over heads of P + I, every row divided by its sum. The
product is never made: its sums over groups of keys are carried layer by layer, first layer first:
x <- (mean over heads of P x + x) / (mean row sum + 1), from x = a column of zeros and ones per group.

Shapes: B text, H head (or kv head, where a view averages them), Q query, K key, T token, S span, G group of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnscope.attention.operator import AttentionOperator, UniformAttention
from attnscope.attention.questions import Features, Question, Received, RowSum
from attnscope.attention.rows import indicator
from attnscope.errors import MemoryLimitError, ModelError
from attnscope.inputs.prompt import Span
from attnscope.metrics.texts import MAP_SIDE
from attnscope.observe.collectors import (
    Answers,
    Collected,
    Collector,
    OfMasks,
    ViewCollector,
    groups_of,
    marked,
    units_of,
)
from attnscope.observe.records import Rollout, SpanPairs, TokenWeights
from attnscope.observe.request import Layer, Request, TextInputs, View, nothing_named
from attnscope.utils.memory import free_memory, human_bytes

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
        return cls(Features(share_BT[..., None], of_size=True) if on_keys else Received(share_BT), request.view)

    def ask(self, layer: Layer) -> Sequence[Question]:
        return [self.question]

    def keep(self, layer: Layer, heads: list[int], answers: Answers) -> TokenWeights:
        each = self._answer(answers[self.question]), self._null(layer)
        weight_BHT, uniform_BHT = (self.view.select(layer, heads, values) for values in each)
        hidden_BHT = uniform_BHT < HIDDEN
        if isinstance(self.question, Features) and layer.texts.unasked:
            hidden_BHT |= ~layer.texts.has_query_T
        return TokenWeights(heads, *(part.masked_fill(hidden_BHT, torch.nan) for part in (weight_BHT, uniform_BHT)))

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

    def of_text(self, collected: SpanPairs, row: int, text: TextInputs) -> SpanPairs:
        return SpanPairs(collected.heads, collected.mass[row], collected.uniform[row])

    def _here(self, layer: Layer) -> Features:
        return Features(layer.here(self._features_BTS), of_size=True)

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


@dataclass
class RolloutCollector(Collector):
    """Carries what every token holds of every group through the layers, in the order in which they are read.

    groups_BT: the group of each token, -1 for padding. A layer that is not read (no attention over tokens) changes
    nothing. Raises MemoryLimitError where tokens times groups do not fit.
    """

    groups_BT: Tensor
    group: str = "tokens"
    layers: list[int] = field(default_factory=list)
    _share_BTG: Tensor | None = None  # what each token holds of each group, after the layers so far

    name = "rollout"
    in_order = True

    @classmethod
    def of(cls, texts: Sequence[TextInputs], request: Request) -> RolloutCollector:
        """The rollout of the units that the request names."""
        assert request.rollout is not None
        return cls(groups_of([text.prompt for text in texts], request.rollout), request.rollout)

    def questions(self, layer: Layer) -> Sequence[Question]:
        if self._share_BTG is None:
            groups = int(self.groups_BT.max()) + 1
            _check_room(layer.P, groups)
            self._share_BTG = indicator(self.groups_BT, groups)
        self._share_BTG = self._share_BTG.to(layer.P.device)
        return [RowSum(), Features(self._share_BTG)]

    def collect(self, layer: Layer, answers: Answers) -> None:
        """One layer further: x <- (mean over heads of P x + x) / (mean row sum + 1)."""
        assert self._share_BTG is not None
        sum_BQ1 = answers[RowSum()].mean(1)[..., None]
        mixed_BTG = answers[Features(self._share_BTG)].mean(1)
        self._share_BTG = (mixed_BTG + self._share_BTG) / (sum_BQ1 + 1)
        self.layers.append(layer.key.layer)

    def of_texts(self, collected: Collected, texts: Sequence[TextInputs]) -> list[Rollout]:
        queries = (None if text.chosen.query is None else text.chosen.query.positions for text in texts)
        units = (units_of(text.prompt, self.group) for text in texts)
        return [self.rolled(*of_text) for of_text in zip(range(len(texts)), units, queries, strict=True)]

    def rolled(self, row: int, units: Sequence[Span], queries: Sequence[int] | None = None) -> Rollout:
        """The rollout of one text, `units` its groups in order: mean over the queries of a group.

        queries: the tokens that were asked about, None for all; the units with one of them are shown.

        Raises ModelError where no layer attends to tokens.
        """
        if self._share_BTG is None:
            raise ModelError("no layer of this model attends to tokens", "there is nothing to roll out")
        share_TG = self._share_BTG[row, :, : len(units)].cpu()
        share_GG = torch.stack([share_TG[unit.start : unit.stop].mean(0) for unit in units])
        rows = None
        if queries is not None:
            rows = tuple(n for n, unit in enumerate(units) if any(unit.start <= q < unit.stop for q in queries))
        return Rollout(tuple(units), share_GG.numpy(), tuple(self.layers), self.group, rows)


def _check_room(P: AttentionOperator, groups: int) -> None:
    needed, device = 4 * P.batch * P.queries * groups * (P.heads + 3), str(P.device)
    room = free_memory(device)
    if needed > room:
        raise MemoryLimitError(
            f"the rollout of {P.queries} tokens towards {groups} groups takes {human_bytes(needed)}, and {device} has "
            f"{human_bytes(room)} for it",
            f"take fewer, larger groups: without {{group}} there are at most {MAP_SIDE}",
        )
