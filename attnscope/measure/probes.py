"""What to keep of a layer's attention before its matrix is dropped: scores, relations, group masses, maps.

A probe says what it asks of a layer (`asks`), and makes of the answers something small that is kept (`keep`); each is
called once per layer. All probes' questions are answered in one pass. None keeps an N x N matrix that nobody asked for.

Shapes: B text, H head (or kv head, where a view averages them), Q query, K key, G group of tokens (of values: kv head,
and R its query heads), V width of v, k kept keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from attnscope.attention.operator import AttentionOperator
from attnscope.attention.questions import Question, Received, TopK
from attnscope.attention.uniform import UniformAttention
from attnscope.attention.visibility import Visibility
from attnscope.measure.layers import LayerKey
from attnscope.measure.metrics import METRICS, Texts, means, measure, of_kind, questions, support

T = TypeVar("T")
Answers = Mapping[Question, Any]
OfMasks = WeakKeyDictionary[Visibility, T]  # weak: a model that makes a mask per layer must not pile them up


@dataclass(frozen=True)
class View:
    """How entries are read wherever they are tabled or drawn.

    weights: "softmax"; "scores", the logits after scale, cap, bias and mask; or "value", the norm of what a key writes
    into the residual stream, A[i,j] |v_j W_O| (Kobayashi et al. 2020, arXiv 2004.10102). by_kv: average the query heads
    that share a kv head. heads: {layer: heads to keep}, None for all.

        >>> attnscope.Request(view=attnscope.View(by_kv=True, heads={0: [1, 2]}), relations=True)
    """

    weights: Literal["softmax", "scores", "value"] = "softmax"
    by_kv: bool = False
    heads: Mapping[int, Sequence[int]] | None = None

    @property
    def of_heads(self) -> bool:
        """Whether entries are the weights of the heads themselves."""
        return self.weights == "softmax" and not self.by_kv

    def kept(self, layer: Layer) -> list[int]:
        """The heads (kv heads, when averaged) of a layer that this view keeps."""
        chosen = range(layer.P.heads) if self.heads is None else self.heads.get(layer.key.layer, ())
        return sorted({layer.kv_head(head) for head in chosen}) if self.by_kv else list(chosen)

    def rows(self, layer: Layer, heads: Sequence[int], start: int, stop: int) -> Tensor:
        """Entries of a block of queries, fp32 (B, len(heads), stop - start, K)."""
        entries = layer.P.scores(start, stop) if self.weights == "scores" else layer.P.rows(start, stop)
        if self.weights == "value":
            entries = entries * layer.value_norm_BHK[:, :, None]
        entries = layer.per_kv_head(entries) if self.by_kv else entries
        return entries if list(heads) == list(range(entries.shape[1])) else entries[:, list(heads)]

    def seen(self, layer: Layer, heads: Sequence[int], seen_BHQK: Tensor) -> Tensor:
        """Which entries of these heads there are, from what the query heads see, (B or 1, H or 1, Q, K) boolean.

        A kv head has a mean weight where any of its heads sees the key, and a mean logit where all of them do.
        """
        if seen_BHQK.shape[1] == 1:  # one mask for all heads
            return seen_BHQK
        if self.by_kv:
            grouped = seen_BHQK.unflatten(1, (layer.kv_heads, -1))
            seen_BHQK = grouped.all(2) if self.weights == "scores" else grouped.any(2)
        return seen_BHQK[:, list(heads)]


@dataclass(frozen=True)
class Layer:
    """Where a probe stands: which layer, its operator, its kv heads, and the texts on its device.

    gram_root: gives what makes the norms of v W_O of values v, (H, V, V), see `seam.projection`; where values weigh.
    """

    key: LayerKey
    P: AttentionOperator
    kv_heads: int
    texts: Texts
    gram_root: Callable[[], Tensor] | None = field(default=None, repr=False, compare=False, kw_only=True)
    _here: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False, kw_only=True)

    def here(self, tensor: Tensor) -> Tensor:
        """The tensor on the layer's device: the same one each time, since questions are told apart by it."""
        if tensor.device == self.P.device:
            return tensor
        if id(tensor) not in self._here:
            self._here[id(tensor)] = tensor, tensor.to(self.P.device)  # holding the first keeps its id its own
        return self._here[id(tensor)][1]

    @cached_property
    def value_norm_BHK(self) -> Tensor:
        """|v_j W_O| of each head and key, fp32 (B, H, K): a tensor as wide as the values, never as the model."""
        assert self.gram_root is not None
        root_HVV = self.gram_root()  # where there is none it says why
        assert self.P.spec is not None
        v_BGKV = self.P.spec.v_BGKV.float()
        root_GRVV = root_HVV.unflatten(0, (v_BGKV.shape[1], -1))
        return (v_BGKV[:, :, None] @ root_GRVV).norm(dim=-1).flatten(1, 2)

    def kv_head(self, head: int) -> int:
        """The kv head that a query head reads."""
        return head * self.kv_heads // self.P.heads

    def per_kv_head(self, values: Tensor) -> Tensor:
        """(B, H, ...) -> (B, kv heads, ...), the mean over the query heads that share a kv head."""
        return values.view(self.P.batch, self.kv_heads, -1, *values.shape[2:]).mean(2)


class Probe(Protocol):
    """What to ask of a layer and what to keep of it."""

    def asks(self, layer: Layer) -> Sequence[Question]:
        """The questions that the layer's pass should answer."""

    def keep(self, layer: Layer, answers: Answers) -> Any:
        """What stays of the layer, small, moved to the CPU with what others keep; None where there is nothing."""


