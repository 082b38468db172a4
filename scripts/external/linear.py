"""flash-linear-attention's loops and TransformerLens' closed form judge the maps of layers without a softmax.

A model's rule is a name in its modelling file. While the model runs once, that name also keeps what the rule was given;
attnscope reads another run.

Shapes: B text, T token, H head, Q query, K key, D width of a key, C channel.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
from fla.ops.hgrn.naive import naive_recurrent_hgrn
from fla.ops.kda.naive import naive_recurrent_kda
from fla.ops.simple_gla.naive import naive_recurrent_simple_gla
from torch import Tensor, nn

import attnscope
from external.common import Check, Report, arguments
from external.models import WORDS, tokenizer

TOKENS = 150  # more than two chunks of 64
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
}
Maps = list[Tensor]  # (H, Q, K) of each layer, in order


def main() -> None:
    """Judge every kind and write the result."""
    asked, report = arguments(), Report(("fla-core", "transformer-lens", "transformers", "torch"))
    ids = torch.randint(3, WORDS, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    for kind, theirs in (
        ("qwen3_next", delta),
        ("kimi_linear", kimi),
        ("minimax", faded),
        ("mamba2", closed_form),
    ):
        judge(report, kind, ids, theirs)
    judge_channels(report, ids)
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


def judge_channels(report: Report, ids: Tensor) -> None:
    """RecurrentGemma: the map of some channels, and the mean of |w| over all of them."""
    model = random_model("recurrent_gemma")
    with kept(model, "_rnn_scan") as calls, torch.no_grad():
        model(ids, use_cache=False)
    maps = []
    for given, _ in calls:
        log_1TC = (given["recurrent_gate"] * ~given["reset"]).log().clamp_min(-1e30)
        channels = log_1TC.shape[-1]
        unit_KTC = torch.eye(TOKENS)[..., None].expand(-1, -1, channels)  # the keys are the texts of one batch
        output_KTC, _ = naive_recurrent_hgrn(unit_KTC, log_1TC.expand(TOKENS, -1, -1))
        maps.append(output_KTC.permute(2, 1, 0))
    mean = read(model, ids, "channels")
    some = {channel: read(model, ids, "channels", channel=channel) for channel in (0, 7, 47)}
    with report.check("recurrent_gemma: the map of a channel, to 1e-5 of its largest weight") as check:
        for channel, weights in some.items():
            compare(check, f"channel {channel}", weights, [each[channel, None] for each in maps])
    with report.check("recurrent_gemma: the mean of |w| over channels") as check:
        compare(check, "mean", mean, [each.abs().mean(0, keepdim=True) for each in maps])
    with report.control("recurrent_gemma: the map of the next channel") as control:
        for channel, weights in some.items():
            other = [each[(channel + 1) % len(each), None] for each in maps]
            compare(control, f"channel {channel}", weights, other)


def delta(model: nn.Module, ids: Tensor) -> tuple[Maps, Maps]:
    """The gated delta rule; without: nothing is removed before a key is written."""
    maps, without = [], []
    for given, _ in rule_calls(model, ids, "torch_chunk_gated_delta_rule"):
        q, k = (normalised(given[name]) for name in ("query", "key"))
        heads = given["value"].shape[2]
        q, k = (part.repeat_interleave(heads // part.shape[2], 2) for part in (q, k))
        values = unit_values(heads)
        maps.append(turned(naive_recurrent_gated_delta_rule(q, k, values, given["beta"], given["g"])[0]))
        written = values * given["beta"][..., None]
        without.append(turned(naive_recurrent_simple_gla(q, k, written, given["g"])[0]))
    return maps, without


def kimi(model: nn.Module, ids: Tensor) -> tuple[Maps, Maps]:
    """Kimi's delta attention; without: the decay is one for all channels of a head."""
    maps, without = [], []
    for given, _ in rule_calls(model, ids, "chunk_kimi_delta_attention"):
        q, k = (normalised(given[name]) for name in ("query", "key"))
        g, beta, values = given["g"], given["beta"], unit_values(given["value"].shape[2])
        maps.append(turned(naive_recurrent_kda(q, k, values, g, beta)[0]))
        without.append(turned(naive_recurrent_kda(q, k, values, g.mean(-1, keepdim=True).expand_as(g), beta)[0]))
    return maps, without


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


def closed_form(model: nn.Module, ids: Tensor) -> tuple[Maps, Maps]:
    """TransformerLens' map of Mamba-2 with D on its diagonal; without: D."""
    from transformer_lens.model_bridge import TransformerBridge

    folder = "mamba2"
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    bridge = TransformerBridge.boot_transformers(folder, device="cpu", dtype=torch.float32)
    maps, without = [], []
    for place, layer in enumerate(model.backbone.layers):
        own, theirs = layer.mixer, bridge.blocks[place].mixer
        with torch.no_grad(), inputs(own) as entered:
            model(ids, use_cache=False)
            projected = own.in_proj(entered[0])
            start = projected.shape[-1] - own.conv_dim - own.num_heads
            convolved = own.conv1d(projected[..., start : start + own.conv_dim].transpose(1, 2))
            cache = {
                f"blocks.{place}.mixer.in_proj.hook_out": projected,
                f"blocks.{place}.mixer.conv1d.hook_out": convolved,
            }
            weights_HQK = theirs.compute_effective_attention(cache, layer_idx=place, include_dt_scaling=True)[0]
            without.append(weights_HQK)
            maps.append(weights_HQK + own.D[:, None, None] * torch.eye(TOKENS))
    return maps, without


WITHOUT = {
    delta: "that a write removes what the key held",
    kimi: "that channels of a key fade apart",
    faded: "which head has which decay",
    closed_form: "what skips the state, D,",
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
    return model


def read(model: Any, ids: Tensor, stack: str, **options: Any) -> Maps:
    """attnscope's maps of the layers of one stack."""
    request = attnscope.Request(weights=True, view=attnscope.View(**options))
    record = attnscope.capture(attnscope.wrap(model, tokenizer()), ids[0].tolist(), request=request)
    return list(map(torch.as_tensor, record.of(stack).weights.values()))


def rule_calls(model: nn.Module, ids: Tensor, name: str) -> list[tuple[dict[str, Any], Any]]:
    with kept(model, name) as calls, torch.no_grad():
        model(ids, use_cache=False)
    return calls


@contextmanager
def kept(model: nn.Module, name: str) -> Iterator[list[tuple[dict[str, Any], Any]]]:
    """The calls of a function of a modelling file, or of a method in it: what they were given, by name, and gave."""
    home: Any = sys.modules[type(model).__module__]
    home = next((one for one in vars(home).values() if isinstance(one, type) and name in vars(one)), home)
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


@contextmanager
def inputs(module: nn.Module) -> Iterator[list[Tensor]]:
    """What a module is given while this is open."""
    entered: list[Tensor] = []

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        entered.append(args[0] if args else kwargs["hidden_states"])

    hook = module.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield entered
    finally:
        hook.remove()


def normalised(part_BTHD: Tensor) -> Tensor:
    """To length 1, as these rules do with queries and keys."""
    return part_BTHD * torch.rsqrt(part_BTHD.square().sum(-1, keepdim=True) + 1e-6)


def unit_values(heads: int) -> Tensor:
    """Token j's value is the unit vector j, of each head: (1, T, H, T)."""
    return torch.eye(TOKENS)[None, :, None].expand(-1, -1, heads, -1)


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
