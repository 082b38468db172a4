"""Attention as a list of steps: what each does, its numbers, and whether they are the model's.

The arithmetic is the reference's, in float64, each step on the numbers of the step before. Plain data comes out; who
prints or draws it never sees a tensor.

Shapes: H query head, G kv head, Q query, K key, T token, D width of q and k, V width of v, E model width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attnscope.errors import UsageError
from attnscope.reference.attention import apply_mask, attention_logits, attention_output, softmax

HIDDEN = torch.finfo(torch.float16).min / 2  # logits below this are masked keys, in whatever dtype the mask was built


@dataclass(frozen=True)
class Numbers:
    """One array of a step, whole: its name, what each axis counts (token, query, key, head, dim, ...), its values."""

    name: str
    axes: tuple[str, ...]
    values: np.ndarray


@dataclass(frozen=True)
class Check:
    """Ours against another's: the largest difference, the largest number of theirs, and what is allowed."""

    against: str
    difference: float
    largest: float
    allowed: float

    @property
    def holds(self) -> bool:
        return self.difference <= self.allowed


@dataclass(frozen=True)
class Step:
    """One step: what it is called, its formula, one sentence of why, its numbers, its checks.

    missing: what cannot be shown here and why, for layers of which not everything can be read.
    """

    name: str
    formula: str
    why: str
    numbers: tuple[Numbers, ...] = ()
    checks: tuple[Check, ...] = ()
    missing: str = ""


@dataclass(frozen=True)
class Explanation:
    """One head of one text from start to end, a chosen query among its tokens.

    tokens: their exact text; labels: as they are shown. raw_QK: q.k; scale: what they are multiplied with; head_dim:
    d_k; visible_QK: which keys a query may see; weights_QK: after the softmax.
    """

    head: str
    source: str
    tokens: tuple[str, ...]
    labels: tuple[str, ...]
    query: int
    steps: tuple[Step, ...]
    raw_QK: np.ndarray
    scale: float
    head_dim: int
    visible_QK: np.ndarray
    weights_QK: np.ndarray

    @property
    def failures(self) -> list[str]:
        """The checks that do not hold, in words."""
        return [
            f"step {number}, {step.name}: differs from {check.against} by {check.difference:.2g} "
            f"(allowed {check.allowed:.2g})"
            for number, step in enumerate(self.steps, 1)
            for check in step.checks
            if not check.holds
        ]


@dataclass(frozen=True)
class Rules:
    """What turns q.k into weights: scale, soft-cap, bias (H or 1, Q, K), mask (H or 1, Q, K), sink logits (H,).

    sinks_in_weights: whether those compared with are after the sink took its share.
    """

    scale: float
    mask: Tensor | None = None
    softcap: float | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    sinks_in_weights: bool = True


@dataclass(frozen=True)
class Theirs:
    """What somebody else got, to compare with; None where it is not known.

    who: "the model's" or "torch's". logits: after the mask, before the softmax.
    """

    who: str
    tolerance: float
    q_HQD: Tensor | None = None
    k_GKD: Tensor | None = None
    v_GKV: Tensor | None = None
    scale: float | None = None  # 1.0 where their q was multiplied before
    logits_HQK: Tensor | None = None
    weights_HQK: Tensor | None = None
    heads_HQV: Tensor | None = None
    output_QE: Tensor | None = None

    def check(self, name: str, ours: Tensor, theirs: Tensor | None) -> tuple[Check, ...]:
        """Compare ours with theirs; nothing where they said nothing. Hidden logits only need to be hidden in both."""
        if theirs is None:
            return ()
        return (compare(f"{self.who} {name}", ours, theirs, self.tolerance),)


