"""The tiled pass: the softmax of some rows of some heads, while it is in the cache.

Tiles are independent: on a CPU each core takes the next one, instead of every operator being split over the cores.

Shapes: B text, H head of a tile, G kv head of a tile, Q query, K key, D head dim, r rows of a tile, n keys of a tile,
C columns multiplied by the weights.
"""

from __future__ import annotations

import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from attnscope.attention.rows import TINY, topk
from attnscope.attention.spec import HIDDEN, AttentionSpec, Visibility, hides


def work_through(
    items: Iterator[Any], begin: Callable[[], Callable[[Any], None]], most: int, flush: bool = False
) -> None:
    """Call what `begin` gives each of at most so many workers with the next item, until none is left.

    flush: whether they work `without_subnormals`.
    """
    cores, inference = torch.get_num_threads(), torch.is_inference_mode_enabled()
    workers, lock, ended = min(cores, most), threading.Lock(), threading.Event()

    def remaining() -> Iterator[Any]:
        """What no worker has taken; nothing after an error of any."""
        while True:
            with lock:
                item = ended if ended.is_set() else next(items, ended)
            if item is ended:
                return
            yield item

    def work() -> None:
        try:
            flushed = without_subnormals() if flush else nullcontext()
            with torch.inference_mode(inference), torch.no_grad(), flushed:  # threads inherit none
                take = begin()
                for item in remaining():
                    take(item)
        except BaseException:
            ended.set()
            raise

    if workers == 1:
        work()
        return
    try:
        working = [_pool(workers, cores, os.getpid()).submit(work) for _ in range(workers)]
        for worker in working:
            worker.result()
    finally:
        ended.set()
        torch.set_num_threads(cores)  # a worker's own number is what later threads would begin with


