"""How dense rows answer each question: the definitions that every faster way is tested against.

Shapes: B text, H head, Q query, K key, M feature, G group of tokens, r rows of a block, k kept keys; h, q, m the heads,
queries and keys that are asked about.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnscope.attention import questions as ask
from attnscope.attention.topk import topk
from attnscope.attention.visibility import Visibility

CLOSE_ROWS = 256  # whose distances are counted from the first of them
ROWS_PER_SORT = 32  # early rows of a causal text reach few keys: no more than those are sorted
TINY = torch.finfo(torch.float32).tiny
SLACK = 1e-6  # of a row: equal weights that reach a share exactly, such as 19 of 20, are not left to rounding


@dataclass(eq=False)
class Block:
    """Query rows [start, stop) of an operator, dense fp32 (B, H, r, K), and what several questions read off them.

    top: the largest weights that were searched so far, of all heads, and their keys.
    """

    rows: Tensor
    start: int
    stop: int
    visible: Visibility
    top: tuple[Tensor, Tensor] | None = None

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
    def first_query(self) -> int:
        """The position of the block's first query among the keys."""
        return self.start + self.visible.keys - self.visible.queries


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
    rows, features = block.rows, question.features.to(block.rows)
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
    if block.top is not None and question.k + question.skip_key0 <= block.top[0].shape[-1]:
        return of_found(block.top, question)
    rows, count = block.rows, block.stop - block.start
    hidden = block.visible.rows(block.start, block.stop).to(rows.device).float() - 1  # faster than a masked fill
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


def of_found(largest: tuple[Tensor, Tensor], question: ask.TopK) -> tuple[Tensor, Tensor]:
    """The k largest out of more of them, of all heads; without key 0 those after it move up."""
    weights, keys = largest if question.heads is None else (part[:, list(question.heads)] for part in largest)
    if question.skip_key0:
        passed = ((keys == 0) & ~weights.isnan())[..., : question.k].cummax(-1).values
        place = torch.arange(question.k, device=keys.device) + passed.long()
        return weights.gather(-1, place), keys.gather(-1, place)
    return weights[..., : question.k], keys[..., : question.k]


def _max_weight(block: Block, question: ask.MaxWeight) -> Tensor:
    return _top_k(block, ask.TopK(1, None, True))[0][..., 0] if question.skip_key0 else block.rows.amax(-1)


def _largest(entries: Tensor, question: ask.TopK) -> tuple[Tensor, Tensor]:
    """The k largest of every row, filled up to k with NaN; what is below 0 is hidden. Writes over the entries."""
    if question.skip_key0:
        entries[..., 0] = -1.0
    weights, keys = entries.max(-1, keepdim=True) if question.k == 1 else topk(entries, question.k)
    short = (0, question.k - weights.shape[-1])
    weights = torch.nn.functional.pad(weights.masked_fill(weights < 0, torch.nan), short, value=torch.nan)
    return weights, torch.nn.functional.pad(keys, short)


def _strongest(block: Block, question: ask.Strongest) -> list[tuple[Tensor, Tensor]]:
    seen = block.visible.rows(block.start, block.stop).to(block.rows.device)
    return strongest(question, block.rows, seen, block.start)


READ: Mapping[type[ask.Question], Callable[[Block, Any], Any]] = {
    ask.RowSum: lambda block, question: block.row_sum,
    ask.Entropy: _entropy,
    ask.SumOfSquares: lambda block, question: (
        (block.rows * block.rows).sum(-1) / block.row_sum.square().clamp_min(TINY)
    ),
    ask.MaxWeight: _max_weight,
    ask.Holding: lambda block, question: holding(block.rows, block.row_sum, question.percent),
    ask.Distance: lambda block, question: mean_distance(block.rows, block.row_sum, block.first_query),
    ask.AbsoluteDistance: lambda block, question: mean_absolute_distance(block.rows, block.row_sum, block.first_query),
    ask.At: _one_key,
    ask.Back: _one_key,
    ask.Key: _one_key,
    ask.EqualLabels: _equal_labels,
    ask.Window: _window,
    ask.Features: _features,
    ask.GroupMass: _group_mass,
    ask.Received: _received,
    ask.TopK: _top_k,
    ask.Strongest: _strongest,
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


def strongest(question: ask.Strongest, rows: Tensor, seen: Tensor, start: int) -> list[tuple[Tensor, Tensor]]:
    """What a block of rows from `start` on, (B, H, r, K), says of the question, and of what it sees (1 for B or H)."""
    heads, answers = torch.tensor(question.heads, device=rows.device), []
    for text, (queries, keys) in enumerate(zip(question.query, question.key, strict=True)):
        here = queries[inside(queries, start, start + rows.shape[2])]
        query_q, key_m = (torch.tensor(places, dtype=torch.long, device=rows.device) for places in (here, keys))
        entries, visible = (
            picked(part[text if len(part) > 1 else 0], heads, query_q - start, key_m) for part in (rows, seen)
        )
        answers.append(largest(entries, visible, key_m, question.k))
    return answers


def inside(places: Sequence[int], start: int, stop: int) -> slice:
    """Which of some ascending places are in [start, stop)."""
    return slice(bisect_left(places, start), bisect_left(places, stop))


def picked(values_HrK: Tensor, head_h: Tensor, row_q: Tensor, key_m: Tensor) -> Tensor:
    """The entries of some rows and keys, (h, q, m); values of one head are those of all."""
    head_h = head_h if len(values_HrK) > 1 else head_h * 0
    return values_HrK[head_h[:, None, None], row_q[:, None], key_m]


def largest(entries_hqm: Tensor, seen_hqm: Tensor, key_m: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest visible entries of every row and their keys, (h, q, k) each; NaN where a row has fewer."""
    weights, place = topk(entries_hqm.masked_fill(~seen_hqm, -torch.inf), k)
    return weights.masked_fill(weights.isneginf(), torch.nan), key_m[place]


def indicator(groups_BT: Tensor, count: int) -> Tensor:
    """One column per group of so many, (B, T, G) of zeros and ones; a token of group -1 is in none."""
    return (groups_BT[..., None] == torch.arange(count, device=groups_BT.device)).float()
