"""Listen to a model's own attention while it runs one forward pass, and leave no trace.

Nearly every family of transformers 5 asks `AttentionInterface.get_interface` for its attention function inside
`forward`. While a capture is open that one method is wrapped: an engine runs the call (by default the model's own
function, as it would), shows it to the listener as an operator, and its matrix is dropped before the next layer runs.
Families that bypass the interface are read through forward hooks on their attention modules, and their logits and
values off what these modules compute meanwhile (`hooks/families.py`). Nothing of the model is patched.

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
from attnscope.attention.spec import AttentionSpec, Visibility, by_place
from attnscope.attention.tiling import TiledAttention
from attnscope.errors import ModelError, UsageError, hints_of
from attnscope.hooks import families, forward
from attnscope.hooks.calls import AttentionCall, CallSite, OriginalAttention, check_call
from attnscope.hooks.engines import ENGINES, Engine, OnCall, full_precision, with_change
from attnscope.hooks.families import ModuleStacks, Route, Watch
from attnscope.hooks.mixers import mixing
from attnscope.hooks.report import CallCheck, CaptureReport, settle, tolerance
from attnscope.hooks.windows import WindowedTower
from attnscope.model.families import Family, family_of
from attnscope.model.geometry import geometry_of
from attnscope.model.libraries import ProcessWide, knows_interface, needed
from attnscope.model.loaded import device_of, hooks_of, pads_exactly, settle_rotary
from attnscope.model.modules import CACHE_ARGUMENTS
from attnscope.model.selection import CROSS, DECODER, is_bidirectional, is_causal, is_cross, is_vision
from attnscope.model.tasks import layer_of


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
    mixers: bool = False,
    change: Callable[[AttentionCall], Tensor | None] | None = None,
    **inputs: Any,
) -> CaptureReport:
    """Run the model's backbone once over token ids and hand every attention call to `on_call`, one by one.

    ids_BT: (texts, tokens) integer ids; texts of different length are padded on the right, without a mask. engine: who
    computes the layers' attention, under the implementation that it asks for, put back after the pass; without one the
    model runs as it is. expected_layers: layers that must call, with their stack where they have several; ModelError
    names those that did not; with () a pass without calls is not run once more, with the weights asked for. windows:
    of layers whose family builds its mask out of sight. patches: of each window of a picture, in the order in which a
    vision tower reads them: its calls are handed on as one per layer. logits_at: positions to make logits of, from the
    end where negative; the whole model runs then, and makes no others where its family can leave them out. gradients:
    keep what a backward pass needs. calls_alone: the output is not needed; the pass ends with the last call, once a
    whole pass of the model has shown which that is. computed: keep of a call outside the interface logits, values and
    outputs too, which takes one matrix more. mixers: hand on the calls of linear layers too, of stack `linear`; the
    pass then runs to its end. change: called with every call that is handed on, its q, k and v and which keys its
    queries see in `call.spec`, its output in `call.output_BQHV`; the model gets what it returns instead of that
    output, None for the output itself. inputs: further arguments of the model's forward: of an encoder-decoder, whose
    encoder reads the ids, `decoder_input_ids`.
    Returns the report, with the backbone's output; no logits are computed unless asked for.
    Raises UsageError for a model in training mode (its weights would be after dropout), and for positions that are not
    there; ForwardError where the model's own code fails. Other errors, of `on_call` and the engine, are raised as they
    are, and so is that of memory which ran out.

        >>> report = listen(model, ids, lambda call: print(call.layer, call.P.entropy().mean()))
        >>> report.output.last_hidden_state
        >>> listen(model, ids, lambda call: None, logits_at=[-1]).logits     # (texts, 1, vocabulary)
        >>> listen(model, ids, lambda call: None, change=lambda call: 0 * call.output_BQHV if call.layer == 2 else None)
    """
    engine = with_change(engine, change)
    bare, ends = forward.bare_model(model), calls_alone and not mixers and not forward.hooks_around(model)
    with (
        forward.own_errors(model),
        running(model, engine.implementation if engine else None) as attention,
        listening(
            model, on_call, engine=engine, windows=windows, patches=patches, ends=ends, computed=computed
        ) as report,
        mixing(model, on_call, report, engine) if mixers else nullcontext(),
        torch.set_grad_enabled(gradients),
        suppress(_LastCallError),
    ):
        report.tokens, further = ids_BT.shape[1], inputs.keys() - {"decoder_input_ids", *CACHE_ARGUMENTS}
        inputs = {**forward.without_cache(bare), **_route(model).extras, **inputs}

        def run(**more: Any) -> None:
            if logits_at is None:
                report.output = forward.run_backbone(model, ids_BT, **inputs, **more)
            else:
                report.output, report.logits = forward.with_logits(bare, ids_BT, logits_at, {**inputs, **more})

        run()
        # A family may return weights to who asks for them.
        if not report.calls and expected_layers != () and "output_attentions" not in inputs:
            with suppress(AttributeError, TypeError, ValueError):  # or fail in its own code for want of any
                run(output_attentions=True)
    report.attention = attention

    # Patches of a picture see each other, and so does PaliGemma's whole prompt: which way these look is not known.
    for check in report.calls if further else ():
        check.back_alone = None

    # A later pass may end with its last call, where each layer makes one and no hook waits for the end of a forward.
    once = len(set(report.layers)) == len(report.calls)
    if calls_alone and not mixers and report.output is not None and once and not any(map(hooks_of, bare.modules())):
        _calls_of_pass[bare] = len(report.calls)

    # A layer that was not heard would be missing from every number, silently.
    called = {(check.layer, check.stack) for check in report.calls}
    missing = [at for at in expected_layers or () if at not in (called if isinstance(at, tuple) else report.layers)]
    if missing:
        names = [f"{at[1]} {at[0]}" if isinstance(at, tuple) else str(at) for at in missing]
        raise ModelError(
            f"no attention call in layer{'s' * (len(missing) > 1)} {', '.join(names)}",
            "this model computes its attention where attnscope cannot listen",
        )
    return report


@contextmanager
def running(model: nn.Module, implementation: str | None) -> Iterator[str]:
    """The model as it may be run: by one caller at a time, as if this were its first text, uncompiled, no gradients.

    Yields the attention implementation that it runs under. Raises UsageError for a model in training mode.
    """
    if model.training:
        raise UsageError("the model is in training mode, where dropout changes the weights", "call model.eval() first")
    bare: Any = forward.bare_model(model)
    with _model_lock(model), torch.no_grad(), uncompiled():
        before, now = implementation_of(model), implementation_of(model, implementation)
        if now != before:
            bare.set_attn_implementation(now)
        try:
            config = forward.config_of(model)
            if config is not None and not pads_exactly(config):
                settle_rotary(model)
            yield now
        finally:
            if now != before:
                bare.set_attn_implementation(before)


def implementation_of(model: nn.Module, wanted: str | None = None) -> str:
    """transformers' attention that a model runs under: the wanted, or the one that it has where its family lacks it.

    >>> implementation_of(model, "sdpa")
    'sdpa'
    """
    bare = forward.bare_model(model)
    before = getattr(getattr(bare, "config", None), "_attn_implementation", None) or "eager"
    if wanted is None or wanted == before or not calls_interface(model):
        return before
    return wanted if getattr(bare, f"_supports_{wanted}", True) else before


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
    engine = engine or ENGINES["eager"]
    listener = _Listener(forward.bare_model(model), on_call, engine, windows or {})
    listener.tower = WindowedTower(patches, engine, on_call) if patches else None
    listener.last = _calls_of_pass.get(forward.bare_model(model), 0) if ends else 0
    with _dispatching(listener), forward.temporary(listener.hook_modules(computed)):
        # A watch slows every function of torch: it is open only where a module asks no interface.
        with listener.watch if listener.watches else nullcontext():
            yield listener.report
        # Numbers that are still on a device are read in one copy, when all calls have been heard.
        settle(listener.report.calls)


@contextmanager
def overhearing(
    model: nn.Module, on_call: OnCall, windows: Mapping[int, int | None] | None = None
) -> Iterator[Callable[[], None]]:
    """While open, every attention call that this thread makes in `model` is shown to `on_call`, and nothing is changed.

    The model gets all that its own attention returns, weights too, under whichever implementation it runs. Listeners
    around this one that overhear as well are shown the same calls. A compiled model runs uncompiled meanwhile. Yields
    what to call when a forward begins: its layers are counted from there. windows: see `listen`.

        >>> with overhearing(model, lambda call: print(call.layer)) as begin:
        ...     model.generate(ids)
    """
    bare = forward.bare_model(model)
    listener = _Listener(bare, on_call, ENGINES["eager"], windows or {})
    listener.overhears = True
    compiles = bare is not model or device_of(bare).type != "cpu"  # `generate` compiles by itself on a device
    mode = _forced_eager() if compiles else uncompiled()
    if bare is model and "flex" in (getattr(getattr(bare, "config", None), "_attn_implementation", None) or ""):
        mode = nullcontext()  # its kernel is compiled code, which calls of the interface are around
    with mode, _dispatching(listener), forward.temporary(listener.hook_modules(False)):
        yield listener.calls.clear  # its layers are counted from there


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
    """What follows of the pass makes an output that is not needed."""


def _get_interface(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
    assert _original is not None
    attend = _original(self, name, default)
    stack = _listeners.get(threading.get_ident())
    if not stack:
        return attend

    def dispatched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        listeners = [listener for listener in reversed(stack) if module in listener.paths]
        if not listeners:
            return attend(module, *args, **kwargs)
        original = OriginalAttention(attend, module, args, kwargs, name or "")
        if listeners[0].overhears:  # and so do those around it
            return listeners[0].overhear(original, [other.on_call for other in listeners if other.overhears])
        return listeners[0].from_interface(original)

    return dispatched


@contextmanager
def _dispatching(listener: _Listener) -> Iterator[None]:
    """While open, the listener hears the calls of this thread; the method is put back when the last one closes."""
    global _original
    thread = threading.get_ident()  # a generator may be closed in another one
    AttentionInterface = needed("transformers.modeling_utils", "AttentionInterface", "get_interface")
    with _lock:
        if not _listeners and AttentionInterface.get_interface is not _get_interface:
            _original = AttentionInterface.get_interface
            AttentionInterface.get_interface = _get_interface
        _listeners.setdefault(thread, []).append(listener)
    try:
        yield
    finally:
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
        lock = _model_locks.setdefault(forward.bare_model(model), threading.RLock())
    with lock:
        yield


class _Listener:
    """Turns raw attention calls of one model into AttentionCalls, and keeps the report."""

    def __init__(self, model: nn.Module, on_call: OnCall, engine: Engine, windows: Mapping[int, int | None]) -> None:
        self.model = model
        self.parts = dict(model.named_modules())
        self.paths = {module: name for name, module in self.parts.items()}
        self.on_call, self.engine, self.windows = on_call, engine, windows
        self.report = CaptureReport()
        self.tower: WindowedTower | None = None  # that attends window by window
        self.last = 0  # how many calls end the pass, 0 for none
        self.overhears, self.thread = False, threading.get_ident()
        self._last_weights: Callable[[], Any] = lambda: None  # that a module returned, where alive
        self.watch, self.watches = Watch(), False  # whether there is a module to be watched
        self.stacks = ModuleStacks(model, forward.config_of(model))
        self.calls: dict[tuple[str, int], int] = {}
        self._families: dict[nn.Module, Family] = {}
        self._around: dict[nn.Module, list[nn.Module]] = {}
        self._by_interface: set[nn.Module] = set()
        self._visible: dict[Any, tuple[Any, Visibility]] = {}
        self._last_qk: tuple[Callable[[], Any], ...] = (lambda: None, lambda: None)  # of the last call, where alive

    def hook_modules(self, computed: bool) -> list[Any]:
        """Forward hooks on every attention module, for families that never call the interface.

        computed: see `listen`.
        """
        attention = [*filter(forward.named_attention, self.paths)]
        hooks = [module.register_forward_hook(self._from_hook, prepend=True, with_kwargs=True) for module in attention]
        watched = []  # those that ask no interface, as far as is known of their family and file
        for module in attention if computed else ():
            family = self._family(module)
            if family.bypasses_interface or family.returns_weights_when_asked or not knows_interface(type(module)):
                watched.append(module)
        self.watches = bool(watched)
        hooks += [module.register_forward_pre_hook(self.watch.enter) for module in watched]
        return [*self.stacks.hook(attention), *hooks]

    def overhear(self, original: OriginalAttention, shown: Sequence[OnCall]) -> Any:
        """What the model's own attention returns, after the call was shown."""
        returned = original.attend(original.module, *original.args, **original.kwargs)
        if not self._family(original.module).merges_cross:
            place, spec = self._placed(original)
            call = AttentionCall(place, TiledAttention(spec), spec, None, returned[0])
            for on_call in shown:
                on_call(call)
        return returned

    def _placed(self, original: OriginalAttention) -> tuple[CallSite, AttentionSpec]:
        """Which call this is, and what it computes."""
        if original.module not in self._by_interface:
            self._by_interface.update(self._enclosing(original.module))
        place, arguments = self._site(original.module), original.arguments
        q = arguments["query"]
        sinks = next((arguments[name] for name in SINKS if arguments.get(name) is not None), None)
        if sinks is not None:  # one per head, or one per head and query
            sinks = sinks.reshape(1, -1, 1) if sinks.numel() == q.shape[1] else sinks[..., 0]
        return place, AttentionSpec(
            q_BHQD=q,
            k_BGKD=arguments["key"],
            v_BGKV=arguments["value"],
            scale=q.shape[-1] ** -0.5 if arguments.get("scaling") is None else arguments["scaling"],
            visible=self._visibility(original, arguments),
            softcap=arguments.get("softcap"),
            bias=arguments.get("position_bias"),
            sinks=sinks,
            sinks_scale_output=self._family(original.module).sinks_scale_output,
        )

    def from_interface(self, original: OriginalAttention) -> Any:
        """One call through the attention interface, run by the engine; the layer's matrix is freed on return."""
        if self._family(original.module).merges_cross:
            return original()
        place, spec = self._placed(original)
        if self.tower and is_vision(place.stack):
            output, check = self.tower.run(place, spec, original)
            if check is None:  # one of several windows: reported when the module is done
                return output, None
        else:
            output, check = self.engine.run(place, spec, original, self.on_call)
        self._note_direction(check, spec.visible)
        # A family that attends twice with the same weights hands on the same q and k, over other values.
        qk = (spec.q_BHQD, spec.k_BGKD)
        check.repeats = all(before() is now for before, now in zip(self._last_qk, qk, strict=True))
        self._last_qk = tuple(map(weakref.ref, qk))
        self._report(check)
        return output, None

    def _note_direction(self, check: CallCheck, visible: Visibility) -> None:
        """Note which way a call over one text looks, and which it should."""
        if visible.queries == visible.keys and not is_vision(check.stack):
            check.back_alone = self.stacks.back_alone(check.stack)
            check.note(ahead=visible.ahead)

    def _report(self, check: CallCheck) -> None:
        self.report.calls.append(check)
        if len(self.report.calls) == self.last:
            raise _LastCallError

    def _family(self, module: nn.Module) -> Family:
        """What is known of the family of the part of the model that a module is in."""
        if module not in self._families:
            inner = (part for part in reversed([self.model, *self._enclosing(module)[1:], module]))
            owner = next((part for part in inner if hasattr(part, "config")), None)
            self._families[module] = family_of(owner)
        return self._families[module]

    def _enclosing(self, module: nn.Module) -> list[nn.Module]:
        """The module, and those that it is in: what they return second may be a bias of positions."""
        if module not in self._around:
            names = self.paths[module].split(".")
            self._around[module] = [module, *(self.parts[".".join(names[:depth])] for depth in range(1, len(names)))]
        return self._around[module]

    def _from_hook(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
        if threading.get_ident() != self.thread:
            return None
        for check in self.tower.done(module) if self.tower else ():
            self._report(check)
        family, steps = self._family(module), self.watch.leave(module)
        matrices = [] if module in self._by_interface else families.weights_in(output, family)
        if not matrices:
            return None

        # What a linear layer returns second is its state, which does not have rows of weights.
        if (layer_of(module, self.paths[module]), self.stacks.of(module)) in self._without_attention:
            sums, (allowed, _) = matrices[0].float().sum(-1), tolerance(matrices[0].dtype)
            if bool((matrices[0] < 0).any()) or not bool(((sums - 1).abs() <= allowed).all()):
                return None

        # What cannot be changed or told apart is refused, instead of numbers that are of something else.
        if self.overhears and self._last_weights() is matrices[0]:  # handed on by the module around
            return None
        self._last_weights = weakref.ref(matrices[0])
        mean_of_heads = any(matrix.shape[1] > 1 and matrix.stride(1) == 0 for matrix in matrices)
        if self.overhears and mean_of_heads and family.layout is None:
            return None
        if self.engine.alters:
            raise ModelError(
                "this family attends outside the attention interface, where its output cannot be changed",
                "choose a model whose attention calls the interface",
            )
        if mean_of_heads and family.layout is None:
            raise ModelError(
                "this family returns the mean of its heads, which does not show the single heads",
                "choose another model",
            )

        # One module may attend to its own text and to the encoder's states: these are calls of two stacks.
        by_stack: list[tuple[str | None, list[Tensor]]] = [(None, matrices)]
        if family.merges_cross and len(matrices) > 1:
            by_stack = [(stack, [matrix]) for stack, matrix in zip((DECODER, CROSS), matrices, strict=True)]
        for stack, own in by_stack:
            place = self._site(module, stack)
            weights_BHQK, visible = self._weights_and_visibility(place, own, family, kwargs.get(GLOBAL_TOKENS))
            inside = families.computed(steps, weights_BHQK)
            P = DenseAttention(weights_BHQK, visible, logits_BHQK=inside.logits_BHQK)
            call = AttentionCall(place, P, None, weights_BHQK, inside.output_BQHV, inside.v_BGKV)
            if self.overhears:
                self.on_call(call)
                continue
            with full_precision(weights_BHQK.device):
                check = check_call(call, "hook")
                if family.merges_cross:  # each part's rows lack what the other has
                    check.note(row_sum_error=None)
                self._note_direction(check, visible)
                self.on_call(call)
            self._report(check)
        if self.overhears:
            return None
        return families.strip_weights(output, matrices, keep_shape=family.layout is not None)

    def _weights_and_visibility(
        self, place: CallSite, matrices: Sequence[Tensor], family: Family, global_BT: Tensor | None
    ) -> tuple[Tensor, Visibility]:
        """A module's weights as (B, H, Q, K), and which keys its queries may see; global_BT: which all others see."""
        weights, stack, tokens = matrices[0], place.stack, self.report.tokens or sys.maxsize
        if type(place.module).__name__ == family.returns_logits:
            weights = weights.softmax(-1)

        # Windows and blocks have places of their own, and are padded beyond the text.
        if family.layout and is_bidirectional(stack):
            weights, reach = families.unpack_layout([weights, *matrices[1:]], family.layout, tokens, global_BT)
            T, device = weights.shape[-1], weights.device
            global_BT = global_BT if len(matrices) > 1 else None

            def in_window() -> Visibility:
                return Visibility(T, T, families.near(T, reach, device, global_BT), False, None, device)

            return weights, self._cached((T, reach, device, global_BT is not None), None, in_window)

        # No mask was seen: causal attention alone gives all keys after a query's own a weight of exactly 0. One query
        # does not show that, nor do keys that are another text's.
        Q, K = weights.shape[-2:]
        causal = is_causal(stack)
        if Q == K >= 2 and (causal or is_bidirectional(stack)):
            causal = not bool((weights.amax((0, 1)).triu(1) > 0).any())
        window = self.windows.get(place.layer) if causal else None
        key = Q, K, causal, window, weights.device
        return weights, self._cached(key, None, lambda: Visibility(Q, K, None, causal, window, weights.device))

    @cached_property
    def _without_attention(self) -> set[tuple[int, str]]:
        """The layers that compute no softmax attention, by what the model's config says."""
        config = forward.config_of(self.model)
        if config is None:
            return set()
        every = geometry_of(config, count=False).every
        return {(layer.index, stack) for stack, layers in every.items() for layer in layers if not layer.attention}

    def _site(self, module: nn.Module, stack: str | None = None) -> CallSite:
        """The module's layer, and which call of that layer this is; stack: of the call, where the module makes two."""
        stack = stack or self.stacks.of(module)
        layer = layer_of(module, self.paths[module])
        if self._family(module).by_order:
            layer = sum(called == stack for called, _ in self.calls)
        self.calls[stack, layer] = self.calls.get((stack, layer), -1) + 1
        return CallSite(layer, self.calls[stack, layer], self.paths[module], module, stack)

    def _visibility(self, original: OriginalAttention, arguments: Mapping[str, Any]) -> Visibility:
        """One Visibility per mask: layers that share a mask share its counts.

        Without a mask the model hides later keys by `is_causal`, which the call hands on or the module has. Its eager
        attention asks neither, and then hides nothing.
        """
        Q, K, mask = arguments["query"].shape[2], arguments["key"].shape[2], arguments.get("attention_mask")
        window, device = arguments.get("sliding_window"), arguments["query"].device
        if rule := getattr(mask, "mask_mod", None):  # flex is given a rule
            from torch.nn.attention.flex_attention import create_mask

            def from_rule() -> Visibility:
                texts, heads = arguments["attention_mask"].shape[:2]
                return Visibility(Q, K, create_mask(rule, texts, heads, Q, K, device), device=device)

            return self._cached(id(mask), mask, from_rule)
        if isinstance(mask, Tensor):
            # The mask of one text where all have the same; on a device none, where its window or its order say the
            # same, since kernels read none then. To compare a device's masks of several texts its host would wait.
            def make() -> Visibility:
                if mask.device.type != "cpu":
                    visible = Visibility(Q, K, mask[..., :K], device=mask.device)
                    return by_place(visible, [*([window] if isinstance(window, int) and window > 0 else []), None])
                same = len(mask) > 1 and torch.equal(mask[1:], mask[:-1])
                return Visibility(Q, K, (mask[:1] if same else mask)[..., :K], device=mask.device)

            return self._cached(id(mask), mask, make)
        causal, stack = arguments.get("is_causal"), self.stacks.of(original.module)
        causal = getattr(original.module, "is_causal", is_causal(stack)) if causal is None else causal
        eager = getattr(original.attend, "__name__", "").startswith("eager")
        causal = bool(causal) and not is_cross(stack) and not eager
        # Eager and sdpa are given windows in their masks; others read the argument, and which tokens are none.
        reads = causal and original.implementation not in ("", "eager", "sdpa")
        width = window if reads and isinstance(window, int) and 0 < window < K else None
        if isinstance(mask, Tensor):

            def without_padding() -> Visibility:
                seen = Visibility(Q, K, None, causal, width, device).rows(0, Q) & mask[:, None, None, :K].bool()
                return Visibility(Q, K, seen, device=device)

            return self._cached((id(mask), causal, width), mask, without_padding)
        return self._cached((Q, K, causal, width, device), None, lambda: Visibility(Q, K, None, causal, width, device))

    def _cached(self, key: Any, mask: Any, make: Callable[[], Visibility]) -> Visibility:
        if key not in self._visible:
            while len(self._visible) >= MASKS_KEPT:  # a model that builds a mask per layer must not pile them up
                del self._visible[next(iter(self._visible))]
            self._visible[key] = (mask, make())  # holding the mask keeps its id its own
        return self._visible[key][1]


def calls_interface(model: nn.Module) -> bool:
    """Whether the model's attention modules call the interface, where q and k are seen."""
    return _route(model).interface


def _route(model: nn.Module) -> Route:
    bare = forward.bare_model(model)

    def routes(extras: Mapping[str, Any]) -> set[str]:
        """The routes by which the attention calls of a pass over two tokens are heard."""
        ids_BT = torch.zeros(1, 2, dtype=torch.long, device=device_of(bare))
        with _model_lock(model), torch.no_grad(), uncompiled(), listening(model, lambda call: None) as report:
            forward.run_backbone(model, ids_BT, **forward.without_cache(bare), **extras)
        return {check.route for check in report.calls}

    return families.route_of(bare, routes)


def uncompiled() -> AbstractContextManager[None]:
    """A compiled model calls no interface; run it uncompiled for the time of the capture."""
    if "torch._dynamo" not in sys.modules:  # nothing can be compiled then, and importing it takes seconds
        return nullcontext()
    return _forced_eager()


_forced_eager = ProcessWide(lambda: torch.compiler.set_stance("force_eager"))
