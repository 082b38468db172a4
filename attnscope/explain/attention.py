"""From q, k and v to each head's output, step by step for one head and one query.

The arithmetic is the reference's, in float64, each step on the numbers of the step before.
Source: Vaswani et al. 2017, equation 1; order of scale, soft-cap, bias, mask, sink as in `reference.attention`.

Shapes: H query head, G kv head, T token, Q query, K key, D width of q and k, V width of v.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnscope.explain.records import HIDDEN, Check, Numbers, Step, divisor
from attnscope.explain.steps import Observed, array, numbers
from attnscope.reference.attention import apply_mask, attention_logits, attention_output, softmax


class QKV(NamedTuple):
    """q, k and v of every head of a layer."""

    q_HTD: Tensor
    k_GTD: Tensor
    v_GTV: Tensor

    def kv_head(self, head: int) -> int:
        """Which kv head a query head reads (Ainslie et al. 2023, section 2.2)."""
        return head // (len(self.q_HTD) // len(self.k_GTD))

    def of(self, head: int) -> tuple[Tensor, Tensor, Tensor]:
        """q (T, D) of one head, k (T, D) and v (T, V) of its kv head."""
        kv_head = self.kv_head(head)
        return self.q_HTD[head], self.k_GTD[kv_head], self.v_GTV[kv_head]


@dataclass(frozen=True, eq=False)
class Attention:
    """One layer's attention for one text: q, k, v after positions, what makes weights of them, and all that follows.

    Every tensor is float64 on the CPU. mask (H or 1, Q, K): boolean (True = attend) or to be added; bias: to be
    expanded to (H, Q, K); sinks (H,): logits. sinks_in_weights: whether the model's weights are after the sink took its
    share.
    """

    qkv: QKV
    scale: float
    mask: Tensor
    softcap: float | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    sinks_in_weights: bool = True

    @cached_property
    def raw_HQK(self) -> Tensor:
        """q . k"""
        return attention_logits(self.qkv.q_HTD, self.qkv.k_GTD, scale=1.0)

    @cached_property
    def capped_HQK(self) -> Tensor:
        """q . k scaled, and soft-capped where the layer does that."""
        scaled_HQK = self.raw_HQK * self.scale
        return scaled_HQK if self.softcap is None else self.softcap * torch.tanh(scaled_HQK / self.softcap)

    @cached_property
    def logits_HQK(self) -> Tensor:
        """After bias and mask."""
        return apply_mask(self.capped_HQK if self.bias is None else self.capped_HQK + self.bias, self.mask)

    @cached_property
    def weights_HQK(self) -> Tensor:
        """After the softmax; rows sum to less than 1 with sinks."""
        return softmax(self.logits_HQK, self.sinks)

    @cached_property
    def heads_HQV(self) -> Tensor:
        """Each head's output."""
        return attention_output(self.weights_HQK, self.qkv.v_GTV)

    def visible_QK(self, head: int) -> np.ndarray:
        """Which keys each query of a head may see."""
        return (self.logits_HQK[head] > HIDDEN).numpy()

    def summary(self, head: int) -> dict[str, Any]:
        """What an `Explanation` keeps beside its steps."""
        return {
            "raw_QK": array(self.raw_HQK[head]),
            "scale": self.scale,
            "head_dim": self.qkv.q_HTD.shape[-1],
            "visible_QK": self.visible_QK(head),
            "weights_QK": array(self.weights_HQK[head]),
        }


def attention_steps(attention: Attention, head: int, query: int, observed: Observed) -> list[Step]:
    """From the scores to the weighted values; what was observed is compared with at each step.

    >>> [step.name for step in attention_steps(attention, 0, 2, observed)]
    ['scores', 'scaling', 'mask', 'softmax', 'weighted values']
    """
    return [
        _scores(attention, head, observed),
        _scaling(attention, head, observed),
        *([_softcap(attention, head)] if attention.softcap is not None else []),
        *([_bias(attention, head, attention.bias)] if attention.bias is not None else []),
        _mask(attention, head, query, observed),
        _softmax(attention, head, observed),
        _values(attention, head, query, observed),
    ]


def concatenation(heads_HQV: Tensor, head: int, checks: tuple[Check, ...] = ()) -> Step:
    """The heads side by side: (Q, H * V)."""
    heads, _, width = heads_HQV.shape
    start = head * width
    return Step(
        "concatenation",
        f"[head 0; …; head {heads - 1}]   {heads} × {width} → {heads * width}" if heads > 1 else "head 0, alone",
        f"The outputs of all heads are laid side by side; head {head} fills numbers {start} to {start + width - 1}.",
        (numbers("output of head", "token head dim", heads_HQV.transpose(0, 1)),),
        checks,
    )


def _product(observed: Observed, scale: float | None) -> Tensor | None:
    """The observed q . k times a scale, where they are known."""
    if observed.q_HQD is None or observed.k_GKD is None or scale is None:
        return None
    return attention_logits(observed.q_HQD.cpu().double(), observed.k_GKD.cpu().double(), scale=scale)


