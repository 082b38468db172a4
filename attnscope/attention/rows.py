"""How dense rows answer each question, and rows that are computed again with some of their weights cut.

The answers of dense rows are the definitions that every faster way is tested against. Rows are computed again from q, k
and v: the closed form, (o - sum p v) / (1 - sum p), loses the digits where most of a row is cut.

    rows = RowsAgain(spec, heads=(0, 1))
    for block in rows.blocks(query_NR):
        output_NrPV = block.output(cut_NPrK, "mask")

Shapes: B text, N text or row of a pass, H head, G kv head or group of tokens, P asked head, Q query, R asked row,
r rows of a block, K key, M feature, D width of q and k, V width of v, k kept keys; n entries of a row; h, q, m the
heads, queries and keys that are asked about.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from attnscope.attention import questions as ask
from attnscope.attention.spec import AttentionSpec, Visibility, row_blocks

SHORT = 128  # a row that is sorted as it is
CHUNK = 8
PLACES = (1 << 29) - 1  # what fits into the bits that a float64 has beyond a float32
ABOVE_0 = 2.0**-1000  # too small to change a float64 that was a float32, but for 0


def topk(entries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of every row, largest first: values and places (..., min(k, n)); equal entries in any order.

    Long rows are searched in chunks: the k largest lie in the k chunks with the largest maxima. On a CPU this is
    several times as fast as `torch.topk`, which takes one row after the other without vector instructions.

    Example:
        topk(torch.tensor([[0.1, 0.7, 0.2]]), 2)  # [[0.7, 0.2]], [[1, 2]]
    """
    k = min(k, entries.shape[-1])
    if entries.device.type != "cpu" or entries.dtype == torch.float64:
        best = entries.topk(k)
        return best.values, best.indices
    place = _places(entries, k)
    return entries.gather(-1, place), place


def _places(entries: Tensor, k: int) -> Tensor:
    n = entries.shape[-1]
    if n <= max(SHORT, CHUNK * k):
        return _sorted(entries, torch.arange(n), k)
    whole = n // CHUNK
    # a chunk is every `whole`-th entry, so that the maxima are taken over contiguous runs
    chunk = _places(entries[..., : whole * CHUNK].unflatten(-1, (CHUNK, whole)).amax(-2), k)
    candidate = (chunk[..., None, :] + torch.arange(0, whole * CHUNK, whole)[:, None]).flatten(-2)
    if n % CHUNK:
        remainder = torch.arange(whole * CHUNK, n)
        candidate = torch.cat([candidate, remainder.expand(*candidate.shape[:-1], -1)], -1)
    return _sorted(entries.gather(-1, candidate), candidate, k)


def _sorted(entries: Tensor, place: Tensor, k: int) -> Tensor:
    """The places of the k largest, largest first: each number carries its place in the low bits of a float64.

    NumPy's vectorised partial sort moves both at once.
    """
    packed = entries.double().clamp_(min=2 * torch.finfo(torch.float32).min)  # -inf, which has no such bits, is last
    packed.add_(ABOVE_0)  # 0 with a place is subnormal, which `tiles.without_subnormals` counts as 0: without its place
    packed.view(torch.int64).bitwise_or_(place)
    numbers = packed.numpy()
    if k < numbers.shape[-1]:
        numbers.partition(numbers.shape[-1] - k, axis=-1)
        numbers = numbers[..., -k:].copy()
    numbers.sort(axis=-1)
    return torch.from_numpy(numbers).view(torch.int64).bitwise_and_(PLACES).flip(-1)


CLOSE_ROWS = 256  # whose distances are counted from the first of them
ROWS_PER_SORT = 32  # early rows of a causal text reach few keys: no more than those are sorted
TINY = torch.finfo(torch.float32).tiny
SLACK = 1e-6  # of a row: equal weights that reach a share exactly, such as 19 of 20, are not left to rounding