@contextmanager
def without_subnormals() -> Iterator[None]:
    """This thread counts what is smaller than float32's normal numbers as 0: else a CPU takes 100 times as long."""
    already = bool(torch.full((), TINY / 2) * 1.0 == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(already)


class Room:
    """Memory that a worker uses again from tile to tile: fresh memory costs more than the arithmetic."""

    def __init__(self) -> None:
        self._numbers = torch.empty(0)

    def of(self, shape: Sequence[int], device: torch.device) -> Tensor:
        size = math.prod(shape)
        if self._numbers.numel() < size:
            self._numbers = torch.empty(size, device=device)
        return self._numbers[:size].view(*shape)


@lru_cache(maxsize=1)
def _pool(workers: int, cores: int, process: int) -> ThreadPoolExecutor:
    """Threads that stay from layer to layer, each with its share of the cores; a forked process makes its own."""
    return ThreadPoolExecutor(workers, "tiles", torch.set_num_threads, (cores // workers,))


TILE_ROWS = {"cpu": 64, "cuda": 1024, "mps": 256}  # the most rows: half of their own square is computed and hidden
FEWEST_ROWS = 16
MOST_WORKERS = 8  # more would wait for the interpreter: beyond, each takes several cores
LEAST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class TilePlace:
    """The place of a tile: which text, kv heads, heads, rows and keys."""

    text: int
    groups: slice
    heads: slice
    rows: slice
    keys: slice


@dataclass(eq=False)
class Tile:
    """Some rows of the heads of some kv heads, (H, r, n) over the keys that any of the rows may see.

    p: softmax of the logits over the keys alone; t = logits - their row's maximum, None once `energy` took it. norm
    (H, r, 1) makes p the row of P: the share that a sink logit leaves, 0 for a row that sees nothing. share (H, r, 1):
    what a sink logit leaves of the output. max_p (H, r, 1): exp 0 over the sum of exp t. top: logits of the largest
    entries of the heads `top_heads`, and their places in the tile. signed: of a signed map the weights, whose
    sizes as shares of their row are p. Valid until the worker's next tile, which writes over t, p and signed.
    """

    place: TilePlace
    t: Tensor | None
    p: Tensor
    norm: Tensor
    share: Tensor
    max_p: Tensor
    top: tuple[Tensor, Tensor] | None
    top_heads: Sequence[int]
    columns_GKC: Tensor | None
    signed: Tensor | None = None

    @cached_property
    def product(self) -> Tensor:
        """P times all columns that any question multiplies by, (H, r, C): one product per tile."""
        assert self.columns_GKC is not None
        H, r, n = self.p.shape
        p_GRn = self.p.view(self.columns_GKC.shape[0], -1, n)
        return (p_GRn @ self.columns_GKC[:, self.place.keys]).view(H, r, -1) * self.norm

    @cached_property
    def key0(self) -> Tensor:
        """p of key 0, (H, r)."""
        return self.p[..., 0].clone() if self.low == 0 else torch.zeros_like(self.norm[..., 0])

    @cached_property
    def rest(self) -> Tensor:
        """The sum of p over the other keys, (H, r), so that the row without key 0 loses no digits."""
        return self.p[..., 1:].sum(-1) if self.low == 0 else self.p.sum(-1)

    @property
    def sum(self) -> Tensor:
        """The sum of p over all keys, (H, r)."""
        return self.key0 + self.rest

    @property
    def size(self) -> Tensor:
        """The sum of the sizes of a row's weights, (H, r)."""
        return self.sum * self.norm[..., 0]

    @property
    def sees_Hr(self) -> Tensor:
        """Whether a row sees any key."""
        return self.norm[..., 0] > 0

    @cached_property
    def energy(self) -> tuple[Tensor, Tensor]:
        """p t of key 0, and summed over the other keys, (H, r) each; computed in the memory of t."""
        assert self.t is not None
        key0 = self.key0 * self.t[..., 0]
        whole, self.t = self.t.mul_(self.p).sum(-1), None
        return key0, whole - key0

    @property
    def low(self) -> int:
        """The first key."""
        return self.place.keys.start

    @property
    def rows(self) -> slice:
        return self.place.rows

    @property
    def answer(self) -> tuple[int, slice, slice]:
        """Where this tile's rows lie in a (B, H, Q) answer."""
        return self.place.text, self.place.heads, self.place.rows


@dataclass(eq=False)
class Tiles(ABC):
    """One pass over a call's tiles, and what every tile brings with it.

    most: how many of a row's largest entries are wanted, of the heads `top_heads`. columns(text): (G, K, C) to multiply
    by, or None. tile_bytes: the most that a worker's t or p take. flush: see `work_through`.
    """

    most: int
    top_heads: Sequence[int]
    columns: Callable[[int], Tensor | None]
    tile_bytes: int
    flush: ClassVar[bool] = False

    def each(self, visit: Callable[[Tile], None]) -> None:
        """Call `visit` with every tile, on as many cores as PyTorch may use; from several threads on a CPU."""

        def begin() -> Callable[[tuple[TilePlace, Any]], None]:
            rooms = Room(), Room()
            return lambda item: visit(self.tile(*item, rooms))

        work_through(self.places(), begin, MOST_WORKERS if self.device.type == "cpu" else 1, self.flush)

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the tiles are made."""

    @abstractmethod
    def places(self) -> Iterator[tuple[TilePlace, Any]]:
        """Every tile's place, the largest first, with what the tiles of its text share."""

    @abstractmethod
    def tile(self, place: TilePlace, text: Any, rooms: tuple[Room, Room]) -> Tile:
        """The tile of a place, in the memory of its worker."""

    def searched(self, place: TilePlace, entries: Tensor) -> tuple[list[int], tuple[Tensor, Tensor] | None]:
        """Which heads of a tile (H, r, n) are searched for their largest entries, and these with their places."""
        heads = [head for head in self.top_heads if place.heads.start <= head < place.heads.stop]
        some = len(heads) < len(entries)
        entries = entries[[head - place.heads.start for head in heads]] if some else entries
        return heads, topk(entries, self.most) if heads else None


@dataclass(eq=False)
class Tiling(Tiles):
    """The tiles of a softmax. spec: how its logits are made."""

    spec: AttentionSpec

    @property
    def device(self) -> torch.device:
        return self.spec.device

    def places(self) -> Iterator[tuple[TilePlace, _Text]]:
        """Rows of as many kv heads as fit."""
        H, G, numbers = self.spec.heads, self.spec.kv_heads, self.tile_bytes // 4
        for number in range(self.spec.batch):
            q_HQD = self.spec.q_BHQD[number].float() * self.spec.scale
            text = _Text(q_HQD, self.spec.k_BGKD[number].float().mT, self.columns(number))
            # the largest first: they end together, and their memory is enough for the others
            for rows, keys in reversed(list(self._ranges(numbers // (H // G)))):
                per_group = (H // G) * (rows.stop - rows.start) * (keys.stop - keys.start)
                step = max(1, numbers // per_group)
                for first in range(0, G, step):
                    groups = slice(first, min(G, first + step))
                    heads = slice(groups.start * (H // G), groups.stop * (H // G))
                    yield TilePlace(number, groups, heads, rows, keys), text

    def _ranges(self, numbers: int) -> Iterator[tuple[slice, slice]]:
        """Rows, and the keys that any of them may see; at most so many numbers a head, if that leaves rows enough."""
        visible, start, device = self.spec.visible, 0, self.spec.device.type
        tallest = TILE_ROWS.get(device, TILE_ROWS["cpu"])
        largest = 2 * numbers if device == "cpu" else numbers  # the first rows' tile; there memory is short, not time

        def tile(rows: int) -> tuple[slice, slice]:
            stop = min(visible.queries, start + rows)
            return slice(start, stop), slice(*reach(visible, start, stop))

        while start < visible.queries:
            keys = tile(FEWEST_ROWS)[1]
            most = min(tallest, numbers // max(1, keys.stop - keys.start))
            rows = max(FEWEST_ROWS, most // FEWEST_ROWS * FEWEST_ROWS)
            # the first rows of a causal text see few keys, those that would follow them in their tile many
            while rows > FEWEST_ROWS and rows * (tile(rows)[1].stop - keys.start) > largest:
                rows = max(FEWEST_ROWS, rows // 2 // FEWEST_ROWS * FEWEST_ROWS)
            yield tile(rows)
            start += rows

    def tile(self, place: TilePlace, text: _Text, rooms: tuple[Room, Room]) -> Tile:
        # The heads of a group are stacked as rows, so that k is not repeated.
        q_HrD, k_GDn = text.q_HQD[place.heads, place.rows], text.k_GDK[place.groups, :, place.keys]
        G, n = len(k_GDn), k_GDn.shape[-1]
        logits = rooms[0].of((*q_HrD.shape[:2], n), q_HrD.device)
        torch.bmm(q_HrD.reshape(G, -1, q_HrD.shape[-1]), k_GDn, out=logits.view(G, -1, n))
        logits = self._shaped(logits, place)

        # The first of a row's largest is its maximum, where they are searched.
        top_heads, top = self.searched(place, logits)
        first = top if len(top_heads) == len(logits) else None
        peak = first[0][..., :1] if first else logits.amax(-1, keepdim=True)
        t = logits.sub_(peak.clamp_min(LEAST))
        t = t.clamp_(min=HIDDEN) if self.spec.visible.additive else t  # finite, so that 0 * t is 0
        p = torch.softmax(t, -1, out=rooms[1].of(t.shape, t.device))
        max_p = p.gather(-1, first[1][..., :1]) if first else p.amax(-1, keepdim=True)

        # What makes p the row of P, and what a sink logit leaves of the output, (H, r, 1) each.
        blind = (peak == -torch.inf) | ((peak <= HIDDEN / 2) & (peak >= HIDDEN * 2))  # below: uniform, see `hides`
        norm, share = (~blind).float(), torch.ones_like(peak)
        if self.spec.sinks is not None:
            remaining = torch.sigmoid(peak - max_p.log() - part(self.spec.sinks[..., None], place).float())
            norm, share = (norm, remaining) if self.spec.sinks_scale_output else (norm * remaining, share)
        columns = text.columns_GKC
        columns = columns[place.groups] if columns is not None else None
        return Tile(place, t, p, norm, share, max_p, top, top_heads, columns)

    def _shaped(self, logits: Tensor, place: TilePlace) -> Tensor:
        """Soft-cap, position bias, mask, in the families' own order."""
        spec, visible = self.spec, self.spec.visible
        if spec.softcap is not None:
            logits = logits.div_(spec.softcap).tanh_().mul_(spec.softcap)
        if spec.bias is not None:
            logits = logits.add_(part(spec.bias, place))
        if visible.as_mask is None:
            return _hide_future(logits, place.rows.start + visible.offset, place.keys.start, visible)
        mask = part(visible.as_mask, place)
        if mask.dtype == torch.bool:
            return logits.masked_fill_(~mask, HIDDEN)
        return logits.masked_fill_(hides(mask), 0.0).add_(mask)


class _Text(NamedTuple):
    """What the tiles of one text read: scaled queries, keys and columns in float32."""

    q_HQD: Tensor
    k_GDK: Tensor
    columns_GKC: Tensor | None


def reach(visible: Visibility, start: int, stop: int) -> tuple[int, int]:
    """The keys that some of these rows may see."""
    if not visible.by_position:
        reach_2 = visible.reach_Q2[start:stop]
        return int(reach_2[:, 0].min()), int(reach_2[:, 1].max())
    if not visible.causal:
        return 0, visible.keys
    low = max(0, start + visible.offset - visible.window + 1) if visible.window else 0
    return low, min(visible.keys, stop + visible.offset)


def part(tensor: Tensor, place: TilePlace) -> Tensor:
    """The part of a (B, H, Q, K) tensor, any of its sizes 1, that a tile is of: (H or 1, r or 1, n or 1)."""
    tensor = tensor[place.text if tensor.shape[0] > 1 else 0]
    tensor = tensor[place.heads] if tensor.shape[0] > 1 else tensor
    tensor = tensor[:, place.rows] if tensor.shape[1] > 1 else tensor
    return tensor[..., place.keys] if tensor.shape[-1] > 1 else tensor


def _hide_future(logits: Tensor, query: int, low: int, visible: Visibility) -> Tensor:
    """Hide the keys after each query, and those before its window; only where the tile has any."""
    r, n = logits.shape[-2:]
    if visible.causal:
        ahead = query - low + 1  # keys of the tile that its first row sees
        if ahead < n:
            future = torch.ones(r, n - ahead, dtype=torch.bool, device=logits.device).triu_(0)
            logits[..., ahead:].masked_fill_(future, HIDDEN)
    if visible.window is not None:
        past = query + r - visible.window - low  # keys of the tile that its last row no longer sees
        if past > 0:
            query_r1 = torch.arange(query, query + r, device=logits.device)[:, None]
            distance = query_r1 - torch.arange(low, low + past, device=logits.device)
            logits[..., :past].masked_fill_(distance >= visible.window, HIDDEN)
    return logits