def compare(against: str, ours: Tensor, theirs: Tensor, tolerance: float) -> Check:
    """The largest |ours - theirs|; allowed is the tolerance times the largest |theirs|.

    Where both are hidden logits they agree, where one is the difference is infinite. NaN never agrees.

        >>> compare("theirs", torch.tensor([1.0]), torch.tensor([1.5]), 1e-5).difference
        0.5
    """
    ours, theirs = ours.detach().cpu().double(), theirs.detach().cpu().double()
    if ours.shape != theirs.shape:
        raise ValueError(f"expected {against} of shape {tuple(ours.shape)}, got {tuple(theirs.shape)}")
    both_hidden = (ours < HIDDEN) & (theirs < HIDDEN)
    difference = (ours - theirs).masked_fill(both_hidden, 0.0).abs().nan_to_num(nan=math.inf)
    largest = float(theirs.masked_fill(theirs < HIDDEN, 0.0).abs().max())
    return Check(against, float(difference.max()), largest, tolerance * largest)


@dataclass
class Attended:
    """What `attend` leaves for the steps after it, and for the figure."""

    steps: list[Step]
    heads_HQV: Tensor
    raw_QK: np.ndarray
    head_dim: int
    visible_QK: np.ndarray
    weights_QK: np.ndarray


def attend(
    q_HQD: Tensor, k_GKD: Tensor, v_GKV: Tensor, rules: Rules, chosen: tuple[int, int], theirs: Theirs
) -> Attended:
    """From q, k and v to each head's output, step by step for one head and one query (`chosen`).

    q, k: after positions. Every number is float64. Raises ValueError as the reference does.
    Source: Vaswani et al. 2017, equation 1; order of scale, soft-cap, bias, mask, sink as in `reference.attention`.

        >>> attended = attend(q, k, v, Rules(scale=0.5), (0, 2), Theirs("the model's", 1e-5))
        >>> [step.name for step in attended.steps]
    """
    q_HQD, k_GKD, v_GKV = (x.detach().cpu().double() for x in (q_HQD, k_GKD, v_GKV))
    raw_HQK = attention_logits(q_HQD, k_GKD, scale=1.0)
    steps = [
        _scores(q_HQD, k_GKD, raw_HQK, rules, chosen, theirs),
        _scaling(raw_HQK, rules, q_HQD.shape[-1], chosen, theirs),
    ]
    logits_HQK = raw_HQK * rules.scale
    if rules.softcap is not None:
        logits_HQK = rules.softcap * torch.tanh(logits_HQK / rules.softcap)
        steps.append(_softcap(logits_HQK, rules.softcap, chosen))
    if rules.bias is not None:
        logits_HQK = logits_HQK + rules.bias.double()
        steps.append(_bias(logits_HQK, rules.bias.double(), chosen))
    logits_HQK = apply_mask(logits_HQK, rules.mask)
    visible_QK = (logits_HQK[chosen[0]] > HIDDEN).cpu().numpy()
    weights_HQK = softmax(logits_HQK, rules.sinks)
    heads_HQV = attention_output(weights_HQK, v_GKV)
    steps += [
        _mask(logits_HQK, visible_QK, chosen, theirs),
        _softmax(logits_HQK, weights_HQK, rules, chosen, theirs),
        _values(weights_HQK, v_GKV, heads_HQV, chosen, theirs),
    ]
    raw_QK, weights_QK = array(raw_HQK[chosen[0]]), array(weights_HQK[chosen[0]])
    return Attended(steps, heads_HQV, raw_QK, q_HQD.shape[-1], visible_QK, weights_QK)


def concatenation(heads_HQV: Tensor, head: int, check: Sequence[Check] = ()) -> Step:
    """The heads side by side: (Q, H * V)."""
    heads, _, width = heads_HQV.shape
    start = head * width
    return Step(
        "concatenation",
        f"[head 0; …; head {heads - 1}]   {heads} × {width} → {heads * width}" if heads > 1 else "head 0, alone",
        f"The outputs of all heads are laid side by side; head {head} fills numbers {start} to {start + width - 1}.",
        (Numbers("output of head", ("token", "head", "dim"), array(heads_HQV.transpose(0, 1))),),
        tuple(check),
    )


