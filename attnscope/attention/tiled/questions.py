"""What can be asked of every row of a tiled pass. A question reads each tile once and notes its answer.

Shapes: B text, H head, Q query, K key, M feature, r rows of a tile, n keys of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnscope.attention.operator import AttentionOperator
from attnscope.attention.tiled.tiles import HIDDEN, Tile

DENSE_MATCHES = 1 / 16  # share of equal pairs in a tile beyond which a product is cheaper than looking them up


class Question:
    """Something asked of every row: notes what a tile says of it."""

    asked: tuple[Any, ...] = ()  # what tells it from others of its kind
    answer: Any

    def same(self, other: Question) -> bool:
        """Whether both ask the same; tensors are equal by what they hold."""
        return type(self) is type(other) and all(map(_equal, self.asked, other.asked))

    def begin(self, P: AttentionOperator) -> None:
        """Make room for the answer, (B, H, Q)."""
        self.answer = torch.zeros(P.batch, P.heads, P.queries, device=P.device)

    def visit(self, tile: Tile) -> None:
        """Read one tile."""
        raise NotImplementedError

    def end(self) -> None:
        """After the last tile."""


class Mass(Question):
    def visit(self, tile: Tile) -> None:
        self.answer[tile.answer] = (tile.first + tile.rest) * tile.norm[..., 0]


class Entropy(Question):
    def __init__(self, skip_first: bool) -> None:
        self.asked, self.skip_first = (skip_first,), skip_first

    def visit(self, tile: Tile) -> None:
        # with p = exp t / Z, over any keys: H = ln(Z sum p) - (sum p t) / sum p, and Z = 1 / largest
        energy, total = tile.energy_rest, tile.rest
        if not self.skip_first:
            energy, total = energy + tile.energy_first, total + tile.first
        total = total.clamp_min(torch.finfo(torch.float32).tiny)
        self.answer[tile.answer] = ((total / tile.largest[..., 0]).log() - energy / total).clamp_min(0.0)


class Squares(Question):
    def visit(self, tile: Tile) -> None:
        self.answer[tile.answer] = torch.linalg.vector_norm(tile.p, dim=-1).square()


class Largest(Question):
    def visit(self, tile: Tile) -> None:
        self.answer[tile.answer] = (tile.largest * tile.norm)[..., 0]


class At(Question):
    def __init__(self, key_Q: Tensor) -> None:
        self.asked, self.key_Q = (key_Q,), key_Q

    def visit(self, tile: Tile) -> None:
        key_R1r1 = (self.key_Q[tile.rows].to(tile.p.device) - tile.low)[None, :, None]
        there = (key_R1r1 >= 0) & (key_R1r1 < tile.p.shape[-1])
        index = key_R1r1.clamp(0, tile.p.shape[-1] - 1).expand(*tile.p.shape[:2], 1)
        self.answer[tile.answer] = (tile.p.gather(-1, index) * there * tile.norm)[..., 0]


class Product(Question):
    """Something that the weights are multiplied by: all of a pass stand side by side in one product a tile."""

    width: int
    span: slice  # its columns in that product

    def columns(self, text: int) -> Tensor:
        """(G or 1, K, width) fp32, for one text."""
        raise NotImplementedError


class Features(Product):
    """P @ F for features of the keys, (K, M) or (B, K, M)."""

    def __init__(self, features: Tensor) -> None:
        self.asked, self.features, self.width = (features,), features, features.shape[-1]

    def begin(self, P: AttentionOperator) -> None:
        self.answer = torch.zeros(P.batch, P.heads, P.queries, self.width, device=P.device)

    def columns(self, text: int) -> Tensor:
        return (self.features if self.features.ndim == 2 else self.features[text]).float()[None]

    def visit(self, tile: Tile) -> None:
        self.answer[tile.answer] = tile.product[..., self.span]


class Feature(Question):
    """P @ f for one feature, (K, 1) or (B, K, 1): a matrix times a vector, cheaper than an odd column in a product."""

    def __init__(self, feature: Tensor) -> None:
        self.asked, self.feature = (feature,), feature.float()

    def begin(self, P: AttentionOperator) -> None:
        self.answer = torch.zeros(P.batch, P.heads, P.queries, 1, device=P.device)

    def visit(self, tile: Tile) -> None:
        H, r, n = tile.p.shape
        feature = self.feature if self.feature.ndim == 2 else self.feature[tile.place.text]
        found = torch.mv(tile.p.view(H * r, n), feature[tile.low : tile.low + n, 0].to(tile.p.device))
        self.answer[tile.answer] = found.view(H, r, 1) * tile.norm


class Output(Product):
    """The layer's own output, P V of each head: (B, H, Q, Dv)."""

    def __init__(self, v_BGKD: Tensor) -> None:
        self.v_BGKD, self.width = v_BGKD, v_BGKD.shape[-1]

    def begin(self, P: AttentionOperator) -> None:
        buffer_BQHD = torch.empty(P.batch, P.queries, P.heads, self.width, device=P.device)
        self.answer = buffer_BQHD.transpose(1, 2)

    def columns(self, text: int) -> Tensor:
        return self.v_BGKD[text].float()

    def visit(self, tile: Tile) -> None:
        self.answer[tile.answer] = tile.product[..., self.span] * tile.share


