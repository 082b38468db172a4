"""Multi-head latent attention against transformers' DeepSeek-V3, DeepSeek-V2 and MiniCPM 3 attention modules."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from attnscope.reference.attention import attention_output, attention_weights
from attnscope.reference.layouts import LATENT
from attnscope.reference.masks import additive_mask, causal_mask, positions
from attnscope.reference.positions import apply_rotary, cos_sin, inverse_frequencies, yarn_mscale
from attnscope.reference.projections import SPLITS, LayerInputs

SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}


def build(family, rope, **options):
    if family == "deepseek_v3":
        from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config as Config
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention as Attention
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding as Rotary
    elif family == "deepseek_v2":
        from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config as Config
        from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention as Attention
        from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2RotaryEmbedding as Rotary
    else:
        from transformers.models.minicpm3.configuration_minicpm3 import MiniCPM3Config as Config
        from transformers.models.minicpm3.modeling_minicpm3 import MiniCPM3Attention as Attention
        from transformers.models.minicpm3.modeling_minicpm3 import MiniCPM3RotaryEmbedding as Rotary
    config = Config(**SIZES, rope_parameters=dict(rope), **options)
    torch.manual_seed(0)
    module = Attention(config, layer_idx=0).eval()
    for name, parameter in module.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    return module, Rotary(config)


def inputs_of(parameters, hidden, **sizes):
    layer = SimpleNamespace(index=0, heads=sizes.pop("heads"), type="full", window=None)
    return LayerInputs(LATENT, parameters, SimpleNamespace(**sizes), layer, hidden, torch.arange(hidden.shape[1]))


def oracle(module, hidden, rope, layout):
    frequencies, scaling = inverse_frequencies(rope, 4, max_position=64)
    cos_TM, sin_TM = cos_sin(torch.arange(9), frequencies, scaling)
    inputs = inputs_of(dict(module.named_parameters()), hidden, heads=4, qk_rope_head_dim=4, v_head_dim=5)
    assert inputs.eps == module.kv_a_layernorm.variance_epsilon
    q, k, v = (x.transpose(1, 2) for x in SPLITS["latent"](inputs))
    q, k = (apply_rotary(x, cos_TM, sin_TM, layout=layout, part="last") for x in (q, k))
    scale = 10**-0.5 * yarn_mscale(rope.get("factor", 1.0), rope.get("mscale_all_dim", 0.0)) ** 2
    weights_BHQK = attention_weights(q, k, scale=scale, mask=causal_mask(*positions(9)))
    return weights_BHQK, attention_output(weights_BHQK, v)


CASES = [
    ("deepseek_v3", YARN, "deinterleaved", {"q_lora_rank": 8}),
    ("deepseek_v3", DEFAULT, "half", {"q_lora_rank": 8, "rope_interleave": False}),
    ("deepseek_v3", DEFAULT, "deinterleaved", {"q_lora_rank": None}),
    ("deepseek_v3", DEFAULT, "deinterleaved", {"q_lora_rank": 8, "attention_bias": True}),
    ("deepseek_v2", DEFAULT, "interleaved", {"q_lora_rank": None}),
    ("minicpm3", DEFAULT, "half", {"q_lora_rank": 8}),
]


@pytest.mark.parametrize(("family", "rope", "layout", "options"), CASES)
@torch.no_grad()
def test_equals_transformers(family, rope, layout, options):
    module, rotary = build(family, rope, **options)
    hidden = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))
    places = rotary(hidden, torch.arange(9).expand(2, 9))
    mask = additive_mask(causal_mask(*positions(9)))[None, None]
    expected_out, expected_weights = module(hidden, position_embeddings=places, attention_mask=mask)
    weights_BHQK, output_BHQV = oracle(module, hidden, rope, layout)
    assert_close(weights_BHQK, expected_weights, rtol=0, atol=2e-6)
    assert_close(module.o_proj(output_BHQV.transpose(1, 2).flatten(-2)), expected_out, rtol=0, atol=1e-5)

    wrong_layout = "half" if layout != "half" else "interleaved"
    with pytest.raises(AssertionError):
        assert_close(oracle(module, hidden, rope, wrong_layout)[0], expected_weights, rtol=0, atol=2e-6)


@torch.no_grad()
def test_one_token_head_by_head():
    """The equations with one token, one matrix and one head at a time."""
    generator = torch.Generator().manual_seed(2)

    def rand(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shapes = {"q_b_proj": (8, 5), "kv_a_proj_with_mqa": (6, 7), "kv_a_layernorm": (4,), "kv_b_proj": (10, 4)}
    shapes |= {"q_a_proj": (5, 7), "q_a_layernorm": (5,)}
    matrices = {name: rand(*shape) for name, shape in shapes.items()}
    hidden_E = rand(7)
    parameters = {f"{name}.weight": matrix for name, matrix in matrices.items()}
    inputs = inputs_of(parameters, hidden_E[None, None], heads=2, qk_rope_head_dim=2, v_head_dim=3)
    q_HD, k_HD, v_HV = (x[0, 0] for x in SPLITS["latent"](inputs))
    latent_q = matrices["q_a_proj"] @ hidden_E
    latent_q = latent_q / (latent_q.square().mean() + 1e-6).sqrt() * matrices["q_a_layernorm"]
    both = matrices["kv_a_proj_with_mqa"] @ hidden_E
    latent_kv = both[:4] / (both[:4].square().mean() + 1e-6).sqrt() * matrices["kv_a_layernorm"]
    for head in range(2):
        assert_close(q_HD[head], matrices["q_b_proj"][4 * head : 4 * head + 4] @ latent_q)
        rows = matrices["kv_b_proj"][5 * head : 5 * head + 5]
        assert_close(k_HD[head], torch.cat([rows[:2] @ latent_kv, both[4:]]))
        assert_close(v_HV[head], rows[2:] @ latent_kv)


@pytest.mark.parametrize(("factor", "expected"), [(0.5, 1.0), (1.0, 1.0), (1.5, 1 + 0.05 * math.log(1.5)), (4.0, None)])
def test_the_factor_of_yarn_is_one_up_to_a_factor_of_one(factor, expected):
    assert yarn_mscale(factor, 0.5) == pytest.approx(1 + 0.05 * math.log(4) if expected is None else expected)
