"""One run of an attention module against the oracle: at the highest level that works, and how far they are apart.

Shapes: B text, T token, H head, G kv head, Q query, K key, D head dim, V width of v, E model width, M any width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnscope.parity.verdicts import Difference, LayerParity, Level
from attnscope.reference.attention import apply_mask, attention_logits, attention_output, softmax
from attnscope.reference.given import Given, UnreadableError
from attnscope.reference.layouts import UNREAD, Layout, layout_of
from attnscope.reference.reader import read
from attnscope.seam.call import AttentionCall
from attnscope.seam.modules import HALF, ModuleRun, Watcher

if TYPE_CHECKING:
    from attnscope.model.loading import LoadedModel


@dataclass(frozen=True)
class _Expected:
    """What the oracle says one call should be, and what the model says it is."""

    weights_BHQK: Tensor
    visible_QK: Tensor
    output: Tensor
    model_output: Tensor


class Comparison:
    """Holds each run of an attention module against the oracle, and keeps what was found."""

    def __init__(self, loaded: LoadedModel, heads: Mapping[int, tuple[int, ...]], atol: float, level: Level) -> None:
        self.config = loaded.model.config.get_text_config(decoder=True)
        self.layers = {layer.index: layer for layer in loaded.geometry.layers}
        self.layout = layout_of(self.config)
        self.heads, self.atol, self.highest = heads, atol, level
        self.quantised = is_quantised(loaded.model)
        self.found: list[LayerParity] = []

    def judge(self, run: ModuleRun, watcher: Watcher) -> None:
        """Compare one run of an attention module, call by call."""
        wanted = [number for number, call in enumerate(run.calls) if self._wanted(call)]
        exact, trouble = run, "its weights are quantised: rounding only" if self.quantised else ""
        if wanted and _in_half(run) and not self.quantised:
            exact, trouble = _in_float32(run, watcher)
        for number in wanted:
            self.found.append(self._compared(run, exact, number, trouble))

    def _wanted(self, call: AttentionCall) -> bool:
        known = self.layers.get(call.layer)
        return call.layer in self.heads if known is not None else True

    def _compared(self, run: ModuleRun, exact: ModuleRun, number: int, trouble: str) -> LayerParity:
        # of a copy nobody knows the layer
        call = replace(exact.calls[number], layer=run.calls[number].layer, path=run.calls[number].path)
        heads = self.heads.get(call.layer)
        level, why, expected = self._oracle(exact, call, trouble)
        against = Difference() if expected is None else _difference(call, expected, heads)
        judged = against if not trouble else Difference()
        rounding = against if trouble else _rounding(run, exact, number, heads) if exact is not run else Difference()
        verdict = None if trouble or expected is None else judged.within(self.atol)
        return LayerParity(
            layer=call.layer,
            call=number,
            module=call.path,
            level=level,
            why=why,
            implementation=judged,
            rounding=rounding,
            row_sum_error=_row_sum_error(call),
            masked_weight=None if expected is None else _masked_weight(call, expected.visible_QK),
            verdict=verdict,
        )

    def _oracle(self, run: ModuleRun, call: AttentionCall, trouble: str) -> tuple[Level, str, _Expected | None]:
        """The highest level that works, why not a higher one, and what the oracle expects there."""
        why = trouble or ("" if self.highest == "full" else f"asked for {self.highest}")
        if self.highest == "full" and not trouble:
            try:
                expected = self._full(run, call)
                return "full", self._caveats(run, call), expected
            except UnreadableError as error:
                why = str(error)
            except MISFITS as error:
                why = f"its layout does not fit ({type(error).__name__}: {error})"
        if self.highest != "none" and call.logits is not None and call.output_BQHD is not None:
            return "scores", "; ".join(filter(None, (why, _blind(call)))), self._scores(call)
        return "none", why + "; its q, k and v cannot be heard" * (call.logits is None), None

    def _caveats(self, run: ModuleRun, call: AttentionCall) -> str:
        known = self.layout.caveat if self.layout else ""
        return "; ".join(filter(None, (known, run.caveat, _blind(call))))

    def _full(self, run: ModuleRun, call: AttentionCall) -> _Expected:
        layer = self.layers.get(call.layer)
        if self.layout is None or layer is None:
            family = self.config.model_type
            raise UnreadableError(UNREAD.get(family, f"no layout is known for {family}"))
        if len(run.calls) > 1 or run.output_BTE is None:
            raise UnreadableError("its module attends more than once, or outside its own forward")
        reading = read(_given(run, self.layout, self.config, layer))
        _same_shape("weights", reading.weights_BHQK, call.weights_BHQK)
        _same_shape("output", reading.output_BTE, run.output_BTE)
        return _Expected(reading.weights_BHQK, reading.visible_QK, reading.output_BTE, run.output_BTE)

    def _scores(self, call: AttentionCall) -> _Expected:
        """Weights and heads' output from the q, k, v and extras that the model passed to its attention."""
        logits, visible = call.logits, call.visible
        assert logits is not None
        assert call.v_BGKD is not None
        assert call.output_BQHD is not None
        q, k, v = (precise(x) for x in (logits.q_BHQD, logits.k_BGKD, call.v_BGKD))
        mask = visible.rows(0, visible.queries) if visible.mask is None else visible.mask[..., : visible.keys]
        bias = None if logits.bias is None else precise(logits.bias)
        scores = attention_logits(q, k, scale=logits.scale, softcap=logits.softcap, bias=bias)
        scores = apply_mask(scores, mask if mask.dtype == torch.bool else precise(mask))
        weights_BHQK = _with_sinks(scores, call.sinks)
        heads_BQHV = attention_output(weights_BHQK, v).transpose(1, 2)
        if call.sinks_scale_output:
            weights_BHQK = softmax(scores)
        return _Expected(weights_BHQK, visible.rows(0, visible.queries), heads_BQHV, call.output_BQHD)


