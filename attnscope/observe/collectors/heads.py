"""Every head of a text: its metrics, its role, its strongest relation, the key that receives most.

Shapes: B text, N heads of all layers, H heads of a layer, Q query, K key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnscope.attention.operator import UniformAttention
from attnscope.attention.questions import MaxWeight, Question, Received, TopK
from attnscope.metrics import metrics
from attnscope.metrics.metrics import LOOKBACKS, MASS, METRICS, metrics_for, stacked_means, support
from attnscope.metrics.roles import NONE, near_uniform, roles_of
from attnscope.model.selection import DECODER
from attnscope.observe.collectors import Answers, Collected, Collector, OfMasks, on_host
from attnscope.observe.records import HeadColumns, Score
from attnscope.observe.request import Layer, LayerKey, PerLayer, Request, TextInputs, View, kv_head_of

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
    """Every metric of every head, with what uniform attention would score; NaN where it is not of such layers."""

    ids: Sequence[str] = tuple(METRICS)
    _uniform: OfMasks[tuple[Tensor, Tensor, Sequence[str]]] = field(default_factory=OfMasks)

    def questions(self, layer: Layer) -> Sequence[Question]:
        return metrics.questions(metrics_for(self.ids, layer.texts.stack), layer.texts)

    def collect(self, layer: Layer, answers: Answers) -> LayerScores:
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

        def make() -> tuple[Tensor, Tensor, Sequence[str]]:
            P, ids = UniformAttention(layer.P.visible), metrics_for(self.ids, layer.texts.stack)
            texts, rows = layer.texts.to(P.device), support(P, layer.texts)
            scores = self._placed(ids, stacked_means(P, texts, P.together(metrics.questions(ids, texts)), ids))
            scores = scores if P.visible.known else torch.full_like(scores, torch.nan)
            null = scores, torch.stack(torch.broadcast_tensors(*rows.values()))
            return *(null if P.device.type == "cpu" else on_host(null)), tuple(rows)

        return self._uniform.of(layer.P.visible, make)


class HeadRelations(NamedTuple):
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

    def questions(self, layer: Layer) -> Sequence[Question]:
        """The largest of every row: with its key where a walk finds both, else the key is looked up in one row.

        Of a layer without a softmax the largest share of |w|.
        """
        return [MaxWeight(not self.key_zero)] if layer.P.finds_largest else [TopK(1, skip_key0=not self.key_zero)]

    def collect(self, layer: Layer, answers: Answers) -> HeadRelations:
        [question] = self.questions(layer)
        answer = answers[question]
        weight_BHQ = answer if layer.P.finds_largest else answer[0][..., 0]
        best = (weight_BHQ - _expected(layer)).nan_to_num(-torch.inf).max(-1, keepdim=True)
        weight_BH, query_BH = weight_BHQ.gather(-1, best.indices)[..., 0], best.indices[..., 0]
        if not layer.P.finds_largest:
            key_BH = answer[1][..., 0].gather(-1, best.indices)[..., 0]
        elif layer.P.shows_logits:
            key_BH = layer.P.largest_key(query_BH, not self.key_zero)
        else:
            weight_BH, key_BH = layer.P.largest_entry(query_BH, not self.key_zero)
        weight_BH = weight_BH.masked_fill(torch.isneginf(best.values[..., 0]), torch.nan)
        return HeadRelations(weight_BH, query_BH, key_BH)


def _expected(layer: Layer) -> Tensor:
    """What uniform attention gives a key, (B, H or 1, Q); NaN for a query that is not asked, or sees no second key."""
    visible, asked_BT = layer.P.visible, layer.texts.asked_BT

    def make() -> Tensor:
        counts_BHQ = visible.counts_BHQ.to(layer.P.device)
        none_BHQ = (counts_BHQ == 0) | ~asked_BT[:, None]
        none_BHQ[..., :1] |= counts_BHQ[..., :1] <= 1  # as a causal text's first query
        none_BHQ |= not visible.known
        return (1 / counts_BHQ.clamp_min(1)).masked_fill(none_BHQ, torch.nan)

    return visible.once(("expected", layer.texts), make)


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

    def questions(self, layer: Layer) -> Sequence[Question]:
        return [Received(layer.texts.mean_BT)]

    def collect(self, layer: Layer, answers: Answers) -> KeyMass:
        [question] = self.questions(layer)
        mass_BHK = layer.per_kv_head(answers[question]) if self.view.by_kv else answers[question]
        top, kept = mass_BHK.max(-1), self.view.kept(layer)
        kept_BHK = mass_BHK if len(kept) == mass_BHK.shape[1] else mass_BHK[:, kept]
        return KeyMass(top.values, top.indices, kept_BHK.sum(1), len(kept))


class LayerHeads(NamedTuple):
    """What is kept of the heads of a layer, or of layers side by side."""

    layers: Sequence[LayerKey]
    scores: LayerScores
    relation: HeadRelations
    top: KeyMass


@dataclass(frozen=True)
class HeadCollector(Collector):
    """Metrics, strongest relation and top key of every head."""

    scores: HeadScores
    relation: TopRelation
    top: TopKey

    name = "heads"
    of_heads = True

    @classmethod
    def of(cls, texts: Sequence[TextInputs], request: Request) -> HeadCollector:
        """The metrics that are asked for, those of an answer where a text has one, mass where keys were chosen."""
        always = [*dict.fromkeys(name for name in request.metrics if name not in LOOKBACKS and name != MASS.id)]
        lookbacks = LOOKBACKS if always and any(text.prompt.answer is not None for text in texts) else ()
        mass = [MASS.id] if any(text.chosen.key for text in texts) else []
        return cls(HeadScores((*always, *lookbacks, *mass)), TopRelation(request.key_zero), TopKey(request.view))

    def questions(self, layer: Layer) -> Sequence[Question]:
        return [*chain.from_iterable(part.questions(layer) for part in (self.scores, self.relation, self.top))]

    def collect(self, layer: Layer, answers: Answers) -> LayerHeads:
        scores, relation = self.scores.collect(layer, answers), self.relation.collect(layer, answers)
        return LayerHeads(layer.keys, scores, relation, self.top.collect(layer, answers))

    def of_texts(self, collected: Collected, texts: Sequence[TextInputs]) -> list[TextHeads]:
        layers: list[LayerHeads] = list(collected.values())
        columns, supports = columns_of_texts(layers, len(texts), self.top.view), _supports(layers)
        most_keys = max(len(text.key_prompt) for text in texts)
        total_BK = sum((heads.top.received for heads in layers), torch.zeros(len(texts), most_keys))
        received_BK = (total_BK / max(sum(heads.top.kept for heads in layers), 1)).numpy()
        return [
            TextHeads(
                columns[row],
                PerLayer({key: counts[min(row, len(counts) - 1)] for key, counts in supports.items()}),
                received_BK[row, : len(text.key_prompt)],
            )
            for row, text in enumerate(texts)
        ]


class TextHeads(NamedTuple):
    """Of the heads of a text; support: {layer: {kind of rows: how many}}.

    received: the mean mass that each key receives over the kept heads of all layers, (K,).
    """

    columns: HeadColumns
    support: PerLayer[Mapping[str, int]]
    received: np.ndarray


def _supports(layers: Sequence[LayerHeads]) -> dict[LayerKey, list[dict[str, int]]]:
    """The rows behind each layer's scores, per text, of any head the least; texts that share a mask may share them."""
    known: dict[int, list[dict[str, int]]] = {}  # layers that share a mask share them
    supports: dict[LayerKey, list[dict[str, int]]] = {}
    for heads in layers:
        support, kinds = heads.scores.support, heads.scores.kinds
        if id(support) not in known:
            known[id(support)] = [dict(zip(kinds, row, strict=True)) for row in support.amin(-1).T.tolist()]
        supports |= dict.fromkeys(heads.layers, known[id(support)])
    return supports


