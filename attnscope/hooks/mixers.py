"""Hear the rule of each linear layer while a model runs, and make a map of it.

A modelling file of transformers has the rule of its linear layers as a function: the gated delta rule, Kimi's delta
attention, Mamba-2's scan. While a capture is open that name of the file is a wrapper. It calls the model's own function
as it would be called, and hands it on with its arguments. The last who closes puts the name back.

Shapes: B text, T token, H head, G key head, V width of a value, D width of the state on the key's side.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attnscope.attention.linear import LinearMap, LinearRule
from attnscope.hooks import forward
from attnscope.hooks.calls import AttentionCall, CallSite, check_call, sampled
from attnscope.hooks.engines import OnCall, full_precision
from attnscope.hooks.report import CaptureReport
from attnscope.model.selection import LINEAR
from attnscope.model.tasks import layer_of, rules_of

RULE = "rule"  # the route of a call of a linear layer
Arguments = Mapping[str, Any]
Own = Callable[..., Any]


def delta_rule(own: Own, arguments: Arguments) -> LinearRule:
    """The gated delta rule; with a decay for each channel of the key, Kimi's delta attention.

    Source: Yang et al. 2024, Gated Delta Networks, arXiv 2412.06464; Kimi Team 2025, Kimi Linear, arXiv 2510.26692.
    """
    tokens = {name: arguments[name].float() for name in ("query", "key", "g", "beta")}
    given = ("value", "initial_state", "output_final_state", *tokens)
    fixed = {name: value for name, value in arguments.items() if name not in given}

    def apply(tokens: Mapping[str, Tensor], values_BTHV: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return own(**tokens, value=values_BTHV.float(), initial_state=state, output_final_state=True, **fixed)

    decay = tokens["g"].exp()
    return LinearRule(
        "gated delta rule" if decay.ndim == 3 else "Kimi delta attention",
        tokens,
        apply,
        arguments["value"],
        arguments["key"].shape[-1],
        decay_BTH=decay if decay.ndim == 3 else decay.mean(-1),
        write_BTH=tokens["beta"],
    )


def mamba2_scan(own: Own, arguments: Arguments) -> LinearRule:
    """Mamba-2's scan: what skips the state, D, is on the map's diagonal.

    Source: Dao & Gu 2024, Transformers are SSMs, arXiv 2405.21060.
    """
    tokens = {name: arguments[name].float() for name in ("dt", "B", "C")}
    given = ("hidden_states", "initial_states", "return_final_states", "z", "kwargs", *tokens)
    fixed = {name: value for name, value in arguments.items() if name not in given}

    def apply(tokens: Mapping[str, Tensor], values_BTHV: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        before = None if state is None else state.mT  # its state is values by keys
        output, after = own(values_BTHV.float(), **tokens, initial_states=before, return_final_states=True, **fixed)
        return output, after.mT

    step = tokens["dt"]
    if fixed.get("dt_bias") is not None:
        step = step + fixed["dt_bias"].float()
    if fixed.get("dt_softplus"):
        step = nn.functional.softplus(step)
    step = step.clamp(*fixed.get("dt_limit", (0.0, float("inf"))))
    return LinearRule(
        "Mamba-2",
        tokens,
        apply,
        arguments["hidden_states"],
        arguments["B"].shape[-1],
        decay_BTH=(fixed["A"].float() * step).exp(),
        write_BTH=step,
        chunk=fixed["chunk_size"],
    )


# How a rule is made of a call's arguments, by its form in `model.tasks.RULES`, and where its first state is.
FORMS: Mapping[str, tuple[Callable[[Own, Arguments], LinearRule], str]] = {
    "delta": (delta_rule, "initial_state"),
    "mamba2": (mamba2_scan, "initial_states"),
}


@contextmanager
def mixing(model: nn.Module, on_call: OnCall, report: CaptureReport) -> Iterator[None]:
    """While open, every linear layer that this thread runs in a model is handed to `on_call`, and its check is kept."""
    listener = _Listener(forward.bare_model(model), on_call, report)
    thread = threading.get_ident()
    with _lock:
        for module in listener.paths:
            for name in rules_of(module):
                _install(sys.modules[type(module).__module__], name)
        _listeners.setdefault(thread, []).append(listener)
    try:
        with forward.temporary(listener.hooks()):
            yield
    finally:
        with _lock:
            _listeners[thread].remove(listener)
            if not _listeners[thread]:
                del _listeners[thread]
            if not _listeners:
                _restore()


_lock = threading.Lock()
_listeners: dict[int, list[_Listener]] = {}
_wrapped: dict[tuple[Any, str], tuple[Own, Own]] = {}  # a file and a name in it: its own function, and ours


def _install(home: Any, name: str) -> None:
    if (home, name) in _wrapped:
        return
    own = getattr(home, name)

    def heard(*args: Any, **kwargs: Any) -> Any:
        listeners = _listeners.get(threading.get_ident())
        if not listeners or not listeners[-1].inside:
            return own(*args, **kwargs)
        returned = own(*args, **kwargs)
        listeners[-1].hear(name, own, args, kwargs, returned)
        return returned

    _wrapped[home, name] = own, heard
    setattr(home, name, heard)


def _restore() -> None:
    for (home, name), (own, ours) in _wrapped.items():
        if getattr(home, name) is ours:
            setattr(home, name, own)
    _wrapped.clear()


class _Listener:
    """Turns calls of rules into AttentionCalls. inside: the modules with a rule that run, innermost last."""

    def __init__(self, model: nn.Module, on_call: OnCall, report: CaptureReport) -> None:
        self.paths = {module: path for path, module in model.named_modules() if rules_of(module)}
        self.on_call, self.report = on_call, report
        self.inside: list[nn.Module] = []
        self.calls: dict[int, int] = {}

    def hooks(self) -> list[Any]:
        """Hooks that know which module runs."""
        enter = (module.register_forward_pre_hook(self._enter) for module in self.paths)
        leave = (module.register_forward_hook(self._leave, always_call=True) for module in self.paths)
        return [*enter, *leave]

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.inside.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.inside and self.inside[-1] is module:
            self.inside.pop()

    def hear(self, name: str, own: Own, args: tuple[Any, ...], kwargs: Arguments, returned: Any) -> None:
        """One call of a rule."""
        module = self.inside[-1]
        form = rules_of(module).get(name)
        if form is None:
            return
        make, first_state = FORMS[form]
        bound = inspect.signature(own).bind(*args, **kwargs)
        arguments = dict(bound.arguments)
        arguments |= arguments.pop("kwargs", {})
        if arguments.get(first_state) is not None:  # what a cache holds is no token of this text
            return
        with torch.no_grad(), full_precision(arguments[next(iter(arguments))].device):
            rule = make(own, arguments)
            output_BTHV = returned[0] if isinstance(returned, tuple) else returned
            layer = layer_of(module, self.paths[module])
            self.calls[layer] = self.calls.get(layer, -1) + 1
            place = CallSite(layer, self.calls[layer], self.paths[module], module, LINEAR)
            values_BHTV = rule.values_BTHV.transpose(1, 2)
            call = AttentionCall(place, LinearMap(rule), None, None, output_BTHV, values_BHTV, kernel=rule.name)
            check = check_call(call, RULE)
            check.kernel = rule.name
            check.note(masked_weight=_future(call))
            self.report.calls.append(check)
            self.on_call(call)


def _future(call: AttentionCall) -> Tensor:
    """The largest weight on a token after the query, over some rows: 0 in a rule that knows no later token."""
    runs = sampled(call.visible, 16, call.P.device).runs
    return torch.stack([(call.P.rows(a, b).abs() * ~call.visible.rows(a, b)).max() for a, b in runs]).max()
