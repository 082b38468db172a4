"""What a review of the numbers found untrue, on tiny models that show it: each test failed before it was mended.

Shapes: H head, G kv head, Q query, K key, T token.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import BigBirdConfig, BigBirdModel, PreTrainedTokenizerFast

import attnscope
from attnscope.certificate.check import ParityReport, check_parity
from attnscope.cli.parity import verdict
from attnscope.hooks.engines import ENGINES
from attnscope.inputs.prompt import Prompt
from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import load
from attnscope.model.options import LoadOptions
from attnscope.observe.collect import observe
from attnscope.observe.observation import Observation
from attnscope.observe.request import Request, View
from helpers.command_line import Result, call
from helpers.own import attentions
from helpers.parity_models import as_loaded, attend_otherwise, ids_for, in_half, rouse, roused_model

WORDS = [f"w{i}" for i in range(128)]  # a word is a token


def ids(tokens: int, seed: int = 0) -> list[int]:
    return ids_for("llama", seed, tokens)[0].tolist()


def prompt(ids_T: list[int]) -> Prompt:
    words = tuple(WORDS[i] for i in ids_T)
    plain = (words[0], *(" " + word for word in words[1:]))
    return Prompt(" ".join(words), tuple(ids_T), words, words, (False,) * len(words), plain, ())


def text(tokens: int) -> str:
    return prompt(ids(tokens)).text


def folder_of(model: Any, folder: Path) -> str:
    """The model saved, with a tokenizer of its 128 words."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=WORDS[0]).save_pretrained(folder)
    return str(folder)


def parity_of(model: Any, tokens: int = 24, seed: int = 0) -> ParityReport:
    return check_parity(as_loaded(model), ids_for("llama", seed, tokens))


def last_line(result: Result) -> str:
    return result.err.strip().splitlines()[-1]


def multiply_logits(model: Any, factor: float) -> Any:
    """Every layer's queries and keys so many times as large."""
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.mul_(factor)
        layer.self_attn.k_proj.weight.mul_(factor)
    return model


# Half precision: what the model does there itself.


def without_mask(mask: torch.Tensor, scaling: float) -> tuple[torch.Tensor, float]:
    return torch.zeros_like(mask), scaling


def with_scale_zero(mask: torch.Tensor, scaling: float) -> tuple[torch.Tensor, float]:
    return mask, 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("change", [without_mask, with_scale_zero])
def test_parity_sees_another_attention_in_half_precision(
    monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any], dtype: torch.dtype
) -> None:
    attend_otherwise(monkeypatch, change)
    assert not parity_of(in_half(roused_model("llama"), dtype)).holds


def test_parity_sees_live_dropout_in_half_precision() -> None:
    model = in_half(roused_model("llama"))
    attention = model.model.layers[1].self_attn
    attention.attention_dropout, attention.training = 0.5, True
    assert not parity_of(model).holds


def test_masked_weight_in_half_precision_is_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    attend_otherwise(monkeypatch, without_mask)
    report = parity_of(in_half(roused_model("llama")))
    assert max(layer.masked_weight for layer in report.layers) > 0.1


def test_parity_sees_weights_that_are_nan_in_half_precision(tmp_path: Path) -> None:
    model = roused_model("llama")
    attention = model.model.layers[-1].self_attn
    attention.q_proj.weight.mul_(150)
    attention.k_proj.weight.mul_(150)
    done = call("parity", "--model", folder_of(model, tmp_path), "--text", text(24), "--dtype", "float16")
    assert last_line(done).startswith("parity does not hold")
    assert done.code == 1


# Masks that differ from head to head.


def seen_and_attention(model_type: str, wanted: Request, engine: str) -> tuple[Observation, np.ndarray]:
    """40 tokens observed, and the model's own weights (layer, H, Q, K)."""
    model, ids_T = roused_model(model_type), ids(40)
    [seen] = observe(as_loaded(model), [prompt(ids_T)], wanted, engine=ENGINES[engine])
    return seen, torch.stack(attentions(model, ids_T)).numpy()


FAMILIES_WITH_A_MASK_A_HEAD = pytest.mark.parametrize("model_type", ["doge", "minimax_m3_vl_text"])
EITHER_ENGINE = pytest.mark.parametrize("engine", ["eager", "fused"])


@EITHER_ENGINE
@FAMILIES_WITH_A_MASK_A_HEAD
def test_scores_are_of_the_keys_that_each_head_sees(model_type: str, engine: str) -> None:
    wanted = Request(view=View(weights="scores"), metrics=(), relations=True, top_k=None)
    seen, expected = seen_and_attention(model_type, wanted, engine)
    columns = seen.relation_numbers()
    listed = np.zeros(expected.shape, bool)
    listed[columns["layer"], columns["head"], columns["query"], columns["key"]] = True
    assert listed[expected > 0].all()
    assert columns["weight"].min() > -1e30


