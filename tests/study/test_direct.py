"""Direct effects against heads switched off one by one and a final norm spelled by hand; and where there are none."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnscope.hooks.engines import ENGINES
from attnscope.hooks.listen import listen
from attnscope.hooks.projections import gated_projections
from attnscope.model.selection import GATED_AFTER
from attnscope.observe.logit_path import path_to_logits
from attnscope.studies.ablation import Direct, direct_effects, direct_means
from attnscope.studies.copying import copying_of
from helpers.families import few
from helpers.parity_models import as_loaded, ids_for, in_half, roused_model

GRANITE = {"residual_multiplier": 0.22, "logits_scaling": 8.0, "embedding_multiplier": 12.0}
UNCAPPED = {"final_logit_softcapping": None}


@dataclass(frozen=True)
class Spelled:
    """Where a family has its parts: its final norm, its blocks, and in a block the attention and the norm after it.

    out: the output projection in the attention, of a family whose heads are switched off there.
    """

    overrides: dict[str, Any] = field(default_factory=dict)
    centred: bool = False
    norm: str = "model.norm"
    blocks: str = "model.layers"
    attention: str = "self_attn"
    after: str = ""
    out: str = ""
    beside_1: bool = False  # the weights of its norms
    reaches: Callable[[Any, int], float] = lambda model, layer: 1.0  # how much of what a block adds the last gives


PLAIN = {
    "llama": Spelled(),
    "gemma": Spelled(beside_1=True),
    "granite": Spelled(GRANITE),
    "gpt2": Spelled(centred=True, norm="transformer.ln_f", blocks="transformer.h", attention="attn"),
    "gpt_neox": Spelled(
        {"use_parallel_residual": True}, True, "gpt_neox.final_layer_norm", "gpt_neox.layers", "attention"
    ),
    "cohere": Spelled({"logit_scale": 0.25}, centred=True),
}
AFTER = {  # a norm takes the attention's output before it is added
    "gemma2": Spelled(UNCAPPED, after="post_attention_layernorm", beside_1=True),
    "gemma3_text": Spelled(UNCAPPED, after="post_attention_layernorm", beside_1=True),
    "olmo2": Spelled(after="post_attention_layernorm"),
    "olmo3": Spelled(after="post_attention_layernorm"),
    "exaone4": Spelled(after="post_attention_layernorm"),
    "glm4": Spelled(after="post_self_attn_layernorm"),
    "flex_olmo": Spelled(after="post_attention_layernorm"),
}
GATED = {  # a gate is between the heads and the projection
    "qwen3_next": Spelled(beside_1=True),
    "qwen3_5_text": Spelled(beside_1=True),
    "laguna": Spelled(),
    "afmoe": Spelled(after="post_attention_layernorm"),  # and a norm
}


def scaled_behind(model, layer):
    """Gemma 4's scalars of blocks, from this block on."""
    return float(torch.stack([block.layer_scalar for block in model.model.layers[layer:]]).prod())


FACTORS = {  # a block multiplies what it adds, or what it was given, too
    "gemma4_text": Spelled(UNCAPPED, after="post_attention_layernorm", reaches=scaled_behind),
    "minicpm3": Spelled(
        {"dim_model_base": 64},
        reaches=lambda model, layer: model.config.scale_depth / model.config.num_hidden_layers**0.5,
    ),
    # of 2 L + 1 vectors, the embedding the first, each addition gives the newest its share: 1 / sqrt of their number
    "beam": Spelled(
        UNCAPPED,
        after="post_attention_layernorm",
        reaches=lambda model, layer: (2 * len(model.model.layers) + 1) ** -0.5,
    ),
}
OUTSIDE = {  # attention asks no interface; the modules of the first two add the residual themselves
    "bloom": Spelled({}, True, "transformer.ln_f", "transformer.h", "self_attention", out="dense"),
    "mpt": Spelled({}, True, "transformer.norm_f", "transformer.blocks", "attn", out="out_proj"),
    "gptj": Spelled({}, True, "transformer.ln_f", "transformer.h", "attn", out="out_proj"),
    "falcon": Spelled({}, True, "transformer.ln_f", "transformer.h", "self_attention", out="dense"),
}
SPELLED = PLAIN | AFTER | GATED | FACTORS | OUTSIDE
TOKENS, BATCH = 9, 2


