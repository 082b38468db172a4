"""Others' loops and closed forms judge the maps of layers without a softmax.

A model's rule is a name in its modelling file. While the model runs once, that name also keeps what the rule was given;
attnscope reads another run.

Shapes: B text, T token, H head, Q query, K key, D width of a key, C channel.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: the kernel for RWKV-4 runs without a GPU

import numpy as np
import torch
import transformers
from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
from fla.ops.hgrn.naive import naive_recurrent_hgrn
from fla.ops.kda.naive import naive_recurrent_kda
from fla.ops.rwkv4 import fused_recurrent_rwkv4
from fla.ops.simple_gla.naive import naive_recurrent_simple_gla
from mambapy.mamba import MambaBlock, MambaConfig
from mlstm_kernels.torch.recurrent.native_sequence import mlstm_recurrent_sequence__native_fw
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge

import attnscope
from external.common import Check, Report, arguments
from external.models import WORDS, tokenizer

TOKENS = 150  # more than two chunks of 64
FAR = 64
ROUNDING = 1e-5  # of a map's largest weight, in float32
SIZES: Mapping[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "vocab_size": WORDS,
}
EXPERTS = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_next": {
        **SIZES,
        **EXPERTS,
        "shared_expert_intermediate_size": 48,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "kimi_linear": {**SIZES, **EXPERTS, "linear_head_dim": 16, "linear_num_heads": 4},
    "minimax": {**SIZES, "num_local_experts": 4, "block_size": 64},
    "recurrent_gemma": {**SIZES, "lru_width": 48, "attention_window_size": 256},
    "mamba2": {
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_heads": 6,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 2,
    },
    "xlstm": {"hidden_size": 48, "embedding_dim": 48, "num_hidden_layers": 2, "num_blocks": 2, "num_heads": 4},
    "mamba": {"hidden_size": 24, "num_hidden_layers": 2, "state_size": 8},
    "rwkv": {"hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 96, "context_length": 256},
    "lfm2": {**SIZES, "layer_types": ["conv", "full_attention"] * 2},
}
# Added to the parameters by which a state fades: tokens far apart have weights then.
SLOWER = {"A_log": -3.0, "time_decay": -3.0, "recurrent_param": -5.0, "fgate_preact.bias": 3.0}
NOT_HAD = (
    "flash-linear-attention's short convolution: Triton's interpreter tunes it on a GPU. numpy judges these layers",
    "mamba-ssm, by the authors of Mamba: its source does not build next to a torch without CUDA",
)
Maps = list[Tensor]  # (H, Q, K) of each layer, in order


def main() -> None:
    """Judge every kind and write the result."""
    packages = ("fla-core", "transformer-lens", "mambapy", "mlstm_kernels", "numpy", "transformers", "torch")
    asked, report = arguments(), Report(packages)
    torch.set_num_threads(1)
    ids = torch.randint(3, WORDS, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    for kind, theirs in (
        ("qwen3_next", delta),
        ("kimi_linear", kimi),
        ("minimax", faded),
        ("mamba2", closed_form),
        ("xlstm", normalised_memory),
    ):
        judge(report, kind, ids, theirs)
        if kind in LOOPS:
            judge_outputs(report, kind, ids)
    for kind, theirs_of_channels in CHANNELS.items():
        judge_channels(report, kind, ids, theirs_of_channels)
    report.not_had += NOT_HAD
    report.write(asked.out)


def judge(report: Report, kind: str, ids: Tensor, theirs: Callable[..., tuple[Maps, Maps]]) -> None:
    """The maps of every layer of a kind, and the same with a part of the rule left out, and with heads reversed."""
    model = random_model(kind)
    ours = read(model, ids, "linear")
    maps, without = theirs(model, ids)
    with report.check(f"{kind}: every head's map, to 1e-5 of its layer's largest weight") as check:
        compare(check, kind, ours, maps)
    with report.control(f"{kind}: {WITHOUT[theirs]} is left out") as control:
        compare(control, kind, ours, without)
    with report.control(f"{kind}: heads in reverse order") as control:
        compare(control, kind, [weights.flip(0) for weights in ours], maps)
    report.notes.append(far(kind, maps))


def judge_channels(report: Report, kind: str, ids: Tensor, theirs: Callable[..., Mapping[str, Maps]]) -> None:
    """The map of every channel by each judge, and the mean of |w| over all of them."""
    model = random_model(kind)
    judged = theirs(model, ids)
    each = [read(model, ids, "channels", channel=channel) for channel in range(len(next(iter(judged.values()))[0]))]
    ours, mean = [torch.cat(layer) for layer in zip(*each, strict=True)], read(model, ids, "channels")
    for judge, maps in judged.items():
        mean_of_judge = [one.abs().mean(0, keepdim=True) for one in maps]
        with report.check(f"{kind}: every channel's map is that of {judge}, to 1e-5 of its layer's largest") as check:
            compare(check, kind, ours, maps)
        with report.control(f"{kind}: every channel's map is that of the next by {judge}") as control:
            compare(control, kind, ours, [one.roll(1, 0) for one in maps])
        with report.check(f"{kind}: the mean of |w| over channels is that of {judge}") as check:
            compare(check, kind, mean, mean_of_judge)
        with report.control(f"{kind}: the mean of |w| over channels with the keys of {judge} moved by one") as control:
            compare(control, kind, mean, [one.roll(1, -1) for one in mean_of_judge])
    report.notes.append(far(kind, maps))


def delta(model: nn.Module, ids: Tensor) -> tuple[Maps, Maps]:
    """The gated delta rule; without: nothing is removed before a key is written."""
    maps, without = [], []
    for given, _ in rule_calls(model, ids, "torch_chunk_gated_delta_rule"):
        asked, values = of_loop(given), unit_values(given["value"].shape[2])
        maps.append(turned(naive_recurrent_gated_delta_rule(v=values, **asked)[0]))
        written = values * asked.pop("beta")[..., None]
        without.append(turned(naive_recurrent_simple_gla(v=written, **asked)[0]))
    return maps, without


def kimi(model: nn.Module, ids: Tensor) -> tuple[Maps, Maps]:
    """Kimi's delta attention; without: the decay is one for all channels of a head."""
    maps, without = [], []
    for given, _ in rule_calls(model, ids, "chunk_kimi_delta_attention"):
        asked, values = of_loop(given), unit_values(given["value"].shape[2])
        maps.append(turned(naive_recurrent_kda(v=values, **asked)[0]))
        asked["g"] = asked["g"].mean(-1, keepdim=True).expand_as(asked["g"])
        without.append(turned(naive_recurrent_kda(v=values, **asked)[0]))
    return maps, without


