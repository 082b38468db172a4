"""One stack in one forward pass: its layers are asked as they come, and what is kept is cut into texts.

Shapes: B text, N heads of all layers, H heads of a layer, Q query, T token, k kept keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from attnscope.columns import HeadColumns, Score
from attnscope.measure.layers import LayerKey, PerLayer
from attnscope.measure.maps import LayerMaps, Maps
from attnscope.measure.metrics import METRICS
from attnscope.measure.operands import KeptOperands
from attnscope.measure.per_token import TokenWeights
from attnscope.measure.probes import (
    KeyMass,
    Layer,
    LayerScores,
    View,
    run_probes,
)
from attnscope.measure.probes import Relation as TopRelations
from attnscope.measure.roles import NONE, near_uniform, roles_of
from attnscope.measure.rollout import Rollout, RolloutProbe, spans_of
from attnscope.measure.spans import SpanPairs
from attnscope.observation import Observation
from attnscope.observe.probing import probes_of, root_of, texts_of
from attnscope.observe.request import Asked, Request
from attnscope.seam.call import AttentionCall, CallCheck, CaptureReport
from attnscope.stacks import CSA, HCA, VISION

if TYPE_CHECKING:
    from attnscope.model.loading import LoadedModel


class PaddingError(Exception):
    """A text is read in another way beside a longer one than alone."""


class Reading:
    """One stack in one forward pass: asks every layer, keeps what the probes keep, and cuts it into texts."""

    def __init__(
        self,
        loaded: LoadedModel,
        asked: Sequence[Asked],
        request: Request,
        check: bool,
        advance: Callable[[int], object],
        kind: str,
    ) -> None:
        self.kind, self.keys = kind, [one.looked_at for one in asked]
        self.prompts, self.chosen = [one.prompt for one in asked], [one.chosen for one in asked]
        self.request, self.check, self.advance = request, check, advance
        self.out: Mapping[nn.Module, nn.Module] | None = None  # the output projections, where values are weighed
        self.texts, geometry = texts_of(asked, loaded.device, kind), loaded.geometry
        self.key_count = max(len(keys) for keys in self.keys)
        self.layers = geometry.shown[kind]
        self.every = geometry.every.get(kind, ())
        self.probes = probes_of(asked, request)
        self.kept: dict[str, dict[LayerKey, Any]] = {name: {} for name in self.probes}
        self.kv_of: dict[LayerKey, tuple[int, int]] = {}

    def heard(self, call: AttentionCall | CallCheck) -> bool:
        """Whether a call of the decoder is of these layers, over tokens and their summaries."""
        queries, keys = (call.P.queries, call.P.keys) if isinstance(call, AttentionCall) else (call.queries, call.keys)
        return call.layer in self.layers and queries < keys == self.key_count and self.kind in (CSA, HCA)

    def on_call(self, call: AttentionCall) -> None:
        """Keep what is asked of a layer's first call over the text's tokens; the report lists what is not read.

        check: whether a layer that chooses its keys ends the pass.
        """
        if self.check and self._chooses_keys(call):
            raise PaddingError
        if call.call > 0 or (call.P.queries, call.P.keys) != (self.texts.ids_BT.shape[1], self.key_count):
            return
        if self.kind == VISION and call.P.batch != len(self.prompts):  # it is given the picture in other parts
            return
        key, known = LayerKey(call.layer, self.kind), self.layers.get(call.layer)
        kv_heads = call.spec.kv_heads if call.spec else known.kv_heads if known else call.P.heads
        self.kv_of[key] = call.P.heads, kv_heads
        root = None if self.out is None else partial(root_of, call, self.out)
        layer = Layer(key, call.P, kv_heads, self.texts.to(call.P.device), gram_root=root)
        for name, found in run_probes(self.probes, layer).items():
            if found is not None:
                self.kept[name][key] = found
        self.advance(1)

    def _chooses_keys(self, call: AttentionCall) -> bool:
        """Whether the keys are not the tokens, or the mask hides some that the layer's causal and window rules show."""
        if call.P.keys != self.texts.ids_BT.shape[1]:
            return True
        if call.visible.mask is None:
            return False
        position_Q, layer = call.visible.position_Q, self.layers.get(call.layer)
        shown_Q = position_Q + 1
        if layer and layer.window:
            chunked = layer.kind == "chunked"
            shown_Q = position_Q % layer.window + 1 if chunked else shown_Q.clamp(max=layer.window)
        return bool((call.visible.counts_BHQ < shown_Q).any())

    def observation(self, row: int, report: CaptureReport, facts: Mapping[str, Any]) -> Observation:
        """One text's part of what was kept, cut to its length."""
        prompt, count, rollout = self.prompts[row], len(self.prompts[row]), self._rollout(row)
        keys_count = len(self.keys[row])
        weighed = count if self.chosen[row].keys_alone else keys_count
        if rollout is not None:
            facts = {**facts, "rollout": rollout.facts([layer.index for layer in self.every])}
        keys = {key: kept[row] for key, kept in self.kept.get("keys", {}).items()}
        operands = {key: self._operands(kept, row) for key, kept in self.kept.get("operands", {}).items()}
        matrices = {key: one[row, :, :count, :keys_count] for key, one in self.kept.get("weights", {}).items()}
        return Observation(
            queries=prompt,
            keys=self.keys[row],
            columns=self.columns[row],
            view=self.request.view,
            group=self.request.group,
            support=PerLayer({key: counts[min(row, len(counts) - 1)] for key, counts in self.supports.items()}),
            visible=PerLayer({key: self._visible(key) for key in self.kv_of}),
            received=self._received(row)[:keys_count],
            report=report,
            kv_of=PerLayer(self.kv_of),
            facts=facts,
            maps=self._maps(),
            weights=PerLayer(matrices),
            weight_heads=PerLayer({key: self._weight_heads(key) for key in matrices}),
            operands=PerLayer(operands),
            rollout=rollout,
            kept_keys=PerLayer(keys) if self.request.relations else None,
            per_token=PerLayer(
                {
                    key: TokenWeights(one.heads, one.weight[row, :, :weighed], one.uniform[row, :, :weighed])
                    for key, one in self.kept.get("per_token", {}).items()
                }
            ),
            chosen=self.chosen[row],
            spans=PerLayer({key: self._pairs(kept, row) for key, kept in self.kept.get("spans", {}).items()}),
            without={layer.index: layer.kind for layer in self.every if not layer.attention},
            within={layer.index: layer.beside for layer in self.every if layer.attention and layer.beside},
        )

    @staticmethod
    def _pairs(kept: SpanPairs, row: int) -> SpanPairs:
        return SpanPairs(kept.heads, kept.mass[row], kept.uniform[row])

    def _operands(self, kept: KeptOperands, row: int) -> KeptOperands:
        """One text's part, cut to its length; text and batch stay apart: B is 1."""
        queries, keys, bias = len(self.prompts[row]), len(self.keys[row]), kept.bias_BHTT
        counts = {"q_BHTD": queries, "k_BHTD": keys, "v_BHTV": keys}
        cut = {name: getattr(kept, name)[row : row + 1, :, :count] for name, count in counts.items()}
        return kept._replace(**cut, bias_BHTT=None if bias is None else bias[row : row + 1, :, :queries, :keys])

    def _weight_heads(self, key: LayerKey) -> Sequence[int]:
        """The heads (kv heads, where they are averaged) whose matrices were kept of a layer."""
        heads, kv_heads = self.kv_of[key]
        chosen = self.request.view_of(self.request.weights).heads
        kept = range(heads) if chosen is None else chosen.get(key.layer, ())
        return sorted({head * kv_heads // heads for head in kept}) if self.request.view.by_kv else list(kept)

    def _visible(self, key: LayerKey) -> str:
        known = self.layers.get(key.layer)
        return known.in_words if known else "full"

    def _received(self, row: int) -> np.ndarray:
        """The mean mass that each token of a text receives, over the kept heads, (T,)."""
        found: list[KeyMass] = list(self.kept["top_key"].values())
        heads = sum(one.kept for one in found)
        total_T = sum((one.received[row] for one in found), torch.zeros(self.key_count))
        return (total_T / max(heads, 1)).numpy()

    def _maps(self) -> LayerMaps | None:
        probe = self.probes.get("maps")
        return LayerMaps.of(probe, self.kept["maps"]) if isinstance(probe, Maps) else None

    def _rollout(self, row: int) -> Rollout | None:
        probe = self.probes.get("rollout")
        if not isinstance(probe, RolloutProbe) or self.request.rollout is None:
            return None
        group = self.request.rollout
        return probe.rolled(row, spans_of(self.prompts[row], group), group)

    @cached_property
    def supports(self) -> dict[LayerKey, list[dict[str, int]]]:
        """The rows behind each layer's scores, per text; texts that share a mask may share one entry."""
        known: dict[int, list[dict[str, int]]] = {}  # layers that share a mask share them
        found: dict[LayerKey, list[dict[str, int]]] = {}
        for key, scores in self.kept["scores"].items():
            if id(scores.support) not in known:
                known[id(scores.support)] = _least_of_heads(scores.support)
            found[key] = known[id(scores.support)]
        return found

    @cached_property
    def columns(self) -> list[HeadColumns]:
        """The heads of all layers as columns, one set per text."""
        which, scores = _which(self.kv_of, self.request.view), list(self.kept["scores"].values())
        value = self._of_heads(scores, "values")
        null, support = self._of_heads(scores, "uniform"), self._of_heads(scores, "support")
        named, relation = bool(scores) and METRICS.keys() <= value.keys(), self._relations()
        top_key, top_key_mass = self._top_keys()
        found = []
        for row in range(len(self.prompts)):
            values, nulls, rows = ({name: one[row] for name, one in part.items()} for part in (value, null, support))
            unnamed = np.full(len(which["layer"]), None)
            mine = {name: Score(values[name], nulls[name]) for name in values}
            relations = dict(zip(RELATIONS, (part[row] for part in relation), strict=True))
            found.append(
                HeadColumns(
                    **which,
                    role=roles_of(values, nulls, rows, self.kind) if named else np.full_like(unnamed, NONE),
                    near_uniform=near_uniform(values, rows) if named else unnamed,
                    scores=mine,
                    top_key=top_key[row],
                    top_key_mass=top_key_mass[row],
                    **relations,
                )
            )
        return found

    def _of_heads(self, scores: Sequence[LayerScores], part: str) -> dict[str, np.ndarray]:
        """A part of the layers' scores, (B, N) each: means over kv heads where the view averages them."""
        count, by_kv = len(self.prompts), self.request.view.by_kv

        def of_layer(one: LayerScores, name: str) -> np.ndarray:
            values = getattr(one, part)[name].expand(count, one.heads)
            if not by_kv:
                return values.numpy()
            grouped = values.unflatten(1, (one.kv_heads, -1))
            return (grouped.amin(-1) if part == "support" else grouped.mean(-1)).numpy()

        names = list(getattr(scores[0], part)) if scores else []
        return {name: np.concatenate([of_layer(one, name) for one in scores], axis=1) for name in names}

    def _top_keys(self) -> tuple[np.ndarray, np.ndarray]:
        """The key that each head's queries look at most, and its mean mass, (B, N) each."""
        found: list[KeyMass] = list(self.kept["top_key"].values())
        if not found:
            return np.empty((len(self.prompts), 0), np.int32), np.empty((len(self.prompts), 0), np.float32)
        return torch.cat([one.key for one in found], 1).int().numpy(), torch.cat([one.mass for one in found], 1).numpy()

    def _relations(self) -> list[np.ndarray]:
        """Weight, query and key of every head's strongest relation, (B, N) each; of a kv head, its heads' strongest."""
        parts = []
        for key, relation in self.kept["relation"].items():
            if self.request.view.by_kv:
                weight = relation.weight.unflatten(1, (self.kv_of[key][1], -1))
                best = weight.nan_to_num(-torch.inf).argmax(-1, keepdim=True)
                relation = TopRelations(*(part.view_as(weight).gather(-1, best)[..., 0] for part in relation))
            parts.append([part.numpy() for part in relation])
        if not parts:
            return [np.empty((len(self.prompts), 0))] * 3
        return [np.concatenate(columns, axis=1) for columns in zip(*parts, strict=True)]


RELATIONS = ("relation_weight", "relation_query", "relation_key")


def _least_of_heads(counts: Mapping[str, torch.Tensor]) -> list[dict[str, int]]:
    """Each text's counts (B or 1, H or 1), the least of any head."""
    least = torch.stack(torch.broadcast_tensors(*(count.amin(1) for count in counts.values())), -1).tolist()
    return [dict(zip(counts, row, strict=True)) for row in least]


def _which(kv_of: Mapping[LayerKey, tuple[int, int]], view: View) -> dict[str, np.ndarray]:
    """Which head each place of the columns is, and whether the view keeps it."""
    names: dict[str, list[Any]] = {name: [] for name in ("layer", "kind", "head", "kv_head", "kept")}
    for key, (heads, kv_heads) in kv_of.items():
        chosen = range(heads) if view.heads is None else view.heads.get(key.layer, ())
        wanted = {head * kv_heads // heads for head in chosen} if view.by_kv else set(chosen)
        for number in range(kv_heads if view.by_kv else heads):
            kv_head = number if view.by_kv else number * kv_heads // heads
            parts = key.layer, key.kind, -1 if view.by_kv else number, kv_head, number in wanted
            for name, part in zip(names, parts, strict=True):
                names[name].append(part)
    kinds = {"kind": object, "kept": bool}
    return {name: np.array(column, dtype=kinds.get(name, np.int32)) for name, column in names.items()}
