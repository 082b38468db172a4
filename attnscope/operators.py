"""One layer's attention as a linear operator P: ask it, don't materialise it.

Almost every question about a head is `P @ F` for some features F of the keys, or one entry a row, `P.at(j)`.
Metrics and probes are written once against `AttentionOperator`; how the answer is found is the subclass's business.

Shapes: B text, H head, G kv head, Q query, K key, D head dim, M feature.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from attnscope.errors import UsageError
from attnscope.strongest import strongest

ROWS_A_SORT = 64
TINY = torch.finfo(torch.float32).tiny
KEPT_BYTES = 4 * 2**20  # of a mask that is worth keeping from layer to layer
BLOCK_BYTES = 64 * 2**20  # the largest temporary that a pass over the rows makes


@dataclass(eq=False)
class Visibility:
    """Which keys each query may see, counted from the mask that the model itself used.

    mask: None, boolean (True = attend) or additive, broadcastable to (B, H, Q, K). With None, `causal` decides, and
    `window` keeps the last `window` keys, the query's own included.
    """

    queries: int
    keys: int
    mask: Tensor | None = None
    causal: bool = True
    window: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _matches: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def rows(self, start: int, stop: int) -> Tensor:
        """Boolean (B or 1, H or 1, stop - start, K): True where the query may look."""
        if self.mask is not None:
            block = self.mask[..., start:stop, : self.keys]
            return block if block.dtype == torch.bool else block > torch.finfo(block.dtype).min / 2
        query_position = self._position_Q[start:stop, None]
        key_position = torch.arange(self.keys, device=self.device)
        distance_QK = query_position - key_position
        visible_QK = distance_QK >= 0 if self.causal else torch.ones_like(distance_QK, dtype=torch.bool)
        if self.window is not None:
            visible_QK &= distance_QK < self.window
        return visible_QK[None, None]

    def at(self, key_Q: Tensor) -> Tensor:
        """Boolean (B or 1, H or 1, Q): may query i see key `key_Q[i]`? False where the key does not exist."""
        exists_Q = (key_Q >= 0) & (key_Q < self.keys)
        if self.mask is None:
            distance_Q = self._position_Q - key_Q
            seen_Q = distance_Q >= 0 if self.causal else torch.ones_like(exists_Q)
            return (exists_Q & seen_Q if self.window is None else exists_Q & seen_Q & (distance_Q < self.window))[
                None, None
            ]
        safe_Q = key_Q.clamp(0, self.keys - 1)
        lead = self.mask.shape[:2]
        blocks = [
            self.rows(a, b).gather(-1, safe_Q[a:b, None].expand(*lead, b - a, 1))[..., 0]
            for a, b in row_blocks(self.queries, self.keys)
        ]
        return torch.cat(blocks, dim=-1) & exists_Q

    @cached_property
    def counts_BHQ(self) -> Tensor:
        """How many keys each query may see, (B or 1, H or 1, Q) integers."""
        if self.mask is None and self.causal:
            return (self._position_Q + 1).clamp(max=self.keys if self.window is None else self.window)[None, None]
        return torch.cat([self.rows(a, b).sum(-1) for a, b in row_blocks(self.queries, self.keys)], dim=-1)

    @property
    def _position_Q(self) -> Tensor:
        """Each query's position among the keys."""
        return torch.arange(self.queries, device=self.device) + (self.keys - self.queries)

    def matches(self, query_label_BQ: Tensor, key_label_BK: Tensor, gap: int, start: int, stop: int) -> Tensor:
        """(B, stop - start, K) float: 1 on the keys j <= i - gap whose label equals the query's; layers share it."""
        asked = id(query_label_BQ), id(key_label_BK), gap, start, stop
        if asked in self._matches:
            return self._matches[asked][-1]
        same_BQK = query_label_BQ[:, start:stop, None] == key_label_BK[:, None, :]
        latest_Q = self._position_Q[start:stop, None].to(same_BQK.device) - gap
        found = (same_BQK & (torch.arange(self.keys, device=same_BQK.device) <= latest_Q)).float()
        if 4 * found.numel() <= KEPT_BYTES:
            while len(self._matches) >= 4:
                del self._matches[next(iter(self._matches))]
            self._matches[asked] = query_label_BQ, key_label_BK, found  # holding the labels keeps their ids their own
        return found

    def cells(self, row_sizes: Sequence[int], column_sizes: Sequence[int]) -> Tensor | None:
        """(rows, columns) boolean: does any query of a run of queries see any key of a run? None with a mask."""
        if self.mask is not None:
            return None
        size_R, size_C = (torch.tensor(list(sizes), device=self.device) for sizes in (row_sizes, column_sizes))
        past_R1, past_C = (size_R.cumsum(0) + self.keys - self.queries)[:, None], size_C.cumsum(0)
        seen = torch.ones(len(size_R), len(size_C), dtype=torch.bool, device=self.device)
        if self.causal:
            seen &= past_R1 - 1 >= past_C - size_C  # the last query and the first key
        if self.window is not None:
            seen &= past_R1 - size_R[:, None] - (past_C - 1) < self.window  # the first query and the last key
        return seen

    @cached_property
    def reach_Q2(self) -> Tensor:
        """The first visible key of each query and the one after its last, over all texts and heads, on the CPU.

        A row that an additive mask hides whole is uniform in a softmax: it reaches every key.
        """
        reaches = []
        for a, b in row_blocks(self.queries, self.keys):
            seen_QK = self.rows(a, b).flatten(0, 1).any(0)
            if self.mask is not None and self.mask.dtype != torch.bool:
                seen_QK = seen_QK | ~self.rows(a, b).any(-1).flatten(0, 1).all(0)[:, None]
            first_Q, last_Q = seen_QK.byte().argmax(-1), seen_QK.flip(-1).byte().argmax(-1)
            reaches.append(torch.stack([first_Q, self.keys - last_Q], -1))
        return torch.cat(reaches).cpu()


