"""The tiled pass: exponentiated logits of some rows of all heads, while they are in the cache.

Shapes: B text, H head, G kv head, Q query, K key, D head dim, r rows of a tile, n keys of a tile, C columns multiplied
by the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attnscope.geometry import TILE
from attnscope.operators import Logits, Visibility

TILE_BYTES = {"cpu": TILE, "cuda": 256 * 2**20, "mps": 64 * 2**20}
TILE_ROWS = {"cpu": 64, "cuda": 1024, "mps": 256}  # the most rows: half of their own square is computed and hidden
HIDDEN = -1e30  # the logit of a key that a boolean mask hides: finite, so that 0 * logit is 0
CHUNK = 16  # keys whose maximum stands for them in the first round of the search for the strongest
PARTIAL_SORT = 64  # torch.topk on a CPU has a fast way where it is given this many numbers for each that it keeps


@dataclass(eq=False)
class Tile:
    """Some rows of all heads: weights are p * norm.

    t = logits - their row's maximum, p = exp t, both (H, r, n), over the keys from `low`. norm (H, r, 1) is what makes
    p a weight: 1 / sum p, times the share that a sink logit leaves; 0 for a row that sees nothing. Valid until the
    next tile: t and p are buffers that it writes over.
    """

    text: int
    start: int
    low: int
    t: Tensor
    p: Tensor
    sum_rest: Tensor  # over the keys but key 0, so that the row without it loses no digits
    sum_first: Tensor
    norm: Tensor
    share: Tensor  # what a sink logit leaves of the output, (H, r, 1)
    strongest: tuple[Tensor, Tensor] | None  # t and key of the strongest keys, of the heads that any question wants
    columns_GKC: Tensor | None

    @cached_property
    def total(self) -> Tensor:
        return self.sum_rest + self.sum_first

    @cached_property
    def product(self) -> Tensor:
        """P times all columns that any question multiplies by, (H, r, C): one product a tile."""
        assert self.columns_GKC is not None
        H, r, n = self.p.shape
        p_GRn = self.p.view(self.columns_GKC.shape[0], -1, n)
        return (p_GRn @ self.columns_GKC[:, self.low : self.low + n]).view(H, r, -1) * self.norm

    @cached_property
    def energy_first(self) -> Tensor:
        """p t of key 0, (H, r)."""
        return self.p[..., 0] * self.t[..., 0] if self.low == 0 else torch.zeros_like(self.total[..., 0])

    @cached_property
    def energy_rest(self) -> Tensor:
        """Sum of p t over the keys but key 0, (H, r). Destroys t."""
        first = self.energy_first
        products = self.t.mul_(self.p)
        return products.sum(-1) - (first if self.low == 0 else 0)

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.p.shape[1])

    @property
    def place(self) -> tuple[int, slice, slice]:
        """Where this tile's rows lie in a (B, H, Q) answer."""
        return self.text, slice(None), self.rows