def asked(model_type):
    """Ids, and the right token after some of the rows."""
    ids_BT = torch.cat([ids_for(model_type, seed, TOKENS) for seed in range(BATCH)])
    right_BT = torch.full_like(ids_BT, -1)
    right_BT[:, 3:-1] = ids_BT[:, 4:]
    return ids_BT, right_BT


def heard(model, paths, ids_BT, change=None):
    """What named modules gave in one pass, {path: (given, gave)}, and the logits."""
    seen = {}

    def keep(path):
        def hook(module, inputs, output):
            tensors = [inputs[0] if inputs else None, output[0] if isinstance(output, tuple) else output]
            seen[path] = [None if one is None else one.double() for one in tensors]

        return hook

    handles = [model.get_submodule(path).register_forward_hook(keep(path)) for path in paths]
    engine = replace(ENGINES["eager"], change=change)
    logits = listen(model, ids_BT, lambda call: None, engine=engine, logits_at=range(ids_BT.shape[1])).logits
    for handle in handles:
        handle.remove()
    return seen, logits.double()


def without_head(model, one, place, head, ids_BT):
    """What a layer's attention gave in a pass without one of its heads."""
    path = f"{one.blocks}.{place}.{one.attention}"

    def change(call, output):
        return output.index_fill(2, torch.tensor([head]), 0.0) if call.layer == place else output

    def zeroed(module, inputs):
        heads_BTHV = inputs[0].unflatten(-1, (model.config.num_attention_heads, -1))
        return (heads_BTHV.index_fill(2, torch.tensor([head]), 0.0).flatten(-2),)

    if not one.out:
        return heard(model, [path], ids_BT, change)[0][path][1]
    handle = model.get_submodule(f"{path}.{one.out}").register_forward_pre_hook(zeroed)
    seen, _ = heard(model, [path], ids_BT)
    handle.remove()
    return seen[path][1]


def frozen(norm, x, part, centred, beside_1):
    """A part of what a norm takes, normed with the scale of the whole."""
    if centred:
        x, part = x - x.mean(-1, keepdim=True), part - part.mean(-1, keepdim=True)
    eps = next(getattr(norm, name) for name in ("eps", "variance_epsilon") if hasattr(norm, name))
    return (norm.weight.double() + beside_1) * part / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("model_type", few(SPELLED, also=("granite", "cohere", "glm4", "afmoe", "bloom", *FACTORS)))
