"""attnread and attnscope read weights out of the same kernel, by values that are put in: they must be equal.

attnread is taken from its source distribution, since its metadata ask for other versions than are at hand.

Shapes: B text, H head, Q query, K key, D head dim.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import attnscope
from external.common import Check, arguments
from external.models import tiny
from external.peer_attnread import opened_report

TOKENS = 45
KINDS, KERNELS, DTYPES = ("llama", "gpt2"), ("eager", "sdpa"), (torch.float32, torch.bfloat16)
GATED = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
}


def main() -> None:
    """Read every model by both and write the result."""
    asked, report = arguments(), opened_report()
    models = {kind: tiny(kind, Path(kind).resolve()) for kind in KINDS}
    seen = {
        (kind, kernel, dtype): both(*opened(place, kernel, dtype))
        for kind, place in models.items()
        for kernel in KERNELS
        for dtype in DTYPES
    }
    with report.check("every head of every layer, bit for bit") as check:
        compare(check, seen, lambda ours: ours)
    with report.control("attnscope's keys moved by one") as control:
        compare(control, seen, lambda ours: ours.roll(1, -1))
    with report.control("attnscope's heads in reverse order") as control:
        compare(control, seen, lambda ours: ours.flip(0))
    ours, theirs, gates = gated(AutoTokenizer.from_pretrained(models["llama"]))
    with report.check("behind a gate attnread's numbers are attnscope's times the gate, to 1e-6") as check:
        for layer, gate_HQD in gates.items():
            check.hold(near(columns(ours[layer], gate_HQD), theirs[layer]), f"layer {layer}")
    with report.control("the same without the gate") as control:
        for layer in gates:
            control.hold(near(ours[layer], theirs[layer]), f"layer {layer}")
    report.write(asked.out)


def opened(place: Path, kernel: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """A model under a kernel, with its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(place, attn_implementation=kernel, dtype=dtype).eval()
    return model, AutoTokenizer.from_pretrained(place)


def both(model: Any, tokenizer: Any) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """The weights (H, Q, K) of every layer by attnscope and by attnread."""
    from attnread import extract_attention

    ids = torch.randint(3, 60, (TOKENS,), generator=torch.Generator().manual_seed(5)).tolist()
    request = attnscope.Request(weights=True)
    loaded = attnscope.wrap(model, tokenizer)
    record = attnscope.capture(loaded, ids, request=request, engine="probe")
    ours = {key.layer: torch.as_tensor(weights) for key, weights in record.weights.items()}
    theirs: dict[int, list[Tensor]] = {}
    for (_, place, _), weights_BQK in extract_attention(model, {"input_ids": torch.tensor([ids])}).items():
        theirs.setdefault(place, []).append(weights_BQK[0].float())
    return ours, dict(zip(ours, (torch.stack(heads) for _, heads in sorted(theirs.items())), strict=True))


def compare(check: Check, seen: dict[Any, Any], change: Any) -> None:
    for (kind, kernel, dtype), (ours, theirs) in seen.items():
        for layer, weights_HQK in ours.items():
            equal = torch.equal(change(weights_HQK), theirs[layer])
            check.hold(equal, f"{kind} under {kernel} in {dtype}, layer {layer}")


def near(one: Tensor, other: Tensor) -> bool:
    return bool(torch.allclose(one, other, rtol=0, atol=1e-6))


def columns(weights_HQK: Tensor, gate_HQD: Tensor) -> Tensor:
    """The weights times the gate of the place in the head at which attnread reads each column."""
    place_K = torch.arange(weights_HQK.shape[-1]) % gate_HQD.shape[-1]
    return weights_HQK * gate_HQD[..., place_K]


def gated(tokenizer: Any) -> tuple[dict[int, Tensor], dict[int, Tensor], dict[int, Tensor]]:
    """Of a model with a gate: the weights by attnscope and by attnread, and the gates (H, Q, D) of its layers."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    model = Qwen3NextForCausalLM._from_config(Qwen3NextConfig(**GATED), attn_implementation="sdpa").eval()
    gates: dict[int, Tensor] = {}

    def keep(module: Any, args: Any, output: Tensor) -> None:
        both_QHD = output[0].view(output.shape[1], -1, 2, module.head_dim)
        gates[module.layer_idx] = both_QHD[:, :, 1].transpose(0, 1).sigmoid()

    for module in model.modules():
        if type(module).__name__ == "Qwen3NextAttention":
            module.q_proj.head_dim, module.q_proj.layer_idx = module.head_dim, module.layer_idx
            module.q_proj.register_forward_hook(keep)
    ours, theirs = both(model, tokenizer)
    return ours, theirs, gates


if __name__ == "__main__":
    main()
