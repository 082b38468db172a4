"""Layers without a softmax: the rules of `reference/naive.py` against formulas, and the models' own against both.

A formula spells one weight of a map as a product over the tokens between key and query; a rule never sees it so.
"""

import json
import math
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import attnscope
from attnscope.attention import questions as ask
from attnscope.attention.channels import ChannelMap, FadingMean
from attnscope.attention.linear import LinearMap
from attnscope.cli.study_tables import patch_notes
from attnscope.corpus.folder import Job
from attnscope.corpus.worker import Worker
from attnscope.errors import InputError, ModelError, UsageError
from attnscope.export.drawing import DrawingOptions, depths_of, drawings
from attnscope.hooks import mixers
from attnscope.hooks.mixers import delta_rule
from attnscope.metrics.metrics import Texts, measure
from attnscope.model import tasks
from attnscope.model.geometry import geometry_of
from attnscope.model.loading import wrap
from attnscope.model.selection import LINEAR, as_ranges
from attnscope.observe.collectors.heads import TopRelation
from attnscope.observe.request import CaptureSpec, Layer, LayerKey, Request, View
from attnscope.observe.run import prepare
from attnscope.reference import naive
from attnscope.serve.questions import divergences
from attnscope.studies.copying import copying_of
from attnscope.viewer.page import about
from helpers.command_line import call
from helpers.families import config_class_of, of_all_families, tiny_config
from helpers.families_table import mixing_row, read, without_figures
from helpers.mixed import ONE_OF_EACH, OTHERS, mixed_layers
from helpers.parity_models import roused_model

B, T, H, D, V, C, N = 2, 6, 2, 3, 4, 5, 2


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Q, K, VALUES = random(B, T, H, D, seed=1), random(B, T, H, D, seed=2), random(B, T, H, V, seed=3)
DECAY, WRITE = random(B, T, H, seed=4).sigmoid(), random(B, T, H, seed=5).sigmoid()
DECAY_D = random(B, T, H, D, seed=6).sigmoid()
INPUT, FORGET = 2 * random(B, T, H, seed=7), random(B, T, H, seed=8) + 1
X, STEP, A = random(B, T, C, seed=9), random(B, T, C, seed=10).exp(), -random(C, N, seed=11).exp()
STATE_B, STATE_C, SKIP = random(B, T, N, seed=12), random(B, T, N, seed=13), random(C, seed=14)
TAPS, BIAS, FIRST = random(C, 4, seed=15), random(C, seed=16), random(C, seed=17)
GATES = random(B, T, C, seed=18).sigmoid()


def fading(b: int, h: int, i: int, j: int) -> float:
    """q_i . k_j, faded by every token after the key."""
    return float(Q[b, i, h] @ K[b, j, h]) * math.prod(float(DECAY[b, t, h]) for t in range(j + 1, i + 1))


def lightning(b: int, h: int, i: int, j: int) -> float:
    return float(Q[b, i, h] @ K[b, j, h]) * math.exp(-(0.1 + 0.4 * h) * (i - j))


def delta(b: int, h: int, i: int, j: int, decay: Tensor = DECAY) -> float:
    """b_j q_i^T (I - b_i k_i k_i^T) a_i ... (I - b_j+1 k_j+1 k_j+1^T) a_j+1 k_j."""
    kept = K[b, j, h] * WRITE[b, j, h]
    for t in range(j + 1, i + 1):
        erased = torch.eye(D).double() - WRITE[b, t, h] * torch.outer(K[b, t, h], K[b, t, h])
        kept = erased @ (decay[b, t, h] * kept)
    return float(Q[b, i, h] @ kept) / math.sqrt(D)


def mlstm(b: int, h: int, i: int, j: int) -> float:
    """Without any stabiliser: exp(input_j) times the forget gates after j, over max(|sum over keys|, 1)."""

    def gate(j: int) -> float:
        forgets = (1 / (1 + math.exp(-float(FORGET[b, t, h]))) for t in range(j + 1, i + 1))
        return math.exp(float(INPUT[b, j, h])) * math.prod(forgets) * float(Q[b, i, h] @ K[b, j, h]) / math.sqrt(D)

    return gate(j) / max(abs(sum(gate(key) for key in range(i + 1))), 1.0)


def mamba2(b: int, h: int, i: int, j: int) -> float:
    step, rate = DECAY[b, :, h], -0.5 - h
    weight = math.exp(rate * float(step[j + 1 : i + 1].sum())) * float(step[j]) * float(Q[b, i, h] @ K[b, j, h])
    return weight + (0.7 + h) * (i == j)


def mamba(b: int, c: int, i: int, j: int) -> float:
    steps = float(STEP[b, j + 1 : i + 1, c].sum())
    read = (float(STATE_C[b, i, n]) * math.exp(float(A[c, n]) * steps) * float(STATE_B[b, j, n]) for n in range(N))
    return float(STEP[b, j, c]) * sum(read) + float(SKIP[c]) * (i == j)