def run_probes(probes: Mapping[str, Probe], layer: Layer) -> dict[str, Any]:
    """What each probe keeps of a layer; all their questions are answered in one pass."""
    asked = chain.from_iterable(probe.asks(layer) for probe in probes.values())
    answers = layer.P.together(asked)
    kept = {name: probe.keep(layer, answers) for name, probe in probes.items()}
    return kept if layer.P.device.type == "cpu" else on_host(kept)


class LayerScores(NamedTuple):
    """Every metric of a layer's heads: values (B, H), what uniform attention would score, rows behind it.

    The last two are (B or 1, H or 1). kv_heads: how many the layer has. heads: how many query heads.
    """

    values: Mapping[str, Tensor]
    uniform: Mapping[str, Tensor]
    support: Mapping[str, Tensor]
    heads: int
    kv_heads: int


@dataclass
class HeadScores:
    """Every metric of every head, beside what uniform attention would score; NaN where it is not of such layers."""

    ids: Sequence[str] = tuple(METRICS)
    _uniform: OfMasks[tuple[dict[str, Tensor], dict[str, Tensor]]] = field(default_factory=WeakKeyDictionary)

    def asks(self, layer: Layer) -> Sequence[Question]:
        return questions(of_kind(self.ids, layer.key.kind), layer.texts)

    def keep(self, layer: Layer, answers: Answers) -> LayerScores:
        values = means(layer.P, layer.texts, answers, of_kind(self.ids, layer.key.kind))
        uniform, rows = self._null(layer)
        none = torch.full((layer.P.batch, layer.P.heads), torch.nan, dtype=torch.float64, device=layer.P.device)
        every, null = ({name: one.get(name, none) for name in self.ids} for one in (values, uniform))
        return LayerScores(every, null, rows, layer.P.heads, layer.kv_heads)

    def _null(self, layer: Layer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The scores of uniform attention and the rows behind them; layers that share a mask share it."""
        visible = layer.P.visible
        if visible not in self._uniform:
            P = UniformAttention(visible)
            ids = of_kind(self.ids, layer.key.kind)
            null = measure(P, layer.texts, ids), support(P, layer.texts)
            self._uniform[visible] = null if P.device.type == "cpu" else on_host(null)
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
        return [TopK(1, skip_key0=not self.key_zero)]

    def keep(self, layer: Layer, answers: Answers) -> Relation:
        [asked] = self.asks(layer)
        weight_BHQ1, key_BHQ1 = answers[asked]
        excess_BHQ = weight_BHQ1[..., 0] - 1 / layer.P.visible.counts_BHQ.to(layer.P.device).clamp_min(1)
        excess_BHQ = excess_BHQ.masked_fill(~layer.texts.asked_BT[:, None], torch.nan)
        alone_BHQ = layer.P.visible.counts_BHQ[..., :1].to(layer.P.device) <= 1  # as a causal text's first query is
        excess_BHQ[..., :1] = excess_BHQ[..., :1].masked_fill(alone_BHQ, torch.nan)
        best = excess_BHQ.nan_to_num(-torch.inf).max(-1, keepdim=True)
        weight_BH = weight_BHQ1[..., 0].gather(-1, best.indices)[..., 0]
        key_BH = key_BHQ1[..., 0].gather(-1, best.indices)[..., 0]
        weight_BH = weight_BH.masked_fill(torch.isneginf(best.values[..., 0]), torch.nan)
        return Relation(weight_BH, best.indices[..., 0], key_BH)


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

    def asks(self, layer: Layer) -> Sequence[Question]:
        return [Received(layer.texts.mean_BT)]

    def keep(self, layer: Layer, answers: Answers) -> KeyMass:
        [asked] = self.asks(layer)
        mass_BHK = layer.per_kv_head(answers[asked]) if self.view.by_kv else answers[asked]
        top, kept = mass_BHK.max(-1), self.view.kept(layer)
        kept_BHK = mass_BHK if len(kept) == mass_BHK.shape[1] else mass_BHK[:, kept]
        return KeyMass(top.values, top.indices, kept_BHK.sum(1), len(kept))


@dataclass(frozen=True)
class Weights:
    """The whole matrices, for those who ask: (B, H, Q, K) fp32 on the CPU; 0 in rows of tokens without a query."""

    view: View = View()

    def asks(self, layer: Layer) -> Sequence[Question]:
        return []

    def keep(self, layer: Layer, answers: Answers) -> Tensor | None:
        heads = self.view.kept(layer)
        blocks = [self.view.rows(layer, heads, a, b).cpu() for a, b in layer.P.blocks()] if heads else []
        if not blocks:
            return None
        found = torch.cat(blocks, 2) if len(blocks) > 1 else blocks[0]
        return found.masked_fill(~layer.texts.has_query_T.cpu()[:, None], 0) if layer.texts.unasked else found


def on_host(kept: Any) -> Any:
    """What was kept, whatever holds it, with its tensors on the CPU: in one copy, since each has the host wait."""
    leaves, form = tree_flatten(kept)
    away = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.device.type != "cpu"]
    away.sort(key=lambda place: -leaves[place].element_size())  # so that each lies where its dtype may
    parts = [leaves[place].flatten().view(torch.uint8) for place in away]
    moved = torch.cat(parts).cpu().split([len(part) for part in parts]) if parts else ()
    for place, part in zip(away, moved, strict=True):
        leaves[place] = part.view(leaves[place].dtype).view(leaves[place].shape)
    return tree_unflatten(leaves, form)
