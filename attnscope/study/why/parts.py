"""A logit before the softmax, taken apart by what wrote the residual: contributions that sum to it.

With the scale of every norm frozen, a logit is linear in the residual of its key, and linear in that of its query. The
softmax does not see what all keys share, so that a contribution is shown less its mean over the visible keys.

    parts_of(loaded, ids, AskedLogit(3, 0, query=39, key=20)).sides[0].contrast_C

Shapes: C component.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from attnscope.errors import InputError, ModelError, UsageError
from attnscope.seam.modules import HALF
from attnscope.study.why.sides import position_term, readings, visible_keys
from attnscope.study.why.written import Component, Written, written

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel
    from attnscope.study.why.sides import OneSided

ALLOWED = 1e-5  # |sum - logit|, as a share of the sum of |terms|
SMALLEST = 0.1  # sum of contrasts that shares are told of
BIAS, POSITION = Component("bias"), Component("position")


@dataclass(frozen=True)
class AskedLogit:
    """A head, one of its queries and one of that query's keys; against: another key, None for the mean of all."""

    layer: int
    head: int
    query: int
    key: int
    against: int | None = None
    sides: tuple[str, ...] = ("key", "query")


@dataclass(frozen=True)
class SideParts:
    """What each component gives to a logit by one side, and how much more than to what it is compared with.

    logit, base: the logit of the key, and the mean of those that it is compared with, as the model has them.
    """

    side: str
    components: tuple[Component, ...]
    contribution_C: np.ndarray
    base_C: np.ndarray
    logit: float
    base: float

    @property
    def contrast_C(self) -> np.ndarray:
        """What each component gives to this key rather than to the others."""
        return self.contribution_C - self.base_C

    @property
    def share_C(self) -> np.ndarray:
        """The contrast over the sum of contrasts; NaN where that is smaller than 0.1."""
        whole = self.contrast_C.sum()
        return self.contrast_C / whole if abs(whole) >= SMALLEST else np.full(len(self.components), np.nan)

    @property
    def sum(self) -> float:
        """Of the contributions."""
        return float(self.contribution_C.sum())


@dataclass(frozen=True)
class LogitParts:
    """A logit, taken apart by the sides that were asked for.

    visible: how many keys the query sees. softcap: what the family caps the logit at afterwards. sinks: whether the
    head has sink logits, which see what all keys share.
    """

    asked: AskedLogit
    sides: tuple[SideParts, ...]
    visible: int
    softcap: float | None
    sinks: bool


def parts_of(loaded: LoadedModel, ids: Sequence[int], asked: AskedLogit) -> LogitParts:
    """Take a logit apart. Raises InputError for a key that the query does not see, ModelError for a family whose
    contributions do not sum to the logit."""
    check_model(loaded)
    with written(loaded, ids, asked.layer) as found:
        spec = found.spec
        assert spec is not None
        seen = visible_keys(spec, asked.head, asked.query)
        for key in (asked.key, asked.against):
            if key is not None and key not in seen:
                raise InputError(
                    f"query {asked.query} does not see key {key} in this head", "choose a key that it sees"
                )
        if spec.k_BGKD.shape[2] != len(ids):
            raise ModelError("this head has keys that are no tokens of the text", "choose another layer")
        sides = tuple(_side(found, asked, side, seen) for side in asked.sides)
        return LogitParts(asked, sides, len(seen), spec.softcap, spec.sinks is not None)


def check_model(loaded: LoadedModel) -> None:
    """Raise ModelError or UsageError for a model that cannot be asked."""
    loaded.check_queries("a logit taken apart")
    loaded.check_bare("a logit taken apart")
    if next(loaded.model.parameters()).dtype in HALF:
        raise UsageError(
            f"in {loaded.dtype} the contributions do not sum to the logit", "load the model with {dtype=float32}"
        )


def _side(found: Written, asked: AskedLogit, side: str, seen: list[int]) -> SideParts:
    """One side: two gradients, and the constant that the layer's own biases are."""
    spec = found.spec
    assert spec is not None
    others = seen if asked.against is None else [asked.against]
    both = readings(spec, side, asked.head, asked.query, asked.key, others)
    nothing = found.again(torch.zeros_like(found.residuals[-1]))
    columns, logits = [], []
    for reading in both:
        logit, given_C = _given(found, reading)
        columns.append(np.append(given_C, float(reading.of(nothing))))
        logits.append(logit)
        _check(asked, columns[-1], logit)
    components = [*found.components, BIAS]
    position_K = position_term(spec, asked.head, asked.query)
    if position_K is not None:
        components.append(POSITION)
        for number, keys in enumerate(([asked.key], others)):
            added = float(position_K[keys].mean())
            columns[number], logits[number] = np.append(columns[number], added), logits[number] + added
    return SideParts(side, tuple(components), columns[0], columns[1], logits[0], logits[1])


def _given(found: Written, reading: OneSided) -> tuple[float, np.ndarray]:
    """The number itself, and what each writer of the residual gives to it."""
    assert found.spec is not None
    value = reading.of(found.spec)
    if not value.requires_grad:
        raise ModelError(
            f"the {reading.side} side of this head is not made of what enters its layer",
            "choose another layer, or another {side}",
        )
    gradients = torch.autograd.grad(value, found.variables, retain_graph=True, allow_unused=True)
    return float(value.detach()), found.shares(gradients).numpy()


def _check(asked: AskedLogit, terms_C: np.ndarray, logit: float) -> None:
    """Raise ModelError where the terms do not sum to the logit: then the layer is not linear in its residual."""
    missed, size = abs(terms_C.sum() - logit), np.abs(terms_C).sum()
    if not missed <= ALLOWED * size:
        raise ModelError(
            f"the contributions sum to {terms_C.sum():.6g}, and the logit is {logit:.6g}: off by {missed:.2g}, more than "
            f"{ALLOWED:g} of their sizes",
            "choose another layer or model",
        )