def rwkv(b: int, c: int, i: int, j: int) -> float:
    def size(j: int) -> float:
        key, rate = float(X[b, j, c]), math.exp(float(BIAS[c]))
        return math.exp(key + float(FIRST[c])) if i == j else math.exp(key - (i - 1 - j) * rate)

    return size(j) / sum(size(key) for key in range(i + 1))


def gated(b: int, c: int, i: int, j: int) -> float:
    return math.prod(float(GATES[b, t, c]) for t in range(j + 1, i + 1))


def taps(b: int, c: int, i: int, j: int) -> float:
    return float(TAPS[c, 3 - (i - j)]) if i - j < 4 else 0.0


RULES = {
    "fading": (fading, lambda v: naive.linear_attention(Q, K, v, DECAY), VALUES),
    "lightning": (lightning, lambda v: naive.lightning(Q, K, v, torch.tensor([0.1, 0.5]).double()), VALUES),
    "delta": (delta, lambda v: naive.gated_delta(Q, K, v, DECAY.log(), WRITE), VALUES),
    "kimi": (
        lambda *at: delta(*at, decay=DECAY_D),
        lambda v: naive.gated_delta(Q, K, v, DECAY_D.log(), WRITE),
        VALUES,
    ),
    "mlstm": (mlstm, lambda v: naive.mlstm(Q, K, v, INPUT, FORGET), VALUES),
    "mamba2": (
        mamba2,
        lambda v: naive.mamba2(v, DECAY, torch.tensor([-0.5, -1.5]), K, Q, torch.tensor([0.7, 1.7])),
        VALUES,
    ),
    "mamba": (mamba, lambda v: naive.mamba(v, STEP, A, STATE_B, STATE_C, SKIP), VALUES[:, :, 0, :1].expand(B, T, C)),
    "rwkv": (rwkv, lambda v: naive.rwkv(BIAS, FIRST, X, v), GATES),
    "gated": (gated, lambda v: naive.gated_recurrence(v, GATES), X),
    "taps": (taps, lambda v: naive.convolution(v, TAPS), X),
}


@pytest.mark.parametrize("name", RULES)
def test_the_map_of_a_rule_is_its_formula_weight_by_weight(name):
    formula, rule, values = RULES[name]
    output, map_BHQK = rule(values)
    expected = torch.zeros_like(map_BHQK)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, map_BHQK.shape[:3])).tolist():
        for j in range(i + 1):
            expected[b, h, i, j] = formula(b, h, i, j)
    torch.testing.assert_close(map_BHQK, expected, rtol=1e-6, atol=1e-7)
    assert map_BHQK.triu(1).abs().max() == 0
    mixed = "bhqk,bkhv->bqhv" if values.ndim == 4 else "bhqk,bkh->bqh"
    torch.testing.assert_close(output, torch.einsum(mixed, map_BHQK, values))
    with pytest.raises(AssertionError):  # a map that is late by one token is another
        torch.testing.assert_close(map_BHQK.roll(1, 2), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["delta", "kimi", "ssd", "lightning"])
@pytest.mark.parametrize("log_decay", [-1e-9, -1e-6, -200.0])
def test_a_decay_too_near_1_or_0_for_float32_has_its_length(name, log_decay):
    """float32 has no number between 1 - 6e-8 and 1, and none below 1e-45: a length from decays would be null or 0."""
    q, k, v, one = (torch.ones(1, 9, 1, width) for width in (D, D, V, 1))
    g = torch.full((1, 9, 1), log_decay)
    g[:, 4] = 2 * log_decay
    if name == "ssd":
        arguments = {"hidden_states": v, "dt": g, "A": one.flatten()[:1], "B": k, "C": q, "chunk_size": 4}
        arguments |= {"dt_limit": (-math.inf, math.inf)}
        rule = mixers.mamba2_scan(modelling("mamba2").mamba2_chunk_scan, arguments)
    elif name == "lightning":
        module = SimpleNamespace(act_fn=lambda part: part, slope_rate=torch.tensor([[[-10 * log_decay / 9]]]))
        rule = mixers.lightning(module, torch.ones(1, 9, 3 * D), None)
    else:
        g, own = (
            (g, modelling("qwen3_next").torch_chunk_gated_delta_rule)
            if name == "delta"
            else (g[..., None].expand(-1, -1, -1, D), modelling("kimi_linear").chunk_kimi_delta_attention)
        )
        rule = delta_rule(own, {"query": q, "key": k, "value": v, "g": g, "beta": one[..., 0]})
    texts = Texts(torch.arange(9)[None], torch.tensor([9]), stack=LINEAR)
    length = float(measure(LinearMap(rule), texts, ["decay_length"])["decay_length"])
    assert length == pytest.approx(-9 / (10 * log_decay), rel=1e-6)


def test_a_bias_of_a_convolution_is_in_no_map():
    with_bias, without = naive.convolution(X, TAPS, BIAS), naive.convolution(X, TAPS)
    torch.testing.assert_close(with_bias.output - without.output, BIAS.expand(B, T, C))
    assert torch.equal(with_bias.map, without.map)


