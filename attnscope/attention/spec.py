"""What one attention call computes: which keys each query may see, q, k, v, and how its logits become weights.

The hooks make one of each call; the dense and the tiled operator, the certificate and the steps read it.

Shapes: B text, H head, G kv head, R heads of a group as rows, Q query, K key, D width of q and k, V width of v.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
KEPT_BYTES = 4 * 2**20  # of equal-label pairs that are worth keeping from layer to layer
SEEN_BYTES = 2**16  # of which keys are seen: of short texts
MOST_KEPT = 16  # things that layers share
HIDDEN = -1e30  # the logit of a key that a boolean mask hides: finite, so that 0 * logit is 0


@dataclass(eq=False)
class Visibility:
    """Which keys each query may see, counted from the mask that the model itself used.

    mask: None, boolean (True = attend) or additive, broadcastable to (B, H, Q, K). With None, `causal` decides, and
    `window` keeps the last `window` keys, the query's own included. Whoever computes with it reads `as_mask`.
    known: whether the keys that are not seen are hidden; else a query may see those too.
    """

    queries: int
    keys: int
    mask: Tensor | None = None
    causal: bool = True
    window: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    known: bool = True
    _once: dict[Hashable, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mask is not None and 1 in self.mask.shape[-2:]:  # a family may write one row for all queries
            rows, keys = self.mask.shape[-2:]
            sizes = self.queries if rows == 1 else rows, self.keys if keys == 1 else keys
            self.mask = self.mask.expand(*self.mask.shape[:-2], *sizes)

    @property
    def by_position(self) -> bool:
        """Whether each query sees one stretch of keys, which `causal` and `window` say."""
        return self.mask is None

    @property
    def as_mask(self) -> Tensor | None:
        """The mask that says which keys are seen; None where their position says it."""
        return self.mask

    @property
    def additive(self) -> bool:
        """Whether the mask is added to the logits."""
        return self.mask is not None and self.mask.dtype != torch.bool

    def rows(self, start: int, stop: int) -> Tensor:
        """Boolean (B or 1, H or 1, stop - start, K): True where the query may look; not to be written to."""
        if self._seen is not None:
            return self._seen if stop - start == self.queries else self._seen[..., start:stop, :]
        return self._rows(start, stop)

    @cached_property
    def _seen(self) -> Tensor | None:
        """Which keys every query sees, where that is small: many questions of a short text ask it."""
        maps = 1 if self.mask is None else self.mask.shape[:2].numel()
        return self._rows(0, self.queries) if maps * self.queries * self.keys <= SEEN_BYTES else None

    def _rows(self, start: int, stop: int) -> Tensor:
        if self.mask is not None:
            return allowed(self.mask[..., start:stop, : self.keys])
        return self.seen_from(self.position_Q[start:stop])[None, None]

    def drawn(self, start: int, stop: int) -> Tensor:
        """The same where a picture has a number: all that are not known to be hidden."""
        seen = self.rows(start, stop)
        return seen if self.known else torch.ones_like(seen)

    def seen_from(self, position: Tensor) -> Tensor:
        """Boolean (..., K): the keys that queries at some positions see, as `causal` and `window` say it."""
        distance = position[..., None] - torch.arange(self.keys, device=position.device)
        seen = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        return seen if self.window is None else seen & (distance < self.window)

    def at(self, key_BQ: Tensor) -> Tensor:
        """Boolean (B or 1, H or 1, Q): may query i see key `key_BQ[b, i]`? False where the key does not exist."""
        exists_BQ = (key_BQ >= 0) & (key_BQ < self.keys)
        if self.mask is None:
            distance_BQ = self.position_Q - key_BQ
            seen_BQ = exists_BQ & (distance_BQ >= 0) if self.causal else exists_BQ
            return (seen_BQ if self.window is None else seen_BQ & (distance_BQ < self.window))[:, None]
        safe_BQ = key_BQ.clamp(0, self.keys - 1)
        texts, heads = max(len(key_BQ), self.mask.shape[0]), self.mask.shape[1]
        blocks = [
            self.rows(a, b)
            .expand(texts, -1, -1, -1)
            .gather(-1, safe_BQ[:, None, a:b, None].expand(texts, heads, b - a, 1))[..., 0]
            for a, b in row_blocks(self.queries, self.keys, self.device)
        ]
        return _joined(blocks) & exists_BQ[:, None]

    def sees(self, key: int) -> Tensor:
        """Boolean (B or 1, H or 1, Q): which queries see a key."""
        if self.mask is None:
            return self.at(torch.full((1, self.queries), key, dtype=torch.long, device=self.device))
        return allowed(self.mask[..., key])

    @cached_property
    def ahead(self) -> Tensor:
        """The share of the queries that see the key after their own, one number: 0 in causal attention, 1 both ways.

        NaN of a single query, and where it is not known.
        """
        if not self.known:
            return torch.tensor(torch.nan)
        if self.mask is None:
            share = torch.nan if self.queries < 2 else float(not self.causal)
            return torch.tensor(share)
        return allowed(self.mask[..., : self.keys].diagonal(1 + self.offset, -2, -1)).float().mean()

    @cached_property
    def counts_BHQ(self) -> Tensor:
        """How many keys each query may see, (B or 1, H or 1, Q) integers."""
        if self.mask is None and self.causal:
            return (self.position_Q + 1).clamp(max=self.keys if self.window is None else self.window)[None, None]
        return _joined([self.rows(a, b).sum(-1) for a, b in row_blocks(self.queries, self.keys, self.device)])

    @cached_property
    def others_BHQ(self) -> Tensor:
        """How many keys other than key 0 each query may see, (B or 1, H or 1, Q) integers."""
        return self.counts_BHQ - self.sees(0).long()

    @property
    def offset(self) -> int:
        """The position of the first query among the keys."""
        return self.keys - self.queries

    @cached_property
    def position_Q(self) -> Tensor:
        """Each query's position among the keys."""
        return torch.arange(self.queries, device=self.device) + self.offset

    def once(self, what: Hashable, make: Callable[[], T]) -> T:
        """What `make` makes at the first ask: layers that share a mask share it. Small things, the last few of them."""
        if what not in self._once:
            while len(self._once) >= MOST_KEPT:
                del self._once[next(iter(self._once))]
            self._once[what] = make()
        result: T = self._once[what]
        return result

    def matches(self, query_label_BQ: Tensor, key_label_BK: Tensor, gap: int, start: int, stop: int) -> Tensor:
        """(B, stop - start, K) float: 1 on the keys j <= i - gap whose label equals the query's; layers share it."""

        def make() -> tuple[Tensor, Tensor, Tensor]:
            same_BQK = query_label_BQ[:, start:stop, None] == key_label_BK[:, None, :]
            latest_Q = self.position_Q[start:stop, None].to(same_BQK.device) - gap
            matches_BQK = (same_BQK & (torch.arange(self.keys, device=same_BQK.device) <= latest_Q)).float()
            return query_label_BQ, key_label_BK, matches_BQK  # holding the labels keeps their ids their own

        if 4 * len(query_label_BQ) * (stop - start) * self.keys > KEPT_BYTES:
            return make()[-1]
        return self.once((id(query_label_BQ), id(key_label_BK), gap, start, stop), make)[-1]

    def cells(self, row_sizes: Sequence[int], column_sizes: Sequence[int]) -> Tensor | None:
        """(rows, columns) boolean: does any query of a run of queries see any key of a run? None with a mask."""
        if self.mask is not None:
            return None
        size_R, size_C = (torch.tensor(list(sizes), device=self.device) for sizes in (row_sizes, column_sizes))
        past_R1, past_C = (size_R.cumsum(0) + self.offset)[:, None], size_C.cumsum(0)
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
        for a, b in row_blocks(self.queries, self.keys, self.device):
            seen_QK = self.rows(a, b).flatten(0, 1).any(0)
            if self.additive:
                seen_QK = seen_QK | ~self.rows(a, b).any(-1).flatten(0, 1).all(0)[:, None]
            first_Q, last_Q = seen_QK.byte().argmax(-1), seen_QK.flip(-1).byte().argmax(-1)
            reaches.append(torch.stack([first_Q, self.keys - last_Q], -1))
        return torch.cat(reaches).cpu()