@EITHER_ENGINE
@FAMILIES_WITH_A_MASK_A_HEAD
def test_the_mean_of_kv_heads_is_over_the_keys_that_each_head_sees(model_type: str, engine: str) -> None:
    wanted = Request(view=View(by_kv=True), metrics=(), relations=True, top_k=None)
    seen, weights = seen_and_attention(model_type, wanted, engine)
    columns = seen.relation_numbers()
    expected = weights.reshape(len(weights), columns["kv_head"].max() + 1, -1, 40, 40).mean(2)
    found = np.zeros(expected.shape)
    found[columns["layer"], columns["kv_head"], columns["query"], columns["key"]] = columns["weight"]
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


@EITHER_ENGINE
@FAMILIES_WITH_A_MASK_A_HEAD
def test_a_heatmap_shows_the_keys_that_each_head_sees(model_type: str, engine: str) -> None:
    seen, expected = seen_and_attention(model_type, Request(metrics=(), maps="all"), engine)
    for key, values_HQK in seen.maps.values.items():
        np.testing.assert_allclose(np.nan_to_num(values_HQK), expected[key.layer], atol=1e-5, rtol=0)


@EITHER_ENGINE
@FAMILIES_WITH_A_MASK_A_HEAD
def test_the_uniform_null_is_over_the_keys_that_each_head_sees(model_type: str, engine: str) -> None:
    """The share of the previous token, of a uniform row: none where a head does not see it."""
    seen, weights = seen_and_attention(model_type, Request(metrics=("previous_token",)), engine)
    visible = weights > 0
    share = visible[..., range(1, 40), range(39)] / visible.sum(-1)[..., 1:]
    found = seen.columns.scores["previous_token"].null
    np.testing.assert_allclose(found, share.mean(-1).ravel(), atol=1e-6, rtol=0)


# MiniMax-Text: its linear layers (1 and 3) return a state where others return weights.


@pytest.fixture(scope="module")
def minimax(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_of(roused_model("minimax"), tmp_path_factory.mktemp("minimax"))


def test_heads_of_minimax_hold(minimax: str) -> None:
    done = call("heads", "--model", minimax, "--text", text(24), "--format", "csv")
    assert {row["layer"] for row in done.rows if row["stack"] == "decoder"} == {"0", "2"}
    assert done.code == 0, done.err


def test_a_linear_layer_of_minimax_has_heads_of_its_own_stack(minimax: str) -> None:
    """With the numbers of signed rows, and none of those of a softmax."""
    done = call("heads", "--model", minimax, "--text", text(16), "--format", "csv")
    linear = [row for row in done.rows if row["stack"] == "linear"]
    assert [(row["layer"], row["head"]) for row in sorted(linear, key=lambda row: (row["layer"], row["head"]))] == [
        (layer, head) for layer in "13" for head in "0123"
    ]
    assert all(row["absolute_mass"] and not row["entropy"] for row in linear)
    assert {row["type"] for row in linear} == {""}


def test_a_batch_of_minimax_gives_rows(minimax: str, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(text(tokens) for tokens in (5, 9)))
    done = call("batch", str(texts), "--model", minimax, "--to-stdout", "jsonl")
    assert [len(json.loads(line)["heads"]) for line in done.out.splitlines()] == [16, 16]
    assert done.code == 0


# DeepSeek-V4: keys that are not tokens, of as many layers as the text is long enough for.


@pytest.fixture(scope="module")
def deepseek_v4(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_of(roused_model("deepseek_v4"), tmp_path_factory.mktemp("deepseek_v4"))


def test_a_batch_of_deepseek_v4_gives_each_text_the_rows_it_has_alone(deepseek_v4: str, tmp_path: Path) -> None:
    """Or says why it failed."""
    lengths = (3, 20, 150)
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(text(tokens) for tokens in lengths))
    done = call("batch", str(texts), "--model", deepseek_v4, "--to-stdout", "jsonl", "--set", "batch_tokens=4000")
    objects = done.records
    together = {one["tokens"]: len(one["heads"]) for one in objects if "heads" in one}
    loaded = load(LoadOptions(model=deepseek_v4))
    for line, tokens in enumerate(lengths, start=1):
        failed = "failed: " in done.err and f"line {line}: " in done.err
        assert failed or together.get(tokens) == attnscope.capture(loaded, text(tokens)).table().num_rows


@pytest.mark.parametrize(
    "how",
    [
        ("heads", "--format", "table"),
        ("draw", "--select", "hca.3.1", "--figures", "heads", "--out"),
        pytest.param(("heads", "--out"), marks=pytest.mark.e2e),
        pytest.param(("draw", "--out"), marks=pytest.mark.e2e),
    ],
)
def test_a_long_text_of_deepseek_v4_is_no_internal_error(
    deepseek_v4: str, tmp_path: Path, how: tuple[str, ...]
) -> None:
    where = (str(tmp_path / "out"),) if how[-1] == "--out" else ()
    done = call(*how, *where, "--model", deepseek_v4, "--text", text(150))
    assert done.code == 0, "its layers' keys are tokens and summaries of tokens, and named so"


def test_no_layer_of_deepseek_v4_answers_about_the_tokens_of_a_long_text(deepseek_v4: str) -> None:
    asked = call("heads", "--query", "last", "--model", deepseek_v4, "--text", text(150))
    assert "no layer of deepseek_v4" in last_line(asked)
    assert "represents several tokens" in last_line(asked)
    assert asked.code == 4


def test_a_wrapped_bigbird_that_reads_in_blocks_is_refused_for_that(demo: LoadedModel) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 2}
    config = BigBirdConfig(vocab_size=2000, block_size=4, num_random_blocks=1, **sizes)
    loaded = attnscope.wrap(BigBirdModel(config).eval(), demo.tokenizer)
    with pytest.raises(attnscope.AttnscopeError) as refused:
        attnscope.capture(loaded, list(range(6, 52)))
    assert "reads texts from 29 tokens on in blocks" in str(refused.value)
    assert "several tokens" not in str(refused.value)


