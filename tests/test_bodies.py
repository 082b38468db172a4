"""Checkpoints without an LM head: bodies, classifiers, reward models; what is read of them, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers.models.auto import modeling_auto

from attnscope.certificate.check import check_parity
from attnscope.errors import ModelError
from attnscope.model.fitting import LoadedAs
from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import load
from attnscope.model.options import LoadOptions
from attnscope.model.tasks import model_classes, task_of
from attnscope.observe.request import CaptureSpec, Request
from attnscope.observe.run import read
from helpers.command_line import call
from helpers.families import tiny_config, tiny_model
from helpers.folders import edit_config, saved, with_tokenizer
from helpers.parity_models import rouse

TEXT, TARGET = "the financial bank is located on river bank", "the bank"
SIZES = {"vocab_size": 2000, "num_hidden_layers": 2}
BART = {"vocab_size": 2000, "encoder_layers": 2, "decoder_layers": 2, "decoder_start_token_id": 2}
UNTIED = SIZES | {"tie_word_embeddings": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": UNTIED,
    "mistral": UNTIED,
    "qwen2": UNTIED,
    "gpt2": {"vocab_size": 2000, "n_layer": 2},
    "bert": SIZES | {"is_decoder": False},
    "bart": BART,
}
HEADS = {
    "body": "MODEL",
    "sequences": "MODEL_FOR_SEQUENCE_CLASSIFICATION",
    "tokens": "MODEL_FOR_TOKEN_CLASSIFICATION",
    "answers": "MODEL_FOR_QUESTION_ANSWERING",
}


def headless(folder: Path, family: str, head: str = "body") -> Any:
    """Save a random model of a family without an LM head; the model itself, in float64."""
    config = tiny_config(family, **CONFIGS[family])
    kind = getattr(hf, getattr(modeling_auto, f"{HEADS[head]}_MAPPING_NAMES")[family])
    config._attn_implementation = "eager"
    model = kind(config).eval()
    rouse(model)
    with_tokenizer(model, folder)
    return model.double()


def loaded_from(folder: Path, **options: Any) -> LoadedModel:
    return load(LoadOptions(model=str(folder), **options))


def drop(folder: Path, ending: str) -> str:
    """Take one weight out of a checkpoint; its name."""
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith(ending))
    del weights[name]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return name


def some(*default: tuple[str, str]) -> list[Any]:
    """Every family with every head that transformers has of it; the rest of them is of the mark `families`."""
    has = {head: getattr(modeling_auto, f"{name}_MAPPING_NAMES") for head, name in HEADS.items()}
    every = [(family, head) for family in CONFIGS for head in HEADS if family in has[head]]
    return [pytest.param(*one, marks=[] if one in default else pytest.mark.families) for one in every]


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model: a decoder whose head is one number per sequence."""
    folder = tmp_path_factory.mktemp("bodies") / "reward"
    headless(folder, "llama", "sequences")
    return folder


# What is read


@pytest.mark.parametrize(
    ("family", "head"),
    some(("llama", "answers"), ("mistral", "body"), ("qwen2", "tokens"), ("gpt2", "sequences"), ("bart", "sequences")),
)
def test_weights_are_those_of_plain_transformers(tmp_path: Path, family: str, head: str) -> None:
    body = headless(tmp_path, family, head).base_model
    loaded = loaded_from(tmp_path)
    seen = read(loaded, CaptureSpec(TEXT, target=TARGET if family == "bart" else None, keep=Request(weights=True)))
    asked = {"input_ids": torch.tensor([seen.prompt.ids])}
    if family == "bart":
        asked["decoder_input_ids"] = torch.tensor([seen.queries.ids])
    with torch.no_grad():
        output = body(**asked, output_attentions=True)
    for stack, one in seen.stacks.items():
        expected = output[f"{stack}_attentions" if len(seen.stacks) > 1 else "attentions"]
        assert len(one.weights) == len(expected) == 2
        for layer, weights in enumerate(expected):
            torch.testing.assert_close(one.weights[layer].double(), weights[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.families)])
def test_a_head_that_is_tied_is_there_with_the_body(tmp_path: Path, family: str) -> None:
    headless(tmp_path, family)
    assert loaded_from(tmp_path).has_logits == (family == "gpt2")
    edit_config(tmp_path, tie_word_embeddings=True)
    loaded = loaded_from(tmp_path)
    assert loaded.has_logits
    assert loaded.model.get_output_embeddings().weight is loaded.model.get_input_embeddings().weight


def test_a_head_that_the_file_has_is_loaded_whatever_the_config_names(tmp_path: Path) -> None:
    saved(tmp_path, "llama", **UNTIED)
    for named in ("LlamaModel", "LlamaForSequenceClassification", "Unknown"):
        edit_config(tmp_path, architectures=[named])
        assert loaded_from(tmp_path).has_logits


def test_the_class_is_the_one_whose_weights_are_there(tmp_path: Path) -> None:
    """BertModel has a pooler, which checkpoints of a masked language model lack."""
    model = hf.BertForMaskedLM(tiny_config("bert", **CONFIGS["bert"])).eval()
    with_tokenizer(model, tmp_path)
    drop(tmp_path, "cls.predictions.bias")
    edit_config(tmp_path, architectures=["BertModel"])
    loaded = loaded_from(tmp_path)
    assert loaded.loaded_as == LoadedAs("BertForMaskedLM", "body")
    ids = torch.arange(8, 20)[None]
    with torch.no_grad():
        expected, ours = (one(ids).last_hidden_state for one in (model.bert, loaded.model))
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("family", ["bart", pytest.param("t5", marks=pytest.mark.families)])
def test_an_encoder_decoder_of_a_tied_body_writes_its_target(tmp_path: Path, family: str) -> None:
    sizes = BART if family == "bart" else {"vocab_size": 2000, "decoder_start_token_id": 2}
    with_tokenizer(hf.AutoModel.from_config(tiny_config(family, **sizes)), tmp_path)
    assert read(loaded_from(tmp_path), CaptureSpec(TEXT, generate=3)).queries.ids[0] == 2