def by_place(visible: Visibility, windows: Sequence[int | None]) -> Visibility:
    """The same without its mask, where it hides what `causal` and one of the windows hide, and adds nothing else.

    A kernel then reads no mask, and walks over the window alone. The host waits once, for the answer.
    """
    if visible.mask is None:
        return visible
    mask, verdicts = visible.mask[..., : visible.keys], []
    candidates = [Visibility(visible.queries, visible.keys, None, True, window, mask.device) for window in windows]
    for candidate in candidates:
        same = []
        for a, b in row_blocks(visible.queries, visible.keys, mask.device):
            part, seen = mask[..., a:b, :], candidate.rows(a, b)
            same.append((part == seen if part.dtype == torch.bool else torch.where(seen, part == 0, hides(part))).all())
        verdicts.append(torch.stack(same).all())
    equal = zip(candidates, torch.stack(verdicts).tolist(), strict=True)
    return next((candidate for candidate, holds in equal if holds), visible)


def _joined(blocks: Sequence[Tensor]) -> Tensor:
    """Blocks of queries as one, (..., Q)."""
    return torch.cat(list(blocks), dim=-1) if len(blocks) > 1 else blocks[0]


def allowed(mask: Tensor) -> Tensor:
    """Boolean: True where a boolean or additive mask lets a query look."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def hides(mask: Tensor) -> Tensor:
    """Boolean: True where what is added to a logit hides its key; what is left of the logit is then the mask alone.

    A row that float32's least number hides whole is uniform, as in eager attention; one of -inf sees nothing.
    """
    return mask <= HIDDEN


BLOCK_BYTES, CUDA_BLOCK_BYTES = 64 * 2**20, 2**30


def row_blocks(queries: int, row_items: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Split `queries` rows of `row_items` fp32 numbers each into ranges of at most `block_bytes`."""
    step = max(1, block_bytes(str(device)) // max(1, 4 * row_items))
    for start in range(0, queries, step):
        yield start, min(queries, start + step)


def block_bytes(device: str) -> int:
    """The largest temporary that a pass over rows makes: what a CPU's caches like, on CUDA what keeps launches few.

    >>> block_bytes("cpu")
    67108864
    """
    if not device.startswith("cuda"):
        return BLOCK_BYTES
    return min(CUDA_BLOCK_BYTES, max(BLOCK_BYTES, _whole(device) // 64))


@cache
def _whole(device: str) -> int:
    """All bytes of a CUDA device."""
    return torch.cuda.mem_get_info(device)[1]


KEYS_AT_ONCE = 2**15  # that are made float32, where single rows of a long text are wanted


@dataclass(eq=False)
class AttentionSpec:
    """One attention call as the model made it: logits are scale * q.k, soft-cap, position bias, mask, in this order.

    q_BHQD, k_BGKD, v_BGKV: after position encoding; H is a multiple of G. softcap: c in c * tanh(logit / c).
    bias: added to the logits, broadcastable to (B, H, Q, K). sinks: sink logits (B or 1, H, Q or 1), None without; they
    take their share of every row, or, with `sinks_scale_output`, of the output alone.
    """

    q_BHQD: Tensor
    k_BGKD: Tensor
    v_BGKV: Tensor
    scale: float
    visible: Visibility
    softcap: float | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    sinks_scale_output: bool = False

    @property
    def batch(self) -> int:
        return self.q_BHQD.shape[0]

    @property
    def heads(self) -> int:
        return self.q_BHQD.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k_BGKD.shape[1]

    @property
    def device(self) -> torch.device:
        return self.q_BHQD.device

    @property
    def row_sinks(self) -> Tensor | None:
        """The sink logits that take a share of the rows, which then sum to less than 1."""
        return None if self.sinks_scale_output else self.sinks

    def first_texts(self, count: int) -> AttentionSpec:
        """The call with its first texts alone."""
        return self.texts(0, count)

    def texts(self, start: int, stop: int) -> AttentionSpec:
        """The call with some of its texts alone."""

        def part(values: Tensor | None) -> Tensor | None:  # of all texts, or one for all of them
            return values if values is None or values.ndim < 4 or len(values) == 1 else values[start:stop]

        sinks = self.sinks if self.sinks is None or len(self.sinks) == 1 else self.sinks[start:stop]
        return replace(
            self,
            q_BHQD=self.q_BHQD[start:stop],
            k_BGKD=self.k_BGKD[start:stop],
            v_BGKV=self.v_BGKV[start:stop],
            visible=replace(self.visible, mask=part(self.visible.mask), _once={}),
            bias=part(self.bias),
            sinks=sinks,
        )

    def logits(self, start: int, stop: int) -> Tensor:
        """Logits (pre-softmax) of a block of queries, fp32 (B, H, stop - start, K); -inf where a mask blanks."""
        q_BGRD = self.q_BHQD[:, :, start:stop].float().reshape(self.batch, self.kv_heads, -1, self.q_BHQD.shape[-1])
        logits = (q_BGRD @ self.k_BGKD.float().mT).view(self.batch, self.heads, stop - start, -1) * self.scale
        mask, keys = self.visible.mask, logits.shape[-1]
        added = mask[..., start:stop, :keys] if mask is not None and self.visible.additive else None
        seen = self.visible.rows(start, stop) if added is None else None
        return self._shaped(logits, None if self.bias is None else self.bias[..., start:stop, :], added, seen)

    def output_shares(self, start: int, stop: int) -> Tensor | None:
        """What of a block's weighted values a family writes whose sinks scale its output, (B, H, stop - start, 1).

        None where that is all of them: elsewhere sinks take their share of the rows.
        """
        if self.sinks is None or not self.sinks_scale_output:
            return None
        sinks_BHR = self.sinks.float().expand(-1, -1, self.q_BHQD.shape[2])[..., start:stop]
        return torch.sigmoid(self.logits(start, stop).logsumexp(-1) - sinks_BHR)[..., None]

    def logits_of(self, query_BH: Tensor) -> Tensor:
        """Logits of one query of each text and head, fp32 (B, H, K): `logits`, where each head has a row of its own."""
        at_BH11, shape = query_BH[..., None, None], (self.batch, self.heads, -1, -1)

        def row(values: Tensor) -> Tensor:
            values = values.expand(shape)
            return values.gather(2, at_BH11.expand(-1, -1, 1, values.shape[-1]))

        q_BGRD = row(self.q_BHQD).float().reshape(self.batch, self.kv_heads, -1, self.q_BHQD.shape[-1])
        parts = [q_BGRD @ part.float().mT for part in self.k_BGKD.split(KEYS_AT_ONCE, 2)]
        logits = torch.cat(parts, -1).view(self.batch, self.heads, 1, -1) * self.scale
        visible, mask = self.visible, self.visible.as_mask
        mask = None if mask is None else row(mask[..., : visible.keys])
        added = mask if visible.additive else None
        if mask is None:
            mask = visible.seen_from(visible.position_Q.to(self.device)[at_BH11[..., 0]])
        bias = None if self.bias is None else row(self.bias.expand(*shape[:2], -1, visible.keys))
        return self._shaped(logits, bias, added, None if visible.additive else mask)[:, :, 0]

    def _shaped(self, logits: Tensor, bias: Tensor | None, added: Tensor | None, seen: Tensor | None) -> Tensor:
        """Soft-cap, position bias and mask, additive or of what is seen, in this order."""
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if bias is not None:
            logits = logits + bias.float()
        if added is not None:  # may carry finite bias; finfo.min stays additive
            added = added.float()
            return torch.where(hides(added), added, logits + added)  # whatever the logit is, NaN too
        assert seen is not None
        return logits.masked_fill(~seen, float("-inf"))

    def weights(self, start: int, stop: int) -> Tensor:
        """Weights (post-softmax) of a block of queries, fp32 (B, H, stop - start, K); 0 in a row that sees nothing."""
        return self.normalised(self.logits(start, stop), start, stop)

    def normalised(self, logits: Tensor, start: int, stop: int) -> Tensor:
        """The softmax of the logits of a block of queries; sink logits that take a share of the rows take it."""
        blind = logits.amax(-1, keepdim=True).isneginf()
        if self.row_sinks is not None:
            sink_BHQ = self.row_sinks.float()[..., start:stop] if self.row_sinks.shape[-1] > 1 else self.row_sinks
            logits = torch.cat([logits, sink_BHQ.float().expand(logits.shape[:3])[..., None]], -1)
        return logits.softmax(-1)[..., : self.visible.keys].masked_fill(blind, 0.0)