# Batches: a text has the results that it has alone.


@EITHER_ENGINE
@pytest.mark.parametrize(
    "model_type",
    ["doge", "deepseek_v32", *(pytest.param(one, marks=pytest.mark.families) for one in ("axk2", "hy_v4"))],
)
def test_padding_does_not_change_which_keys_are_chosen(model_type: str, engine: str) -> None:
    """On a text of 37 tokens that repeats nine, beside one of 120; not every model's scores tie."""
    wanted, run, model = Request(metrics=(), weights=True), ENGINES[engine], roused_model(model_type)
    for seed in range(4):
        rouse(model, 60 + seed)
        repeating, long = prompt((ids(9, seed) * 5)[:37]), prompt(ids(120, 90 + seed))
        [alone] = observe(as_loaded(model), [repeating], wanted, engine=run)
        beside, _ = observe(as_loaded(model), [repeating, long], wanted, engine=run)
        for layer, weights_HQK in alone.weights.items():
            torch.testing.assert_close(beside.weights[layer], weights_HQK, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("engine", "tokens"), [("eager", 800), ("fused", 4000), pytest.param("eager", 4000, marks=pytest.mark.e2e)]
)
def test_distance_does_not_depend_on_the_longest_text_of_a_batch(engine: str, tokens: int) -> None:
    loaded = as_loaded(roused_model("llama", max_position_embeddings=4096, num_hidden_layers=1))
    short, long = prompt(ids(5, 1)), prompt(ids(tokens, 2))
    wanted, run = Request(metrics=("distance",)), ENGINES[engine]
    [alone] = observe(loaded, [short], wanted, engine=run)
    beside, _ = observe(loaded, [short, long], wanted, engine=run)
    distance, expected = (seen.columns.scores["distance"] for seen in (beside, alone))
    np.testing.assert_allclose(distance.value, expected.value, atol=2e-6, rtol=0)
    np.testing.assert_allclose(distance.null, expected.null, atol=2e-6, rtol=0)


# Parity: correct models hold, and what a text cannot show is said.


def test_parity_holds_for_large_logits_in_float32() -> None:
    model = multiply_logits(roused_model("llama"), 20)
    assert all(parity_of(model, seed=seed).holds for seed in range(3))


def test_parity_holds_for_a_long_text_of_gemma4() -> None:
    model = roused_model("gemma4_text")
    assert all(parity_of(model, tokens).holds for tokens in (200, 400))


def test_parity_says_that_one_token_shows_nothing(tmp_path: Path) -> None:
    done = call("parity", "--model", folder_of(roused_model("llama"), tmp_path), "--text", WORDS[7])
    said = last_line(done)
    assert "one token" in said or "1 token" in said or "level full" not in said


def test_parity_says_that_the_window_was_not_reached(tmp_path: Path) -> None:
    model = roused_model("mistral", sliding_window=8)
    done = call("parity", "--model", folder_of(model, tmp_path), "--text", text(8))
    said = last_line(done)
    assert "window" in said or "level full" not in said


