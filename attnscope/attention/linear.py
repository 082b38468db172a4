"""A linear layer's map of its values, y = M v: signed, before gate and norm, without a softmax.

The state of such a layer (a gated delta rule, Kimi's delta attention, Mamba-2) is linear in its values. The layer's own
rule, run once more with unit vectors in their place, gives the map itself.

    M = LinearMap(rule)
    M.rows(0, M.queries) @ values_BHKV    # the rule's own output

Where a number says how a row is spread, it is of |w| as a share of the row's sum of |w|; a single weight is signed, and
the strongest are those with the largest |w|.

The rule runs on chunks of the text as a batch, with unit vectors as values and as the state before. That gives four
matrices a chunk, and every part of the map is a product of some: no whole map is made.

Shapes: B text, T token, H head, Q query, K key, V width of a value, D width of the state on the key's side, N chunk,
C token of a chunk, r rows of a tile, n keys of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attnscope.attention import questions as ask
from attnscope.attention.operator import AttentionOperator
from attnscope.attention.questions import Question
from attnscope.attention.rows import TINY, Block
from attnscope.attention.spec import HIDDEN, Visibility
from attnscope.attention.tiles import (
    FEWEST_ROWS,
    MOST_WORKERS,
    Room,
    Tile,
    TilePlace,
    Tiles,
    without_subnormals,
    work_through,
)
from attnscope.attention.tiling import SMALL, TiledOperator

Apply = Callable[[Mapping[str, Tensor], Tensor, Tensor | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class LinearRule:
    """How one linear layer mixes its values: linear in them, and in the state that it begins with.

    name: of the rule, `gated delta rule`. tokens: what the rule is given for each token but the values, (B, T, ...).
    apply: tokens, values (B, T, H, V) and the state (B, H, D, V) before the first token, None for zeros, to the output
    (B, T, H, V) and the state after the last token. values_BTHV: the layer's own. state: D. log_decay_BTH: the
    logarithm of the share of the state that each token leaves, before what it erases by its key; of the mean share
    where it differs by channel; None where the layer has none. write_BTH: how much of its value each token writes, None
    for all. chunk: how many tokens `apply` takes at once, so that fewer cost as much. strength: the name in `tokens` of
    what makes a token write and erase nothing where it is 0; empty where a value of 0 does both.
    """

    name: str
    tokens: Mapping[str, Tensor]
    apply: Apply
    values_BTHV: Tensor
    state: int
    log_decay_BTH: Tensor | None = None
    write_BTH: Tensor | None = None
    chunk: int = 64
    strength: str = ""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Texts, tokens and heads."""
        B, T, H, _ = self.values_BTHV.shape
        return B, T, H

    def run(self, values_BTHV: Tensor) -> Tensor:
        """The output of other values, (B, T, H, V)."""
        return self.apply(self.tokens, values_BTHV, None)[0]

    def without(self, cut_BTH: Tensor, values_BTHV: Tensor) -> Tensor:
        """The output where some tokens write nothing into the state of some heads, and erase nothing of it.

        The state decays at these tokens as it did.
        """
        if not self.strength:
            return self.run(values_BTHV.masked_fill(cut_BTH[..., None], 0.0))
        strength = self.tokens[self.strength]
        cut = cut_BTH.reshape(*cut_BTH.shape, *[1] * (strength.ndim - 3))
        return self.apply({**self.tokens, self.strength: strength.masked_fill(cut, 0.0)}, values_BTHV, None)[0]