def array(values: Tensor) -> np.ndarray:
    """A tensor as float64 numpy."""
    return values.detach().cpu().double().numpy()


def check_query(query: int, tokens: int) -> int:
    """The position of a query, counted from the end where it is negative; UsageError for one that is not there.

    >>> check_query(-1, 9)
    8
    """
    if not -tokens <= query < tokens:
        raise UsageError(
            f"there is no query {query}: the text has {tokens} tokens", f"they count from 0 to {tokens - 1}"
        )
    return query % tokens


def kv_head_of(head: int, heads: int, kv_heads: int) -> int:
    """Which kv head a query head reads (Ainslie et al. 2023, section 2.2)."""
    return head // (heads // kv_heads)


def _product(theirs: Theirs) -> Tensor | None:
    """q . k of theirs by their scale, where all three are known."""
    if theirs.q_HQD is None or theirs.k_GKD is None or theirs.scale is None:
        return None
    return attention_logits(theirs.q_HQD.cpu().double(), theirs.k_GKD.cpu().double(), scale=theirs.scale)


def _scores(
    q_HQD: Tensor, k_GKD: Tensor, raw_HQK: Tensor, rules: Rules, chosen: tuple[int, int], theirs: Theirs
) -> Step:
    head, scaled = chosen[0], _product(theirs)
    before = theirs.scale is not None and theirs.scale != 1.0
    product = None if scaled is None or theirs.scale is None else scaled / (theirs.scale if before else rules.scale)
    kv_head = kv_head_of(head, q_HQD.shape[0], k_GKD.shape[0])
    return Step(
        "scores",
        f"s = q · k   a sum of {q_HQD.shape[-1]} products for each key",
        "How well the query and a key match: large where both point the same way, negative where they oppose.",
        (
            Numbers("q", ("query", "dim"), array(q_HQD[head])),
            Numbers("k", ("key", "dim"), array(k_GKD[kv_head])),
            Numbers("q · k", ("query", "key"), array(raw_HQK[head])),
        ),
        theirs.check("q · k", raw_HQK, product),
    )


def _scaling(raw_HQK: Tensor, rules: Rules, width: int, chosen: tuple[int, int], theirs: Theirs) -> Step:
    name = divisor(rules.scale, width)
    why = (
        f"A sum of {width} products spreads about √{width} = {math.sqrt(width):.4g} times as far as one product; "
        "dividing by √d_k undoes that, so that the softmax is not decided by the width alone."
        if name.startswith("/")
        else f"This family multiplies by {rules.scale:.4g} and not by 1 / √d_k = {width**-0.5:.4g}."
    )
    return Step(
        "scaling",
        f"s {name}   d_k = {width}",
        why,
        (
            Numbers("q · k", ("query", "key"), array(raw_HQK[chosen[0]])),
            Numbers(f"s {name}", ("query", "key"), array(raw_HQK[chosen[0]] * rules.scale)),
        ),
        theirs.check("scaled q · k", raw_HQK * rules.scale, _product(theirs)),
    )


def divisor(scale: float, width: int) -> str:
    """How a scale is written: `/ √32` where it is 1 / sqrt(32), else `× 0.25`.

    >>> divisor(0.125, 64)
    '/ √64'
    """
    return f"/ √{width}" if math.isclose(scale, width**-0.5, rel_tol=1e-6) else f"× {scale:.4g}"


def _softcap(logits_HQK: Tensor, softcap: float, chosen: tuple[int, int]) -> Step:
    return Step(
        "soft-cap",
        f"{softcap:g} · tanh(s / {softcap:g})",
        f"Keeps every score between −{softcap:g} and {softcap:g}, so that no key can win by any margin.",
        (Numbers("capped", ("query", "key"), array(logits_HQK[chosen[0]])),),
    )


