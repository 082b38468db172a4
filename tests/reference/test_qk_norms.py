"""Norms of q and k against transformers' and PyTorch's, per head and over the full width, and by hand."""

import math

import pytest
import torch
from torch.testing import assert_close

from attnscope.reference.projections import l2_norm, layer_norm, rms_norm


@pytest.fixture(name="q_BTHD")
def random_queries():
    return 3 * torch.randn(2, 5, 4, 8, generator=torch.Generator().manual_seed(0)) + 1


def weight_like(*shape):
    return torch.linspace(0.2, 2.0, math.prod(shape)).view(shape)


def test_per_head_is_qwen3s(q_BTHD):
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    module = Qwen3RMSNorm(8, eps=1e-3)
    module.weight.data = weight_like(8)
    assert_close(rms_norm(q_BTHD, module.weight, eps=1e-3), module(q_BTHD))


def test_full_width_is_olmo2s(q_BTHD):
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    module = Olmo2RMSNorm(32)
    module.weight.data = weight_like(32)
    full = q_BTHD.flatten(-2)
    ours = rms_norm(full, module.weight, eps=module.variance_epsilon)
    assert_close(ours, module(full))
    per_head = rms_norm(q_BTHD, module.weight.view(4, 8)).flatten(-2)
    assert not torch.allclose(ours, per_head, atol=1e-2)


def test_one_plus_w_is_gemmas(q_BTHD):
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    module = Gemma3RMSNorm(8)
    module.weight.data = weight_like(8)
    assert_close(rms_norm(q_BTHD, module.weight, eps=module.eps, offset=1.0), module(q_BTHD))


def test_without_a_weight_is_llama4s(q_BTHD):
    from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm

    assert_close(rms_norm(q_BTHD, eps=1e-6), Llama4TextL2Norm(1e-6)(q_BTHD))


def test_layer_norm_with_a_weight_per_head_is_coheres(q_BTHD):
    from transformers.models.cohere.modeling_cohere import CohereLayerNorm

    module = CohereLayerNorm(hidden_size=(4, 8), eps=1e-4)
    module.weight.data = weight_like(4, 8)
    assert_close(layer_norm(q_BTHD, module.weight, eps=1e-4), module(q_BTHD))


def test_layer_norm_is_torchs(q_BTHD):
    module = torch.nn.LayerNorm(8, eps=1e-3)
    module.weight.data, module.bias.data = weight_like(8), weight_like(8).flip(0)
    assert_close(layer_norm(q_BTHD, module.weight, module.bias, eps=1e-3), module(q_BTHD))


def test_l2_norm_is_qwen3_nexts(q_BTHD):
    from transformers.models.qwen3_next.modeling_qwen3_next import l2norm

    assert_close(l2_norm(q_BTHD), l2norm(q_BTHD, eps=1e-6))


def test_by_hand():
    x = [1.0, -2.0, 4.0]
    square = sum(v * v for v in x)
    assert_close(rms_norm(torch.tensor(x), eps=0.5), torch.tensor([v / math.sqrt(square / 3 + 0.5) for v in x]))
    assert_close(l2_norm(torch.tensor(x), eps=0.5), torch.tensor([v / math.sqrt(square + 0.5) for v in x]))
    variance = sum((v - 1) ** 2 for v in x) / 3
    assert_close(layer_norm(torch.tensor(x), eps=0.5), torch.tensor([(v - 1) / math.sqrt(variance + 0.5) for v in x]))
