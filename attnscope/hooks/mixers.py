"""Hear the rule of each linear layer while a model runs, and make a map of it.

A modelling file of transformers has the rule of its linear layers as a function, or as a method of a module: the gated
delta rule, Kimi's delta attention, Mamba-2's scan. While a capture is open that name is a wrapper. It calls the model's
own function as it would be called, and hands it on with its arguments. The last who closes puts the name back.

A rule that a module spells out in its forward is heard from the modules inside it.

Shapes: B text, T token, H head, G key head, V width of a value, D width of the state on the key's side, C channel,
N states of a channel, W taps.
"""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from attnscope.attention.channels import ChannelMap, ChannelRule, FadingMean, Joined, Recurrence, ShortConvolution
from attnscope.attention.linear import LinearMap, LinearRule
from attnscope.hooks import forward
from attnscope.hooks.calls import REPEATED_ROWS, AttentionCall, CallSite, check_call, relative_error, sampled
from attnscope.hooks.engines import ENGINES, Engine, OnCall, full_precision, unmeasured
from attnscope.hooks.report import CallCheck, CaptureReport
from attnscope.model.tasks import PARTS, homes_of, layer_of, mixers_of, rules_of

RULE = "rule"  # the route of a call of a linear layer
BLOCK = 64  # tokens of a rule that are computed side by side
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

    log_decay = tokens["g"].double()
    if log_decay.ndim == 4:
        log_decay = log_decay.logsumexp(-1) - math.log(log_decay.shape[-1])
    return LinearRule(
        "gated delta rule" if tokens["g"].ndim == 3 else "Kimi delta attention",
        tokens,
        apply,
        arguments["value"],
        arguments["key"].shape[-1],
        log_decay_BTH=log_decay,
        write_BTH=tokens["beta"],
        strength="beta",
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
        log_decay_BTH=fixed["A"].float() * step,
        write_BTH=step,
    )


