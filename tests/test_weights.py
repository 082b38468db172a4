"""Attention weights without their model: the same numbers as of a pass, checked as data, marked as not verified."""

import hashlib
import json
import os
import pickle
import zipfile

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

import attnscope
from attnscope.api.captured import Capture
from attnscope.attention.spec import Visibility
from attnscope.errors import InputError, MemoryLimitError, UsageError
from attnscope.export.drawing import about
from attnscope.export.export import manifest
from attnscope.inputs import tensor_files as files
from attnscope.inputs.tensor_files import read_tensors
from attnscope.inputs.tensors import prompt_of_tokens
from attnscope.metrics.metrics import METRICS
from attnscope.model.loading import wrap
from attnscope.observe.masks import Sight
from attnscope.observe.request import Request, View
from attnscope.viewer.page_data import sight_of
from helpers.command_line import call
from helpers.families import tiny_config

TEXT = "the financial bank is located on river bank, the financial bank is"
LONG = f"{TEXT} {TEXT}"
ALL = Request(relations=True, top_k=None, maps="all", weights=True, rollout="tokens", per_token=True)
ALL_OF_TWO = Request(relations=True, top_k=None, maps="all", weights=True, query="0-3", key="first,bank")


@pytest.fixture(scope="module")
def captured(demo):
    """A capture of the demo, its heads called what the text shows."""
    return bare(attnscope.capture(demo, TEXT, request=ALL, engine="eager"))


@pytest.fixture(scope="module")
def layers(captured):
    return [captured.weights[layer] for layer in range(4)]


def bare(seen):
    """The observation with the roles of the text alone: weights bring no atlas."""
    return Capture.made_of(seen.named(None))


def random(demo, model_type, head="CausalLM", **config):
    """A model of transformers, with parameters large enough for heads to differ."""
    config = tiny_config(model_type, vocab_size=2000, **config)
    model = getattr(transformers, f"AutoModelFor{head}").from_config(config, attn_implementation="eager")
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0, 0.3)
    return wrap(model.eval().requires_grad_(False), demo.tokenizer, f"tiny-{model_type}")


def same(seen, expected, kv=True):
    """Every table, map and number of two observations, to 1e-6."""
    assert list(seen.stacks) == list(expected.stacks)
    for stack, of in expected.stacks.items():
        own = seen.of(stack)
        assert dict(own.visible) == dict(of.visible)
        assert dict(own.support) == dict(of.support)
        np.testing.assert_allclose(own.received, of.received, atol=1e-6)
        for key in of.weights:
            assert own.uniform(tuple(key)) == pytest.approx(of.uniform(tuple(key)), abs=1e-6, nan_ok=True)
            torch.testing.assert_close(own.weights[key], of.weights[key], atol=1e-6, rtol=0)
            if of.maps:
                np.testing.assert_allclose(own.maps.values[key], of.maps.values[key], atol=1e-6)
    tables = [[view.table(), view.relations(), view.key_table()] for view in (seen, expected)]
    for table, view in zip(tables, (seen, expected), strict=True):
        table += [view.token_table()] if expected.per_token else []
        table += [view.rollout_table()] if expected.rollout else []
    for table, other in zip(*tables, strict=True):
        assert table.schema.equals(other.schema)
        for name in table.column_names:
            if name != "kv_head" or kv:
                same_column(name, table.column(name), other.column(name))


def same_column(name, own, expected):
    if str(own.type) in ("float", "double"):
        numbers = [np.array(column.to_pylist(), float) for column in (own, expected)]
        np.testing.assert_allclose(*numbers, atol=1e-6, err_msg=name)
    else:
        assert own.to_pylist() == expected.to_pylist(), name


# The same numbers

