"""q and k of a runtime: the tables and pictures of a pass, checked as data, marked as not verified."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers

import attnscope
from attnscope.api.captured import Capture
from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import wrap
from attnscope.observe.request import Request
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

    def hear(call: Any) -> None:
        calls.setdefault(call.stack, {})[call.layer] = call.spec

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
