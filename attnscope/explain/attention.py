"""From q, k and v to each head's output, step by step for one head and one query.

The arithmetic is the reference's, in float64, each step on the numbers of the step before.
Source: Vaswani et al. 2017, equation 1; order of scale, soft-cap, bias, mask, sink as in `reference.attention`.

Shapes: H query head, G kv head, T token, Q query, K key, D width of q and k, V width of v.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnscope.explain.records import HIDDEN, Check, Step, attention_words, sight
from attnscope.explain.steps import Observed, array, numbers
from attnscope.reference.attention import Operands, attention_logits, attention_output


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
    """One layer's attention for one text: what it is computed from, and the steps that the oracle takes.

    Every tensor is float64 on the CPU. sinks_in_weights: whether the model's weights are after the sink took its share.
    """

    operands: Operands
    sinks_in_weights: bool = True

    @property
    def qkv(self) -> QKV:
        """q, k and v after positions."""
        return QKV(self.operands.q_HQD, self.operands.k_GKD, self.operands.v_GKV)

    @cached_property
    def steps_HQK(self) -> Mapping[str, Tensor]:
        """What the oracle notes on its way from q · k to the weights; see `attention_weights`."""
        noted: dict[str, Tensor] = {}
        self.operands.weights(noted.__setitem__)
        return noted

    @cached_property
    def heads_HQV(self) -> Tensor:
        """Each head's output."""
        return attention_output(self.steps_HQK["weights"], self.operands.v_GKV)

    def visible_QK(self, head: int) -> np.ndarray:
        """Which keys each query of a head may see."""
        return (self.steps_HQK["masked"][head] > HIDDEN).numpy()

    def summary(self, head: int) -> dict[str, Any]:
        """What an `Explanation` keeps as well as its steps."""
        return {
            "raw_QK": array(self.steps_HQK["raw"][head]),
            "scale": self.operands.scale,
            "head_dim": self.operands.q_HQD.shape[-1],
            "visible_QK": self.visible_QK(head),
            "weights_QK": array(self.steps_HQK["weights"][head]),
        }


def attention_steps(attention: Attention, head: int, query: int, observed: Observed) -> list[Step]:
    """From the scores to the weighted values; what was observed is compared with at each step.

    >>> [step.name for step in attention_steps(attention, 0, 2, observed)]
    ['scores', 'scaling', 'mask', 'softmax', 'weighted values']
    """
    operands, steps_HQK, visible_QK = attention.operands, attention.steps_HQK, attention.visible_QK(head)
    sink = None if operands.sinks is None else float(operands.sinks[head])
    words = attention_words(
        operands.q_HQD.shape[-1],
        operands.scale,
        softcap=operands.softcap,
        bias=operands.bias is not None,
        sink=sink,
        ahead=bool(np.triu(visible_QK, 1).any()),
        windowed=not visible_QK[:, 0].all(),
    )

    # the head's numbers by their keys in the words: those that the oracle noted, and what is shown of its softmax,
    # which is one step to it: the exponents of what is left of the logits after the largest
    q_QD, k_KD, v_KV = attention.qkv.of(head)
    parts = {name: step_HQK[head] for name, step_HQK in steps_HQK.items()} | {"q": q_QD, "k": k_KD, "v": v_KV}
    largest_Q1 = parts["masked"].amax(-1, keepdim=True)
    largest_Q1 = largest_Q1 if sink is None else largest_Q1.clamp_min(sink)
    parts["exp"] = (parts["masked"] - largest_Q1.masked_fill(largest_Q1 == -torch.inf, 0.0)).exp()
    if operands.bias is not None:
        parts["bias"] = operands.bias.expand_as(steps_HQK["raw"])[head]
    parts["weighted"], parts["output"] = parts["weights"][query, :, None] * v_KV, attention.heads_HQV[head]
    values = {key: array(part) for key, part in parts.items()} | {"visible": visible_QK}

    # all heads are compared: a head that is right among wrong ones would be right by chance
    weights_HQK = steps_HQK["weights"]
    shares_HQK = weights_HQK if attention.sinks_in_weights else weights_HQK / weights_HQK.sum(-1, keepdim=True)
    checks = {
        "scores": observed.check("q · k", steps_HQK["raw"], _product(observed, 1.0)),
        "scaling": observed.check("scaled q · k", steps_HQK["scaled"], _product(observed, observed.scale)),
        "mask": observed.check("logits, all heads", steps_HQK["masked"], observed.logits_HQK),
        "softmax": observed.check("weights, all heads", shares_HQK, observed.weights_HQK),
        "weighted values": observed.check("output of each head", attention.heads_HQV, observed.heads_HQV),
    }
    seen, keys = int(visible_QK[query].sum()), visible_QK.shape[1]
    return [step.step(values, checks.get(step.name, ()), keys=keys, sight=sight(seen, keys)) for step in words]


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
