"""Decoders that look both ways: what a config says of it, held to whether a later token changes earlier rows.

B text, T token, M width of the output, Q query, K key.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.bloom import modeling_bloom
from transformers.models.llama import modeling_llama

import attnscope
from attnscope.api.scan import scan
from attnscope.attention.spec import Visibility
from attnscope.certificate.check import check_parity, in_words
from attnscope.errors import ModelError, UsageError
from attnscope.hooks.generation import check_causal
from attnscope.model.geometry import geometry_of
from attnscope.model.loaded import LoadedModel
from attnscope.model.selection import metrics_stack
from attnscope.model.tasks import both_ways, task_of
from attnscope.observe.request import CaptureSpec, Request, View
from attnscope.observe.run import prepare
from helpers.families import NOT_BUILT, WITHOUT_ATTENTION, tiny_config
from helpers.parity_models import rouse

IDS = [7, 9, 11, 5, 13, 17, 9, 11, 6, 21, 8, 10, 19, 14]
NOT_CAUSAL, ALL, FLAG = ({"is_causal": False}, *({"use_bidirectional_attention": one} for one in ("all", True)))
VISION = {"use_bidirectional_attention": "vision"}
# transformers' own code fails when they look both ways: their attention adds a mask that is not made.
FAILS = {"modernbert-decoder": TypeError, "mpt": AttributeError}
# Without attention; with streams of n-grams that are predicted ahead; made of several decoders, each with a config.
OF_ANOTHER_KIND = {*WITHOUT_ATTENTION, "prophetnet", "blt"}
DECODERS = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - NOT_BUILT - OF_ANOTHER_KIND)
# Those that read text in models that are given pictures too, and no list of language models has.
PARTS = ["granite_docling_text", "mistral_large4_text", "molmo2_text", "muse_spark_text", "qwen3_vl_text"]
CASES = [(one, more) for one in DECODERS for more in ({}, NOT_CAUSAL)] + [
    *(("gemma3_text", FLAG), ("gemma4_text", ALL), ("gemma4_text", VISION), ("gemma4_unified_text", ALL)),
    *((one, {"is_decoder": False}) for one in ("bert", "bert-generation", "roberta", "rembert", "megatron-bert")),
    *(("xlm", {"causal": False}), ("xlnet", {}), ("bert", {"is_decoder": True} | NOT_CAUSAL)),
    *((one, {}) for one in PARTS),
]
DEFAULT = [
    *(("llama", {}), ("llama", NOT_CAUSAL), ("gpt2", NOT_CAUSAL), ("gemma3_text", FLAG), ("bloom", NOT_CAUSAL)),
    *(("bert", {"is_decoder": False}), ("bert", {}), ("gpt_neo", NOT_CAUSAL), ("qwen3_vl_text", {})),
]


def made(model_type: str, more: Mapping[str, Any], attention: str = "eager") -> Any:
    torch.manual_seed(0)
    config = tiny_config(model_type, **more)
    of = AutoModelForCausalLM if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else AutoModel
    model = of.from_config(config, attn_implementation=attention, experts_implementation="eager")
    rouse(model.eval().requires_grad_(False))
    return model


def later_tokens_matter(model: Any) -> bool:
    """Whether the last token changes a row before it, by the model alone."""
    if model.config.is_encoder_decoder:  # whose decoder alone was made
        model.config.is_encoder_decoder = False
    ids_BT = torch.tensor([IDS, [*IDS[:-1], 30]])
    with torch.no_grad():
        output_BTM = model(ids_BT, use_cache=False)[0]
    changed_T = (output_BTM[0] - output_BTM[1]).abs().amax(-1)
    assert changed_T[-1] > 1e-3, "a dead model shows nothing"
    return bool(changed_T[:-1].max() > 1e-4)


def named(case: tuple[str, Mapping[str, Any]]) -> str:
    return " ".join([case[0], *(f"{name}={value}" for name, value in case[1].items())])


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(one, marks=[] if one in DEFAULT else pytest.mark.families, id=named(one))
        for one in DEFAULT + [case for case in CASES if case not in DEFAULT]
    ],
)
def test_a_config_says_a_decoder_where_later_tokens_change_no_row(case: tuple[str, Mapping[str, Any]]) -> None:
    model_type, more = case
    if more == NOT_CAUSAL and model_type in FAILS:
        with pytest.raises(FAILS[model_type]):
            later_tokens_matter(made(model_type, more))
        return
    model = made(model_type, more)
    config = model.config
    matter = later_tokens_matter(model)
    assert task_of(config) == ("encoder" if matter else "decoder")


def loaded_of(model_type: str, more: Mapping[str, Any], attention: str = "eager") -> LoadedModel:
    return attnscope.wrap(made(model_type, more, attention), attnscope.load("demo").tokenizer, name="it")


# Keys on either side of the query's own: Gemma 3 halves its window of 8 and counts the query's own key in it.
# Gemma 4 halves it too, and leaves the query's own key out.
REACHES: list[tuple[str, dict[str, Any], int | None]] = [
    ("gemma3_text", FLAG | {"sliding_window": 8}, 4),
    ("gemma3_text", NOT_CAUSAL | {"sliding_window": 8}, 8),
    ("mistral", NOT_CAUSAL | {"sliding_window": 3}, 3),
    ("gemma4_text", ALL | {"sliding_window": 8}, 5),
    ("llama", NOT_CAUSAL, None),
]


@pytest.mark.parametrize(("model_type", "more", "reach"), REACHES)
def test_the_oracle_sees_to_either_side(model_type: str, more: dict[str, Any], reach: int | None) -> None:
    loaded = loaded_of(model_type, more)
    report = check_parity(loaded, IDS)
    assert (report.holds, report.level) == (True, "full"), report
    first = loaded.geometry.layers[0]
    assert first.window == reach
    seen_QK = attnscope.capture(loaded, IDS).weights[0][0] > 0
    expected = [[reach is None or abs(q - k) <= reach for k in range(len(IDS))] for q in range(len(IDS))]
    assert seen_QK.tolist() == expected


# Types whose attention the oracle reads; llama4's chunks look back all the same.
HELD = [
    *("qwen2", "qwen3", "gpt2", "gpt_neox", "gpt_oss", "olmo3", "deepseek_v3", "lfm2", "bloom", "llama4_text"),
    *("qwen3_next", "falcon", "gptj"),
]
NO_ORACLE = {"cpmant", "xlnet", "prophetnet"}


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(one, marks=pytest.mark.families if one in HELD else pytest.mark.slow)
        for one in sorted({*DECODERS} - FAILS.keys() - NO_ORACLE)
    ],
)
def test_parity_holds_of_decoders_that_look_both_ways(model_type: str) -> None:
    loaded = attnscope.wrap(made(model_type, NOT_CAUSAL), attnscope.load("demo").tokenizer)
    report = check_parity(loaded, IDS)
    assert report.holds, report.largest()
    assert not any(one.turned for one in report.layers)


def test_its_heads_are_those_of_an_encoder() -> None:
    seen = attnscope.capture(loaded_of("llama", NOT_CAUSAL), IDS)
    assert (seen.stack, seen.failures) == ("encoder", [])
    weights_QK = seen.weights[0][0].tolist()
    distance = sum(abs(q - k) * w for q, row in enumerate(weights_QK) for k, w in enumerate(row)) / len(IDS)
    head = seen.heads[0]
    assert head.score["distance"] == pytest.approx(distance, rel=1e-4)
    assert all(head.score[name] != head.score[name] for name in ("induction", "local_mass_32"))  # NaN


def test_studies_of_what_comes_next_say_why_they_are_not_for_it() -> None:
    loaded = loaded_of("llama", NOT_CAUSAL)
    calls = {
        "a scan": lambda: scan(loaded),
        "an ablation": lambda: attnscope.ablate(loaded),
        "a knockout": lambda: attnscope.knockout(loaded, "the river bank", key="river", answer=" bank"),
        "patching": lambda: attnscope.patch(loaded, "the bank", corrupted="the mill", answer=" bank"),
        "an effect on a logit": lambda: prepare(loaded, CaptureSpec("the bank", keep=Request(view=View("logit")))),
    }
    for what, call in calls.items():
        with pytest.raises(ModelError, match=f"{what} is for a causal model, and it looks both ways: .* is_causal=f"):
            call()
    for asked in ({"generate": 2}, {"answer": " bank"}):
        with pytest.raises(UsageError, match="looks both ways: its config says is_causal=false"):
            prepare(loaded, CaptureSpec("the bank", **asked))


def test_an_encoder_decoder_whose_decoder_looks_both_ways_is_refused() -> None:
    torch.manual_seed(0)
    model = AutoModel.from_config(tiny_config("bart", **NOT_CAUSAL), attn_implementation="eager").eval()
    target_BT = torch.tensor([IDS, [*IDS[:-1], 30]])
    with torch.no_grad():
        output_BTM = model(torch.tensor([IDS, IDS]), decoder_input_ids=target_BT)[0]
    assert (output_BTM[0, 0] - output_BTM[1, 0]).abs().max() > 1e-4, "its decoder is causal after all"
    with pytest.raises(ModelError, match=r"the decoder of this bart looks both ways \(is_causal=false\)"):
        attnscope.wrap(model, attnscope.load("demo").tokenizer)


def test_what_a_config_says_is_named() -> None:
    assert both_ways(LlamaConfig()) == "" == both_ways(MistralConfig(is_causal=True))
    assert both_ways(LlamaConfig(is_causal=None)) == "is_causal=null"  # transformers asks whether it is true
    assert both_ways(Gemma3TextConfig(use_bidirectional_attention=True)) == "use_bidirectional_attention=true"
    assert geometry_of(tiny_config("gpt_neo", is_causal=False), count=False).both_ways == ""  # it masks by itself
    beside_pictures = tiny_config("gemma3")
    beside_pictures.text_config.use_bidirectional_attention = True  # which the whole model does not ask
    assert (both_ways(beside_pictures), task_of(beside_pictures)) == ("", "decoder")
    beside_pictures.text_config.is_causal = False
    assert task_of(beside_pictures) == "encoder"


def unmasked(**given: Any) -> None:
    """What a patch makes of transformers' `create_causal_mask`: no mask, which eager attention takes for all keys."""
    return


