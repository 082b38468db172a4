"""How far a call is from what the oracle expects of it, and whether that is more than rounding.

Shapes: B text, T token, H head, Q query, K key, M any width.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnscope.hooks.calls import AttentionCall
from attnscope.parity.allowed import OUTPUT_ROUNDINGS, ROUNDINGS, epsilon, weights_allowed
from attnscope.parity.expected import Expected
from attnscope.parity.given import precise
from attnscope.parity.verdicts import ATOL, Difference


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

    def output_and_weights(self, expected: Expected) -> float:
        """What an output of unknown weights may be off by: those of the row that rounding changes most."""
        return self.output + max(0.0, float(self.rounding(expected).sum(-1).max()) - self.atol)

    def rounding(self, expected: Expected) -> Tensor:
        """What rounding alone may move each weight by, (B, H, Q, K)."""
        return weights_allowed(expected.weights_BHQK, expected.terms(), self.dtype) * self.share


def difference(weights_BHQK: Tensor | None, expected: Expected, heads: Iterable[int] | None) -> Difference:
    """A call's weights (None where it gave none) and its output against the oracle's."""
    off = None if weights_BHQK is None else largest_size(of_heads(weights_BHQK - expected.weights_BHQK, heads))
    return Difference(off, *output_difference(expected.model_output, expected.output))


def judged(
    weights_BHQK: Tensor | None, expected: Expected, heads: Iterable[int] | None, tolerance: Tolerance
) -> Difference:
    """The same, with what is allowed of it.

    Where rounding explains how far all weights are off, the output is not judged by it too: that is compared with what
    the oracle makes of these weights.
    """
    result = difference(weights_BHQK, expected, heads)
    if weights_BHQK is None:
        return replace(result, output_allowed=tolerance.output_and_weights(expected))
    result = replace(result, weights_allowed=tolerance.atol, output_allowed=tolerance.output)
    if result.holds:
        return result
    off_BHQK, rounding_BHQK = (weights_BHQK - expected.weights_BHQK).abs(), tolerance.rounding(expected)
    allowed_BHQK = rounding_BHQK.clamp_min(tolerance.atol)
    result = replace(result, weights_allowed=_at_the_worst(of_heads(off_BHQK, heads), of_heads(allowed_BHQK, heads)))
    if not bool((off_BHQK <= rounding_BHQK).all()):
        return result
    output, output_relative = output_difference(expected.model_output, expected.output_of(precise(weights_BHQK)))
    return replace(result, output=output, output_relative=output_relative)


def seen_apart(call: AttentionCall, expected: Expected, tolerance: Tolerance) -> str:
    """How logits and values that a module without the interface was seen to use differ from the oracle's, in words.

    Empty where they do not, or where either side has none. A logit may be off by what rounding does to its terms, a
    value as an output may.
    """
    if expected.logits is None or expected.v_BGKV is None:
        return ""
    phrases = []
    if call.spec is None and call.P.shows_logits:
        off_BHQK = precise(call.P.scores(0, call.P.queries)) - expected.logits()
        off_BHQK = off_BHQK.abs().masked_fill(~expected.visible_QK, 0.0)
        rounding_BHQ = ROUNDINGS * epsilon(tolerance.dtype) * tolerance.share * expected.terms()
        if not bool((off_BHQK <= rounding_BHQ.clamp_min(tolerance.atol)[..., None]).all()):
            phrases.append(f"its logits differ from the oracle's by {largest_size(off_BHQK):.2g}")
    if call.seen_values is not None:
        values, v = (x.repeat_interleave(call.P.heads // x.shape[1], 1) for x in (call.seen_values, expected.v_BGKV))
        off = largest_size(precise(values) - v)
        if not off <= max(tolerance.atol, tolerance.output * largest_size(v)):
            phrases.append(f"its values differ from the oracle's by {off:.2g}")
    return ", ".join(phrases)


def _at_the_worst(off_BHQK: Tensor, allowed_BHQK: Tensor) -> float:
    """What is allowed of the weight that is off most; against what is allowed of it, where one is off by more."""
    excess_BHQK = off_BHQK - allowed_BHQK
    worst = (off_BHQK if bool((excess_BHQK <= 0).all()) else excess_BHQK).argmax()
    return float(allowed_BHQK.flatten()[worst])


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
