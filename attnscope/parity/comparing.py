"""One run of an attention module against the oracle: at the highest level that works, and how far they are apart.

Shapes: B text, T token, H head, Q query, K key, E model width, M any width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from attnscope.parity.expected import Expected, dtype_of, from_call, from_weights
from attnscope.parity.given import is_quantised, precise
from attnscope.parity.verdicts import Difference, LayerParity, Level
from attnscope.reference.given import UnreadableError
from attnscope.reference.layouts import layout_of
from attnscope.seam.call import AttentionCall
from attnscope.seam.modules import HALF, ModuleRecorder, ModuleRun

if TYPE_CHECKING:
    from attnscope.model.loading import LoadedModel

# What a reader raises over a module that is built in another way than its layout says.
MISFITS = (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError)


@dataclass(frozen=True)
class AsRun:
    """A run that is compared as it was."""

    run: ModuleRun


@dataclass(frozen=True)
class Repeated:
    """A run in half precision, compared through its repetition in float32; how far they are apart is its rounding."""

    run: ModuleRun
    exact: ModuleRun


@dataclass(frozen=True)
class NotJudged:
    """A run that has no exact form, and why: all of its difference is reported as rounding."""

    run: ModuleRun
    why: str


Subject = AsRun | Repeated | NotJudged


class Comparison:
    """Compares each run of an attention module with the oracle, and keeps what was found."""

    def __init__(self, loaded: LoadedModel, heads: Mapping[int, tuple[int, ...]], atol: float, level: Level) -> None:
        self.config = loaded.model.config.get_text_config(decoder=True)
        self.layers = {layer.index: layer for layer in loaded.geometry.layers}
        self.layout = layout_of(self.config)
        self.heads, self.atol, self.highest = heads, atol, level
        self.quantised = is_quantised(loaded.model)
        self.found: list[LayerParity] = []

    def judge(self, run: ModuleRun, recorder: ModuleRecorder) -> None:
        """Compare one run of an attention module, call by call."""
        wanted = [number for number, call in enumerate(run.calls) if self._wanted(call)]
        if wanted:
            subject = self._subject(run, recorder)
            self.found += [self._compared(subject, number) for number in wanted]

    def _wanted(self, call: AttentionCall) -> bool:
        return call.layer in self.heads or call.layer not in self.layers

    def _subject(self, run: ModuleRun, recorder: ModuleRecorder) -> Subject:
        if self.quantised:
            return NotJudged(run, "its weights are quantised: rounding only")
        half = run.model_dtype in HALF or any(dtype_of(call) in HALF for call in run.calls)
        return _in_float32(run, recorder) if half else AsRun(run)

    def _compared(self, subject: Subject, number: int) -> LayerParity:
        run = subject.exact if isinstance(subject, Repeated) else subject.run
        original = subject.run.calls[number]  # a copied module no longer knows its layer
        call = replace(run.calls[number], place=original.place)
        level, why, expected = self._oracle(subject, run, call)
        implementation, rounding = self._differences(subject, number, call, expected)
        judged = expected is not None and not isinstance(subject, NotJudged)
        return LayerParity(
            layer=call.layer,
            call=number,
            module=call.path,
            level=level,
            why=why,
            implementation=implementation,
            rounding=rounding,
            row_sum_error=_row_sum_error(call),
            masked_weight=None if expected is None else _masked_weight(call, expected.visible_QK),
            verdict=implementation.within(self.atol) if judged else None,
        )

    def _differences(
        self, subject: Subject, number: int, call: AttentionCall, expected: Expected | None
    ) -> tuple[Difference, Difference]:
        """What is judged of a call, and what its rounding is."""
        heads = self.heads.get(call.layer)
        found = Difference() if expected is None else _difference(call, expected, heads)
        match subject:
            case AsRun():
                return found, Difference()
            case Repeated(run, exact):
                return found, _rounding(run, exact, number, heads)
            case NotJudged():
                return Difference(), found

    def _oracle(self, subject: Subject, run: ModuleRun, call: AttentionCall) -> tuple[Level, str, Expected | None]:
        """The highest level that works, why not a higher one, and what the oracle expects there."""
        why = "" if self.highest == "full" else f"asked for {self.highest}"
        why = subject.why if isinstance(subject, NotJudged) else why
        if not why:
            try:
                expected = from_weights(run, self.layout, self.config, self.layers.get(call.layer))
                return "full", self._caveats(run, call), expected
            except UnreadableError as error:
                why = str(error)
            except MISFITS as error:
                why = f"its layout does not fit ({type(error).__name__}: {error})"
        if self.highest != "none" and (observed := from_call(call)) is not None:
            return "scores", "; ".join(filter(None, (why, _blind(call)))), observed
        return "none", why + "; its q, k and v cannot be heard" * (dtype_of(call) is None), None

    def _caveats(self, run: ModuleRun, call: AttentionCall) -> str:
        known = self.layout.caveat if self.layout else ""
        return "; ".join(filter(None, (known, run.caveat, _blind(call))))


def _in_float32(run: ModuleRun, recorder: ModuleRecorder) -> Repeated | NotJudged:
    """The run with its repetition in float32, or why it has none."""
    try:
        exact = recorder.in_float32(run)
    except Exception as error:  # any family's module, asked to run in another dtype
        return NotJudged(run, f"its module does not run in float32: {error}")
    if len(exact.calls) != len(run.calls):
        times = f"{len(run.calls)} times as run, {len(exact.calls)} times in float32"
        return NotJudged(run, f"its module attends {times}")
    return Repeated(run, exact)


def _blind(call: AttentionCall) -> str:
    return "" if call.weights_BHQK is not None else "the model returned no weights: only its output is compared"


def _difference(call: AttentionCall, expected: Expected, heads: Iterable[int] | None) -> Difference:
    weights = None
    if call.weights_BHQK is not None:
        weights = _largest(_of(call.weights_BHQK - expected.weights_BHQK, heads))
    return Difference(weights, *_output_difference(expected.model_output, expected.output))


def _rounding(run: ModuleRun, exact: ModuleRun, number: int, heads: Iterable[int] | None) -> Difference:
    rounded, model = run.calls[number].weights_BHQK, exact.calls[number].weights_BHQK
    weights = None if rounded is None or model is None else _largest(_of(rounded - model, heads))
    if run.output_BTE is None or exact.output_BTE is None:
        return Difference(weights)
    return Difference(weights, *_output_difference(run.output_BTE, exact.output_BTE))


def _output_difference(model: Tensor, expected: Tensor) -> tuple[float, float]:
    """Largest entry of the difference, and largest norm of a token's, over the typical token's output norm."""
    model_BTM, expected_BTM = (precise(x).flatten(2) for x in (model, expected))
    difference_BTM = model_BTM - expected_BTM
    typical = expected_BTM.norm(dim=-1).square().mean().sqrt()
    return _largest(difference_BTM), float(difference_BTM.norm(dim=-1).max() / typical.clamp_min(1e-30))


def _row_sum_error(call: AttentionCall) -> float | None:
    if call.weights_BHQK is None or (call.spec is not None and call.spec.row_sinks is not None):
        return None
    return _largest(call.weights_BHQK.float().sum(-1) - 1)


def _masked_weight(call: AttentionCall, visible_QK: Tensor) -> float | None:
    return None if call.weights_BHQK is None else _largest(call.weights_BHQK.float() * ~visible_QK)


def _of(x_BHQK: Tensor, heads: Iterable[int] | None) -> Tensor:
    return x_BHQK if heads is None else x_BHQK[:, list(heads)]


def _largest(x: Tensor) -> float:
    return float(x.abs().max())