@pytest.mark.parametrize("command", [("parity",), ("heads", "--verify")])
def test_what_cannot_be_checked_is_not_said_to_fail(command: tuple[str, ...], tmp_path: Path) -> None:
    done = call(*command, "--model", folder_of(roused_model("prophetnet"), tmp_path), "--text", text(9))
    assert "check failed" not in done.err
    assert "not checked: layer 1: " in done.err
    assert done.code == 1


def test_a_family_whose_layers_are_not_found_is_not_said_to_have_none(tmp_path: Path) -> None:
    done = call("parity", "--model", folder_of(roused_model("llama", num_hidden_layers=0), tmp_path), "--text", text(9))
    assert "attnscope does not find the layers of llama in its config" in done.err
    assert "softmax" not in done.err
    assert done.code == 3


@EITHER_ENGINE
def test_focus_is_from_0_to_1_in_a_window(engine: str) -> None:
    model = roused_model("mistral", sliding_window=3)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.zero_()  # attention is uniform
    [seen] = observe(as_loaded(model), [prompt(ids(60))], Request(metrics=("focus",)), engine=ENGINES[engine])
    focus = seen.columns.scores["focus"]
    np.testing.assert_allclose([focus.value, focus.null], 0, atol=1e-6)


# Dynamic rotary positions scale with the text: nothing ends where the config's positions do.


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory: pytest.TempPathFactory) -> str:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = roused_model("llama", max_position_embeddings=64, rope_parameters=rope)
    return folder_of(model, tmp_path_factory.mktemp("dynamic"))


@pytest.mark.parametrize("more", [(), ("--set", "positions=200"), ("--engine", "fused"), ("--verify",)])
def test_dynamic_positions_are_read_as_far_as_the_text_goes(dynamic: str, more: tuple[str, ...]) -> None:
    done = call("heads", "--model", dynamic, "--text", text(120), "--format", "csv", *more)
    assert len(done.rows) == 16
    assert done.code == 0


@EITHER_ENGINE
def test_a_batch_of_dynamic_positions_gives_each_text_what_it_has_alone(dynamic: str, engine: str) -> None:
    """Also after a longer text."""
    loaded, run = load(LoadOptions(dynamic)), ENGINES[engine]
    texts, wanted = [prompt(ids(tokens, tokens)) for tokens in (120, 100, 30)], Request(metrics=(), weights=True)
    for one, beside in zip(texts, observe(loaded, texts, wanted, engine=run), strict=True):
        fresh = load(LoadOptions(dynamic)).model
        with torch.no_grad():
            expected = fresh(torch.tensor([one.ids]), output_attentions=True, use_cache=False).attentions
        [alone] = observe(loaded, [one], wanted, engine=run)
        for layer, weights_BHQK in enumerate(expected):
            for seen in (beside, alone):
                torch.testing.assert_close(seen.weights[layer], weights_BHQK[0], atol=1e-5, rtol=0)


def test_the_sink_that_is_kept_by_default_is_the_one_that_is_asked_for() -> None:
    found = [
        call("heads", "--text", "the cat sat on the mat", "--format", "table", *more).out
        for more in ((), ("--set", "sink=keep"))
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["bloom", "gpt_neo"])
def test_off_token_mass_is_from_0_to_1_where_nobody_says_that_there_are_no_sinks(family: str) -> None:
    wanted = Request(metrics=("off_token_mass",))
    [seen] = observe(as_loaded(roused_model(family)), [prompt(ids(60))], wanted)
    mass = np.array([head.score["off_token_mass"] for head in seen.heads])
    assert ((mass >= 0) & (mass < 1e-6)).all()


def test_what_lacks_support_is_said_of_the_layers_that_lack_it(tmp_path: Path) -> None:
    """Layers 0 and 1 have a window of 6, in which no token sees more than 32; layers 2 and 3 see the whole text."""
    kinds = ["sliding_attention"] * 2 + ["full_attention"] * 2
    model = roused_model("gemma3_text", sliding_window=6, num_hidden_layers=4, layer_types=kinds)
    done = call("heads", "--model", folder_of(model, tmp_path), "--text", text(100), "--format", "table")
    [said] = [line for line in done.err.splitlines() if "local:" in line]
    assert "in layers 0-1 (window 6):" in said


@pytest.mark.parametrize("model_type", ["doge", "deepseek_v32"])
def test_parity_says_how_far_half_precision_is_where_it_chooses_other_keys(model_type: str) -> None:
    """These choose their keys by scores whose order rounding changes: a weight can go from 1 to 0."""
    report = parity_of(in_half(roused_model(model_type)), tokens=100)
    rounding = report.largest("rounding")
    assert report.holds
    assert rounding is not None
    assert f"bfloat16 up to {rounding[1]:.2g} ({rounding[0]}" in verdict(report)
    assert model_type != "doge" or rounding[1] > 0.1
