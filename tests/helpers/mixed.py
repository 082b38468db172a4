"""What layers without a softmax show of a tiny random model: each map against its layer's output and the reference."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from attnscope.attention.channels import ChannelMap, Joined
from attnscope.attention.operator import AttentionOperator
from attnscope.hooks import mixers
from attnscope.hooks.calls import AttentionCall
from attnscope.hooks.listen import listen
from attnscope.hooks.report import CallCheck
from attnscope.model.selection import mixes
from attnscope.reference import naive
from helpers.families import tiny_config
from helpers.parity_models import ids_for, rouse, roused_model

TOKENS = 70  # more than a chunk of any model's own function
# What `families.tiny_config` leaves out: layers of the other kind, where the defaults have none.
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"] * 3},
    "glm5_next_text": {"index_kpool": 2, "linear_num_heads": 4, "linear_head_dim": 16},
}
# One type for each rule, and then every other that has layers without a softmax.
ONE_OF_EACH = (
    *("qwen3_next", "kimi_linear", "mamba2", "xlstm", "minimax"),
    *("mamba", "rwkv", "recurrent_gemma", "lfm2_moe"),
)
OTHERS = (
    *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "glm5_next_text", "granitemoehybrid", "jamba", "lfm2"),
    *("lfm3", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen4_exp_text", "zamba", "zamba2"),
)


@dataclass(frozen=True)
class MixedLayer:
    """A call of such a layer; arguments: what the model's own function was given, a list where it was called again."""

    check: CallCheck
    P: AttentionOperator
    arguments: list[Mapping[str, Any]]
    form: str

    @property
    def distance(self) -> float:
        """How far the map is from that of the reference in float64, over its largest weight; of channels the most."""
        expected_BHQK = torch.cat([REFERENCES[self.form](arguments).map for arguments in self.arguments], 1)
        if not isinstance(self.P, ChannelMap):
            return _distance(self.P.dense(), expected_BHQK)
        mean = _distance(self.P.dense(), expected_BHQK.abs().mean(1, keepdim=True))
        count = expected_BHQK.shape[1]
        places = {0, count // 2, count - 1}
        own = (_distance(self.P.of_channel(c).dense(), expected_BHQK[:, c : c + 1]) for c in places)
        return max(mean, *own)


def mixed_layers(
    model_type: str, tokens: int = TOKENS, model: Any = None, ids: Tensor | None = None
) -> list[MixedLayer]:
    """The calls of a tiny random model's layers without a softmax, in order."""
    calls: list[AttentionCall] = []
    model = made(model_type) if model is None else model
    with _recorded() as raw:
        report = listen(model, ids_for(model_type, tokens=TOKENS) if ids is None else ids, calls.append, mixers=True)
    layers = []
    checks = [check for check in report.calls if mixes(check.stack)]
    for check, call in zip(checks, [call for call in calls if mixes(call.stack)], strict=True):
        rule: Any = call.P.rule
        parts = [raw[id(part)] for part in (rule.parts if isinstance(rule, Joined) else [rule])]
        layers.append(MixedLayer(check, call.P, [arguments for _, arguments in parts], parts[0][0]))
    return layers


def made(model_type: str) -> Any:
    """A tiny random model, also of a part that writes no text by itself."""
    overrides = OVERRIDES.get(model_type, {})
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return roused_model(model_type, **overrides)
    torch.manual_seed(0)
    model = AutoModel.from_config(tiny_config(model_type, **overrides), attn_implementation="eager")
    model.eval().requires_grad_(False)
    rouse(model)
    return model


@contextmanager
def _recorded() -> Iterator[dict[int, tuple[str, Mapping[str, Any]]]]:
    """While open: of each rule that is made, its form and what it was made of."""
    raw: dict[int, tuple[str, Mapping[str, Any]]] = {}
    forms, lightning = dict(mixers.FORMS), mixers.lightning

    def make(name: str, own: Any, arguments: Any) -> Any:
        rule = forms[name].make(own, arguments)
        raw[id(rule)] = name, {**arguments, "own": own}
        return rule

    def of_module(module: Any, projected: Tensor, mask: Any) -> Any:
        rule = lightning(module, projected, mask)
        raw[id(rule)] = "lightning", {"module": module, "projected": projected}
        return rule

    known: Any = mixers.FORMS
    known.update({name: form._replace(make=_partial(make, name)) for name, form in forms.items()})
    mixers.lightning = of_module
    try:
        yield raw
    finally:
        known.update(forms)
        mixers.lightning = lightning


def _partial(make: Callable[..., Any], name: str) -> Callable[..., Any]:
    return lambda own, arguments: make(name, own, arguments)


def _distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).abs().max() / expected.abs().max())