@dataclass(eq=False)
class Block:
    """Query rows [start, stop) of an operator, dense fp32 (B, H, r, K), and what several questions read off them.

    signed: of a signed map the weights, whose sizes as shares of their row are `rows`. top: the largest entries of the
    rows that were searched so far, of all heads, and their keys.
    """

    rows: Tensor
    start: int
    stop: int
    visible: Visibility
    signed: Tensor | None = None
    top: tuple[Tensor, Tensor] | None = None

    @property
    def weights(self) -> Tensor:
        """What a question about the weights themselves reads."""
        return self.rows if self.signed is None else self.signed

    @cached_property
    def row_sum(self) -> Tensor:
        """(B, H, r)."""
        return self.rows.sum(-1)

    @cached_property
    def rest_sum(self) -> Tensor:
        """(B, H, r): the sum without key 0, added up without it, so that a small rest loses no digits."""
        return self.rows[..., 1:].sum(-1)

    @cached_property
    def minus_p_ln_p(self) -> tuple[Tensor, Tensor]:
        """-p ln p of key 0, and summed over the other keys, (B, H, r) each; 0 for a p of 0."""
        if self.rows.device.type == "cpu":  # NumPy's vectorised logarithm takes a fifth of the time of torch's
            p_ln_p = torch.empty_like(self.rows)
            np.log(self.rows.clamp_min(TINY).numpy(), out=p_ln_p.numpy())  # not in place: that is a slow loop
            p_ln_p.mul_(self.rows)
        else:
            p_ln_p = torch.special.entr(self.rows).neg_()
        return -p_ln_p[..., 0], -p_ln_p[..., 1:].sum(-1)

    @property
    def seen(self) -> Tensor:
        """Which keys the rows see, (B or 1, H or 1, r, K)."""
        return self.visible.rows(self.start, self.stop).to(self.rows.device)

    @property
    def first_query(self) -> int:
        """The position of the block's first query among the keys."""
        return self.start + self.visible.offset


def read_blocks(blocks: Iterable[Block], questions: Sequence[ask.Question]) -> list[Any]:
    """The answer to each question for all rows, from blocks of them in order."""
    answers: list[tuple[ask.Question, list[Any]]] = [(question, []) for question in questions]
    # The largest search of a block serves the smaller ones, see `Block.top`.
    widest_first = sorted(answers, key=lambda answer: -answer[0].k if isinstance(answer[0], ask.TopK) else 0)
    for block in blocks:
        for question, parts in widest_first:
            parts.append(READ[type(question)](block, question))
    return [join(question, parts) for question, parts in answers]


def join(question: ask.Question, parts: Sequence[Any]) -> Any:
    """The answer for all rows, from those of the blocks in order."""
    if isinstance(question, ask.TopK):
        return tuple(torch.cat(part, 2) for part in zip(*parts, strict=True))
    if isinstance(question, ask.Strongest):
        return [tuple(torch.cat(part, 1) for part in zip(*text, strict=True)) for text in zip(*parts, strict=True)]
    if isinstance(question, ask.GroupMass | ask.Received):
        return torch.stack(list(parts)).sum(0) if len(parts) > 1 else parts[0]
    return torch.cat(list(parts), 2) if len(parts) > 1 else parts[0]


def asked_key(question: ask.At | ask.Back | ask.Key, visible: Visibility) -> Tensor:
    """The key that a question asks of each query, (B or 1, Q)."""
    if isinstance(question, ask.At):
        return question.key_BQ
    position_Q = visible.position_Q
    return (position_Q - question.steps if isinstance(question, ask.Back) else position_Q * 0 + question.position)[None]


def _entropy(block: Block, question: ask.Entropy) -> Tensor:
    key0, rest = block.minus_p_ln_p
    raw = rest if question.skip_key0 else key0 + rest
    total = (block.rest_sum if question.skip_key0 else block.row_sum).clamp_min(TINY)
    return (raw / total + total.log()).clamp_min(0.0)  # -sum (p/m) ln (p/m) = (-sum p ln p) / m + ln m


