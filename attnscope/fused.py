"""Attention answered from q and k in one tiled pass: every statistic of every head, and never an N x N matrix.

Questions are noted first and answered together: while a tile of exponentiated logits is in the cache, all of them read
it. The same pass can return the layer's own output, so that no other attention need run.

    with P.planning():
        measure(P, texts, ids)      # noted, answered with zeros
    measure(P, texts, ids)          # answered, from one pass over the scores

Shapes: B text, H head, G kv head, R heads of a group, Q query, K key, D head dim, M feature, r rows of a tile, n keys
of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnscope.operators import AttentionOperator, Logits

TILE_BYTES = {"cpu": 2 * 2**20, "cuda": 256 * 2**20, "mps": 64 * 2**20}
HIDDEN = -1e30  # the logit of a key that a boolean mask hides: finite, so that 0 * logit is 0
CHUNK = 16  # keys whose maximum stands for them in the first round of the search for the strongest
DENSE_MATCHES = 1 / 16  # share of equal pairs in a tile beyond which a product is cheaper than looking them up


@dataclass(eq=False)
class Tile:
    """The exponentiated logits of some rows of one group of heads: weights are p * norm.

    t = logits - their row's maximum, p = exp t, both (R, r, n), over the keys from `low`. norm (R, r, 1) is what makes
    p a weight: 1 / sum p, times the share that a sink logit leaves; 0 for a row that sees nothing.
    """

    text: int
    head: int  # the group's first head
    start: int
    low: int
    t: Tensor
    p: Tensor
    sum_rest: Tensor  # over the keys but key 0, so that the row without it loses no digits
    sum_first: Tensor
    norm: Tensor
    share: Tensor  # what a sink logit leaves of the output, (R, r, 1)
    strongest: tuple[Tensor, Tensor] | None  # t and key of the strongest keys, as many as any question wants
    matches: dict[int, tuple[Tensor, Tensor]]  # the pairs of equal labels, by question

    @cached_property
    def total(self) -> Tensor:
        return self.sum_rest + self.sum_first

    @cached_property
    def energy_first(self) -> Tensor:
        """p t of key 0, (R, r)."""
        return self.p[..., 0] * self.t[..., 0] if self.low == 0 else torch.zeros_like(self.total[..., 0])

    @cached_property
    def energy_rest(self) -> Tensor:
        """Sum of p t over the keys but key 0, (R, r). Destroys t."""
        first = self.energy_first
        products = self.t.mul_(self.p)
        return products.sum(-1) - (first if self.low == 0 else 0)

    @property
    def place(self) -> tuple[int, slice, slice]:
        """Where this tile's rows lie in a (B, H, Q) answer."""
        R, r, _ = self.p.shape
        return self.text, slice(self.head, self.head + R), slice(self.start, self.start + r)


class Question:
    """Something asked of every row: notes what a tile says of it."""

    asked: tuple[Any, ...] = ()  # what tells it from others of its kind
    answer: Any

    def same(self, other: Question) -> bool:
        """Whether both ask the same; tensors are equal by what they hold."""
        return type(self) is type(other) and all(map(_equal, self.asked, other.asked))

    def begin(self, P: FusedAttention) -> None:
        """Make room for the answer, (B, H, Q)."""
        self.answer = torch.zeros(P.batch, P.heads, P.queries, device=P.device)

    def visit(self, tile: Tile) -> None:
        """Read one tile."""
        raise NotImplementedError


class Mass(Question):
    def visit(self, tile: Tile) -> None:
        self.answer[tile.place] = (tile.norm * tile.total)[..., 0]


class Entropy(Question):
    def __init__(self, skip_first: bool) -> None:
        self.asked, self.skip_first = (skip_first,), skip_first

    def visit(self, tile: Tile) -> None:
        # H = ln sum p - (sum p t) / sum p
        energy, total = tile.energy_rest, tile.sum_rest[..., 0]
        if not self.skip_first:
            energy, total = energy + tile.energy_first, tile.total[..., 0]
        total = total.clamp_min(torch.finfo(torch.float32).tiny)
        self.answer[tile.place] = (total.log() - energy / total).clamp_min(0.0)


class Squares(Question):
    def visit(self, tile: Tile) -> None:
        self.answer[tile.place] = (torch.linalg.vector_norm(tile.p, dim=-1) / tile.total[..., 0]).square()


class Largest(Question):
    def visit(self, tile: Tile) -> None:
        self.answer[tile.place] = tile.norm[..., 0]  # the largest p is exp 0


