"""Direct effects against heads switched off one by one and a final norm spelled by hand; and where there are none."""

from dataclasses import replace

import pytest
import torch

from attnscope.seam.engines import ENGINES
from attnscope.seam.listen import listen
from attnscope.study.ablation.direct import direct_effects
from attnscope.study.ablation.way import way_to_logits
from helpers.parity_models import as_loaded, ids_for, in_half, roused_model

GRANITE = {"residual_multiplier": 0.22, "logits_scaling": 8.0, "embedding_multiplier": 12.0}
PLAIN = {  # family: overrides, whether its final norm centres, where that norm and the blocks are, the attention in one
    "llama": ({}, False, "model.norm", "model.layers", "self_attn"),
    "gemma": ({}, False, "model.norm", "model.layers", "self_attn"),
    "granite": (GRANITE, False, "model.norm", "model.layers", "self_attn"),
    "gpt2": ({}, True, "transformer.ln_f", "transformer.h", "attn"),
    "gpt_neox": ({"use_parallel_residual": True}, True, "gpt_neox.final_layer_norm", "gpt_neox.layers", "attention"),
    "cohere": ({"logit_scale": 0.25}, True, "model.norm", "model.layers", "self_attn"),
}
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


def frozen(norm, x, part, centred, gemma):
    """A part of what the final norm takes, normed with the scale of the whole."""
    if centred:
        x, part = x - x.mean(-1, keepdim=True), part - part.mean(-1, keepdim=True)
    eps = next(getattr(norm, name) for name in ("eps", "variance_epsilon") if hasattr(norm, name))
    return (norm.weight.double() + gemma) * part / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("model_type", PLAIN)
def test_a_direct_effect_is_what_a_head_adds_to_the_centred_logit(model_type):
    overrides, centred, norm_path, blocks, attention = PLAIN[model_type]
    model = roused_model(model_type, **overrides)
    loaded, (ids_BT, right_BT) = as_loaded(model), asked(model_type)
    config, norm, layers = model.config, model.get_submodule(norm_path), len(model.get_submodule(blocks))
    attentions = [f"{blocks}.{layer}.{attention}" for layer in range(layers)]
    seen, logits_BTV = heard(model, [norm_path, *attentions], ids_BT)
    x, unembed = seen[norm_path][0], model.get_output_embeddings().weight.double()
    factor = overrides.get("logit_scale", 1 / overrides.get("logits_scaling", 1.0))
    rows_BT = right_BT >= 0

    def pushed(part_BTE):
        """The mean over the rows of what a part of the residual stream adds to the right token's centred logit."""
        logits = factor * frozen(norm, x, part_BTE, centred, model_type == "gemma") @ unembed.T
        return right_one(logits)

    def right_one(logits):
        right = logits.gather(-1, right_BT.clamp_min(0)[..., None])[..., 0] - logits.mean(-1)
        return (right * rows_BT).sum(1) / rows_BT.sum(1)

    expected = []
    for layer, path in enumerate(attentions):
        for head in range(config.num_attention_heads):

            def without(place, output, layer=layer, head=head):
                return output.index_fill(2, torch.tensor([head]), 0.0) if place.layer == layer else output

            written = seen[path][1] - heard(model, [path], ids_BT, without)[0][path][1]
            expected.append(pushed(overrides.get("residual_multiplier", 1.0) * written))
    way = way_to_logits(loaded, ids_BT[0].tolist())
    found_BN = direct_effects(loaded, way, ids_BT, right_BT)
    torch.testing.assert_close(found_BN, torch.stack(expected, 1), atol=2e-5, rtol=2e-4)
    # What the heads do not write is the embedding, the biases and the MLPs: the whole is the model's own logit.
    bias = torch.zeros_like(x) if getattr(norm, "bias", None) is None else norm.bias.double().expand_as(x)
    whole = pushed(x) + right_one(factor * bias @ unembed.T)
    torch.testing.assert_close(whole, right_one(logits_BTV), atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gemma2", "block 0 does not add its modules' outputs as they are"),
        ("olmo2", "as where a norm follows the attention"),
        ("bitnet", "no projection takes the heads side by side"),
        ("afmoe", "no projection takes the heads side by side"),
        ("gpt_neo", "gpt_neo attends where its heads' outputs are not seen"),
    ],
)
def test_no_direct_effect_where_the_way_is_not_plain(model_type, reason):
    way = way_to_logits(as_loaded(roused_model(model_type)), ids_for(model_type)[0].tolist())
    assert isinstance(way, str)
    assert reason in way


def test_half_precision_blurs_no_verdict():
    (ids_BT, right_BT), model = asked("llama"), roused_model("llama")
    exact = direct_effects(as_loaded(model), way_to_logits(as_loaded(model), ids_BT[0].tolist()), ids_BT, right_BT)
    half = as_loaded(in_half(model))
    rounded = direct_effects(half, way_to_logits(half, ids_BT[0].tolist()), ids_BT, right_BT)
    torch.testing.assert_close(rounded, exact, atol=4e-3, rtol=0)  # of 0.09 at the most
    post_normed = as_loaded(in_half(roused_model("gemma2")))
    assert "does not add its modules' outputs" in way_to_logits(post_normed, ids_for("gemma2")[0].tolist())


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
    assert not isinstance(way_to_logits(loaded, ids), str)
    bend = torch.linspace(0.99, 1.01, 128)  # another factor for every entry

    def bent(module, inputs, output):
        first = output[0] if isinstance(output, tuple) else output
        changed = first * bend[: first.shape[-1]]
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    handle = model.get_submodule(place).register_forward_hook(bent)
    assert reason in way_to_logits(loaded, ids)
    handle.remove()


def test_the_logits_before_a_soft_cap_are_meant():
    way = way_to_logits(as_loaded(roused_model("nanochat")), ids_for("nanochat")[0].tolist())
    assert "before their cap at 15" in way.note
