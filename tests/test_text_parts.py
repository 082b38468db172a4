"""Models that read texts beside pictures or sounds: the part that reads a text alone is read, wherever it lies.

What is heard must be what transformers' own part returns, in the whole model, and in the model as it was saved.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import attnscope
from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import wrap
from attnscope.model.tasks import model_class, task_of, text_part
from attnscope.observe.request import Request
from helpers.families import few, tiny_config

IDS = list(range(6, 20))
WEIGHTS = Request(weights=True)
ENCODERS = {  # and the class of the part that reads their texts
    "aimv2": "Aimv2TextModel",
    "align": "AlignTextModel",
    "altclip": "AltCLIPTextModel",
    "chinese_clip": "ChineseCLIPTextModel",
    "clap": "ClapTextModel",
    "clip": "CLIPTextModel",
    "clipseg": "CLIPSegTextModel",
    "embedding_gemma2": "EmbeddingGemma2TextModel",
    "flava": "FlavaTextModel",
    "groupvit": "GroupViTTextTransformer",
    "metaclip_2": "MetaClip2TextModel",
    "modernvbert": "ModernBertModel",
    "owlv2": "Owlv2TextTransformer",
    "owlvit": "OwlViTTextTransformer",
    "pe_audio": "ModernBertModel",
    "sam3": "CLIPTextModelWithProjection",
    "siglip": "SiglipTextModel",
    "siglip2": "Siglip2TextModel",
    "tipsv2": "Tipsv2TextModel",
    "ultravbert": "UltrabertModel",
    "xclip": "XCLIPTextModel",
}
DECODERS = {  # those with a class of the whole read a text without pictures or sounds
    "audioflamingo3": "Qwen2Model",
    "blip-2": "OPTForCausalLM",
    "glmasr": "GlmAsrForConditionalGeneration",
    "granite_speech": "GraniteSpeechForConditionalGeneration",
    "qwen2_audio": "Qwen2AudioForConditionalGeneration",
    "qwen3_asr": "Qwen3ASRForConditionalGeneration",
    "vibevoice_asr": "VibeVoiceAsrForConditionalGeneration",
    "voxtral": "VoxtralForConditionalGeneration",
}
PARTS = ENCODERS | DECODERS


def whole(model_type: str, **overrides: Any) -> Any:
    """A tiny model of this type, all of it, in float64."""
    config = tiny_config(model_type, **overrides)
    made = model_class(config, task_of(config), model_type)
    torch.manual_seed(0)
    return made._from_config(config, attn_implementation="eager").double().eval()


def largest_difference(seen: attnscope.Observation, model: Any) -> float:
    """From what the model itself returns of a text."""
    with torch.no_grad():
        returned = model(torch.tensor([seen.prompt.ids]), output_attentions=True).attentions
    assert len(returned) == len(seen.weights) > 0
    pairs = zip(seen.weights.values(), returned, strict=True)
    return max(float((weights - own[0]).abs().max()) for weights, own in pairs)


@pytest.mark.parametrize("model_type", few(PARTS, also=("clip", "embedding_gemma2", "qwen2_audio")))
def test_the_part_that_reads_texts_is_read(model_type: str, demo: LoadedModel) -> None:
    model = whole(model_type)
    loaded = wrap(model, demo.tokenizer)
    assert type(loaded.model).__name__ == PARTS[model_type]
    assert loaded.geometry.task == ("encoder" if model_type in ENCODERS else "decoder")
    assert largest_difference(attnscope.capture(loaded, IDS, request=WEIGHTS), loaded.model) < 1e-6


@pytest.mark.families
def test_florence2_reads_a_text_and_its_target_without_a_picture(demo: LoadedModel) -> None:
    model = whole("florence2", text_config={"vocab_size": 2000, "model_type": "bart"})
    seen = attnscope.capture(wrap(model, demo.tokenizer), "the bank", target="of the river", request=WEIGHTS)
    given = torch.tensor([seen.queries.ids])
    returned = model(torch.tensor([seen.prompt.ids]), decoder_input_ids=given, output_attentions=True)
    for stack in ("encoder", "decoder", "cross"):
        own = returned[f"{stack}_attentions"]
        for layer, weights in enumerate(seen.of(stack).weights.values()):
            torch.testing.assert_close(weights.double(), own[layer][0], rtol=0, atol=1e-6)


def test_a_saved_clip_is_read_as_its_text_tower(demo: LoadedModel, tmp_path: Path) -> None:
    model = whole("clip", text_config={"vocab_size": 2000}).float()
    model.save_pretrained(tmp_path)
    demo.tokenizer.save_pretrained(tmp_path)
    seen = attnscope.capture(attnscope.load(str(tmp_path), device="cpu"), "the bank", request=WEIGHTS)
    assert largest_difference(seen, model.text_model) < 1e-6


def test_a_model_of_text_has_no_such_part() -> None:
    for model_type in ("llama", "bert", "t5", "llava"):
        assert text_part(tiny_config(model_type)) is None
