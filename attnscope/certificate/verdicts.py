"""How far a model is from what the oracle expects: differences, what rounding allows of them, levels, verdicts.

What a dtype allows: how far correct weights and outputs are from exact ones, by rounding alone. A logit is a sum of
terms scale q_d k_d and a bias. Each term is rounded a few times on its way (projection, norm, turn, product, sum), and
so is the logit: it is off by at most d = ROUNDINGS eps (sum of the terms' sizes), Higham 2002, "Accuracy and Stability
of Numerical Algorithms", section 3.1. Where every logit of a row is off by up to d, the odds w / (1 - w) of a weight
change by a factor of at most e^2d.

Shapes: B text, T token, H head, Q query, K key, M any width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from attnscope.certificate.oracle import Expected, precise
from attnscope.hooks.calls import AttentionCall
from attnscope.model.selection import DECODER

Level = Literal["full", "scores", "none"]
LEVELS: tuple[Level, ...] = ("full", "scores", "none")
ATOL = 1e-5


@dataclass(frozen=True)
class Difference:
    """How far two computations of one layer are apart, each None where it could not be measured.

    weights: largest |difference| of a weight. output: largest |difference| of an output entry. output_relative: largest
    norm of a token's output difference, over the root mean square of the tokens' output norms. weights_allowed,
    output_allowed: what was allowed of the weight that is off most (against what is allowed of it, where one fails),
    and of output_relative; None where nothing is judged.
    """

    weights: float | None = None
    output: float | None = None
    output_relative: float | None = None
    weights_allowed: float | None = None
    output_allowed: float | None = None

    @property
    def holds(self) -> bool:
        """Whether what was measured is at most what was allowed; NaN is not."""
        judged = (self.weights, self.weights_allowed), (self.output_relative, self.output_allowed)
        return all(value <= allowed for value, allowed in judged if value is not None and allowed is not None)


@dataclass(frozen=True)
class LayerParity:
    """One attention call of one layer against the oracle.

    why: why the level is not higher, or what limits it. implementation: against the oracle, through a float32 copy in
    half precision. as_run: in half precision, what the model did itself against the oracle. rounding: as run in half
    precision (or quantised) against float32, not judged. row_sum_error: the model's own largest |row sum - 1|, None
    with sink logits. masked_weight: its largest weight on a key that the mask hides. verdict: None where nothing is
    judged. stack: the stack of its layer. turned: how it looks where that is not what the model's config and class say.
    apart: how logits and values, of a module that asks no interface, differ from the oracle's, in words. kernel: which
    kernel its rows are of, see `AttentionCall`.
    """

    layer: int
    call: int
    module: str
    level: Level
    why: str
    implementation: Difference
    as_run: Difference
    rounding: Difference
    row_sum_error: float | None
    masked_weight: float | None
    verdict: bool | None
    stack: str = DECODER
    turned: str = ""
    apart: str = ""
    kernel: str = "eager"


@dataclass(frozen=True)
class WholeParity:
    """A model against a second instance, which transformers alone made of its files.

    differences: of what enters each attention module, by its path, and of the model's output, by its name, as
    `Difference.output_relative`. allowed: of each.
    """

    differences: Mapping[str, float]
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether each is at most what is allowed; NaN is not."""
        return all(value <= self.allowed for value in self.differences.values())

    @property
    def worst(self) -> tuple[str, float]:
        """The first that is more than allowed, in the model's order; else the largest."""
        first = next((item for item in self.differences.items() if not item[1] <= self.allowed), None)
        return first or max(self.differences.items(), key=lambda item: item[1])