class Match(Question):
    def __init__(self, query_label_BQ: Tensor, key_label_BK: Tensor, gap: int) -> None:
        self.asked = (query_label_BQ, key_label_BK, gap)

    def begin(self, P: AttentionOperator) -> None:
        """Sorted by label and position, a query's partners are one run of the keys: from first to past."""
        super().begin(P)
        query_label_BQ, key_label_BK, gap = self.asked
        K, self._offset = P.keys, P.keys - P.queries
        sorted_BK, self._position_BK = (key_label_BK * K + torch.arange(K, device=P.device)).sort()
        label_BQ = query_label_BQ * K
        latest_Q = torch.arange(self._offset, K, device=P.device) - gap
        self._first_BQ = torch.searchsorted(sorted_BK, label_BQ)
        past_BQ = torch.searchsorted(sorted_BK, label_BQ + latest_Q.clamp_min(-1), right=True)
        self._count_BQ = (past_BQ - self._first_BQ).clamp_min(0)

    def pairs(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """The (row, key) pairs of a tile whose labels are equal."""
        text, keys = tile.place.text, tile.place.keys
        row, run = _runs(self._first_BQ[text, tile.rows], self._count_BQ[text, tile.rows])
        key = self._position_BK[text, run]
        if keys.start == 0 and keys.stop >= tile.rows.stop + self._offset:
            return row, key
        inside = (key >= keys.start) & (key < keys.stop)
        return row[inside], key[inside] - keys.start

    def visit(self, tile: Tile) -> None:
        row, column = self.pairs(tile)
        H, r, n = tile.p.shape
        if len(row) > r * n * DENSE_MATCHES:
            same = torch.zeros(r, n, device=tile.p.device)
            same[row, column] = 1.0
            found = (tile.p * same).sum(-1)
        else:
            weights = tile.p.view(H, r * n).index_select(1, row * n + column)
            found = torch.zeros(H, r, device=tile.p.device).index_add_(1, row, weights)
        self.answer[tile.answer] = found * tile.norm[..., 0]


class Recent(Question):
    def __init__(self, width: int, offset: int) -> None:
        self.asked, self.width, self.offset = (width,), width, offset

    def visit(self, tile: Tile) -> None:
        _, r, n = tile.p.shape
        first = max(0, tile.rows.start + self.offset - self.width + 1 - tile.low)
        near = tile.p[..., first:]
        query = torch.arange(tile.rows.start, tile.rows.start + r, device=near.device)[:, None] + self.offset
        distance = query - torch.arange(tile.low + first, tile.low + n, device=near.device)
        inside = (distance >= 0) & (distance < self.width)
        self.answer[tile.answer] = (near * inside).sum(-1) * tile.norm[..., 0]


class Between(Question):
    """The mass between groups of queries and groups of keys: rows are added up first, keys in what is left."""

    def __init__(self, query_group_BQ: Tensor, key_group_BK: Tensor) -> None:
        self.asked = query_group_BQ, key_group_BK
        self.groups = int(query_group_BQ.max()) + 1, int(key_group_BK.max()) + 1

    def begin(self, P: AttentionOperator) -> None:
        self.answer = torch.zeros(P.batch, P.heads, *self.groups, device=P.device)
        self._parts: dict[tuple[int, int, int], tuple[slice, Tensor, Tensor]] = {}

    def visit(self, tile: Tile) -> None:
        (query_group_BQ, key_group_BK), place = self.asked, tile.place
        group_g, member_r = query_group_BQ[place.text, place.rows].unique(return_inverse=True)
        member_gr = (member_r == torch.arange(len(group_g), device=member_r.device)[:, None]).float()
        rows_Hgn = (member_gr * tile.norm.mT) @ tile.p
        column_n = key_group_BK[place.text, place.keys] % (self.groups[1] + 1)  # -1 becomes one more column
        mass_Hgm = torch.zeros(*rows_Hgn.shape[:2], self.groups[1] + 1, device=rows_Hgn.device)
        mass_Hgm.scatter_add_(-1, column_n.expand_as(rows_Hgn), rows_Hgn)
        known = group_g >= 0
        self._parts[place.text, place.heads.start, place.rows.start] = place.heads, group_g[known], mass_Hgm[:, known]

    def end(self) -> None:
        """Tiles that share a group are added in their own order, whichever came first."""
        for (text, _, _), (heads, group_g, mass_Hgm) in sorted(self._parts.items()):
            self.answer[text, heads].index_add_(1, group_g, mass_Hgm[..., :-1])
        del self._parts


class TopK(Question):
    def __init__(self, k: int, heads: Sequence[int], skip_first: bool) -> None:
        self.asked = (k, tuple(heads), skip_first)
        self.k, self.heads, self.skip_first = k, list(heads), skip_first

    @property
    def wanted(self) -> int:
        """How many of a row's strongest keys settle the question."""
        return self.k + self.skip_first

    def begin(self, P: AttentionOperator) -> None:
        self._every = self.heads == list(range(P.heads))
        shape = (P.batch, len(self.heads), P.queries, self.k)
        self.answer = (
            torch.full(shape, torch.nan, device=P.device),
            torch.zeros(shape, dtype=torch.int32, device=P.device),
        )

    def visit(self, tile: Tile) -> None:
        mine = [head for head in tile.among if head in self.heads]
        if tile.strongest is None or not mine:
            return
        (logit, place), p, norm = tile.strongest, tile.p, tile.norm
        answer: slice | list[int] = tile.place.heads
        if not self._every:
            within = [head - tile.place.heads.start for head in mine]
            logit, place = (part[[tile.among.index(head) for head in mine]] for part in (logit, place))
            p, norm, answer = p[within], norm[within], [self.heads.index(head) for head in mine]
        if self.skip_first and tile.low == 0:
            logit, order = logit.masked_fill(place == 0, HIDDEN).sort(dim=-1, descending=True, stable=True)
            place = place.gather(-1, order)
        logit, place = logit[..., : self.k], place[..., : self.k]
        weight = (p.gather(-1, place) * norm).masked_fill_(logit < HIDDEN / 2, torch.nan)
        text, columns = tile.place.text, slice(0, place.shape[-1])
        self.answer[0][text][answer, tile.rows, columns] = weight
        self.answer[1][text][answer, tile.rows, columns] = (place + tile.low).int()


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.shape == other.shape and one.device == other.device and torch.equal(one, other))
    return bool(one == other)


def _runs(first: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """[1, 5], [2, 1] -> rows [0, 0, 1] and members [1, 2, 5]: the runs written out."""
    row = torch.repeat_interleave(count)
    before = count.cumsum(0) - count
    return row, torch.arange(len(row), device=count.device) + (first - before)[row]
