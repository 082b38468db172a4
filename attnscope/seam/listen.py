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
from typing import Any

import torch
from torch import Tensor, nn

from attnscope.attention.visibility import Logits, Visibility
from attnscope.errors import ModelError, UsageError
from attnscope.model.families import family_of
from attnscope.seam.call import (
    CHECKED_ROWS,
    AttentionCall,
    CaptureReport,
    check_call,
    relative_error,
    sampled_rows,
    sdpa_kernel,
)


def listen(
    model: nn.Module,
    ids_BT: Tensor,
    hear: Callable[[AttentionCall], None],
    *,
    expected_layers: tuple[int, ...] | None = None,
    windows: dict[int, int | None] | None = None,
    answer: bool = False,
    whole: bool = True,
    **inputs: Any,
) -> CaptureReport:
    """Run the model's backbone once over token ids and hand every attention call to `hear`, one by one.

    ids_BT: (texts, tokens) integer ids; texts of different length are padded on the right, without a mask.
    expected_layers: layers that must call; ModelError names those that did not. answer: attnscope computes each
    layer's output itself, in the pass that answers the questions about it, and the model's own attention does not run;
    some rows of every call are checked against it. whole: run the backbone to its end; without, once a whole pass has
    shown which call is the model's last, later passes end there, for callers who read nothing behind it.
    No logits are computed.
    Raises UsageError for a model in training mode (its weights would be after dropout).

        >>> report = listen(model, ids, lambda call: print(call.layer, call.weights_BHQK.shape))
    """
    if model.training:
        raise UsageError("the model is in training mode, where dropout changes the weights", "call model.eval() first")
    bare = _bare(model)
    with _model_lock(model), _listening(model, hear, windows, answer) as listener, torch.no_grad(), _uncompiled():
        modules, end = _ends.get(bare, (0, None))
        listener.end = end if modules == len(listener.paths) and not (whole or inputs) else None
        try:
            _backbone(model)(ids_BT, use_cache=False, **_extras(model), **inputs)
        except _LastCall:
            pass
        else:
            if not inputs and listener.all_by_interface and not _is_dispatched(bare):
                _ends[bare] = len(listener.paths), [check.path for check in listener.report.calls]
    report = listener.report
    report.tokens = ids_BT.shape[1]
    missing = sorted(set(expected_layers or ()) - set(report.layers))
    if missing:
        raise ModelError(
            f"no attention was heard from layer{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}",
            "this model computes its attention where attnscope cannot listen",
        )
    return report


@contextmanager
def listening(
    model: nn.Module,
    hear: Callable[[AttentionCall], None],
    windows: dict[int, int | None] | None = None,
    answer: bool = False,
) -> Iterator[CaptureReport]:
    """While open, every attention call that this thread makes in `model` is handed to `hear`.

    For callers who run the model themselves (generation, a custom forward). The report fills as the calls come.
    """
    with _listening(model, hear, windows, answer) as listener:
        yield listener.report


@contextmanager
def _listening(
    model: nn.Module, hear: Callable[[AttentionCall], None], windows: dict[int, int | None] | None, answer: bool
) -> Iterator[_Listener]:
    listener = _Listener(_bare(model), hear, windows or {}, answer)
    thread = threading.get_ident()
    handles = listener.hook_modules()
    _install(thread, listener)
    try:
        yield listener
    finally:
        _remove(thread, listener)
        for handle in handles:
            handle.remove()


ARGUMENTS = ("query", "key", "value", "attention_mask", "scaling", "dropout")  # of an attention function, by position

# The dispatcher: one wrapper of AttentionInterface.get_interface for all captures, counted.

_lock = threading.Lock()
_listeners: dict[int, list[_Listener]] = {}
_original: Callable[..., Any] | None = None
# How many modules a model had in a whole pass, and which of them called, in order.
_ends: weakref.WeakKeyDictionary[nn.Module, tuple[int, list[str]]] = weakref.WeakKeyDictionary()
_model_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