# What a reader raises over a module that is built in another way than its layout says.
MISFITS = (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError)


def _in_float32(run: ModuleRun, watcher: Watcher) -> tuple[ModuleRun, str]:
    """The run repeated in float32, or the run itself and why it can't be."""
    try:
        again = watcher.in_float32(run)
    except Exception as error:  # any family's module, asked to run in another dtype
        return run, f"its module does not run in float32: {error}"
    if len(again.calls) != len(run.calls):
        return run, f"its module attends {len(run.calls)} times as run, {len(again.calls)} times in float32"
    return again, ""


def _in_half(run: ModuleRun) -> bool:
    return run.model_dtype in HALF or any(call.logits and call.logits.q_BHQD.dtype in HALF for call in run.calls)


def _same_shape(what: str, ours: Tensor, theirs: Tensor | None) -> None:
    if theirs is not None and ours.shape != theirs.shape:
        raise UnreadableError(f"its layout gives {what} {tuple(ours.shape)}, the model {tuple(theirs.shape)}")


def _blind(call: AttentionCall) -> str:
    return "" if call.weights_BHQK is not None else "the model returned no weights: only its output is compared"


def _given(run: ModuleRun, layout: Layout, config: Any, layer: Any) -> Given:
    """What the oracle gets of a run: raw parameters in double precision, and what entered the module."""
    parameters = {**dict(run.module.named_buffers()), **dict(run.module.named_parameters())}
    if any(parameter.is_meta for parameter in parameters.values()):
        raise UnreadableError("its weights are offloaded")
    hidden_BTE = precise(run.hidden_BTE)
    return Given(
        layout=layout,
        parameters={name: precise(parameter) for name, parameter in parameters.items()},
        config=config,
        layer=layer,
        hidden_BTE=hidden_BTE,
        position_T=torch.arange(hidden_BTE.shape[1], device=hidden_BTE.device),
        arguments={
            name: precise(value)
            for name, value in run.arguments.items()
            if isinstance(value, Tensor) and value.is_floating_point()
        },
        shared=_shared(run, config, layer, parameters),
        model_dtype=run.model_dtype,
    )


def precise(x: Tensor) -> Tensor:
    """The oracle's own rounding stays out of the difference: float64, where the device has it.

    >>> precise(torch.ones(1)).dtype
    torch.float64
    """
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


def _shared(run: ModuleRun, config: Any, layer: Any, parameters: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """The keys and values of an earlier layer that came in, where the module has no projection of its own for them."""
    states = run.arguments.get("shared_kv_states")
    if states is None or any(name.startswith("k_proj.") for name in parameters):
        return None
    k_BGKD, v_BGKD = states[config.layer_types[layer.index]]
    return precise(k_BGKD), precise(v_BGKD)


def _with_sinks(scores_BHQK: Tensor, sinks_BHQ: Tensor | None) -> Tensor:
    if sinks_BHQ is None:
        return softmax(scores_BHQK)
    sink_BHQ1 = sinks_BHQ[..., None].to(scores_BHQK).expand(*scores_BHQK.shape[:-1], 1)
    return softmax(torch.cat([scores_BHQK, sink_BHQ1], dim=-1))[..., :-1]


def _difference(call: AttentionCall, expected: _Expected, heads: Iterable[int] | None) -> Difference:
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
    if call.weights_BHQK is None or call.takes_rows:
        return None
    return _largest(call.weights_BHQK.float().sum(-1) - 1)


def _masked_weight(call: AttentionCall, visible_QK: Tensor) -> float | None:
    return None if call.weights_BHQK is None else _largest(call.weights_BHQK.float() * ~visible_QK)


def _of(x_BHQK: Tensor, heads: Iterable[int] | None) -> Tensor:
    return x_BHQK if heads is None else x_BHQK[:, list(heads)]


def _largest(x: Tensor) -> float:
    return float(x.abs().max())


def is_quantised(model: Any) -> bool:
    """Whether the model's weights are stored quantised, so that no layer can be copied to float32 as it is.

    >>> is_quantised(load(LoadOptions()).model)
    False
    """
    return bool(getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None))
