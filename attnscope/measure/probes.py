"""What to keep of a layer's attention, before its matrix is dropped: scores, relations, group masses, maps.

A probe is called once a layer with the layer's operator and keeps something small; none keeps an N x N matrix that
nobody asked for.

Shapes: B text, H head (or kv head, where a view averages them), Q query, K key, G group of tokens, k kept keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from attnscope.attention.operator import AttentionOperator, indicator
from attnscope.attention.uniform import UniformAttention
from attnscope.attention.visibility import BLOCK_BYTES, Visibility
from attnscope.measure.metrics import METRICS, Texts, measure, support

MAP_SIDE = 200  # the most rows and columns of a drawn map; longer texts are binned


@dataclass(frozen=True)
class View:
    """How entries are read wherever they are tabled or drawn.

    weights: "softmax", or "scores", the logits after scale, cap, bias and mask. kv_groups: average the query heads
    that share a kv head, None to keep them apart. heads: {layer: heads to keep}, None for all.
    """

    weights: Literal["softmax", "scores"] = "softmax"
    by_kv: bool = False
    heads: Mapping[int, Sequence[int]] | None = None

    def kept(self, layer: int, P: AttentionOperator, kv_heads: int) -> list[int]:
        """The heads (kv heads, when averaged) of a layer that this view keeps."""
        chosen = range(P.heads) if self.heads is None else self.heads.get(layer, ())
        return sorted({head * kv_heads // P.heads for head in chosen}) if self.by_kv else list(chosen)

    def rows(self, P: AttentionOperator, heads: Sequence[int], kv_heads: int, start: int, stop: int) -> Tensor:
        """Entries of a block of queries, fp32 (B, len(heads), stop - start, K)."""
        entries = P.scores(start, stop) if self.weights == "scores" else P.rows(start, stop)
        if self.by_kv:
            entries = entries.view(P.batch, kv_heads, -1, *entries.shape[2:]).mean(2)
        return entries if list(heads) == list(range(entries.shape[1])) else entries[:, list(heads)]


@dataclass(frozen=True)
class Layer:
    """Where a probe stands: the layer's number, its operator, its kv heads and the texts."""

    index: int
    P: AttentionOperator
    kv_heads: int
    texts: Texts


@dataclass
class HeadScores:
    """Every metric of every head: scores[layer][id] and even[layer][id] are (B, H) and (B, 1); support[layer][rows]."""

    ids: Sequence[str] = tuple(METRICS)
    scores: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    even: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    support: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    _nulls: list[tuple[Visibility, dict[str, Tensor], dict[str, Tensor]]] = field(default_factory=list)

    def __call__(self, layer: Layer) -> None:
        self.scores[layer.index] = {k: v.cpu() for k, v in measure(layer.P, layer.texts, self.ids).items()}
        self.even[layer.index], self.support[layer.index] = self._null(layer)

    def _null(self, layer: Layer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What attention spread evenly would score; layers that share a mask share it."""
        for visible, even, rows in self._nulls:
            if visible is layer.P.visible:
                return even, rows
        P = UniformAttention(layer.P.visible)
        even = {k: v.cpu() for k, v in measure(P, layer.texts, self.ids).items()}
        rows = {k: v.cpu() for k, v in support(P, layer.texts).items()}
        self._nulls.append((layer.P.visible, even, rows))
        return even, rows


@dataclass
class Strongest:
    """Each head's strongest relation: the largest A[i,j] - 1/v_i over i >= 1 and j >= 1 (j >= 0 with `key_zero`)."""

    key_zero: bool = False
    found: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)  # weight, query, key: (B, H)

    def __call__(self, layer: Layer) -> None:
        P = layer.P
        weight_BHQ1, key_BHQ1 = P.topk(1, skip_first=not self.key_zero)
        excess_BHQ = weight_BHQ1[..., 0] - 1 / P.visible.counts_BHQ.to(P.device).clamp_min(1)
        excess_BHQ = excess_BHQ.masked_fill(~layer.texts.to(P.device).real_BT[:, None], torch.nan)
        excess_BHQ[..., 0] = torch.nan
        best = excess_BHQ.nan_to_num(-torch.inf).max(-1, keepdim=True)
        weight_BH = weight_BHQ1[..., 0].gather(-1, best.indices)[..., 0]
        key_BH = key_BHQ1[..., 0].gather(-1, best.indices)[..., 0]
        nothing_BH = torch.isneginf(best.values[..., 0])
        found = weight_BH.masked_fill(nothing_BH, torch.nan), best.indices[..., 0], key_BH
        self.found[layer.index] = (found[0].cpu(), found[1].cpu(), found[2].cpu())


