"""The matrix form against the loop form, against PyTorch's own attention, and against numbers worked out by hand."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

from attnscope.reference import attention, naive
from attnscope.reference.masks import additive_mask, causal_mask, key_padding_mask, positions, sliding_window_mask

CAUSAL_5 = causal_mask(*positions(5))
CASES = {
    "plain": {},
    "scale": {"scale": 0.3},
    "scale 1": {"scale": 1.0},
    "softcap": {"softcap": 0.7},
    "bias": {"bias": torch.linspace(-2, 2, 4 * 5 * 5).view(4, 5, 5)},
    "causal": {"mask": CAUSAL_5},
    "causal, additive": {"mask": additive_mask(CAUSAL_5)},
    "additive, finite, per head": {"mask": torch.linspace(-3, 3, 4 * 5 * 5).view(4, 5, 5).flip(1)},
    "window": {"mask": CAUSAL_5 & sliding_window_mask(*positions(5), window=2)},
    "padding": {"mask": key_padding_mask(torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]))},
    "sinks": {"sinks": torch.tensor([-1.0, 0.0, 1.0, 3.0])},
    "everything": {
        "scale": 2.0,
        "softcap": 1.5,
        "bias": torch.linspace(-2, 2, 4 * 5 * 5).view(4, 5, 5),
        "mask": CAUSAL_5 & key_padding_mask(torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]])),
        "sinks": torch.tensor([-1.0, 0.0, 1.0, 3.0]),
    },
}


def qkv(q_shape, k_shape, v_width=None, dtype=torch.float64, requires_grad=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (q_shape, k_shape, (*k_shape[:-1], v_width or k_shape[-1]))
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)
        for shape in shapes
    ]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("case", CASES)
def test_matrix_form_equals_loop_form_head_by_head(case, kv_heads):
    q_BHQD, k_BGKD, v_BGKV = qkv((2, 4, 5, 6), (2, kv_heads, 5, 6), v_width=3)
    loop_BHQK = naive.attention_weights(q_BHQD, k_BGKD, **CASES[case])
    matrix_BHQK = attention.attention_weights(q_BHQD, k_BGKD, **CASES[case])
    loop_out, matrix_out = naive.attention_output(loop_BHQK, v_BGKV), attention.attention_output(matrix_BHQK, v_BGKV)
    assert loop_out.shape == (2, 4, 5, 3)
    for head in range(4):
        assert_close(matrix_BHQK[:, head], loop_BHQK[:, head], rtol=0, atol=1e-13)
        assert_close(matrix_out[:, head], loop_out[:, head], rtol=0, atol=1e-13)


def test_each_step_is_noted_with_its_numbers():
    q_HQD, k_GKD, _ = qkv((4, 5, 6), (2, 5, 6))
    case, noted = {**CASES["everything"], "mask": CAUSAL_5}, {}
    weights_HQK = attention.attention_weights(q_HQD, k_GKD, **case, note=noted.__setitem__)
    assert list(noted) == ["raw", "scaled", "capped", "biased", "masked", "weights"]
    raw = sum(float(a) * float(b) for a, b in zip(q_HQD[3, 2], k_GKD[1, 1], strict=True))
    scaled = raw * case["scale"]
    capped = case["softcap"] * math.tanh(scaled / case["softcap"])
    steps = {"raw": raw, "scaled": scaled, "capped": capped, "biased": capped + float(case["bias"][3, 2, 1])}
    assert {name: float(noted[name][3, 2, 1]) for name in steps} == pytest.approx(steps)
    assert_close(noted["masked"], noted["biased"].masked_fill(~CAUSAL_5, -math.inf))
    assert noted["weights"] is weights_HQK
    plain = {}
    attention.attention_weights(q_HQD, k_GKD, note=plain.__setitem__)
    assert list(plain) == ["raw", "scaled", "masked", "weights"]


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_any_leading_dims_and_lengths_that_differ(lead):
    q_HQD, k_GKD, v_GKV = qkv((*lead, 4, 2, 6), (*lead, 2, 7, 6), v_width=5)
    weights_HQK = attention.attention_weights(q_HQD, k_GKD)
    assert weights_HQK.shape == (*lead, 4, 2, 7)
    assert_close(weights_HQK, naive.attention_weights(q_HQD, k_GKD), rtol=0, atol=1e-13)
    assert_close(
        attention.attention_output(weights_HQK, v_GKV),
        naive.attention_output(weights_HQK, v_GKV),
        rtol=0,
        atol=1e-13,
    )


def test_two_dims_are_one_head():
    q_QD, k_KD, v_KV = qkv((3, 6), (5, 6), v_width=4)
    weights_QK = attention.attention_weights(q_QD, k_KD, sinks=torch.tensor(0.5))
    assert_close(weights_QK, naive.attention_weights(q_QD[None], k_KD[None], sinks=torch.tensor([0.5]))[0])
    assert attention.attention_output(weights_QK, v_KV).shape == (3, 4)


def test_numbers_worked_out_by_hand():
    q, k = torch.tensor([[2.0, 0.0]]), torch.tensor([[math.log(2.0), 9.0], [0.0, -9.0]])
    # 2 ln 2 / sqrt(2) = 1.414 ln 2, so the odds are 2^1.414 to 1
    odds = 2 ** math.sqrt(2)
    weights = attention.attention_weights(q, k)
    assert_close(weights, torch.tensor([[odds / (odds + 1), 1 / (odds + 1)]]))
    # unscaled 4 : 1; a sink of ln 5 takes half the row; 0.4 * 10 + 0.1 * 20
    weights = attention.attention_weights(q, k, scale=1.0, sinks=torch.tensor(math.log(5.0)))
    assert_close(weights, torch.tensor([[0.4, 0.1]]))
    assert_close(attention.attention_output(weights, torch.tensor([[10.0], [20.0]])), torch.tensor([[6.0]]))


def test_softcap_comes_before_bias_and_mask():
    q, k = torch.full((1, 1), 100.0), torch.ones(2, 1)
    logits = attention.attention_logits(q, k, softcap=3.0, bias=torch.tensor([[0.0, 50.0]]))
    assert_close(logits, torch.tensor([[3.0, 53.0]]))
    weights = attention.attention_weights(q, k, softcap=3.0, mask=torch.tensor([[0.0, -40.0]]))
    assert_close(weights, torch.tensor([[1.0, 0.0]]))


SDPA_MASKS = {
    "none": None,
    "causal": causal_mask(*positions(5, 7)),
    "padding": key_padding_mask(torch.tensor([[1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1]])),
    "additive": torch.linspace(-3, 3, 35, dtype=torch.float64).view(5, 7).sin(),
    "a row of nothing": causal_mask(*positions(5, 7, offset=-1)),
}


@pytest.mark.parametrize("mask", SDPA_MASKS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("scale", [None, 0.2])
def test_equals_scaled_dot_product_attention_forward_and_gradients(mask, kv_heads, scale):
    ours = qkv((2, 4, 5, 6), (2, kv_heads, 7, 6), v_width=3, requires_grad=True)
    theirs = [x.detach().clone().requires_grad_() for x in ours]
    weights_BHQK = attention.attention_weights(ours[0], ours[1], scale=scale, mask=SDPA_MASKS[mask])
    output = attention.attention_output(weights_BHQK, ours[2])
    expected = scaled_dot_product_attention(*theirs, attn_mask=SDPA_MASKS[mask], scale=scale, enable_gqa=kv_heads != 4)
    assert_close(output, expected, rtol=0, atol=1e-13)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    output.backward(upstream)
    expected.backward(upstream)
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine.grad, other.grad, rtol=0, atol=1e-13)


def test_causal_from_the_first_key_is_sdpas_is_causal():
    q, k, v = qkv((1, 2, 4, 6), (1, 2, 6, 6), dtype=torch.float32)
    weights = attention.attention_weights(q, k, mask=causal_mask(*positions(4, 6, offset=0)))
    expected = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_close(attention.attention_output(weights, v), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", [attention, naive])
def test_a_row_that_may_attend_to_nothing(form):
    q, k, _ = qkv((1, 2, 3), (1, 4, 3), dtype=torch.float32)
    mask = torch.tensor([[True, True, False, False], [False, False, False, False]])
    boolean = form.attention_weights(q, k, mask=mask)
    assert_close(boolean[0, 1], torch.zeros(4, dtype=boolean.dtype))
    assert_close(boolean[0, 0].sum().item(), 1.0)
    additive = form.attention_weights(q, k, mask=additive_mask(mask))
    assert_close(additive[0, 1], torch.full((4,), 0.25, dtype=additive.dtype))
    assert_close(additive[0, 0], boolean[0, 0])
    infinite = form.attention_weights(q, k, mask=additive_mask(mask, hidden=-math.inf))
    assert_close(infinite, boolean)


@pytest.mark.parametrize("additive", [False, True])
def test_gradients_stay_finite_beside_a_row_of_nothing(additive):
    q, k, v = qkv((1, 3, 3), (1, 4, 3), requires_grad=True)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1] = False
    mask = additive_mask(mask, hidden=-math.inf) if additive else mask
    attention.attention_output(attention.attention_weights(q, k, mask=mask), v).square().sum().backward()
    assert_close(q.grad[0, 1], torch.zeros(3, dtype=torch.float64))
    assert all(torch.isfinite(x.grad).all() and x.grad.abs().sum() > 0 for x in (q, k, v))


def test_rows_sum_to_one_and_to_less_with_a_sink():
    q, k, _ = qkv((4, 5, 6), (4, 5, 6))
    assert_close(attention.attention_weights(q, k, mask=CAUSAL_5).sum(-1), torch.ones(4, 5, dtype=torch.float64))
    sinks = torch.tensor([0.0, 1.0, 2.0, 3.0])
    logits_HQK = attention.attention_logits(q, k).masked_fill(~CAUSAL_5, -math.inf)
    kept_HQ = torch.sigmoid(logits_HQK.logsumexp(-1) - sinks[:, None])
    assert_close(attention.attention_weights(q, k, mask=CAUSAL_5, sinks=sinks).sum(-1), kept_HQ)


def test_dropout_zeroes_some_weights_and_scales_the_others():
    weights, v = torch.full((200, 200), 1 / 200), torch.eye(200)
    before = weights.clone()
    torch.manual_seed(0)
    dropped = attention.attention_output(weights, v, dropout=0.25)
    assert_close(weights, before)
    values = dropped.unique()
    assert_close(values, torch.tensor([0.0, 1 / 200 / 0.75]))
    # 40,000 draws: four standard deviations are 0.0087
    assert abs((dropped == 0).float().mean().item() - 0.25) < 0.0087


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_softcap_and_sinks_equal_transformers(name):
    q, k, v = qkv((2, 4, 5, 6), (2, 2, 5, 6), dtype=torch.float32)
    module = torch.nn.Module()
    module.num_key_value_groups, module.sinks = 2, torch.tensor([-1.0, 0.0, 1.0, 2.0])
    mask = additive_mask(CAUSAL_5)[None, None]
    if name == "gemma2":
        from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

        output, weights = eager_attention_forward(module, q, k, v, mask, scaling=0.3, softcap=2.0)
        ours = attention.attention_weights(q, k, scale=0.3, softcap=2.0, mask=mask)
    else:
        from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

        output, weights = eager_attention_forward(module, q, k, v, mask, scaling=0.3)
        ours = attention.attention_weights(q, k, scale=0.3, mask=mask, sinks=module.sinks)
    assert_close(ours, weights, rtol=0, atol=1e-6)
    assert_close(attention.attention_output(ours, v).transpose(1, 2), output, rtol=0, atol=1e-6)


def test_refusals_say_what_was_expected_and_what_came():
    with pytest.raises(ValueError, match="one width, got 6 and 5"):
        attention.attention_weights(torch.zeros(2, 6), torch.zeros(2, 5))
    with pytest.raises(ValueError, match="multiple of kv heads, got 4 and 3"):
        attention.attention_weights(torch.zeros(4, 2, 6), torch.zeros(3, 2, 6))
    with pytest.raises(ValueError, match=r"boolean mask .* got torch.int64"):
        attention.attention_weights(torch.zeros(2, 6), torch.zeros(2, 6), mask=torch.ones(2, 2, dtype=torch.long))
