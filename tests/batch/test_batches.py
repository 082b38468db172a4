"""Batches and shards: every text once, no batch over its budget, and one length where padding is not exact."""

import random
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import attnscope.observe
from attnscope.corpus.folder import shards
from attnscope.corpus.item_requests import batches
from attnscope.corpus.items import Item
from attnscope.hooks.listen import listen
from attnscope.inputs.prompt import Prompt
from attnscope.model.families import FAMILIES, Family
from attnscope.model.loaded import pads, pads_exactly, settle_rotary
from attnscope.observe.collect import observe
from attnscope.observe.request import Request
from helpers.families import tiny_model
from helpers.parity_models import as_loaded

ROTARY = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 8,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
    },
}


def test_every_text_is_in_one_batch_and_none_is_over_budget() -> None:
    pick = random.Random(0)
    for _ in range(200):
        lengths = [pick.randint(1, 50) for _ in range(pick.randint(0, 40))]
        budget = pick.randint(1, 200)
        found = batches(lengths, budget)
        assert sorted(place for batch in found for place in batch) == list(range(len(lengths)))
        for batch in found:
            assert len(batch) == 1 or len(batch) * max(lengths[place] for place in batch) <= budget
        for batch in batches(lengths, budget, lengths):
            assert len({lengths[place] for place in batch}) == 1
        assert all(len(batch) == 1 for batch in batches(lengths, budget, most=1))


def test_shards_are_cut_by_the_items_alone_and_as_they_were_before() -> None:
    items = [Item(number, "f", number, str(number), "x" * (number % 5)) for number in range(40)]
    cut = [[item.number for item in shard.items] for shard in shards(items, lambda item: len(item.text), 10, {})]
    assert [number for shard in cut for number in shard] == list(range(40))
    assert all(sum(number % 5 for number in shard[:-1]) < 10 for shard in cut)
    again = [len(shard.items) for shard in shards(items, lambda item: len(item.text), 10, {0: 3})]
    assert again[0] == 3
    assert sum(again) == 40
    whole = shards(items, lambda item: len(item.text), 10, {})
    resumed = shards(items, lambda item: len(item.text), 10, {shard[0]: len(shard) for shard in cut[:2]})
    assert [shard.items for shard in whole] == [shard.items for shard in resumed]


def read(model: torch.nn.Module, texts: list[list[int]]) -> list[torch.Tensor]:
    """The logits of each text: right-padded together, without a mask, and cut to its own length."""
    longest = max(map(len, texts))
    ids = torch.tensor([text + [text[-1]] * (longest - len(text)) for text in texts])
    with torch.no_grad():
        logits_BTV = model(ids, use_cache=False).logits
    return [logits_BTV[row, : len(text)] for row, text in enumerate(texts)]


def alone(model: torch.nn.Module, text: list[int]) -> torch.Tensor:
    settle_rotary(model)
    return read(model, [text])[0]


def model_of(case: str) -> torch.nn.Module:
    if case in ROTARY:
        return tiny_model(
            "llama", max_position_embeddings=8 if case == "dynamic" else 512, rope_parameters=ROTARY[case]
        )
    return tiny_model(case)


TEXTS = [[7, 9, 11, 13, 9, 7], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31]]


@pytest.mark.parametrize("case", ["dynamic", "longrope", "prophetnet", "xlnet", "cpmant"])
def test_where_padding_is_not_exact_it_is_known_and_batches_have_one_length(case: str) -> None:
    model = model_of(case)
    assert not pads_exactly(model.config)
    expected = alone(model, TEXTS[0])
    settle_rotary(model)
    assert (read(model, TEXTS)[0] - expected).abs().max() > 1e-4  # padded, it would be another reading
    settle_rotary(model)
    assert_close(read(model, [TEXTS[0], TEXTS[0][::-1]])[0], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", ["llama", "gpt2", "mistral", "gemma3_text", "gpt_oss", "bloom", "opt"])
def test_where_padding_is_exact_a_padded_text_reads_as_alone(case: str) -> None:
    model = model_of(case)
    assert pads_exactly(model.config)
    assert_close(read(model, TEXTS)[0], alone(model, TEXTS[0]), atol=1e-5, rtol=0)


def test_dynamic_frequencies_forget_the_longest_text_so_far() -> None:
    model = model_of("dynamic")
    text, longer = list(range(10, 22)), list(range(10, 40))
    fresh = alone(model, text)
    read(model, [longer])
    assert (read(model, [text])[0] - fresh).abs().max() > 1e-4  # as transformers has it
    read(model, [longer])
    assert torch.equal(alone(model, text), fresh)


def observed(model: torch.nn.Module, texts: list[list[int]]) -> list[torch.Tensor]:
    """Each text's weights in layer 0, read side by side."""
    prompts = [Prompt("", tuple(text), ("",) * len(text), (), (), (), ()) for text in texts]
    seen = observe(as_loaded(model), prompts, Request(metrics=(), weights=True))
    return [torch.stack([one.weights[layer] for layer in one.weights]) for one in seen]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of every batch of ids that a model has run over."""
    shapes: list[tuple[int, ...]] = []

    def counted(model: Any, ids_BT: torch.Tensor, *rest: Any, **how: Any) -> Any:
        shapes.append(tuple(ids_BT.shape))
        return listen(model, ids_BT, *rest, **how)

    monkeypatch.setattr(attnscope.observe.collect, "listen", counted)
    return shapes


def test_a_model_of_which_nothing_is_known_is_tried(passes: list) -> None:
    """Its shortest text alone and beside the longest; from then on it is read one length at a time."""
    model, (short, long) = tiny_model("llama"), TEXTS
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: output.roll(args[0].shape[1], -1))
    assert pads(model)
    expected = [observed(model, [text])[0] for text in (short, long, short[::-1])]
    passes.clear()
    for found, alone in zip(observed(model, [short, long, short[::-1]]), expected, strict=True):
        assert_close(found, alone, atol=1e-6, rtol=0)
    assert sorted(passes) == [(1, 6), (1, 12), (2, 6), (3, 12)]
    assert not pads(model)
    passes.clear()
    observed(model, [short, long])
    assert sorted(passes) == [(1, 6), (1, 12)]


def test_a_model_that_pads_is_tried_again_only_with_a_longer_text(
    monkeypatch: pytest.MonkeyPatch, passes: list
) -> None:
    model, (short, long) = tiny_model("llama"), TEXTS
    for texts in ([short, long], [long[:9], long], [short, long * 2], [short, long]):
        observed(model, texts)
    assert passes == [(2, 12), (1, 6), (2, 12), (2, 24), (1, 6), (2, 12)]
    monkeypatch.setitem(FAMILIES, "llama", Family(one_length=False))  # the table overrules
    observed(tiny_model("llama"), TEXTS)
    assert passes[6:] == [(2, 12)]


def test_a_mask_that_hides_keys_ends_the_pass_and_is_remembered(passes: list) -> None:
    """Only texts longer than the family's top-k of 4 can tell; shorter ones are padded."""
    model = tiny_model("deepseek_v32")
    observed(model, [[7, 8, 9], [7, 8]])
    assert pads(model)
    observed(model, TEXTS)
    assert passes[:2] == [(2, 3), (1, 2)]
    assert sorted(passes[2:]) == [(1, 6), (1, 12), (2, 12)]
    assert not pads(model)


def test_xlm_and_reformer_run_in_one_length_too() -> None:
    from transformers import ReformerConfig, XLMConfig

    assert not pads_exactly(XLMConfig(is_decoder=True, causal=True))
    assert not pads_exactly(ReformerConfig(is_decoder=True))
