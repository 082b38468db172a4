"""A check that cannot fail proves nothing: each broken oracle is caught by the assertion that passes for the right one.

The right ones are a whole layer of Mistral (rotary, grouped kv heads, sliding window) and the layers of T5 (relative
positions both ways and back alone, a decoder that looks at an encoder) from raw weights and hidden states, held against
transformers' own modules, and plain causal attention, held against PyTorch's.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close
from transformers import MistralConfig, T5Config, T5Model
from transformers.models.mistral.modeling_mistral import MistralModel

from attnscope.reference.attention import attention_output, attention_weights
from attnscope.reference.masks import causal_mask, positions, sliding_window_mask
from attnscope.reference.positions import apply_rotary, cos_sin, default_frequencies, relative_bias

TOKENS, HEADS, KV_HEADS, WIDTH, WINDOW, THETA = 12, 4, 2, 8, 5, 10000.0


@dataclass(frozen=True)
class Oracle:
    """The choices that a decoder's attention makes; each default is Mistral's."""

    scale: float | None = None
    diagonal: int = 0
    kv_order: tuple[int, ...] = (0, 1)
    interleaved_groups: bool = False
    reverse: bool = False
    window: int = WINDOW
    theta: float = THETA

    def weights_and_output(self, q_BHTD, k_BGTD, v_BGTD):
        place = positions(TOKENS)
        cos_TM, sin_TM = cos_sin(place[0], default_frequencies(WIDTH, self.theta))
        q_BHTD, k_BGTD = (apply_rotary(x, cos_TM, sin_TM, reverse=self.reverse) for x in (q_BHTD, k_BGTD))
        k_BGTD, v_BGTD = (self.kv_heads(x) for x in (k_BGTD, v_BGTD))
        mask = causal_mask(place[0] + self.diagonal, place[1]) & sliding_window_mask(*place, window=self.window)
        weights_BHTT = attention_weights(q_BHTD, k_BGTD, scale=self.scale, mask=mask)
        return weights_BHTT, attention_output(weights_BHTT, v_BGTD)

    def kv_heads(self, x_BGTD):
        x_BGTD = x_BGTD[:, list(self.kv_order)]
        return x_BGTD.repeat(1, HEADS // KV_HEADS, 1, 1) if self.interleaved_groups else x_BGTD


RIGHT = Oracle()
BROKEN = {
    "scale left out": replace(RIGHT, scale=1.0),
    "scale off by 1 %": replace(RIGHT, scale=1.01 * WIDTH**-0.5),
    "causal mask off by one, sees the next token": replace(RIGHT, diagonal=1),
    "causal mask off by one, misses itself": replace(RIGHT, diagonal=-1),
    "kv heads in the wrong order": replace(RIGHT, kv_order=(1, 0)),
    "kv heads dealt out in turn instead of in blocks": replace(RIGHT, interleaved_groups=True),
    "rotation the other way": replace(RIGHT, reverse=True),
    "rotary base changed": replace(RIGHT, theta=THETA * 1.1),
    "window one wider": replace(RIGHT, window=WINDOW + 1),
    "window one narrower": replace(RIGHT, window=WINDOW - 1),
}


@pytest.fixture(scope="module", name="layer")
def mistral_layer():
    """A layer's hidden states as they reach its attention, its raw weights, and what the model made of them."""
    config = MistralConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=WIDTH,
        sliding_window=WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        attn_implementation="eager",
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = MistralModel(config).eval()
    attention, seen = model.layers[0].self_attn, {}
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    attention.register_forward_hook(lambda _, args, kw, out: seen.update(kw, out=out), with_kwargs=True)
    with torch.no_grad():
        model(torch.arange(2 * TOKENS).view(2, TOKENS))
    return seen["hidden_states"], attention, seen["out"]


@torch.no_grad()
def assert_is_mistral(oracle, layer):
    hidden_BTE, attention, (expected_out, expected_weights) = layer
    q_BHTD, k_BGTD, v_BGTD = (
        (hidden_BTE @ projection.weight.T).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    weights_BHTT, output_BHTD = oracle.weights_and_output(q_BHTD, k_BGTD, v_BGTD)
    output_BTE = output_BHTD.transpose(1, 2).flatten(-2) @ attention.o_proj.weight.T
    assert_close(weights_BHTT, expected_weights, rtol=0, atol=1e-6)
    assert_close(output_BTE, expected_out, rtol=0, atol=1e-5)


def test_the_right_oracle_is_mistral(layer):
    assert_is_mistral(RIGHT, layer)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_oracle_is_caught(name, layer):
    with pytest.raises(AssertionError, match="not close"):
        assert_is_mistral(BROKEN[name], layer)


def assert_is_sdpa(scale, diagonal, kv_order):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 6, 8, generator=generator) for n in (4, 2, 2))
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    query_Q, key_K = positions(6)
    weights = attention_weights(q, k[:, kv_order], scale=scale, mask=causal_mask(query_Q + diagonal, key_K))
    assert_close(attention_output(weights, v[:, kv_order]), expected, rtol=0, atol=1e-6)


def test_the_right_oracle_is_sdpa():
    assert_is_sdpa(None, 0, [0, 1])


