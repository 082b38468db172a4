"""One layer's attention as a linear operator P: ask it, don't materialise it.

Almost every question about a head is `P @ F` for some features F of the keys, or one entry a row, `P.at(j)`.
Metrics and probes are written once against `AttentionOperator`; how the answer is found is the subclass's business.

Shapes: B text, H head, G kv head, Q query, K key, D head dim, M feature.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from attnscope.attention.topk import strongest
from attnscope.attention.visibility import Logits, Visibility, row_blocks
from attnscope.errors import UsageError

ROWS_A_SORT = 64
TINY = torch.finfo(torch.float32).tiny


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