@dataclass(frozen=True)
class Chunks:
    """What a rule does within each chunk of a text, (B, N, H, ...), and what it takes from a chunk to the next.

    own (C, C): values to outputs. write (D, C): values to the state after the chunk. read (C, D): the state before it
    to outputs. keep (D, D): the state before to that after.
    """

    own: Tensor
    write: Tensor
    read: Tensor
    keep: Tensor

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The four of them."""
        return self.own, self.write, self.read, self.keep

    @property
    def count(self) -> int:
        """N."""
        return self.own.shape[1]

    @property
    def size(self) -> int:
        """C."""
        return self.own.shape[-1]

    def joined(self) -> Chunks:
        """Each two neighbours as one chunk; one of zeros follows where the last has none."""
        parts = self.parts
        if self.count % 2:
            parts = tuple(nn.functional.pad(part, (0, 0) * 3 + (0, 1)) for part in parts)
        (own, write, read, keep), (own_2, write_2, read_2, keep_2) = ([part[:, a::2] for part in parts] for a in (0, 1))
        return Chunks(
            torch.cat([nn.functional.pad(own, (0, own.shape[-1])), torch.cat([read_2 @ write, own_2], -1)], -2),
            torch.cat([keep_2 @ write, write_2], -1),
            torch.cat([read, read_2 @ keep], -2),
            keep_2 @ keep,
        )

    @classmethod
    def of(cls, rule: LinearRule) -> Chunks:
        """By the rule itself, some chunks at a time; a text's last chunk repeats its last token."""
        (B, T, H), D = rule.shape, rule.state
        C, device = min(rule.chunk, T), rule.values_BTHV.device
        # A longer chunk has more weights of its own, and the state passes over fewer: both are cheap at twice D.
        levels = max(0, math.ceil(math.log2(min(2 * D, T) / C)))
        token_NC = torch.arange(-(-T // C) * C, device=device).clamp(max=T - 1).view(-1, C)
        step = max(1, AT_ONCE // (B * C * H * (C + D)) >> levels) << levels
        unit, most = torch.eye(C + D, device=device), B * min(step, len(token_NC))
        values = unit[:C, None].expand(most, C, H, C + D).contiguous()
        state = unit[C:].expand(most, H, D, C + D).contiguous()
        joined, count = C << levels, -(-len(token_NC) >> levels)
        shapes = (joined, joined), (D, joined), (joined, D), (D, D)
        whole = cls(*(torch.empty(B, count, H, *shape, device=device) for shape in shapes))

        def run(first: int) -> None:
            part_NC = token_NC[first : first + step]
            batch = B * len(part_NC)
            tokens = {name: tensor[:, part_NC].flatten(0, 1) for name, tensor in rule.tokens.items()}
            output, after = rule.apply(tokens, values[:batch], state[:batch])
            output_BNHCV = output.float().transpose(1, 2).unflatten(0, (B, -1))
            after_BNHDV = after.float().unflatten(0, (B, -1))
            part = cls(output_BNHCV[..., :C], after_BNHDV[..., :C], output_BNHCV[..., C:], after_BNHDV[..., C:])
            for _ in range(levels):
                part = part.joined()
            for filled, tensor in zip(whole.parts, part.parts, strict=True):
                filled[:, first >> levels : (first >> levels) + part.count] = tensor

        # Cores take parts in turn: they would wait for each other in the rule's many small products.
        firsts = iter(range(0, len(token_NC), step))
        work_through(firsts, lambda: run, MOST_WORKERS if device.type == "cpu" else 1, flush=True)
        return whole

    def fill(self, rows_HrK: Tensor, text: int, heads: slice, start: int) -> int:
        """Write some heads' rows of one chunk, from `start` on, over the keys so far; the first key that has weight.

        Where the rows' reading of the state has become 0, from chunk to chunk, so are all weights before.
        """
        C, last = self.size, start // self.size
        place = start - last * C
        own_HrC = self.own[text, last, heads, place : place + rows_HrK.shape[1]]
        rows_HrK[..., last * C :] = own_HrC[..., : rows_HrK.shape[-1] - last * C]
        reading_HrD = self.read[text, last, heads, place : place + rows_HrK.shape[1]]
        for number in reversed(range(last)):
            least, most = reading_HrD.aminmax()  # several times as fast as `any`
            if least == most == 0:
                rows_HrK[..., : (number + 1) * C] = 0.0
                return (number + 1) * C
            keys = slice(number * C, (number + 1) * C)
            torch.bmm(reading_HrD, self.write[text, number, heads], out=rows_HrK[..., keys])
            if number:
                reading_HrD = reading_HrD @ self.keep[text, number, heads]
        return 0


AT_ONCE = 2**20  # numbers of the output that a rule gives at once: it makes several copies of that size


class LinearMap(TiledOperator):
    """The map of a linear layer, (B, H, Q, K) signed; what lies after a query is 0.

    How a row is spread is answered of |w| as shares of its row's sum, what is asked of single weights with their signs.
    In `answered_by` are "rule" for products with the map, "tiles" for other questions, and "rows" for a short text's.
    """

    signed = finds_largest = True
    kernel = "rows"

    def __init__(self, rule: LinearRule) -> None:
        B, T, H = rule.shape
        device = rule.values_BTHV.device
        super().__init__(B, H, Visibility(T, T, device=device), None, device)
        self.rule = rule

    @cached_property
    def chunks(self) -> Chunks:
        """What each part of the map is a product of."""
        return Chunks.of(self.rule)

    def rows(self, start: int, stop: int) -> Tensor:
        rows_BHrK = torch.zeros(self.batch, self.heads, stop - start, self.keys, device=self.device)
        size, every = self.chunks.size, slice(0, self.heads)
        with without_subnormals():
            for first in range(start - start % size, stop, size):
                a, b = max(start, first), min(stop, first + size)
                for text, rows_HrK in enumerate(rows_BHrK):
                    self.chunks.fill(rows_HrK[:, a - start : b - start, :b], text, every, a)
        return rows_BHrK

    def block(self, start: int, stop: int) -> Block:
        return block_of_sizes(self, start, stop)

    def together(self, questions: Iterable[Question]) -> Mapping[Question, Any]:
        distinct = list(dict.fromkeys(questions))
        products = self._noted(self._products([question for question in distinct if _is_product(question)]), "rule")
        return {**super().together(question for question in distinct if question not in products), **products}

    def _products(self, questions: Sequence[Question]) -> dict[Question, Any]:
        """M F for the features of all questions: the rule's own output of these as its values."""
        if not questions:
            return {}
        (B, T, H), parts = self.rule.shape, []
        for question in questions:
            one = torch.ones(T, 1, device=self.device)
            features = question.features.to(one) if isinstance(question, ask.Features) else one
            parts.append(features.expand(B, *features.shape[-2:]))
        values_BTHM = torch.cat(parts, -1)[:, :, None].expand(B, T, H, -1).contiguous()
        product_BHTM = self.rule.run(values_BTHM).float().transpose(1, 2)
        answers = product_BHTM.split([part.shape[-1] for part in parts], -1)
        pairs = zip(questions, answers, strict=True)
        return {question: part[..., 0] if isinstance(question, ask.RowSum) else part for question, part in pairs}

    def swept(self, questions: Sequence[Question]) -> dict[Question, Any]:
        """A short text's rows answer every question."""
        short = self.batch * self.heads * self.queries * self.keys <= SMALL
        return dict(AttentionOperator.together(self, questions)) if short else {}

    def tiles(
        self, most: int, top_heads: Sequence[int], columns: Callable[[int], Tensor | None], tile_bytes: int
    ) -> Tiles:
        return ShareTiles(most, top_heads, columns, tile_bytes, self, self.chunks)

    @property
    def inputs(self) -> Sequence[Tensor]:
        return self.chunks.write, self.chunks.read


def _is_product(question: Question) -> bool:
    """Whether it asks for products with signed weights."""
    return isinstance(question, ask.RowSum) or (isinstance(question, ask.Features) and not question.of_size)


def block_of_sizes(P: AttentionOperator, start: int, stop: int) -> Block:
    """Rows of a signed map, or of one of sizes, and |w| as shares of each row's sum of them."""
    signed = P.rows(start, stop)
    return Block(shares_of(signed), start, stop, P.visible, signed)


def shares_of(weights: Tensor) -> Tensor:
    """|w| of rows (..., K) as shares of each row's sum of them, 0 in a row of zeros."""
    size = weights.abs()
    return size.div_(size.sum(-1, keepdim=True).clamp_min(TINY))


class Shares(AttentionOperator):
    """|w| of a map as shares of each row's sum of |w|, for those who read rows that sum to 1."""

    def __init__(self, of: AttentionOperator) -> None:
        super().__init__(of.batch, of.heads, of.visible, None, of.device)
        self.of = of

    def rows(self, start: int, stop: int) -> Tensor:
        return self.of.block(start, stop).rows


@dataclass(eq=False)
class ShareTiles(Tiles):
    """The tiles of |w| as shares: of a chunk's rows of some heads, over all keys before."""

    of: LinearMap
    chunks: Chunks  # made by all cores, before each takes its tiles
    flush: ClassVar[bool] = True

    @property
    def device(self) -> torch.device:
        return self.of.device

    def places(self) -> Iterator[tuple[TilePlace, Tensor | None]]:
        size, numbers, every = self.chunks.size, self.tile_bytes // 4, range(self.of.queries)
        for text in range(self.of.batch):
            columns_HKC = self.columns(text)
            for number in reversed(range(self.chunks.count)):
                rows = every[number * size : (number + 1) * size]
                step = max(FEWEST_ROWS, numbers // rows.stop)
                for start in range(rows.start, rows.stop, step):
                    place = slice(start, min(rows.stop, start + step))
                    heads = max(1, numbers // ((place.stop - place.start) * place.stop))
                    for first in range(0, self.of.heads, heads):
                        group = slice(first, min(self.of.heads, first + heads))
                        yield TilePlace(text, group, group, place, slice(0, place.stop)), columns_HKC

    def tile(self, place: TilePlace, text: Tensor | None, rooms: tuple[Room, Room]) -> Tile:
        rows, heads = place.rows, place.heads
        shape = heads.stop - heads.start, rows.stop - rows.start, rows.stop
        signed, p = (room.of(shape, self.device) for room in rooms)
        low = self.chunks.fill(signed, place.text, heads, rows.start)
        p[..., :low] = 0.0
        reached = torch.abs(signed[..., low:], out=p[..., low:])
        size_Hr1 = reached.sum(-1, keepdim=True)
        reached.div_(size_Hr1.clamp_min(TINY))
        norm = (size_Hr1 != 0).float()
        # The keys after a query are none of its largest.
        own = p[..., place.rows]
        future = torch.ones(own.shape[-2:], dtype=torch.bool, device=p.device).triu_(1)
        own.masked_fill_(future, HIDDEN)
        top_heads, top = self.searched(place, p)
        own.masked_fill_(future, 0.0)
        columns = None if text is None else text[place.groups]
        max_p = p.amax(-1, keepdim=True).clamp_min_(TINY)  # a row of zeros has an entropy of 0
        signs = {"signed": signed, "size_Hr": size_Hr1[..., 0]}
        return ShareTile(place, None, p, norm, torch.ones_like(norm), max_p, top, top_heads, columns, **signs)


@dataclass(eq=False, kw_only=True)
class ShareTile(Tile):
    """A tile without logits: those of a softmax that gives the same shares are their logarithms.

    size_Hr: the sum of |w| of each row.
    """

    size_Hr: Tensor

    @property
    def size(self) -> Tensor:
        return self.size_Hr

    @property
    def sum(self) -> Tensor:
        return self.norm[..., 0]

    @cached_property
    def energy(self) -> tuple[Tensor, Tensor]:
        t = self.p.clamp_min(TINY).log_().sub_(self.max_p.log())
        key0, whole = self.key0 * t[..., 0], t.mul_(self.p).sum(-1)
        return key0, whole - key0