def _one_key(block: Block, question: ask.At | ask.Back | ask.Key) -> Tensor:
    # A column and a diagonal are views of the rows.
    if isinstance(question, ask.Key) and 0 <= question.position < block.visible.keys:
        return block.rows[..., question.position]
    if isinstance(question, ask.Back) and question.steps >= 0:
        beyond = max(0, min(question.steps - block.first_query, block.stop - block.start))  # rows without such a key
        found = block.rows[..., beyond:, :].diagonal(max(0, block.first_query - question.steps), -2, -1)
        return torch.nn.functional.pad(found, (beyond, 0)) if beyond else found
    key_Br = asked_key(question, block.visible)[:, block.start : block.stop].to(block.rows.device)
    exists = (key_Br >= 0) & (key_Br < block.visible.keys)
    index = key_Br.clamp(0, block.visible.keys - 1)[:, None, :, None]
    return block.rows.gather(-1, index.expand(*block.rows.shape[:3], 1))[..., 0] * exists[:, None]


def _equal_labels(block: Block, question: ask.EqualLabels) -> Tensor:
    same = block.visible.matches(question.query_label_BQ, question.key_label_BK, question.gap, block.start, block.stop)
    return (block.rows * same[:, None]).sum(-1)


def _window(block: Block, question: ask.Window) -> Tensor:
    rows, width, first = block.rows, question.width, block.first_query
    early = min(rows.shape[-2], max(0, width - 1 - first))  # rows with fewer than `width` keys before them
    start = rows[:, :, :early, :width]
    inside = torch.ones(start.shape[-2:], device=rows.device).tril(first)

    # Of the rows after those the last `width` keys are a diagonal band: a view, of which nothing is copied or hidden.
    row, key = rows.stride()[-2:]
    count = rows.shape[-2] - early
    offset = rows.storage_offset() + early * row + max(0, first + early - width + 1) * key
    size = (*rows.shape[:-2], count, width if count else 0)
    band = rows.as_strided(size, (*rows.stride()[:-2], row + key, key), offset)
    return torch.cat([(start * inside).sum(-1), band.sum(-1)], -1)


def _features(block: Block, question: ask.Features) -> Tensor:
    rows = block.rows if question.of_size else block.weights
    features = question.features.to(rows)
    if features.ndim == 2:
        return rows @ features
    texts = max(len(rows), len(features))
    pairs = zip(rows.expand(texts, -1, -1, -1), features.expand(texts, -1, -1), strict=True)
    return torch.stack([rows_HrK @ features_KM for rows_HrK, features_KM in pairs])  # one for all is 4 times slower


def _group_mass(block: Block, question: ask.GroupMass) -> Tensor:
    queries, keys = question.counts
    mass_BHrG = block.rows @ indicator(question.key_group_BK, keys)[:, None]
    query_BrG = indicator(question.query_group_BQ, queries)[:, block.start : block.stop]
    return torch.einsum("brg,bhrm->bhgm", query_BrG, mass_BHrG)


def _received(block: Block, question: ask.Received) -> Tensor:
    share_Br = question.query_share_BQ[:, block.start : block.stop].to(block.rows)
    return (share_Br[:, None, None] @ block.rows)[..., 0, :]


def _top_k(block: Block, question: ask.TopK) -> tuple[Tensor, Tensor]:
    size, keys = _searched(block, question)
    if block.signed is None:
        return size, keys
    signed = block.signed if question.heads is None else block.signed[:, list(question.heads)]
    return signed.gather(-1, keys).masked_fill(size.isnan(), torch.nan), keys