def _double(arguments: Mapping[str, Any], *names: str) -> list[Tensor]:
    return [arguments[name].double() for name in names]


def _repeated(heads_BTGD: Tensor, heads: int) -> Tensor:
    return heads_BTGD.repeat_interleave(heads // heads_BTGD.shape[2], 2)


def _step(arguments: Mapping[str, Any], bias: str, softplus: str) -> Tensor:
    step = arguments["dt"].double()
    if arguments.get(bias) is not None:
        own = arguments[bias].double()
        step = step + (own if bias == "dt_bias" else own[:, None])
    return functional.softplus(step) if arguments.get(softplus) else step


def _delta(arguments: Mapping[str, Any]) -> naive.Mixed:
    q, k, v, g, write = _double(arguments, "query", "key", "value", "g", "beta")
    q, k = (_repeated(part, v.shape[2]) for part in (q, k))
    if arguments.get("use_qk_l2norm_in_kernel"):
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    return naive.gated_delta(q, k, v, g, write)


def _mamba2(arguments: Mapping[str, Any]) -> naive.Mixed:
    x, A, write, read = _double(arguments, "hidden_states", "A", "B", "C")
    step = _step(arguments, "dt_bias", "dt_softplus").clamp(*arguments.get("dt_limit", (0.0, torch.inf)))
    write, read = (_repeated(part, x.shape[2]) for part in (write, read))
    return naive.mamba2(x, step, A, write, read, arguments["D"].double())


def _mlstm(arguments: Mapping[str, Any]) -> naive.Mixed:
    parts = [part.transpose(1, 2) for part in _double(arguments, "query", "key", "value", "igate", "fgate")]
    return naive.mlstm(*parts, eps=arguments["own"].config.eps)


def _lightning(arguments: Mapping[str, Any]) -> naive.Mixed:
    module = arguments["module"]
    parts = module.act_fn(arguments["projected"].double())
    heads = parts.unflatten(-1, (module.num_attention_heads, 3, module.head_dim)).unbind(-2)
    return naive.lightning(*heads, module.slope_rate.double().flatten())


def _mamba(arguments: Mapping[str, Any]) -> naive.Mixed:
    x, A, write, read = _double(arguments, "hidden_states", "A", "B", "C")
    step = _step(arguments, "delta_bias", "delta_softplus")
    return naive.mamba(x.mT, step.mT, A, write.mT, read.mT, arguments["D"].double())


def _convolution(arguments: Mapping[str, Any]) -> naive.Mixed:
    return naive.convolution(arguments["hidden_states"].double().mT, arguments["weight"].double())


REFERENCES: Mapping[str, Callable[[Mapping[str, Any]], naive.Mixed]] = {
    "delta": _delta,
    "ssd": _mamba2,
    "mlstm": _mlstm,
    "lightning": _lightning,
    "scan": _mamba,
    "wkv": lambda arguments: naive.rwkv(*_double(arguments, "time_decay", "time_first", "key", "value")),
    "gated": lambda arguments: naive.gated_recurrence(
        arguments["hidden_states"].double(), arguments["recurrent_gate"].double() * ~arguments["reset"]
    ),
    "convolution": _convolution,
}
