"""Every head of a text: its metrics, its role, its strongest relation, the key that receives most.

Shapes: B text, N heads of all layers, H heads of a layer, Q query, K key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from attnscope.attention.questions import MaxWeight, Question, TopK
from attnscope.attention.uniform import UniformAttention
from attnscope.keep.columns import HeadColumns, Score
from attnscope.keep.keys import KeyMass, TopKey, received
from attnscope.keep.layers import LayerKey, PerLayer
from attnscope.keep.probe import Answers, Layer, OfMasks, on_host
from attnscope.keep.request import Asked, Request
from attnscope.keep.thing import FoundByLayer, Thing
from attnscope.keep.view import View
from attnscope.measure.metrics import LOOKBACKS, MASS, METRICS, metrics_for, questions, stacked_means, support
from attnscope.measure.roles import NONE, near_uniform, roles_of
from attnscope.stacks import DECODER

RELATION = ("relation_weight", "relation_query", "relation_key")


class LayerScores(NamedTuple):
    """Every metric of a layer's heads: values (S, B, H), what uniform attention would score, and the rows behind it.

    The last two are (S or R, B or 1, H or 1). ids: the S metrics. kinds: the R kinds of rows. heads, kv_heads: how many
    the layer has. stack: whose metrics and roles they are given.
    """

    ids: Sequence[str]
    values: Tensor
    uniform: Tensor
    support: Tensor
    kinds: Sequence[str]
    heads: int
    kv_heads: int
    stack: str


@dataclass
class HeadScores:
    """Every metric of every head, beside what uniform attention would score; NaN where it is not of such layers."""

    ids: Sequence[str] = tuple(METRICS)
    _uniform: OfMasks[tuple[Tensor, Tensor, Sequence[str]]] = field(default_factory=WeakKeyDictionary)

    def asks(self, layer: Layer) -> Sequence[Question]:
        return questions(metrics_for(self.ids, layer.texts.stack), layer.texts)

    def keep(self, layer: Layer, answers: Answers) -> LayerScores:
        ids = metrics_for(self.ids, layer.texts.stack)
        values = self._placed(ids, stacked_means(layer.P, layer.texts, answers, ids))
        return LayerScores(self.ids, values, *self._null(layer), layer.P.heads, layer.kv_heads, layer.texts.stack)

    def _placed(self, ids: Sequence[str], values: Tensor) -> Tensor:
        """The values of some metrics (S, B, H) among those of all; NaN for the others."""
        if len(ids) == len(self.ids):
            return values
        every = values.new_full((len(self.ids), *values.shape[1:]), torch.nan)
        every[[self.ids.index(name) for name in ids]] = values
        return every

    def _null(self, layer: Layer) -> tuple[Tensor, Tensor, Sequence[str]]:
        """The scores of uniform attention, the rows behind them and their kinds; layers that share a mask share it."""
        visible = layer.P.visible
        if visible not in self._uniform:
            P, ids = UniformAttention(visible), metrics_for(self.ids, layer.texts.stack)
            texts, rows = layer.texts.to(P.device), support(P, layer.texts)
            scores = self._placed(ids, stacked_means(P, texts, P.together(questions(ids, texts)), ids))
            null = scores, torch.stack(torch.broadcast_tensors(*rows.values()))
            self._uniform[visible] = *(null if P.device.type == "cpu" else on_host(null)), tuple(rows)
        return self._uniform[visible]


class Relation(NamedTuple):
    """Per text and head the weight, query and key of one relation, (B, H) each; the weight is NaN for none."""

    weight: Tensor
    query: Tensor
    key: Tensor


@dataclass(frozen=True)
class TopRelation:
    """Each head's strongest relation: the largest A[i,j] - 1/v_i over i >= 1 and j >= 1 (j >= 0 with `key_zero`).

    v_i is the number of keys that query i sees: 0.99 among 60 keys is stronger than 1 among 10. Of the named queries,
    where some are.
    """

    key_zero: bool = False

    def asks(self, layer: Layer) -> Sequence[Question]:
        """The largest of every row: with its key where a walk finds both, else the key is looked up in one row."""
        return [MaxWeight(not self.key_zero)] if layer.P.finds_largest else [TopK(1, skip_key0=not self.key_zero)]

    def keep(self, layer: Layer, answers: Answers) -> Relation:
        [asked] = self.asks(layer)
        answer = answers[asked]
        weight_BHQ = answer if layer.P.finds_largest else answer[0][..., 0]
        best = (weight_BHQ - _expected(layer)).nan_to_num(-torch.inf).max(-1, keepdim=True)
        weight_BH, query_BH = weight_BHQ.gather(-1, best.indices)[..., 0], best.indices[..., 0]
        if layer.P.finds_largest:
            key_BH = layer.P.largest_key(query_BH, not self.key_zero)
        else:
            key_BH = answer[1][..., 0].gather(-1, best.indices)[..., 0]
        weight_BH = weight_BH.masked_fill(torch.isneginf(best.values[..., 0]), torch.nan)
        return Relation(weight_BH, query_BH, key_BH)


def _expected(layer: Layer) -> Tensor:
    """What uniform attention gives a key, (B, H or 1, Q); NaN for a query that is not asked, or sees no second key."""
    visible, asked_BT = layer.P.visible, layer.texts.asked_BT

    def make() -> Tensor:
        counts_BHQ = visible.counts_BHQ.to(layer.P.device)
        none_BHQ = (counts_BHQ == 0) | ~asked_BT[:, None]
        none_BHQ[..., :1] |= counts_BHQ[..., :1] <= 1  # as a causal text's first query
        return (1 / counts_BHQ.clamp_min(1)).masked_fill(none_BHQ, torch.nan)

    return visible.once(("expected", layer.texts), make)


class LayerHeads(NamedTuple):
    """What is kept of the heads of a layer, or of layers side by side."""

    layers: Sequence[LayerKey]
    scores: LayerScores
    relation: Relation
    top: KeyMass


@dataclass(frozen=True)
class Heads:
    """Metrics, strongest relation and top key of every head."""

    scores: HeadScores
    relation: TopRelation
    top: TopKey

    def asks(self, layer: Layer) -> Sequence[Question]:
        return [*chain.from_iterable(one.asks(layer) for one in (self.scores, self.relation, self.top))]

    def keep(self, layer: Layer, answers: Answers) -> LayerHeads:
        scores, relation, top = self.scores, self.relation, self.top
        return LayerHeads(
            layer.keys, scores.keep(layer, answers), relation.keep(layer, answers), top.keep(layer, answers)
        )


class TextHeads(NamedTuple):
    """Of the heads of a text; support: {layer: {kind of rows: how many}}; received: see `keys.received`."""

    columns: HeadColumns
    support: PerLayer[Mapping[str, int]]
    received: np.ndarray


def wanted(asked: Sequence[Asked], request: Request) -> Thing:
    """The metrics that are asked for, those of an answer where a text has one, mass where keys were chosen."""
    always = [name for name in request.metrics if name not in LOOKBACKS and name != MASS.id]
    lookbacks = LOOKBACKS if always and any(one.prompt.answer is not None for one in asked) else ()
    mass = [MASS.id] if any(one.chosen.key for one in asked) else []
    scores = HeadScores((*always, *lookbacks, *mass))
    probe = Heads(scores, TopRelation(request.key_zero), TopKey(request.view))
    return Thing(probe, lambda found: _of_texts(found, asked, request.view), of_heads=True)


def _of_texts(found: FoundByLayer, asked: Sequence[Asked], view: View) -> list[TextHeads]:
    columns, supports = Columns(found, len(asked), view).of_texts, _supports(found)
    received_BK = received([one.top for one in found.values()], len(asked), max(len(one.looked_at) for one in asked))
    return [
        TextHeads(
            columns[row],
            PerLayer({key: counts[min(row, len(counts) - 1)] for key, counts in supports.items()}),
            received_BK[row, : len(one.looked_at)],
        )
        for row, one in enumerate(asked)
    ]


def _supports(found: FoundByLayer) -> dict[LayerKey, list[dict[str, int]]]:
    """The rows behind each layer's scores, per text; texts that share a mask may share one entry."""
    known: dict[int, list[dict[str, int]]] = {}  # layers that share a mask share them
    supports: dict[LayerKey, list[dict[str, int]]] = {}
    for heads in found.values():
        rows = id(heads.scores.support)
        if rows not in known:
            known[rows] = _least_of_heads(heads.scores)
        supports |= dict.fromkeys(heads.layers, known[rows])
    return supports