@dataclass(eq=False)
class Logits:
    """What a call's logits are made of: scale * q.k, soft-cap, position bias, mask, in this order.

    q_BHQD and k_BGKD are as the model passed them, after position encoding; H is a multiple of G.
    """

    q_BHQD: Tensor
    k_BGKD: Tensor
    scale: float
    softcap: float | None = None
    bias: Tensor | None = None
    visible: Visibility | None = None

    def rows(self, start: int, stop: int) -> Tensor:
        """Logits (pre-softmax) of a block of queries, fp32 (B, H, stop - start, K); -inf where a mask blanks."""
        B, H, _, D = self.q_BHQD.shape
        G = self.k_BGKD.shape[1]
        q_BGRD = self.q_BHQD[:, :, start:stop].float().reshape(B, G, -1, D)  # the group's heads stacked as rows
        logits = (q_BGRD @ self.k_BGKD.float().mT).view(B, H, stop - start, -1) * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if self.bias is not None:
            logits = logits + self.bias[..., start:stop, :].float()
        return self._masked(logits, start, stop)

    def _masked(self, logits: Tensor, start: int, stop: int) -> Tensor:
        if self.visible is None:
            return logits
        mask = self.visible.mask
        if mask is not None and mask.dtype != torch.bool:  # may carry finite bias; finfo.min stays additive
            return logits + mask[..., start:stop, : logits.shape[-1]].float()
        return logits.masked_fill(~self.visible.rows(start, stop), float("-inf"))