def _searched(block: Block, question: ask.TopK) -> tuple[Tensor, Tensor]:
    """The largest entries of the rows."""
    if block.top is not None and question.k + question.skip_key0 <= block.top[0].shape[-1]:
        return top_of(block.top, question)
    rows, count = block.rows, block.stop - block.start
    hidden = block.seen.float() - 1  # faster than a masked fill
    if question.heads is not None:
        rows = rows[:, list(question.heads)]
        hidden = hidden[:, list(question.heads)] if hidden.shape[1] > 1 else hidden

    # A few rows at a time, over the keys that they reach; on other devices each search is a launch.
    parts, step = [], ROWS_PER_SORT if rows.device.type == "cpu" else max(1, count)
    for a in range(0, count, step):
        b = min(count, a + step)
        reach = int(block.visible.reach_Q2[block.start + a : block.start + b, 1].max())
        parts.append(_largest(rows[:, :, a:b, :reach] + hidden[..., a:b, :reach], question))
    weights, keys = (torch.cat(part, 2) for part in zip(*parts, strict=True))
    if question.heads is None and not question.skip_key0:
        block.top = weights, keys
    return weights, keys


def top_of(largest: tuple[Tensor, Tensor], question: ask.TopK) -> tuple[Tensor, Tensor]:
    """The k largest out of more of them, of all heads; without key 0 those after it move up."""
    weights, keys = largest if question.heads is None else (part[:, list(question.heads)] for part in largest)
    if question.skip_key0:
        passed = (keys[..., : question.k] == 0) & ~weights[..., : question.k].isnan()
        passed = passed.cummax(-1).values if question.k > 1 else passed
        others, kept = slice(1, question.k + 1), slice(question.k)
        weights, keys = (torch.where(passed, part[..., others], part[..., kept]) for part in (weights, keys))
    return weights[..., : question.k], keys[..., : question.k]


def _largest(entries: Tensor, question: ask.TopK) -> tuple[Tensor, Tensor]:
    """The k largest of every row, filled up to k with NaN; what is below 0 is hidden. Writes over the entries."""
    if question.skip_key0:
        entries[..., 0] = -1.0
    weights, keys = entries.max(-1, keepdim=True) if question.k == 1 else topk(entries, question.k)
    short = (0, question.k - weights.shape[-1])
    weights = torch.nn.functional.pad(weights.masked_fill(weights < 0, torch.nan), short, value=torch.nan)
    return weights, torch.nn.functional.pad(keys, short)


READ: Mapping[type[ask.Question], Callable[[Block, Any], Any]] = {
    ask.RowSum: lambda block, question: block.row_sum if block.signed is None else block.signed.sum(-1),
    ask.SizeSum: lambda block, question: block.weights.abs().sum(-1),
    ask.Entropy: _entropy,
    ask.SumOfSquares: lambda block, question: (
        (block.rows * block.rows).sum(-1) / block.row_sum.square().clamp_min(TINY)
    ),
    ask.MaxWeight: lambda block, question: (
        _searched(block, ask.TopK(1, None, True))[0][..., 0] if question.skip_key0 else block.rows.amax(-1)
    ),
    ask.Holding: lambda block, question: holding(block.rows, block.row_sum, question.percent),
    ask.Distance: lambda block, question: mean_distance(block.rows, block.row_sum, block.first_query),
    ask.AbsoluteDistance: lambda block, question: mean_absolute_distance(block.rows, block.row_sum, block.first_query),
    **dict.fromkeys((ask.At, ask.Back, ask.Key), _one_key),
    ask.EqualLabels: _equal_labels,
    ask.Window: _window,
    ask.Features: _features,
    ask.GroupMass: _group_mass,
    ask.Received: _received,
    ask.TopK: _top_k,
    ask.Strongest: lambda block, question: strongest(question, block.rows, block.seen, block.start, block.signed),
}


def holding(p: Tensor, sum_of_p: Tensor, percent: int) -> Tensor:
    """How many of each row's largest entries (..., r, n) add up to `percent` of its sum, (..., r); 0 without p.

    Counted by those that can go, from the smallest on: small numbers are added up first.
    """
    # NumPy sorts floats with vector instructions, some 20 times faster than torch does on a CPU
    ascending = torch.from_numpy(np.sort(p.numpy())) if p.device.type == "cpu" else p.sort(-1).values
    can_go = (1 - percent / 100 + SLACK) * sum_of_p[..., None]
    gone = torch.searchsorted(ascending.cumsum(-1), can_go, right=True)[..., 0]
    return (p.shape[-1] - gone) + 0 * sum_of_p  # a row with NaN stays NaN


