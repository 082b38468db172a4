"""How each question is read off the tiles of a pass: a reader visits every tile once and notes its part of the answer.

Shapes: B text, H head, Q query, K key, M feature, r rows of a tile, n keys of a tile.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from attnscope.attention import questions as ask
from attnscope.attention.operator import AttentionOperator
from attnscope.attention.rows import (
    TINY,
    asked_key,
    holding,
    inside,
    largest,
    mean_absolute_distance,
    mean_distance,
    picked,
)
from attnscope.attention.spec import HIDDEN
from attnscope.attention.tiles import Tile

DENSE_MATCHES = 1 / 16  # share of equal pairs in a tile beyond which a product is cheaper than looking them up


class Reader(ABC):
    """Notes what every tile says of one question of an operator."""

    def __init__(self, question: Any, P: AttentionOperator) -> None:
        self.question, self.P = question, P
        self.answer: Any = self.room()

    def room(self) -> Any:
        """Memory for the answer, (B, H, Q)."""
        return torch.zeros(self.P.batch, self.P.heads, self.P.queries, device=self.P.device)

    @abstractmethod
    def visit(self, tile: Tile) -> None:
        """Read one tile; called from several threads, never twice for the same rows of a head."""

    def end(self) -> None:  # noqa: B027 - most readers are done with their last tile
        """After the last tile."""


class RowReader(Reader):
    """A question that each row of a tile answers with a number of its own: see ROWS."""

    def visit(self, tile: Tile) -> None:
        self.answer[tile.answer] = ROWS[type(self.question)](self.question, self.P, tile)


class ProductReader(Reader):
    """A question whose columns the weights are multiplied by: all of a pass are side by side in one product per tile.

    width: how many columns. span: where they lie in the product, given by the pass.
    """

    width: int
    span: slice

    @abstractmethod
    def columns(self, text: int) -> Tensor:
        """(G or 1, K, width) fp32, for one text."""


class FeaturesReader(ProductReader):
    def room(self) -> Tensor:
        self.width = self.question.features.shape[-1]
        return torch.zeros(self.P.batch, self.P.heads, self.P.queries, self.width, device=self.P.device)

    def columns(self, text: int) -> Tensor:
        features = self.question.features
        return (features if features.ndim == 2 else features[text]).float()[None]

    def visit(self, tile: Tile) -> None:
        self.answer[tile.answer] = tile.product[..., self.span]


class OutputReader(ProductReader):
    """The layer's own output, P V of each head: (B, H, Q, V)."""

    def room(self) -> Tensor:
        self.width = self.P.spec.v_BGKV.shape[-1]  # type: ignore[union-attr]
        buffer_BQHV = torch.empty(self.P.batch, self.P.queries, self.P.heads, self.width, device=self.P.device)
        return buffer_BQHV.transpose(1, 2)

    def columns(self, text: int) -> Tensor:
        return self.P.spec.v_BGKV[text].float()  # type: ignore[union-attr]

    def visit(self, tile: Tile) -> None:
        self.answer[tile.answer] = tile.product[..., self.span] * tile.share


class FeatureReader(Reader):
    """P @ f for one feature: a matrix times a vector, cheaper than an odd column in a product."""

    def room(self) -> Tensor:
        self.feature = self.question.features.float()
        return torch.zeros(self.P.batch, self.P.heads, self.P.queries, 1, device=self.P.device)

    def visit(self, tile: Tile) -> None:
        feature = self.feature if self.feature.ndim == 2 else self.feature[tile.place.text]
        H, r, n = tile.p.shape
        sum_Hr = torch.mv(tile.p.view(H * r, n), feature[tile.low : tile.low + n, 0].to(tile.p.device)).view(H, r)
        self.answer[tile.answer] = (sum_Hr * tile.norm[..., 0])[..., None]