def modelling(name: str) -> Any:
    """A modelling file of transformers; an earlier release may lack it."""
    return pytest.importorskip(f"transformers.models.{name}.modeling_{name}")


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def long(tensor: Tensor) -> Tensor:
    """The same over 70 tokens, more than a chunk of any model's own function."""
    again = torch.cat([tensor * (1 - 0.05 * part) for part in range(-(-70 // T))], 1)
    return again[:, :70]


def own_delta():
    q, k, v, g, write = map(long, (Q, K, VALUES, DECAY.log(), WRITE))
    own = modelling("qwen3_next").torch_chunk_gated_delta_rule(q, k, v, g, write, use_qk_l2norm_in_kernel=True)[0]
    return own, naive.gated_delta(unit(q), unit(k), v, g, write)


def own_kimi():
    q, k, v, g, write = map(long, (Q, K, VALUES, DECAY_D.log(), WRITE))
    own = modelling("kimi_linear").chunk_kimi_delta_attention(q, k, v, g, write, use_qk_l2norm_in_kernel=True)[0]
    return own, naive.gated_delta(unit(q), unit(k), v, g, write)


def own_mamba2():
    q, k, v, step = map(long, (Q, K, VALUES, DECAY.log()))
    A, skip, bias = torch.tensor([-0.5, -1.5]), torch.tensor([0.7, 1.7]), torch.tensor([0.3, -0.2]).double()
    own = modelling("mamba2").mamba2_chunk_scan(v, step, A, k, q, 16, D=skip, dt_bias=bias, dt_softplus=True)
    return own, naive.mamba2(v, torch.nn.functional.softplus(step + bias), A, k, q, skip)


def own_mamba():
    x, step, write, read = map(long, (X, STEP, STATE_B, STATE_C))
    own = (
        modelling("mamba")
        .mamba_selective_scan(
            x.mT.float(), step.mT.float(), A.float(), write.mT.float(), read.mT.float(), D=SKIP.float()
        )
        .mT
    )
    return own, naive.mamba(x, step, A, write, read, SKIP)


def own_rwkv():
    key, value = long(X), long(GATES)
    return modelling("rwkv").rwkv_linear_attention(BIAS, FIRST, key, value)[0], naive.rwkv(BIAS, FIRST, key, value)


def own_gated():
    x, gates = long(X), long(GATES)
    reset = torch.zeros(B, 70, 1, dtype=torch.bool)
    own, _ = modelling("recurrent_gemma").RecurrentGemmaRglru._rnn_scan(None, x, gates, reset, None)
    return own, naive.gated_recurrence(x, gates)


def own_mlstm():
    q, k, v, write, forget = (part.transpose(1, 2).contiguous() for part in map(long, (Q, K, VALUES, INPUT, FORGET)))
    own = modelling("xlstm").mlstm_recurrent_sequence_native(q, k, v, write, forget, dtype_state=torch.float64)
    own = own[0] if isinstance(own, tuple) else own
    return own.transpose(1, 2), naive.mlstm(*map(long, (Q, K, VALUES, INPUT, FORGET)), eps=1e-6)


def own_taps():
    x = long(X)
    return modelling("lfm2").causal_conv1d_fn(x.mT, TAPS, BIAS).mT, naive.convolution(x, TAPS, BIAS)


OWN = [own_delta, own_kimi, own_mamba2, own_mamba, own_rwkv, own_gated, own_mlstm, own_taps]


@pytest.mark.parametrize("compared", OWN, ids=lambda compared: compared.__name__)
def test_a_models_own_function_is_the_rule_of_the_paper(compared):
    own, (expected, _) = compared()
    difference = (own.double() - expected).abs().max() / expected.abs().max()
    assert difference < 2e-6, float(difference)
    assert (own.double() - expected.roll(1, 1)).abs().max() / expected.abs().max() > 1e-2


def recalled(write: Tensor) -> tuple[Tensor, Tensor]:
    """Maps of six tokens that write keys 0, 1, 2, 0 and then ask for 0 and 1: of the delta rule, and without it.

    A token that asks writes nothing. The delta rule is a model's own function, and its map what attnscope makes of it.
    """
    place = torch.eye(4)[torch.tensor([0, 1, 2, 0, 0, 1])][None, :, None]
    own = modelling("qwen3_next").torch_chunk_gated_delta_rule
    arguments = {"query": place, "key": place, "value": torch.randn(1, 6, 1, 3), "g": torch.zeros(1, 6, 1)}
    rule = delta_rule(own, {**arguments, "beta": write[None, :, None]})
    plain = naive.linear_attention(
        place / 2, write[None, :, None, None] * place, arguments["value"], torch.ones(1, 6, 1)
    )
    return LinearMap(rule).dense()[0, 0], plain.map[0, 0]


def test_a_planted_recall_is_at_the_token_of_the_recalled_key():
    delta_QK, plain_QK = recalled(torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0]))
    assert delta_QK[4:].abs().argmax(-1).tolist() == [3, 1]
    # Key 0 was written twice: the second write has taken the first out, which plain linear attention never does.
    torch.testing.assert_close(delta_QK[4], torch.tensor([0.0, 0.0, 0.0, 0.5, 0.0, 0.0]))
    torch.testing.assert_close(plain_QK[4], torch.tensor([0.5, 0.0, 0.0, 0.5, 0.0, 0.0]))
    torch.testing.assert_close(delta_QK[5], torch.tensor([0.0, 0.5, 0.0, 0.0, 0.0, 0.0]))


def test_half_a_write_leaves_half_of_what_was_there():
    delta_QK, _ = recalled(torch.tensor([1.0, 1.0, 1.0, 0.5, 0.0, 0.0]))
    torch.testing.assert_close(delta_QK[4], torch.tensor([0.25, 0.0, 0.0, 0.25, 0.0, 0.0]))


@pytest.mark.parametrize("model_type", [*ONE_OF_EACH, *(pytest.param(t, marks=pytest.mark.families) for t in OTHERS)])
def test_the_map_of_a_layer_gives_its_output_and_is_that_of_the_reference(model_type):
    config_class_of(model_type)  # an earlier transformers may lack it
    layers = mixed_layers(model_type)
    assert layers
    for layer in layers:
        assert layer.check.masked_weight == 0
        assert layer.check.value_error < 1e-6
        assert layer.distance < 5e-5  # a model's own function adds logarithms of decays up in float32
        # Another map is not that of the reference, and would be seen.
        layer.P.rows = lambda start, stop, own=layer.P.rows: own(start, stop) * 1.01
        assert layer.distance > 1e-3


@pytest.mark.parametrize("rule", ["_scan", "_mean", "_taps"])
def test_a_channel_is_a_rule_of_one_head_with_the_same_map(rule):
    """A channel's map by blocks of rows is that of its state; one channel is no other."""
    made = {"_scan": "jamba", "_mean": "rwkv", "_taps": "lfm2_moe"}[rule]
    P = mixed_layers(made)[0].P
    T, own = P.queries, P.rule.weights(0, P.queries, slice(3, 4))
    torch.testing.assert_close(P.of_channel(3).dense(), own, rtol=1e-5, atol=1e-6)
    blocks = [P.rule.weights(a, min(a + 9, T), slice(3, 4)) for a in range(0, T, 9)]
    torch.testing.assert_close(torch.cat(blocks, 2), own, rtol=1e-5, atol=1e-6)
    assert (P.of_channel(4).dense() - own).abs().max() > 1e-3
    with pytest.raises(InputError, match=f"0 to {P.rule.shape[2] - 1}, got 9999"):
        P.of_channel(9999)


def test_a_fading_mean_is_its_softmax_however_large_keys_and_rates_are():
    """The weights are products of factors; a softmax over all keys, in float64, is the judge."""
    keys, rate, first = 30 * random(1, 50, 5), 5 * random(1, 5, seed=1)[0].abs() ** 3, 20 * random(1, 5, seed=2)[0]
    rule = FadingMean("RWKV-4", keys, lambda y, start, stop: y, keys, rate, first)
    back = torch.arange(50)[:, None] - 1 - torch.arange(50)
    logits = keys.transpose(1, 2)[:, :, None] - back * rate[:, None, None]
    logits.diagonal(0, -2, -1).copy_(keys.transpose(1, 2) + first[:, None])
    expected = logits.masked_fill(back < -1, -torch.inf).softmax(-1)
    torch.testing.assert_close(rule.weights(0, 50, slice(0, 5)).double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        rule.weights(17, 40, slice(1, 4)).double(), expected[:, 1:4, 17:40], atol=1e-6, rtol=1e-5
    )


def test_the_mean_over_channels_is_of_sizes_and_by_blocks_the_same():
    P = mixed_layers("mamba")[0].P
    every = P.rule.weights(0, P.queries, slice(0, P.rule.shape[2]))
    assert (every < 0).any()
    torch.testing.assert_close(P.dense(), every.abs().mean(1, keepdim=True))
    questions = [ask.RowSum(), ask.Back(1), ask.TopK(2)]
    answers = P.together(questions)
    torch.testing.assert_close(answers[questions[0]], P.dense().sum(-1))
    shares = P.dense() / P.dense().sum(-1, keepdim=True)
    torch.testing.assert_close(answers[questions[1]][0, 0, 1:], shares[0, 0].diagonal(-1))
    torch.testing.assert_close(answers[questions[2]][0][:, :, 1:], P.dense().topk(2).values[:, :, 1:])


def test_maps_of_many_channels_over_a_long_text_are_refused_with_the_length_that_fits(monkeypatch):
    P = mixed_layers("mamba")[0].P
    B, T, C = P.rule.shape
    again = ChannelMap(P.rule)
    monkeypatch.setattr("attnscope.attention.channels.WORK", B * C * P.rule.states * (T - 1) ** 2)
    with pytest.raises(InputError, match=f"{C} channels over {T} tokens") as refused:
        again.rows(0, 1)
    assert f"at most {T - 1} tokens" in str(refused.value.hint)
    assert again.of_channel(0).rows(0, 1).shape == (1, 1, 1, T)


def test_maps_of_channels_that_take_long_are_read_where_they_are_named(demo, channels, monkeypatch):
    loaded = wrap(roused_model("jamba", vocab_size=2000), demo.tokenizer, "jamba")
    quick = attnscope.capture(loaded, TEXT)
    monkeypatch.setattr("attnscope.observe.collect.QUICK", 0.0)
    seen = attnscope.capture(loaded, TEXT)
    layers = sorted({head.layer for head in quick.heads if head.stack == "channels"})
    assert layers
    assert not any(head.stack == "channels" for head in seen.heads)
    assert any(line.startswith(f"channels layers {as_ranges(layers)}: their maps") for line in seen.unmeasured)
    named = attnscope.capture(loaded, TEXT, select=f"channels.{layers[0]}")
    assert [(head.stack, head.layer) for head in named.kept_heads()] == [("channels", layers[0])]
    assert attnscope.capture(channels, TEXT).rules  # a model without others


GATED = "a gate or norm of the layer's own comes after the map"
TEXT = "the river bank was the bank of the river"


@pytest.fixture(scope="module")
def channels(demo):
    return wrap(roused_model("mamba", vocab_size=2000), demo.tokenizer, "mamba")


def test_a_model_without_a_softmax_is_read_by_its_rules(demo):
    loaded = wrap(roused_model("mamba2", vocab_size=2000), demo.tokenizer, "mamba2")
    seen = attnscope.capture(loaded, TEXT, request=Request(weights=True))
    assert [
        (row["layer"], row["head"], row["stack"]) for row in seen.table().to_pylist() if row["head"] is not None
    ] == [(layer, head, "linear") for layer in range(4) for head in range(4)]
    assert (seen.weights[0] < 0).any()
    assert seen.failures == []


def test_layers_of_channels_show_the_mean_of_sizes_or_one_channel_signed(channels):
    mean = attnscope.capture(channels, TEXT, request=Request(weights=True))
    one = attnscope.capture(channels, TEXT, request=Request(weights=True, view=View(channel=3), maps="all"))
    [drawn] = drawings(one).values()
    assert {maps.quantity for maps in drawn.maps} == {"channel"}
    assert drawn.about.line.endswith(", channel 3")
    # How much is negative is known of a channel, and not of a mean of sizes.
    assert not any(math.isfinite(head.score.get("negative_share", math.nan)) for head in mean.heads)
    assert all(0 < head.score["negative_share"] < 1 for head in one.heads)
    assert {row["stack"] for row in mean.table().to_pylist() if row["head"] is not None} == {"channels"}
    assert (mean.weights[0] >= 0).all()
    assert (one.weights[0] < 0).any()
    assert mean.weights[0].shape == one.weights[0].shape
    # Over all channels the sizes of the signed maps have that mean.
    rule = mixed_layers("mamba", model=channels.model, ids=torch.tensor([mean.queries.ids]))[0].P.rule
    own = rule.weights(0, len(mean.queries), slice(0, rule.shape[2]))
    torch.testing.assert_close(torch.as_tensor(mean.weights[0]), own.abs().mean(1))
    torch.testing.assert_close(torch.as_tensor(one.weights[0]), own[0, 3:4], rtol=1e-4, atol=1e-5)


def test_the_strongest_relation_of_channels_is_the_largest_share_above_uniform():
    """Not the largest mean |w|: a row may have much of it, spread over two keys."""
    P = ChannelMap(FadingMean("RWKV-4", X[:1], lambda rows, start, stop: rows, X[:1], SKIP, SKIP))
    rows = torch.zeros(1, 1, T, T)
    rows[0, 0, 3, 2:4], rows[0, 0, 4, 1] = 5.0, 0.1
    P._whole = rows
    texts = Texts(torch.arange(T)[None], torch.tensor([T]), stack="channels")
    relation = TopRelation()
    layer = Layer(LayerKey(0, "channels"), P, 1, texts)
    weight, query, key = relation.collect(layer, P.together(relation.questions(layer)))
    assert (float(weight), int(query), int(key)) == (pytest.approx(0.1), 4, 1)


def test_metrics_that_are_named_and_measured_anyway_are_measured_once(demo):
    loaded = wrap(roused_model("mamba2", vocab_size=2000), demo.tokenizer, "mamba2")
    seen, named = (
        attnscope.capture(loaded, TEXT, request=Request(metrics=metrics))
        for metrics in (("entropy",), ("absolute_mass", "entropy"))
    )
    for row, other in zip(seen.table().to_pylist(), named.table().to_pylist(), strict=True):
        assert row["absolute_mass"] == other["absolute_mass"] is not None


@pytest.mark.parametrize(("select", "layers"), [(None, 4), ("1", 2), ("channels.0", 4)])
def test_a_bar_counts_the_layers_that_a_pass_reads(demo, select, layers):
    model = wrap(roused_model("jamba", vocab_size=2000), demo.tokenizer, "jamba")
    run, counts = prepare(model, CaptureSpec(TEXT, Request(), select=select)), []
    run.observe(counts.append)
    assert (run.layers, sum(counts)) == (layers, layers)


def test_a_channel_that_no_layer_has_and_a_model_without_such_layers_are_refused(channels, demo):
    with pytest.raises(InputError, match="expected a channel from 0 to 95, got 96"):
        attnscope.capture(channels, TEXT, request=Request(view=View(channel=96)))
    with pytest.raises(UsageError, match="no layers whose channels have maps of their own"):
        attnscope.capture(demo, TEXT, request=Request(view=View(channel=0)))
    with pytest.raises(UsageError, match="from 0, got -1"):
        View(channel=-1)


def test_what_needs_a_softmax_or_heads_is_refused_with_the_reason(channels):
    for call_of in (
        partial(attnscope.capture, channels, TEXT, request=Request(rollout="tokens")),
        partial(attnscope.capture, channels, TEXT, request=Request(view=View(weights="scores"))),
        partial(attnscope.explain, channels, TEXT, head="0.0"),
        partial(attnscope.why, channels, TEXT, head="0.0", key="bank"),
        partial(attnscope.compare, channels, channels, TEXT),
        partial(attnscope.parity, channels, TEXT),
    ):
        with pytest.raises(ModelError, match="no layer of mamba has one"):
            call_of()
    with pytest.raises(ModelError, match="mamba has no heads"):
        attnscope.knockout(channels, TEXT, key="bank")
    for over in ("none", "heads", "layers"):
        with pytest.raises(ModelError, match=r"mamba has no heads: .* and none can be changed"):
            attnscope.patch(channels, TEXT, corrupted="the bank of the field", what="value", over=over)
    with pytest.raises(ModelError, match=r"mamba has no heads: .* and none can be changed"):
        attnscope.patch(channels, TEXT, corrupted="the bank of the field", select="0.0")
    with pytest.raises(ModelError, match=r"mamba has no heads: .* and a scan tests heads"):
        attnscope.scan(channels, sequences=1)


def test_a_model_of_linear_layers_alone_is_asked_for_no_heads_of_attention(demo):
    """It has none to name, nor groups of heads that share keys and values."""
    loaded = wrap(roused_model("mamba2", vocab_size=2000), demo.tokenizer, "mamba2")
    with pytest.raises(ModelError, match="a budget of keys is of attention by a softmax, and no layer of mamba2 has"):
        attnscope.knockout(loaded, TEXT, keep="stream:1+2")
    patched = attnscope.patch(loaded, TEXT, corrupted="the bank of the field", at="first", what="value")
    assert not any("share keys and values" in line for line in patch_notes(patched))
    with pytest.raises(ModelError, match="no layer of mamba2 has one; leave out texts"):
        attnscope.scan(loaded, sequences=2, texts=[TEXT])
    with pytest.raises(ModelError, match="weighs by values, is of attention by a softmax, and no layer of mamba2 has"):
        Worker(Job(request=Request(view=View(weights="value"))), loaded)


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_without_attention_the_number_of_a_layer_names_its_map_in_python_too(demo, family):
    loaded = wrap(roused_model(family, vocab_size=2000), demo.tokenizer, family)
    seen = attnscope.capture(loaded, TEXT, layers=[1])
    assert [key.layer for key in seen.weights] == [1]
    assert set(seen.relations()["layer"].to_pylist()) == {1}
    kept = attnscope.capture(loaded, TEXT, request=Request(view=View(heads={2: [0]}), weights={2: [0]}, relations=True))
    assert {key.layer: list(heads) for key, heads in kept.weight_heads.items()} == {2: [0]}
    assert set(kept.relations()["layer"].to_pylist()) == {2}
    with pytest.raises(UsageError, match="there is no layer 9; there are 0, 1, 2, 3"):
        attnscope.capture(loaded, TEXT, layers=[9])


def test_a_model_whose_own_code_keeps_no_gradients_is_refused_where_they_are_asked_for(demo):
    loaded = wrap(roused_model("xlstm", vocab_size=2000), demo.tokenizer, "xlstm")
    with pytest.raises(ModelError, match="xlstm keeps no gradients: its own code runs without them; leave out method"):
        attnscope.patch(loaded, TEXT, corrupted="the bank of the field", at="first", over="heads", method="gradient")


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_two_sides_of_a_page_have_no_divergence_of_layers_without_a_softmax(demo, family):
    loaded = wrap(roused_model(family, vocab_size=2000), demo.tokenizer, family)
    first, other = (attnscope.capture(loaded, text) for text in (TEXT, "the river field was the bank"))
    heads = divergences(first, other, None)
    assert len(heads) == len(first.heads)
    assert {head.js for head in heads} == {None}
    assert all(0 <= head.lost <= 1 for head in heads)


def test_the_text_of_a_linear_head_is_coloured_by_shares(demo):
    loaded = wrap(roused_model("qwen3_next", vocab_size=2000), demo.tokenizer, "qwen3_next")
    seen = attnscope.capture(loaded, TEXT)
    rows = seen.matrix("linear.2.1")[[3, 5]].abs()
    assert (seen.matrix("linear L2H1") < 0).any()
    coloured = seen.text(query="3,5", head="linear.2.1").table()["weight"].to_pylist()
    assert coloured == pytest.approx((rows / rows.sum(-1, keepdim=True)).mean(0).tolist(), abs=1e-6)
    with pytest.raises(UsageError, match=r'no layer 0 with attention; there are 3; its map is select="linear.0"'):
        attnscope.capture(loaded, TEXT, layers=[0])


def test_a_stack_that_a_call_has_no_use_for_is_refused_as_that_and_not_as_absent(demo):
    model = wrap(roused_model("jamba", vocab_size=2000), demo.tokenizer, "jamba")
    with pytest.raises(UsageError, match=r"'channels.0' names channels layers, and a study changes decoder layers"):
        attnscope.knockout(model, TEXT, key="bank", select="channels.0")
    with pytest.raises(UsageError, match=r"'channels.0' names channels layers, and parity checks decoder layers"):
        attnscope.parity(model, TEXT, select="channels.0")


@pytest.mark.parametrize(("family", "words"), [("mamba", "4 ssm layers"), ("mamba2", "4 ssm layers x 4 heads")])
def test_a_model_without_attention_is_not_introduced_by_layers_that_it_lacks(family, words):
    assert geometry_of(tiny_config(family), count=False).in_words == words


@pytest.mark.parametrize("engine", ["fused", "probe", "auto"])
def test_where_no_layer_attends_any_engine_reads_the_same(channels, engine):
    found = attnscope.capture(channels, TEXT, engine=engine, request=Request(weights=True))
    own = attnscope.capture(channels, TEXT, request=Request(weights=True))
    assert (found.facts["engine"], found.failures) == ("eager", [])
    torch.testing.assert_close(found.weights[0], own.weights[0])


def test_what_linear_heads_write_is_refused_with_the_reason(demo):
    """Direct effects and copying: no gate and no norm is in a map."""
    loaded = wrap(roused_model("mamba2", vocab_size=2000), demo.tokenizer, "mamba2")
    assert copying_of(loaded, [5, 6, 7]) == f"linear heads have none: {GATED}"
    effects = attnscope.ablate(loaded, ["linear L1H0"], sequences=2, random=0)
    assert effects.found.facts["direct"] == f"linear heads have none: {GATED}"


def test_layers_without_a_softmax_that_a_view_cannot_show_are_named_with_the_reason(demo):
    hybrid = wrap(roused_model("jamba", vocab_size=2000), demo.tokenizer, "jamba")
    seen = attnscope.capture(hybrid, TEXT, request=Request(view=View(weights="value")))
    assert f"channels layers 0,2: they have no norm of what a key writes: {GATED}" in seen.unmeasured


def test_a_number_alone_names_the_only_layers_that_there_are(channels):
    seen = attnscope.capture(channels, TEXT, select="1")
    assert [(head.stack, head.layer) for head in seen.kept_heads()] == [("channels", 1)]


def test_heads_without_focus_are_ranked_by_the_first_metric_that_they_have(channels):
    seen = attnscope.capture(channels, TEXT, request=Request(maps="all"))
    scores = seen.columns.scores
    assert np.isnan(scores["focus"].value).all()
    assert seen.ranked_by == "previous_token"
    shown = seen.kept_heads(seen.ranked_by)
    assert [head.layer for head in shown] == np.argsort(-scores["previous_token"].value).tolist()
    assert "metric=previous_token" in about(seen, {}).open.split("&")
    # By a metric that no head has, titles are without a number.
    for sort, number in (("focus", False), (seen.ranked_by, True)):
        drawing = drawings(seen, DrawingOptions(sort=sort, top=None))[""]
        assert all((", " in title) is number for title in drawing.sheet.titles)
        assert [depth.name for depth in depths_of(seen, (), sort)[0]] == ["previous token"] * number


@pytest.mark.e2e
def test_an_order_by_what_no_head_has_is_said_to_be_none(tmp_path, channels):
    """Of a text, and of a dataset; heads that have it are in its order without a word."""
    folder = tmp_path / "model"
    channels.model.save_pretrained(folder)
    channels.tokenizer.save_pretrained(folder)
    (tmp_path / "corpus.txt").write_text(f"{TEXT}\n")
    call("batch", str(tmp_path / "corpus.txt"), "-m", str(folder), "--out", str(tmp_path / "dataset")).ok()
    for source in (("--text", TEXT, "-m", str(folder)), (str(tmp_path / "dataset"),)):
        line = "no head here has focus: heads are in the model's order"
        assert line in call("heads", *source, "--sort", "focus").ok().err
        assert line not in call("heads", *source, "--sort", "self").ok().err


@pytest.mark.e2e
def test_the_shell_reads_one_channel(channels, tmp_path):
    channels.model.save_pretrained(tmp_path)
    channels.tokenizer.save_pretrained(tmp_path)
    words = ["relations", TEXT, "--model", str(tmp_path), "--format", "jsonl"]
    outs = [call(*words, *more).ok().out.splitlines() for more in ([], ["--channel", "3"])]
    mean, one = ([json.loads(line) for line in out] for out in outs)
    assert all(row["weight"] >= 0 for row in mean)
    assert mean != one
    refused = call("relations", TEXT, "--channel", "3")
    assert (refused.code, "leave out --channel" in refused.err) == (2, True)


def test_the_table_has_every_type_and_what_it_says_holds():
    rows = {row[0]: row for row in read("linear")}
    assert rows.keys() == {*ONE_OF_EACH, *OTHERS}
    for _, _, _, layers, error, future, distance, remarks in rows.values():
        assert layers
        assert float(error) <= 1e-6
        assert float(future) == 0
        assert float(distance) <= 1e-6 or remarks
    again = mixing_row("mamba2", mixed_layers("mamba2"))
    assert without_figures([again]) == without_figures([rows["mamba2"]])


@pytest.mark.families
@of_all_families
@pytest.mark.parametrize("model_type", sorted({*ONE_OF_EACH, *OTHERS} - {"mamba2"}))
def test_a_row_of_the_table_is_what_the_type_gives(model_type):
    [row] = (row for row in read("linear") if row[0] == model_type)
    again = mixing_row(model_type, mixed_layers(model_type))
    assert without_figures([again])[0][:-1] == without_figures([row])[0][:-1]


# Whose layers all attend: convolutions prepare what their attention is given.
ATTEND = {"inkling", "inkling2"}


@pytest.mark.families
@of_all_families
def test_no_modelling_file_with_a_rule_is_missing_from_the_table():
    """By the arguments of its functions, and by the parts of a module that spells its rule out."""
    needs = [names for forms in tasks.RULES.values() for names in forms.values() if names]
    files = set()
    for path in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        source = path.read_text("utf-8")
        for arguments in re.findall(r"def \w+\(([^)]*)\)", source):
            names = set(re.findall(r"(?:^|,)\s*(\w+)", re.sub(r"\[[^\]]*\]", "", arguments)))
            if any(form <= names for form in needs) and not tasks.CACHED & names:
                files.add(path.parent.name)
        if any(all(f"self.{part} =" in source for part in parts) for parts in tasks.PARTS.values()):
            files.add(path.parent.name)
    folders = {name.removesuffix("_text") for name in (*ONE_OF_EACH, *OTHERS)}
    assert files - ATTEND == folders


@pytest.mark.parametrize("family", ["qwen3_next", "recurrent_gemma"])
def test_a_class_made_of_a_layers_own_has_its_rule(demo, family):
    """As torch makes one where it shards or parametrizes a module: the file's function and the own method are heard."""
    model = roused_model(family, vocab_size=2000)
    stack = "linear" if family == "qwen3_next" else "channels"
    own = attnscope.capture(wrap(model, demo.tokenizer), TEXT, select=f"{stack}.*").of(stack)
    kinds = {type(module): tasks.rules_of(module) for module in model.modules()}
    names = [(home, rule) for kind, rules in kinds.items() for rule in rules for home in tasks.homes_of(kind, rule)]
    before = [getattr(home, rule) for home, rule in names]
    for module in model.modules():
        if tasks.rules_of(module):
            module.__class__ = type("Sharded", (type(module),), {})
    made = attnscope.capture(wrap(model, demo.tokenizer), TEXT, select=f"{stack}.*").of(stack)
    assert list(made.weights) == list(own.weights)
    assert all(torch.equal(made.weights[layer], weights) for layer, weights in own.weights.items())
    assert [getattr(home, rule) for home, rule in names] == before


def test_a_linear_layer_that_ran_without_its_rule_is_named(demo):
    model = roused_model("qwen3_next", vocab_size=2000)
    loaded = wrap(model, demo.tokenizer)
    assert attnscope.capture(loaded, TEXT).unmeasured == []
    model.model.layers[1].linear_attn.forward = lambda hidden_states, **more: 0 * hidden_states
    seen = attnscope.capture(loaded, TEXT)
    assert [key.layer for key in seen.of("linear").weights] == [0, 2]
    assert "linear layers 1: no call of their rule was heard" in seen.unmeasured
    assert attnscope.capture(loaded, TEXT, select="linear.2.*").unmeasured == []
