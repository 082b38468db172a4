"""Layers in which every channel has its own map: Mamba, RWKV-4, gated recurrences, short convolutions.

Shown is one map for a layer, the mean over its channels of |w|: how much of a key's token reaches a query, whatever the
sign. No queries x keys x channels are kept: channels are taken some at a time.

    P = ChannelMap(rule)
    P.rows(0, P.queries)     # mean |w| over channels
    P.of_channel(5)          # one channel's own map, signed

Shapes: B text, T token, C channel, c some channels, Q query, r some queries, K key, N states of a channel, W taps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attnscope.attention.linear import LinearMap, LinearRule, block_of_sizes
from attnscope.attention.operator import AttentionOperator
from attnscope.attention.rows import Block
from attnscope.attention.spec import Visibility
from attnscope.errors import InputError

ROWS = 32  # queries whose weights on one another are made at once
NUMBERS = 1 << 23  # that are held at once
WORK = 2e10  # products of one layer's maps: some ten seconds of a core
QUICK = 4e8  # the most of a layer that is read without a selection: a fifth of a second


@dataclass(frozen=True)
class ChannelRule(ABC):
    """How one layer mixes the values of every channel.

    name: of the rule. values_BTC: the layer's own. after: what the layer makes of some rows of M v, (B, r, C) from a
    query on to another: gates and biases, which are in no map.
    """

    name: str
    values_BTC: Tensor
    after: Callable[[Tensor, int, int], Tensor]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Texts, tokens and channels."""
        B, T, C = self.values_BTC.shape
        return B, T, C

    @property
    def states(self) -> int:
        """Numbers that a channel keeps of the tokens before."""
        return 1

    @abstractmethod
    def weights(self, start: int, stop: int, channels: slice) -> Tensor:
        """Rows of some channels' maps, signed, float32 (B, c, r, K)."""

    @abstractmethod
    def single(self, channel: int) -> LinearRule:
        """One channel as a rule of one head, its values one number wide."""

    def runs(self, rows: int) -> Iterator[slice]:
        """All channels, as many at a time as leave their numbers for so many rows within bounds."""
        B, T, C = self.shape
        width = max(1, NUMBERS // (B * T * max(3 * self.states, rows)))
        return (slice(first, min(first + width, C)) for first in range(0, C, width))

    def mean(self, start: int, stop: int) -> Tensor:
        """Rows of the mean of |w| over channels, (B, r, K)."""
        B, T, C = self.shape
        total_BrK = torch.zeros(B, stop - start, T, device=self.values_BTC.device)
        for channels in self.runs(stop - start):
            total_BrK += self.weights(start, stop, channels).abs_().sum(1)
        return total_BrK / C

    def output(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Rows of what the layer makes of its values, (B, r, C), and of the mean of |w| over channels, (B, r, K)."""
        parts, total_BrK = [], torch.zeros((), device=self.values_BTC.device)
        for channels in self.runs(stop - start):
            values_BcK = self.values_BTC[:, :, channels].float().transpose(1, 2)
            weights_BcrK = self.weights(start, stop, channels)
            parts.append((weights_BcrK @ values_BcK[..., None])[..., 0])
            total_BrK = total_BrK + weights_BcrK.abs_().sum(1)
        return self.after(torch.cat(parts, 1).transpose(1, 2), start, stop), total_BrK / self.shape[2]


class Factors(NamedTuple):
    """What a weight on an earlier key is made of: w_ij = read_i * exp(log_query_i - log_key_j) * write_j.

    The exponent is at most 0 for a key before the query. own_BcT: the weight on the token itself.
    """

    log_key_BcTN: Tensor
    log_query_BcTN: Tensor
    write_BcTN: Tensor
    read_BcTN: Tensor
    own_BcT: Tensor


@dataclass(frozen=True)
class FactoredRule(ChannelRule):
    """A rule with maps that are products of a factor of the query and one of the key."""

    @abstractmethod
    def factors(self, channels: slice, stop: int) -> Factors:
        """Those of some channels, of the tokens before `stop`; logarithms in float64."""

    def weights(self, start: int, stop: int, channels: slice) -> Tensor:
        (B, T, _), count = self.shape, channels.stop - channels.start
        weights_BcrK = torch.zeros(B, count, stop - start, T, device=self.values_BTC.device)
        for place, part in self._parts(start, stop, channels):
            place(weights_BcrK).copy_(part)
        return weights_BcrK

    def mean(self, start: int, stop: int) -> Tensor:
        B, T, C = self.shape
        total_BrK = torch.zeros(B, 1, stop - start, T, device=self.values_BTC.device)
        for channels in self.runs(stop - start):
            for place, part in self._parts(start, stop, channels):
                place(total_BrK).add_(part.abs_().sum(1, keepdim=True))
        return total_BrK[:, 0] / C

    def _parts(self, start: int, stop: int, channels: slice) -> Iterator[tuple[Callable[[Tensor], Tensor], Tensor]]:
        """Rows of some channels' maps in parts, and where each part is in (B, c, r, K).

        A part is a product of two factors, of the decays from an edge to the query and from the key to that edge. Both
        are at most 1. The keys before the rows have one edge. Rows on one another have the middle of a block, then
        those of its halves, and so on: as many exponentials as numbers in the state for each doubling.
        """
        factors = self.factors(channels, stop)
        if start:
            log_key, log_query, write, read, _ = factors
            edge_Bc1N = log_key[:, :, start - 1, None]
            reads = read[:, :, start:] * (log_query[:, :, start:] - edge_Bc1N).float().exp_()
            writes = write[:, :, :start] * (edge_Bc1N - log_key[:, :, :start]).float().exp_()
            yield lambda rows: rows[..., :start], reads @ writes.mT
        log_key, log_query, write, read, own_BcT = (part[:, :, start:] for part in factors)
        yield lambda rows: rows.diagonal(start, -2, -1), own_BcT.clone()
        size = 1
        while size < stop - start:
            # Whole blocks of twice the size, and what is left of the last.
            whole = (stop - start) // (2 * size)
            rest = stop - start - 2 * size * whole - size
            for block in (_Blocks(start, 0, whole, size, size), _Blocks(start, whole, 1, size, rest)):
                if block.number and block.rows > 0:
                    of_keys = block.halves(log_key)[0]
                    edge = of_keys[..., -1:, :]
                    reads = block.halves(read)[1] * (block.halves(log_query)[1] - edge).float().exp_()
                    writes = block.halves(write)[0] * (edge - of_keys).float().exp_()
                    yield block.place, reads @ writes.mT
            size *= 2


@dataclass(frozen=True)
class Recurrence(FactoredRule):
    """w_ij = sum over states of read_i * (the decays after j up to i) * write_j, and on the diagonal also skip.

    log_decay: of some channels, (B, T, c, N), float64. write, read: what broadcasts to it. skip_C: what a token's own
    value adds without the state.
    """

    log_decay: Callable[[slice], Tensor]
    write: Callable[[slice], Tensor]
    read_BT1N: Tensor
    skip_C: Tensor | None = None
    width: int = 1

    @property
    def states(self) -> int:
        return self.width

    def factors(self, channels: slice, stop: int) -> Factors:
        log_BcTN = self.log_decay(channels)[:, :stop].transpose(1, 2).clamp_min(-1e4).cumsum(2)
        write_BcTN, read_BcTN = (
            part[:, :stop].transpose(1, 2).expand_as(log_BcTN) for part in (self.write(channels), self.read_BT1N)
        )
        write_BcTN = write_BcTN.contiguous()
        own_BcT = (read_BcTN * write_BcTN).sum(-1)
        if self.skip_C is not None:
            own_BcT += self.skip_C[channels].float()[:, None]
        return Factors(log_BcTN, log_BcTN, write_BcTN, read_BcTN, own_BcT)

    def single(self, channel: int) -> LinearRule:
        one, (B, T, _) = slice(channel, channel + 1), self.shape
        log = self.log_decay(one)
        write, read = (part.expand(B, T, 1, log.shape[-1]) for part in (self.write(one), self.read_BT1N))
        skip = 0.0 if self.skip_C is None else self.skip_C[channel].float()
        own = (read * write).sum(-1) + skip
        # What is read of the state before a token fades by that token's decay first.
        tokens = {"read": read * log.float().exp(), "write": write, "log_decay": log, "own": own}
        return LinearRule(self.name, tokens, read_before, self.values_BTC[..., one, None], log.shape[-1])


class _Blocks(NamedTuple):
    """Blocks on the diagonal of the rows from `start` on: in each some queries look at so many (size) keys before them.

    first: the number of the first block, each of twice the size. rows: queries of a block.
    """

    start: int
    first: int
    number: int
    size: int
    rows: int

    def halves(self, tokens_BcTN: Tensor) -> tuple[Tensor, Tensor]:
        """What belongs to the keys, (B, c, count, size, N), and to the queries, (B, c, count, rows, N)."""
        begin, length = 2 * self.size * self.first, self.size + self.rows
        blocks = tokens_BcTN[:, :, begin : begin + self.number * length].unflatten(2, (self.number, length))
        return blocks[..., : self.size, :], blocks[..., self.size :, :]

    def place(self, rows_BcrK: Tensor) -> Tensor:
        """Where they are in (B, c, r, K): (B, c, count, rows, size)."""
        text, channel, row, key = rows_BcrK.stride()
        begin = 2 * self.size * self.first
        first = (begin + self.size) * row + (self.start + begin) * key
        strides = text, channel, 2 * self.size * (row + key), row, key
        shape = *rows_BcrK.shape[:2], self.number, self.rows, self.size
        return rows_BcrK.as_strided(shape, strides, rows_BcrK.storage_offset() + first)


@dataclass(frozen=True)
class FadingMean(FactoredRule):
    """A mean of the values, weighted by exp(key) that fades with distance; the own by exp(first + key).

    rate_C: by how much the exponent falls with each token after the next.
    """

    keys_BTC: Tensor
    rate_C: Tensor
    first_C: Tensor

    def factors(self, channels: slice, stop: int) -> Factors:
        key_BcT = self.keys_BTC[:, :stop, channels].double().transpose(1, 2)
        rate_c1, first_c1 = (of_C[channels].double()[:, None] for of_C in (self.rate_C, self.first_C))
        faded_cT = rate_c1 * torch.arange(stop, device=key_BcT.device)
        # The logarithm of all that was written: as it were by token 0, and as it is at each token.
        written_BcT = (key_BcT + faded_cT).logcumsumexp(-1)
        left_BcT = written_BcT - faded_cT
        before_BcT = torch.nn.functional.pad(left_BcT, (1, 0), value=-torch.inf)[..., :-1]
        all_BcT = before_BcT.logaddexp(own_BcT := key_BcT + first_c1)
        past_BcT = torch.cat([written_BcT[..., :1], written_BcT[..., :-1]], -1)
        write_BcT, read_BcT = (key_BcT - left_BcT).exp().float(), (before_BcT - all_BcT).exp().float()
        own_BcT = (own_BcT - all_BcT).exp().float()
        return Factors(
            -written_BcT[..., None], -past_BcT[..., None], write_BcT[..., None], read_BcT[..., None], own_BcT
        )

    def single(self, channel: int) -> LinearRule:
        one = slice(channel, channel + 1)
        log_key, log_query, write, read, own = (part.transpose(1, 2) for part in self.factors(one, self.shape[1]))
        tokens = {"read": read, "write": write, "log_decay": log_key - log_query, "own": own}
        return LinearRule(self.name, tokens, read_before, self.values_BTC[..., one, None], 1)


@dataclass(frozen=True)
class ShortConvolution(ChannelRule):
    """Each channel's last W tokens by its taps, the last tap on the token itself."""

    taps_CW: Tensor

    def weights(self, start: int, stop: int, channels: slice) -> Tensor:
        taps_cW = self.taps_CW[channels].float()
        return self._placed(taps_cW[None].expand(self.shape[0], -1, -1), start, stop)

    def mean(self, start: int, stop: int) -> Tensor:
        taps_11W = self.taps_CW.float().abs().mean(0)[None, None]
        return self._placed(taps_11W.expand(self.shape[0], -1, -1), start, stop)[:, 0]

    def single(self, channel: int) -> LinearRule:
        taps_W = self.taps_CW[channel].float()
        past = len(taps_W) - 1  # the state is so many values before, the earliest first

        def apply(tokens: Mapping[str, Tensor], values: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
            values_BTHV = values.float()
            B, T, H, V = values_BTHV.shape
            before = values_BTHV.new_zeros(B, past, H, V) if state is None else state.transpose(1, 2)
            every = torch.cat([before, values_BTHV], 1)
            return sum(tap * every[:, at : at + T] for at, tap in enumerate(taps_W)), every[:, T:].transpose(1, 2)

        return LinearRule(self.name, {}, apply, self.values_BTC[..., channel : channel + 1, None], past)

    def _placed(self, taps_BcW: Tensor, start: int, stop: int) -> Tensor:
        B, c, width = taps_BcW.shape
        weights_BcrK = torch.zeros(B, c, stop - start, self.shape[1], device=taps_BcW.device)
        for back in range(min(width, stop)):
            diagonal = weights_BcrK[:, :, max(back - start, 0) :].diagonal(max(start - back, 0), -2, -1)
            diagonal.copy_(taps_BcW[..., width - 1 - back, None].expand_as(diagonal))
        return weights_BcrK


@dataclass(frozen=True)
class Joined(ChannelRule):
    """Several rules side by side, where a layer mixes its channels in several calls."""

    parts: tuple[ChannelRule, ...]

    @classmethod
    def of(cls, parts: Sequence[ChannelRule]) -> ChannelRule:
        """The channels of all of them, in order; a single rule as it is."""
        first = parts[0]
        if len(parts) == 1:
            return first
        return cls(first.name, torch.cat([part.values_BTC for part in parts], -1), first.after, tuple(parts))

    @property
    def states(self) -> int:
        return max(part.states for part in self.parts)

    def weights(self, start: int, stop: int, channels: slice) -> Tensor:
        blocks, first = [], 0
        for part in self.parts:
            own = slice(max(channels.start - first, 0), min(channels.stop - first, part.shape[2]))
            if own.start < own.stop:
                blocks.append(part.weights(start, stop, own))
            first += part.shape[2]
        return torch.cat(blocks, 1)

    def single(self, channel: int) -> LinearRule:
        for part in self.parts:
            if channel < part.shape[2]:
                return part.single(channel)
            channel -= part.shape[2]
        raise IndexError(channel)

    def output(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        outputs, means = zip(*(part.output(start, stop) for part in self.parts), strict=True)
        share = [part.shape[2] / self.shape[2] for part in self.parts]
        return torch.cat(outputs, -1), sum(mean * of for mean, of in zip(means, share, strict=True))


class ChannelMap(AttentionOperator):
    """The mean over channels of |w|, (B, 1, Q, K); what lies after a query is 0.

    Raises InputError where the maps of a long text would take minutes.
    """

    finds_largest = True

    def __init__(self, rule: ChannelRule) -> None:
        B, T, _ = rule.shape
        device = rule.values_BTC.device
        super().__init__(B, 1, Visibility(T, T, device=device), None, device)
        self.rule = rule
        self._whole: Tensor | None = None

    @property
    def work(self) -> float:
        """How many products the maps of all channels take."""
        B, T, C = self.rule.shape
        return 0.0 if isinstance(self.rule, ShortConvolution) else float(B * C * self.rule.states * T * T)

    def rows(self, start: int, stop: int) -> Tensor:
        _, T, C = self.rule.shape
        if isinstance(self.rule, ShortConvolution):
            return self.rule.mean(start, stop)[:, None]
        if self._whole is None:
            if self.work > WORK:
                tokens = int((WORK / (self.work / T**2)) ** 0.5)
                raise InputError(
                    f"the maps of {C:,} channels over {T:,} tokens take minutes in each layer",
                    f"take a text of at most {tokens:,} tokens, or one channel with {{channel=0}}",
                )
            step = max(ROWS, NUMBERS // T)
            blocks = (self.rule.mean(first, min(first + step, T)) for first in range(0, T, step))
            self._whole = torch.cat(list(blocks), 1)[:, None]
        return self._whole[:, :, start:stop]

    def block(self, start: int, stop: int) -> Block:
        return block_of_sizes(self, start, stop)

    def of_channel(self, channel: int) -> LinearMap:
        """One channel's own map, signed. Raises InputError for a channel that the layer does not have."""
        C = self.rule.shape[2]
        if not 0 <= channel < C:
            raise InputError(f"expected a channel from 0 to {C - 1}, got {channel}", "choose another with {channel=0}")
        return LinearMap(self.rule.single(channel))


def read_before(tokens: Mapping[str, Tensor], values_BTHV: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """y_t = read_t . S_t-1 + own_t v_t, S_t = a_t S_t-1 + write_t v_t^T, some tokens at a time.

    tokens: read, write and log_decay (B, T, H, N), the logarithm of a; own (B, T, H).
    """
    read, write = (tokens[name].float().transpose(1, 2) for name in ("read", "write"))
    log_BHTN = tokens["log_decay"].double().transpose(1, 2).clamp_min(-1e4)  # a decay of 0 has no logarithm
    values_BHTV = values_BTHV.float().transpose(1, 2)
    state = values_BHTV.new_zeros(*read.shape[:2], read.shape[-1], values_BHTV.shape[-1]) if state is None else state
    outputs = []
    for first in range(0, read.shape[2], ROWS):
        rows = slice(first, first + ROWS)
        after_BHrN, v = log_BHTN[:, :, rows].cumsum(2), values_BHTV[:, :, rows]
        before_BHrN = after_BHrN - log_BHTN[:, :, rows]
        between = (before_BHrN[..., None, :] - after_BHrN[..., None, :, :]).float()
        past = torch.ones(between.shape[2:4], dtype=torch.bool, device=v.device).tril(-1)
        between = between.masked_fill(~past[..., None], -torch.inf).exp()
        inside = (between * read[:, :, rows, None] * write[:, :, None, rows]).sum(-1)
        outputs.append(inside @ v + (read[:, :, rows] * before_BHrN.float().exp()) @ state)
        to_end = (after_BHrN[:, :, -1:] - after_BHrN).float().exp()
        state = after_BHrN[:, :, -1, :, None].float().exp() * state + (to_end * write[:, :, rows]).mT @ v
    return torch.cat(outputs, 2).transpose(1, 2) + tokens["own"].float()[..., None] * values_BTHV.float(), state