@dataclass(frozen=True)
class ParityReport:
    """A model against the oracle on one text, layer by layer in the model's order.

    too_short: what would come out the same on this text if it were wrong, in words. on_trust: what no text shows.
    plain: the stack that a layer's number alone means. source_tokens: what an encoder-decoder's encoder read, 0 for
    other models. patches: what a vision tower read, 0 without one. whole: the whole model against a second instance,
    where that was asked for. engine: that gave the weights.
    """

    layers: tuple[LayerParity, ...]
    atol: float
    dtype: str
    quantised: bool
    tokens: int
    select: str | None = None
    too_short: tuple[str, ...] = ()
    plain: str = DECODER
    source_tokens: int = 0
    patches: int = 0
    on_trust: str = ""
    whole: WholeParity | None = None
    engine: str = "eager"

    @property
    def not_shown(self) -> tuple[str, ...]:
        """What could be wrong though the verdict holds, in words."""
        return (*self.too_short, f"taken on trust: {self.on_trust}")

    def name(self, layer: LayerParity) -> str:
        """`layer 3`, or `cross layer 3` of a stack other than the plain one."""
        return f"{layer.stack} " * (layer.stack != self.plain) + f"layer {layer.layer}"

    @property
    def verdict(self) -> bool | None:
        """False where a layer or the whole does not hold; None where none fails, but not every one could be checked."""
        if self.failures or (self.whole and not self.whole.holds):
            return False
        return True if self.layers and not self.unchecked else None

    @property
    def holds(self) -> bool:
        """Whether layers were compared, every one, and none failed; quantised ones are not judged."""
        return self.verdict is True

    @property
    def level(self) -> Level:
        """The weakest level that a layer reached."""
        return max(self.levels.values(), key=LEVELS.index, default="none")

    @property
    def levels(self) -> dict[str, Level]:
        """Of each stack the weakest level that a layer reached."""
        stacks = dict.fromkeys(layer.stack for layer in self.layers)
        return {
            stack: max((layer.level for layer in self.layers if layer.stack == stack), key=LEVELS.index)
            for stack in stacks
        }

    @property
    def failures(self) -> list[LayerParity]:
        """The layers that do not hold."""
        return [layer for layer in self.layers if layer.verdict is False]

    @property
    def unchecked(self) -> list[LayerParity]:
        """The layers that could not be checked, though the weights are not quantised."""
        return [layer for layer in self.layers if layer.verdict is None and not self.quantised]

    def largest(self, of: Literal["implementation", "rounding"] = "implementation") -> Largest | None:
        """The largest difference of the judged layers: what it is of, how large, and in which layer."""
        measured = [  # a difference that is NaN is the largest
            (name, value, layer)
            for layer in self.layers
            for name, value in (
                ("weights", getattr(layer, of).weights),
                ("output, relative", getattr(layer, of).output_relative),
            )
            if value is not None and layer.verdict is not None
        ]
        return max(measured, key=lambda entry: float("inf") if math.isnan(entry[1]) else entry[1], default=None)


Largest = tuple[str, float, LayerParity]


# In eps, where random roundings partly cancel: over all families of docs/families.md, up to 150 tokens and in all
# dtypes, logits were off by up to 1.5 of their terms, and outputs of given weights by up to 3 in half precision.
ROUNDINGS = 4.0
OUTPUT_ROUNDINGS = 8.0


def epsilon(dtype: torch.dtype) -> float:
    """The dtype's eps, and at least float32's: transformers takes softmax and angles in float32 also in float64.

    >>> epsilon(torch.bfloat16), epsilon(torch.float64) == epsilon(torch.float32)
    (0.0078125, True)
    """
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


def weights_allowed(weights_BHQK: Tensor, terms_BHQ: Tensor, dtype: torch.dtype) -> Tensor:
    """What each exact weight may be off by, (B, H, Q, K). terms_BHQ: as `logit_terms` gives them.

    >>> weights_allowed(torch.tensor([[0.0, 0.5, 0.5]]), torch.tensor([100.0]), torch.float32)
    tensor([[1.1921e-07, 2.4021e-05, 2.4021e-05]])
    """
    largest = math.log(torch.finfo(weights_BHQK.dtype).max) - 1
    grown_BHQ1 = torch.expm1((2 * ROUNDINGS * epsilon(dtype) * terms_BHQ).clamp(max=largest))[..., None]
    # 1 - w, a sink's share included; of each row's largest weight the others' sum, where 1 - w rounds to less.
    top_BHQ1 = weights_BHQK.argmax(-1, keepdim=True)
    others_BHQ1 = weights_BHQK.scatter(-1, top_BHQ1, 0.0).sum(-1, keepdim=True)
    rest_BHQK = 1 - weights_BHQK
    rest_BHQK = rest_BHQK.scatter(-1, top_BHQ1, torch.maximum(rest_BHQK.gather(-1, top_BHQ1), others_BHQ1))
    spread_BHQK = weights_BHQK * rest_BHQK / (1 / grown_BHQ1 + torch.minimum(weights_BHQK, rest_BHQK))
    return spread_BHQK + epsilon(dtype) * weights_BHQK + epsilon(torch.float32)