def columns_of_texts(layers: Sequence[LayerHeads], count: int, view: View) -> list[HeadColumns]:
    """The heads of all layers as columns, a set of them for each of so many texts."""
    which = _which(layers, view)
    value, null = _scores(layers, count, view, "values"), _scores(layers, count, view, "uniform")
    support, relation = _scores(layers, count, view, "support"), _relations(layers, count, view)
    top_key, top_key_mass = np.empty((count, 0), np.int32), np.empty((count, 0), np.float32)
    if layers:
        top_key = torch.cat([heads.top.key for heads in layers], 1).int().numpy()
        top_key_mass = torch.cat([heads.top.mass for heads in layers], 1).numpy()
    # Roles are told from all metrics: where some were left out, no head has one.
    named, stack = bool(layers) and METRICS.keys() <= value.keys(), layers[0].scores.stack if layers else DECODER
    marked = named and bool(metrics_for(["entropy_normalised"], stack))
    columns = []
    for row in range(count):
        values, nulls, rows = ({name: part[row] for name, part in of.items()} for of in (value, null, support))
        unnamed = np.full(len(which["layer"]), None)
        text_role = roles_of(values, nulls, rows, stack) if named else np.full_like(unnamed, NONE)
        columns.append(
            HeadColumns(
                **which,
                role=text_role,
                text_role=text_role,
                atlas_roles=unnamed,
                near_uniform=near_uniform(values, rows) if marked else unnamed,
                scores={name: Score(values[name], nulls[name]) for name in values},
                top_key=top_key[row],
                top_key_mass=top_key_mass[row],
                **dict(zip(RELATION, (part[row] for part in relation), strict=True)),
            )
        )
    return columns


