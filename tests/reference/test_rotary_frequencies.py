"""Frequencies and attention factors against transformers' ROPE_INIT_FUNCTIONS, and against their formulas in loops."""

import math

import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from attnscope.reference.positions import cos_sin, inverse_frequencies

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.01 * m for m in range(32)],
    "long_factor": [1.0 + 0.5 * m for m in range(32)],
    "original_max_position_embeddings": 4096,
}
CASES = {
    "linear": ({"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, None),
    "linear, other base": ({"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}, None),
    "dynamic, at rest": ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, None),
    "dynamic, short": ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, 100),
    "dynamic, long": ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, 30000),
    "yarn": (YARN, None),
    "yarn, betas": (YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "factor": 32.0}, None),
    "yarn, attention factor": (YARN | {"attention_factor": 0.7}, None),
    "yarn, mscale (DeepSeek)": (YARN | {"mscale": 1.0, "mscale_all_dim": 0.707, "factor": 40.0}, None),
    "yarn, factor below 1": (YARN | {"factor": 0.5}, None),
    "yarn, not truncated (gpt-oss)": (YARN | {"truncate": False, "rope_theta": 150000.0, "factor": 32.0}, None),
    "yarn, a ramp without a step": (YARN | {"original_max_position_embeddings": 6}, None),
    "yarn, a ramp past the last dim": (YARN | {"original_max_position_embeddings": 850, "rope_theta": 10.0}, None),
    "yarn, factor from lengths": (YARN | {"factor": None}, None),
    "longrope, short": (LONGROPE, None),
    "longrope, at the edge": (LONGROPE, 4096),
    "longrope, long": (LONGROPE, 4097),
    "longrope, factor": (LONGROPE | {"factor": 32.0}, 5000),
    "longrope, factor below 1": (LONGROPE | {"factor": 0.5}, 5000),
    "longrope, attention factor": (LONGROPE | {"attention_factor": 1.19}, None),
    "llama3": (LLAMA3, None),
    "llama3, 3.2": (LLAMA3 | {"factor": 32.0}, None),
    "llama3, narrow": (LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 3.0, "rope_theta": 10000.0}, None),
    "proportional": ({"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}, None),
    "proportional, factor": ({"rope_type": "proportional", "rope_theta": 1e4, "factor": 8.0}, None),
}


def config(rope, max_position=8192):
    return LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=max_position, rope_parameters=dict(rope)
    )


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case):
    rope, seq_len = CASES[case]
    expected, expected_scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config(rope), "cpu", seq_len=seq_len)
    inv_freq, scaling = inverse_frequencies(rope, 64, max_position=8192, seq_len=seq_len)
    assert_close(inv_freq, expected, rtol=1e-7, atol=0)
    assert scaling == pytest.approx(expected_scaling, rel=1e-12)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
def test_partial_rotary_turns_fewer_dims(kind):
    rope = next(rope for rope, _ in CASES.values() if rope["rope_type"] == kind) | {"partial_rotary_factor": 0.5}
    expected, _ = ROPE_INIT_FUNCTIONS[kind](config(rope), "cpu")
    assert_close(inverse_frequencies(rope, 32, max_position=8192)[0], expected, rtol=1e-7, atol=0)


def test_default_and_angles_equal_llamas_module():
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    module = LlamaRotaryEmbedding(config(rope))
    inv_freq, scaling = inverse_frequencies(rope, 64)
    assert_close(inv_freq, module.inv_freq, rtol=0, atol=0)
    positions = torch.tensor([[0, 1, 17, 8191]])
    for mine, theirs in zip(cos_sin(positions, inv_freq, scaling), module(torch.zeros(1), positions), strict=True):
        assert_close(torch.cat([mine, mine], dim=-1), theirs, rtol=0, atol=1e-7)


@pytest.mark.parametrize("length", [4096, 4097])
def test_longrope_switches_as_phi3s_module_does(length):
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    phi3 = Phi3Config(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_parameters=dict(LONGROPE),
        pad_token_id=0,
    )
    cos, _ = Phi3RotaryEmbedding(phi3)(torch.zeros(1), torch.tensor([[5, length - 1]]))
    inv_freq, scaling = inverse_frequencies(LONGROPE, 64, max_position=131072, seq_len=length)
    assert_close(cos_sin(torch.tensor([[5, length - 1]]), inv_freq, scaling)[0], cos[..., :32], rtol=0, atol=1e-6)


def test_yarn_pair_by_pair():
    """Peng et al. 2023, section 3.2: a pair that turns often is left alone, one that turns rarely is interpolated."""
    inv_freq, scaling = inverse_frequencies(YARN, 64)
    for m in range(32):
        plain = 10000.0 ** (-2 * m / 64)
        turns = 2048 * plain / (2 * math.pi)
        if turns > 40:
            assert float(inv_freq[m]) == pytest.approx(plain, rel=1e-6)
        elif turns < 0.7:
            assert float(inv_freq[m]) == pytest.approx(plain / 4, rel=1e-6)
        else:
            assert plain / 4 * (1 - 1e-6) <= float(inv_freq[m]) <= plain * (1 + 1e-6)
    assert scaling == pytest.approx(0.1 * math.log(4) + 1)


def test_llama3_pair_by_pair():
    inv_freq, scaling = inverse_frequencies(LLAMA3, 128)
    assert scaling == 1.0
    for m in range(64):
        plain = 500000.0 ** (-2 * m / 128)
        turns = 8192 * plain / (2 * math.pi)
        smooth = min(max((turns - 1) / (4 - 1), 0), 1)
        assert float(inv_freq[m]) == pytest.approx((1 - smooth) * plain / 8 + smooth * plain, rel=1e-5)


def test_refusals():
    with pytest.raises(ValueError, match=r"rope_type out of default, linear, .* got 'ntk'"):
        inverse_frequencies({"rope_type": "ntk", "rope_theta": 1e4}, 64)
    with pytest.raises(ValueError, match="max_position for rope_type 'dynamic', got None"):
        inverse_frequencies({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 64)
