"""What is kept of the entries of matrices: the strongest keys of queries, maps to draw, and whole matrices.

Maps are whole, binned, or the part of some tokens. And what weights are made of: q, k and v as they were multiplied,
scale, cap, bias, sinks.

Shapes: B text, H head (or kv head, where a view averages them), Q query, K key, G group of tokens, k kept keys,
D width of q and k, V width of v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnscope.attention.operator import AttentionOperator
from attnscope.attention.questions import Key, Question, Strongest, TopK
from attnscope.attention.rows import inside, join, strongest
from attnscope.attention.spec import BLOCK_BYTES, AttentionSpec
from attnscope.metrics.texts import MAP_SIDE, Cells
from attnscope.model.selection import consecutive
from attnscope.observe.collectors import (
    Answers,
    Collected,
    OfMasks,
    ViewCollector,
    group_mass,
    group_question,
    groups_of,
)
from attnscope.observe.records import KeptKeys, KeptOperands, LayerMaps, Matrices
from attnscope.observe.request import Layer, LayerKey, PerLayer, Request, TextInputs, View, nothing_named


@dataclass(frozen=True)
class TopKeys(ViewCollector):
    """The k strongest keys of every query of every kept head (None: all visible keys), strongest first.

    With groups (the group of each token, -1 for none, of the queries (B, Q) and of the keys (B, K)), queries and keys
    are groups: sum over the keys of a group, mean over its queries.
    """

    k: int | None
    view: View = View()
    groups: tuple[Tensor, Tensor] | None = None

    name = "relations"
    cuts = True

    @classmethod
    def of(cls, texts: Sequence[TextInputs], request: Request) -> TopKeys:
        """The strongest keys of all queries, or of those that are asked about; none where no text has what is named."""
        view = replace(request.view, heads={}) if nothing_named(texts) else request.view
        groups = None
        if request.group:
            of_queries = groups_of([text.prompt for text in texts], request.group)
            others = texts[0].keys is not None
            groups = of_queries, groups_of([text.key_prompt for text in texts], request.group) if others else of_queries
        if not any(text.chosen.query or text.chosen.key or text.prompt.medium.unasked for text in texts):
            return TopKeys(request.top_k, view, groups)

        def units(places: Sequence[int], text: int, side: int) -> Sequence[int]:
            """Tokens, or the groups that they are in."""
            return places if groups is None else tuple(groups[side][text, list(places)].unique().tolist())

        query = tuple(units(text.queries, row, 0) for row, text in enumerate(texts))
        key = tuple(units(text.key_positions, row, 1) for row, text in enumerate(texts))
        return ChosenKeys(request.top_k, view, groups, query, key)

    def ask(self, layer: Layer) -> Sequence[Question]:
        if self.groups is not None:
            return [group_question(layer, *self._groups)]
        return [self._question(layer)] if self.view.of_heads else []

    def keep(self, layer: Layer, heads: list[int], answers: Answers) -> list[KeptKeys]:
        if self.groups is not None:
            mass_BHGG = group_mass(layer, self.view, answers, *self._groups)
            weight, key = _top(mass_BHGG.masked_fill(mass_BHGG == 0, -torch.inf), self.k)
        else:
            weight, key = answers[self._question(layer)] if self.view.of_heads else self._of_blocks(layer, heads)
        queries = range(weight.shape[2])
        return [KeptKeys(heads, *pair, queries) for pair in zip(weight, key.int(), strict=True)]

    def part(self, collected: list[KeptKeys], places: slice, heads: list[int]) -> list[KeptKeys]:
        return [KeptKeys(heads, of.weight[places], of.key[places], of.query) for of in collected]

    def of_text(self, collected: Sequence[KeptKeys], row: int, text: TextInputs) -> KeptKeys:
        return collected[row]

    @property
    def _groups(self) -> tuple[Tensor, Tensor]:
        assert self.groups is not None
        return self.groups

    def _question(self, layer: Layer) -> Question:
        heads = self.view.kept(layer)
        every = heads == list(range(layer.P.heads))
        return TopK(min(self.k or layer.P.keys, layer.P.keys), None if every else tuple(heads))

    def _of_blocks(self, layer: Layer, heads: list[int]) -> tuple[Tensor, Tensor]:
        parts = []
        for a, b in layer.P.blocks():
            seen = self.view.seen(layer, heads, layer.P.visible.rows(a, b)).to(layer.P.device)
            entries = self.view.rows(layer, heads, a, b, self.k)
            size = entries.abs() if layer.P.signed else entries
            largest, key = _top(size.masked_fill(~seen, -torch.inf), self.k)
            parts.append((entries.gather(-1, key).masked_fill(largest.isnan(), torch.nan), key))
        return torch.cat([weight for weight, _ in parts], 2), torch.cat([key for _, key in parts], 2)


@dataclass(frozen=True)
class ChosenKeys(TopKeys):
    """The k strongest of chosen keys (None: all) of every chosen query, else as `TopKeys`.

    query, key: which, per text, ascending: positions, or with groups the numbers of groups.
    """

    query: tuple[Sequence[int], ...] = ()
    key: tuple[Sequence[int], ...] = ()

    def keep(self, layer: Layer, heads: list[int], answers: Answers) -> list[KeptKeys]:
        if self.groups is not None:
            pairs = self._of_groups(layer, answers)
        else:
            pairs = answers[self._question(layer)] if self.view.of_heads else self._from_rows(layer, heads)
        return [KeptKeys(heads, *pair, query) for query, pair in zip(self.query, pairs, strict=True)]

    def _question(self, layer: Layer) -> Strongest:
        return Strongest(self.k or layer.P.keys, tuple(self.view.kept(layer)), self.query, self.key)

    @cached_property
    def _groups(self) -> tuple[Tensor, Tensor]:
        """The number of each token's group among the chosen ones, as query and as key, (B, T) each; -1 for none."""
        assert self.groups is not None
        return _renumbered(self.groups[0], self.query), _renumbered(self.groups[1], self.key)

    def _of_groups(self, layer: Layer, answers: Answers) -> list[tuple[Tensor, Tensor]]:
        mass_BHGG = group_mass(layer, self.view, answers, *self._groups)
        pairs = []
        for mass_HGG, query, key in zip(mass_BHGG, self.query, self.key, strict=True):
            mine = mass_HGG[:, : len(query), : len(key)]
            weight, place = _top(mine.masked_fill(mine == 0, -torch.inf), self.k)
            pairs.append((weight, torch.tensor(key, device=place.device)[place]))
        return pairs

    def _from_rows(self, layer: Layer, heads: list[int]) -> list[tuple[Tensor, Tensor]]:
        question, P = replace(self._question(layer), heads=tuple(range(len(heads)))), layer.P
        by_size, parts = self.view.by_size or P.signed, []
        for a, b in self._runs(P.blocks()):
            seen = self.view.seen(layer, heads, P.visible.rows(a, b)).to(P.device)
            entries = self.view.rows(layer, heads, a, b)
            parts.append(strongest(question, entries.abs() if by_size else entries, seen, a, entries))
        return join(question, parts)

    def _runs(self, blocks: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """The chosen queries of all texts as ranges of rows, none longer than a block."""
        chosen = sorted({*chain.from_iterable(self.query)})
        for start, stop in blocks:
            yield from ((run[0], run[-1] + 1) for run in consecutive(chosen[inside(chosen, start, stop)]))


def _renumbered(groups_BT: Tensor, chosen: Sequence[Sequence[int]]) -> Tensor:
    """The place of each token's group among the chosen ones of its text, (B, T); -1 for none."""
    places = []
    for groups_T, wanted in zip(groups_BT, chosen, strict=True):
        place = torch.full((len(groups_T) + 1,), -1)  # the last: of tokens in no group
        place[list(wanted)] = torch.arange(len(wanted))
        places.append(place[groups_T])
    return torch.stack(places)


def _top(entries: Tensor, k: int | None) -> tuple[Tensor, Tensor]:
    """The k largest entries of every row and their positions; NaN for what is -inf."""
    best = entries.topk(min(k or entries.shape[-1], entries.shape[-1]), dim=-1)
    return best.values.masked_fill(torch.isneginf(best.values), torch.nan), best.indices


class KeptMap(NamedTuple):
    """The matrices to draw of one layer: heads (H numbers), values (H, rows, columns), NaN for what is not visible.

    Of texts that are drawn whole values are (B, H, Q, K).
    key0: where key 0 is split off binned weights, the mean mass on it over the queries that see it and another, (H,).
    """

    heads: list[int]
    values: np.ndarray
    key0: np.ndarray | None = None


class MapCollector(ViewCollector):
    """Matrices to draw, of one text or of several that are drawn whole."""

    name = "maps"
    cuts = True

    @classmethod
    def of(cls, texts: Sequence[TextInputs], request: Request) -> MapCollector | None:
        """The maps of one text, or of several that are drawn whole; none where none has anything of what is named."""
        if nothing_named(texts):
            return None
        view = request.view if request.maps == "kept" else replace(request.view, heads=None)
        maps = [
            Maps(
                len(text.prompt),
                view,
                request.bin_rule,
                request.split_sink,
                request.map_side,
                text.queries if text.chosen.query or text.prompt.medium.unasked else None,
                text.key_positions if text.chosen.key else None,
                len(text.key_prompt),
            )
            for text in texts
        ]
        return maps[0] if len(texts) == 1 else WholeMaps(view, maps)

    def part(self, collected: KeptMap, places: slice, heads: list[int]) -> KeptMap:
        key0 = None if collected.key0 is None else collected.key0[places]
        return KeptMap(heads, collected.values[..., places, :, :], key0)


@dataclass
class Maps(MapCollector):
    """Matrices to draw, one text: whole up to `side` tokens, binned beyond; NaN where a query sees no key of a cell.

    rule "sum": sum over the keys of a bin, mean over its queries, so rows keep their sum. "max", and always for
    scores and norms: the largest entry, of signed weights that with the largest |w|. With `split_sink`, key 0 is a
    column of its own also where keys are binned.
    tokens: how many queries there are, and key_tokens how many keys, None for as many. queries, keys: the part of the
    matrices that is drawn, None for all; only its rows are read where it is not binned.
    """

    tokens: int
    view: View = View()
    rule: Literal["sum", "max"] = "sum"
    split_sink: bool = False
    side: int = MAP_SIDE
    queries: Sequence[int] | None = None
    keys: Sequence[int] | None = None
    key_tokens: int | None = None
    _shown: OfMasks[Tensor] = field(default_factory=OfMasks)

    def __post_init__(self) -> None:
        if self.view.weights != "softmax":
            self.rule = "max"  # a sum of logits says nothing, nor one of norms: vectors cancel
        self._keys = self.tokens if self.key_tokens is None else self.key_tokens
        self.rows = Cells.of(range(self.tokens) if self.queries is None else self.queries, self.side)
        every_key = range(self._keys) if self.keys is None else self.keys
        self.columns = Cells.of(every_key, self.side, self.split_sink)
        self._binned = max(self.rows.size, self.columns.size) > 1
        self._summed = self._binned and self.rule == "sum"
        key0_apart = self._binned and self.split_sink and self.columns.tokens[0] == 0
        self._key0_apart = key0_apart and self.view.weights == "softmax"

    @cached_property
    def _groups(self) -> tuple[Tensor, Tensor]:
        """Which row each query is in, and which column each key, (1, Q) and (1, K)."""
        return self.rows.groups(self.tokens)[None], self.columns.groups(self._keys)[None]

    def ask(self, layer: Layer) -> Sequence[Question]:
        key0 = [Key(0)] if self._key0_apart else []
        return [group_question(layer, *self._groups), *key0] if self._summed else key0

    def keep(self, layer: Layer, heads: list[int], answers: Answers) -> KeptMap:
        if self._summed:
            values_HQK = group_mass(layer, self.view, answers, *self._groups)[0]
            hidden = ~self.view.seen(layer, heads, self._visible(layer.P)[None])[0]
        else:
            values_HQK = self._largest(layer, heads)
            hidden = torch.isneginf(values_HQK)
        shown_HQK = values_HQK.masked_fill(hidden, torch.nan).cpu().numpy()
        return KeptMap(heads, shown_HQK, self._mean_of_key0(layer, heads, answers) if self._key0_apart else None)

    def of_texts(self, collected: Collected, texts: Sequence[TextInputs]) -> list[LayerMaps]:
        return [layer_maps(self, collected)]

    def cut(self, values_HQK: np.ndarray) -> np.ndarray:
        """The part of a text's matrices that is drawn."""
        return values_HQK[:, list(self.rows.tokens)][:, :, list(self.columns.tokens)]

    def _mean_of_key0(self, layer: Layer, heads: list[int], answers: Answers) -> np.ndarray:
        visible, mass_BHQ, rows = layer.P.visible, answers[Key(0)], torch.tensor(self.rows.tokens)
        seen_BHQ = visible.at(visible.position_Q[None] * 0) & (visible.counts_BHQ >= 2)
        seen_BHQ = seen_BHQ.to(mass_BHQ.device).expand_as(mass_BHQ)[..., rows]
        mean_BH = (mass_BHQ[..., rows] * seen_BHQ).sum(-1) / seen_BHQ.sum(-1)
        return self.view.select(layer, heads, mean_BH)[0].cpu().numpy()

    def _largest(self, layer: Layer, heads: list[int]) -> Tensor:
        strips = []
        for a, b in self._strips(layer.P.heads):
            rows_HQK = self._read(a, b, lambda start, stop: self.view.rows(layer, heads, start, stop)[0])
            seen_HQK = self.view.seen(layer, heads, self._seen(layer.P, a, b)[None])[0]
            cells = self._cells(rows_HQK.masked_fill(~seen_HQK, -torch.inf), a, b)
            if layer.P.signed:  # of either sign
                below_0 = self._cells((-rows_HQK).masked_fill(~seen_HQK, -torch.inf), a, b)
                cells = torch.where(below_0 > cells, -below_0, cells)
            strips.append(cells)
        return torch.cat(strips, -2)

    def _visible(self, P: AttentionOperator) -> Tensor:
        """(H or 1, rows, columns): does any query of a row of the map see any key of a column?"""

        def make() -> Tensor:
            whole = self.queries is None and self.keys is None
            shown = P.visible.cells(self.rows.sizes, self.columns.sizes) if whole else None
            if shown is None:
                strips = [self._cells(self._seen(P, a, b).byte(), a, b) for a, b in self._strips(P.heads)]
                shown = torch.cat(strips, -2).bool()
            return shown if shown.ndim == 3 else shown[None]

        return self._shown.of(P.visible, make)

    def _cells(self, values: Tensor, start: int, stop: int) -> Tensor:
        """The largest entry of each cell in a strip of whole rows of cells."""
        if not self._binned:
            return values
        size = self.rows.size
        columns = torch.cat([part.amax(-1, keepdim=True) for part in values.split(self.columns.sizes, -1)], -1)
        rows = [min(size, stop - a) for a in range(start, stop, size)]
        return torch.cat([part.amax(-2, keepdim=True) for part in columns.split(rows, -2)], -2)

    def _seen(self, P: AttentionOperator, start: int, stop: int) -> Tensor:
        return self._read(start, stop, lambda a, b: P.visible.drawn(a, b)[0].to(P.device))

    def _read(self, start: int, stop: int, rows: Callable[[int, int], Tensor]) -> Tensor:
        """The map's own rows [start, stop) and columns, of a reader of ranges of queries."""
        parts = [rows(run[0], run[-1] + 1) for run in consecutive(self.rows.tokens[start:stop])]
        read = torch.cat(parts, -2) if len(parts) > 1 else parts[0]
        if self.keys is None:
            return read[..., : self._keys]
        return read.index_select(-1, torch.tensor(self.keys, device=read.device))

    def _strips(self, heads: int) -> list[tuple[int, int]]:
        """Ranges of the map's queries, of whole cells."""
        size, count = self.rows.size, len(self.rows.tokens)
        step = size * max(1, BLOCK_BYTES // (4 * self._keys * size * heads))
        return [(a, min(count, a + step)) for a in range(0, count, step)]


def layer_maps(maps: Maps, kept: Mapping[LayerKey, KeptMap]) -> LayerMaps:
    """What can be drawn of one text, from what was kept of each layer."""
    values = PerLayer({key: of_layer.values for key, of_layer in kept.items()})
    heads = PerLayer({key: of_layer.heads for key, of_layer in kept.items()})
    key0 = PerLayer({key: of_layer.key0 for key, of_layer in kept.items() if of_layer.key0 is not None})
    return LayerMaps(values, heads, maps.rows, maps.columns, maps.rule, key0)


@dataclass(frozen=True)
class WholeMaps(MapCollector):
    """Matrices to draw of texts that are short enough to be drawn whole, side by side; maps: of each what is drawn."""

    view: View
    maps: Sequence[Maps]

    def keep(self, layer: Layer, heads: list[int], answers: Answers) -> KeptMap:
        parts = []
        for a, b in layer.P.blocks():
            seen = self.view.seen(layer, heads, layer.P.visible.drawn(a, b).to(layer.P.device))
            shown = self.view.rows(layer, heads, a, b).masked_fill(~seen, torch.nan)
            parts.append(shown.masked_fill(torch.isneginf(shown), torch.nan))
        return KeptMap(heads, torch.cat(parts, 2).cpu().numpy())

    def of_texts(self, collected: Mapping[LayerKey, KeptMap], texts: Sequence[TextInputs]) -> list[LayerMaps]:
        return [
            layer_maps(maps, {key: kept._replace(values=maps.cut(kept.values[row])) for key, kept in collected.items()})
            for row, maps in enumerate(self.maps)
        ]


def drawn_whole(text: TextInputs, request: Request) -> bool:
    """Whether nothing of a text's maps is binned, so that it may be read together with others."""
    return max(len(text.prompt), len(text.key_prompt)) <= request.map_side


@dataclass(frozen=True)
class WholeCollector(ViewCollector):
    """What is kept whole, of the heads that its own field of the request names."""

    view: View = View()

    @classmethod
    def of(cls, texts: Sequence[TextInputs], request: Request) -> WholeCollector:
        return cls(request.view_of(getattr(request, cls.name)))


class MatrixCollector(WholeCollector):
    """The whole matrices, for those who ask: (B, H, Q, K) fp32 on the CPU; 0 in rows of tokens without a query."""

    name = "weights"

    def keep(self, layer: Layer, heads: list[int], answers: Answers) -> Matrices:
        blocks = [self.view.rows(layer, heads, a, b).cpu() for a, b in layer.P.blocks()]
        weights = torch.cat(blocks, 2) if len(blocks) > 1 else blocks[0]
        if layer.texts.unasked:
            weights = weights.masked_fill(~layer.texts.has_query_T.cpu()[:, None], 0)
        return Matrices(heads, weights)

    def of_text(self, collected: Matrices, row: int, text: TextInputs) -> Matrices:
        return Matrices(collected.heads, collected.weights[row, :, : len(text.prompt), : len(text.key_prompt)])


class OperandCollector(WholeCollector):
    """q, k and v of the heads of a view; nothing of a layer whose weights do not follow from them by one formula."""

    name = "operands"

    def keep(self, layer: Layer, heads: list[int], answers: Answers) -> KeptOperands | None:
        spec = layer.P.spec
        if spec is None or spec.sinks_scale_output:
            return None
        sinks = spec.sinks
        if sinks is not None and (sinks.shape[0] > 1 or sinks.shape[-1] > 1):  # other ones for each query, or text
            return None
        kv_heads = [head * spec.kv_heads // spec.heads for head in heads]
        bias = _added(spec)
        return KeptOperands(
            heads,
            spec.q_BHQD[:, heads].float().cpu(),
            spec.k_BGKD[:, kv_heads].float().cpu(),
            spec.v_BGKV[:, kv_heads].float().cpu(),
            spec.scale,
            spec.softcap,
            None if bias is None else bias.expand(spec.batch, spec.heads, -1, -1)[:, heads].float().cpu(),
            None if sinks is None else sinks[0, heads, 0].float().cpu(),
        )

    def of_text(self, collected: KeptOperands, row: int, text: TextInputs) -> KeptOperands:
        """Those of one text; its batch of one stays."""
        queries, keys, bias = len(text.prompt), len(text.key_prompt), collected.bias_BHTT
        counts = {"q_BHTD": queries, "k_BHTD": keys, "v_BHTV": keys}
        cut = {name: getattr(collected, name)[row : row + 1, :, :count] for name, count in counts.items()}
        return collected._replace(**cut, bias_BHTT=None if bias is None else bias[row : row + 1, :, :queries, :keys])


def _added(spec: AttentionSpec) -> Tensor | None:
    """What is added to q . k and which keys are hidden, (B or 1, H or 1, T, T); None where queries see one run of keys.

    A run ends with the query's own key: a causal mask with or without a window.
    """
    visible, mask = spec.visible, spec.visible.mask
    seen = visible.rows(0, visible.queries)
    finite = mask is not None and mask.dtype != torch.bool and bool((mask.masked_fill(~seen, 0) != 0).any())
    key_K = torch.arange(seen.shape[-1], device=seen.device)
    run = (key_K >= seen.byte().argmax(-1, keepdim=True)) & (key_K <= key_K[:, None])
    if spec.bias is None and not finite and bool((seen == run).all()):
        return None
    added = torch.zeros_like(seen, dtype=torch.float32)
    if spec.bias is not None:
        added = added + spec.bias.float()
    if finite and mask is not None:
        added = added + mask[..., : visible.keys].float()
    return added.masked_fill(~seen, -torch.inf)