class At(Question):
    def __init__(self, key_Q: Tensor) -> None:
        self.asked, self.key_Q = (key_Q,), key_Q

    def visit(self, tile: Tile) -> None:
        _, _, rows = tile.place
        key_R1r1 = (self.key_Q[rows].to(tile.p.device) - tile.low)[None, :, None]
        there = (key_R1r1 >= 0) & (key_R1r1 < tile.p.shape[-1])
        index = key_R1r1.clamp(0, tile.p.shape[-1] - 1).expand(*tile.p.shape[:2], 1)
        self.answer[tile.place] = (tile.p.gather(-1, index) * there * tile.norm)[..., 0]


class Features(Question):
    """P @ F for features of the keys; joined with the values into one product a tile."""

    def __init__(self, features: Tensor) -> None:
        self.asked, self.features = (features,), features

    def begin(self, P: FusedAttention) -> None:
        self.answer = torch.zeros(P.batch, P.heads, P.queries, self.features.shape[-1], device=P.device)

    def visit(self, tile: Tile) -> None:
        columns = self.features if self.features.ndim == 2 else self.features[tile.text]
        columns = columns[tile.low : tile.low + tile.p.shape[-1]].to(tile.p.device, torch.float32)
        self.answer[tile.place] = (tile.p.flatten(0, 1) @ columns).view(*tile.p.shape[:2], -1) * tile.norm


class Output(Question):
    """The layer's own output, P V of each head: (B, H, Q, Dv)."""

    def __init__(self, v_BGKD: Tensor, group: int) -> None:
        self.v_BGKD, self.group = v_BGKD, group

    def begin(self, P: FusedAttention) -> None:
        buffer_BQHD = torch.empty(P.batch, P.queries, P.heads, self.v_BGKD.shape[-1], device=P.device)
        self.answer = buffer_BQHD.transpose(1, 2)

    def visit(self, tile: Tile) -> None:
        v_KD = self.v_BGKD[tile.text, tile.head // self.group, tile.low : tile.low + tile.p.shape[-1]].float()
        self.answer[tile.place] = (tile.p.flatten(0, 1) @ v_KD).view(*tile.p.shape[:2], -1) * tile.norm * tile.share


class Match(Question):
    def __init__(self, query_label_BQ: Tensor, key_label_BK: Tensor, gap: int) -> None:
        self.asked = (query_label_BQ, key_label_BK, gap)
        self.query_label_BQ, self.key_label_BK, self.gap = query_label_BQ, key_label_BK, gap

    def pairs(self, tile: Tile, offset: int) -> tuple[Tensor, Tensor]:
        """The (row, key) pairs of a tile whose labels are equal; the same for all its heads."""
        rows = slice(tile.start, tile.start + tile.p.shape[1])
        keys = slice(tile.low, tile.low + tile.p.shape[-1])
        same = self.query_label_BQ[tile.text, rows, None] == self.key_label_BK[tile.text, None, keys]
        query = torch.arange(rows.start, rows.stop, device=same.device)[:, None] + offset
        key = torch.arange(keys.start, keys.stop, device=same.device)
        row, column = (same & (key <= query - self.gap)).nonzero(as_tuple=True)
        return row, column

    def visit(self, tile: Tile) -> None:
        row, column = tile.matches[id(self)]
        R, r, n = tile.p.shape
        if len(row) > r * n * DENSE_MATCHES:
            same = torch.zeros(r, n, device=tile.p.device)
            same[row, column] = 1.0
            found = (tile.p * same).sum(-1)
        else:
            found = torch.zeros(R, r, device=tile.p.device).index_add_(1, row, tile.p[:, row, column])
        self.answer[tile.place] = found * tile.norm[..., 0]


class Recent(Question):
    def __init__(self, width: int, offset: int) -> None:
        self.asked, self.width, self.offset = (width,), width, offset

    def visit(self, tile: Tile) -> None:
        _, r, n = tile.p.shape
        first = max(0, tile.start + self.offset - self.width + 1 - tile.low)
        near = tile.p[..., first:]
        query = torch.arange(tile.start, tile.start + r, device=near.device)[:, None] + self.offset
        distance = query - torch.arange(tile.low + first, tile.low + n, device=near.device)
        inside = (distance >= 0) & (distance < self.width)
        self.answer[tile.place] = (near * inside).sum(-1) * tile.norm[..., 0]


class TopK(Question):
    def __init__(self, k: int, heads: Sequence[int], skip_first: bool) -> None:
        self.asked = (k, tuple(heads), skip_first)
        self.k, self.heads, self.skip_first = k, list(heads), skip_first

    @property
    def wanted(self) -> int:
        """How many of a row's strongest keys settle the question."""
        return self.k + self.skip_first

    def begin(self, P: FusedAttention) -> None:
        shape = (P.batch, len(self.heads), P.queries, self.k)
        self.answer = (
            torch.full(shape, torch.nan, device=P.device),
            torch.zeros(shape, dtype=torch.int32, device=P.device),
        )

    def visit(self, tile: Tile) -> None:
        inside = [(at, head - tile.head) for at, head in enumerate(self.heads) if 0 <= head - tile.head < len(tile.p)]
        if not inside:
            return
        at, here = [pair[0] for pair in inside], [pair[1] for pair in inside]
        assert tile.strongest is not None
        t, key = (part[here] for part in tile.strongest)
        if self.skip_first:
            t, order = t.masked_fill(key == 0, HIDDEN).sort(-1, descending=True)
            key = key.gather(-1, order)
        t, key = t[..., : self.k], key[..., : self.k]
        weight = (t.exp() * tile.norm[here]).masked_fill(t < HIDDEN / 2, torch.nan)
        rows = slice(tile.start, tile.start + tile.p.shape[1])
        self.answer[0][tile.text, at, rows, : t.shape[-1]] = weight
        self.answer[1][tile.text, at, rows, : t.shape[-1]] = key.int()


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.shape == other.shape and one.device == other.device and torch.equal(one, other))
    return bool(one == other)


