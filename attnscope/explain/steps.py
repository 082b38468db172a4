"""How a step is made: tensors as numbers, and ours compared with what was observed.

Shapes: H query head, G kv head, Q query, K key, D width of q and k, V width of v, E model width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from attnscope.errors import UsageError
from attnscope.explain.records import HIDDEN, Check, Numbers


@dataclass(frozen=True)
class Observed:
    """What the model, or torch, computed for the same text, to compare with; None where it is not known.

    who: "the model's" or "torch's". tolerance: of the largest number. logits: after the mask, before the softmax.
    weights: of a row, with sink logits what is left of it or its shares, as the model returns them.
    """

    who: str
    tolerance: float
    q_HQD: Tensor | None = None
    k_GKD: Tensor | None = None
    v_GKV: Tensor | None = None
    scale: float | None = None
    logits_HQK: Tensor | None = None
    weights_HQK: Tensor | None = None
    heads_HQV: Tensor | None = None
    output_QE: Tensor | None = None

    def check(self, name: str, ours: Tensor, theirs: Tensor | None) -> tuple[Check, ...]:
        """Ours compared with what was observed; nothing where nothing was."""
        return () if theirs is None else (check_against(f"{self.who} {name}", ours, theirs, self.tolerance),)

    def with_scale(self, scale: float) -> Observed:
        """With q as it was before the scale, for models that multiply q by it and their scores by 1 (OPT, Whisper)."""
        if self.q_HQD is None or self.scale != 1.0:
            return self
        return replace(self, q_HQD=self.q_HQD.cpu().double() / scale, scale=scale)


def check_against(against: str, ours: Tensor, theirs: Tensor, tolerance: float) -> Check:
    """The largest |ours - theirs|; allowed is the tolerance times the largest |theirs|.

    Where both are hidden logits they agree, where one is the difference is infinite. NaN never agrees.
    Raises ValueError for tensors of different shapes.

    >>> check_against("theirs", torch.tensor([1.0]), torch.tensor([1.5]), 1e-5).difference
    0.5
    """
    ours, theirs = ours.detach().cpu().double(), theirs.detach().cpu().double()
    if ours.shape != theirs.shape:
        raise ValueError(f"expected {against} of shape {tuple(ours.shape)}, got {tuple(theirs.shape)}")
    both_hidden = (ours < HIDDEN) & (theirs < HIDDEN)
    difference = (ours - theirs).masked_fill(both_hidden, 0.0).abs().nan_to_num(nan=math.inf)
    largest = float(theirs.masked_fill(theirs < HIDDEN, 0.0).abs().max())
    return Check(against, float(difference.max()), largest, tolerance * largest)


def numbers(name: str, axes: str, values: Tensor) -> Numbers:
    """A tensor as float64 numbers; its axes in words.

    >>> numbers("v", "key dim", torch.zeros(9, 4)).axes
    ('key', 'dim')
    """
    return Numbers(name, tuple(axes.split()), array(values))


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