@dataclass
class TopKeys:
    """The k strongest keys of every query of every kept head (None: all visible keys), strongest first.

    With groups_BT (the group of each token, -1 for none), queries and keys are groups: sum over the keys of a group,
    mean over its queries. weight[layer]: (B, H, Q, k), NaN where there is no such key; key[layer]: its position.
    """

    k: int | None
    view: View = View()
    groups_BT: Tensor | None = None
    heads: dict[int, list[int]] = field(default_factory=dict)
    weight: dict[int, Tensor] = field(default_factory=dict)
    key: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, layer: Layer) -> None:
        heads = self.view.kept(layer.index, layer.P, layer.kv_heads)
        if not heads:
            return
        self.heads[layer.index] = heads
        weight, key = self._strongest(layer, heads)
        self.weight[layer.index], self.key[layer.index] = weight.cpu(), key.cpu()

    def _strongest(self, layer: Layer, heads: list[int]) -> tuple[Tensor, Tensor]:
        P = layer.P
        if self.groups_BT is not None:
            groups = GroupMass(self.groups_BT, self.view)
            groups(layer)
            mass_BHGG = groups.mass[layer.index]
            return _top(mass_BHGG.masked_fill(mass_BHGG == 0, -torch.inf), self.k)
        if self.view.weights == "softmax" and not self.view.by_kv:
            return P.topk(self.k or P.keys, heads)
        parts = []
        for a, b in P.blocks():
            seen = P.visible.rows(a, b)[:, :1].to(P.device)
            parts.append(_top(self.view.rows(P, heads, layer.kv_heads, a, b).masked_fill(~seen, -torch.inf), self.k))
        return torch.cat([weight for weight, _ in parts], 2), torch.cat([key for _, key in parts], 2)


@dataclass
class GroupMass:
    """Attention between groups of tokens: sum over the keys of a group, mean over its queries, so rows keep their sum.

    groups_BT: the group of each token, -1 for none (padding); key_groups_BT where the keys are grouped otherwise.
    mass[layer]: (B, H, G, G).
    """

    groups_BT: Tensor
    view: View = View()
    key_groups_BT: Tensor | None = None
    heads: dict[int, list[int]] = field(default_factory=dict)
    mass: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, layer: Layer) -> None:
        heads = self.view.kept(layer.index, layer.P, layer.kv_heads)
        if not heads:
            return
        P, keys_BT = layer.P, self.groups_BT if self.key_groups_BT is None else self.key_groups_BT
        mass_BHGG = P.group_mass(self.groups_BT.to(P.device), keys_BT.to(P.device))
        if self.view.by_kv:
            mass_BHGG = mass_BHGG.view(P.batch, layer.kv_heads, -1, *mass_BHGG.shape[2:]).mean(2)
        size_BG = indicator(self.groups_BT.to(P.device)).sum(1).clamp_min(1)
        mass_BHGG = mass_BHGG[:, heads] / size_BG[:, None, :, None]
        self.heads[layer.index], self.mass[layer.index] = heads, mass_BHGG.cpu()