@dataclass
class _Plan:
    """The questions of the next pass, and the answers of the last."""

    open: bool = False
    noted: list[Question] = field(default_factory=list)
    answered: list[Question] = field(default_factory=list)


class FusedAttention(AttentionOperator):
    """P known by q, k and how the family makes its logits; answers come from tiles that fit the cache.

    logits: q, k, scale, soft-cap, bias and mask. sinks: (B or 1, H, Q or 1) sink logits, None without; they take their
    share of every row, or, with `sinks_scale_output`, of the output alone. v_BGKD: the values, for `output()`; with
    `answers`, the pass that answers a plan gives the output too.
    """

    def __init__(
        self,
        logits: Logits,
        sinks: Tensor | None = None,
        v_BGKD: Tensor | None = None,
        answers: bool = False,
        sinks_scale_output: bool = False,
    ) -> None:
        assert logits.visible is not None
        super().__init__(logits.q_BHQD.shape[0], logits.q_BHQD.shape[1], logits.visible, logits)
        self.sinks = sinks
        self.v_BGKD = v_BGKD
        self.answers = answers
        self.sinks_scale_output = sinks_scale_output
        self._group = self.heads // logits.k_BGKD.shape[1]
        self._plan = _Plan()

    @property
    def device(self) -> torch.device:
        return self._logits.q_BHQD.device

    @property
    def _logits(self) -> Logits:
        assert self.logits is not None
        return self.logits

    @contextmanager
    def planning(self) -> Iterator[None]:
        """While open, questions are noted and answered with zeros; one pass answers them all at the end."""
        self._plan.open = True
        try:
            if self.answers:
                self.output()
            yield
        finally:
            self._plan.open = False
        self.sweep(self._plan.noted)

    def output(self) -> Tensor:
        """P V, the call's own output before the projection: (B, Q, H, Dv) in the model's dtype."""
        assert self.v_BGKD is not None
        return self._ask(Output(self.v_BGKD, self._group)).transpose(1, 2).to(self._logits.q_BHQD.dtype)

    @property
    def mass(self) -> Tensor:
        return self._ask(Mass())

    def __matmul__(self, features: Tensor) -> Tensor:
        return self._ask(Features(features))

    def at(self, key_Q: Tensor) -> Tensor:
        return self._ask(At(key_Q))

    def scores(self, start: int, stop: int) -> Tensor:
        if self._plan.open:  # what a plan reads is thrown away
            return torch.zeros(self.batch, self.heads, stop - start, self.keys, device=self.device)
        return self._logits.rows(start, stop)

    def rows(self, start: int, stop: int) -> Tensor:
        logits = self.scores(start, stop)
        if self.sinks is not None and not self.sinks_scale_output:
            sink_BHQ = self.sinks.float()[..., start:stop] if self.sinks.shape[-1] > 1 else self.sinks.float()
            logits = torch.cat([logits, sink_BHQ.expand(logits.shape[:3])[..., None]], -1)
        return logits.softmax(-1)[..., : self.keys].nan_to_num(0.0)  # a row of a boolean mask that sees nothing

    def entropy(self, skip_first: bool = False) -> Tensor:
        return self._ask(Entropy(skip_first))

    def squares(self) -> Tensor:
        return self._ask(Squares())

    def largest(self) -> Tensor:
        return self._ask(Largest())

    def match_mass(self, query_label_BQ: Tensor, key_label_BK: Tensor, gap: int) -> Tensor:
        return self._ask(Match(query_label_BQ, key_label_BK, gap))

    def recent_mass(self, width: int) -> Tensor:
        return self._ask(Recent(width, self.keys - self.queries))

    def topk(self, k: int, heads: Sequence[int] | None = None, skip_first: bool = False) -> tuple[Tensor, Tensor]:
        return self._ask(TopK(min(k, self.keys), range(self.heads) if heads is None else heads, skip_first))

    def _ask(self, question: Question) -> Any:
        known = next((one for one in self._plan.answered + self._plan.noted if one.same(question)), None)
        if known is not None:
            return known.answer
        if self._plan.open:
            question.begin(self)
            self._plan.noted.append(question)
        else:
            self.sweep([question])
        return question.answer

    def sweep(self, questions: Sequence[Question]) -> None:
        """Answer the questions in one pass over the tiles."""
        for question in questions:
            question.begin(self)
        for tile in self._tiles(questions):
            for question in questions:
                question.visit(tile)
        self._plan.answered += questions

    def _tiles(self, questions: Sequence[Question]) -> Iterator[Tile]:
        top = [question for question in questions if isinstance(question, TopK)]
        matches = [question for question in questions if isinstance(question, Match)]
        G = self._logits.k_BGKD.shape[1]
        for text in range(self.batch):
            scaled_HQD = self._logits.q_BHQD[text].float() * self._logits.scale
            k_GDK = self._logits.k_BGKD[text].float().mT.contiguous()
            for start, stop, low, high in self._row_ranges():
                pairs: dict[int, tuple[Tensor, Tensor]] = {}
                for group in range(G):
                    head = group * self._group
                    most = max((q.wanted for q in top if any(0 <= h - head < self._group for h in q.heads)), default=0)
                    tile = self._tile(scaled_HQD, k_GDK[group], text, head, (start, stop), (low, high), most, pairs)
                    if group == 0:
                        pairs |= {id(q): q.pairs(tile, self.keys - self.queries) for q in matches}
                    yield tile

    def _tile(
        self,
        scaled_HQD: Tensor,
        k_DK: Tensor,
        text: int,
        head: int,
        rows: tuple[int, int],
        keys: tuple[int, int],
        most: int,
        matches: dict[int, tuple[Tensor, Tensor]],
    ) -> Tile:
        heads = slice(head, head + self._group)
        r, n = rows[1] - rows[0], keys[1] - keys[0]
        q_RrD = scaled_HQD[heads, rows[0] : rows[1]]
        logits = (q_RrD.reshape(-1, q_RrD.shape[-1]) @ k_DK[:, keys[0] : keys[1]]).view(self._group, r, n)
        logits = self._shaped(logits, text, heads, rows, keys)
        strongest = _strongest(logits, most) if most else None
        peak = logits.amax(-1, keepdim=True) if strongest is None else strongest[0][..., :1]
        sees = (peak > HIDDEN / 2) | (peak < HIDDEN * 2)  # a row that an additive mask hides whole is uniform
        t = logits.sub_(peak)
        p = t.exp()
        if strongest is not None:
            strongest = (strongest[0] - peak).masked_fill_(strongest[0] < HIDDEN / 2, HIDDEN), strongest[1] + keys[0]
        first = 1 if keys[0] == 0 else 0
        sum_first = p[..., :1] if first else torch.zeros_like(peak)
        sum_rest = p[..., first:].sum(-1, keepdim=True)
        total = sum_rest + sum_first
        norm, share = sees / total, torch.ones_like(total)
        if self.sinks is not None:
            sink_Rr = _part(self.sinks[..., None], text, heads, rows, keys).float()
            share = torch.sigmoid(peak + total.log() - sink_Rr)
            if not self.sinks_scale_output:
                norm, share = norm * share, torch.ones_like(total)
        return Tile(text, head, rows[0], keys[0], t, p, sum_rest, sum_first, norm, share, strongest, matches)

    def _shaped(self, logits: Tensor, text: int, heads: slice, rows: tuple[int, int], keys: tuple[int, int]) -> Tensor:
        """Soft-cap, position bias, mask, in the families' own order."""
        spec, visible = self._logits, self.visible
        if spec.softcap is not None:
            logits = spec.softcap * torch.tanh(logits / spec.softcap)
        if spec.bias is not None:
            logits = logits + _part(spec.bias, text, heads, rows, keys).float()
        if visible.mask is None:
            return _hide_future(logits, rows[0] + self.keys - self.queries, keys[0], visible)
        mask = _part(visible.mask, text, heads, rows, keys)
        if mask.dtype == torch.bool:
            return logits.masked_fill_(~mask, HIDDEN)
        return logits.add_(mask)

    def _row_ranges(self) -> Iterator[tuple[int, int, int, int]]:
        """Rows and the keys that any of them may see: (start, stop, low, high)."""
        budget = TILE_BYTES.get(self.device.type, TILE_BYTES["cpu"]) // (4 * self._group)
        start = 0
        while start < self.queries:
            low, high = self._reach(start, min(self.queries, start + 16))
            step = max(16, min(512, budget // max(1, high - low) // 16 * 16))
            stop = min(self.queries, start + step)
            yield start, stop, *self._reach(start, stop)
            start = stop

    def _reach(self, start: int, stop: int) -> tuple[int, int]:
        """The keys that some of these rows may see."""
        visible, offset = self.visible, self.keys - self.queries
        if visible.mask is not None:
            reach_2 = visible.reach_Q2[start:stop]
            return int(reach_2[:, 0].min()), int(reach_2[:, 1].max())
        low = max(0, start + offset - visible.window + 1) if visible.window and visible.causal else 0
        return low, min(self.keys, stop + offset) if visible.causal else self.keys


def _strongest(logits: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The `most` largest logits of each row and their places, largest first, searched in chunks of keys."""
    n = logits.shape[-1]
    most, whole = min(most, n), n // CHUNK
    if whole <= 2 * most:
        best = logits.topk(most, dim=-1)
        return best.values, best.indices
    peak = logits[..., : whole * CHUNK].unflatten(-1, (whole, CHUNK)).amax(-1)
    if n % CHUNK:
        peak = torch.cat([peak, logits[..., whole * CHUNK :].amax(-1, keepdim=True)], -1)
    # a row's `most` largest lie in the `most` chunks with the largest maxima
    chunk = peak.topk(most, dim=-1, sorted=False).indices
    place = (chunk[..., None] * CHUNK + torch.arange(CHUNK, device=chunk.device)).flatten(-2)
    found = logits.gather(-1, place.clamp_max(n - 1)).masked_fill_(place >= n, -torch.inf)
    best = found.topk(most, dim=-1)
    return best.values, place.gather(-1, best.indices)


def _part(tensor: Tensor, text: int, heads: slice, rows: tuple[int, int], keys: tuple[int, int]) -> Tensor:
    """The part of a (B, H, Q, K) tensor, any of its sizes 1, that a tile stands on: (R or 1, r or 1, n)."""
    tensor = tensor[text if tensor.shape[0] > 1 else 0]
    tensor = tensor[heads] if tensor.shape[0] > 1 else tensor
    tensor = tensor[:, rows[0] : rows[1]] if tensor.shape[1] > 1 else tensor
    return tensor[..., keys[0] : keys[1]] if tensor.shape[-1] > 1 else tensor


def _hide_future(logits: Tensor, query: int, low: int, visible: Any) -> Tensor:
    """Hide the keys after each query, and those before its window; only where the tile has any."""
    r, n = logits.shape[-2:]
    if visible.causal:
        ahead = query - low + 1  # keys of the tile that its first row sees
        if ahead < n:
            future = torch.ones(r, n - ahead, dtype=torch.bool, device=logits.device).triu_(0)
            logits[..., ahead:].masked_fill_(future, HIDDEN)
    if visible.window is not None:
        behind = query + r - 1 - visible.window - low + 1  # keys of the tile that its last row no longer sees
        if behind > 0:
            distance = torch.arange(query, query + r, device=logits.device)[:, None] - torch.arange(
                low, low + behind, device=logits.device
            )
            logits[..., :behind].masked_fill_(distance >= visible.window, HIDDEN)
    return logits
