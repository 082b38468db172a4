"""One run of an attention module against the oracle: at the highest level that works, and how far they are apart.

Shapes: B text, T token, H head, Q query, K key, E model width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnscope.hooks.calls import AttentionCall
from attnscope.hooks.modules import HALF, ModuleRecorder, ModuleRun
from attnscope.hooks.report import tolerance, turned_away
from attnscope.model.quantised import is_quantised
from attnscope.model.selection import DECODER, is_cross
from attnscope.model.tasks import looks_back_alone, stack_config
from attnscope.parity.arranged import PLAIN, Arrangement
from attnscope.parity.differences import (
    Tolerance,
    difference,
    judged,
    largest_size,
    of_heads,
    output_difference,
    seen_apart,
)
from attnscope.parity.expected import Expected, dtype_of, from_call, from_weights
from attnscope.parity.verdicts import ATOL, Difference, LayerParity, Level
from attnscope.reference.given import UnreadableError
from attnscope.reference.layouts import layout_of

if TYPE_CHECKING:
    from attnscope.model.geometry import LayerGeometry
    from attnscope.model.loaded import LoadedModel

# What a reader raises over a module that is built in another way than its layout says.
MISFITS = (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError)


@dataclass(frozen=True)
class AsRun:
    """A run that is compared as it was."""

    run: ModuleRun


@dataclass(frozen=True)
class Repeated:
    """A run in half precision, compared through its repetition in float32, and itself with what its dtype allows."""

    run: ModuleRun
    exact: ModuleRun


@dataclass(frozen=True)
class NotJudged:
    """A run that has no exact form, and why: all of its difference is reported as rounding."""

    run: ModuleRun
    why: str


Subject = AsRun | Repeated | NotJudged


class Stack:
    """What the oracle knows of the layers of one stack."""

    def __init__(self, config: Any, stack: str, layers: Iterable[LayerGeometry]) -> None:
        self.config = stack_config(config, DECODER if is_cross(stack) else stack)
        self.layers = {layer.index: layer for layer in layers}
        layout = layout_of(self.config)
        self.layout = layout.across if layout and is_cross(stack) else layout


class Comparison:
    """Compares each run of an attention module with the oracle, and keeps what was found."""

    def __init__(
        self,
        loaded: LoadedModel,
        heads: Mapping[str, Mapping[int, tuple[int, ...]]],
        atol: float,
        level: Level,
        arrangements: Mapping[str, Arrangement],
    ) -> None:
        geometry = loaded.geometry
        stacks = {**geometry.other_stacks, geometry.stack: geometry.layers}
        self.config = loaded.model.config
        self.stacks = {stack: Stack(self.config, stack, layers) for stack, layers in stacks.items()}
        self.heads, self.atol, self.highest = heads, atol, level
        self.quantised, self.rotary = is_quantised(loaded.model), _rounded_rotary(loaded.model)
        self.arrangements = arrangements
        self.found: list[LayerParity] = []
        self.keys: dict[str, int] = {}

    def judge(self, run: ModuleRun, recorder: ModuleRecorder) -> None:
        """Compare one run of an attention module, call by call."""
        self.keys |= {call.stack: call.visible.keys for call in run.calls}
        numbers = [number for number, call in enumerate(run.calls) if self._wanted(call)]
        if not numbers:
            return
        if self.quantised:
            subject: Subject = NotJudged(run, "its weights are quantised: rounding only")
        else:
            subject = _in_float32(run, recorder) if _dtype(run) in HALF else AsRun(run)
        self.found += [self._compared(subject, number) for number in numbers]

    def _wanted(self, call: AttentionCall) -> bool:
        """Whether heads of its layer were chosen, or the layer is none that the model was thought to have."""
        stack = self.stacks.get(call.stack)
        return stack is not None and (call.layer in self._heads(call) or call.layer not in stack.layers)

    def _heads(self, call: AttentionCall) -> Mapping[int, tuple[int, ...]]:
        return self.heads.get(call.stack, {})

    def _compared(self, subject: Subject, number: int) -> LayerParity:
        # Through its repetition in float32 where there is one; what the run itself did is judged next to that.
        run = subject.exact if isinstance(subject, Repeated) else subject.run
        original = subject.run.calls[number]  # a copied module no longer knows its layer
        call = replace(run.calls[number], place=original.place)
        level, why, expected = self._oracle(subject, run, call)
        own = _of_the_run(subject.run, original, level, expected) if isinstance(subject, Repeated) else expected
        implementation, as_run, rounding = self._differences(subject, number, expected, own)
        # Without the oracle: whether rows sum to 1, and whether a call over one text looks where config and class say.
        row_sum_error, turned = _row_sum_error(original), ""
        if original.visible.queries == original.visible.keys and original.stack not in self.arrangements:
            turned = turned_away(float(original.visible.ahead), looks_back_alone(self.config, original.stack))
        judged_exactly = expected is not None and not isinstance(subject, NotJudged)
        apart = seen_apart(call, expected, Tolerance(self.atol)) if expected and judged_exactly else ""
        # Rows of half precision sum to 1 to what it allows; elsewhere the weights themselves are held to less.
        sums_to_1 = True
        if row_sum_error is not None and isinstance(subject, Repeated):
            sums_to_1 = row_sum_error <= tolerance(_dtype(subject.run))[0]
        holds = implementation.holds and as_run.holds and sums_to_1 and not (turned or apart)
        return LayerParity(
            layer=call.layer,
            call=number,
            module=call.path,
            level=level,
            why="; ".join(filter(None, (why, _other_keys(original, call)))),
            implementation=implementation,
            as_run=as_run,
            rounding=rounding,
            row_sum_error=row_sum_error,
            masked_weight=None if own is None else _masked_weight(original, own.visible_QK),
            verdict=None if not turned and not judged_exactly else holds,
            stack=call.stack,
            turned=turned,
            apart=apart,
        )

    def _differences(
        self, subject: Subject, number: int, expected: Expected | None, own: Expected | None
    ) -> tuple[Difference, Difference, Difference]:
        """What is judged of a call, what of it as it ran in half precision, and what its rounding is."""
        original, none = subject.run.calls[number], Difference()
        heads = self._heads(original).get(original.layer)
        if isinstance(subject, Repeated):
            rounding = _rounding(subject.run, subject.exact, number, heads)
            if expected is None or own is None:
                return none, none, rounding
            exact = judged(subject.exact.calls[number].weights_BHQK, expected, heads, Tolerance(self.atol))
            allowed = Tolerance(max(self.atol, ATOL), _dtype(subject.run))
            return exact, judged(original.weights_BHQK, own, heads, allowed), rounding
        if expected is None:
            return none, none, none
        if isinstance(subject, NotJudged):
            return none, none, difference(original.weights_BHQK, expected, heads)
        return judged(original.weights_BHQK, expected, heads, Tolerance(self.atol)), none, none

    def _oracle(self, subject: Subject, run: ModuleRun, call: AttentionCall) -> tuple[Level, str, Expected | None]:
        """The highest level that works, why not a higher one, and what the oracle expects there."""
        why = "" if self.highest == "full" else f"asked for {self.highest}"
        why = subject.why if isinstance(subject, NotJudged) else why
        stack = self.stacks[call.stack]
        if not why:
            try:
                arrangement = self.arrangements.get(call.stack, PLAIN)
                expected = from_weights(run, stack.layout, stack.config, stack.layers.get(call.layer), arrangement)
                known = stack.layout.caveat if stack.layout else ""
                return "full", "; ".join(filter(None, (known, run.caveat, self.rotary, _blind(call)))), expected
            except UnreadableError as error:
                why = str(error)
            except MISFITS as error:
                why = f"its layout does not fit ({type(error).__name__}: {error})"
        if self.highest != "none" and (observed := from_call(call)) is not None:
            return "scores", "; ".join(filter(None, (why, _blind(call)))), observed
        return "none", why + "; its q, k and v cannot be heard" * (dtype_of(call) is None), None


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


def _rounded_rotary(model: nn.Module) -> str:
    """Whether rotary frequencies lost digits in half precision, in words: what their modules make of the config has
    them. transformers keeps them in float32 where it is asked for a dtype itself.
    """
    for module in model.modules():
        buffers = {name: buffer for name, buffer in module.named_buffers(recurse=False) if name.endswith("inv_freq")}
        fresh: Mapping[str, Tensor] = {}
        if buffers:
            with suppress(Exception):  # any family's module
                fresh = dict(type(module)(module.config).named_buffers())
        for name, frequencies in buffers.items():
            exact = fresh.get(name, frequencies.float()).to(frequencies.device)
            for half in (torch.bfloat16, torch.float16):  # the coarser first, which rounds the other's numbers too
                rounded = exact.to(half).to(frequencies.dtype)
                lost = torch.equal(frequencies, rounded) and not torch.equal(rounded.float(), exact)
                if lost or (name not in fresh and frequencies.dtype is half):
                    kind = str(half).removeprefix("torch.")
                    return (
                        f"its rotary frequencies are rounded to {kind}, as model.half() and model.to() leave them: "
                        f"from_pretrained(dtype={kind!r}) keeps them"
                    )
    return ""


def _blind(call: AttentionCall) -> str:
    return "" if call.weights_BHQK is not None else "the model returned no weights: only its output is compared"


def _dtype(run: ModuleRun) -> torch.dtype:
    """What a run rounds to: half precision where its model or one of its calls is in it."""
    dtypes = (run.model_dtype, *(dtype_of(call) for call in run.calls))
    return next((dtype for dtype in dtypes if dtype in HALF), run.model_dtype)


def _of_the_run(run: ModuleRun, call: AttentionCall, level: Level, expected: Expected | None) -> Expected | None:
    """What is expected of a call as it ran: from its own q, k, v and mask where that is all that is compared."""
    if level != "full" or expected is None or run.output_BTE is None:
        return None if expected is None else from_call(call)
    return replace(expected, model_output=run.output_BTE)


def _other_keys(call: AttentionCall, exact: AttentionCall) -> str:
    """Layers that choose keys by their content may choose others in half precision, at any distance in weights."""
    if call.visible is exact.visible or call.spec is None:  # then the mask was not seen, in neither
        return ""
    visible, exact_visible = (each.visible.rows(0, each.visible.queries) for each in (call, exact))
    if visible.shape == exact_visible.shape and bool((visible == exact_visible).all()):
        return ""
    return "in half precision it attends to other keys than in float32"


def _rounding(run: ModuleRun, exact: ModuleRun, number: int, heads: Iterable[int] | None) -> Difference:
    rounded, model = run.calls[number].weights_BHQK, exact.calls[number].weights_BHQK
    weights = None if rounded is None or model is None else largest_size(of_heads(rounded - model, heads))
    if run.output_BTE is None or exact.output_BTE is None:
        return Difference(weights)
    return Difference(weights, *output_difference(run.output_BTE, exact.output_BTE))


def _row_sum_error(call: AttentionCall) -> float | None:
    if call.weights_BHQK is None or (call.spec is not None and call.spec.row_sinks is not None):
        return None
    return largest_size(call.weights_BHQK.float().sum(-1) - 1)


def _masked_weight(call: AttentionCall, visible_QK: Tensor) -> float | None:
    if call.weights_BHQK is None:
        return None
    hidden_QK = ~visible_QK & visible_QK.any(-1, keepdim=True)  # a row that sees nothing is uniform in eager attention
    return largest_size(call.weights_BHQK.float() * hidden_QK)