def mean_distance(p: Tensor, sum_of_p: Tensor, first_query: int, first_key: int = 0) -> Tensor:
    """Sum of p (i - j) over the sum of p, (..., r), for rows (..., r, n) that begin at these positions; 0 without p.

    Counted from a query close by: small numbers keep fp32's digits, however long this text or another of its batch is.
    """
    r, n = p.shape[-2:]
    key_n = torch.arange(first_key, first_key + n, device=p.device)
    starts = range(0, r, CLOSE_ROWS)
    moved = [p[..., a : a + CLOSE_ROWS, :] @ (first_query + a - key_n).float() for a in starts]
    moved_r = torch.cat(moved, -1) if len(moved) > 1 else moved[0]
    distance = moved_r / sum_of_p.clamp_min(TINY) + torch.arange(r, device=p.device) % CLOSE_ROWS
    return distance.masked_fill(sum_of_p == 0, 0.0)


def mean_absolute_distance(p: Tensor, sum_of_p: Tensor, first_query: int, first_key: int = 0) -> Tensor:
    """As `mean_distance`, of |i - j|."""
    r, n = p.shape[-2:]
    query_r1 = torch.arange(first_query, first_query + r, device=p.device)[:, None]
    far_rn = (query_r1 - torch.arange(first_key, first_key + n, device=p.device)).abs().float()
    return ((p * far_rn).sum(-1) / sum_of_p.clamp_min(TINY)).masked_fill(sum_of_p == 0, 0.0)


def strongest(
    question: ask.Strongest, rows: Tensor, seen: Tensor, start: int, signed: Tensor | None = None
) -> list[tuple[Tensor, Tensor]]:
    """What a block of rows from `start` on, (B, H, r, K), says of the question, and of what it sees (1 for B or H).

    signed: what the strongest are given with, where the rows are sizes.
    """
    heads, answers = torch.tensor(question.heads, device=rows.device), []
    for text, (queries, keys) in enumerate(zip(question.query, question.key, strict=True)):
        here = queries[inside(queries, start, start + rows.shape[2])]
        query_q, key_m = (torch.tensor(places, dtype=torch.long, device=rows.device) for places in (here, keys))
        entries, visible, *own = (
            picked(part[text if len(part) > 1 else 0], heads, query_q - start, key_m)
            for part in (rows, seen, signed)
            if part is not None
        )
        answers.append(largest(entries, visible, key_m, question.k, *own))
    return answers


def inside(places: Sequence[int], start: int, stop: int) -> slice:
    """Which of some ascending places are in [start, stop)."""
    return slice(bisect_left(places, start), bisect_left(places, stop))


def picked(values_HrK: Tensor, head_h: Tensor, row_q: Tensor, key_m: Tensor) -> Tensor:
    """The entries of some rows and keys, (h, q, m); values of one head are those of all."""
    head_h = head_h if len(values_HrK) > 1 else head_h * 0
    return values_HrK[head_h[:, None, None], row_q[:, None], key_m]