@pytest.mark.parametrize(
    ("family", "type"), [("mistral4", "Mistral4ForCausalLM"), ("chameleon", "ChameleonForConditionalGeneration")]
)
def test_a_type_that_only_models_of_pictures_list_is_a_decoder(family: str, type: str) -> None:
    config = hf.CONFIG_MAPPING[family]()
    assert task_of(config) == "decoder"
    assert model_classes(config, "decoder", "")[0].__name__ == type


@pytest.mark.parametrize("architectures", [5, [1, None]], ids=str)
def test_architectures_that_are_no_words_name_no_class(tmp_path: Path, architectures: Any) -> None:
    saved(tmp_path, "llama", **SIZES)
    edit_config(tmp_path, architectures=architectures)
    call("info", str(tmp_path)).ok()
    assert loaded_from(tmp_path).has_logits


def test_why_a_model_reads_no_text_is_said_before_its_layers_are_looked_for(tmp_path: Path) -> None:
    with_tokenizer(tiny_model("llama"), tmp_path)
    hf.BarkConfig().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="BarkModel has no forward pass of its own"):
        loaded_from(tmp_path)


def test_a_decoder_that_reads_no_tokens_is_refused() -> None:
    config = hf.FastSpeech2ConformerConfig(architectures=["FastSpeech2ConformerModel"])
    with pytest.raises(ModelError, match="is not a model of text"):
        model_classes(config, task_of(config), "speaks")


@pytest.mark.e2e
@pytest.mark.parametrize("task", ["auto", "encoder"])
def test_a_second_instance_is_of_the_same_part(tmp_path: Path, task: str) -> None:
    """A head that is missing is drawn at random, in each instance another."""
    headless(tmp_path, "bart" if task == "encoder" else "llama", "sequences")
    drop(tmp_path, "out_proj.weight" if task == "encoder" else "score.weight")
    loaded = loaded_from(tmp_path, task=task)
    assert check_parity(loaded, loaded.tokenizer(TEXT).input_ids, whole=True).whole.holds


@pytest.mark.parametrize(("head", "says"), [("sequences", "no LM head: no logits"), ("body", "")])
def test_info_says_whether_there_is_a_head(tmp_path: Path, head: str, says: str) -> None:
    headless(tmp_path, "gpt2", head)
    # In words: a long name of the folder breaks the line.
    shown = " ".join(call("info", str(tmp_path), columns=160).ok().out.decode().split())
    assert (says in shown) if says else ("no LM head" not in shown)
    assert json.loads(call("info", str(tmp_path), "--format", "json").out)["lm_head"] == (not says)


# What is refused


@pytest.mark.parametrize("ending", ["q_proj.weight", "embed_tokens.weight", "input_layernorm.weight"])
@pytest.mark.parametrize("head", ["body", pytest.param("sequences", marks=pytest.mark.families)])
def test_a_weight_of_the_body_that_is_missing_is_an_error(tmp_path: Path, head: str, ending: str) -> None:
    headless(tmp_path, "llama", head)
    name = drop(tmp_path, ending)
    with pytest.raises(ModelError) as caught:
        loaded_from(tmp_path)
    assert f"lacks 1 of its weights (first: {name})" in str(caught.value)


def test_a_head_that_is_missing_is_none(tmp_path: Path) -> None:
    saved(tmp_path, "llama", **UNTIED)
    drop(tmp_path, "lm_head.weight")
    loaded = loaded_from(tmp_path)
    assert not loaded.has_logits
    assert loaded.loaded_as == LoadedAs("AutoModelForCausalLM", "body")


@pytest.mark.parametrize(
    "command",
    [
        ("heads", TEXT, "--answer", " bank"),
        ("heads", TEXT, "--generate", "2"),
        ("relations", TEXT, "--weights", "logit", "--answer", " bank"),
        ("knockout", TEXT, "--answer", " bank", "--key", "bank", "--select", "0.0"),
        ("knockout", TEXT, "--keep", "top:2"),
        ("patch", TEXT, "--corrupted", TEXT.replace("river", "sea"), "--answer", " bank"),
        ("ablate", "--select", "0.0"),
        ("ablate",),
    ],
    ids=lambda command: " ".join(command[:1] + command[2:3]),
)
def test_what_needs_logits_says_that_there_are_none(reward: Path, command: tuple[str, ...]) -> None:
    refusal = call(*command, "--model", str(reward)).refusal
    assert "needs logits" in refusal
    assert "it has no LM head" in refusal


def test_an_encoder_decoder_without_a_head_asks_for_the_target(tmp_path: Path) -> None:
    headless(tmp_path, "bart", "sequences")
    refusal = call("heads", TEXT, "--model", str(tmp_path)).refusal
    assert "--target TEXT" in refusal
    assert "--task encoder" in refusal
    call("heads", TEXT, "--model", str(tmp_path), "--set", "task=encoder").ok()
