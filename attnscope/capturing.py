"""The seam: listen to a model's own attention while it runs one forward pass, and leave no trace.

Nearly every family of transformers 5 asks `AttentionInterface.get_interface` for its attention function inside
`forward`. While a capture is open that one method is wrapped: the model's own function runs as it would, its call is
handed to the listener as an operator, and its matrix is dropped before the next layer runs. Families that bypass the
interface are heard through forward hooks on their attention modules. Nothing of the model is patched.

Shapes: B text, H head, G kv head, Q query, K key, D head dim, T token.
"""

from __future__ import annotations

import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attnscope.errors import ModelError, UsageError
from attnscope.operators import AttentionOperator, DenseAttention, Logits, Visibility

CHECKED_ROWS = 64  # rows of P V compared with the call's own output, each call


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention call, as the model made it.

    layer: which layer; call: which call of that layer (families that attend twice a layer count up).
    q_BHQD, k_BGKD, v_BGKD: after position encoding, None where the family bypasses the interface.
    weights_BHQK: the model's own matrix, None under fused implementations. output_BQHD: before the output projection.
    """

    layer: int
    call: int
    path: str
    module: nn.Module
    weights_BHQK: Tensor | None
    visible: Visibility
    logits: Logits | None = None
    v_BGKD: Tensor | None = None
    output_BQHD: Tensor | None = None
    sinks: Tensor | None = None

    def operator(self) -> AttentionOperator:
        """The call's attention as an operator. Raises ModelError where the implementation returned no weights."""
        if self.weights_BHQK is None:
            raise ModelError(
                f"layer {self.layer} ran an attention implementation that returns no weights",
                'load the model with attn_implementation="eager"',
            )
        return DenseAttention(self.weights_BHQK, self.visible, self.logits)


@dataclass
class CallCheck:
    """How one call held, None where it could not be measured.

    row_sum_error: largest |row sum - 1| (None with sink logits). masked_weight: largest weight on a key that the mask
    hides. value_error: largest |P V - output| over some rows, relative to the largest |output|.
    """

    layer: int
    call: int
    path: str
    heads: int
    route: str
    row_sum_error: float | None
    masked_weight: float | None
    value_error: float | None
    sink_logits: bool = False

    def failures(self, dtype: torch.dtype) -> list[str]:
        """What did not hold to what the dtype allows, in words."""
        row, value = TOLERANCE.get(dtype, TOLERANCE[torch.float32])
        limits = (
            ("row sums off by", self.row_sum_error, row),
            ("weight on masked keys", self.masked_weight, 0.0),
            ("P V differs from the layer's own output by", self.value_error, value),
        )
        return [
            f"layer {self.layer}: {what} {found:.2g} (allowed {limit:.2g})"
            for what, found, limit in limits
            if found is not None and not found <= limit
        ]


TOLERANCE = {  # row sums, and P V against the output: what rounding alone does
    torch.float64: (1e-10, 1e-6),
    torch.float32: (1e-5, 1e-4),
    torch.float16: (5e-3, 1e-2),
    torch.bfloat16: (3e-2, 5e-2),
}


@dataclass
class CaptureReport:
    """What one forward pass was: its calls in order, and whether each held."""

    calls: list[CallCheck] = field(default_factory=list)

    @property
    def layers(self) -> list[int]:
        """The layers that were heard, in order, each once."""
        return list(dict.fromkeys(check.layer for check in self.calls))


def listen(
    model: nn.Module,
    ids_BT: Tensor,
    hear: Callable[[AttentionCall], None],
    *,
    expected_layers: tuple[int, ...] | None = None,
    windows: dict[int, int | None] | None = None,
    **inputs: Any,
) -> CaptureReport:
    """Run the model's backbone once over token ids and hand every attention call to `hear`, one by one.

    ids_BT: (texts, tokens) integer ids; texts of different length are padded on the right, without a mask.
    expected_layers: layers that must call; ModelError names those that did not.
    No logits are computed. Raises UsageError for a model in training mode (its weights would be after dropout).

        >>> report = listen(model, ids, lambda call: print(call.layer, call.weights_BHQK.shape))
    """
    if model.training:
        raise UsageError("the model is in training mode, where dropout changes the weights", "call model.eval() first")
    with _model_lock(model), listening(model, hear, windows or {}) as report, torch.no_grad(), _uncompiled():
        _backbone(model)(ids_BT, use_cache=False, **_extras(model), **inputs)
    missing = sorted(set(expected_layers or ()) - set(report.layers))
    if missing:
        raise ModelError(
            f"no attention was heard from layer{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}",
            "this model computes its attention where attnscope cannot listen",
        )
    return report


