"""What to keep of a layer's attention before its matrix is dropped: scores, relations, group masses, maps.

A probe says what it asks of a layer (`asks`), and makes of the answers something small that is kept (`keep`); each is
called once per layer. All probes' questions are answered in one pass. None keeps an N x N matrix that nobody asked for.

Shapes: B text, H head (or kv head, where a view averages them), Q query, K key, G group of tokens, k kept keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, groupby
from typing import Any, Literal, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from attnscope.attention.operator import AttentionOperator
from attnscope.attention.questions import GroupMass, Key, Question, Received, Strongest, TopK
from attnscope.attention.rows import indicator, inside, join, strongest
from attnscope.attention.uniform import UniformAttention
from attnscope.attention.visibility import BLOCK_BYTES, Visibility
from attnscope.measure.layers import LayerKey
from attnscope.measure.metrics import METRICS, Texts, means, measure, questions, support

T = TypeVar("T")
MAP_SIDE = 200  # the most rows and columns of a drawn map; longer texts are binned
Answers = Mapping[Question, Any]
OfMasks = WeakKeyDictionary[Visibility, T]  # weak: a model that makes a mask per layer must not pile them up


@dataclass(frozen=True)
class View:
    """How entries are read wherever they are tabled or drawn.

    weights: "softmax", or "scores", the logits after scale, cap, bias and mask. by_kv: average the query heads that
    share a kv head. heads: {layer: heads to keep}, None for all.

        >>> attnscope.Request(view=attnscope.View(by_kv=True, heads={0: [1, 2]}), relations=True)
    """

    weights: Literal["softmax", "scores"] = "softmax"
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
    """Where a probe stands: which layer, its operator, its kv heads, and the texts on its device."""

    key: LayerKey
    P: AttentionOperator
    kv_heads: int
    texts: Texts
    _here: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False, kw_only=True)

    def here(self, tensor: Tensor) -> Tensor:
        """The tensor on the layer's device: the same one each time, since questions are told apart by it."""
        if tensor.device == self.P.device:
            return tensor
        if id(tensor) not in self._here:
            self._here[id(tensor)] = tensor, tensor.to(self.P.device)  # holding the first keeps its id its own
        return self._here[id(tensor)][1]

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
        """What stays of the layer, small and on the CPU; None where there is nothing to keep."""


