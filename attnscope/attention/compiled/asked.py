"""What is asked of a call, sorted by how the sweep answers it.

Shapes: B text, H head, Q query, K key, M feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnscope.attention import questions as ask
from attnscope.attention.compiled.shapes import MOST_TOP
from attnscope.attention.rows import asked_key
from attnscope.attention.spec import AttentionSpec

STATISTICS = (ask.RowSum, ask.Entropy, ask.SumOfSquares, ask.MaxWeight, ask.Distance)
INT32 = 2**31 - 1


@dataclass(eq=False)
class SweepQuestions:
    """The questions that the sweep answers, those of each way in the order in which it notes them."""

    statistics: list[ask.Question] = field(default_factory=list)
    places: list[ask.At | ask.Back | ask.Key] = field(default_factory=list)
    labels: list[ask.EqualLabels] = field(default_factory=list)
    windows: list[ask.Window] = field(default_factory=list)
    features: list[ask.Features] = field(default_factory=list)
    received: list[ask.Received] = field(default_factory=list)
    groups: list[ask.GroupMass] = field(default_factory=list)
    top: list[ask.TopK] = field(default_factory=list)

    @classmethod
    def of(cls, questions: Sequence[ask.Question], spec: AttentionSpec) -> SweepQuestions:
        result = cls()
        for question in questions:
            if (ways := result._ways(question, spec)) is not None:
                ways.append(question)
        return result

    def _ways(self, question: ask.Question, spec: AttentionSpec) -> list[Any] | None:
        """The list that a question belongs to, None where the sweep has no way for it."""
        if isinstance(question, STATISTICS):
            return None if isinstance(question, ask.MaxWeight) and question.skip_key0 else self.statistics
        if isinstance(question, ask.TopK):
            return self.top if question.k + question.skip_key0 <= MOST_TOP else None
        if isinstance(question, ask.EqualLabels):
            both = question.query_label_BQ, question.key_label_BK
            fits = all(part.numel() == 0 or int(part.abs().max()) <= INT32 for part in both)
            return self.labels if fits else None
        lists: dict[type[ask.Question], list[Any]] = {
            ask.At: self.places,
            ask.Back: self.places,
            ask.Key: self.places,
            ask.Window: self.windows,
            ask.Features: self.features,
            ask.Received: self.received,
            ask.GroupMass: self.groups,
        }
        return lists.get(type(question))

    @property
    def known(self) -> list[ask.Question]:
        return [
            *(*self.statistics, *self.places, *self.labels, *self.windows),
            *(*self.features, *self.received, *self.groups, *self.top),
        ]

    @property
    def most(self) -> int:
        """How many of a row's strongest settle every TopK."""
        return max((question.k + question.skip_key0 for question in self.top), default=0)

    def top_heads(self, heads: int) -> list[int]:
        """The heads that any TopK asks about."""
        every = (range(heads) if question.heads is None else question.heads for question in self.top)
        return sorted({head for some in every for head in some})

    def place_tables(self, spec: AttentionSpec) -> Tensor:
        """(n, B, Q) int32: the key that each question asks of each query, -1 where there is none."""
        keys, shape = spec.visible.keys, (spec.batch, spec.visible.queries)
        tables = [asked_key(question, spec.visible).cpu().expand(shape) for question in self.places]
        return _stacked([table.where((table >= 0) & (table < keys), -1) for table in tables])

    def label_tables(self, spec: AttentionSpec, padded: int) -> tuple[Tensor, Tensor]:
        """The queries' labels (n, B, Q), and the keys' (n, B, padded): int32; what is filled up no query sees."""
        own = [question.query_label_BQ.cpu().expand(spec.batch, -1) for question in self.labels]
        keys = [question.key_label_BK.cpu().expand(spec.batch, -1) for question in self.labels]
        missing = padded - spec.visible.keys
        return _stacked(own), _stacked([torch.nn.functional.pad(table, (0, missing)) for table in keys])

    def columns(self, texts: slice) -> list[Tensor]:
        """The features of some texts' keys, (b, K, M) each."""
        count = texts.stop - texts.start
        return [
            (
                question.features.expand(count, -1, -1) if question.features.ndim == 2 else question.features[texts]
            ).float()
            for question in self.features
        ]


def _stacked(tables: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tables)).int().contiguous() if tables else torch.zeros(0, 1, 1, dtype=torch.int32)