def _scores(attention: Attention, head: int, observed: Observed) -> Step:
    q_QD, k_KD, _ = attention.qkv.of(head)
    return Step(
        "scores",
        f"s = q · k   a sum of {q_QD.shape[-1]} products for each key",
        "How well the query and a key match: large where both point the same way, negative where they oppose.",
        (
            numbers("q", "query dim", q_QD),
            numbers("k", "key dim", k_KD),
            numbers("q · k", "query key", attention.raw_HQK[head]),
        ),
        observed.check("q · k", attention.raw_HQK, _product(observed, 1.0)),
    )


def _scaling(attention: Attention, head: int, observed: Observed) -> Step:
    raw_HQK, scale, width = attention.raw_HQK, attention.scale, attention.qkv.q_HTD.shape[-1]
    name = divisor(scale, width)
    why = (
        f"A sum of {width} products spreads about √{width} = {math.sqrt(width):.4g} times as far as one product; "
        "dividing by √d_k undoes that, so that the softmax is not decided by the width alone."
        if name.startswith("/")
        else f"This family multiplies by {scale:.4g} and not by 1 / √d_k = {width**-0.5:.4g}."
    )
    return Step(
        "scaling",
        f"s {name}   d_k = {width}",
        why,
        (
            numbers("q · k", "query key", raw_HQK[head]),
            numbers(f"s {name}", "query key", raw_HQK[head] * scale),
        ),
        observed.check("scaled q · k", raw_HQK * scale, _product(observed, observed.scale)),
    )


def _softcap(attention: Attention, head: int) -> Step:
    softcap = attention.softcap
    return Step(
        "soft-cap",
        f"{softcap:g} · tanh(s / {softcap:g})",
        f"Keeps every score between −{softcap:g} and {softcap:g}, so that no key can win by any margin.",
        (numbers("capped", "query key", attention.capped_HQK[head]),),
    )


def _bias(attention: Attention, head: int, bias: Tensor) -> Step:
    bias_HQK = bias.expand_as(attention.capped_HQK)
    return Step(
        "position bias",
        "s + bias",
        "This family tells positions apart by adding a number that depends on the distance of query and key.",
        (
            numbers("bias", "query key", bias_HQK[head]),
            numbers("s + bias", "query key", (attention.capped_HQK + bias_HQK)[head]),
        ),
    )


SEES_BEFORE = "A token may look at itself and at earlier tokens, never ahead"


def _mask(attention: Attention, head: int, query: int, observed: Observed) -> Step:
    visible_QK = attention.visible_QK(head)
    seen, keys = int(visible_QK[query].sum()), visible_QK.shape[1]
    what = "sees all of them" if seen == keys else f"sees {seen}, {keys - seen} hidden"
    ahead = bool(np.triu(visible_QK, 1).any())
    why = "In an encoder a token may look both ways" if ahead else SEES_BEFORE
    windowed = not visible_QK[:, 0].all()  # a query misses a key that came before it
    return Step(
        "mask",
        f"hidden keys become −∞   {keys} keys, this query {what}",
        why + ("; this layer hides some of that too (a window, a chunk, a choice)." if windowed else "."),
        (
            Numbers("visible", ("query", "key"), visible_QK),
            numbers("logit", "query key", attention.logits_HQK[head]),
        ),
        observed.check("logits, all heads", attention.logits_HQK, observed.logits_HQK),
    )


def _softmax(attention: Attention, head: int, observed: Observed) -> Step:
    logits_QK, weights_HQK, sinks_H = attention.logits_HQK[head], attention.weights_HQK, attention.sinks
    largest_Q1 = logits_QK.amax(-1, keepdim=True)
    what = "; the largest logit is subtracted first, which changes nothing but keeps exp small"
    if sinks_H is not None:
        sink = float(sinks_H[head])
        largest_Q1 = largest_Q1.clamp_min(sink)
        what = f"; a sink logit of {sink:.4g} takes its share and gives nothing"
    exp_QK = (logits_QK - largest_Q1.masked_fill(largest_Q1 == -torch.inf, 0.0)).exp()
    shares_HQK = weights_HQK if attention.sinks_in_weights else weights_HQK / weights_HQK.sum(-1, keepdim=True)
    return Step(
        "softmax",
        "weight = exp(logit) / sum of exp(logit)",
        f"Turns the logits of a query into weights between 0 and 1 that sum to 1{what}.",
        (
            numbers("logit", "query key", logits_QK),
            numbers("exp(logit − largest)", "query key", exp_QK),
            numbers("weight", "query key", weights_HQK[head]),
        ),
        observed.check("weights, all heads", shares_HQK, observed.weights_HQK),
    )


def _values(attention: Attention, head: int, query: int, observed: Observed) -> Step:
    weights_QK, (_, _, v_KV) = attention.weights_HQK[head], attention.qkv.of(head)
    return Step(
        "weighted values",
        "output of the head = sum of weight × v",
        "Each key hands over its value, as much of it as its weight says; the sum is what this head found.",
        (
            numbers("weight", "query key", weights_QK),
            numbers("v", "key dim", v_KV),
            numbers("weight × v", "key dim", weights_QK[query, :, None] * v_KV),
            numbers("output", "query dim", attention.heads_HQV[head]),
        ),
        observed.check("output of each head", attention.heads_HQV, observed.heads_HQV),
    )