def test_a_direct_effect_is_what_a_head_adds_to_the_centred_logit(model_type):
    one = SPELLED[model_type]
    model = roused_model(model_type, **one.overrides)
    for number, block in enumerate(model.get_submodule(one.blocks)):
        if hasattr(block, "layer_scalar"):
            block.layer_scalar.fill_(0.6 + 0.2 * number)
    loaded, (ids_BT, right_BT) = as_loaded(model), asked(model_type)
    blocks, norm = model.get_submodule(one.blocks), model.get_submodule(one.norm)
    attentions = {
        layer: f"{one.blocks}.{layer}.{one.attention}"
        for layer, block in enumerate(blocks)
        if hasattr(block, one.attention)
    }
    norms = {layer: f"{one.blocks}.{layer}.{one.after}" for layer in attentions if one.after}
    seen, logits_BTV = heard(model, [one.norm, *attentions.values(), *norms.values()], ids_BT)
    x, unembed = seen[one.norm][0], model.get_output_embeddings().weight.double()
    factor = one.overrides.get("logit_scale", 1 / one.overrides.get("logits_scaling", 1.0))
    rows_BT = right_BT >= 0

    def pushed(part_BTE):
        """The mean over the rows of what a part of the residual stream adds to the right token's centred logit."""
        return right_one(factor * frozen(norm, x, part_BTE, one.centred, one.beside_1) @ unembed.T)

    def right_one(logits):
        right = logits.gather(-1, right_BT.clamp_min(0)[..., None])[..., 0] - logits.mean(-1)
        return (right * rows_BT).sum(1) / rows_BT.sum(1)

    def added(layer, written_BTE):
        """What the block adds of it to the residual stream."""
        if layer in norms:
            after = model.get_submodule(norms[layer])
            written_BTE = frozen(after, seen[norms[layer]][0], written_BTE, False, one.beside_1)
        return one.reaches(model, layer) * one.overrides.get("residual_multiplier", 1.0) * written_BTE

    expected = []
    for layer, path in attentions.items():
        for head in range(loaded.geometry.heads_by_layer[layer]):
            written = seen[path][1] - without_head(model, one, layer, head, ids_BT)
            expected.append(pushed(added(layer, written)))
    way = path_to_logits(loaded, ids_BT[0].tolist())
    found_BN = direct_effects(loaded, way, ids_BT, right_BT)
    torch.testing.assert_close(found_BN, torch.stack(expected, 1), atol=2e-5, rtol=2e-4)
    # What the heads do not write is the embedding, the biases and the MLPs: the whole is the model's own logit.
    bias = torch.zeros_like(x) if getattr(norm, "bias", None) is None else norm.bias.double().expand_as(x)
    added_V = 0 if model.get_output_embeddings().bias is None else model.get_output_embeddings().bias.double()
    whole = pushed(x) + right_one(factor * bias @ unembed.T + added_V)
    torch.testing.assert_close(whole, right_one(logits_BTV), atol=2e-5, rtol=2e-4)


def test_a_norm_before_the_projection_has_the_scale_that_it_had():
    model = roused_model("bitnet")
    loaded, (ids_BT, right_BT) = as_loaded(model), asked("bitnet")
    paths = [f"model.layers.{layer}.self_attn.attn_sub_norm" for layer in range(len(model.model.layers))]
    seen, _ = heard(model, ["model.norm", *paths], ids_BT)
    unembed, rows_BT, expected = model.lm_head.weight.double(), right_BT >= 0, []
    for block, path in zip(model.model.layers, paths, strict=True):
        z_BTC, width = seen[path][0], model.config.hidden_size // model.config.num_attention_heads
        for head in range(model.config.num_attention_heads):
            alone = torch.zeros_like(z_BTC)
            alone[..., head * width : (head + 1) * width] = z_BTC[..., head * width : (head + 1) * width]
            attention = block.self_attn
            written = frozen(attention.attn_sub_norm, z_BTC, alone, False, False) @ attention.o_proj.weight.double().T
            logits = frozen(model.model.norm, seen["model.norm"][0], written, False, False) @ unembed.T
            right = logits.gather(-1, right_BT.clamp_min(0)[..., None])[..., 0] - logits.mean(-1)
            expected.append((right * rows_BT).sum(1) / rows_BT.sum(1))
    found_BN = direct_effects(loaded, path_to_logits(loaded, ids_BT[0].tolist()), ids_BT, right_BT)
    torch.testing.assert_close(found_BN, torch.stack(expected, 1), atol=1e-5, rtol=2e-4)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("inkling_text", "block 0 does not add its modules' outputs as they are"),
        ("hy_v4", "its residual is 4 streams that every block mixes, as in hyper-connections"),
        ("inkling2_text", "its blocks attend to what earlier blocks were given"),
        ("bert", "its attention gives something else than the sum of its heads"),
        ("jetmoe", "no projection takes the heads side by side"),
        ("xlnet", "no projection takes the heads side by side"),
        ("cpmant", "its blocks are given other tokens than those of the text"),
    ],
)
def test_no_direct_effect_where_the_way_is_not_plain(model_type, reason):
    way = path_to_logits(as_loaded(roused_model(model_type)), ids_for(model_type)[0].tolist())
    assert isinstance(way, str)
    assert reason in way


def test_where_all_heads_are_of_linear_layers_that_is_why_they_have_no_direct_effect():
    passes = SimpleNamespace(loaded=as_loaded(roused_model("mamba2")), task=SimpleNamespace(ids=ids_for("mamba2")))
    assert direct_means(passes) == Direct({}, f"linear heads have none: {GATED_AFTER}")


