"""The layer against torch.nn.MultiheadAttention, weights carried both ways, and trained on a task of its own."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from attnscope.reference import MultiHeadAttention, naive
from attnscope.reference.masks import additive_mask, causal_mask, key_padding_mask, positions, sliding_window_mask

REAL = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1]])


def pairs(ours, theirs):
    """Each of our parameters beside the rows of theirs that mean the same."""
    names = ("W_Q", "W_K", "W_V")
    weights = zip(names, theirs.in_proj_weight.chunk(3), strict=True)
    found = [(getattr(ours, name).weight, rows) for name, rows in weights] + [(ours.W_O.weight, theirs.out_proj.weight)]
    if theirs.in_proj_bias is not None:
        biases = zip(names, theirs.in_proj_bias.chunk(3), strict=True)
        found += [(getattr(ours, name).bias, rows) for name, rows in biases] + [(ours.W_O.bias, theirs.out_proj.bias)]
    return found


def both(bias, carry, d_model=12, n_heads=3):
    torch.manual_seed(0)
    ours = MultiHeadAttention(d_model, n_heads, bias=bias).double()
    theirs = nn.MultiheadAttention(d_model, n_heads, bias=bias, dropout=0.0, batch_first=True).double()
    with torch.no_grad():
        for module in (ours, theirs):
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=0.4)
        for mine, other in pairs(ours, theirs):
            if carry == "ours to torch":
                other.copy_(mine)
            else:
                mine.copy_(other)
    return ours, theirs


# name: our mask, and torch's arguments, whose booleans mean the opposite (True = don't attend)
CAUSAL, WINDOW = causal_mask(*positions(5, 7)), sliding_window_mask(*positions(5, 7), window=3)
ADDITIVE = torch.linspace(-2, 2, 35, dtype=torch.float64).view(5, 7).cos()
PER_HEAD = torch.linspace(-9, 9, 3 * 3 * 5 * 7, dtype=torch.float64).view(3, 3, 5, 7).sin()
MASKS = {
    "none": (None, {}),
    "causal": (CAUSAL, {"attn_mask": ~CAUSAL}),
    "causal, additive": (
        additive_mask(CAUSAL, torch.float64),
        {"attn_mask": torch.zeros(5, 7, dtype=torch.float64).masked_fill(~CAUSAL, -torch.inf)},
    ),
    "window": (CAUSAL & WINDOW, {"attn_mask": ~(CAUSAL & WINDOW)}),
    "additive": (ADDITIVE, {"attn_mask": ADDITIVE}),
    "additive, per text and head": (PER_HEAD, {"attn_mask": PER_HEAD.flatten(0, 1)}),
    "padding": (key_padding_mask(REAL), {"key_padding_mask": REAL == 0}),
    "causal and padding": (CAUSAL & key_padding_mask(REAL), {"attn_mask": ~CAUSAL, "key_padding_mask": REAL == 0}),
}


@pytest.mark.parametrize("carry", ["ours to torch", "torch to ours"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_equals_torchs_layer_forward_and_gradients(mask, bias, carry):
    ours, theirs = both(bias, carry)
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(3, n, 12, generator=generator, dtype=torch.float64) for n in (5, 7, 7)]
    mine, other = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    our_mask, their_masks = MASKS[mask]
    output, weights = ours(*mine, our_mask)
    expected, expected_weights = theirs(*other, **their_masks, need_weights=True, average_attn_weights=False)
    assert weights.shape == (3, 3, 5, 7)
    assert_close(weights, expected_weights, rtol=0, atol=1e-13)
    assert_close(output, expected, rtol=0, atol=1e-12)
    upstream = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    output.backward(upstream)
    expected.backward(upstream)
    for x, y in zip(mine, other, strict=True):
        assert_close(x.grad, y.grad, rtol=0, atol=1e-12)
    gradients = pairs(*(with_gradients(module) for module in (ours, theirs)))
    assert len(gradients) == (8 if bias else 4)
    for x, y in gradients:
        assert_close(x, y, rtol=0, atol=1e-12)


def with_gradients(module):
    """The same module, every parameter replaced by its gradient."""
    for parameter in module.parameters():
        parameter.data = parameter.grad
    return module


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_each_head_by_hand(n_kv_heads):
    torch.manual_seed(0)
    attn = MultiHeadAttention(8, 4, n_kv_heads=n_kv_heads, d_key=3, d_value=5, bias=True).double()
    for parameter in attn.parameters():
        nn.init.normal_(parameter)
    x, mask = torch.randn(6, 8, dtype=torch.float64), causal_mask(*positions(6))
    output, weights = attn(x, x, x, mask)
    heads = []
    for h in range(4):
        g = h * n_kv_heads // 4
        q = x @ attn.W_Q.weight[3 * h : 3 * h + 3].T + attn.W_Q.bias[3 * h : 3 * h + 3]
        k = x @ attn.W_K.weight[3 * g : 3 * g + 3].T + attn.W_K.bias[3 * g : 3 * g + 3]
        v = x @ attn.W_V.weight[5 * g : 5 * g + 5].T + attn.W_V.bias[5 * g : 5 * g + 5]
        expected = naive.attention_weights(q[None], k[None], mask=mask)
        assert_close(weights[h], expected[0])
        heads.append(naive.attention_output(expected, v[None])[0])
    assert_close(output, torch.cat(heads, dim=-1) @ attn.W_O.weight.T + attn.W_O.bias)


def test_one_head_without_output_projection_is_plain_self_attention():
    torch.manual_seed(0)
    attn = MultiHeadAttention(3, 1, d_key=5, d_value=4, out_proj=False)
    x = torch.randn(50, 5, 3)
    output, weights = attn(x, x, x)
    assert output.shape == (50, 5, 4)
    assert weights.shape == (50, 1, 5, 5)
    assert {name: tuple(p.shape) for name, p in attn.named_parameters()} == {
        "W_Q.weight": (5, 3),
        "W_K.weight": (5, 3),
        "W_V.weight": (4, 3),
    }
    q, k, v = x @ attn.W_Q.weight.T, x @ attn.W_K.weight.T, x @ attn.W_V.weight.T
    assert_close(output, torch.softmax(q @ k.transpose(1, 2) / 5**0.5, dim=-1) @ v)


def test_gradients_against_finite_differences():
    torch.manual_seed(0)
    attn = MultiHeadAttention(4, 2, n_kv_heads=1, bias=True).double()
    x = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)
    mask = causal_mask(*positions(3))
    assert torch.autograd.gradcheck(lambda x, *_: attn(x, x, x, mask), (x, *attn.parameters()))


def test_it_learns_to_copy_the_token_two_places_back():
    """Only attention can solve it: the answer is the input of two positions earlier, found by position alone."""
    torch.manual_seed(0)
    length, width = 8, 16
    attn = MultiHeadAttention(width, 2)
    places, tokens = nn.Parameter(torch.randn(length, width) * 0.3), torch.randn(4, width)
    optimiser = torch.optim.Adam([*attn.parameters(), places], lr=0.02)
    mask = causal_mask(*positions(length))
    losses = []
    for _ in range(150):
        x = tokens[torch.randint(4, (32, length))]
        output, weights = attn(x + places, x + places, x, mask)
        loss = (output[:, 2:] - x[:, :-2]).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
    two_back = weights.detach().mean((0, 1)).diagonal(-2)
    assert (two_back[2:] > 0.5).all(), two_back


def test_dropout_is_for_training_and_spares_the_returned_weights():
    torch.manual_seed(0)
    attn = MultiHeadAttention(8, 2, dropout=0.5)
    x = torch.randn(1, 6, 8)
    first, weights = attn(x, x, x)
    second, _ = attn(x, x, x)
    assert not torch.allclose(first, second)
    assert_close(weights.sum(-1), torch.ones(1, 2, 6))
    attn.eval()
    assert_close(attn(x, x, x)[1], weights)
    assert_close(attn(x, x, x)[0], attn(x, x, x)[0])


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((10, 3), {}, "d_model=10 and n_heads=3"),
        ((10, 3), {"d_key": 5, "d_value": 4}, "d_model=10 and n_heads=3"),
        ((12, 4), {"n_kv_heads": 3}, "n_heads=4 and n_kv_heads=3"),
        ((12, 4), {"n_kv_heads": 0}, "n_kv_heads=0"),
        ((12, 0), {}, "n_heads=0"),
        ((12, 4), {"d_key": 0}, "d_key=0"),
        ((12, 4), {"dropout": 1.0}, r"dropout in \[0, 1\), got 1.0"),
    ],
)
def test_sizes_that_cannot_be_are_refused_with_the_numbers(sizes, options, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(*sizes, **options)