def _least_of_heads(scores: LayerScores) -> list[dict[str, int]]:
    """Each text's rows of each kind, the least of any head."""
    return [dict(zip(scores.kinds, row, strict=True)) for row in scores.support.amin(-1).T.tolist()]


PARTS = (("values", "ids"), ("uniform", "ids"), ("support", "kinds"))  # of LayerScores, and what names their rows


class Columns:
    """The heads of all layers of so many texts as columns."""

    def __init__(self, found: FoundByLayer, count: int, view: View) -> None:
        self.found, self.count, self.view = found, count, view

    @cached_property
    def of_texts(self) -> list[HeadColumns]:
        """One set per text."""
        which = _which(self.found.values(), self.view)
        value, null, support = (self._scores(*one) for one in PARTS)
        named, relation = bool(self.found) and METRICS.keys() <= value.keys(), self._relations()
        top_key, top_key_mass = self._top_keys()
        stack = next((one.scores.stack for one in self.found.values()), DECODER)
        found = []
        for row in range(self.count):
            values, nulls, rows = ({name: one[row] for name, one in part.items()} for part in (value, null, support))
            unnamed = np.full(len(which["layer"]), None)
            text_role = roles_of(values, nulls, rows, stack) if named else np.full_like(unnamed, NONE)
            found.append(
                HeadColumns(
                    **which,
                    role=text_role,
                    text_role=text_role,
                    atlas_roles=unnamed,
                    near_uniform=near_uniform(values, rows) if named else unnamed,
                    scores={name: Score(values[name], nulls[name]) for name in values},
                    top_key=top_key[row],
                    top_key_mass=top_key_mass[row],
                    **dict(zip(RELATION, (part[row] for part in relation), strict=True)),
                )
            )
        return found

    def _scores(self, part: str, names: str) -> dict[str, np.ndarray]:
        """A part of the layers' scores, (B, N) each: means over kv heads where the view averages them."""
        scores: list[LayerScores] = [one.scores for one in self.found.values()]

        def of_layer(one: LayerScores) -> Tensor:
            values_SBH = getattr(one, part).expand(-1, self.count, one.heads)
            if not self.view.by_kv:
                return values_SBH
            grouped = values_SBH.unflatten(2, (one.kv_heads, -1))
            return grouped.amin(-1) if part == "support" else grouped.mean(-1)

        if not scores:
            return {}
        return dict(zip(getattr(scores[0], names), torch.cat([*map(of_layer, scores)], 2).numpy(), strict=True))

    def _top_keys(self) -> tuple[np.ndarray, np.ndarray]:
        """The key that each head's queries look at most, and its mean mass, (B, N) each."""
        found: list[KeyMass] = [one.top for one in self.found.values()]
        if not found:
            return np.empty((self.count, 0), np.int32), np.empty((self.count, 0), np.float32)
        return torch.cat([one.key for one in found], 1).int().numpy(), torch.cat([one.mass for one in found], 1).numpy()

    def _relations(self) -> list[np.ndarray]:
        """Weight, query and key of every head's strongest relation, (B, N) each; of a kv head, its heads' strongest."""
        parts = []
        for one in self.found.values():
            relation = one.relation
            if self.view.by_kv:
                weight = relation.weight.unflatten(1, (one.scores.kv_heads, -1))
                best = weight.nan_to_num(-torch.inf).argmax(-1, keepdim=True)
                relation = Relation(*(part.view_as(weight).gather(-1, best)[..., 0] for part in relation))
            parts.append([part.numpy() for part in relation])
        if not parts:
            return [np.empty((self.count, 0))] * 3
        return [np.concatenate(columns, axis=1) for columns in zip(*parts, strict=True)]


def _which(found: Iterable[LayerHeads], view: View) -> dict[str, np.ndarray]:
    """Which head each place of the columns is, and whether the view keeps it."""
    names: dict[str, list[Any]] = {name: [] for name in ("layer", "stack", "head", "kv_head", "kept")}
    kv_of = {key: (one.scores, len(one.layers)) for one in found for key in one.layers}
    for key, (scores, layers) in kv_of.items():
        heads, kv_heads = scores.heads // layers, scores.kv_heads // layers
        chosen = range(heads) if view.heads is None else view.heads.get(key.layer, ())
        wanted = {head * kv_heads // heads for head in chosen} if view.by_kv else set(chosen)
        for number in range(kv_heads if view.by_kv else heads):
            kv_head = number if view.by_kv else number * kv_heads // heads
            parts = key.layer, key.stack, -1 if view.by_kv else number, kv_head, number in wanted
            for name, part in zip(names, parts, strict=True):
                names[name].append(part)
    dtypes = {"stack": object, "kept": bool}
    return {name: np.array(column, dtype=dtypes.get(name, np.int32)) for name, column in names.items()}
