"""The seam: listen to a model's own attention while it runs one forward pass, and leave no trace.

Nearly every family of transformers 5 asks `AttentionInterface.get_interface` for its attention function inside
`forward`. While a capture is open that one method is wrapped: an engine runs the call (by default the model's own
function, as it would), shows it to the listener as an operator, and its matrix is dropped before the next layer runs.
Families that bypass the interface are read through forward hooks on their attention modules, and their logits and
values off what these modules compute meanwhile (`watching`). Nothing of the model is patched.

Shapes: B text, Q query, K key, T token.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from attnscope.attention.operator import DenseAttention
from attnscope.attention.spec import AttentionSpec
from attnscope.attention.visibility import Visibility, by_place
from attnscope.errors import ModelError, UsageError, hints_of
from attnscope.model.attending import layer_of
from attnscope.model.families import Family, family_of
from attnscope.model.geometry import geometry_of
from attnscope.model.libraries import knows_interface, needed
from attnscope.model.padding import pads_exactly, settle_rotary
from attnscope.model.placed import device_of, hooks_of
from attnscope.model.virtual import CACHE_ARGUMENTS
from attnscope.process import ProcessWide
from attnscope.seam.call import AttentionCall, CallPlace
from attnscope.seam.checks import check_call
from attnscope.seam.engines import ENGINES, Engine, OnCall, changing, full_precision
from attnscope.seam.failures import own_errors
from attnscope.seam.forward import (
    attention_modules,
    bare_model,
    config_of,
    hooks_around,
    run_backbone,
    with_logits,
    without_cache,
)
from attnscope.seam.hooked import banded, near, weights_in, whole, without
from attnscope.seam.own import OwnAttention
from attnscope.seam.report import CallCheck, CaptureReport, settle, tolerance
from attnscope.seam.route import Route, route_of
from attnscope.seam.stacks import Stacks
from attnscope.seam.watching import FunctionCall, Watch, computed
from attnscope.seam.windows import InWindows
from attnscope.stacks import CROSS, DECODER, is_bidirectional, is_causal, is_cross, is_vision


@hints_of()
def listen(
    model: nn.Module,
    ids_BT: Tensor,
    on_call: OnCall,
    *,
    engine: Engine | None = None,
    expected_layers: Sequence[int | tuple[int, str]] | None = None,
    windows: Mapping[int, int | None] | None = None,
    patches: Sequence[Sequence[int]] = (),
    logits_at: Sequence[int] | None = None,
    gradients: bool = False,
    calls_alone: bool = False,
    computed: bool = True,
    change: Callable[[AttentionCall], Tensor | None] | None = None,
    **inputs: Any,
) -> CaptureReport:
    """Run the model's backbone once over token ids and hand every attention call to `on_call`, one by one.

    ids_BT: (texts, tokens) integer ids; texts of different length are padded on the right, without a mask. engine: who
    computes the layers' attention, under the implementation that it asks for, put back after the pass; without one the
    model runs as it is. expected_layers: layers that must call, with their stack where they have several; ModelError
    names those that did not. windows: of layers whose family builds its mask out of sight. patches: of each
    window of a picture, in the order in which a vision tower reads them: its calls are handed on as one per layer.
    logits_at: positions whose logits are wanted, from the end where negative; the whole model runs then, and makes no
    others where its family can leave them out. gradients: keep what a backward pass needs. calls_alone: the output is
    not needed; the pass ends with the last call, once a whole pass of the model has shown which that is. computed: keep
    of a call outside the interface logits, values and outputs too, which takes one matrix more. change: called
    with every call, its q, k and v and which keys its queries see in `call.spec`, its output in `call.output_BQHV`; the
    model gets what it returns instead of that output, None for the output itself. inputs: further arguments of the
    model's forward: of an encoder-decoder, whose encoder reads the ids, `decoder_input_ids`.
    Returns the report, with the backbone's output; no logits are computed unless asked for.
    Raises UsageError for a model in training mode (its weights would be after dropout), and for positions that are not
    there; ForwardError where the model's own code fails. Other errors, of `on_call` and the engine, are raised as they
    are, and so is that of memory which ran out.

        >>> report = listen(model, ids, lambda call: print(call.layer, call.P.entropy().mean()))
        >>> report.output.last_hidden_state
        >>> listen(model, ids, lambda call: None, logits_at=[-1]).logits     # (texts, 1, vocabulary)
        >>> listen(model, ids, lambda call: None, change=lambda call: 0 * call.output_BQHV if call.layer == 2 else None)
    """
    ends = calls_alone and not hooks_around(model)
    with (
        own_errors(model),
        running(model, engine.implementation if engine else None) as attention,
        listening(
            model,
            on_call,
            engine=changing(engine, change),
            windows=windows,
            patches=patches,
            ends=ends,
            computed=computed,
        ) as report,
        torch.set_grad_enabled(gradients),
        suppress(_LastCallError),
    ):
        report.tokens, beside = ids_BT.shape[1], inputs.keys() - {"decoder_input_ids", *CACHE_ARGUMENTS}
        inputs = {**without_cache(bare_model(model)), **_route(model).extras, **inputs}

        def run(**more: Any) -> None:
            if logits_at is None:
                report.output = run_backbone(model, ids_BT, **inputs, **more)
            else:
                report.output, report.logits = with_logits(bare_model(model), ids_BT, logits_at, {**inputs, **more})

        run()
        if not report.calls and "output_attentions" not in inputs:  # a family may return weights to who asks for them
            with suppress(AttributeError, TypeError, ValueError):  # or fail in its own code for want of any
                run(output_attentions=True)
    report.attention = attention
    for check in report.calls if beside else ():  # patches of a picture see each other, and PaliGemma's whole prompt
        check.back_alone = None
    if calls_alone and report.output is not None:
        _remember_calls(bare_model(model), report)
    _check_all_called(report, expected_layers or ())
    return report


def _check_all_called(report: CaptureReport, expected: Sequence[int | tuple[int, str]]) -> None:
    heard = {(check.layer, check.stack) for check in report.calls}
    missing = [one for one in expected if one not in (heard if isinstance(one, tuple) else report.layers)]
    if missing:
        names = [f"{one[1]} {one[0]}" if isinstance(one, tuple) else str(one) for one in missing]
        raise ModelError(
            f"no attention call in layer{'s' * (len(missing) > 1)} {', '.join(names)}",
            "this model computes its attention where attnscope cannot listen",
        )


@contextmanager
def running(model: nn.Module, implementation: str | None) -> Iterator[str]:
    """The model as it may be run: by one caller at a time, as if no text came before, uncompiled, without gradients.

    Yields the attention implementation that it runs under. Raises UsageError for a model in training mode.
    """
    if model.training:
        raise UsageError("the model is in training mode, where dropout changes the weights", "call model.eval() first")
    with _model_lock(model), _implementation(model, implementation) as attention, torch.no_grad(), _uncompiled():
        config = config_of(model)
        if config is not None and not pads_exactly(config):
            settle_rotary(model)
        yield attention


@contextmanager
def listening(
    model: nn.Module,
    on_call: OnCall,
    *,
    engine: Engine | None = None,
    windows: Mapping[int, int | None] | None = None,
    patches: Sequence[Sequence[int]] = (),
    ends: bool = False,
    computed: bool = True,
) -> Iterator[CaptureReport]:
    """While open, every attention call that this thread makes in `model` is handed to `on_call`.

    For callers who run the model themselves (generation, a custom forward). The report fills as the calls come. With
    `ends` the last call of a pass, where it is known, ends it. computed: see `listen`.
    """
    engine, thread = engine or ENGINES["eager"], threading.get_ident()
    listener = _Listener(bare_model(model), on_call, engine, windows or {})
    listener.tower = InWindows(patches, engine, on_call) if patches else None
    listener.last = _calls_of_pass.get(bare_model(model), 0) if ends else 0
    _install(thread, listener)
    handles = listener.hook_modules(computed)
    try:
        with listener.watch if listener.watches else nullcontext():
            yield listener.report
        settle(listener.report.calls)
    finally:
        _remove(thread, listener)
        for handle in handles:
            handle.remove()


SINKS = ("s_aux", "sinks")  # what families call their sink logits
MASKS_KEPT = 4
GLOBAL_TOKENS = "is_index_global_attn"  # an argument of modules that attend in windows: which tokens see all others

# The dispatcher: one wrapper of AttentionInterface.get_interface for all captures, counted.

_lock = threading.Lock()
_listeners: dict[int, list[_Listener]] = {}
_original: Callable[..., Any] | None = None
_model_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_calls_of_pass: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


class _LastCallError(Exception):
    """What follows of the pass makes an output that nobody wants."""


def _remember_calls(model: nn.Module, report: CaptureReport) -> None:
    """How many calls a pass has, where each layer makes one, and no hooks wait for the end of a module's forward."""
    once = len(set(report.layers)) == len(report.calls)
    if once and not any(map(hooks_of, model.modules())):
        _calls_of_pass[model] = len(report.calls)