def decayed_attention(tokens: Mapping[str, Tensor], values_BTHV: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """S_t = a_t S_t-1 + k_t v_t^T, y_t = q_t S_t, some tokens at a time; log_decay: the logarithm of a, at most 0.

    Source: Sun et al. 2023, Retentive Networks, arXiv 2307.08621, section 2.2; `reference/naive.py` has it by token.
    """
    q_BHTD, k_BHTD, v_BHTV = (part.transpose(1, 2) for part in (tokens["query"], tokens["key"], values_BTHV.float()))
    log_BHT = tokens["log_decay"].transpose(1, 2).double()
    state = v_BHTV.new_zeros(*k_BHTD.shape[:2], k_BHTD.shape[-1], v_BHTV.shape[-1]) if state is None else state
    outputs = []
    for first in range(0, q_BHTD.shape[2], BLOCK):
        rows = slice(first, first + BLOCK)
        q, k, v, log = q_BHTD[:, :, rows], k_BHTD[:, :, rows], v_BHTV[:, :, rows], log_BHT[:, :, rows].cumsum(-1)
        kept = (log[..., None] - log[..., None, :]).exp().tril().nan_to_num(0.0).float()
        before = log.exp().float()[..., None] * q @ state
        outputs.append((q @ k.mT * kept) @ v + before)
        to_end = (log[..., -1:] - log).exp().float()[..., None]
        state = log[..., -1, None, None].exp().float() * state + (to_end * k).mT @ v
    return torch.cat(outputs, 2).transpose(1, 2), state


def lightning(module: nn.Module, projected_BTM: Tensor, mask_BT: Tensor | None) -> LinearRule:
    """Lightning attention: each head's state fades by exp(-slope). projected_BTM: what the module's `qkv_proj` gave.

    Source: Qin et al. 2024, Lightning Attention-2, arXiv 2401.04658; MiniMax 2025, arXiv 2501.08313, section 2.2.
    """
    known: Any = module
    parts_BTM = known.act_fn(projected_BTM)
    if mask_BT is not None:
        parts_BTM = parts_BTM * mask_BT[..., None]
    slope_H = known.slope_rate.float().flatten()
    q_BTHD, k_BTHD, values_BTHV = parts_BTM.unflatten(-1, (len(slope_H), -1)).float().chunk(3, -1)
    log_BTH = -slope_H.expand(q_BTHD.shape[:3])
    tokens = {"query": q_BTHD, "key": k_BTHD, "log_decay": log_BTH}
    return LinearRule("lightning attention", tokens, decayed_attention, values_BTHV, k_BTHD.shape[-1], log_BTH)


def mlstm(own: Own, arguments: Arguments) -> LinearRule:
    """xLSTM's matrix memory: each token writes exp(input gate); a query's row is divided by its normaliser.

    Gates and normaliser are kept divided by exp(m), the largest exponent so far; they do not depend on the values.
    Source: Beck et al. 2024, xLSTM, arXiv 2405.04517, equations 19 to 27.
    """
    q_BTHD, k_BTHD, values_BTHV = (arguments[name].float().transpose(1, 2) for name in ("query", "key", "value"))
    input_BHT, forget_BHT = arguments["igate"].double(), nn.functional.logsigmoid(arguments["fgate"].double())
    # m_t = max(log f_t + m_t-1, input_t), and 0 before the first token, without a loop over tokens.
    faded_BHT = forget_BHT.cumsum(-1)
    m_BHT = faded_BHT + (input_BHT - faded_BHT).cummax(-1).values.clamp_min(0)
    before_BHT = nn.functional.pad(m_BHT, (1, 0))[..., :-1]
    log_BTH = (forget_BHT + before_BHT - m_BHT).transpose(1, 2)
    write_BTH = (input_BHT - m_BHT).exp().float().transpose(1, 2)
    tokens = {"query": q_BTHD * q_BTHD.shape[-1] ** -0.5, "key": k_BTHD * write_BTH[..., None], "log_decay": log_BTH}
    size_BTH1 = decayed_attention(tokens, torch.ones_like(values_BTHV[..., :1]), None)[0].abs()
    eps = getattr(getattr(own, "config", None), "eps", 0.0)
    size_BTH1 = size_BTH1.maximum((-m_BHT).exp().float().transpose(1, 2)[..., None]) + eps
    tokens["query"] = tokens["query"] / size_BTH1
    return LinearRule(
        "mLSTM",
        tokens,
        decayed_attention,
        values_BTHV,
        k_BTHD.shape[-1],
        log_decay_BTH=forget_BHT.transpose(1, 2),
        write_BTH=input_BHT.exp().float().transpose(1, 2),
    )


def mamba_scan(own: Own, arguments: Arguments) -> ChannelRule:
    """Mamba's scan: the map is before the gate z, and D, which skips the state, is on its diagonal.

    Source: Gu & Dao 2023, Mamba, arXiv 2312.00752, algorithm 2.
    """
    step_BTC = arguments["dt"].float().transpose(1, 2)
    if arguments.get("delta_bias") is not None:
        step_BTC = step_BTC + arguments["delta_bias"].float()
    if arguments.get("delta_softplus"):
        step_BTC = nn.functional.softplus(step_BTC)
    A_CN, gate = arguments["A"].double(), arguments.get("z")
    write_BT1N, read_BT1N = (arguments[name].float().transpose(1, 2)[:, :, None] for name in ("B", "C"))
    gate_BTC = None if gate is None else nn.functional.silu(gate.float()).transpose(1, 2)
    return Recurrence(
        "Mamba",
        arguments["hidden_states"].transpose(1, 2),
        lambda rows_BrC, start, stop: rows_BrC if gate_BTC is None else rows_BrC * gate_BTC[:, start:stop],
        log_decay=lambda channels: step_BTC[..., channels, None].double() * A_CN[channels],
        write=lambda channels: step_BTC[..., channels, None] * write_BT1N,
        read_BT1N=read_BT1N,
        skip_C=arguments.get("D"),
        width=A_CN.shape[1],
    )


def rwkv_attention(own: Own, arguments: Arguments) -> ChannelRule:
    """RWKV-4: a mean of each channel's values. Source: Peng et al. 2023, RWKV, arXiv 2305.13048, equation 14."""
    rate_C, first_C = arguments["time_decay"].float().exp(), arguments["time_first"]
    return FadingMean("RWKV-4", arguments["value"], _as_it_is, arguments["key"], rate_C, first_C)


def gated_recurrence(own: Own, arguments: Arguments) -> ChannelRule:
    """A recurrence with a gate for each channel and token. Source: De et al. 2024, Griffin, arXiv 2402.19427."""
    gate_BTC = arguments["recurrent_gate"].double() * ~arguments["reset"]
    log_BTC, one_1111 = gate_BTC.log(), torch.ones(1, 1, 1, 1, device=gate_BTC.device)
    return Recurrence(
        "gated recurrence",
        arguments["hidden_states"],
        _as_it_is,
        log_decay=lambda channels: log_BTC[..., channels, None],
        write=lambda channels: one_1111,
        read_BT1N=one_1111,
    )


def short_convolution(own: Own, arguments: Arguments) -> ChannelRule:
    """A convolution of each channel over its last tokens, which is all that mixes tokens in its layer."""
    bias, activation = arguments.get("bias"), arguments.get("activation")

    def after(rows_BrC: Tensor, start: int, stop: int) -> Tensor:
        rows_BrC = rows_BrC if bias is None else rows_BrC + bias.float()
        return rows_BrC if activation is None else ACT2FN[activation](rows_BrC)

    values_BTC = arguments["hidden_states"].transpose(1, 2)
    return ShortConvolution("short convolution", values_BTC, after, arguments["weight"])


def _as_it_is(rows: Tensor, start: int, stop: int) -> Tensor:
    return rows


class Form(NamedTuple):
    """How a call of a rule is read.

    first_state: which argument is the state before the first token. turned: whether the output is (B, H, T, V), or
    channels before tokens.
    """

    make: Callable[[Own, Arguments], LinearRule | ChannelRule]
    first_state: str = ""
    turned: bool = False


FORMS: Mapping[str, Form] = {  # by the names of `model.tasks.RULES`
    "delta": Form(delta_rule, "initial_state"),
    "ssd": Form(mamba2_scan, "initial_states"),
    "mlstm": Form(mlstm, "c_initial", turned=True),
    "scan": Form(mamba_scan, turned=True),
    "wkv": Form(rwkv_attention, "state"),
    "gated": Form(gated_recurrence, "recurrent_states"),
    "convolution": Form(short_convolution, turned=True),
}


@contextmanager
def mixing(model: nn.Module, on_call: OnCall, report: CaptureReport, engine: Engine | None = None) -> Iterator[None]:
    """While open, every linear layer that this thread runs in a model is handed to `on_call`, and its check is kept.

    engine: whether calls are checked, and what the model gets instead of a rule's output, before gate and norm: its
    `change`, as for calls of attention. Where every channel has a map of its own nothing is changed.
    """
    listener = _Listener(forward.bare_model(model), on_call, report, engine or ENGINES["eager"])
    thread = threading.get_ident()
    with _lock:
        for module in listener.paths:
            for name in () if listener.spelled(module) else rules_of(module):
                for home in homes_of(type(module), name):
                    _install(home, name)
        _listeners.setdefault(thread, []).append(listener)
    try:
        with forward.temporary(listener.hooks()):
            yield
    finally:
        with _lock:
            _listeners[thread].remove(listener)
            if not _listeners[thread]:
                del _listeners[thread]
            # The last puts back the names that are still ours.
            for (home, name), (own, ours) in _wrapped.items() if not _listeners else ():
                if getattr(home, name) is ours:
                    setattr(home, name, own)
            if not _listeners:
                _wrapped.clear()


_lock = threading.Lock()
_listeners: dict[int, list[_Listener]] = {}
_wrapped: dict[tuple[Any, str], tuple[Own, Own]] = {}  # a file and a name in it: its own function, and ours


def _install(home: Any, name: str) -> None:
    if (home, name) in _wrapped:
        return
    own = getattr(home, name)

    @functools.wraps(own)
    def heard(*args: Any, **kwargs: Any) -> Any:
        listeners = _listeners.get(threading.get_ident())
        if not listeners or not listeners[-1].inside:
            return own(*args, **kwargs)
        return listeners[-1].hear(name, own, args, kwargs, own(*args, **kwargs))

    _wrapped[home, name] = own, heard
    setattr(home, name, heard)


class _Listener:
    """Turns calls of rules into AttentionCalls. inside: the modules with a rule that run, innermost last."""

    def __init__(self, model: nn.Module, on_call: OnCall, report: CaptureReport, engine: Engine) -> None:
        modules = dict(model.named_modules())
        self.mixers = {modules[path]: mixer for path, mixer in mixers_of(model).items()}
        self.paths = {module: path for path, module in modules.items() if module in self.mixers}
        self.on_call, self.report, self.engine = on_call, report, engine
        self.inside: list[nn.Module] = []
        self.calls: dict[int, int] = {}
        self.given: dict[nn.Module, Arguments] = {}  # what the forward of a module was given that spells out its rule
        self.projected: dict[nn.Module, Tensor] = {}
        self.parts: dict[nn.Module, list[tuple[ChannelRule, Tensor]]] = {}  # calls of one module, of some channels each

    def spelled(self, module: nn.Module) -> bool:
        """Whether a module spells its rule out in its forward."""
        return self.mixers[module].name in PARTS

    def hooks(self) -> list[Any]:
        """Hooks that know which module runs, and what those inside one that spells out its rule are given."""
        enter = [module.register_forward_pre_hook(self._enter, with_kwargs=True) for module in self.paths]
        leave = [module.register_forward_hook(self._leave, always_call=True) for module in self.paths]
        inside = [hook for module in self.paths if self.spelled(module) for hook in self._inside(module)]
        return [*enter, *inside, *leave]

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.inside.append(module)
        if self.spelled(module):
            self.given[module] = inspect.signature(module.forward).bind(*args, **kwargs).arguments

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.inside and self.inside[-1] is module:
            self.inside.pop()
        self.given.pop(module, None)
        self.projected.pop(module, None)
        if parts := self.parts.pop(module, []):
            rules, outputs = zip(*parts, strict=True)
            if output is not None:
                with _outside(outputs[0].device):
                    self.hand_on(module, Joined.of(rules), torch.cat(outputs, -1))

    def _inside(self, module: nn.Module) -> list[Any]:
        known: Any = module

        def project(_: nn.Module, args: Any, output: Tensor) -> None:
            self.projected[module] = output

        def normalise(_: nn.Module, args: Any) -> Any:
            given, projected = self.given.get(module, {}), self.projected.get(module)
            cache = given.get("past_key_values")
            if projected is None or (cache is not None and cache.get_linear_cache(module.layer_idx) is not None):
                return None
            with _outside(projected.device):
                rule = lightning(module, projected, given.get("attention_mask"))
                output_BTHV = args[0].unflatten(-1, rule.values_BTHV.shape[2:])
                call, check = self.hand_on(module, rule, output_BTHV)
            changed_BTHV = self.engine.changed(call, output_BTHV, check)
            return None if changed_BTHV is output_BTHV else (changed_BTHV.flatten(-2), *args[1:])

        return [known.qkv_proj.register_forward_hook(project), known.norm.register_forward_pre_hook(normalise)]

    def hear(self, name: str, own: Own, args: tuple[Any, ...], kwargs: Arguments, returned: Any) -> Any:
        """What the model gets of one call of a rule, which gave this."""
        module = self.inside[-1]
        form = rules_of(module).get(name)
        if form is None:
            return returned
        make, first_state, turned = FORMS[form]
        bound = inspect.signature(own).bind(*args, **kwargs)
        arguments = dict(bound.arguments)
        arguments |= arguments.pop("kwargs", {})
        state = arguments.get(first_state)
        sums = state[:2] if isinstance(state, list | tuple) else [state]  # a third is a stabiliser
        if any(part is not None and bool(part.any()) for part in sums):  # what a cache holds is no token of this text
            return returned
        first = returned[0] if isinstance(returned, tuple | list) else returned
        output = first.transpose(1, 2) if turned else first
        with _outside(output.device):
            rule = make(arguments.pop("self", own), arguments)
            if isinstance(rule, ChannelRule):
                self.parts.setdefault(module, []).append((rule, output))
                return returned
            call, check = self.hand_on(module, rule, output)
        changed = self.engine.changed(call, output, check)
        if changed is output:
            return returned
        changed = changed.transpose(1, 2) if turned else changed
        return type(returned)((changed, *returned[1:])) if isinstance(returned, tuple | list) else changed

    def hand_on(
        self, module: nn.Module, rule: LinearRule | ChannelRule, output: Tensor
    ) -> tuple[AttentionCall, CallCheck]:
        """A rule as a call, and its check. output: what the model's own code made, (B, T, ...)."""
        layer = layer_of(module, self.paths[module])
        self.calls[layer] = self.calls.get(layer, -1) + 1
        place = CallSite(layer, self.calls[layer], self.paths[module], module, self.mixers[module].kind)
        if isinstance(rule, LinearRule):
            values_BHTV = rule.values_BTHV.transpose(1, 2)
            call = AttentionCall(place, LinearMap(rule), None, None, output, values_BHTV, kernel=rule.name)
        else:
            call = AttentionCall(place, ChannelMap(rule), kernel=rule.name)
        check = _checked(call, rule, output) if self.engine.checked else unmeasured(call, output, RULE)
        check.kernel, check.answered_by = rule.name, call.P.answered_by
        self.report.calls.append(check)
        self.on_call(call)
        return call, check


@contextmanager
def _outside(device: torch.device) -> Iterator[None]:
    """While open nothing is computed for the model: listeners between it and torch's functions do not hear it."""
    with torch.no_grad(), torch._C.DisableTorchFunction(), full_precision(device):
        yield


def _checked(call: AttentionCall, rule: LinearRule | ChannelRule, output: Tensor) -> CallCheck:
    """How a call of a rule held, which gave this output, (B, T, ...)."""
    check, sample = check_call(call, RULE), sampled(call.visible, REPEATED_ROWS, call.P.device)
    if isinstance(rule, ChannelRule):
        # Every channel's M v against what the model's own code made; its map is not made whole for that.
        outputs, rows = zip(*(rule.output(a, b) for a, b in sample.runs), strict=True)
        check.note(value_error=relative_error(torch.cat(outputs, 1), sample.of(output)))
        check.dtype = output.dtype
    else:
        rows = tuple(call.P.rows(a, b).abs().amax(1) for a, b in sample.runs)
    # The largest weight on a token after the query: 0 in a rule that knows no later token.
    later = (part[:, None] * ~call.visible.rows(*run) for part, run in zip(rows, sample.runs, strict=True))
    check.note(masked_weight=torch.stack([part.max() for part in later]).max())
    return check