def of_loop(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """What a loop of a delta rule takes but the values: queries and keys of length 1, for each head."""
    heads = given["value"].shape[2]
    parts = {short: normalised(given[name]) for short, name in (("q", "query"), ("k", "key"))}
    repeated = {name: part.repeat_interleave(heads // part.shape[2], 2) for name, part in parts.items()}
    return {**repeated, "g": given["g"], "beta": given["beta"]}


LOOPS = {
    "qwen3_next": ("torch_chunk_gated_delta_rule", naive_recurrent_gated_delta_rule),
    "kimi_linear": ("chunk_kimi_delta_attention", naive_recurrent_kda),
}


def judge_outputs(report: Report, kind: str, ids: Tensor) -> None:
    """M v, of the layer's own values, against what the loop makes of them."""
    model, (name, loop) = random_model(kind), LOOPS[kind]
    calls, maps = rule_calls(model, ids, name), read(model, ids, "linear")
    values = [given["value"][0].transpose(0, 1) for given, _ in calls]
    looped = [turned(loop(v=given["value"], **of_loop(given))[0]) for given, _ in calls]
    with report.check(f"{kind}: M v of every head is what the loop makes of v, to 1e-5 of the largest") as check:
        compare(check, kind, [one @ v for one, v in zip(maps, values, strict=True)], looped)
    with report.control(f"{kind}: M v with the values of the next token") as control:
        compare(control, kind, [one @ v.roll(1, 1) for one, v in zip(maps, values, strict=True)], looped)


def faded(model: nn.Module, ids: Tensor) -> tuple[Maps, Maps]:
    """Lightning attention, from what a layer's `qkv_proj` gave; without: the decay is the next head's."""
    projected: dict[nn.Module, Tensor] = {}
    layers = [module for module in model.modules() if hasattr(module, "slope_rate")]
    hooks = [
        layer.qkv_proj.register_forward_hook(
            lambda module, args, output, layer=layer: projected.update({layer: output})
        )
        for layer in layers
    ]
    with torch.no_grad():
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    maps, without = [], []
    for layer in layers:
        slope_H = layer.slope_rate.flatten()
        q, k, _ = layer.act_fn(projected[layer]).view(1, TOKENS, len(slope_H), -1).chunk(3, -1)
        for kept_maps, slope in ((maps, slope_H), (without, slope_H.roll(1))):
            g_BTH = -slope.expand(1, TOKENS, -1)
            kept_maps.append(turned(naive_recurrent_simple_gla(q, k, unit_values(len(slope)), g_BTH, scale=1.0)[0]))
    return maps, without


def normalised_memory(model: nn.Module, ids: Tensor) -> tuple[Maps, Maps]:
    """xLSTM's matrix memory; without: the forget gate is the next head's."""
    maps, without = [], []
    for given, _ in rule_calls(model, ids, "forward", "xLSTMBackend"):
        q, k, gates = given["query"], given["key"], given["fgate"]
        values = unit_values(q.shape[1]).transpose(1, 2)
        for kept_maps, forget in ((maps, gates), (without, gates.roll(1, 1))):
            eps = given["self"].config.eps
            kept_maps.append(mlstm_recurrent_sequence__native_fw(q, k, values, given["igate"], forget, eps=eps)[0])
    return maps, without


def closed_form(model: nn.Module, ids: Tensor) -> tuple[Maps, Maps]:
    """TransformerLens' map of Mamba-2 with D on its diagonal; without: D."""
    without = hidden_attention(model, ids)
    skips = [layer.mixer.D[:, None, None] * torch.eye(TOKENS) for layer in model.backbone.layers]
    return [weights_HQK + skip for weights_HQK, skip in zip(without, skips, strict=True)], without


def hidden_attention(model: nn.Module, ids: Tensor) -> Maps:
    """TransformerLens' maps of Mamba or Mamba-2, without D, of a pass of its own.

    `eager_scan`, its own spelling of the scan, fills its cache with what the maps are made of.
    """
    folder = f"models/{model.config.model_type}"
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    bridge = TransformerBridge.boot_transformers(folder, device="cpu", dtype=torch.float32)
    mixers = [block.mixer for block in bridge.blocks]
    for mixer in mixers:
        mixer.eager_scan = True
    with torch.no_grad():
        _, cache = bridge.run_with_cache(ids, use_cache=False)
        return [
            mixer.compute_effective_attention(cache, layer_idx=place, include_dt_scaling=True)[0]
            for place, mixer in enumerate(mixers)
        ]


def scan(model: nn.Module, ids: Tensor) -> dict[str, Maps]:
    """Mamba."""
    maps = []
    for given, _ in rule_calls(model, ids, "mamba_selective_scan"):
        A_CN = given["A"]
        block = MambaBlock(MambaConfig(len(A_CN) // 2, 1, d_state=A_CN.shape[-1]))
        step_1TC = nn.functional.softplus(given["dt"].transpose(1, 2) + given["delta_bias"])
        write, read_ = given["B"].transpose(1, 2), given["C"].transpose(1, 2)
        output_KTC = block.selective_scan_seq(unit_channels(len(A_CN)), step_1TC, A_CN, write, read_, given["D"])
        maps.append(output_KTC.permute(2, 1, 0))
    skips = [layer.mixer.D[:, None, None] * torch.eye(TOKENS) for layer in model.backbone.layers]
    lens = [weights + skip for weights, skip in zip(hidden_attention(model, ids), skips, strict=True)]
    return {"mambapy": maps, "TransformerLens": lens}


def weighted_mean(model: nn.Module, ids: Tensor) -> dict[str, Maps]:
    """RWKV-4. The kernel has a row of channels for each key's unit vector."""
    maps = []
    for given, _ in rule_calls(model, ids, "rwkv_linear_attention"):
        count = given["key"].shape[-1]
        decay, first, key = (given[name].repeat_interleave(TOKENS, -1) for name in ("time_decay", "time_first", "key"))
        values = torch.eye(TOKENS).repeat(1, count)[None]
        state = torch.zeros(1, 3, 1, len(decay))
        state[:, 2] = -1e38  # the largest exponent so far
        with torch.no_grad():
            output_1TN, _ = fused_recurrent_rwkv4(decay, first, key.contiguous(), values, state)
        maps.append(output_1TN[0].unflatten(-1, (count, TOKENS)).transpose(0, 1))
    return {"flash-linear-attention": maps}


def gated(model: nn.Module, ids: Tensor) -> dict[str, Maps]:
    """RecurrentGemma. The keys are the texts of one batch."""
    maps = []
    for given, _ in rule_calls(model, ids, "_rnn_scan", "RecurrentGemmaRglru"):
        log_1TC = (given["recurrent_gate"] * ~given["reset"]).log().clamp_min(-1e30)
        units_KTC = unit_channels(log_1TC.shape[-1])
        output_KTC, _ = naive_recurrent_hgrn(units_KTC, log_1TC.expand_as(units_KTC))
        maps.append(output_KTC.permute(2, 1, 0))
    return {"flash-linear-attention": maps}


def convolution(model: nn.Module, ids: Tensor) -> dict[str, Maps]:
    """LFM2."""
    calls = rule_calls(model, ids, "causal_conv1d_fn")
    taps = [given["weight"].detach().flip(-1).numpy() for given, _ in calls]
    units = np.eye(TOKENS, dtype=np.float32)
    made = [[[np.convolve(unit, one)[:TOKENS] for unit in units] for one in layer] for layer in taps]
    return {"numpy's convolve": [torch.from_numpy(np.array(layer)).mT for layer in made]}


CHANNELS = {"mamba": scan, "rwkv": weighted_mean, "recurrent_gemma": gated, "lfm2": convolution}
WITHOUT = {
    delta: "that a write removes what the key held",
    kimi: "that channels of a key fade apart",
    faded: "which head has which decay",
    closed_form: "what skips the state, D,",
    normalised_memory: "which head forgets how much",
}


def random_model(kind: str) -> Any:
    """A model of a kind with weights large enough to show.

    Where its file can import `fla`, it takes kernels from there that need a GPU.
    """
    config = transformers.CONFIG_MAPPING[kind](**{"vocab_size": WORDS, **KINDS[kind]}, pad_token_id=None)
    torch.manual_seed(0)
    package = sys.modules["fla"]
    sys.modules["fla"] = None
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    sys.modules["fla"] = package
    with torch.no_grad():
        for name, weights in model.named_parameters():
            nn.init.normal_(weights, float(weights.ndim == 1 and name.endswith("weight")), 0.2)
            weights += next((more for end, more in SLOWER.items() if name.endswith(end)), 0.0)
    return model


def read(model: Any, ids: Tensor, stack: str, **options: Any) -> Maps:
    """attnscope's maps of the layers of one stack."""
    request = attnscope.Request(weights=True, view=attnscope.View(**options))
    record = attnscope.capture(attnscope.wrap(model, tokenizer()), ids[0].tolist(), request=request)
    return list(map(torch.as_tensor, record.of(stack).weights.values()))


def rule_calls(model: nn.Module, ids: Tensor, name: str, of: str = "") -> list[tuple[dict[str, Any], Any]]:
    """What a function of the modelling file, or a method of a class in it, was given while the model ran."""
    with kept(model, name, of) as calls, torch.no_grad():
        model(ids, use_cache=False)
    return calls


@contextmanager
def kept(model: nn.Module, name: str, of: str) -> Iterator[list[tuple[dict[str, Any], Any]]]:
    """While open, its calls: what they were given, by name, and gave."""
    home: Any = sys.modules[type(model).__module__]
    home = getattr(home, of) if of else home
    own, calls = getattr(home, name), []

    def keeping(*args: Any, **kwargs: Any) -> Any:
        output = own(*args, **kwargs)
        calls.append((inspect.signature(own).bind(*args, **kwargs).arguments, output))
        return output

    setattr(home, name, keeping)
    try:
        yield calls
    finally:
        setattr(home, name, own)


def normalised(part_BTHD: Tensor) -> Tensor:
    """To length 1, as these rules do with queries and keys."""
    return part_BTHD * torch.rsqrt(part_BTHD.square().sum(-1, keepdim=True) + 1e-6)


def unit_values(heads: int) -> Tensor:
    """Token j's value is the unit vector j, of each head: (1, T, H, T)."""
    return torch.eye(TOKENS)[None, :, None].expand(-1, -1, heads, -1)


def unit_channels(channels: int) -> Tensor:
    """Token j's value is 1 in text j, of each channel: (K, T, C)."""
    return torch.eye(TOKENS)[..., None].expand(-1, -1, channels)


def far(kind: str, maps: Maps) -> str:
    """How much of a text shows in the maps, so that a fault far from the diagonal would."""
    share = max(float(one.tril(-FAR).abs().max() / one.abs().max()) for one in maps)
    return f"{kind}: {FAR} tokens back and more a weight is up to {share:.2g} of the largest"


def turned(output_1QHK: Tensor) -> Tensor:
    return output_1QHK[0].transpose(0, 1)


def compare(check: Check, case: str, ours: Maps, theirs: Maps) -> None:
    """Every head of every layer, to rounding of the layer's largest weight."""
    for layer, (our_HQK, their_HQK) in enumerate(zip(ours, theirs, strict=True)):
        size = their_HQK.abs().max()
        for head, (own, other) in enumerate(zip(our_HQK, their_HQK, strict=True)):
            error = float((own - other).abs().max() / size)
            check.hold(error <= ROUNDING, f"{case}, layer {layer}, head {head}: {error:.1e}")


if __name__ == "__main__":
    main()
