"""What a comparison of a model with the oracle found: differences, levels, verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["full", "scores", "none"]
LEVELS: tuple[Level, ...] = ("full", "scores", "none")


@dataclass(frozen=True)
class Difference:
    """How far two computations of one layer are apart, each None where it could not be measured.

    weights: largest |difference| of a weight. output: largest |difference| of an output entry. output_relative: largest
    norm of a token's output difference, over the root mean square of the tokens' output norms.
    """

    weights: float | None = None
    output: float | None = None
    output_relative: float | None = None

    def within(self, atol: float) -> bool:
        """Whether what was measured is at most atol; NaN is not."""
        return all(found <= atol for found in (self.weights, self.output_relative) if found is not None)


@dataclass(frozen=True)
class LayerParity:
    """One attention call of one layer against the oracle.

    why: why the level is not higher, or what limits it. implementation: against the oracle, judged; rounding: as run in
    half precision (or quantised) against float32, not judged. row_sum_error: largest |row sum - 1|, None with sink
    logits. masked_weight: largest weight on a key that the mask hides. verdict: None where nothing is judged.
    """

    layer: int
    call: int
    module: str
    level: Level
    why: str
    implementation: Difference
    rounding: Difference
    row_sum_error: float | None
    masked_weight: float | None
    verdict: bool | None


@dataclass(frozen=True)
class ParityReport:
    """A model against the oracle on one text, layer by layer in the model's order."""

    layers: tuple[LayerParity, ...]
    atol: float
    dtype: str
    quantised: bool
    tokens: int
    select: str | None = None

    @property
    def holds(self) -> bool:
        """Whether layers were compared and none failed: quantised ones are not judged, what cannot be checked fails."""
        return bool(self.layers) and not self.failures

    @property
    def level(self) -> Level:
        """The weakest level that a layer reached."""
        return max((one.level for one in self.layers), key=LEVELS.index, default="none")

    @property
    def failures(self) -> list[LayerParity]:
        """The layers that do not hold, or could not be checked though the weights are not quantised."""
        return [one for one in self.layers if one.verdict is False or (one.verdict is None and not self.quantised)]

    def largest(self) -> tuple[str, float, LayerParity] | None:
        """The largest judged difference: what it is of, how large, and in which layer."""
        found = [
            (name, value, one)
            for one in self.layers
            for name, value in (
                ("weights", one.implementation.weights),
                ("output, relative", one.implementation.output_relative),
            )
            if value is not None and one.verdict is not None
        ]
        return max(found, key=lambda entry: _nan_is_largest(entry[1]), default=None)


def _nan_is_largest(value: float) -> float:
    return value if value == value else float("inf")
