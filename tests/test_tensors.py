"""q and k of a runtime: the tables and pictures of a pass, checked as data, marked as not verified."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

import attnscope
from attnscope.api.captured import Capture
from attnscope.errors import AttnscopeError, InputError, UsageError
from attnscope.hooks.engines import ENGINES
from attnscope.inputs.tensor_files import read_tensors
from attnscope.inputs.tensors import tensors_of
from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import wrap
from attnscope.observe.request import Request, View
from attnscope.observe.tensors import checked
from helpers.command_line import call
from helpers.families import tiny_config

TEXT = "the financial bank is located on river bank, the financial bank is"
LONG = f"{TEXT} {TEXT}"
ALL = Request(relations=True, top_k=None, maps="all", weights=True, rollout="tokens", per_token=True)
OF_TWO = Request(relations=True, top_k=None, maps="all", weights=True, query="0-3", key="first,bank")


def random(demo: LoadedModel, model_type: str, head: str = "CausalLM", **config: Any) -> LoadedModel:
    """A model of transformers, with parameters large enough for heads to differ."""
    made = tiny_config(model_type, vocab_size=2000, **config)
    model = getattr(transformers, f"AutoModelFor{head}").from_config(made, attn_implementation="eager")
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0, 0.3)
    return wrap(model.eval().requires_grad_(False), demo.tokenizer, f"tiny-{model_type}")


def specs(loaded: LoadedModel, ids: tuple[int, ...], **inputs: Any) -> dict[str, dict[int, Any]]:
    """What each layer of a model was called with, by stack."""
    calls: dict[str, dict[int, Any]] = {}
    body = getattr(loaded.model, "model", loaded.model) if not inputs else loaded.model

    def hear(heard: Any) -> None:
        calls.setdefault(heard.stack, {})[heard.layer] = heard.spec

    attnscope.listen(body, torch.tensor([ids]), hear, **inputs)
    return calls


def bare(seen: attnscope.Observation) -> Capture:
    return Capture.made_of(seen.named(None))


def same(seen: attnscope.Observation, expected: attnscope.Observation) -> None:
    """Every table, map and number of two observations, to 1e-6 of what rounding changes."""
    assert list(seen.stacks) == list(expected.stacks)
    for stack, of in expected.stacks.items():
        own = seen.of(stack)
        assert dict(own.visible) == dict(of.visible)
        assert dict(own.support) == dict(of.support)
        assert dict(own.kv_of) == dict(of.kv_of)
        np.testing.assert_allclose(own.received, of.received, atol=1e-6)
        for key in of.weights:
            torch.testing.assert_close(own.weights[key], of.weights[key], atol=1e-6, rtol=0)
            if of.maps:
                np.testing.assert_allclose(own.maps.values[key], of.maps.values[key], atol=1e-6)
    for table, other in zip(tables(seen), tables(expected), strict=True):
        if {"query", "head"} <= {*table.column_names}:  # equal weights have no order
            table, other = by_place(table), by_place(other)
        assert table.schema.equals(other.schema)
        for name in table.column_names:
            mine, theirs = table.column(name).to_pylist(), other.column(name).to_pylist()
            if str(table.column(name).type) in ("float", "double"):
                np.testing.assert_allclose(np.array(mine, float), np.array(theirs, float), atol=2e-6, err_msg=name)
            else:
                assert mine == theirs, name


def by_place(table: Any) -> Any:
    """The rows of a table of relations by layer, head, query and key."""
    columns = [table.column(name).to_pylist() for name in ("stack", "layer", "head", "query", "key")]
    return table.take(sorted(range(len(table)), key=lambda row: tuple(column[row] for column in columns)))


def tables(seen: attnscope.Observation) -> list[Any]:
    every = [seen.table(), seen.relations(), seen.key_table()]
    every += [seen.token_table()] if seen.per_token else []
    return every + ([seen.rollout_table()] if seen.rollout else [])


FAMILIES = {
    "grouped kv heads": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "a window": ("mistral", {"sliding_window": 8, "num_hidden_layers": 2}),
    "a soft-cap and windows": ("gemma2", {"sliding_window": 8}),
    "sinks": ("gpt_oss", {"num_hidden_layers": 2, "sliding_window": 8}),
    "a latent cache": ("deepseek_v3", {}),
    "learned positions": ("gpt2", {}),
    "both ways": ("bert", {"is_decoder": False}),
    "chunks": ("llama4_text", {"attention_chunk_size": 8}),
    "sinks of the output": ("granite_swa", {}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_dump_of_a_family_gives_the_tables_and_pictures_of_its_pass(demo, tmp_path, name):
    model_type, config = FAMILIES[name]
    loaded = random(demo, model_type, "MaskedLM" if model_type == "bert" else "CausalLM", **config)
    expected = bare(attnscope.capture(loaded, LONG, request=ALL, engine="eager"))
    [calls] = specs(loaded, expected.prompt.ids).values()
    suffix = "npz" if name == "chunks" else "safetensors"
    path = attnscope.save_tensors(tmp_path / f"calls.{suffix}", calls, expected.prompt, model="mine")
    seen = attnscope.from_tensors(path, request=ALL)
    same(seen, expected)
    assert not seen.failures


@pytest.mark.parametrize("engine", ENGINES)
def test_what_any_engine_is_called_with_is_one_dump(demo, engine):
    if engine == "triton":
        pytest.skip("it needs a GPU")
    seen = bare(attnscope.capture(demo, TEXT, request=ALL, engine=engine))
    calls: dict[int, Any] = {}
    ids = torch.tensor([seen.prompt.ids])
    attnscope.listen(
        demo.model.model, ids, lambda heard: calls.setdefault(heard.layer, heard.spec), engine=ENGINES[engine]
    )
    same(attnscope.from_tensors(calls, seen.prompt, request=ALL), seen)


@pytest.mark.parametrize("model_type", ["bart", pytest.param("t5", marks=pytest.mark.families)])
def test_an_encoder_decoder_has_its_three_stacks_and_biases(demo, tmp_path, model_type):
    loaded = random(demo, model_type, "Seq2SeqLM")
    expected = bare(attnscope.capture(loaded, TEXT, target="Mary saw John", request=OF_TWO, engine="eager"))
    target = torch.tensor([expected.queries.ids])
    calls = specs(loaded, expected.prompt.ids, decoder_input_ids=target)
    assert all((spec.bias is not None) == (model_type == "t5") for of in calls.values() for spec in of.values())
    axes = {"query_tokens": expected.queries}
    path = attnscope.save_tensors(tmp_path / "calls.safetensors", calls, expected.prompt, **axes)
    same(attnscope.from_tensors(path, request=OF_TWO), expected)
    alone = attnscope.from_tensors(calls["cross"], expected.prompt, **axes, request=OF_TWO)
    same(alone, bare(expected.of("cross")))


# The last tokens' queries alone


@pytest.fixture(scope="module")
def windowed(demo):
    """A model with windows in every other layer, and what its layers were called with."""
    loaded = random(demo, "gemma2", sliding_window=8)
    ids = attnscope.capture(loaded, LONG, request=Request(metrics=())).prompt.ids
    [calls] = specs(loaded, ids).values()
    return loaded, calls


def step(spec: Any, count: int, cached: int | None) -> dict[str, Any]:
    """What a runtime has of the last tokens: their q, and of the keys those that its cache holds."""
    tokens = spec.k_BGKD.shape[2]
    parts = {"q": spec.q_BHQD[:, :, -count:], "scale": spec.scale, "softcap": spec.softcap}
    kept = slice(None) if cached is None else slice(tokens - cached, None)
    parts |= {"k": spec.k_BGKD[:, :, kept], "v": spec.v_BGKV[:, :, kept], "window": cached}
    return parts | ({} if cached is None else {"key_positions": torch.arange(tokens)[kept]})


@pytest.mark.parametrize(("count", "cached"), [(1, 8), (6, 13)])
def test_a_step_of_decoding_gives_the_rows_of_a_whole_pass(windowed, tmp_path, count, cached):
    """A sliding cache holds the keys of the window of each query, and no others."""
    loaded, calls = windowed
    whole = attnscope.capture(loaded, LONG, request=Request(metrics=())).prompt
    layers = {index: step(spec, count, None if index % 2 else cached) for index, spec in calls.items()}
    layers = {index: {**layer, "window": None if index % 2 else 8} for index, layer in layers.items()}
    asked = Request(relations=True, top_k=None, maps="all", weights=True, per_token=True)
    places = {"query_positions": range(len(whole) - count, len(whole))}
    path = attnscope.save_tensors(tmp_path / "step.safetensors", layers, whole, **places)
    seen = attnscope.from_tensors(path, request=asked)
    rows = f"{len(whole) - count}-{len(whole) - 1}"
    expected = bare(
        attnscope.capture(
            loaded, LONG, request=Request(**{**vars(asked), "query": rows, "weights": False}), engine="eager"
        )
    )
    for table, other in zip(tables(seen), tables(expected), strict=True):
        if {"query", "head"} <= {*table.column_names}:
            table, other = by_place(table), by_place(other)
        for name in table.column_names:
            mine, theirs = table.column(name).to_pylist(), other.column(name).to_pylist()
            if str(table.column(name).type) in ("float", "double"):
                np.testing.assert_allclose(np.array(mine, float), np.array(theirs, float), 1e-6, 2e-6, err_msg=name)
            else:
                assert mine == theirs, name
    for key, values in expected.maps.values.items():
        np.testing.assert_allclose(seen.maps.values[key], values, atol=1e-6)
        assert not seen.weights[key][:, :-count].any()


def test_what_needs_every_query_is_refused_of_the_last_ones(windowed, tmp_path):
    _, calls = windowed
    names = [f"t{place}" for place in range(calls[1].k_BGKD.shape[2])]
    places = {"query_positions": [len(names) - 1]}
    path = attnscope.save_tensors(tmp_path / "step.npz", {1: step(calls[1], 1, None)}, names, **places)
    for asked in (Request(rollout="tokens"), Request(operands=True)):
        with pytest.raises(UsageError, match="needs the query of every token, and these are of the last 1"):
            attnscope.from_tensors(path, request=asked)
    done = call("view", "--tensors", str(path), "--out", str(tmp_path / "page.html"))
    assert (done.code, "a page needs the query of every token" in done.err) == (2, True)
    done = call("heads", "--tensors", str(path), "--query", "first")
    assert (done.code, "names tokens that are keys and have no queries" in done.err) == (4, True)
    # Finished rows of the last tokens are read as well.
    weights = attnscope.from_tensors(path, request=Request(weights=True)).weights[1][:, -1:]
    rows = attnscope.from_weights({1: weights}, names, request=Request(relations=True, top_k=None), **places)
    expected = attnscope.from_tensors(path, request=Request(relations=True, top_k=None))
    assert rows.relations()["weight"].to_pylist() == pytest.approx(expected.relations()["weight"].to_pylist())
    assert rows.visible == expected.visible


# By hand


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_loops(layer: dict[str, Any], sees: Any) -> np.ndarray:
    """The weights of a layer in Python; sees(head, query, key): whether one does."""
    heads, queries, _ = layer["q"].shape
    groups, keys = layer["k"].shape[:2]
    weights = np.zeros((heads, queries, keys))
    for head, query in np.ndindex(heads, queries):
        logits = {}
        for key in range(keys):
            if sees(head, query, key):
                q, k = layer["q"][head, query], layer["k"][head // (heads // groups), key]
                logit = layer["scale"] * float(q @ k)
                logit = layer["softcap"] * np.tanh(logit / layer["softcap"]) if "softcap" in layer else logit
                logit += float(layer["bias"][head, query, key]) if "bias" in layer else 0.0
                logit += float(layer["mask"][head, query, key]) if "mask" in layer else 0.0
                logits[key] = np.exp(logit)
        total = sum(logits.values()) + (float(np.exp(layer["sinks"][head])) if "sinks" in layer else 0)
        for key, number in logits.items():
            weights[head, query, key] = number / total
    return weights


QK = {"q": numbers(4, 6, 3), "k": numbers(2, 6, 3, seed=1), "scale": 0.7}
NEXT = torch.full((6, 6), -torch.inf).triu(2)  # each sees the key after its own too
BY_HAND = {
    "causal": (QK, lambda head, query, key: key <= query, "full"),
    "a window": ({**QK, "window": 3}, lambda head, query, key: 0 <= query - key < 3, "window 3"),
    "chunks": ({**QK, "chunk": 2}, lambda head, query, key: key <= query and key // 2 == query // 2, "chunk 2"),
    "both ways": ({**QK, "causal": 0}, lambda head, query, key: True, "full"),
    "sinks, soft-cap and bias": (
        {**QK, "sinks": numbers(4), "softcap": 2.0, "bias": numbers(4, 6, 6, seed=3)},
        lambda head, query, key: key <= query,
        "full",
    ),
    "a boolean mask": (
        {**QK, "mask": NEXT.isneginf().logical_not()},
        lambda head, query, key: key <= query + 1,
        "both ways, 1 after",
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_weights_are_those_of_a_plain_loop(name):
    layer, sees, words = BY_HAND[name]
    seen = attnscope.from_tensors([layer], list("abcdef"), request=Request(weights=True, relations=True, top_k=None))
    plain = {part: value for part, value in layer.items() if part != "mask"}
    np.testing.assert_allclose(seen.weights[0], by_loops(plain, sees), atol=1e-6)
    assert dict(seen.visible) == {next(iter(seen.kv_of)): words}
    assert seen.kv_of[next(iter(seen.kv_of))] == (4, 2)
    wrong = by_loops({**plain, "k": plain["k"].flip(0)}, sees)  # kv heads in another order
    assert np.abs(seen.weights[0].numpy() - wrong).max() > 0.01


def test_layers_with_one_rule_share_their_mask():
    """What is made of a mask is then made once, however it was said."""
    as_mask = {**QK, "mask": torch.ones(6, 6).tril().triu(-2).bool()}
    given = tensors_of([{**QK, "window": 3}, as_mask, QK, {**QK, "window": 3}], list("abcdef"))
    masks = [layer.mask for layer in checked(given).layers.values()]
    assert [mask.words for mask in masks] == ["causal, window 3"] * 2 + ["causal", "causal, window 3"]
    assert masks[0].visible is masks[1].visible is masks[3].visible is not masks[2].visible


def test_a_mask_of_each_head_may_add_to_the_logits():
    mask = torch.stack([NEXT + 0.3, NEXT.mT, NEXT, NEXT - torch.arange(6)])
    layer = {**QK, "mask": mask}
    seen = attnscope.from_tensors([layer], list("abcdef"), request=Request(weights=True))
    expected = by_loops(layer, lambda head, query, key: mask[head, query, key] > -torch.inf)
    np.testing.assert_allclose(seen.weights[0], expected, atol=1e-6)
    assert "mask as given" in " ".join(seen.unmeasured)


def test_logits_and_norms_of_values_need_q_k_and_v():
    layer = {**QK, "v": numbers(2, 6, 5, seed=4)}
    asked = {"relations": True, "top_k": None}
    scores = attnscope.from_tensors([layer], list("abcdef"), request=Request(view=View(weights="scores"), **asked))
    norms = attnscope.from_tensors([layer], list("abcdef"), request=Request(view=View(weights="value"), **asked))
    weights = by_loops(QK, lambda head, query, key: key <= query)
    for row in scores.relations().to_pylist():
        q, k = QK["q"][row["head"], row["query"]], QK["k"][row["head"] // 2, row["key"]]
        assert row["score"] == pytest.approx(0.7 * float(q @ k), abs=1e-5)
    for row in norms.relations().to_pylist():
        size = float(layer["v"][row["head"] // 2, row["key"]].norm())
        assert row["norm"] == pytest.approx(weights[row["head"], row["query"], row["key"]] * size, abs=1e-5)
    assert "norms are those of v, before the output projection" in norms.unmeasured
    for view, words in (
        ("value", "norms of what keys write need v, and layer 0 has none"),
        ("logit", "need the model"),
    ):
        with pytest.raises(UsageError, match=words):
            attnscope.from_tensors([QK], list("abcdef"), request=Request(view=View(weights=view), relations=True))


def test_the_output_of_a_runtime_is_compared_with_p_v(tmp_path):
    v = numbers(2, 6, 5, seed=4)
    weights = torch.tensor(by_loops(QK, lambda head, query, key: 0 <= query - key < 3))
    layer = {**QK, "v": v, "output": weights @ v.repeat_interleave(2, 0), "window": 3}
    right = attnscope.from_tensors([layer], list("abcdef"))
    assert right.report.calls[0].value_error < 1e-6
    assert not right.failures
    path = attnscope.save_tensors(tmp_path / "off.safetensors", [{**layer, "window": 4}], list("abcdef"))
    done = call("heads", "--tensors", str(path))
    assert done.code == 1
    assert "check failed: layer 0: P V differs from the layer's own output by" in done.err


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_read_as_it_is(tmp_path, dtype):
    layer = {name: value.to(dtype) if name != "scale" else value for name, value in QK.items()}
    for suffix in ("safetensors", "npz"):
        path = attnscope.save_tensors(tmp_path / f"half.{suffix}", [layer], list("abcdef"))
        seen = attnscope.from_tensors(path, request=Request(weights=True))
        rounded = {**layer, "q": layer["q"].double(), "k": layer["k"].double()}
        expected = by_loops(rounded, lambda head, query, key: key <= query)
        np.testing.assert_allclose(seen.weights[0], expected, atol=2e-6)
        narrow = dtype == torch.bfloat16 and suffix == "npz"
        assert seen.facts["dtype"] == ("float32" if narrow else str(dtype).removeprefix("torch."))


# Files


LETTERS = {"tokens": '["a", "b", "c"]'}
ONE = {"layer.0.q": numbers(2, 3, 4), "layer.0.k": numbers(1, 3, 4)}


def file_of(path: Any, arrays: dict[str, torch.Tensor | None] | None = None, **said: str) -> Any:
    """A safetensors file of one layer over three tokens, with other arrays and texts of its metadata."""
    tensors = {name: value for name, value in {**ONE, **(arrays or {})}.items() if value is not None}
    metadata = LETTERS | {"layer.0.scale": "0.5"} | {name.replace("__", "."): text for name, text in said.items()}
    save_file(tensors, path, {name: text for name, text in metadata.items() if text})
    return path


def test_what_all_layers_share_is_said_once_and_a_layer_says_its_own(tmp_path):
    more = {name.replace("0", "1"): value.clone() for name, value in ONE.items()}
    path = file_of(tmp_path / "a.safetensors", more, scale="0.5", window="2", layer__1__window="1", layer__0__scale="")
    given = read_tensors(path)
    layers = given.stacks["decoder"]
    assert [(layer.scale, layer.window) for layer in layers.values()] == [(0.5, 2), (0.5, 1)]
    path = file_of(tmp_path / "b.safetensors", {"layer.0.mask": torch.ones(3, 3).tril().bool()}, window="2")
    assert read_tensors(path).stacks["decoder"][0].window is None
    path = file_of(tmp_path / "c.safetensors", {"mask": torch.ones(3, 3, dtype=torch.bool)})
    assert attnscope.from_tensors(path).stack == "encoder"


def test_padding_is_left_out_where_a_file_says_which_it_is(tmp_path):
    whole = attnscope.from_tensors(
        [{**ONE_LAYER}], list("abc"), attention_mask=[0, 1, 1], request=Request(weights=True)
    )
    expected = attnscope.from_tensors([cut(ONE_LAYER, 1)], ["b", "c"], request=Request(weights=True))
    torch.testing.assert_close(whole.weights[0], expected.weights[0])
    assert whole.facts["notes"] == ["1 tokens of padding at the ends of the text were left out"]
    with pytest.raises(InputError, match="tokens of padding receive weight"):
        attnscope.from_tensors([{**ONE_LAYER, "mask": np.tri(3, dtype=bool)}], list("abc"), attention_mask=[0, 1, 1])


ONE_LAYER = {"q": ONE["layer.0.q"], "k": ONE["layer.0.k"], "scale": 0.5}


def cut(layer: dict[str, Any], start: int) -> dict[str, Any]:
    return {name: value[:, start:] if name != "scale" else value for name, value in layer.items()}


HIDES_1 = torch.tensor([[1, 0, 0], [0, 0, 0], [1, 1, 1]]).bool()
MALFORMED = {
    "keys": ({"layer.0.k": numbers(1, 2, 4)}, {}, r"expected k \(kv heads, keys, .*\) as \(1, 3, 4\), got \(1, 2, 4\)"),
    "width": ({"layer.0.k": numbers(1, 3, 5)}, {}, r"expected k .* as \(1, 3, 4\), got \(1, 3, 5\)"),
    "queries": ({"layer.0.q": numbers(2, 1, 4)}, {}, r"expected q .* as \(2, 3, 4\), got \(2, 1, 4\); give query_pos"),
    "axes": ({"layer.0.q": numbers(3, 4)}, {}, r"expected q of 3 axes \(heads, queries, .*, got \(3, 4\)"),
    "two texts": ({"layer.0.q": numbers(2, 2, 3, 4)}, {}, "expected q of 3 axes"),
    "kv heads": ({"layer.0.k": numbers(2, 3, 4), "layer.0.q": numbers(3, 3, 4)}, {}, "3 heads, which 2 kv heads do"),
    "no heads": ({"layer.0.q": numbers(0, 3, 4)}, {}, "q is empty"),
    "values": ({"layer.0.v": numbers(1, 2, 4)}, {}, r"expected v .* as \(1, 3, 4\)"),
    "output": (
        {"layer.0.v": numbers(1, 3, 5), "layer.0.output": numbers(2, 3, 4)},
        {},
        r"expected output .*\(2, 3, 5\)",
    ),
    "NaN": ({"layer.0.q": numbers(2, 3, 4) * torch.nan}, {}, "L0: q has NaN or infinite numbers in head 0"),
    "infinite": ({"layer.0.k": numbers(1, 3, 4) * torch.inf}, {}, "L0: k has NaN or infinite numbers"),
    "too large": ({"layer.0.q": numbers(2, 3, 4) * 1e30, "layer.0.k": numbers(1, 3, 4) * 1e30}, {}, "beyond float32"),
    "of float64": ({"layer.0.q": numbers(2, 3, 4) * 1e60}, {}, "L0: q has NaN or infinite numbers"),
    "sinks": ({"layer.0.sinks": torch.tensor([1.0, torch.nan])}, {}, "L0: sinks has NaN"),
    "no k": ({"layer.0.k": None}, {}, "layer 0 has no k; a layer is its weights, or q, k and scale"),
    "no scale": ({}, {"layer__0__scale": ""}, "layer 0 has no scale"),
    "a missing layer": ({"layer.2.v": numbers(1, 3, 4)}, {}, "layer 2 has no q"),
    "weights too": ({"layer.0": torch.eye(3)[None]}, {}, "layer 0 has weights and [qk] too; keep one form"),
    "all of a stack too": ({"weights": torch.eye(3)[None, None]}, {}, "it has `weights` and `layer.0` too"),
    "many layers": ({f"layer.{10**9}.q": numbers(2, 3, 4)}, {}, "an array 'layer.1000000000.q', which is none"),
    "misspelt": ({}, {"layer__0__windw": "3"}, "'layer.0.windw', which is none of"),
    "tokens": ({}, {"tokens": '["a", "b"]'}, r"expected q .* as \(2, 2, 4\), got \(2, 3, 4\)"),
    "whole numbers": (
        {"layer.0.q": numbers(2, 3, 4).long()},
        {},
        "layer 0: q: expected floating-point numbers, got I64",
    ),
    "negative window": ({}, {"layer__0__window": "-1"}, "expected layer.0.window as a whole number from 1, got '-1'"),
    "half a window": ({"layer.0.window": torch.tensor(1.5)}, {}, "layer.0.window as a whole number from 1, got '1.5'"),
    "no chunk": ({}, {"chunk": "0"}, "expected chunk as a whole number from 1, got '0'"),
    "scale of 0": ({}, {"layer__0__scale": "0.0"}, "expected layer.0.scale as a number above 0, got '0.0'"),
    "scale of nan": ({}, {"layer__0__scale": "nan"}, "a number above 0, got 'nan'"),
    "scale of many": ({"layer.0.scale": numbers(3)}, {"layer__0__scale": ""}, r"a number above 0, got 'F64 \(3\)'"),
    "causal or so": ({}, {"causal": "perhaps"}, "expected causal as 0 or 1, got 'perhaps'"),
    "scale twice": ({"layer.0.scale": torch.tensor(1.0)}, {}, "it has layer.0.scale twice, in two forms"),
    "by two names": ({"decoder.layer.0.q": numbers(2, 3, 4)}, {}, "twice, by two names"),
    "window and chunk": ({}, {"layer__0__window": "2", "layer__0__chunk": "2"}, "layer 0 has window and chunk too"),
    "mask and window": (
        {"layer.0.mask": torch.ones(3, 3)},
        {"layer__0__window": "2"},
        "layer 0 has mask and window too",
    ),
    "window both ways": ({}, {"causal": "0", "window": "2"}, "layer 0: a window is of a causal layer"),
    "mask of none": ({"layer.0.mask": torch.zeros(3, 3).bool()}, {}, "layer 0: the mask hides every key from query 0"),
    "a hidden row": ({"layer.0.mask": HIDES_1}, {}, "hides every key from query 1"),
    "mask of NaN": ({"layer.0.mask": torch.full((3, 3), torch.nan)}, {}, "layer 0: mask has NaN"),
    "mask of 2": ({"layer.0.mask": torch.full((3, 3), 2)}, {}, "layer 0: expected mask of 0 and 1, or of floats"),
    "mask of 4": ({"layer.0.mask": torch.ones(4, 4).bool()}, {}, r"expected mask \(queries, keys\) as \(3, 3\), got"),
    "places": (
        {"layer.0.key_positions": torch.tensor([0, 2, 1])},
        {},
        "key_positions from 0 to 2, each once, in order",
    ),
    "places beyond": ({"layer.0.key_positions": torch.tensor([0, 1, 3])}, {}, "key_positions from 0 to 2"),
    "many places": ({"layer.0.key_positions": torch.arange(9)}, {}, "key_positions of 1 to 3 tokens, got 9"),
    "places in floats": ({"layer.0.key_positions": torch.arange(3.0)}, {}, "key_positions as numbers of tokens"),
    "first queries": (
        {"query_positions": torch.tensor([0])},
        {},
        "expected query_positions of the last tokens, 2 to 2",
    ),
    "many queries": ({"query_positions": torch.arange(9)}, {}, r"expected query_positions as .*, got I64 \(9\)"),
    "numbers of no layer": (
        {"cross.scale": torch.tensor(1.0)},
        {},
        "it has cross.scale, and no layer of q and k that it is of",
    ),
    "a later form": (
        {},
        {"schema": "tensors/2"},
        "expected schema as tensors/1, the form that this attnscope reads, got",
    ),
    "causal cross": (
        {"layer.0.q": numbers(2, 4, 4)},
        {"query_tokens": '["a", "b", "c", "d"]', "causal": "1"},
        "layer 0: the mask hides every key from query 0",
    ),
    "cross": (
        {"cross.layer.0.q": numbers(2, 3, 4), "cross.layer.0.k": numbers(2, 3, 4)},
        {"scale": "1"},
        "the queries",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_costs_one_line(tmp_path, name):
    arrays, said, words = MALFORMED[name]
    path = file_of(tmp_path / "calls.safetensors", arrays, **said)
    with pytest.raises(AttnscopeError, match=words) as refused:
        attnscope.from_tensors(path)
    assert "\n" not in str(refused.value)


def test_a_layer_that_takes_hours_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr("attnscope.inputs.tensors.MOST_WEIGHTS", 17)
    with pytest.raises(InputError, match="q and k make 18 weights, expected at most 17"):
        read_tensors(file_of(tmp_path / "calls.safetensors"))


@pytest.mark.parametrize("name", ["window", "scale", "causal"])
def test_weights_alone_take_no_number_of_layers(tmp_path, name):
    arrays = {"layer.0": np.eye(3, dtype="f4")[None], "tokens": np.array(list("abc"))}
    np.savez(tmp_path / "w.npz", **arrays, **{name: np.array(1)})
    with pytest.raises(InputError, match=f"it has {name}, and no layer of q and k"):
        attnscope.from_tensors(tmp_path / "w.npz")


def test_tokens_that_are_none_are_refused():
    with pytest.raises(UsageError, match="tokens: expected strings or ids, got None"):
        attnscope.from_tensors([ONE_LAYER], [None, "b", "c"])


@pytest.mark.parametrize(
    ("layer", "error", "words"),
    [
        ({"q": ONE["layer.0.q"]}, InputError, "layer 0 has no k"),
        ({**ONE_LAYER, "sclae": 1.0}, UsageError, "layer 0 has no 'sclae'; it may have q, k, v, output, mask"),
        ({**ONE_LAYER, "window": 0}, InputError, "expected layer 0: window as a whole number from 1, got '0'"),
        ({**ONE_LAYER, "scale": "much"}, InputError, "expected layer 0: scale as a number above 0, got 'much'"),
        ({**ONE_LAYER, "q": "abc"}, UsageError, "layer 0: q: expected an array, got str"),
        (
            {**ONE_LAYER, "q": numbers(2, 3, 4).to_sparse()},
            UsageError,
            "layer 0: q: expected a dense tensor, got one as",
        ),
        ({**ONE_LAYER, "q": numbers(2, 3, 4).to("meta")}, UsageError, "expected a dense tensor, got one without data"),
    ],
)
def test_a_layer_from_python_that_is_none_is_refused(layer, error, words):
    with pytest.raises(error, match=words):
        attnscope.from_tensors([layer], list("abc"))
    with pytest.raises(error, match=words):
        attnscope.save_tensors("never.safetensors", [layer], list("abc"))


# The recipes of docs/tensors.md, which no runtime runs here: their hooks on modules as the runtimes have them

PAGE = (Path(__file__).parents[1] / "docs" / "tensors.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
RECIPES = dict(zip(("steps", "listen", "vllm", "sglang", "llama.cpp"), BLOCKS, strict=True))
NAMES = ["the", "Ġbank", "Ġof"]


@pytest.fixture(scope="module")
def called():
    """q, k and v of three tokens as runtimes have them, token by token, the output of a window of two, its weights."""
    q, k, v = numbers(3, 16).float(), numbers(3, 8, seed=1).float(), numbers(3, 8, seed=2).float()
    by_head = {"q": q.view(3, 4, 4).transpose(0, 1), "k": k.view(3, 2, 4).transpose(0, 1), "scale": 0.5}
    weights = torch.tensor(by_loops(by_head, lambda head, query, key: 0 <= query - key < 2), dtype=torch.float32)
    output = weights @ v.view(3, 2, 4).transpose(0, 1).repeat_interleave(2, 0)
    return q, k, v, output.transpose(0, 1).reshape(3, 16), weights


def judged(seen: Any, weights: torch.Tensor) -> None:
    torch.testing.assert_close(seen.weights[7], weights)
    assert list(seen.visible.values()) == ["window 2"]


def test_the_hook_for_vllm_keeps_a_call(called, monkeypatch):
    q, k, v, output, weights = called
    hook = RECIPES["vllm"].partition("def by_head")[2].partition("def listen")[0]
    names: dict[str, Any] = {"ids": [1, 2, 3], "layers": {}, "re": re}
    exec("def by_head" + hook, names)
    impl = SimpleNamespace(scale=0.5, logits_soft_cap=0, sinks=None)
    parts = {"num_heads": 4, "num_kv_heads": 2, "sliding_window": 2, "layer_name": "model.layers.7.self_attn.attn"}
    names["keep"](SimpleNamespace(impl=impl, **parts), (q, k, v), output)
    seen = attnscope.from_tensors(names["layers"], NAMES)
    judged(seen, weights)
    assert seen.report.calls[0].value_error < 1e-6


def test_the_hook_for_sglang_writes_the_file(called, tmp_path):
    q, k, v, output, weights = called
    names: dict[str, Any] = {}
    exec(RECIPES["sglang"], names)
    hook = names["keep"]({"tokens": NAMES, "layers": 1, "file": str(tmp_path / "calls.safetensors")})
    parts = {"tp_q_head_num": 4, "tp_k_head_num": 2, "sliding_window_size": 1, "scaling": 0.5, "logit_cap": 0.0}
    for extends in (False, True):  # a step of decoding is not kept
        batch = SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda extends=extends: extends))
        hook(SimpleNamespace(layer_id=7, **parts), (q, k, v.view(3, 2, 4), batch), output)
        assert (tmp_path / "calls.safetensors").exists() == extends
    seen = attnscope.from_tensors(tmp_path / "calls.safetensors")
    judged(seen, weights)
    assert seen.report.calls[0].value_error < 1e-6


def test_what_the_callback_of_llama_cpp_writes_is_read(called, tmp_path, monkeypatch):
    *_, weights = called
    monkeypatch.chdir(tmp_path)
    cells = torch.nn.functional.pad(weights, (0, 5))
    cells.numpy().tofile("kq_soft_max-7.4x3x8.f32")
    Path("tokens.json").write_text(json.dumps(NAMES), "utf-8")
    exec(RECIPES["llama.cpp"], {})
    judged(attnscope.from_tensors("calls.safetensors"), weights)


@pytest.mark.parametrize("name", ["steps", "listen"])
def test_a_block_of_the_page_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(RECIPES[name], {})
    assert (name == "steps") == bool(capsys.readouterr().out)


# The command line


def test_commands_read_a_file_by_either_name_of_the_option(demo, tmp_path):
    seen = attnscope.capture(demo, TEXT)
    [calls] = specs(demo, seen.prompt.ids).values()
    names = demo.tokenizer.convert_ids_to_tokens(list(seen.prompt.ids))
    path = str(attnscope.save_tensors(tmp_path / "bank.safetensors", calls, names, model="mine"))
    done = call("keys", "--tensors", path, "--out", str(tmp_path / "run"), "--format", "csv")
    assert done.code == 0, done.err
    assert (
        "tensors from bank.safetensors, not verified  mine  4 layers x 6 heads  14 tokens  float32  causal" in done.err
    )
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["source"] == {
        "tensors": "bank.safetensors",
        "sha256": manifest["source"]["sha256"],
        "verified": False,
    }
    assert (manifest["engine"], manifest["options"]["tensors"]) == ("fused", path)
    for again in (("--weights-file", path), (str(tmp_path / "run"),)):
        assert call("keys", *again, "--format", "csv").out == done.out
    for command in ("heads", "text"):
        done = call(command, "--tensors", path, "--query", "last", "--format", "csv")
        assert (done.code, done.out.count(b"\n") > 1) == (0, True), done.err
    both = call("heads", "--tensors", path, "--weights-file", path)
    assert (both.code, "--tensors and --weights-file were both given" in both.err) == (2, True)
    for command in ("knockout", "ablate", "explain"):
        done = call(command, "--tensors", path)
        assert (done.code, "No such option: --tensors" in done.err) == (2, True)


@pytest.mark.e2e
def test_other_commands_and_a_page_with_the_arithmetic_of_q_k_and_v(demo, tmp_path):
    seen = attnscope.capture(demo, TEXT)
    [calls] = specs(demo, seen.prompt.ids).values()
    path = str(attnscope.save_tensors(tmp_path / "bank.safetensors", calls, seen.prompt))
    done = call("view", "--tensors", path, "--out", str(tmp_path / "bank.html"))
    assert (done.code, "steps 0." in done.err) == (0, True), done.err
    assert "attnscope.from_tensors" in (tmp_path / "bank.html").read_text()
    for command in ("relations", "rollout", "tokens"):
        done = call(command, "--tensors", path, "--query", "last", "--format", "csv")
        assert (done.code, done.out.count(b"\n") > 1) == (0, True), done.err
    assert call("heatmap", "--tensors", path, "--select", "1.4", "--out", str(tmp_path / "one.png")).code == 0