@pytest.mark.parametrize(
    ("scale", "diagonal", "kv_order"),
    [(1.0, 0, [0, 1]), (1.01 * 8**-0.5, 0, [0, 1]), (None, 1, [0, 1]), (None, -1, [0, 1]), (None, 0, [1, 0])],
)
def test_sdpa_catches_the_broken_ones_too(scale, diagonal, kv_order):
    with pytest.raises(AssertionError, match="not close"):
        assert_is_sdpa(scale, diagonal, kv_order)


@dataclass(frozen=True)
class T5Oracle:
    """The choices of T5's layers; each default is T5's. Source and target are of one length: no shape tells them apart.

    Without source_BTE a layer attends to its own text.
    """

    both_ways: bool | None = None
    max_distance: int = 128
    bucket: int = 0
    from_source: bool = True
    causal: bool | None = None
    scale: float = 1.0

    def weights_and_output(self, attention, encoder, hidden_BTE, source_BTE, table_NH):
        keyed_BTE = hidden_BTE if source_BTE is None or not self.from_source else source_BTE
        q, k, v = (
            projection(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
            for projection, x in ((attention.q, hidden_BTE), (attention.k, keyed_BTE), (attention.v, keyed_BTE))
        )
        place, bias, mask = positions(TOKENS), None, None
        if source_BTE is None:
            both_ways = encoder if self.both_ways is None else self.both_ways
            table_NH = table_NH.roll(self.bucket, 0)
            bias = relative_bias(table_NH, *place, max_distance=self.max_distance, both_ways=both_ways)
        if (self.causal is None and source_BTE is None and not encoder) or self.causal:
            mask = causal_mask(*place)
        weights_BHTT = attention_weights(q, k, scale=self.scale, bias=bias, mask=mask)
        return weights_BHTT, attention.o(attention_output(weights_BHTT, v).transpose(1, 2).flatten(-2))


LAYERS = ("encoder", "decoder", "cross")
RIGHT_T5 = T5Oracle()
BROKEN_T5 = {
    "scaled as others are": (replace(RIGHT_T5, scale=WIDTH**-0.5), LAYERS),
    "the bucket beside": (replace(RIGHT_T5, bucket=1), ("encoder", "decoder")),
    "buckets of another reach": (replace(RIGHT_T5, max_distance=48), ("encoder", "decoder")),
    "an encoder's buckets for one direction": (replace(RIGHT_T5, both_ways=False), ("encoder",)),
    "a decoder's buckets for both": (replace(RIGHT_T5, both_ways=True), ("decoder",)),
    "an encoder that looks back alone": (replace(RIGHT_T5, causal=True), ("encoder",)),
    "a decoder that looks ahead": (replace(RIGHT_T5, causal=False), ("decoder",)),
    "keys and values from the decoder": (replace(RIGHT_T5, from_source=False), ("cross",)),
    "a causal mask between two texts": (replace(RIGHT_T5, causal=True), ("cross",)),
}


@pytest.fixture(scope="module", name="t5")
def t5_layers():
    """Of T5's second layers: hidden states, the encoder's states, modules, the first layer's table; weights, output."""
    config = T5Config(
        vocab_size=50,
        d_model=32,
        d_kv=WIDTH,
        d_ff=16,
        num_layers=2,
        num_heads=HEADS,
        relative_attention_num_buckets=8,
        attn_implementation="eager",
        dropout_rate=0.0,
    )
    torch.manual_seed(0)
    model, seen = T5Model(config).eval(), {}
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=1.0 if "relative" in name else 0.3)
    blocks = {"encoder": model.encoder.block, "decoder": model.decoder.block}
    modules = {name: block[1].layer[0].SelfAttention for name, block in blocks.items()}
    modules["cross"] = model.decoder.block[1].layer[1].EncDecAttention
    tables = {name: block[0].layer[0].SelfAttention.relative_attention_bias.weight for name, block in blocks.items()}
    for name, module in modules.items():
        module.register_forward_hook(
            lambda _, args, kw, out, name=name: seen.update({name: (args, kw, out)}), with_kwargs=True
        )
    with torch.no_grad():
        ids_BT = torch.arange(2 * TOKENS).view(2, TOKENS)
        model(ids_BT, decoder_input_ids=ids_BT.flip(1))
    return seen, modules, tables


@torch.no_grad()
def assert_is_t5(oracle, t5, name):
    seen, modules, tables = t5
    args, given, (expected_out, _, expected_weights) = seen[name]
    found = oracle.weights_and_output(
        modules[name], name == "encoder", args[0], given.get("key_value_states"), tables.get(name)
    )
    assert_close(found[0], expected_weights, rtol=0, atol=1e-6)
    assert_close(found[1], expected_out, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_the_right_oracle_is_t5(name, t5):
    assert_is_t5(RIGHT_T5, t5, name)


@pytest.mark.parametrize("what", BROKEN_T5)
def test_a_broken_oracle_of_t5_is_caught(what, t5):
    oracle, where = BROKEN_T5[what]
    for name in where:
        with pytest.raises(AssertionError, match="not close"):
            assert_is_t5(oracle, t5, name)