@dataclass
class Maps:
    """Matrices to draw, one text: whole up to `side` tokens, binned beyond; NaN where a query sees no key of a cell.

    rule "sum": sum over the keys of a bin, mean over its queries, so rows keep their sum. "max", and always for
    scores: the largest entry. values[layer]: (H, Q, K) float32. With `split_sink`, key 0 is a column of its own also
    where keys are binned.
    """

    tokens: int
    view: View = View()
    rule: Literal["sum", "max"] = "sum"
    split_sink: bool = False
    side: int = MAP_SIDE
    heads: dict[int, list[int]] = field(default_factory=dict)
    values: dict[int, np.ndarray] = field(default_factory=dict)
    _shown: list[tuple[Visibility, Tensor]] = field(default_factory=list)  # layers that share a mask share it

    def __post_init__(self) -> None:
        if self.view.weights == "scores":
            self.rule = "max"  # a sum of logits says nothing

    @property
    def bin_size(self) -> int:
        """How many tokens one row or column stands for."""
        return max(1, -(-self.tokens // self.side))

    @property
    def rows(self) -> list[int]:
        """How many tokens each row stands for; the last may stand for fewer."""
        size = self.bin_size
        return [min(size, self.tokens - start) for start in range(0, self.tokens, size)]

    @property
    def columns(self) -> list[int]:
        """How many tokens each column stands for."""
        first, *rest = self.rows
        return [1, first - 1, *rest] if self.split_sink and first > 1 else [first, *rest]

    def __call__(self, layer: Layer) -> None:
        heads = self.view.kept(layer.index, layer.P, layer.kv_heads)
        if not heads:
            return
        read = self._summed if self.rule == "sum" and self.bin_size > 1 else self._largest
        values_HQK = read(layer, heads).masked_fill(~self._visible(layer.P), torch.nan)
        self.heads[layer.index], self.values[layer.index] = heads, values_HQK.cpu().numpy()

    def _summed(self, layer: Layer, heads: list[int]) -> Tensor:
        groups = GroupMass(_runs(self.rows)[None], self.view, _runs(self.columns)[None])
        groups(layer)
        return groups.mass[layer.index][0].to(layer.P.device)

    def _largest(self, layer: Layer, heads: list[int]) -> Tensor:
        strips = []
        for a, b in self._strips(layer.P.heads):
            rows_HQK = self.view.rows(layer.P, heads, layer.kv_heads, a, b)[0, ..., : self.tokens]
            strips.append(self._cells(rows_HQK.masked_fill(~self._seen(layer.P, a, b), -torch.inf), a, b))
        return torch.cat(strips, -2)

    def _visible(self, P: AttentionOperator) -> Tensor:
        """(Q, K) of the map: does any query of the row see any key of the column?"""
        for visible, known in self._shown:
            if visible is P.visible:
                return known
        shown = P.visible.cells(self.rows, self.columns)
        if shown is None:
            shown = torch.cat([self._cells(self._seen(P, a, b).byte(), a, b) for a, b in self._strips(1)]).bool()
        self._shown.append((P.visible, shown))
        return shown

    def _cells(self, values: Tensor, start: int, stop: int) -> Tensor:
        """The largest entry of each cell in a strip of whole rows of cells."""
        if self.bin_size == 1:
            return values
        size = self.bin_size
        columns = torch.cat([part.amax(-1, keepdim=True) for part in values.split(self.columns, -1)], -1)
        rows = [min(size, stop - a) for a in range(start, stop, size)]
        return torch.cat([part.amax(-2, keepdim=True) for part in columns.split(rows, -2)], -2)

    def _seen(self, P: AttentionOperator, start: int, stop: int) -> Tensor:
        return P.visible.rows(start, stop)[0, 0, :, : self.tokens].to(P.device)

    def _strips(self, heads: int) -> list[tuple[int, int]]:
        """Row ranges of whole cells."""
        step = self.bin_size * max(1, BLOCK_BYTES // (4 * self.tokens * self.bin_size * heads))
        return [(a, min(self.tokens, a + step)) for a in range(0, self.tokens, step)]


@dataclass
class Weights:
    """The whole matrices, for those who ask: weights[layer] is (B, H, Q, K) fp32 on the CPU."""

    view: View = View()
    heads: dict[int, list[int]] = field(default_factory=dict)
    weights: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, layer: Layer) -> None:
        heads = self.view.kept(layer.index, layer.P, layer.kv_heads)
        if heads:
            self.heads[layer.index] = heads
            self.weights[layer.index] = self.view.rows(layer.P, heads, layer.kv_heads, 0, layer.P.queries).cpu()


def _runs(sizes: Sequence[int]) -> Tensor:
    """[2, 3] -> [0, 0, 1, 1, 1]: the run that each token is in."""
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))


def _top(entries: Tensor, k: int | None) -> tuple[Tensor, Tensor]:
    """The k largest entries of every row and their positions; NaN for what is -inf."""
    best = entries.topk(min(k or entries.shape[-1], entries.shape[-1]), dim=-1)
    return best.values.masked_fill(torch.isneginf(best.values), torch.nan), best.indices