def masked(inputs_embeds: torch.Tensor, **given: Any) -> torch.Tensor:
    """A causal mask whatever the config says."""
    T = inputs_embeds.shape[1]
    return torch.full((T, T), torch.finfo(torch.float32).min).triu(1)[None, None]


MAY_NOT = "layers [0, 1, 2, 3]: every token sees the next one, which by the model's config and class it may not"
MAY = "layers [0, 1, 2, 3]: no token sees the next one, which by the model's config and class it may"
PATCHED = [
    pytest.param("llama", modeling_llama, {}, unmasked, MAY_NOT, id="a mask is missing"),
    pytest.param("bloom", modeling_bloom, {}, unmasked, MAY_NOT, id="outside the interface"),
    pytest.param("llama", modeling_llama, NOT_CAUSAL, masked, "encoder " + MAY, id="a mask too many"),
]


@pytest.mark.parametrize(("model_type", "file", "more", "mask", "line"), PATCHED)
def test_a_mask_that_is_not_the_configs_fails_parity_and_every_run_says_so(
    model_type: str, file: Any, more: dict[str, Any], mask: Any, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = loaded_of(model_type, more)
    assert check_parity(loaded, IDS).holds
    monkeypatch.setattr(file, "create_causal_mask", mask)
    seen = attnscope.capture(loaded, IDS)
    assert seen.failures == [line]
    what = line.partition(": ")[2]
    for level in ("full", "scores"):
        report = check_parity(loaded, IDS, level=level)
        assert not report.holds
        assert all(what in in_words(one, report) for one in report.failures)
    # its scores are of what was heard
    score, both = seen.heads[0].score, mask is unmasked
    assert (score["induction"] != score["induction"]) is both
    weights_QK = seen.weights[0][0].tolist()
    rows = [(q, row) for q, row in enumerate(weights_QK) if both or q > 0]  # that see two keys
    far = sum((abs(q - k) if both else q - k) * w for q, row in rows for k, w in enumerate(row))
    assert score["distance"] == pytest.approx(far / len(rows), rel=1e-4)


def test_a_study_hears_that_a_model_is_not_causal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = loaded_of("llama", {}, "sdpa")
    monkeypatch.setattr(modeling_llama, "create_causal_mask", unmasked)
    check_causal(loaded, "a scan")  # sdpa hides later keys by the layers' own `is_causal`
    for layer in loaded.model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ModelError, match=r"a scan is for a causal model, and it is none: .* every token sees the next"):
        scan(loaded, pool=range(6, 100))
    attnscope.why(loaded, IDS, "L1H0")
    assert [one.message for one in caplog.records if "check failed" in one.message] == [f"check failed: {MAY_NOT}"]