FORMS = {
    "a list of tensors with a batch axis": lambda layers: tuple(layer[None] for layer in layers),
    "one array of numpy": lambda layers: np.stack([layer.numpy() for layer in layers]),
    "one tensor with a batch axis": lambda layers: torch.stack(list(layers))[:, None].double(),
    "layers by number": lambda layers: dict(enumerate(layer.numpy() for layer in layers)),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_numbers_are_those_of_a_capture_of_the_same_matrices(captured, layers, form):
    seen = attnscope.from_weights(FORMS[form](layers), captured.prompt, kv_heads=3, request=ALL)
    same(seen, captured)


def test_so_are_those_of_named_tokens_groups_and_spans(demo, layers):
    asked = Request(
        relations=True,
        maps="kept",
        weights=True,
        per_token=True,
        query="5-12",
        key="money",
        define={"money": "bank,financial"},
        spans=("money",),
        group="words",
    )
    expected = bare(attnscope.capture(demo, TEXT, request=asked, engine="eager", select="1.*,3.2"))
    seen = attnscope.from_weights(layers, expected.prompt, kv_heads=3, request=asked, select="1.*,3.2")
    same(seen, expected)
    for key, pairs in expected.spans.items():
        np.testing.assert_allclose(seen.spans[key].mass, pairs.mass, atol=1e-6)
    by_kv = Request(view=View(by_kv=True), relations=True, maps="all", weights=True)
    expected = bare(attnscope.capture(demo, TEXT, request=by_kv, engine="eager"))
    same(attnscope.from_weights(layers, expected.prompt, kv_heads=3, request=by_kv), expected)


def test_no_matrix_is_kept_that_was_not_asked_for_and_none_is_copied(captured, layers):
    seen = attnscope.from_weights(layers, captured.prompt)
    for key, weights in seen.weights.items():
        assert weights.untyped_storage().data_ptr() == layers[key.layer].untyped_storage().data_ptr()
    lean = attnscope.from_weights(layers, captured.prompt, request=Request(relations=True))
    assert (lean.maps, len(lean.weights), len(lean.operands)) == (None, 0, 0)
    with pytest.raises(UsageError, match="the matrix of L0H0 was not kept"):
        lean.matrix("L0H0")


def test_the_comparison_sees_one_wrong_weight(captured, layers):
    wrong = [layer.clone() for layer in layers]
    wrong[2][3, 7, :2] = wrong[2][3, 7, :2].flip(0)
    with pytest.raises(AssertionError):
        same(attnscope.from_weights(wrong, captured.prompt, kv_heads=3, request=ALL), captured)


@pytest.mark.parametrize(
    ("model_type", "config", "masks"),
    [
        ("bert", {"is_decoder": False}, "both ways"),
        ("mistral", {"sliding_window": 8, "num_hidden_layers": 2}, "causal, window 8"),
        ("gemma2", {"sliding_window": 8}, "causal, window 8 in layers 0,2; causal in layers 1,3"),
        ("modernbert", {"local_attention": 8}, "both ways in layer"),
        pytest.param("llama4_text", {"attention_chunk_size": 8}, "causal, chunk 8", marks=pytest.mark.families),
    ],
)
def test_the_masks_of_families_are_read_off_their_weights(demo, model_type, config, masks):
    loaded = random(demo, model_type, "MaskedLM" if model_type in ("bert", "modernbert") else "CausalLM", **config)
    expected = bare(attnscope.capture(loaded, LONG, request=ALL, engine="eager"))
    attentions = loaded.model(torch.tensor([expected.prompt.ids]), output_attentions=True).attentions
    seen = attnscope.from_weights(attentions, expected.prompt, request=ALL)
    [line] = [line for line in seen.unmeasured if "masks" in line]
    assert line.startswith(f"masks were read off the weights: {masks}")
    assert ("4 before and 4 after" in line) == (model_type == "modernbert")
    same(seen, expected, kv=False)


@pytest.mark.parametrize("model_type", ["bart", pytest.param("t5", marks=pytest.mark.families)])
def test_an_encoder_decoder_has_three_stacks_and_its_cross_attention_can_be_given_alone(demo, model_type):
    loaded = random(demo, model_type, "Seq2SeqLM")
    expected = bare(attnscope.capture(loaded, TEXT, target="Mary saw John", request=ALL_OF_TWO, engine="eager"))
    ids, target = (torch.tensor([prompt.ids]) for prompt in (expected.prompt, expected.queries))
    result = loaded.model(ids, decoder_input_ids=target, output_attentions=True)
    parts = {
        "encoder": result.encoder_attentions,
        "cross": result.cross_attentions,
        "decoder": result.decoder_attentions,
    }
    axes = {"tokens": expected.prompt, "query_tokens": expected.queries}
    seen = attnscope.from_weights(parts, **axes, request=ALL_OF_TWO)
    same(seen, expected, kv=False)
    assert len(seen.page().html) > 10_000
    alone = attnscope.from_weights(parts["cross"], **axes, request=ALL_OF_TWO)
    same(alone, bare(expected.of("cross")), kv=False)
    with pytest.raises(InputError, match=r"expected 1[01] queries and 14 keys.*got 1[01] and 1[01]"):
        attnscope.from_weights(parts["decoder"], **axes)


def test_a_sink_takes_what_is_left_of_a_row(demo, tmp_path):
    loaded = random(demo, "gpt_oss", num_hidden_layers=2)
    expected = bare(attnscope.capture(loaded, TEXT, request=ALL, engine="eager"))
    layers = [expected.weights[layer] for layer in range(2)]
    assert min(float(layer.sum(-1).min()) for layer in layers) < 0.9
    with pytest.raises(InputError, match=r"row \d+ of L0H\d sums to \S+, expected 1"):
        attnscope.from_weights(layers, expected.prompt)
    same(attnscope.from_weights(layers, expected.prompt, sink_logits=True, request=ALL), expected, kv=False)
    for name in ("sinks.npz", "sinks.safetensors"):  # a file says it too
        attnscope.save_weights(tmp_path / name, layers, expected.prompt, sink_logits=True)
        same(attnscope.from_weights(tmp_path / name, request=ALL), expected, kv=False)
    done = call("heads", "--tensors", str(tmp_path / "sinks.npz"), "--format", "csv")
    assert (done.code, done.out.count(b"\n")) == (0, 9), done.err


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_whatever_holds_it_now(captured, layers, dtype):
    rounded = [layer.to(dtype) for layer in layers]
    seen = attnscope.from_weights(rounded, captured.prompt, request=ALL)
    again = attnscope.from_weights([layer.float().numpy() for layer in rounded], captured.prompt, request=ALL)
    assert seen.facts["dtype"] == again.facts["dtype"] == str(dtype).removeprefix("torch.")
    same(seen, again)
    off = [layer * 1.001 for layer in layers]  # as far off, and no rounding
    with pytest.raises(InputError, match=r"row \d+ of L0H0 sums to 1\.001, expected 1"):
        attnscope.from_weights(off, captured.prompt)


def padded_run(demo, model_type, head, side):
    """Attention of a text beside a longer one, as transformers gives it, with the tokens and their mask."""
    loaded = random(demo, model_type, head)
    ids, pads = demo.tokenizer(TEXT)["input_ids"], [1999] * 3
    rows = [ids + [5] * 3, pads + ids if side == "left" else ids + pads]
    mask = torch.tensor([[1] * len(rows[0]), [int(token != 1999) for token in rows[1]]])
    result = loaded.model(torch.tensor(rows), attention_mask=mask, output_attentions=True)
    names = demo.tokenizer.convert_ids_to_tokens(rows[1])
    names = ["<pad>" if token == 1999 else name for token, name in zip(rows[1], names, strict=True)]
    alone = loaded.model(torch.tensor([ids]), output_attentions=True).attentions
    return [layer[[1]] for layer in result.attentions], names, mask[1], alone


@pytest.mark.parametrize(
    ("model_type", "head", "side"),
    [("llama", "CausalLM", "left"), ("llama", "CausalLM", "right"), ("bert", "MaskedLM", "right")],
)
def test_padding_whose_rows_hold_weights_is_known_by_what_it_cannot_be(demo, model_type, head, side):
    layers, names, mask, alone = padded_run(demo, model_type, head, side)
    seen = attnscope.from_weights(layers, names, request=ALL)
    expected = attnscope.from_weights(alone, [name for name in names if name != "<pad>"], request=ALL)
    assert seen.facts["notes"] == ["3 tokens of padding at the ends of the text were left out"]
    assert dict(seen.visible) == dict(expected.visible)
    for key in expected.weights:
        torch.testing.assert_close(seen.weights[key], expected.weights[key], atol=1e-4, rtol=0)
    # Tokens that are called something else are not taken out: who knows says it.
    words = [name.strip("<>") for name in names]
    doubt = attnscope.from_weights(layers, words)
    places = "0-2" if side == "left" else f"{len(names) - 3}-{len(names) - 1}"
    assert doubt.facts["notes"] == [
        f"tokens {places} of the text may be padding: no token gives them weight; attention_mask says which are"
    ]
    assert set(doubt.visible.values()) == {"visible keys not known"}
    padded = attnscope.from_weights(layers, words, attention_mask=mask[None])
    assert (len(padded.prompt), padded.facts["notes"]) == (len(names) - 3, seen.facts["notes"])
    mask[3 if side == "left" else 0] = 0  # a token that others look at
    with pytest.raises(InputError, match="tokens of padding receive weight"):
        attnscope.from_weights(layers, words, attention_mask=mask)


def test_rows_of_padding_are_left_out_and_said(captured, layers):
    tokens = ["<pad>", "<pad>", *captured.prompt.tokens, "<pad>"]
    padded = [torch.nn.functional.pad(layer, (2, 1, 2, 1)) for layer in layers]
    seen = attnscope.from_weights(padded, tokens, kv_heads=3, request=ALL)
    same(seen, attnscope.from_weights(layers, list(captured.prompt.tokens), kv_heads=3, request=ALL))
    assert (seen.prompt.removed, seen.facts["notes"]) == (
        3,
        ["3 tokens of padding at the ends of the text were left out"],
    )
    padded[1][0, 5, 0], padded[1][0, 5, 2] = padded[1][0, 5, 2].clone(), 0.0
    with pytest.raises(InputError, match="layer 1: tokens of padding receive weight"):
        attnscope.from_weights(padded, tokens)
    for layer in layers:
        assert layer[:, 4].any()
    holed = [layer.clone() for layer in layers]
    for layer in holed:
        layer[:, 4] = 0
    with pytest.raises(InputError, match="row 4 is all zeros in every head"):
        attnscope.from_weights(holed, captured.prompt)


# Masks, read off the weights


def uniform(seen_QK):
    """Equal weights on the keys that are seen."""
    seen_QK = np.asarray(seen_QK, float)
    return torch.tensor(seen_QK / seen_QK.sum(-1, keepdims=True))[None]


def distance(tokens):
    return np.arange(tokens)[:, None] - np.arange(tokens)


def in_runs(*lengths):
    """Whether two tokens are in one run, (T, T)."""
    run_T = np.repeat(np.arange(len(lengths)), lengths)
    return run_T[:, None] == run_T


@pytest.mark.parametrize(
    ("seen_QK", "sight"),
    [
        (distance(6) >= 0, Sight(None, 0)),
        (distance(6) < 99, Sight(None, None)),
        ((distance(6) >= 0) & (distance(6) < 3), Sight(2, 0)),
        (np.abs(distance(6)) <= 2, Sight(2, 2)),
        ((distance(6) <= 1) & (distance(6) >= -3), Sight(1, 3)),
        (np.ones((1, 1)), Sight(None, 0)),
        (in_runs(4, 4, 4) & (distance(12) >= 0), Sight((0, 4, 8), 0)),  # chunks
        (in_runs(4, 4, 1) & (distance(9) >= 0), Sight((0, 4, 8), 0)),
        (in_runs(3, 5, 2) & (distance(10) >= 0), Sight((0, 3, 8), 0)),  # texts side by side
        (in_runs(3, 5, 2), Sight((0, 3, 8), (0, 3, 8))),
        ((distance(6) >= 0) | in_runs(3, 1, 1, 1), Sight(None, (0, 3, 4, 5))),  # a prefix
        ((distance(6) >= 0) | in_runs(1, 3, 1, 1), Sight(None, (0, 1, 4, 5))),  # a picture
        ((distance(6) >= 0) & (distance(6) < 3) | in_runs(1, 1, 3, 1), Sight(2, (0, 1, 2, 5))),
        # What a mask does not explain is not known.
        (np.eye(6), None),  # rows of a single 1
        (distance(6) == np.minimum(distance(6)[:, :1], 1), None),  # the token before
        ((distance(6) >= 0) & (distance(6) != 1) | np.eye(6, dtype=bool), None),  # a gap
        ((distance(6) >= 0) & ~((distance(6) == 3) & (np.arange(6) == 1)), None),  # one key without weight
        (in_runs(5, 1) & (distance(6) >= 0), None),  # a last row of a single 1
        (in_runs(1, 5) & (distance(6) >= 0), None),
        (np.ones((3, 5)), Sight(None, None)),  # queries of another text
        (np.ones((3, 5)) - np.eye(3, 5), None),
    ],
)
def test_a_mask_is_known_where_every_query_shows_it(seen_QK, sight):
    seen_QK = torch.tensor(np.array(seen_QK, bool))
    assert Sight.of(seen_QK) == sight
    for query, key in np.ndindex(*seen_QK.shape) if sight else ():
        assert bool(seen_QK[query, key]) == (beyond(sight.before, query, key) and beyond(sight.after, key, query))


def beyond(side, late, early):
    """Whether two places are within reach of each other, on the side where the one is after the other."""
    if late <= early or side is None:
        return True
    if isinstance(side, tuple):  # no run begins between them
        return not any(early < start <= late for start in side)
    return late - early <= side


RULED = {
    "causal, chunk 4": in_runs(4, 4, 4) & (distance(12) >= 0),
    "causal, runs of tokens from 0,5,9": in_runs(5, 4, 3) & (distance(12) >= 0),
    "both ways, runs of tokens from 0,5,9": in_runs(5, 4, 3),
    "causal, both ways in the first 4 tokens": (distance(12) >= 0) | in_runs(4, *[1] * 8),
}


@pytest.mark.parametrize("words", RULED)
def test_numbers_and_pictures_are_those_of_the_mask(words):
    seen_QK = torch.tensor(RULED[words])
    weights = random_weights(seen_QK)
    seen = attnscope.from_weights([weights], list("abcabcabcabc"), request=ALL)
    assert f"masks were read off the weights: {words}" in seen.unmeasured
    expected = Visibility(12, 12, seen_QK[None, None])
    for head in seen.heads:
        entropy_Q = -(weights[head.head] * weights[head.head].clamp_min(1e-30).log()).sum(-1)
        some_Q = expected.counts_BHQ[0, 0] >= 2
        share_Q = (entropy_Q / expected.counts_BHQ[0, 0].clamp_min(2).log())[some_Q]
        assert head.score["entropy_normalised"] == pytest.approx(float(share_Q.mean()), abs=1e-6)
        drawn = seen.maps.values[head.layer, seen.stack][head.head]
        assert (np.isnan(drawn) == ~RULED[words]).all()
    assert len(seen.relations()) == int(seen_QK.sum()) * 2
    first_Q, end_Q = sight_of(seen, next(iter(seen.kv_of)))
    first_Q = np.zeros(12) if first_Q is None else first_Q
    end_Q = np.arange(1, 13) if end_Q is None else end_Q
    for query, row in enumerate(RULED[words]):
        assert (first_Q[query], end_Q[query]) == (row.argmax(), 12 - row[::-1].argmax())


def random_weights(seen_QK):
    """Two heads of random weights over the keys that are seen."""
    logits = torch.randn(2, *seen_QK.shape, generator=torch.Generator().manual_seed(0))
    return logits.masked_fill(~seen_QK, -torch.inf).softmax(-1)


def test_keys_without_weight_count_neither_as_visible_nor_as_hidden():
    """One key that no head gives weight: causal is likely, and not shown."""
    seen_QK = torch.ones(12, 12).tril().bool()
    seen_QK[7, 3] = False
    weights = random_weights(seen_QK)
    tokens = list("abcabcabcabc")
    seen = attnscope.from_weights([weights], tokens, request=ALL)
    assert "masks were read off the weights: visible keys not known" in seen.unmeasured
    [head] = [head for head in seen.heads if head.head == 0]
    none = {name for name, value in head.score.items() if np.isnan(value)}
    assert {name for name, metric in METRICS.items() if metric.of_visible} == none == {"entropy_normalised", "focus"}
    assert all(np.isnan(value) for value in seen.uniform((0, "decoder")).values())
    assert head.strongest is None
    assert not np.isnan(seen.maps.values[0, "decoder"]).any()
    assert len(seen.relations()) == int(seen_QK.sum()) * 2
    first_Q, end_Q = sight_of(seen, next(iter(seen.kv_of)))
    assert (first_Q, end_Q.tolist()) == (None, [12] * 12)
    assert len(seen.page().html) > 10_000
    # Somebody who knows the mask says it.
    masked = attnscope.from_weights([weights], tokens, request=ALL, mask="causal")
    assert "masks were read off the weights: causal" in masked.unmeasured
    assert (np.isnan(masked.maps.values[0, "decoder"][0]) == ~np.tri(12, dtype=bool)).all()
    assert masked.relations().num_rows == 2 * 78
    sparse = np.tri(12, dtype=bool)
    sparse[7, 3] = False
    assert attnscope.from_weights([weights], tokens, request=ALL, mask=sparse).relations().num_rows == 2 * 77
    with pytest.raises(InputError, match="layer 0: query 1 gives weight to key 0, which the mask hides"):
        attnscope.from_weights([weights], tokens, mask=np.eye(12))
    with pytest.raises(InputError, match=r"mask: expected shape \(12, 12\), got \(3, 3\)"):
        attnscope.from_weights([weights], tokens, mask=np.eye(3))


def test_one_weight_ahead_makes_a_layer_look_both_ways(layers, captured):
    ahead = [layer.clone() for layer in layers]
    ahead[3][5, 2, 3:] = 0.25 / len(ahead[3][5, 2, 3:])
    ahead[3][5, 2, :3] *= 0.75
    seen = attnscope.from_weights(ahead, captured.prompt)
    assert seen.stack == "encoder"
    assert "causal in layers 0-2; visible keys not known in layers 3" in " ".join(seen.unmeasured)
    assert [seen.visible[key] for key in seen.kv_of] == ["full"] * 3 + ["visible keys not known"]


# What cannot be known


def test_nothing_of_it_counts_as_verified(captured, layers, tmp_path):
    seen = attnscope.from_weights(layers, captured.prompt, model="nano")
    assert seen.table()["kv_head"].to_pylist() == seen.relations()["kv_head"].to_pylist()[:1] * 24 == [None] * 24
    assert seen.head("L1H4").kv_head is None
    assert seen.table()["atlas_roles"].null_count == 24
    written = manifest(seen, {}, {})
    assert written["source"] == {"weights": "memory", "sha256": seen.facts["source"]["sha256"], "verified": False}
    assert written["model"]["name"] == "weights not verified: nano"
    assert written["checks"]["value_error"] is written["checks"]["masked_weight"] is None
    lines = " ".join(written["checks"]["unmeasured"])
    assert all(words in lines for words in ("not verified", "masks were read off", "kv heads"))
    page = seen.page()
    assert page.title.startswith("weights not verified: nano: “")
    assert "weights not verified: nano" in about(seen).line
    assert "not verified" in repr(seen)
    assert "not verified" in seen._repr_html_()
    other = attnscope.from_weights([layer.flip(0) for layer in layers], captured.prompt, model="nano")
    seen.export(tmp_path / "run", figures=())
    with pytest.raises(UsageError, match=r"holds another run.*weights"):
        other.export(tmp_path / "run", figures=())


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request(view=View(weights="scores")), "logits before the softmax need the model"),
        (Request(view=View(weights="value")), "norms of what keys write need the model"),
        (Request(operands=True), "q, k and v need the model"),
        (Request(view=View(by_kv=True)), "which heads share a kv head"),
    ],
)
def test_what_needs_the_model_is_refused_in_words(captured, layers, request_, words):
    with pytest.raises(UsageError, match=words):
        attnscope.from_weights(layers, captured.prompt, request=request_)