class EqualLabelsReader(Reader):
    def room(self) -> Tensor:
        """Sorted by label and position, a query's partners are one run of the keys: from first to past."""
        question, K, device = self.question, self.P.keys, self.P.device
        sorted_BK, self._position_BK = (question.key_label_BK * K + torch.arange(K, device=device)).sort()
        label_BQ = question.query_label_BQ * K
        latest_Q = self.P.visible.position_Q.to(device) - question.gap
        self._first_BQ = torch.searchsorted(sorted_BK, label_BQ)
        past_BQ = torch.searchsorted(sorted_BK, label_BQ + latest_Q.clamp_min(-1), right=True)
        self._count_BQ = (past_BQ - self._first_BQ).clamp_min(0)
        return super().room()

    def pairs(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """The (row, key) pairs of a tile that have equal labels."""
        text, keys = tile.place.text, tile.place.keys
        first_r, count_r = self._first_BQ[text, tile.rows], self._count_BQ[text, tile.rows]

        # The runs written out: of first 1, 2 and count 2, 1 rows 0, 0, 1 and members 1, 2, 2.
        row = torch.repeat_interleave(count_r)
        before_r = count_r.cumsum(0) - count_r
        key = self._position_BK[text, torch.arange(len(row), device=row.device) + (first_r - before_r)[row]]
        if keys.start == 0 and keys.stop >= tile.rows.stop + self.P.visible.offset:
            return row, key
        inside = (key >= keys.start) & (key < keys.stop)
        return row[inside], key[inside] - keys.start

    def visit(self, tile: Tile) -> None:
        row, column = self.pairs(tile)
        H, r, n = tile.p.shape
        if len(row) > r * n * DENSE_MATCHES:
            same = torch.zeros(r, n, device=tile.p.device)
            same[row, column] = 1.0
            mass_Hr = (tile.p * same).sum(-1)
        else:
            weights = tile.p.view(H, r * n).index_select(1, row * n + column)
            mass_Hr = torch.zeros(H, r, device=tile.p.device).index_add_(1, row, weights)
        self.answer[tile.answer] = mass_Hr * tile.norm[..., 0]


class GroupMassReader(Reader):
    """Rows of a tile are added up by query group first, keys in what is left."""

    def room(self) -> Tensor:
        self.groups = self.question.counts
        self._parts: dict[tuple[int, int, int], tuple[slice, Tensor, Tensor]] = {}
        return torch.zeros(self.P.batch, self.P.heads, *self.groups, device=self.P.device)

    def visit(self, tile: Tile) -> None:
        place = tile.place
        group_g, member_r = self.question.query_group_BQ[place.text, place.rows].unique(return_inverse=True)
        member_gr = (member_r == torch.arange(len(group_g), device=member_r.device)[:, None]).float()
        rows_Hgn = (member_gr * tile.norm.mT) @ tile.p
        column_n = self.question.key_group_BK[place.text, place.keys] % (self.groups[1] + 1)  # -1: one more column
        mass_Hgm = torch.zeros(*rows_Hgn.shape[:2], self.groups[1] + 1, device=rows_Hgn.device)
        mass_Hgm.scatter_add_(-1, column_n.expand_as(rows_Hgn), rows_Hgn)
        real = group_g >= 0
        self._parts[place.text, place.heads.start, place.rows.start] = place.heads, group_g[real], mass_Hgm[:, real]

    def end(self) -> None:
        """Tiles that share a group are added in their own order, whichever was read first."""
        for (text, _, _), (heads, group_g, mass_Hgm) in sorted(self._parts.items()):
            self.answer[text, heads].index_add_(1, group_g, mass_Hgm[..., :-1])
        self._parts.clear()


class ReceivedReader(Reader):
    """Tiles of the same keys are added as they come: in float64, so that their order is not seen."""

    def room(self) -> Tensor:
        self._lock = threading.Lock()
        precise = torch.float64 if self.P.device.type == "cpu" else torch.float32  # elsewhere tiles come in order
        return torch.zeros(self.P.batch, self.P.heads, self.P.keys, dtype=precise, device=self.P.device)

    def visit(self, tile: Tile) -> None:
        share_BQ, place = self.question.query_share_BQ, tile.place
        share_r = share_BQ[place.text if len(share_BQ) > 1 else 0, place.rows].to(tile.p)
        sum_Hn = ((share_r * tile.norm[..., 0])[:, None] @ tile.p)[:, 0]
        with self._lock:
            self.answer[place.text, place.heads, place.keys] += sum_Hn

    def end(self) -> None:
        self.answer = self.answer.float()


class TopKReader(Reader):
    of_size = False  # whether of a signed map the largest share is asked for, not its weight

    def room(self) -> tuple[Tensor, Tensor]:
        question, P = self.question, self.P
        self.heads = list(range(P.heads)) if question.heads is None else list(question.heads)
        self._every = self.heads == list(range(P.heads))
        shape = (P.batch, len(self.heads), P.queries, question.k)
        weights = torch.full(shape, torch.nan, device=P.device)
        return weights, torch.zeros(shape, dtype=torch.int32, device=P.device)

    @property
    def wanted(self) -> int:
        """How many of a row's largest entries settle the question."""
        return self.question.k + self.question.skip_key0

    def visit(self, tile: Tile) -> None:
        mine = [head for head in tile.top_heads if head in self.heads]
        if tile.top is None or not mine:
            return
        (logit, place), norm = tile.top, tile.norm
        weights = tile.p if tile.signed is None or self.of_size else tile.signed
        answer: slice | list[int] = tile.place.heads
        if not self._every:
            within = [head - tile.place.heads.start for head in mine]
            logit, place = (part[[tile.top_heads.index(head) for head in mine]] for part in (logit, place))
            weights, norm, answer = weights[within], norm[within], [self.heads.index(head) for head in mine]
        if self.question.skip_key0 and tile.low == 0:
            logit, order = logit.masked_fill(place == 0, HIDDEN).sort(dim=-1, descending=True, stable=True)
            place = place.gather(-1, order)
        logit, place = logit[..., : self.question.k], place[..., : self.question.k]
        weight = (weights.gather(-1, place) * norm).masked_fill_(logit < HIDDEN / 2, torch.nan)
        text, columns = tile.place.text, slice(0, place.shape[-1])
        self.answer[0][text][answer, tile.rows, columns] = weight
        self.answer[1][text][answer, tile.rows, columns] = (place + tile.low).int()


class RestReader(TopKReader):
    """The largest weight without key 0."""

    of_size = True

    def __init__(self, question: ask.MaxWeight, P: AttentionOperator) -> None:
        super().__init__(ask.TopK(1, None, True), P)

    def end(self) -> None:
        self.answer = self.answer[0][..., 0]


class StrongestReader(Reader):
    """Reads the tiles that have a chosen query, and of those the chosen keys alone."""

    def room(self) -> list[tuple[Tensor, Tensor]]:
        question, device = self.question, self.P.device
        self._keys = [torch.tensor(key, dtype=torch.long, device=device) for key in question.key]
        room = []
        for query, key in zip(question.query, question.key, strict=True):
            shape = len(question.heads), len(query), min(question.k, len(key))
            weights = torch.full(shape, torch.nan, device=device)
            room.append((weights, torch.zeros(shape, dtype=torch.long, device=device)))
        return room

    def visit(self, tile: Tile) -> None:
        question, place, device = self.question, tile.place, tile.p.device
        mine = [at for at, head in enumerate(question.heads) if place.heads.start <= head < place.heads.stop]
        rows = inside(question.query[place.text], place.rows.start, place.rows.stop)
        keys = inside(question.key[place.text], place.keys.start, place.keys.stop)
        queries, key_m = question.query[place.text][rows], self._keys[place.text][keys]
        if not (mine and len(queries) and len(key_m)):
            return
        head_h, query_q = torch.tensor(question.heads, device=device)[mine], torch.tensor(queries, device=device)
        here = head_h - place.heads.start, query_q - place.rows.start
        entries = picked(tile.p, *here, key_m - tile.low) * tile.norm[here[0]][:, here[1]]
        signed = None if tile.signed is None else picked(tile.signed, *here, key_m - tile.low)
        seen = self.P.visible.rows(place.rows.start, place.rows.stop).to(device)
        visible = picked(seen[place.text if len(seen) > 1 else 0], head_h, here[1], key_m)
        parts = largest(entries, visible, key_m, question.k, signed)
        for answer, part in zip(self.answer[place.text], parts, strict=True):
            answer[mine, rows, : part.shape[-1]] = part


def reader_of(question: ask.Question, P: AttentionOperator) -> Reader | None:
    """A reader of the question, None where the tiles have no way for it."""
    if isinstance(question, ask.Features) and question.features.shape[-1] == 1:
        return FeatureReader(question, P)
    if isinstance(question, ask.MaxWeight) and question.skip_key0:
        return RestReader(question, P)
    make = READERS.get(type(question))
    return make(question, P) if make else None


def _entropy(question: ask.Entropy, P: AttentionOperator, tile: Tile) -> Tensor:
    # with p = exp t / Z, over any keys: H = ln(Z sum p) - (sum p t) / sum p, and Z = 1 / max_p
    key0, energy = tile.energy
    total = tile.rest
    if not question.skip_key0:
        energy, total = energy + key0, total + tile.key0
    total = total.clamp_min(TINY)
    return ((total / tile.max_p[..., 0]).log() - energy / total).clamp_min(0.0) * tile.sees_Hr


def _distance(question: ask.Distance | ask.AbsoluteDistance, P: AttentionOperator, tile: Tile) -> Tensor:
    one_side = isinstance(question, ask.Distance) or (P.visible.by_position and P.visible.causal)
    mean = mean_distance if one_side else mean_absolute_distance  # the second takes several times as long
    return mean(tile.p, tile.sum * tile.sees_Hr, tile.rows.start + P.visible.offset, tile.low)


def _one_key(question: ask.At | ask.Back | ask.Key, P: AttentionOperator, tile: Tile) -> Tensor:
    key_BQ = asked_key(question, P.visible)
    key_r = key_BQ[tile.place.text if len(key_BQ) > 1 else 0, tile.rows].to(tile.p.device) - tile.low
    index_1r1 = key_r.clamp(0, tile.p.shape[-1] - 1)[None, :, None]
    there_r = (key_r >= 0) & (key_r < tile.p.shape[-1])
    weight = tile.p.gather(-1, index_1r1.expand(*tile.p.shape[:2], 1)) * tile.norm
    return weight[..., 0] * there_r


def _window(question: ask.Window, P: AttentionOperator, tile: Tile) -> Tensor:
    width, (_, r, n), first_query = question.width, tile.p.shape, tile.rows.start + P.visible.offset
    first = max(0, first_query - width + 1 - tile.low)
    near = tile.p[..., first:]
    query = torch.arange(first_query, first_query + r, device=near.device)[:, None]
    distance = query - torch.arange(tile.low + first, tile.low + n, device=near.device)
    inside = (distance >= 0) & (distance < width)
    return (near * inside).sum(-1) * tile.norm[..., 0]


# (H, r) each: what a tile's rows say of questions whose answers are a number for each row.
ROWS: Mapping[type[ask.Question], Callable[[Any, AttentionOperator, Tile], Tensor]] = {
    **dict.fromkeys((ask.RowSum, ask.SizeSum), lambda question, P, tile: tile.size),
    ask.Entropy: _entropy,
    ask.SumOfSquares: lambda question, P, tile: torch.linalg.vector_norm(tile.p, dim=-1).square() * tile.sees_Hr,
    ask.MaxWeight: lambda question, P, tile: (tile.max_p * tile.norm)[..., 0],
    ask.Holding: lambda question, P, tile: holding(tile.p, tile.sum, question.percent) * tile.sees_Hr,
    **dict.fromkeys((ask.Distance, ask.AbsoluteDistance), _distance),
    **dict.fromkeys((ask.At, ask.Back, ask.Key), _one_key),
    ask.Window: _window,
}
READERS: Mapping[type[ask.Question], Callable[[Any, AttentionOperator], Reader]] = {
    **dict.fromkeys(ROWS, RowReader),
    ask.Features: FeaturesReader,
    ask.EqualLabels: EqualLabelsReader,
    ask.GroupMass: GroupMassReader,
    ask.Received: ReceivedReader,
    ask.TopK: TopKReader,
    ask.Strongest: StrongestReader,
}