def _get_interface(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
    assert _original is not None
    attend = _original(self, name, default)
    stack = _listeners.get(threading.get_ident())
    if not stack:
        return attend

    def heard(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        listener = next((one for one in reversed(stack) if module in one.paths), None)
        if listener is None:
            return attend(module, *args, **kwargs)
        return listener.from_interface(module, attend, args, kwargs)

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


class _LastCall(BaseException):
    """Ends a forward pass whose last attention was heard."""


def _is_dispatched(model: nn.Module) -> bool:
    """Whether accelerate moves weights around every module's forward, which must then come to its end."""
    return any(hasattr(module, "_hf_hook") for module in model.modules())


class _Listener:
    """Turns raw attention calls of one model into AttentionCalls, and keeps the report."""

    def __init__(
        self,
        model: nn.Module,
        hear: Callable[[AttentionCall], None],
        windows: dict[int, int | None],
        answer: bool = False,
    ) -> None:
        self.paths = {module: name for name, module in model.named_modules()}
        self.hear = hear
        self.windows = windows
        self.answer = answer
        self.report = CaptureReport()
        self.end: list[str] | None = None  # the calls of a whole pass, where they are known
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

    def from_interface(
        self, module: nn.Module, attend: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._by_interface.add(module)
        given = {**dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
        if self.answer:
            call = self._call(module, given, None, None)
            self.hear(call)
            output = call.P.output()  # type: ignore[attr-defined]
            check = check_call(call, "answered")
            check.kernel = "attnscope"
            check.value_error = self._answer_error(call, attend, given, output)
            self.report.calls.append(check)
        else:
            output, weights = attend(module, *args, **kwargs)
            call = self._call(module, given, weights, output)
            self._hear(call, "interface")
            if weights is None and attend.__name__.startswith("sdpa"):
                self.report.calls[-1].kernel = sdpa_kernel(call)
        if self.end is not None and [check.path for check in self.report.calls] == self.end:
            raise _LastCall
        return output, None  # the layer's matrix is freed here

    @property
    def all_by_interface(self) -> bool:
        """Whether every call came through the interface."""
        return all(check.route != "hook" for check in self.report.calls)

    def _call(self, module: nn.Module, given: dict[str, Any], weights: Tensor | None, output: Any) -> AttentionCall:
        q, k = given["query"], given["key"]
        scale = q.shape[-1] ** -0.5 if given.get("scaling") is None else given["scaling"]
        visible = self._visibility(module, given.get("attention_mask"), q, k, given)
        logits = Logits(q, k, scale, given.get("softcap"), given.get("position_bias"), visible)
        sinks = next((given[name] for name in ("s_aux", "sinks") if given.get(name) is not None), None)
        if sinks is not None:  # one a head, or one a head and query
            sinks = sinks.reshape(1, -1, 1) if sinks.numel() == q.shape[1] else sinks[..., 0]
        layer, count = self._place(module)
        return AttentionCall(
            layer,
            count,
            self.paths[module],
            module,
            weights,
            visible,
            logits,
            given["value"],
            output,
            sinks,
            family_of(module).sinks_scale_output,
        )

    def _answer_error(
        self, call: AttentionCall, attend: Callable[..., Any], given: dict[str, Any], output_BQHD: Tensor
    ) -> float:
        """Some rows of our output against what the model's own attention gives for them."""
        row_R = sampled_rows(given["query"].shape[2]).to(output_BQHD.device)
        asked = {**given, "query": given["query"][:, :, row_R], "attention_mask": self._mask_rows(call, given, row_R)}
        for name in ("position_bias", "sinks"):  # one a query, where the family has them
            if isinstance(given.get(name), Tensor) and given[name].ndim == 4:
                asked[name] = given[name][..., row_R, :]
        expected, _ = attend(call.module, *(asked.pop(name) for name in ARGUMENTS[:4]), **asked)
        return relative_error(output_BQHD[:, row_R], expected)

    def _mask_rows(self, call: AttentionCall, given: dict[str, Any], row_R: Tensor) -> Tensor:
        mask = given.get("attention_mask")
        if isinstance(mask, Tensor):
            return mask[..., row_R, :] if mask.shape[-2] > 1 else mask
        runs = row_R.split(CHECKED_ROWS // 4)
        seen = torch.cat([call.visible.rows(int(run[0]), int(run[-1]) + 1) for run in runs], 2)
        q = given["query"]
        return torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, torch.finfo(q.dtype).min)

    def _from_hook(self, module: nn.Module, args: Any, output: Any) -> Any:
        if module in self._by_interface or not isinstance(output, tuple | list) or len(output) < 2:
            return None
        weights = output[1]
        if not isinstance(weights, Tensor) or weights.ndim != 4 or not weights.is_floating_point():
            return None
        Q, K = weights.shape[-2:]
        layer, count = self._place(module)
        window = self.windows.get(layer)
        visible = self._shared(
            (Q, K, window, weights.device), None, lambda: Visibility(Q, K, None, True, window, weights.device)
        )
        self._hear(AttentionCall(layer, count, self.paths[module], module, weights, visible), "hook")
        return type(output)([output[0], None, *output[2:]])

    def _hear(self, call: AttentionCall, route: str) -> None:
        self.report.calls.append(check_call(call, route))
        self.hear(call)

    def _place(self, module: nn.Module) -> tuple[int, int]:
        """The module's layer, and which call of that layer this is."""
        layer = self._layer(module)
        self._calls[layer] = self._calls.get(layer, -1) + 1
        return layer, self._calls[layer]

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
        if isinstance(index, int) and index >= 0:  # zamba2's shared module says -1
            return index
        number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", self.paths[module])
        return int(number[1]) if number else 0


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
    return {"output_attentions": True} if family_of(model).returns_weights_when_asked else {}


def calls_interface(model: nn.Module) -> bool:
    """Whether the model's attention modules call the interface, where q and k are seen."""
    return not family_of(model).bypasses_interface


def _uncompiled() -> Any:
    """A compiled model calls no interface; run it uncompiled for the time of the capture."""
    if "torch._dynamo" not in sys.modules:  # nothing can be compiled then, and importing it takes seconds
        return nullcontext()
    return torch.compiler.set_stance("force_eager")