def _bias(logits_HQK: Tensor, bias: Tensor, chosen: tuple[int, int]) -> Step:
    bias_HQK = bias.expand_as(logits_HQK)
    return Step(
        "position bias",
        "s + bias",
        "This family tells positions apart by adding a number that depends on the distance of query and key.",
        (
            Numbers("bias", ("query", "key"), array(bias_HQK[chosen[0]])),
            Numbers("s + bias", ("query", "key"), array(logits_HQK[chosen[0]])),
        ),
    )


def _mask(logits_HQK: Tensor, visible_QK: np.ndarray, chosen: tuple[int, int], theirs: Theirs) -> Step:
    head, query = chosen
    seen, keys = int(visible_QK[query].sum()), visible_QK.shape[1]
    hidden = keys - seen
    what = "sees all of them" if not hidden else f"sees {seen}, {hidden} hidden"
    return Step(
        "mask",
        f"hidden keys become −∞   {keys} keys, this query {what}",
        "A token may look at itself and at what came before it, never ahead"
        + ("; this layer hides some of that too (a window, a chunk, a choice)." if _windowed(visible_QK) else "."),
        (
            Numbers("visible", ("query", "key"), visible_QK),
            Numbers("logit", ("query", "key"), array(logits_HQK[head])),
        ),
        theirs.check("logits, all heads", logits_HQK, theirs.logits_HQK),
    )


def _windowed(visible_QK: np.ndarray) -> bool:
    """Does a query miss a key before its first visible one?"""
    return bool((~visible_QK[:, 0]).any())


def _softmax(logits_HQK: Tensor, weights_HQK: Tensor, rules: Rules, chosen: tuple[int, int], theirs: Theirs) -> Step:
    head, sinks_H = chosen[0], rules.sinks
    shares_HQK = weights_HQK if rules.sinks_in_weights else weights_HQK / weights_HQK.sum(-1, keepdim=True)
    logits_QK = logits_HQK[head]
    largest_Q1 = logits_QK.amax(-1, keepdim=True)
    if sinks_H is not None:
        largest_Q1 = largest_Q1.clamp_min(float(sinks_H[head]))
    exp_QK = (logits_QK - largest_Q1.masked_fill(largest_Q1 == -torch.inf, 0.0)).exp()
    sink = "" if sinks_H is None else f"; a sink logit of {float(sinks_H[head]):.4g} takes its share and gives nothing"
    return Step(
        "softmax",
        "weight = exp(logit) / sum of exp(logit)",
        "Turns the logits of a query into weights between 0 and 1 that sum to 1"
        + (sink or "; the largest logit is subtracted first, which changes nothing but keeps exp small")
        + ".",
        (
            Numbers("logit", ("query", "key"), array(logits_QK)),
            Numbers("exp(logit − largest)", ("query", "key"), array(exp_QK)),
            Numbers("weight", ("query", "key"), array(weights_HQK[head])),
        ),
        theirs.check("weights, all heads", shares_HQK, theirs.weights_HQK),
    )


def _values(weights_HQK: Tensor, v_GKV: Tensor, heads_HQV: Tensor, chosen: tuple[int, int], theirs: Theirs) -> Step:
    head, query = chosen
    v_KV = v_GKV[kv_head_of(head, heads_HQV.shape[0], v_GKV.shape[0])]
    return Step(
        "weighted values",
        "output of the head = sum of weight × v",
        "Each key hands over its value, as much of it as its weight says; the sum is what this head found.",
        (
            Numbers("weight", ("query", "key"), array(weights_HQK[head])),
            Numbers("v", ("key", "dim"), array(v_KV)),
            Numbers("weight × v", ("key", "dim"), array(weights_HQK[head, query, :, None] * v_KV)),
            Numbers("output", ("query", "dim"), array(heads_HQV[head])),
        ),
        theirs.check("output of each head", heads_HQV, theirs.heads_HQV),
    )