@contextmanager
def listening(
    model: nn.Module, hear: Callable[[AttentionCall], None], windows: dict[int, int | None] | None = None
) -> Iterator[CaptureReport]:
    """While open, every attention call that this thread makes in `model` is handed to `hear`.

    For callers who run the model themselves (generation, a custom forward). The report fills as the calls come.
    """
    listener = _Listener(_bare(model), hear, windows or {})
    thread = threading.get_ident()
    handles = listener.hook_modules()
    _install(thread, listener)
    try:
        yield listener.report
    finally:
        _remove(thread, listener)
        for handle in handles:
            handle.remove()


# The dispatcher: one wrapper of AttentionInterface.get_interface for all captures, counted.

_lock = threading.Lock()
_listeners: dict[int, list[_Listener]] = {}
_original: Callable[..., Any] | None = None
_model_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


def _get_interface(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
    assert _original is not None
    attend = _original(self, name, default)
    stack = _listeners.get(threading.get_ident())
    if not stack:
        return attend

    def heard(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        listener = next((one for one in reversed(stack) if module in one.paths), None)
        result = attend(module, *args, **kwargs)
        return result if listener is None else listener.from_interface(module, args, kwargs, result)

    return heard


def _install(thread: int, listener: _Listener) -> None:
    global _original
    from transformers.modeling_utils import AttentionInterface

    with _lock:
        if not _listeners and AttentionInterface.get_interface is not _get_interface:
            _original = AttentionInterface.get_interface
            AttentionInterface.get_interface = _get_interface
        _listeners.setdefault(thread, []).append(listener)


def _remove(thread: int, listener: _Listener) -> None:
    from transformers.modeling_utils import AttentionInterface

    with _lock:
        _listeners[thread].remove(listener)
        if not _listeners[thread]:
            del _listeners[thread]
        if not _listeners and AttentionInterface.get_interface is _get_interface:
            AttentionInterface.get_interface = _original


@contextmanager
def _model_lock(model: nn.Module) -> Iterator[None]:
    """A second capture of the same model waits for the first."""
    with _lock:
        lock = _model_locks.setdefault(_bare(model), threading.RLock())
    with lock:
        yield


class _Listener:
    """Turns raw attention calls of one model into AttentionCalls, and keeps the report."""

    def __init__(self, model: nn.Module, hear: Callable[[AttentionCall], None], windows: dict[int, int | None]) -> None:
        self.paths = {module: name for name, module in model.named_modules()}
        self.hear = hear
        self.windows = windows
        self.report = CaptureReport()
        self._calls: dict[int, int] = {}
        self._by_interface: set[nn.Module] = set()
        self._visible: dict[Any, tuple[Any, Visibility]] = {}

    def hook_modules(self) -> list[Any]:
        """Forward hooks on every attention module, for families that never call the interface."""
        return [
            module.register_forward_hook(self._from_hook, prepend=True)
            for module, name in self.paths.items()
            if "attention" in type(module).__name__.lower()
        ]

    def from_interface(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        self._by_interface.add(module)
        names = ("query", "key", "value", "attention_mask", "scaling", "dropout")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        output, weights = result
        q, k = given["query"], given["key"]
        visible = self._visibility(module, given.get("attention_mask"), q, k, given)
        scale = given.get("scaling")
        sinks = given.get("s_aux") if given.get("s_aux") is not None else given.get("sinks")
        logits = Logits(
            q,
            k,
            q.shape[-1] ** -0.5 if scale is None else scale,
            given.get("softcap"),
            given.get("position_bias"),
            visible,
        )
        self._deliver(module, "interface", weights, visible, logits, given["value"], output, sinks)
        return output, None  # the layer's matrix is freed here

    def _from_hook(self, module: nn.Module, args: Any, output: Any) -> Any:
        if module in self._by_interface or not isinstance(output, tuple) or len(output) < 2:
            return None
        weights = output[1]
        if not isinstance(weights, Tensor) or weights.ndim != 4 or not weights.is_floating_point():
            return None
        Q, K = weights.shape[-2:]
        layer = self._layer(module)
        window = self.windows.get(layer)
        visible = self._shared(
            (Q, K, window, weights.device), None, lambda: Visibility(Q, K, None, True, window, weights.device)
        )
        self._deliver(module, "hook", weights, visible, None, None, None, None)
        return (output[0], None, *output[2:])

    def _visibility(self, module: nn.Module, mask: Any, q: Tensor, k: Tensor, given: dict[str, Any]) -> Visibility:
        """One Visibility a mask: layers that share a mask share its counts."""
        Q, K = q.shape[2], k.shape[2]
        if isinstance(mask, Tensor):
            return self._shared(id(mask), mask, lambda: Visibility(Q, K, mask[..., :K], device=mask.device))
        causal = given.get("is_causal")
        causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
        return self._shared((Q, K, causal, q.device), None, lambda: Visibility(Q, K, None, causal, None, q.device))

    def _shared(self, key: Any, mask: Any, make: Callable[[], Visibility]) -> Visibility:
        if key not in self._visible:
            while len(self._visible) >= 4:  # a model that builds a mask a layer must not pile them up
                del self._visible[next(iter(self._visible))]
            self._visible[key] = (mask, make())  # holding the mask keeps its id its own
        return self._visible[key][1]

    def _layer(self, module: nn.Module) -> int:
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int):
            return index
        number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", self.paths[module])
        return int(number[1]) if number else 0

    def _deliver(
        self,
        module: nn.Module,
        route: str,
        weights: Any,
        visible: Visibility,
        logits: Any,
        v: Any,
        output: Any,
        sinks: Any,
    ) -> None:
        layer = self._layer(module)
        count = self._calls[layer] = self._calls.get(layer, -1) + 1
        call = AttentionCall(layer, count, self.paths[module], module, weights, visible, logits, v, output, sinks)
        self.report.calls.append(check_call(call, route))
        self.hear(call)


def check_call(call: AttentionCall, route: str) -> CallCheck:
    """Hold one call against itself: rows sum to 1, masked keys get nothing, P V is the call's own output."""
    heads = call.weights_BHQK.shape[1] if call.weights_BHQK is not None else call.logits.q_BHQD.shape[1]  # type: ignore[union-attr]
    check = CallCheck(call.layer, call.call, call.path, heads, route, None, None, None, call.sinks is not None)
    if call.weights_BHQK is None:
        return check
    P = DenseAttention(call.weights_BHQK, call.visible)
    seen_BHQ = call.visible.counts_BHQ.to(P.device) > 0
    if call.sinks is None:
        check.row_sum_error = float(((P.mass - 1).abs() * seen_BHQ).max())
    check.masked_weight = max(
        float((P.rows(a, b).masked_fill(call.visible.rows(a, b).to(P.device), 0) * seen_BHQ[..., a:b, None]).max())
        for a, b in P.blocks()
    )
    if call.v_BGKD is not None and call.output_BQHD is not None:
        check.value_error = _value_error(call)
    return check


def _value_error(call: AttentionCall) -> float | None:
    """Largest |P V - output| over some rows; None where the call's output has another form."""
    weights, v, output = call.weights_BHQK, call.v_BGKD, call.output_BQHD
    assert weights is not None
    assert v is not None
    assert output is not None
    B, H, Q, _ = weights.shape
    if output.shape != (B, Q, H, v.shape[-1]):
        return None
    row_R = torch.linspace(0, Q - 1, min(Q, CHECKED_ROWS), device=weights.device).long()
    weights_BGRK = weights[:, :, row_R].float().reshape(B, v.shape[1], -1, weights.shape[-1])
    expected_BHRD = (weights_BGRK @ v.float()).view(B, H, len(row_R), -1)
    output_BHRD = output[:, row_R].transpose(1, 2).float()
    return float((expected_BHRD - output_BHRD).abs().max() / output_BHRD.abs().max().clamp_min(1e-30))


def _bare(model: nn.Module) -> nn.Module:
    """The module behind a torch.compile wrapper."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def _backbone(model: nn.Module) -> nn.Module:
    """The model without its vocabulary projection: 128k tokens of logits are tens of gigabytes."""
    bare = _bare(model)
    backbone = getattr(bare, "base_model", bare)
    return backbone if isinstance(backbone, nn.Module) else bare


def _extras(model: nn.Module) -> dict[str, Any]:
    """Arguments that some families need before their attention modules return weights."""
    family = getattr(getattr(model, "config", None), "model_type", "")
    return {"output_attentions": True} if family in RETURN_WEIGHTS_WHEN_ASKED else {}


RETURN_WEIGHTS_WHEN_ASKED = {"falcon", "git", "mvp", "xlm", "openai-gpt", "prophetnet", "trocr", "big_bird"}


def _uncompiled() -> Any:
    """A compiled model calls no interface; run it uncompiled for the time of the capture."""
    if "torch._dynamo" not in sys.modules:  # nothing can be compiled then, and importing it takes seconds
        return nullcontext()
    return torch.compiler.set_stance("force_eager")