def test_gemma_looks_both_ways_under_sdpa_alone_and_its_eager_attention_says_so() -> None:
    loaded = loaded_of("gemma", FLAG)
    assert task_of(loaded.model.config) == "encoder"
    assert not later_tokens_matter(loaded.model)
    assert attnscope.capture(loaded, IDS).failures == ["encoder " + MAY]
    loaded.model.set_attn_implementation("sdpa")
    assert later_tokens_matter(loaded.model)


def test_a_text_with_a_picture_is_no_model_that_looks_both_ways() -> None:
    """Patches of a picture see each other in some decoders: the tokens before and behind them see what they should."""
    seen_QK = torch.ones(6, 6, dtype=torch.bool).tril()
    seen_QK[2:5, 2:5] = True
    blocks, causal, whole = (Visibility(6, 6, one[None, None]) for one in (seen_QK, seen_QK.tril(), seen_QK | True))
    assert [float(one.ahead) for one in (blocks, causal, whole)] == pytest.approx([0.4, 0, 1])
    assert [float(Visibility(6, 6, None, one).ahead) for one in (True, False)] == [0, 1]
    assert [metrics_stack("decoder", float(one.ahead)) for one in (blocks, causal, whole)] == [
        *("decoder", "decoder", "encoder")
    ]
    single = Visibility(1, 1)
    assert metrics_stack("encoder", float(single.ahead)) == "encoder"