@dataclass(eq=False)
class Tiling:
    """One pass over a call's attention: how its logits are made, and what every tile brings with it.

    sinks: (B or 1, H, Q or 1) sink logits or None; with `sinks_scale_output` they leave the rows alone. most: how many
    strongest keys are wanted, of `heads`. columns(text): (G, K, C) to multiply by, or None.
    """

    logits: Logits
    sinks: Tensor | None
    sinks_scale_output: bool
    most: int
    heads: Sequence[int]
    columns: Callable[[int], Tensor | None]

    def __iter__(self) -> Iterator[Tile]:
        B, self.n_heads, self.queries, D = self.logits.q_BHQD.shape
        G, self.keys = self.logits.k_BGKD.shape[1:3]
        self._buffers = [torch.empty(0, device=self.logits.q_BHQD.device)] * 2
        for text in range(B):
            q_HQD = self.logits.q_BHQD[text].float() * self.logits.scale
            k_GDK = self.logits.k_BGKD[text].float().mT.contiguous()
            columns_GKC = self.columns(text)
            for rows, keys in self.ranges():
                logits = self._buffer(0, rows, keys)
                q_GRD = q_HQD[:, rows].reshape(G, -1, D)  # the heads of a group stacked as rows: k is not repeated
                torch.bmm(q_GRD, k_GDK[..., keys], out=logits.view(G, -1, logits.shape[-1]))
                yield self._tile(self._shaped(logits, text, rows, keys), text, rows, keys, columns_GKC)

    def ranges(self) -> Iterator[tuple[slice, slice]]:
        """Rows, and the keys that any of them may see."""
        device = self.logits.q_BHQD.device
        most_rows = TILE_ROWS.get(device.type, TILE_ROWS["cpu"])
        budget = TILE_BYTES.get(device.type, TILE_BYTES["cpu"]) // (4 * self.n_heads)
        start = 0
        while start < self.queries:
            low, high = self._reach(start, min(self.queries, start + 16))
            stop = min(self.queries, start + max(16, min(most_rows, budget // max(1, high - low) // 8 * 8)))
            yield slice(start, stop), slice(*self._reach(start, stop))
            start = stop

    def _reach(self, start: int, stop: int) -> tuple[int, int]:
        """The keys that some of these rows may see."""
        visible, offset = self._visible, self.keys - self.queries
        if visible.mask is not None:
            reach_2 = visible.reach_Q2[start:stop]
            return int(reach_2[:, 0].min()), int(reach_2[:, 1].max())
        low = max(0, start + offset - visible.window + 1) if visible.window and visible.causal else 0
        return low, min(self.keys, stop + offset) if visible.causal else self.keys

    @property
    def _visible(self) -> Visibility:
        assert self.logits.visible is not None
        return self.logits.visible

    def _buffer(self, number: int, rows: slice, keys: slice) -> Tensor:
        """Room that is used again from tile to tile: fresh memory costs more than the arithmetic."""
        shape = self.n_heads, rows.stop - rows.start, keys.stop - keys.start
        size = shape[0] * shape[1] * shape[2]
        if self._buffers[number].numel() < size:
            self._buffers[number] = torch.empty(size, device=self.logits.q_BHQD.device)
        return self._buffers[number][:size].view(shape)

    def _shaped(self, logits: Tensor, text: int, rows: slice, keys: slice) -> Tensor:
        """Soft-cap, position bias, mask, in the families' own order."""
        spec, visible = self.logits, self._visible
        if spec.softcap is not None:
            logits = logits.div_(spec.softcap).tanh_().mul_(spec.softcap)
        if spec.bias is not None:
            logits = logits.add_(_part(spec.bias, text, rows, keys))
        if visible.mask is None:
            return _hide_future(logits, rows.start + self.keys - self.queries, keys.start, visible)
        mask = _part(visible.mask, text, rows, keys)
        return logits.masked_fill_(~mask, HIDDEN) if mask.dtype == torch.bool else logits.add_(mask)

    def _tile(self, logits: Tensor, text: int, rows: slice, keys: slice, columns_GKC: Tensor | None) -> Tile:
        every = len(self.heads) == self.n_heads
        strongest = _strongest(logits if every else logits[list(self.heads)], self.most) if self.most else None
        peak = strongest[0][..., :1] if every and strongest is not None else logits.amax(-1, keepdim=True)
        sees = (peak > HIDDEN / 2) | (peak < HIDDEN * 2)  # a row that an additive mask hides whole is uniform
        if strongest is not None:
            hidden = strongest[0] < HIDDEN / 2
            t_best = strongest[0] - (peak if every else peak[list(self.heads)])
            strongest = t_best.masked_fill_(hidden, HIDDEN), strongest[1] + keys.start
        t = logits.sub_(peak)
        p = torch.exp(t, out=self._buffer(1, rows, keys))
        first = 1 if keys.start == 0 else 0
        sum_first = p[..., :1].clone() if first else torch.zeros_like(peak)
        sum_rest = p[..., first:].sum(-1, keepdim=True)
        norm, share = sees.float() / (sum_rest + sum_first), torch.ones_like(sum_rest)
        if self.sinks is not None:
            sink_Hr1 = _part(self.sinks[..., None], text, rows, keys).float()
            share = torch.sigmoid(peak + (sum_rest + sum_first).log() - sink_Hr1)
            if not self.sinks_scale_output:
                norm, share = norm * share, torch.ones_like(share)
        return Tile(text, rows.start, keys.start, t, p, sum_rest, sum_first, norm, share, strongest, columns_GKC)


def _strongest(logits: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The `most` largest logits of each row and their places, largest first, searched in chunks of keys."""
    n = logits.shape[-1]
    most = min(most, n)
    size = 1 << (n // (PARTIAL_SORT * most)).bit_length() - 1 if n >= 4 * PARTIAL_SORT * most else CHUNK
    whole = n // size
    if whole <= 2 * most:
        best = logits.topk(most, dim=-1)
        return best.values, best.indices
    # a chunk is every `whole`-th key, so that its maximum is taken over contiguous rows
    chunks = logits[..., : whole * size].unflatten(-1, (size, whole))
    # a row's `most` largest lie in the `most` chunks with the largest maxima
    chunk = chunks.amax(-2).topk(most, dim=-1, sorted=False).indices
    found = chunks.gather(-1, chunk[..., None, :].expand(*chunk.shape[:-1], size, most)).flatten(-2)
    if n % size:
        found = torch.cat([found, logits[..., whole * size :]], -1)
    best = found.topk(most, dim=-1)
    step = torch.div(best.indices, most, rounding_mode="floor")
    place = step * whole + chunk.gather(-1, best.indices - step * most)
    if n % size:
        past = best.indices - size * most
        place = torch.where(past >= 0, past + whole * size, place)
    return best.values, place


def _part(tensor: Tensor, text: int, rows: slice, keys: slice) -> Tensor:
    """The part of a (B, H, Q, K) tensor, any of its sizes 1, that a tile stands on: (H or 1, r or 1, n or 1)."""
    tensor = tensor[text if tensor.shape[0] > 1 else 0]
    tensor = tensor[:, rows] if tensor.shape[1] > 1 else tensor
    return tensor[..., keys] if tensor.shape[-1] > 1 else tensor


def _hide_future(logits: Tensor, query: int, low: int, visible: Visibility) -> Tensor:
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