class AttentionOperator(ABC):
    """One layer's attention for a batch of texts: P (B, H, Q, K), rows that sum to `mass` (1 without sink logits)."""

    def __init__(self, batch: int, heads: int, visible: Visibility, logits: Logits | None) -> None:
        self.batch, self.heads = batch, heads
        self.queries, self.keys = visible.queries, visible.keys
        self.visible = visible
        self.logits = logits
        self.whole_rows = False  # known to sum to 1: what is missing from a row is rounding

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the answers live."""

    @property
    @abstractmethod
    def mass(self) -> Tensor:
        """(B, H, Q): what each row sums to; less than 1 where a sink logit takes a share."""

    @abstractmethod
    def __matmul__(self, features: Tensor) -> Tensor:
        """P @ F: F (K, M) or (B, K, M) -> (B, H, Q, M)."""

    @abstractmethod
    def at(self, key_Q: Tensor) -> Tensor:
        """(B, H, Q): the weight of query i on key `key_Q[i]`; 0 where that key does not exist."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> Tensor:
        """A dense block of query rows, fp32 (B, H, stop - start, K)."""

    @abstractmethod
    def entropy(self, skip_first: bool = False) -> Tensor:
        """(B, H, Q) nats: -sum p ln p of the row divided by its sum; with `skip_first`, of the row without key 0."""

    @abstractmethod
    def squares(self) -> Tensor:
        """(B, H, Q): the sum of the squared weights of the row divided by its sum."""

    @abstractmethod
    def largest(self) -> Tensor:
        """(B, H, Q): the largest weight of each row."""

    @abstractmethod
    def match_mass(self, query_label_BQ: Tensor, key_label_BK: Tensor, gap: int) -> Tensor:
        """(B, H, Q): the mass on the keys j <= i - gap whose label equals the query's."""

    @abstractmethod
    def recent_mass(self, width: int) -> Tensor:
        """(B, H, Q): the mass on the last `width` keys, the query's own included."""

    def group_mass(self, query_group_BQ: Tensor, key_group_BK: Tensor) -> Tensor:
        """(B, H, query groups, key groups): the mass between groups, summed over the queries and the keys of each.

        Groups are numbered from 0; a token of group -1 is in none.
        """
        mass_BHQG = self @ indicator(key_group_BK)
        return torch.einsum("bqg,bhqm->bhgm", indicator(query_group_BQ), mass_BHQG)

    def lost_mass(self) -> Tensor:
        """(B, H, Q): what each row lacks of 1; exactly 0 where no sink logit takes a share."""
        return self.mass * 0 if self.whole_rows else 1 - self.mass

    def scores(self, start: int, stop: int) -> Tensor:
        """Logits of a block of queries, after scale, cap, bias and mask, fp32 (B, H, stop - start, K).

        Raises UsageError where the family does not show them.
        """
        if self.logits is None:
            raise UsageError("this model family does not show its logits", "use --weights softmax")
        return self.logits.rows(start, stop)

    def topk(self, k: int, heads: Sequence[int] | None = None, skip_first: bool = False) -> tuple[Tensor, Tensor]:
        """The k strongest visible keys of every row, strongest first: weights and positions, (B, heads, Q, k).

        Weights are NaN where a row sees fewer keys; with `skip_first`, key 0 is not counted.
        """
        if k + skip_first > self._known[0].shape[-1]:
            self._known = self._strongest(min(k + skip_first, self.keys))
        weights, keys = self._known
        if skip_first:  # the others move up where key 0 stands before them
            behind = ((keys == 0) & ~weights.isnan())[..., :k]
            behind = behind if k == 1 else behind.cummax(-1).values
            place = torch.arange(behind.shape[-1], device=self.device) + behind.long()
            short = place >= weights.shape[-1]
            place = place.clamp_max(weights.shape[-1] - 1)
            weights, keys = weights.gather(-1, place).masked_fill(short, torch.nan), keys.gather(-1, place)
        chosen = slice(None) if heads is None else list(heads)
        return weights[:, chosen, :, :k], keys[:, chosen, :, :k]

    @cached_property
    def _known(self) -> tuple[Tensor, Tensor]:
        """The strongest keys that were already asked for, of all heads."""
        empty = torch.empty(self.batch, self.heads, self.queries, 0, device=self.device)
        return empty, empty.long()

    def _strongest(self, k: int) -> tuple[Tensor, Tensor]:
        weights, keys = [], []
        for a, b in self.blocks():
            rows = self.rows(a, b)
            hidden = self.visible.rows(a, b).to(self.device).float() - 1  # adding it is faster than a masked fill
            for c in range(a, b, ROWS_A_SORT):  # early rows of a causal text reach few keys: sort no more than those
                d = min(b, c + ROWS_A_SORT)
                reach = max(k, int(self.visible.reach_Q2[c:d, 1].max()))
                part = rows[:, :, c - a : d - a, :reach] + hidden[..., c - a : d - a, :reach]
                best, place = part.max(-1, keepdim=True) if k == 1 else strongest(part, k)
                weights.append(best.masked_fill(best < 0, torch.nan))
                keys.append(place)
        return torch.cat(weights, 2), torch.cat(keys, 2)

    def dense(self) -> Tensor:
        """The whole matrix, fp32 (B, H, Q, K); for those who ask for it."""
        return self.rows(0, self.queries)

    def distance(self) -> Tensor:
        """(B, H, Q) tokens: sum A[i,j] (i - j) of the row divided by its sum."""
        offset = self.keys - self.queries
        position_K = torch.arange(self.keys, device=self.device, dtype=torch.float32)
        centre = position_K - self.keys / 2  # small numbers keep fp32's digits
        reached = (self @ centre[:, None])[..., 0] / self.mass.clamp_min(TINY)
        return centre[offset:] - reached

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Row ranges whose dense block stays within BLOCK_BYTES."""
        return row_blocks(self.queries, self.keys * self.batch * self.heads)


class RowAttention(AttentionOperator):
    """P known by its rows: every answer is read off blocks of them."""

    @property
    def mass(self) -> Tensor:
        return self._by_block(lambda rows, a, b: rows.sum(-1))

    def __matmul__(self, features: Tensor) -> Tensor:
        features = features.to(self.device, torch.float32)
        return self._by_block(lambda rows, a, b: rows @ (features if features.ndim == 2 else features[:, None]))

    def at(self, key_Q: Tensor) -> Tensor:
        index_Q, there_Q = key_Q.to(self.device).clamp(0, self.keys - 1), (key_Q >= 0) & (key_Q < self.keys)

        def entry(rows: Tensor, a: int, b: int) -> Tensor:
            return rows.gather(-1, index_Q[a:b, None].expand(*rows.shape[:2], b - a, 1))[..., 0]

        return self._by_block(entry) * there_Q.to(self.device)

    def entropy(self, skip_first: bool = False) -> Tensor:
        first_BHQ, rest_BHQ = self._entr
        raw_BHQ = rest_BHQ if skip_first else first_BHQ + rest_BHQ
        mass_BHQ = self._rest_mass if skip_first else self.mass
        mass_BHQ = mass_BHQ.clamp_min(TINY)
        # -sum (p/m) ln (p/m) = (sum entr(p)) / m + ln m
        return (raw_BHQ / mass_BHQ + mass_BHQ.log()).clamp_min(0.0)

    @cached_property
    def _entr(self) -> tuple[Tensor, Tensor]:
        """-p ln p of key 0, and summed over the other keys: three metrics ask for it, and it is dear."""

        def sums(rows: Tensor, a: int, b: int) -> Tensor:
            p_ln_p = _p_ln_p(rows)
            return torch.stack([p_ln_p[..., 0], p_ln_p[..., 1:].sum(-1)], -1)

        first_BHQ, rest_BHQ = (-self._by_block(sums)).unbind(-1)
        return first_BHQ, rest_BHQ

    @cached_property
    def _rest_mass(self) -> Tensor:
        return self._by_block(lambda rows, a, b: rows[..., 1:].sum(-1))

    def squares(self) -> Tensor:
        raw_BHQ = self._by_block(lambda rows, a, b: (rows * rows).sum(-1))
        return raw_BHQ / self.mass.square().clamp_min(TINY)

    def largest(self) -> Tensor:
        return self._by_block(lambda rows, a, b: rows.amax(-1))

    def match_mass(self, query_label_BQ: Tensor, key_label_BK: Tensor, gap: int) -> Tensor:
        def matched(rows: Tensor, a: int, b: int) -> Tensor:
            return (rows * self.visible.matches(query_label_BQ, key_label_BK, gap, a, b)[:, None]).sum(-1)

        return self._by_block(matched)

    def recent_mass(self, width: int) -> Tensor:
        def recent(rows: Tensor, a: int, b: int) -> Tensor:
            first = a + self.keys - self.queries  # where the block's first query stands
            early = min(b - a, max(0, width - 1 - first))  # rows with fewer than `width` keys before them
            start = rows[:, :, :early, :width]
            inside = torch.ones(start.shape[-2:], device=rows.device).tril(first)
            return torch.cat([(start * inside).sum(-1), _band(rows, early, first, width).sum(-1)], -1)

        return self._by_block(recent)

    def _by_block(self, answer: Callable[[Tensor, int, int], Tensor]) -> Tensor:
        parts = [answer(self.rows(a, b), a, b) for a, b in self.blocks()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


class DenseAttention(RowAttention):
    """P as the matrix that the model's own eager attention returned: exactly Hugging Face's numbers."""

    def __init__(self, weights_BHQK: Tensor, visible: Visibility, logits: Logits | None = None) -> None:
        super().__init__(weights_BHQK.shape[0], weights_BHQK.shape[1], visible, logits)
        self.weights_BHQK = weights_BHQK

    @property
    def device(self) -> torch.device:
        return self.weights_BHQK.device

    @cached_property
    def mass(self) -> Tensor:
        return self.weights_BHQK.sum(-1, dtype=torch.float32)

    def rows(self, start: int, stop: int) -> Tensor:
        return self.weights_BHQK[:, :, start:stop].float()


def _p_ln_p(p: Tensor) -> Tensor:
    """p ln p, 0 for 0; on a CPU NumPy's vectorised logarithm takes a fifth of the time of torch's."""
    if p.device.type != "cpu":
        return torch.special.entr(p).neg_()
    logarithm = torch.empty_like(p)
    np.log(p.clamp_min(TINY).numpy(), out=logarithm.numpy())  # not in place: that is a slow loop
    return logarithm.mul_(p)


def _band(rows: Tensor, start: int, first: int, width: int) -> Tensor:
    """The last `width` keys of every row from `start` on, a view (..., rows - start, width); row 0 is query `first`."""
    row, key = rows.stride()[-2:]
    count = rows.shape[-2] - start
    offset = rows.storage_offset() + start * row + max(0, first + start - width + 1) * key
    size = (*rows.shape[:-2], count, width if count else 0)
    return rows.as_strided(size, (*rows.stride()[:-2], row + key, key), offset)


def indicator(groups_BT: Tensor) -> Tensor:
    """One column a group, (B, T, G) of zeros and ones; a token of group -1 is in none."""
    count = int(groups_BT.max()) + 1
    return (groups_BT[..., None] == torch.arange(count, device=groups_BT.device)).float()


def row_blocks(queries: int, row_items: int) -> Iterator[tuple[int, int]]:
    """Split `queries` rows of `row_items` fp32 numbers each into ranges of at most BLOCK_BYTES."""
    step = max(1, BLOCK_BYTES // max(1, 4 * row_items))
    for start in range(0, queries, step):
        yield start, min(queries, start + step)