@pytest.mark.parametrize("model_type", ["qwen3_next", "bitnet"])
def test_copying_reads_what_projections_behind_gates_are_given(model_type):
    loaded, ids_BT, given = as_loaded(roused_model(model_type)), ids_for(model_type)[:, :8], {}
    copying = replace(copying_of(loaded, ids_BT[0].tolist()), row_R=torch.tensor([2, 5]))
    for one in copying.gated:
        copying.out[one].register_forward_pre_hook(lambda _, inputs, one=one: given.update({one: inputs[0]}))
    found = copying.behind_gates(loaded, ids_BT)
    with torch.no_grad():
        loaded.model(ids_BT)
    assert found.keys() == given.keys() == copying.gated != set()
    for one, given_BRC in found.items():
        torch.testing.assert_close(given_BRC, given[one].reshape(*ids_BT.shape, -1)[:, [2, 5]], atol=1e-5, rtol=1e-5)


def test_a_gate_is_one_that_the_heads_do_not_make():
    """What is given to llama's projections is changed in several ways; only some multiply each number of the heads."""
    gate = 0.5 + torch.rand(64, generator=torch.Generator().manual_seed(0))
    changes = {
        "gate": (lambda z: z * gate, True),
        "gate of the heads": (lambda z: z * z.sigmoid(), False),
        "heads in another order": (lambda z: z.flip(-1), False),
        "centred": (lambda z: z - z.mean(-1, keepdim=True), False),
    }
    for name, (change, is_gate) in changes.items():
        model = roused_model("llama")
        attentions = [block.self_attn for block in model.model.layers]
        for one in attentions:
            one.o_proj.register_forward_pre_hook(lambda module, inputs, change=change: (change(inputs[0]),))
        found = gated_projections(as_loaded(model), ids_for("llama")[0].tolist()[:8])
        assert found == ({one: one.o_proj for one in attentions} if is_gate else {}), name


@pytest.mark.parametrize("model_type", few(["llama", "gemma3_text", "qwen3_next"], also=("qwen3_next",)))
def test_half_precision_blurs_no_verdict(model_type):
    (ids_BT, right_BT), model = asked(model_type), roused_model(model_type)
    exact = direct_effects(as_loaded(model), path_to_logits(as_loaded(model), ids_BT[0].tolist()), ids_BT, right_BT)
    half = as_loaded(in_half(model))
    rounded = direct_effects(half, path_to_logits(half, ids_BT[0].tolist()), ids_BT, right_BT)
    torch.testing.assert_close(rounded, exact, atol=4e-3, rtol=0)  # of 0.09 at the most
    refused = as_loaded(in_half(roused_model("inkling_text")))
    assert "does not add its modules' outputs" in path_to_logits(refused, ids_for("inkling_text")[0].tolist())


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("model.layers.1.self_attn", "layer 1: its attention gives something else than the sum of its heads"),
        ("model.layers.1", "block 1 does not add its modules' outputs as they are"),
        ("model.norm", "no RMSNorm or LayerNorm takes what the last block gives"),
    ],
)
def test_a_way_that_is_changed_by_one_percent_is_not_plain(place, reason):
    model = roused_model("llama")
    loaded, ids = as_loaded(model), ids_for("llama")[0].tolist()
    assert not isinstance(path_to_logits(loaded, ids), str)
    bend = torch.linspace(0.99, 1.01, 128)  # another factor for every entry

    def bent(module, inputs, output):
        first = output[0] if isinstance(output, tuple) else output
        changed = first * bend[: first.shape[-1]]
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    handle = model.get_submodule(place).register_forward_hook(bent)
    assert reason in path_to_logits(loaded, ids)
    handle.remove()


def test_the_logits_before_a_soft_cap_are_meant():
    way = path_to_logits(as_loaded(roused_model("nanochat")), ids_for("nanochat")[0].tolist())
    assert "before their cap at 15" in way.note