def _get_interface(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
    assert _original is not None
    attend = _original(self, name, default)
    stack = _listeners.get(threading.get_ident())
    if not stack:
        return attend

    def dispatched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        listener = next((listener for listener in reversed(stack) if module in listener.paths), None)
        if listener is None:
            return attend(module, *args, **kwargs)
        return listener.from_interface(OwnAttention(attend, module, args, kwargs))

    return dispatched


def _interface() -> Any:
    return needed("transformers.modeling_utils", "AttentionInterface", "get_interface")


def _install(thread: int, listener: _Listener) -> None:
    global _original
    AttentionInterface = _interface()
    with _lock:
        if not _listeners and AttentionInterface.get_interface is not _get_interface:
            _original = AttentionInterface.get_interface
            AttentionInterface.get_interface = _get_interface
        _listeners.setdefault(thread, []).append(listener)


def _remove(thread: int, listener: _Listener) -> None:
    AttentionInterface = _interface()
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
        lock = _model_locks.setdefault(bare_model(model), threading.RLock())
    with lock:
        yield


@contextmanager
def _implementation(model: nn.Module, wanted: str | None) -> Iterator[str]:
    """The model under another of transformers' attention implementations, and afterwards under its own.

    A family that has no sdpa stays as it is; yields the one that it runs under.
    """
    bare = bare_model(model)
    before = getattr(getattr(bare, "config", None), "_attn_implementation", None) or "eager"
    if wanted in (None, before) or not (calls_interface(model) and getattr(bare, f"_supports_{wanted}", True)):
        yield before
        return
    bare.set_attn_implementation(wanted)  # type: ignore[operator]
    try:
        yield str(wanted)
    finally:
        bare.set_attn_implementation(before)  # type: ignore[operator]


class _Listener:
    """Turns raw attention calls of one model into AttentionCalls, and keeps the report."""

    def __init__(self, model: nn.Module, on_call: OnCall, engine: Engine, windows: Mapping[int, int | None]) -> None:
        self.model = model
        self.paths = {module: name for name, module in model.named_modules()}
        self.on_call, self.engine, self.windows = on_call, engine, windows
        self.report = CaptureReport()
        self.tower: InWindows | None = None  # that attends window by window
        self.last = 0  # how many calls end the pass, 0 for none
        self.watch, self.watches = Watch(), False  # whether there is a module to be watched
        self.stacks = Stacks(model, config_of(model))
        self._calls: dict[tuple[str, int], int] = {}
        self._families: dict[nn.Module, Family] = {}
        self._by_interface: set[nn.Module] = set()
        self._visible: dict[Any, tuple[Any, Visibility]] = {}
        self._asked: tuple[Callable[[], Any], ...] = (lambda: None, lambda: None)  # q and k of the last call

    def hook_modules(self, computed: bool) -> list[Any]:
        """Forward hooks on every attention module, for families that never call the interface.

        computed: see `listen`.
        """
        attention = attention_modules(self.model)
        hooks = [module.register_forward_hook(self._from_hook, prepend=True, with_kwargs=True) for module in attention]
        watched = []  # those that ask no interface, as far as is known of their family and file
        for module in attention if computed else ():
            known = self._family(module)
            if known.bypasses_interface or known.returns_weights_when_asked or not knows_interface(type(module)):
                watched.append(module)
        self.watches = bool(watched)
        hooks += [module.register_forward_pre_hook(self.watch.enter) for module in watched]
        return [*self.stacks.hook(attention), *hooks]

    def from_interface(self, own: OwnAttention) -> Any:
        """One call through the attention interface, run by the engine; the layer's matrix is freed on return."""
        if self._family(own.module).merges_cross:
            return own()
        self._by_interface.update(self._around(own.module))
        place, spec = self._place(own.module), self._spec(own)
        if self.tower and is_vision(place.stack):
            output, told = self.tower.run(place, spec, own)
            if told is None:
                return output, None
            check = told
        else:
            output, check = self.engine.run(place, spec, own, self.on_call)
        self._directed(check, spec.visible)
        given = own.given
        asked = (given["query"], given["key"])
        check.repeats = all(before() is now for before, now in zip(self._asked, asked, strict=True))
        self._asked = tuple(map(weakref.ref, asked))
        self._read(check)
        return output, None

    def _directed(self, check: CallCheck, visible: Visibility) -> None:
        """Note which way a call over one text looks, and which it should."""
        if visible.queries == visible.keys and not is_vision(check.stack):
            check.back_alone = self.stacks.back_alone(check.stack)
            check.note(ahead=visible.ahead)

    def _read(self, check: CallCheck) -> None:
        self.report.calls.append(check)
        if len(self.report.calls) == self.last:
            raise _LastCallError

    def _family(self, module: nn.Module) -> Family:
        """What is known of the family of the part of the model that a module stands in."""
        if module not in self._families:
            inner = (part for part in reversed([self.model, *self._around(module)[1:], module]))
            owner = next((part for part in inner if hasattr(part, "config")), None)
            self._families[module] = family_of(owner)
        return self._families[module]

    def _around(self, module: nn.Module) -> list[nn.Module]:
        """The module, and those that it stands in: what they return second may be a bias of positions."""
        names = self.paths[module].split(".")
        return [module, *(self.model.get_submodule(".".join(names[:depth])) for depth in range(1, len(names)))]

    def _spec(self, own: OwnAttention) -> AttentionSpec:
        given = own.given
        q, sinks = given["query"], next((given[name] for name in SINKS if given.get(name) is not None), None)
        if sinks is not None:  # one per head, or one per head and query
            sinks = sinks.reshape(1, -1, 1) if sinks.numel() == q.shape[1] else sinks[..., 0]
        return AttentionSpec(
            q_BHQD=q,
            k_BGKD=given["key"],
            v_BGKV=given["value"],
            scale=q.shape[-1] ** -0.5 if given.get("scaling") is None else given["scaling"],
            visible=self._visibility(own, given),
            softcap=given.get("softcap"),
            bias=given.get("position_bias"),
            sinks=sinks,
            sinks_scale_output=family_of(own.module).sinks_scale_output,
        )

    def _from_hook(self, module: nn.Module, args: Any, given: Mapping[str, Any], output: Any) -> Any:
        for check in self.tower.done(module) if self.tower else ():
            self._read(check)
        known, steps = self._family(module), self.watch.leave(module)
        found = [] if module in self._by_interface else weights_in(output, known)
        if not found:
            return None
        if (self._layer(module), self.stacks.of(module)) in self._without_attention and not _are_rows(found[0]):
            return None  # what a linear layer returns second is its state
        if self.engine.alters:
            raise ModelError(
                "this family attends outside the attention interface, where its output cannot be changed",
                "choose a model whose attention calls the interface",
            )
        if any(one.shape[1] > 1 and one.stride(1) == 0 for one in found if known.layout is None):
            raise ModelError(
                "this family returns the mean of its heads, which does not show the single heads",
                "choose another model",
            )
        two = known.merges_cross and len(found) > 1
        for stack, parts in zip((DECODER, CROSS), [[one] for one in found], strict=True) if two else [(None, found)]:
            self._hooked(self._place(module, stack), parts, steps, given.get(GLOBAL_TOKENS))
        return without(output, found, keep_shape=known.layout is not None)

    def _hooked(
        self, place: CallPlace, found: Sequence[Tensor], steps: Sequence[FunctionCall], global_BT: Tensor | None
    ) -> None:
        """One call whose weights a module returned; global_BT: its tokens that see all others."""
        known = self._family(place.module)
        weights_BHQK, visible = self._positioned(place, found, known, global_BT)
        beside = computed(steps, weights_BHQK)
        P = DenseAttention(weights_BHQK, visible, logits_BHQK=beside.logits_BHQK)
        call = AttentionCall(place, P, None, weights_BHQK, beside.output_BQHV, beside.v_BGKV)
        with full_precision(weights_BHQK.device):
            check = check_call(call, "hook")
            if known.merges_cross:  # each part's rows lack what the other has
                check.note(row_sum_error=None)
            self._directed(check, visible)
            self.on_call(call)
        self._read(check)

    def _positioned(
        self, place: CallPlace, found: Sequence[Tensor], known: Family, global_BT: Tensor | None
    ) -> tuple[Tensor, Visibility]:
        """A module's weights as (B, H, Q, K), and which keys its queries may see."""
        weights, tokens = found[0], self.report.tokens or sys.maxsize
        if type(place.module).__name__ == known.returns_logits:
            weights = weights.softmax(-1)
        if known.layout and is_bidirectional(place.stack):
            in_band = known.layout == "band"
            weights, reach = banded(found, global_BT, tokens) if in_band else whole(weights, known.layout, tokens)
            T, device = weights.shape[-1], weights.device
            global_BT = global_BT if len(found) > 1 else None
            of_window = T, reach, device, global_BT is not None
            return weights, self._shared(
                of_window, None, lambda: Visibility(T, T, near(T, reach, device, global_BT), False, None, device)
            )
        Q, K = weights.shape[-2:]
        causal = self._hides_later(weights, place.stack)
        window = self.windows.get(place.layer) if causal else None
        key = Q, K, causal, window, weights.device
        return weights, self._shared(key, None, lambda: Visibility(Q, K, None, causal, window, weights.device))

    def _hides_later(self, weights: Tensor, stack: str) -> bool:
        """Whether no weight is on a key behind its query's own, where no mask was heard; of one query what is usual.

        Causal attention gives such keys a weight of exactly 0, and no other gives it to all of them.
        """
        Q, K = weights.shape[-2:]
        one_text = is_causal(stack) or is_bidirectional(stack)
        if not one_text or Q != K or Q < 2:
            return is_causal(stack)
        return not bool((weights.amax((0, 1)).triu(1) > 0).any())

    @cached_property
    def _without_attention(self) -> set[tuple[int, str]]:
        """The layers that compute no softmax attention, by what the model's config says."""
        config = config_of(self.model)
        if config is None:
            return set()
        every = geometry_of(config, count=False).every
        return {(one.index, stack) for stack, layers in every.items() for one in layers if not one.attention}

    def _place(self, module: nn.Module, stack: str | None = None) -> CallPlace:
        """The module's layer, and which call of that layer this is; stack: of the call, where the module makes two."""
        stack = stack or self.stacks.of(module)
        layer = sum(one == stack for one, _ in self._calls) if self._family(module).by_order else self._layer(module)
        self._calls[stack, layer] = self._calls.get((stack, layer), -1) + 1
        return CallPlace(layer, self._calls[stack, layer], self.paths[module], module, stack)

    def _visibility(self, own: OwnAttention, given: Mapping[str, Any]) -> Visibility:
        """One Visibility per mask: layers that share a mask share its counts.

        Without a mask the model hides later keys by `is_causal`, which the call hands on or the module has. Its eager
        attention asks neither, and then hides nothing.
        """
        Q, K, mask = given["query"].shape[2], given["key"].shape[2], given.get("attention_mask")
        if isinstance(mask, Tensor):
            return self._shared(id(mask), mask, lambda: _of_mask(Q, K, mask, given.get("sliding_window")))
        causal, stack = given.get("is_causal"), self.stacks.of(own.module)
        causal = getattr(own.module, "is_causal", is_causal(stack)) if causal is None else causal
        eager = getattr(own.attend, "__name__", "").startswith("eager")
        causal = bool(causal) and not is_cross(stack) and not eager
        device = given["query"].device
        return self._shared((Q, K, causal, device), None, lambda: Visibility(Q, K, None, causal, None, device))

    def _shared(self, key: Any, mask: Any, make: Callable[[], Visibility]) -> Visibility:
        if key not in self._visible:
            while len(self._visible) >= MASKS_KEPT:  # a model that builds a mask per layer must not pile them up
                del self._visible[next(iter(self._visible))]
            self._visible[key] = (mask, make())  # holding the mask keeps its id its own
        return self._visible[key][1]

    def _layer(self, module: nn.Module) -> int:
        return layer_of(module, self.paths[module])


def _are_rows(weights: Tensor) -> bool:
    """Whether a tensor holds rows of weights, not less than 0 and with a sum of 1, as a state has none."""
    sums = weights.float().sum(-1)
    allowed, _ = tolerance(weights.dtype)
    return bool((weights >= 0).all()) and bool(((sums - 1).abs() <= allowed).all())


def _of_mask(Q: int, K: int, mask: Tensor, window: Any) -> Visibility:
    """What a mask shows; on a device without it, where its window or its order say the same: kernels read none then."""
    visible = Visibility(Q, K, _one(mask)[..., :K], device=mask.device)
    if mask.device.type == "cpu":
        return visible
    return by_place(visible, [*([window] if isinstance(window, int) and window > 0 else []), None])


def _one(mask: Tensor) -> Tensor:
    """The mask of one text where all have the same; a look at a device's would make the host wait for it."""
    same = len(mask) > 1 and mask.device.type == "cpu" and torch.equal(mask[1:], mask[:-1])
    return mask[:1] if same else mask


def calls_interface(model: nn.Module) -> bool:
    """Whether the model's attention modules call the interface, where q and k are seen."""
    return _route(model).interface


def _route(model: nn.Module) -> Route:
    return route_of(bare_model(model), lambda extras: _heard(model, extras))


def _heard(model: nn.Module, extras: Mapping[str, Any]) -> set[str]:
    """The routes by which the attention calls of a pass over two tokens came."""
    ids_BT = torch.zeros(1, 2, dtype=torch.long, device=device_of(bare_model(model)))
    with _model_lock(model), torch.no_grad(), _uncompiled(), listening(model, lambda call: None) as report:
        run_backbone(model, ids_BT, **without_cache(bare_model(model)), **extras)
    return {check.route for check in report.calls}


def _uncompiled() -> AbstractContextManager[None]:
    """A compiled model calls no interface; run it uncompiled for the time of the capture."""
    if "torch._dynamo" not in sys.modules:  # nothing can be compiled then, and importing it takes seconds
        return nullcontext()
    return _forced_eager()


_forced_eager = ProcessWide(lambda: torch.compiler.set_stance("force_eager"))