EYE = np.eye(3)[None].repeat(2, 0)
WRONG = {
    "no list": (EYE, "abc", UsageError, "expected a list of tokens, got str"),
    "no tokens": ([EYE], None, UsageError, "expected the tokens"),
    "no token": ([EYE], [], InputError, "there is no token"),
    "other tokens": ([EYE], ["a", "b"], InputError, "expected 2 queries and 2 keys, one for each token, got 3 and 3"),
    "ids alone": ([EYE], [1, 2, 3], UsageError, "ids need their tokenizer"),
    "mixed tokens": ([EYE], ["a", 2, "c"], UsageError, "expected strings or ids, got 2"),
    "a layer without weights": ([EYE, None], list("abc"), UsageError, "layer 1 is None: this model returned"),
    "two texts": ([np.stack([EYE, EYE])], list("abc"), InputError, r"layer 0 has 2 texts, expected one: \(2"),
    "one matrix": (EYE[0], list("abc"), InputError, r"expected weights of 4 axes .* got \(3, 3\)"),
    "no layer": ([], list("abc"), InputError, "there is no layer"),
    "whole numbers": ([EYE.astype(int)], list("abc"), UsageError, "expected floating-point numbers, got int64"),
    "objects": ([EYE.astype(object)], list("abc"), UsageError, "expected floating-point numbers, got object"),
    "ragged": ([[[1.0], [1.0, 2.0]]], list("abc"), UsageError, "layer 0: expected an array, got list"),
    "NaN": ([EYE * np.nan], list("abc"), InputError, "row 0 of L0H0 has NaN or infinite weights"),
    "logits": ([EYE - 1.0], list("abc"), InputError, "row 0 of L0H0 has a weight of -1, expected 0 to 1"),
    "no sum of 1": ([EYE, EYE + 0.1], list("abc"), InputError, r"row 0 of L1H0 sums to 1\.3, expected 1"),
    "zeros": ([EYE * 0], list("abc"), InputError, "all rows are zeros"),
    "a stack of none": ({"tower": [EYE]}, list("abc"), UsageError, "decoder, cross, got tower"),
    "cross without queries": ({"cross": [EYE]}, list("abc"), UsageError, "need the tokens of the queries"),
    "half a pair": ([EYE], ["a", "\ud800", "c"], InputError, "half of a surrogate pair"),
    "a long token": ([EYE], ["a", "b", "c" * 2000], InputError, "a token has 2000 letters, expected at most 1000"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_weights_is_refused_with_what_was_expected(case):
    weights, tokens, error, words = WRONG[case]
    with pytest.raises(error, match=words):
        attnscope.from_weights(weights, tokens)


# Tokens


@pytest.mark.parametrize(
    ("names", "text", "labels"),
    [
        (["<|endoftext|>", "The", "Ġcat", "Ċ", "Ã©"], "<|endoftext|>The cat\né", "<|endoftext|> The ·cat ↵ é"),
        (["<s>", "▁the", "▁riv", "er", "<0x0A>"], "<s> the river\n", "<s> ·the ·riv er ↵"),
        (["[CLS]", "run", "##ning", "fast", "[SEP]"], "[CLS]running fast[SEP]", "[CLS] run ning fast [SEP]"),
        (["the", "cat", "sat"], "the cat sat", "the cat sat"),
        (["the", " cat", " sat"], "the cat sat", "the ·cat ·sat"),
        (list("a b"), "a b", "a · b"),
    ],
)
def test_tokens_are_read_by_the_marks_of_their_vocabulary(names, text, labels):
    prompt = prompt_of_tokens(names)
    assert prompt.text == text
    assert " ".join(prompt.labels) == labels
    assert [prompt.special[at] for at in (0, -1)] == [names[at][0] in "<[" and names[at] != "<0x0A>" for at in (0, -1)]
    assert len(set(prompt.ids)) == len(set(names))


def test_tokens_of_a_tokenizer_read_as_its_own_text(demo, captured):
    names = demo.tokenizer.convert_ids_to_tokens(list(captured.prompt.ids))
    prompt = prompt_of_tokens(names)
    assert prompt.tokens == captured.prompt.tokens
    assert prompt.special == captured.prompt.special
    assert [span.name for span in prompt.words] == [span.name for span in captured.prompt.words]
    assert prompt_of_tokens(torch.tensor([captured.prompt.ids]), demo.tokenizer).ids == captured.prompt.ids


# Files


@pytest.fixture(scope="module")
def saved(captured, layers, demo, tmp_path_factory):
    """The demo's matrices of a text in both formats, as float32 and rounded."""
    folder = tmp_path_factory.mktemp("weights")
    names = demo.tokenizer.convert_ids_to_tokens(list(captured.prompt.ids))
    attnscope.save_weights(folder / "bank.npz", layers, names, model="mine", kv_heads=3)
    attnscope.save_weights(folder / "bank.safetensors", layers, list(captured.prompt.ids), tokenizer=demo.tokenizer)
    attnscope.save_weights(folder / "half.safetensors", [layer.bfloat16() for layer in layers], names)
    attnscope.save_weights(folder / "half.npz", [layer.bfloat16() for layer in layers], names)
    return folder


@pytest.mark.parametrize("name", ["bank.npz", "bank.safetensors"])
def test_a_file_gives_back_what_was_saved(saved, captured, layers, name):
    seen = attnscope.from_weights(saved / name, request=ALL)
    same(seen, captured, kv=name == "bank.npz")
    assert seen.prompt.tokens == captured.prompt.tokens
    assert seen.facts["model"]["name"] == f"weights not verified: {'mine' if name == 'bank.npz' else name}"
    halves = [attnscope.from_weights(saved / f"half.{suffix}") for suffix in ("npz", "safetensors")]
    assert [of.facts["dtype"] for of in halves] == ["bfloat16"] * 2
    with pytest.raises(UsageError, match="a file of weights has its own tokens; leave out tokens"):
        attnscope.from_weights(saved / name, ["a"])


def test_a_file_may_be_written_by_hand(captured, layers, tmp_path):
    np.savez(tmp_path / "hand.npz", weights=np.stack(layers), tokens=captured.prompt.tokens)
    same(attnscope.from_weights(tmp_path / "hand.npz", request=ALL), captured, kv=False)
    tensors = {f"layer.{index}": layer for index, layer in enumerate(layers)}
    text = np.frombuffer(json.dumps(captured.prompt.tokens).encode(), np.uint8)
    save_file({**tensors, "tokens_utf8": torch.from_numpy(text.copy())}, tmp_path / "hand.safetensors")
    same(attnscope.from_weights(tmp_path / "hand.safetensors", request=ALL), captured, kv=False)
    cross = {"cross.weights": np.stack([layer[:, :5] for layer in layers]), "query_tokens": captured.prompt.tokens[:5]}
    np.savez(tmp_path / "cross.npz", tokens=captured.prompt.tokens, **cross)
    assert attnscope.from_weights(tmp_path / "cross.npz").stack == "cross"


def npz(**arrays):
    """What writes an archive of arrays."""
    return lambda path: np.savez(path, **arrays)


def tensors(dtype=torch.float32, **said):
    """What writes a safetensors file of one layer."""
    return lambda path: save_file({"layer.0": torch.eye(3)[None].to(dtype)}, path, said or None)


def content(data):
    return lambda path: path.write_bytes(data)


def raw(path, *members, compressed=zipfile.ZIP_STORED):
    """An archive of members as they are."""
    with zipfile.ZipFile(path, "w", compressed) as archive:
        for name, data in members:
            archive.writestr(name, data)


def npy(shape, dtype="<f4", data=b""):
    """An array of numpy's format that declares a shape, whatever follows."""
    header = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape!r}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + data


def header(text):
    """An array of numpy's format with a header of any text."""
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


UTF8 = np.frombuffer(b'["a", "b", "c"]', np.uint8).copy()
SAID = {"tokens": '["a", "b", "c"]', "kv_heads": "1"}
ABC, LETTERS = np.array(list("abc")), '["a", "b", "c"]'
THREE = np.eye(3, dtype=np.float32)[None]
HOSTILE = {
    "empty.npz": (content(b""), "cannot be read as npz"),
    "text.npz": (content(b"PK\x03\x04 no archive"), "cannot be read as npz"),
    "cut.npz": (lambda path: cut(path), "cannot be read as npz"),
    "pickle.npz": (npz(weights=np.array([{}], object), tokens=ABC), "holds Python objects"),
    "whole.npz": (npz(weights=THREE[None].astype(int), tokens=ABC), "floating-point numbers, got i8"),
    "bare.npz": (npz(weights=THREE[None]), "has no tokens"),
    "tokens.npz": (npz(tokens=ABC), "has no weights"),
    "number.npz": (npz(weights=THREE[None], tokens=np.arange(3)), "expected tokens as strings, got i8"),
    "other.npz": (npz(model_state=THREE, tokens=ABC), "'model_state', which is none of weights"),
    "both.npz": (npz(**{"weights": THREE[None], "layer.0": THREE, "tokens": ABC}), "and `layer.0` too"),
    "axes.npz": (npz(weights=THREE[0], tokens=ABC), r"expected 4 axes .* got \(3, 3\)"),
    "shape.npz": (npz(weights=THREE[None], tokens=ABC[:2]), "expected 2 queries and 2 keys"),
    "name.npz": (npz(weights=THREE[None], tokens=ABC, model=np.array("m" * 2000)), "a string of at most 1000 letters"),
    "names.npz": (npz(weights=THREE[None], tokens=ABC, model=np.array(["m", "n"])), r"of at most .* got 'U \(2\)'"),
    "two.npz": (npz(weights=THREE[None], tokens=ABC, tokens_utf8=UTF8), "has tokens twice, in two forms"),
    "two.safetensors": (
        lambda path: save_file({"layer.0": torch.eye(3)[None], "tokens_utf8": torch.from_numpy(UTF8)}, path, SAID),
        "has tokens twice, in two forms",
    ),
    "heads.safetensors": (
        lambda path: save_file({"layer.0": torch.eye(3)[None], "kv_heads": torch.tensor(1)}, path, SAID),
        "has kv_heads twice, in two forms",
    ),
    "sink.npz": (npz(weights=THREE[None], tokens=ABC, sink_logits=np.array(2)), "sink_logits as 0 or 1, got '2'"),
    "flags.npz": (npz(weights=THREE[None], tokens=ABC, attention_mask=np.array([0, 2, 1])), "an array of 0 and 1"),
    "words.npz": (npz(weights=THREE[None], tokens=ABC, attention_mask=ABC), "got U"),
    "most.npz": (npz(weights=THREE[None], tokens=ABC, mask=np.zeros((99, 99), bool)), r"got b1 \(99, 99\)"),
    "few.npz": (npz(weights=THREE[None], tokens=ABC, attention_mask=np.ones(2)), r"shape \(3\), got \(2\)"),
    "kv.npz": (npz(weights=THREE[None], tokens=ABC, kv_heads=np.array(2)), "which 2 kv heads do not"),
    "utf8.npz": (npz(weights=THREE[None], tokens_utf8=np.frombuffer(b"{1", np.uint8)), "as a JSON list"),
    "deep.npz": (
        npz(weights=THREE[None], tokens_utf8=np.frombuffer(b"[" * 99_999, np.uint8)),
        "as a JSON list",
    ),
    "lies.npz": (
        lambda path: raw(path, ("weights.npy", npy((1, 9, 3, 3), data=bytes(36)))),
        "not as many bytes as",
    ),
    "bomb.npz": (
        lambda path: raw(path, ("weights.npy", npy((1, 1, 300, 300), data=bytes(360_000))), compressed=8),
        "has no tokens",
    ),
    "odd.npz": (lambda path: raw(path, ("b.txt", b"")), "'b.txt', expected arrays of numpy"),
    "many.npz": (
        lambda path: raw(path, *((f"layer.{at}.npy", b"") for at in range(5000))),
        "5000 arrays, expected at",
    ),
    "version.npz": (lambda path: raw(path, ("weights.npy", b"\x93NUMPY\x09\x00" + bytes(200))), "array of format"),
    "minus.npz": (lambda path: raw(path, ("weights.npy", header("-" * 8000 + "1"))), "a header that is none"),
    "open.npz": (lambda path: raw(path, ("weights.npy", header("(" * 8000))), "a header that is none"),
    "negative.npz": (lambda path: raw(path, ("weights.npy", npy((-1, -1, 3, 3), data=bytes(36)))), r"shape \(-1, -1"),
    "nothing.npz": (lambda path: raw(path, ("tokens.npy", npy((3_000_000,), "<U0"))), "3,000,000 tokens, expected"),
    "letter.npz": (lambda path: raw(path, ("tokens.npy", npy((1,), "<U1", b"\xff" * 4))), "cannot be read as npz"),
    "twice.npz": (npz(**{"layer.0": THREE, "decoder.layer.00": THREE, "tokens": ABC}), "twice, by two names"),
    "model.npz": (npz(weights=THREE[None], tokens=ABC, model_utf8=ABC), "'model_utf8', which is none"),
    "encrypted.npz": (lambda path: encrypted(path), "cannot be read as npz"),
    "empty.safetensors": (content(b""), "cannot be read as safetensors"),
    "long.safetensors": (content(b"\xff" * 64), "cannot be read as safetensors"),
    "bare.safetensors": (tensors(), "has no tokens"),
    "list.safetensors": (tensors(tokens='["a", 1, "c"]'), "as a JSON list of strings"),
    "whole.safetensors": (tensors(torch.int64, tokens=LETTERS), "floating-point numbers, got I64"),
    "eight.safetensors": (tensors(torch.float8_e4m3fn, tokens=LETTERS), "floating-point numbers, got F8_E4M3"),
    "x.npy": (lambda path: np.save(path, THREE), "expected weights in a file of .npz or .safetensors"),
    "pipe.npz": (lambda path: os.mkfifo(path), "not a regular file"),
    "folder.npz": (lambda path: path.mkdir(), "is a folder"),
    "missing.npz": (lambda path: None, "there is no file"),
}


def cut(path):
    """An archive without its end."""
    npz(weights=THREE[None], tokens=ABC)(path)
    path.write_bytes(path.read_bytes()[:-30])


def encrypted(path):
    """An archive whose member says that it is encrypted."""
    npz(weights=THREE[None], tokens=ABC)(path)
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_costs_one_line_and_runs_nothing(tmp_path, name, monkeypatch):
    make, words = HOSTILE[name]
    make(tmp_path / name)
    monkeypatch.setattr(pickle, "loads", None)
    monkeypatch.setattr(pickle, "load", None)
    with pytest.raises(InputError, match=words) as refused:
        attnscope.from_weights(tmp_path / name)
    assert "\n" not in refused.value.message


def test_what_a_file_unpacks_to_is_known_before_it_is(tmp_path, monkeypatch):
    path = tmp_path / "bomb.npz"
    raw(path, ("tokens.npy", npy((), data=bytes(10**7))), compressed=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 20_000
    monkeypatch.setattr(zipfile.ZipFile, "open", None)  # nothing is unpacked
    monkeypatch.setattr(files, "MOST_BYTES", 10**6)
    with pytest.raises(InputError, match=r"unpacks to 9\.5 MiB, expected at most 976.6 KiB"):
        read_tensors(path)
    monkeypatch.setattr(files, "MOST_BYTES", 10**9)
    monkeypatch.setattr("attnscope.utils.memory.free_memory", lambda device: 10**6)
    with pytest.raises(MemoryLimitError, match=r"this machine has 976\.6 KiB free"):
        read_tensors(path)


# The command line


def test_commands_read_a_file_as_they_read_a_text(saved, captured, tmp_path):
    file = ("--tensors", str(saved / "bank.npz"))
    done = call("relations", *file, "--out", str(tmp_path / "run"), "--format", "csv")
    assert done.code == 0, done.err
    assert "weights from bank.npz, not verified  mine  4 layers x 6 heads" in done.err
    assert "not measured: the weights are not verified" in done.err
    written = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert written["source"]["verified"] is False
    assert written["source"]["sha256"] == hashlib.sha256((saved / "bank.npz").read_bytes()).hexdigest()
    again = call("relations", str(tmp_path / "run"), "--format", "csv")
    assert (again.code, again.out) == (0, done.out), again.err
    for command in ("heads", "keys", "rollout", "text"):
        done = call(command, *file, "--top" if command != "text" else "--query", "3", "--format", "csv")
        assert (done.code, done.out.count(b"\n") > 3) == (0, True), done.err
    done = call("tokens", *file, "--query", "bank", "--format", "csv")
    assert (done.code, done.out.count(b" bank")) == (0, 3), done.err


@pytest.mark.e2e
def test_pages_and_pictures_are_drawn_of_a_file(saved, tmp_path):
    file = ("--tensors", str(saved / "bank.npz"))
    assert call("heatmap", *file, "--select", "1.4", "--out", str(tmp_path / "one.png")).code == 0
    assert call("view", *file, "--query", "last", "--key", "bank", "--out", str(tmp_path / "bank.html")).code == 0
    page = (tmp_path / "bank.html").read_text()
    assert "weights not verified: mine" in page
    assert f"--tensors {saved / 'bank.npz'}" in page
    assert "--model" not in page.partition('"copied"')[2][:2000]
    assert call("heads", *file, "--out", str(tmp_path / "run"), "--figures", "overview").code == 0
    for source in (("--from-tables",), ()):
        done = call("view", str(tmp_path / "run"), *source, "--out", str(tmp_path / "again.html"))
        assert (done.code, b"not verified" in (tmp_path / "again.html").read_bytes()) == (0, True), done.err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("heads", "--model", "demo2"), "--model needs a model"),
        (("heads", "--device", "cpu"), "--device needs a model"),
        (("heads", "--engine", "fused"), "--engine needs a model"),
        (("heads", "--set", "positions=600"), "--set positions=600 needs a model"),
        (("heads", "--generate", "3"), "--generate needs a model"),
        (("heads", "--verify"), "--verify needs a model"),
        (("heads", "--chat"), "--chat needs a model"),
        (("heads", "--weights", "value"), "norms of what keys write need the model"),
        (("heads", "--weights", "scores"), "logits before the softmax need the model"),
        (("heads", "--atlas", "."), "an atlas is of a model"),
        (("heads", "--select", "@induction"), "'@induction' names a role, and weights alone have no atlas"),
        (("heads", "--select", "9.1"), "'9.1' names layer 9, but this set of weights has layers 0 to 3"),
        (("heads", "--text", "the bank"), "--text and --tensors were both given"),
        (("keys", "the bank"), "TEXT and --tensors were both given"),
        (("view", "--out", "x.html", "--why", "1.4"), "leave out --why"),
        (("view", "--out", "x.html", "--compare-text", "a"), "leave out --compare-text"),
        (("view", "--out", "x.html", "--compare-model", "demo"), "leave out --compare-model"),
        (("tokens", "--model", "other"), "--model needs a model"),
    ],
)
def test_options_that_need_the_model_are_refused_by_name(saved, command, words):
    done = call(*command, "--tensors", str(saved / "half.npz"))
    assert (done.code, done.out) == (2, b"")
    assert words in done.err


def test_the_name_of_such_a_file_in_place_of_a_text_says_how_it_is_read(saved):
    file = str(saved / "bank.npz")
    done = call("heads", file)
    assert (done.code, done.err.endswith(f"read its layers with --tensors {file}\n")) == (2, True)


def test_a_run_of_weights_is_repeated_with_the_same_ones_or_not_at_all(saved, captured, layers, tmp_path):
    file = tmp_path / "bank.npz"
    file.write_bytes((saved / "bank.npz").read_bytes())
    run = tmp_path / "run"
    assert call("keys", "--tensors", str(file), "--out", str(run)).code == 0
    attnscope.save_weights(file, layers[:2], captured.prompt)
    done = call("keys", str(run))
    assert (done.code, "does not hold the tensors of the run" in done.err) == (2, True)
    attnscope.from_weights(layers, captured.prompt).export(tmp_path / "memory", figures=())
    done = call("keys", str(tmp_path / "memory"))
    assert (done.code, "was given tensors in memory; save them with" in done.err) == (2, True)
    file.write_bytes((saved / "bank.npz").read_bytes())
    done = call("keys", str(run), "--device", "cpu")
    assert (done.code, "--device needs a model" in done.err) == (2, True)