@dataclass(frozen=True)
class Tolerance:
    """`atol`, and where rounding alone does more in this dtype, that; a smaller `atol` than ATOL allows less of it."""

    atol: float
    dtype: torch.dtype = torch.float32

    @property
    def share(self) -> float:
        return min(1.0, self.atol / ATOL)

    @property
    def output(self) -> float:
        """What an output of given weights may be off by, relative to the typical output's norm."""
        return max(self.atol, OUTPUT_ROUNDINGS * epsilon(self.dtype) * self.share)

    def rounding(self, expected: Expected) -> Tensor:
        """What rounding alone may move each weight by, (B, H, Q, K)."""
        return weights_allowed(expected.weights_BHQK, expected.terms(), self.dtype) * self.share


def difference(weights_BHQK: Tensor | None, expected: Expected, heads: Iterable[int] | None) -> Difference:
    """A call's weights (None where it gave none) and its output against the oracle's."""
    off = None if weights_BHQK is None else largest_size(of_heads(weights_BHQK - expected.weights_BHQK, heads))
    return Difference(off, *output_difference(expected.model_output_BTE, expected.output_BTE))


def judged(
    weights_BHQK: Tensor | None, expected: Expected, heads: Iterable[int] | None, tolerance: Tolerance
) -> Difference:
    """The same, with what is allowed of it.

    Where rounding explains how far all weights are off, the output is not judged by it too: that is compared with what
    the oracle makes of these weights.
    """
    result = difference(weights_BHQK, expected, heads)
    if weights_BHQK is None:  # off by what unknown weights may be: those of the row that rounding changes most
        unknown = max(0.0, float(tolerance.rounding(expected).sum(-1).max()) - tolerance.atol)
        return replace(result, output_allowed=tolerance.output + unknown)
    result = replace(result, weights_allowed=tolerance.atol, output_allowed=tolerance.output)
    if result.holds:
        return result
    off_BHQK, rounding_BHQK = (weights_BHQK - expected.weights_BHQK).abs(), tolerance.rounding(expected)
    # What is allowed of the weight that is off most; against what is allowed of it, where one is off by more.
    chosen_BHQK, allowed_BHQK = (of_heads(x, heads) for x in (off_BHQK, rounding_BHQK.clamp_min(tolerance.atol)))
    excess_BHQK = chosen_BHQK - allowed_BHQK
    worst = (chosen_BHQK if bool((excess_BHQK <= 0).all()) else excess_BHQK).argmax()
    result = replace(result, weights_allowed=float(allowed_BHQK.flatten()[worst]))
    if not bool((off_BHQK <= rounding_BHQK).all()):
        return result
    output, output_relative = output_difference(expected.model_output_BTE, expected.output_of(precise(weights_BHQK)))
    return replace(result, output=output, output_relative=output_relative)


def seen_apart(call: AttentionCall, expected: Expected, tolerance: Tolerance) -> str:
    """How logits and values that a module without the interface was seen to use differ from the oracle's, in words.

    Empty where they do not, or where it was not seen to. A logit may be off by what rounding does to its terms, a
    value as an output may.
    """
    phrases = []
    if call.spec is None and call.P.shows_logits:
        off_BHQK = precise(call.P.scores(0, call.P.queries)) - expected.logits()
        off_BHQK = off_BHQK.abs().masked_fill(~expected.visible_QK, 0.0)
        rounding_BHQ = ROUNDINGS * epsilon(tolerance.dtype) * tolerance.share * expected.terms()
        if not bool((off_BHQK <= rounding_BHQ.clamp_min(tolerance.atol)[..., None]).all()):
            phrases.append(f"its logits differ from the oracle's by {largest_size(off_BHQK):.2g}")
    if call.seen_values is not None:
        values, v = (x.repeat_interleave(call.P.heads // x.shape[1], 1) for x in (call.seen_values, expected.v_BGTV))
        off = largest_size(precise(values) - v)
        if not off <= max(tolerance.atol, tolerance.output * largest_size(v)):
            phrases.append(f"its values differ from the oracle's by {off:.2g}")
    return ", ".join(phrases)


def output_difference(model: Tensor, expected: Tensor) -> tuple[float, float]:
    """Largest entry of the difference, and largest norm of a token's, over the typical token's output norm."""
    model_BTM, expected_BTM = (precise(x).flatten(2) for x in (model, expected))
    difference_BTM = model_BTM - expected_BTM
    typical = expected_BTM.norm(dim=-1).square().mean().sqrt()
    return largest_size(difference_BTM), float(difference_BTM.norm(dim=-1).max() / typical.clamp_min(1e-30))


def of_heads(x_BHQK: Tensor, heads: Iterable[int] | None) -> Tensor:
    return x_BHQK if heads is None else x_BHQK[:, list(heads)]


def largest_size(x: Tensor) -> float:
    return float(x.abs().max())