def _scores(layers: Sequence[LayerHeads], count: int, view: View, part: str) -> dict[str, np.ndarray]:
    """A part of the layers' scores, (B, N) each: means over kv heads where the view averages them, of rows the least.

    part: `values` or `uniform`, a row for each metric, or `support`, one for each kind of rows.
    """
    if not layers:
        return {}
    names, parts = layers[0].scores.kinds if part == "support" else layers[0].scores.ids, []
    for heads in layers:
        values_SBH = getattr(heads.scores, part).expand(-1, count, heads.scores.heads)
        if view.by_kv:
            grouped = values_SBH.unflatten(2, (heads.scores.kv_heads, -1))
            values_SBH = grouped.amin(-1) if part == "support" else grouped.mean(-1)
        parts.append(values_SBH)
    return dict(zip(names, torch.cat(parts, 2).numpy(), strict=True))


def _relations(layers: Sequence[LayerHeads], count: int, view: View) -> list[np.ndarray]:
    """Weight, query and key of every head's strongest relation, (B, N) each; of a kv head, its heads' strongest."""
    parts = []
    for heads in layers:
        relation = heads.relation
        if view.by_kv:
            weight = relation.weight.unflatten(1, (heads.scores.kv_heads, -1))
            best = weight.nan_to_num(-torch.inf).argmax(-1, keepdim=True)
            relation = HeadRelations(*(part.view_as(weight).gather(-1, best)[..., 0] for part in relation))
        parts.append([part.numpy() for part in relation])
    if not parts:
        return [np.empty((count, 0))] * 3
    return [np.concatenate(columns, axis=1) for columns in zip(*parts, strict=True)]


def _which(layers: Iterable[LayerHeads], view: View) -> dict[str, np.ndarray]:
    """Which head each place of the columns is, and whether the view keeps it."""
    names: dict[str, list[Any]] = {name: [] for name in ("layer", "stack", "head", "kv_head", "kept")}
    kv_of = {key: (heads.scores, len(heads.layers)) for heads in layers for key in heads.layers}
    for key, (scores, count) in kv_of.items():
        heads, kv_heads = scores.heads // count, scores.kv_heads // count
        chosen = range(heads) if view.heads is None else view.heads.get(key.layer, ())
        wanted = {head * kv_heads // heads for head in chosen} if view.by_kv else set(chosen)
        for number in range(kv_heads if view.by_kv else heads):
            kv_head = number if view.by_kv else kv_head_of(number, heads, kv_heads)
            parts = key.layer, key.stack, -1 if view.by_kv else number, kv_head, number in wanted
            for name, part in zip(names, parts, strict=True):
                names[name].append(part)
    dtypes = {"stack": object, "kept": bool}
    return {name: np.array(column, dtype=dtypes.get(name, np.int32)) for name, column in names.items()}
