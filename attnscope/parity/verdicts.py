"""What a comparison of a model with the oracle found: differences, levels, verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

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
        return all(found <= allowed for found, allowed in judged if found is not None and allowed is not None)

    def within(self, atol: float) -> bool:
        """Whether what was measured is at most atol; NaN is not."""
        return all(found <= atol for found in (self.weights, self.output_relative) if found is not None)


@dataclass(frozen=True)
class LayerParity:
    """One attention call of one layer against the oracle.

    why: why the level is not higher, or what limits it. implementation: against the oracle, through a float32 copy in
    half precision. as_run: in half precision, what the model did itself against the oracle. rounding: as run in half
    precision (or quantised) against float32, not judged. row_sum_error: the model's own largest |row sum - 1|, None
    with sink logits. masked_weight: its largest weight on a key that the mask hides. verdict: None where nothing is
    judged. stack: the stack of its layer. turned: how it looks where that is not what the model's config and class say.
    apart: how logits and values, of a module that asks no interface, differ from the oracle's, in words.
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
    def shown(self) -> tuple[str, float]:
        """The first that is more than allowed, in the model's order; else the largest."""
        first = next((item for item in self.differences.items() if not item[1] <= self.allowed), None)
        return first or max(self.differences.items(), key=lambda item: item[1])


@dataclass(frozen=True)
class ParityReport:
    """A model against the oracle on one text, layer by layer in the model's order.

    too_short: what would come out the same on this text if it were wrong, in words. on_trust: what no text shows.
    plain: the stack that a layer's number alone means. source_tokens: what an encoder-decoder's encoder read, 0 for
    other models. patches: what a vision tower read, 0 without one. whole: the whole model against a second instance,
    where that was asked for.
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
        stacks = dict.fromkeys(one.stack for one in self.layers)
        return {
            stack: max((one.level for one in self.layers if one.stack == stack), key=LEVELS.index) for stack in stacks
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
        found = [  # a difference that is NaN is the largest
            (name, value, one)
            for one in self.layers
            for name, value in (
                ("weights", getattr(one, of).weights),
                ("output, relative", getattr(one, of).output_relative),
            )
            if value is not None and one.verdict is not None
        ]
        return max(found, key=lambda entry: float("inf") if math.isnan(entry[1]) else entry[1], default=None)


Largest = tuple[str, float, LayerParity]
