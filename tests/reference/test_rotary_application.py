"""The rotation against transformers' own, family by family, and against a loop over pairs."""

import math

import pytest
import torch
from torch.testing import assert_close

from attnscope.reference.attention import attention_logits
from attnscope.reference.positions import apply_rotary, cos_sin, default_frequencies

POSITIONS_BT = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 300, 1000]])


@pytest.fixture(name="q_BHTD")
def random_queries():
    return torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(0))


def turned(x, width, **options):
    cos_BTM, sin_BTM = cos_sin(POSITIONS_BT, default_frequencies(width))
    return apply_rotary(x, cos_BTM, sin_BTM, **options)


def doubled(width):
    """cos and sin as transformers keeps them: the frequencies twice, side by side."""
    angle = POSITIONS_BT[..., None].float() * default_frequencies(width)
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("family", ["llama", "phi"])
def test_half_split(q_BHTD, family):
    if family == "llama":
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
    else:
        from transformers.models.phi.modeling_phi import apply_rotary_pos_emb
    expected, _ = apply_rotary_pos_emb(q_BHTD, q_BHTD, *doubled(16))
    assert_close(turned(q_BHTD, 16), expected, rtol=0, atol=1e-6)


def test_half_split_partial_as_phi_slices_it(q_BHTD):
    from transformers.models.phi.modeling_phi import apply_rotary_pos_emb

    expected, _ = apply_rotary_pos_emb(q_BHTD[..., :6], q_BHTD[..., :6], *doubled(6))
    expected = torch.cat([expected, q_BHTD[..., 6:]], dim=-1)
    assert_close(turned(q_BHTD, 6), expected, rtol=0, atol=1e-6)


def test_sign_flipped_is_nanochats(q_BHTD):
    from transformers.models.nanochat.modeling_nanochat import apply_rotary_pos_emb

    expected, _ = apply_rotary_pos_emb(q_BHTD, q_BHTD, *doubled(16))
    assert_close(turned(q_BHTD, 16, reverse=True), expected, rtol=0, atol=1e-6)


def test_interleaved_is_gptjs(q_BHTD):
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb

    cos_BTM, sin_BTM = cos_sin(POSITIONS_BT, default_frequencies(16))
    expected = apply_rotary_pos_emb(q_BHTD.transpose(1, 2), sin_BTM, cos_BTM).transpose(1, 2)
    assert_close(turned(q_BHTD, 16, layout="interleaved"), expected, rtol=0, atol=1e-6)


def test_interleaved_is_coheres(q_BHTD):
    from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb

    cos, sin = (torch.repeat_interleave(t[..., :8], 2, dim=-1) for t in doubled(16))
    expected, _ = apply_rotary_pos_emb(q_BHTD, q_BHTD, cos, sin)
    assert_close(turned(q_BHTD, 16, layout="interleaved"), expected, rtol=0, atol=1e-6)


def test_interleaved_partial_is_glms(q_BHTD):
    from transformers.models.glm.modeling_glm import apply_rotary_pos_emb

    expected, _ = apply_rotary_pos_emb(q_BHTD, q_BHTD, *doubled(8))
    assert_close(turned(q_BHTD, 8, layout="interleaved"), expected, rtol=0, atol=1e-6)


def test_deinterleaved_last_dims_is_deepseek_v3s(q_BHTD):
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

    expected, _ = apply_rotary_pos_emb_interleave(q_BHTD[..., -6:], q_BHTD[..., -6:], *doubled(6))
    expected = torch.cat([q_BHTD[..., :-6], expected], dim=-1)
    assert_close(turned(q_BHTD, 6, layout="deinterleaved", part="last"), expected, rtol=0, atol=1e-6)


def test_interleaved_is_the_complex_product_of_deepseek_v2(q_BHTD):
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb

    angle = POSITIONS_BT[..., None].float() * default_frequencies(16)
    expected, _ = apply_rotary_emb(q_BHTD, q_BHTD, torch.polar(torch.ones_like(angle), angle))
    assert_close(turned(q_BHTD, 16, layout="interleaved"), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("layout", "pairs", "out"),
    [
        ("half", [(0, 3), (1, 4), (2, 5)], [(0, 3), (1, 4), (2, 5)]),
        ("interleaved", [(0, 1), (2, 3), (4, 5)], [(0, 1), (2, 3), (4, 5)]),
        ("deinterleaved", [(0, 1), (2, 3), (4, 5)], [(0, 3), (1, 4), (2, 5)]),
    ],
)
def test_each_pair_turns_by_its_own_angle(layout, pairs, out, reverse):
    x, frequencies = torch.arange(1.0, 9.0), default_frequencies(6)
    cos, sin = cos_sin(torch.tensor([11]), frequencies, scaling=2.0)
    result = apply_rotary(x[None], cos, sin, layout=layout, reverse=reverse)[0]
    assert_close(result[6:], x[6:])
    for m, ((a, b), (a_out, b_out)) in enumerate(zip(pairs, out, strict=True)):
        angle = (-1 if reverse else 1) * 11 * float(frequencies[m])
        number = 2.0 * complex(x[a], x[b]) * complex(math.cos(angle), math.sin(angle))
        assert_close(complex(result[a_out], result[b_out]), number, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", ["half", "interleaved", "deinterleaved"])
def test_logits_know_the_distance_only(layout):
    q, k = torch.randn(2, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    frequencies = default_frequencies(8).double()

    def logit(query_position, key_position):
        q_turned = apply_rotary(q, *cos_sin(torch.tensor([query_position]), frequencies), layout=layout)
        k_turned = apply_rotary(k, *cos_sin(torch.tensor([key_position]), frequencies), layout=layout)
        return attention_logits(q_turned, k_turned)

    assert_close(logit(9, 4), logit(105, 100))
    assert not torch.allclose(logit(9, 4), logit(9, 5))
    assert not torch.allclose(logit(9, 4), logit(4, 9))


def test_deinterleaved_gives_the_logits_of_interleaved(q_BHTD):
    k_BHTD = q_BHTD.flip(-1)
    logits = [
        attention_logits(turned(q_BHTD, 16, layout=layout), turned(k_BHTD, 16, layout=layout))
        for layout in ("interleaved", "deinterleaved")
    ]
    assert_close(logits[0], logits[1], rtol=0, atol=1e-5)


def test_refusals():
    cos, sin = cos_sin(torch.arange(3), default_frequencies(4))
    with pytest.raises(ValueError, match="layout out of half, interleaved, deinterleaved, got 'neox'"):
        apply_rotary(torch.zeros(3, 4), cos, sin, layout="neox")
    with pytest.raises(ValueError, match="first or last, got 'middle'"):
        apply_rotary(torch.zeros(3, 4), cos, sin, part="middle")
    with pytest.raises(ValueError, match="at most 2 dims to turn, got 4"):
        apply_rotary(torch.zeros(3, 2), cos, sin)
