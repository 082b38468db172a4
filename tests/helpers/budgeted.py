"""A model's attention as a plain loop over texts, heads and queries, in which a cache keeps some of the keys.

with budgeted(model, "h2o:8", chosen=lambda module, head: True, end=9):
    model(ids)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

NAME = "attnscope_budget_loop"


def row_logits(query, key, mask, bias, softcap, scaling):
    """The logits of one query, minus infinity on what the mask hides."""
    logits = torch.tensor([float(scaling * (query @ one)) for one in key])
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    return logits.masked_fill(logits < -1e30, -torch.inf)


def softmax(logits, sink):
    """The weights of a row, less the share of a sink logit."""
    numerators = [0.0 if one == -torch.inf else float((one - logits.max()).exp()) for one in logits]
    rest = 0.0 if sink is None else float((sink - logits.max()).exp())
    return torch.tensor([one / (sum(numerators) + rest) for one in numerators])


def kept_of(budget, logits_QK, sinks_Q, end, group_QK=None):
    """The keys that each row of a head keeps, as sets; group_QK: the weights of all heads of its kv head, (R, Q, K)."""
    kind, _, numbers = budget.partition(":")
    rows = range(len(logits_QK))
    seen = [{key for key, one in enumerate(logits_QK[row].tolist()) if one > -torch.inf} for row in rows]
    if kind == "stream":
        first, last = map(int, numbers.split("+"))
        return [{key for key in seen[row] if key < first or row - key < last} for row in rows]
    if kind == "top":
        return [set(sorted(seen[row], key=lambda key, row=row: -logits_QK[row, key])[: int(numbers)]) for row in rows]
    if kind == "h2o":
        return hitters(int(numbers), logits_QK, sinks_Q, seen)
    count, _, window = numbers.partition("@")
    scores = [sum(score(one, key, end, int(window or 0)) for one in group_QK) / len(group_QK) for key in range(end)]
    best = set(sorted(range(end), key=lambda key: -scores[key])[: int(count)])
    return [seen[row] if row < end else {key for key in seen[row] if key >= end or key in best} for row in rows]


def hitters(count, logits_QK, sinks_Q, seen):
    """One eviction after the other: of all but the most recent keys, the one of the least sum so far."""
    cache, sums, found = set(), [0.0] * logits_QK.shape[1], []
    for row in range(len(logits_QK)):
        cache = (cache | {row}) & seen[row]
        if len(cache) > count:
            older = [key for key in sorted(cache) if row - key >= count - count // 2]
            cache = cache - {min(older, key=lambda key: sums[key])}
        left = torch.tensor([one if key in cache else -torch.inf for key, one in enumerate(logits_QK[row].tolist())])
        for key, weight in enumerate(softmax(left, sinks_Q[row]).tolist()):
            sums[key] += weight
        found.append(cache)
    return found


def score(weights_QK, key, end, window):
    """What a key of the prompt receives: per query that sees it, or of the last queries, over five keys."""
    if not window:
        column = [float(weights_QK[row, key]) for row in range(end) if weights_QK[row, key] > 0]
        return sum(column) / max(1, len(column))
    if key >= end - window:
        return float("inf")
    near = [one for one in range(key - 2, key + 3) if 0 <= one < end - window]
    return sum(float(weights_QK[row, one]) for one in near for row in range(end - window, end)) / window / 5


def loop(module, query, key, value, attention_mask, scaling=None, budget="", chosen=None, end=0, **given):
    """All logits of a head, the keys that its rows keep, then row after row the softmax and the values."""
    batch, heads, queries, width = query.shape
    scaling, shared = width**-0.5 if scaling is None else scaling, heads // key.shape[1]
    sinks, bias = given.get("s_aux"), given.get("position_bias")
    out = torch.zeros(batch, queries, heads, value.shape[-1])

    def logits_of(text, head):
        rows = []
        for at in range(queries):
            mask = None
            if attention_mask is not None:
                mask = attention_mask[..., : key.shape[2]].expand(batch, heads, queries, -1)[text, head, at]
            own = None if bias is None else bias.expand(batch, heads, queries, -1)[text, head, at]
            k = key[text, head // shared]
            rows.append(row_logits(query[text, head, at], k, mask, own, given.get("softcap"), scaling))
        return torch.stack(rows)

    for text in range(batch):
        logits = [logits_of(text, head) for head in range(heads)]
        sink = [None if sinks is None else sinks.reshape(-1)[head] for head in range(heads)]
        weights = [torch.stack([softmax(row, sink[head]) for row in logits[head]]) for head in range(heads)]
        for head in range(heads):
            kept = [set(range(key.shape[2]))] * queries
            if chosen(module, head):
                group = weights[head // shared * shared : (head // shared + 1) * shared]
                kept = kept_of(budget, logits[head], [sink[head]] * queries, end, group)
            for at in range(queries):
                gone = [one for one in range(key.shape[2]) if one not in kept[at]]
                row = logits[head][at].clone()
                row[gone] = -torch.inf
                out[text, at, head] = softmax(row, sink[head]) @ value[text, head // shared]
    return out, None


@contextmanager
def budgeted(model, budget: str, chosen: Callable[[torch.nn.Module, int], bool], end: int = 0) -> Iterator[None]:
    """The model with its attention as a loop; chosen(module, head): which have the budget. end: of the prompt."""

    def attend(module, query, key, value, attention_mask, **given):
        return loop(module, query, key, value, attention_mask, budget=budget, chosen=chosen, end=end, **given)

    before = model.config._attn_implementation
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, eager_mask)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