def run_probes(probes: Mapping[str, Probe], layer: Layer) -> dict[str, Any]:
    """What each probe keeps of a layer; all their questions are answered in one pass."""
    asked = chain.from_iterable(probe.asks(layer) for probe in probes.values())
    answers = layer.P.together(asked)
    return {name: probe.keep(layer, answers) for name, probe in probes.items()}


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
    """Every metric of every head, beside what uniform attention would score."""

    ids: Sequence[str] = tuple(METRICS)
    _uniform: OfMasks[tuple[dict[str, Tensor], dict[str, Tensor]]] = field(default_factory=WeakKeyDictionary)

    def asks(self, layer: Layer) -> Sequence[Question]:
        return questions(self.ids, layer.texts)

    def keep(self, layer: Layer, answers: Answers) -> LayerScores:
        values = _on_cpu(means(layer.P, layer.texts, answers, self.ids))
        return LayerScores(values, *self._null(layer), layer.P.heads, layer.kv_heads)

    def _null(self, layer: Layer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The scores of uniform attention and the rows behind them; layers that share a mask share it."""
        visible = layer.P.visible
        if visible not in self._uniform:
            P = UniformAttention(visible)
            self._uniform[visible] = (
                _on_cpu(measure(P, layer.texts, self.ids)),
                _on_cpu(support(P, layer.texts)),
            )
        return self._uniform[visible]


class Relation(NamedTuple):
    """Per text and head the weight, query and key of one relation, (B, H) each; the weight is NaN for none."""

    weight: Tensor
    query: Tensor
    key: Tensor


@dataclass(frozen=True)
class TopRelation:
    """Each head's strongest relation: the largest A[i,j] - 1/v_i over i >= 1 and j >= 1 (j >= 0 with `key_zero`).

    Of the named queries, where some are.
    """

    key_zero: bool = False

    def asks(self, layer: Layer) -> Sequence[Question]:
        return [TopK(1, skip_key0=not self.key_zero)]

    def keep(self, layer: Layer, answers: Answers) -> Relation:
        [asked] = self.asks(layer)
        weight_BHQ1, key_BHQ1 = answers[asked]
        excess_BHQ = weight_BHQ1[..., 0] - 1 / layer.P.visible.counts_BHQ.to(layer.P.device).clamp_min(1)
        excess_BHQ = excess_BHQ.masked_fill(~layer.texts.asked_BT[:, None], torch.nan)
        excess_BHQ[..., 0] = torch.nan
        best = excess_BHQ.nan_to_num(-torch.inf).max(-1, keepdim=True)
        weight_BH = weight_BHQ1[..., 0].gather(-1, best.indices)[..., 0]
        key_BH = key_BHQ1[..., 0].gather(-1, best.indices)[..., 0]
        weight_BH = weight_BH.masked_fill(torch.isneginf(best.values[..., 0]), torch.nan)
        return Relation(weight_BH.cpu(), best.indices[..., 0].cpu(), key_BH.cpu())


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
        return KeyMass(top.values.cpu(), top.indices.cpu(), mass_BHK[:, kept].sum(1).cpu(), len(kept))


class KeptKeys(NamedTuple):
    """The kept keys of a text's queries: heads (H numbers), weight (H, Q, k), NaN where there is none, and key.

    query: which queries, Q numbers.
    """

    heads: list[int]
    weight: Tensor
    key: Tensor
    query: Sequence[int]


@dataclass(frozen=True)
class TopKeys:
    """The k strongest keys of every query of every kept head (None: all visible keys), strongest first.

    With groups_BT (the group of each token, -1 for none), queries and keys are groups: sum over the keys of a group,
    mean over its queries.
    """

    k: int | None
    view: View = View()
    groups_BT: Tensor | None = None

    def asks(self, layer: Layer) -> Sequence[Question]:
        if not self.view.kept(layer):
            return []
        if self.groups_BT is not None:
            return [_group_question(layer, self.groups_BT, self.groups_BT)]
        return [self._top(layer)] if self.view.of_heads else []

    def keep(self, layer: Layer, answers: Answers) -> list[KeptKeys] | None:
        heads = self.view.kept(layer)
        if not heads:
            return None
        if self.groups_BT is not None:
            mass_BHGG = _group_mass(layer, self.view, answers, self.groups_BT, self.groups_BT)
            weight, key = _top(mass_BHGG.masked_fill(mass_BHGG == 0, -torch.inf), self.k)
        elif self.view.of_heads:
            weight, key = answers[self._top(layer)]
        else:
            weight, key = self._from_rows(layer, heads)
        every = range(weight.shape[2])
        return [KeptKeys(heads, *pair, every) for pair in zip(weight.cpu(), key.cpu(), strict=True)]

    def _top(self, layer: Layer) -> TopK:
        heads = self.view.kept(layer)
        every = heads == list(range(layer.P.heads))
        return TopK(min(self.k or layer.P.keys, layer.P.keys), None if every else tuple(heads))

    def _from_rows(self, layer: Layer, heads: list[int]) -> tuple[Tensor, Tensor]:
        parts = []
        for a, b in layer.P.blocks():
            seen = self.view.seen(layer, heads, layer.P.visible.rows(a, b)).to(layer.P.device)
            parts.append(_top(self.view.rows(layer, heads, a, b).masked_fill(~seen, -torch.inf), self.k))
        return torch.cat([weight for weight, _ in parts], 2), torch.cat([key for _, key in parts], 2)


@dataclass(frozen=True)
class ChosenKeys:
    """The k strongest of chosen keys (None: all) of every chosen query, else as `TopKeys`.

    query, key: which, per text, ascending: positions, or with groups_BT the numbers of groups.
    """

    k: int | None
    query: tuple[Sequence[int], ...]
    key: tuple[Sequence[int], ...]
    view: View = View()
    groups_BT: Tensor | None = None

    def asks(self, layer: Layer) -> Sequence[Question]:
        if not self.view.kept(layer):
            return []
        if self.groups_BT is not None:
            return [_group_question(layer, *self._groups)]
        return [self._question(layer)] if self.view.of_heads else []

    def keep(self, layer: Layer, answers: Answers) -> list[KeptKeys] | None:
        heads = self.view.kept(layer)
        if not heads:
            return None
        if self.groups_BT is not None:
            found = self._of_groups(layer, answers)
        else:
            found = answers[self._question(layer)] if self.view.of_heads else self._from_rows(layer, heads)
        kept = zip(self.query, found, strict=True)
        return [KeptKeys(heads, weight.cpu(), key.cpu(), query) for query, (weight, key) in kept]

    def _question(self, layer: Layer, heads: Sequence[int] | None = None) -> Strongest:
        of = self.view.kept(layer) if heads is None else heads
        return Strongest(self.k or layer.P.keys, tuple(of), self.query, self.key)

    @cached_property
    def _groups(self) -> tuple[Tensor, Tensor]:
        """The number of each token's group among the chosen ones, as query and as key, (B, T) each; -1 for none."""
        assert self.groups_BT is not None
        return _renumbered(self.groups_BT, self.query), _renumbered(self.groups_BT, self.key)

    def _of_groups(self, layer: Layer, answers: Answers) -> list[tuple[Tensor, Tensor]]:
        mass_BHGG = _group_mass(layer, self.view, answers, *self._groups)
        found = []
        for mass_HGG, query, key in zip(mass_BHGG, self.query, self.key, strict=True):
            mine = mass_HGG[:, : len(query), : len(key)]
            weight, place = _top(mine.masked_fill(mine == 0, -torch.inf), self.k)
            found.append((weight, torch.tensor(key, device=place.device)[place]))
        return found

    def _from_rows(self, layer: Layer, heads: list[int]) -> list[tuple[Tensor, Tensor]]:
        question, P = self._question(layer, range(len(heads))), layer.P
        parts = []
        for a, b in self._runs(P.blocks()):
            seen = self.view.seen(layer, heads, P.visible.rows(a, b)).to(P.device)
            parts.append(strongest(question, self.view.rows(layer, heads, a, b), seen, a))
        return join(question, parts)

    def _runs(self, blocks: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """The chosen queries of all texts as ranges of rows, none longer than a block."""
        chosen = sorted({*chain.from_iterable(self.query)})
        for start, stop in blocks:
            for _, run in groupby(enumerate(chosen[inside(chosen, start, stop)]), lambda pair: pair[1] - pair[0]):
                _, rows = zip(*run, strict=True)
                yield rows[0], rows[-1] + 1


class KeptMap(NamedTuple):
    """The matrices to draw of one layer: heads (H numbers), values (H, rows, columns), NaN for what is not visible.

    key0: where key 0 is split off binned weights, the mean mass on it over the queries that see it and another, (H,).
    """

    heads: list[int]
    values: np.ndarray
    key0: np.ndarray | None = None


class Cells(NamedTuple):
    """One side of a map: its tokens in their order, and how many of them each row (or column) stands for.

    size: how many a whole one stands for.
    """

    tokens: Sequence[int]
    sizes: Sequence[int]
    size: int

    @classmethod
    def of(cls, tokens: Sequence[int], side: int, split_key0: bool = False) -> Cells:
        """At most `side` of one size, but for the last; split_key0: token 0 has one more, of its own."""
        size = max(1, -(-len(tokens) // side))
        sizes = [min(size, len(tokens) - start) for start in range(0, len(tokens), size)]
        if split_key0 and tokens[0] == 0 and sizes[0] > 1:
            sizes[:1] = [1, sizes[0] - 1]
        return cls(tokens, sizes, size)

    @property
    def starts(self) -> list[int]:
        """The first token of each."""
        return [self.tokens[place] for place in accumulate(self.sizes[:-1], initial=0)]

    def coarser(self, side: int, key0_apart: bool = False) -> tuple[np.ndarray, Cells]:
        """At most about `side` of them, neighbours put together: where each begins among these, and what it is.

        key0_apart: token 0 stays, or gets, one of its own.
        """
        step = max(1, -(-len(self.sizes) // side))
        if step == 1:
            return np.arange(len(self.sizes)), self
        apart = key0_apart and self.tokens[0] == 0
        own = int(apart and self.size > 1 and self.sizes[0] == 1)
        starts = np.arange(0, len(self.sizes) - own, step) + own  # where rows begin, that is: the axes stay in step
        starts = np.concatenate([[0], np.maximum(starts, 1)]) if apart else starts
        return starts, Cells(self.tokens, np.add.reduceat(self.sizes, starts).tolist(), self.size * step)

    def groups(self, count: int) -> Tensor:
        """The number of the row or column that each of so many tokens is in, -1 for none."""
        groups_T = torch.full((count,), -1)
        groups_T[torch.tensor(self.tokens)] = _runs(self.sizes)
        return groups_T


@dataclass
class Maps:
    """Matrices to draw, one text: whole up to `side` tokens, binned beyond; NaN where a query sees no key of a cell.

    rule "sum": sum over the keys of a bin, mean over its queries, so rows keep their sum. "max", and always for
    scores: the largest entry. With `split_sink`, key 0 is a column of its own also where keys are binned. queries,
    keys: the part of the matrices that is drawn, None for all; only its rows are read where it is not binned.
    """

    tokens: int
    view: View = View()
    rule: Literal["sum", "max"] = "sum"
    split_sink: bool = False
    side: int = MAP_SIDE
    queries: Sequence[int] | None = None
    keys: Sequence[int] | None = None
    _shown: OfMasks[Tensor] = field(default_factory=WeakKeyDictionary)  # layers that share a mask share it

    def __post_init__(self) -> None:
        if self.view.weights == "scores":
            self.rule = "max"  # a sum of logits says nothing
        every = range(self.tokens)
        self.rows = Cells.of(every if self.queries is None else self.queries, self.side)
        self.columns = Cells.of(every if self.keys is None else self.keys, self.side, self.split_sink)
        self._groups: tuple[Tensor, Tensor] = (
            self.rows.groups(self.tokens)[None],
            self.columns.groups(self.tokens)[None],
        )

    def asks(self, layer: Layer) -> Sequence[Question]:
        if not self.view.kept(layer):
            return []
        key0 = [Key(0)] if self._key0_apart else []
        return [_group_question(layer, *self._groups), *key0] if self._summed else key0

    def keep(self, layer: Layer, answers: Answers) -> KeptMap | None:
        heads = self.view.kept(layer)
        if not heads:
            return None
        if self._summed:
            values_HQK = _group_mass(layer, self.view, answers, *self._groups)[0]
            hidden = ~self.view.seen(layer, heads, self._visible(layer.P)[None])[0]
        else:
            values_HQK = self._largest(layer, heads)
            hidden = torch.isneginf(values_HQK)
        shown_HQK = values_HQK.masked_fill(hidden, torch.nan).cpu().numpy()
        return KeptMap(heads, shown_HQK, self._mean_of_key0(layer, heads, answers) if self._key0_apart else None)

    @property
    def _binned(self) -> bool:
        return max(self.rows.size, self.columns.size) > 1

    @property
    def _key0_apart(self) -> bool:
        return self.split_sink and self._binned and self.view.weights == "softmax" and self.columns.tokens[0] == 0

    def _mean_of_key0(self, layer: Layer, heads: list[int], answers: Answers) -> np.ndarray:
        visible, mass_BHQ, rows = layer.P.visible, answers[Key(0)], torch.tensor(self.rows.tokens)
        seen_BHQ = visible.at(visible.position_Q[None] * 0) & (visible.counts_BHQ >= 2)
        seen_BHQ = seen_BHQ.to(mass_BHQ.device).expand_as(mass_BHQ)[..., rows]
        mean_BH = (mass_BHQ[..., rows] * seen_BHQ).sum(-1) / seen_BHQ.sum(-1)
        return (layer.per_kv_head(mean_BH) if self.view.by_kv else mean_BH)[0, heads].cpu().numpy()

    @property
    def _summed(self) -> bool:
        return self.rule == "sum" and self._binned

    def _largest(self, layer: Layer, heads: list[int]) -> Tensor:
        strips = []
        for a, b in self._strips(layer.P.heads):
            rows_HQK = self._read(a, b, lambda start, stop: self.view.rows(layer, heads, start, stop)[0])
            seen_HQK = self.view.seen(layer, heads, self._seen(layer.P, a, b)[None])[0]
            strips.append(self._cells(rows_HQK.masked_fill(~seen_HQK, -torch.inf), a, b))
        return torch.cat(strips, -2)

    def _visible(self, P: AttentionOperator) -> Tensor:
        """(H or 1, rows, columns): does any query of a row of the map see any key of a column?"""
        if P.visible not in self._shown:
            whole = self.queries is None and self.keys is None
            shown = P.visible.cells(self.rows.sizes, self.columns.sizes) if whole else None
            if shown is None:
                strips = [self._cells(self._seen(P, a, b).byte(), a, b) for a, b in self._strips(P.heads)]
                shown = torch.cat(strips, -2).bool()
            self._shown[P.visible] = shown if shown.ndim == 3 else shown[None]
        return self._shown[P.visible]

    def _cells(self, values: Tensor, start: int, stop: int) -> Tensor:
        """The largest entry of each cell in a strip of whole rows of cells."""
        if not self._binned:
            return values
        size = self.rows.size
        columns = torch.cat([part.amax(-1, keepdim=True) for part in values.split(self.columns.sizes, -1)], -1)
        rows = [min(size, stop - a) for a in range(start, stop, size)]
        return torch.cat([part.amax(-2, keepdim=True) for part in columns.split(rows, -2)], -2)

    def _seen(self, P: AttentionOperator, start: int, stop: int) -> Tensor:
        return self._read(start, stop, lambda a, b: P.visible.rows(a, b)[0].to(P.device))

    def _read(self, start: int, stop: int, rows: Callable[[int, int], Tensor]) -> Tensor:
        """The map's own rows [start, stop) and columns, of a reader of ranges of queries."""
        parts = [rows(first, last + 1) for first, last in _neighbours(self.rows.tokens[start:stop])]
        read = torch.cat(parts, -2) if len(parts) > 1 else parts[0]
        if self.keys is None:
            return read[..., : self.tokens]
        return read.index_select(-1, torch.tensor(self.keys, device=read.device))

    def _strips(self, heads: int) -> list[tuple[int, int]]:
        """Ranges of the map's queries, of whole cells."""
        size, count = self.rows.size, len(self.rows.tokens)
        step = size * max(1, BLOCK_BYTES // (4 * self.tokens * size * heads))
        return [(a, min(count, a + step)) for a in range(0, count, step)]


@dataclass(frozen=True)
class Weights:
    """The whole matrices, for those who ask: (B, H, Q, K) fp32 on the CPU."""

    view: View = View()

    def asks(self, layer: Layer) -> Sequence[Question]:
        return []

    def keep(self, layer: Layer, answers: Answers) -> Tensor | None:
        heads = self.view.kept(layer)
        blocks = [self.view.rows(layer, heads, a, b).cpu() for a, b in layer.P.blocks()] if heads else []
        return torch.cat(blocks, 2) if len(blocks) > 1 else blocks[0] if blocks else None


def _group_question(layer: Layer, query_groups_BT: Tensor, key_groups_BT: Tensor) -> GroupMass:
    return GroupMass(layer.here(query_groups_BT), layer.here(key_groups_BT))


def _group_mass(layer: Layer, view: View, answers: Answers, query_groups_BT: Tensor, key_groups_BT: Tensor) -> Tensor:
    """(B, H, G, G): sum over the keys of a group, mean over its queries, so rows keep their sum."""
    mass_BHGG = answers[_group_question(layer, query_groups_BT, key_groups_BT)]
    mass_BHGG = layer.per_kv_head(mass_BHGG) if view.by_kv else mass_BHGG
    size_BG = indicator(query_groups_BT.to(layer.P.device)).sum(1).clamp_min(1)
    return mass_BHGG[:, view.kept(layer)] / size_BG[:, None, :, None]


def _renumbered(groups_BT: Tensor, chosen: Sequence[Sequence[int]]) -> Tensor:
    """The place of each token's group among the chosen ones of its text, (B, T); -1 for none."""
    places = []
    for groups_T, wanted in zip(groups_BT, chosen, strict=True):
        place = torch.full((len(groups_T) + 1,), -1)  # the last: of tokens in no group
        place[list(wanted)] = torch.arange(len(wanted))
        places.append(place[groups_T])
    return torch.stack(places)


def _runs(sizes: Sequence[int]) -> Tensor:
    """[2, 3] -> [0, 0, 1, 1, 1]: the run that each token is in."""
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))


def _neighbours(tokens: Sequence[int]) -> list[tuple[int, int]]:
    """[2, 3, 4, 8] -> (2, 4), (8, 8): the first and the last of each run of neighbours."""
    ends = [place for place in range(1, len(tokens)) if tokens[place] != tokens[place - 1] + 1]
    return [(tokens[a], tokens[b - 1]) for a, b in zip([0, *ends], [*ends, len(tokens)], strict=True)]


def _top(entries: Tensor, k: int | None) -> tuple[Tensor, Tensor]:
    """The k largest entries of every row and their positions; NaN for what is -inf."""
    best = entries.topk(min(k or entries.shape[-1], entries.shape[-1]), dim=-1)
    return best.values.masked_fill(torch.isneginf(best.values), torch.nan), best.indices


def _on_cpu(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in found.items()}
