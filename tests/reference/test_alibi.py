"""ALiBi's slopes against the paper and against transformers' BLOOM and MPT, also for 3, 6, 12, 20, 71, 112 heads."""

import math

import pytest
import torch
from torch.testing import assert_close
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from attnscope.reference.attention import softmax
from attnscope.reference.masks import causal_mask, positions
from attnscope.reference.positions import alibi_bias, alibi_slopes

HEADS = [1, 2, 3, 5, 6, 7, 8, 12, 16, 20, 32, 71, 112]


def bloom(n_heads, length):
    return build_alibi_tensor(torch.ones(1, length, dtype=torch.long), n_heads, torch.float32)


def mpt(n_heads, length):
    return build_mpt_alibi_tensor(n_heads, length)


@pytest.mark.parametrize("n_heads", HEADS)
def test_slopes_equal_transformers(n_heads):
    # the bias of token 1 is the slope itself in BLOOM; in MPT the last but one token's is minus the slope
    assert_close(alibi_slopes(n_heads), bloom(n_heads, 2)[:, 0, 1])
    assert_close(alibi_slopes(n_heads), -mpt(n_heads, 2)[:, 0, 0])
    assert_close(alibi_slopes(n_heads, max_bias=4.0), -build_mpt_alibi_tensor(n_heads, 2, 4.0)[:, 0, 0])


def test_slopes_of_the_paper():
    assert alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    assert_close(alibi_slopes(16), torch.tensor([2.0 ** (-n / 2) for n in range(1, 17)]))
    # 12 heads: the 8 of 8 heads, then the first, third, fifth and seventh of 16
    assert_close(
        alibi_slopes(12), torch.tensor([2.0**-n for n in range(1, 9)] + [2.0 ** (-n / 2) for n in (1, 3, 5, 7)])
    )


@pytest.mark.parametrize("theirs", [bloom, mpt])
@pytest.mark.parametrize("n_heads", [4, 6])
def test_weights_equal_those_of_transformers_shifted_bias(theirs, n_heads):
    logits = torch.randn(n_heads, 9, 9, generator=torch.Generator().manual_seed(0))
    logits = logits.masked_fill(~causal_mask(*positions(9)), -math.inf)
    ours = softmax(logits + alibi_bias(alibi_slopes(n_heads), *positions(9)))
    assert_close(ours, softmax(logits + theirs(n_heads, 9)), rtol=0, atol=1e-6)
    assert not torch.allclose(ours, softmax(logits), atol=1e-2)


def test_bias_entry_by_entry_with_a_cache():
    bias_HQK = alibi_bias(torch.tensor([0.5, 0.25]), *positions(2, 5))
    for h, slope in enumerate((0.5, 0.25)):
        for i, query in enumerate((3, 4)):
            for key in range(5):
                assert float(bias_HQK[h, i, key]) == -slope * (query - key)