def largest(
    entries_hqm: Tensor, seen_hqm: Tensor, key_m: Tensor, k: int, signed_hqm: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The k largest visible entries of every row and their keys, (h, q, k) each; NaN where a row has fewer.

    signed_hqm: what is given in their place, where the entries are sizes.
    """
    size, place = topk(entries_hqm.masked_fill(~seen_hqm, -torch.inf), k)
    weights = size if signed_hqm is None else signed_hqm.gather(-1, place)
    return weights.masked_fill(size.isneginf(), torch.nan), key_m[place]


def indicator(groups_BT: Tensor, count: int) -> Tensor:
    """One column per group of so many, (B, T, G) of zeros and ones; a token of group -1 is in none."""
    return (groups_BT[..., None] == torch.arange(count, device=groups_BT.device)).float()


# mask: logits of minus infinity, the rest of the row takes the mass; zero: weights after the softmax, the rest stays.
CutHow = Literal["mask", "zero"]


@dataclass(frozen=True)
class RowsAgain:
    """The rows of some heads of a call, to be computed again in blocks. heads: ascending, of all heads of the call."""

    spec: AttentionSpec
    heads: tuple[int, ...]

    def blocks(self, query_NR: Tensor) -> Iterator[RowBlock]:
        """Blocks of at most BLOCK_BYTES; query_NR: the positions that are asked of each text, -1 where it has fewer."""
        # All heads of the kv heads that the asked ones share: a group is multiplied as one matrix.
        spec, device, per_group = self.spec, self.spec.device, self.spec.heads // self.spec.kv_heads
        groups = sorted({head // per_group for head in self.heads})
        members = [group * per_group + member for group in groups for member in range(per_group)]
        shared_by, group_G = torch.tensor(members, device=device), torch.tensor(groups, device=device)
        place_P = torch.searchsorted(shared_by, torch.tensor(self.heads, device=device))

        # In float32 once, not once per block.
        k, v = spec.k_BGKD, spec.v_BGKV
        if len(groups) < spec.kv_heads:
            k, v = k[:, group_G], v[:, group_G]
        whole = replace(spec, q_BHQD=spec.q_BHQD[:, shared_by], k_BGKD=k.float(), v_BGKV=v.float())
        numbers = spec.batch * whole.heads * spec.visible.keys
        for start, stop in row_blocks(query_NR.shape[1], numbers, device):
            query_Nr = query_NR[:, start:stop]
            yield RowBlock(self._rows(whole, shared_by, query_Nr.clamp_min(0)), place_P, query_Nr, start)

    def _rows(self, whole: AttentionSpec, shared_by: Tensor, query_Nr: Tensor) -> AttentionSpec:
        """The call with some rows of each text alone; whole: with the heads `shared_by`."""
        text_N11 = torch.arange(len(query_Nr), device=query_Nr.device)[:, None, None]
        head_1P1 = torch.arange(whole.heads, device=query_Nr.device)[None, :, None]
        query_N1r = query_Nr[:, None, :]

        # A mask, bias or sink logit may be one for all texts, heads or queries: it is then taken once, not copied.
        def of_rows(value_BHQX: Tensor) -> Tensor:
            """What a call has per text or once, per head or once, per query or once, of these rows."""
            texts, heads, queries = value_BHQX.shape[:3]
            own = value_BHQX[:, shared_by] if heads == self.spec.heads > 1 else value_BHQX
            return own[
                text_N11 if texts > 1 else text_N11 * 0,
                head_1P1 if own.shape[1] > 1 else head_1P1[:, :1] * 0,
                query_N1r if queries > 1 else query_N1r * 0,
            ]

        # Rows that are no longer in the text's order need a mask, also where the call has none.
        visible, mask = whole.visible, whole.visible.as_mask
        if mask is None:
            seen = visible.seen_from(visible.position_Q[query_Nr])[:, None]
        else:
            seen = of_rows(mask[..., : visible.keys])
        sinks = None if whole.sinks is None else of_rows(whole.sinks[..., None])[..., 0]
        return replace(
            whole,
            q_BHQD=whole.q_BHQD[text_N11, head_1P1, query_N1r],
            visible=Visibility(query_Nr.shape[1], visible.keys, seen, device=whole.device),
            bias=None if whole.bias is None else of_rows(whole.bias),
            sinks=sinks,
        )


@dataclass(frozen=True)
class RowBlock:
    """Some rows of every text. query_Nr: their positions, -1 for none; start: the place of the first among all."""

    spec: AttentionSpec
    places_P: Tensor
    query_Nr: Tensor
    start: int

    @cached_property
    def seen_NPrK(self) -> Tensor:
        """Which keys the rows see, (N or 1, P or 1, r, K)."""
        seen = self.spec.visible.rows(0, self.spec.visible.queries)
        return seen[:, self.places_P] if seen.shape[1] > 1 else seen

    @cached_property
    def logits_NPrK(self) -> Tensor:
        """The logits of the asked heads, minus infinity on what a row does not see."""
        logits = self.spec.logits(0, self.spec.visible.queries)[:, self.places_P]
        return logits.masked_fill_(~self.seen_NPrK, -torch.inf)

    @cached_property
    def weights_NPrK(self) -> Tensor:
        """The weights of the asked heads as they are; 0 in a row that sees nothing."""
        return self._softmax(self.logits_NPrK)

    @property
    def row_sinks_NPr1(self) -> Tensor | None:
        """The asked heads' sink logits that take a share of the rows, (N or 1, P, r, 1); None without."""
        sinks, rows = self._asked.row_sinks, self.query_Nr.shape[1]
        return None if sinks is None else sinks.float().expand(-1, -1, rows)[..., None]

    def output(self, cut_NPrK: Tensor | None, how: CutHow) -> Tensor:
        """The output, (N, r, P, V) in float32, without what is cut; 0 in a row without keys."""
        if cut_NPrK is None or how == "zero":
            weights = self.weights_NPrK if cut_NPrK is None else self.weights_NPrK.masked_fill(cut_NPrK, 0.0)
            return self.weighted(weights, self.logits_NPrK)
        logits = self.logits_NPrK.masked_fill(cut_NPrK, -torch.inf)
        return self.weighted(self._softmax(logits), logits)

    def moved(self, from_NPK: Tensor) -> RowBlock:
        """The block with its logits on other keys; from_NPK: the key whose logit each key has."""
        block = replace(self)
        from_NPrK = from_NPK[:, :, None].expand(-1, -1, self.query_Nr.shape[1], -1)
        vars(block)["logits_NPrK"] = self.logits_NPrK.expand(from_NPrK.shape).gather(-1, from_NPrK)
        return block

    def blind(self) -> Tensor:
        """Boolean (N, r, P): a row that sees no key."""
        return (~self.seen_NPrK.any(-1)).transpose(1, 2).expand(*self.query_Nr.shape, len(self.places_P))

    @cached_property
    def _asked(self) -> AttentionSpec:
        """The asked heads' sink logits; q, k and v are not theirs."""
        sinks = self.spec.sinks
        sinks = None if sinks is None else sinks.expand(-1, self.spec.heads, -1)[:, self.places_P]
        return replace(self.spec, sinks=sinks)

    def _softmax(self, logits_NPrK: Tensor) -> Tensor:
        return self._asked.normalised(logits_NPrK, 0, logits_NPrK.shape[2])

    def weighted(self, weights_NPrK: Tensor, logits_NPrK: Tensor) -> Tensor:
        """P V, (N, r, P, V), every head with its own kv head; less what a sink logit takes of the output alone."""
        v_NGKV, per_group = self.spec.v_BGKV, self.spec.heads // self.spec.kv_heads
        N, P, r, K = weights_NPrK.shape
        if per_group * v_NGKV.shape[1] == P:
            output = (weights_NPrK.reshape(N, -1, per_group * r, K) @ v_NGKV).view(N, P, r, -1)
        else:
            output = weights_NPrK @ v_NGKV[:, self.places_P // per_group]
        if self.spec.sinks_scale_output and self._asked.sinks is not None:
            output = output * torch.sigmoid(logits_NPrK.logsumexp(-1) - self._asked.sinks.float())[..., None]
        return output.transpose(1, 2)


def padded(queries: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Positions of every text as one tensor (N, R), -1 after those of a text that has fewer.

    >>> padded([[3], [1, 4]], torch.device("cpu"))
    tensor([[ 3, -1],
            [ 1,  4]])
    """
    longest = max(map(len, queries), default=0)
    rows = [[*positions, *[-1] * (longest - len(positions))] for positions in queries]
    return torch.tensor(rows, device=device).view(-1, longest)
