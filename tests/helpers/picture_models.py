"""Tiny random vision-language models, each in a folder with its tokenizer and processor, and a picture for them.

folder = saved("llava", tmp_path)
picture(tmp_path / "field.png")
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from PIL import Image, ImageDraw
from transformers import AutoTokenizer
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig, Qwen2_5_VLVisionConfig
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig, Qwen2VLVisionConfig
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig, Qwen3VLVisionConfig

from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import DEMO_FOLDER, load
from attnscope.model.options import LoadOptions
from attnscope.utils import isolation as apart
from helpers.parity_models import rouse
from helpers.seconds import once

HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = HEADS | {"hidden_size": 48, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 512}
TEXT |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
TOWER = HEADS | {"hidden_size": 32, "num_hidden_layers": 3, "image_size": 56, "patch_size": 14}
CHAT = (
    "{% for m in messages %}{{ m['role'] + ': ' }}{% for part in m['content'] %}{% if part['type'] == 'image' %}PLACE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
Made = tuple[Any, Any, Any, dict[str, Any]]  # config, tokenizer, image processor, what the processor's own file says


def picture(path: Path, size: tuple[int, int] = (160, 80)) -> str:
    """A field with a house and a sun."""
    image = Image.new("RGB", size, "lightblue")
    draw, (width, height) = ImageDraw.Draw(image), size
    draw.rectangle((0, height * 3 // 4, width, height), fill="seagreen")
    draw.rectangle((width // 8, height // 2, width // 3, height * 7 // 8), fill="firebrick")
    draw.ellipse((width * 3 // 4, height // 8, width * 7 // 8, height * 3 // 8), fill="gold")
    image.save(path)
    return str(path)


def tokenizer(place: str, *more: str, **named: str) -> Any:
    """The demo's, with tokens for pictures and a chat template that writes `place` for one."""
    made = AutoTokenizer.from_pretrained(DEMO_FOLDER, extra_special_tokens=named)
    if more:
        made.add_special_tokens({"additional_special_tokens": list(more)}, replace_extra_special_tokens=False)
    made.chat_template = CHAT.replace("PLACE", place)
    return made


def _llava() -> Made:
    words = tokenizer("<image>\n", image_token="<image>")
    images = hf.CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**TOWER),
        text_config=hf.LlamaConfig(**TEXT, vocab_size=len(words)),
        image_token_index=words.image_token_id,
    )
    own = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return config, words, images, own


def _gemma3() -> Made:
    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    words = tokenizer("<start_of_image>", **names)
    text = TEXT | {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    config = hf.Gemma3Config(
        vision_config=hf.SiglipVisionConfig(**TOWER, vision_use_head=False),
        text_config=hf.Gemma3TextConfig(**text, vocab_size=len(words)),
        mm_tokens_per_image=4,
        image_token_index=words.image_token_id,
    )
    return config, words, hf.Gemma3ImageProcessorPil(size={"height": 56, "width": 56}), {"image_seq_length": 4}


def _paligemma() -> Made:
    words = tokenizer("<image>", image_token="<image>")
    images = hf.SiglipImageProcessorPil(size={"height": 56, "width": 56}, image_seq_length=16)
    config = hf.PaliGemmaConfig(
        vision_config=hf.SiglipVisionConfig(**TOWER, vision_use_head=False).to_dict(),
        text_config=hf.GemmaConfig(**TEXT, vocab_size=len(words)).to_dict(),
        image_token_index=words.image_token_id,
        projection_dim=48,
    )
    return config, words, images, {}


def _idefics3() -> Made:
    tiles = (f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
    more = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *tiles)
    words = tokenizer("<image>", *more, image_token="<image>")
    images = hf.Idefics3ImageProcessorPil(size={"longest_edge": 112}, max_image_size={"longest_edge": 56})
    config = hf.Idefics3Config(
        vision_config=Idefics3VisionConfig(**TOWER).to_dict(),
        text_config=hf.LlamaConfig(**TEXT, vocab_size=len(words)).to_dict(),
        image_token_id=words.image_token_id,
        scale_factor=2,
        pad_token_id=1,
    )
    return config, words, images, {"image_seq_len": 4}


def _qwen(config_of: Any, text_of: Any, vision: Any) -> Made:
    place = "<|vision_start|><|image_pad|><|vision_end|>\n"
    words = tokenizer(place, "<|vision_start|>", "<|vision_end|>", "<|video_pad|>", image_token="<|image_pad|>")
    side = 2 * vision.patch_size
    images = hf.Qwen2VLImageProcessorPil(
        patch_size=vision.patch_size,
        size={"shortest_edge": side * side * 4, "longest_edge": side * side * 16},
    )
    rope = {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 10000.0}
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    names |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    config = config_of(
        vision_config=vision.to_dict(),
        text_config=text_of(**TEXT, vocab_size=len(words), rope_parameters=rope).to_dict(),
        **{name: words.convert_tokens_to_ids(said) for name, said in names.items()},
    )
    return config, words, images, {}


def _qwen2_vl() -> Made:
    vision = Qwen2VLVisionConfig(depth=3, embed_dim=32, hidden_size=48, num_heads=4, patch_size=14, mlp_ratio=2)
    return _qwen(hf.Qwen2VLConfig, Qwen2VLTextConfig, vision)


def _qwen2_5_vl() -> Made:
    sizes = {"depth": 3, "hidden_size": 32, "out_hidden_size": 48, "num_heads": 4, "intermediate_size": 48}
    vision = Qwen2_5_VLVisionConfig(**sizes, patch_size=14, window_size=56, fullatt_block_indexes=[1])
    return _qwen(hf.Qwen2_5_VLConfig, Qwen2_5_VLTextConfig, vision)


def _qwen3_vl() -> Made:
    sizes = {"depth": 3, "hidden_size": 32, "out_hidden_size": 48, "num_heads": 4, "intermediate_size": 48}
    vision = Qwen3VLVisionConfig(**sizes, patch_size=16, deepstack_visual_indexes=[1], num_position_embeddings=64)
    return _qwen(hf.Qwen3VLConfig, Qwen3VLTextConfig, vision)


FAMILIES: dict[str, tuple[Callable[[], Made], str]] = {  # how it is made, and the name of its classes
    "llava": (_llava, "Llava"),
    "gemma3": (_gemma3, "Gemma3"),
    "paligemma": (_paligemma, "PaliGemma"),
    "idefics3": (_idefics3, "Idefics3"),
    "qwen2_vl": (_qwen2_vl, "Qwen2VL"),
    "qwen2_5_vl": (_qwen2_5_vl, "Qwen2_5_VL"),
    "qwen3_vl": (_qwen3_vl, "Qwen3VL"),
}


def need_image_processors() -> None:
    """Skip where transformers has them with torchvision alone, as 5.17 does."""
    if lacks := getattr(hf.AutoImageProcessor, "_backends", None):  # of its stand-in
        pytest.skip(f"transformers {hf.__version__} reads no picture without {', '.join(lacks)}")


def saved(family: str, place: Path) -> str:
    """A folder with a model, its tokenizer and its processor, as a checkpoint of the hub has them."""
    need_image_processors()
    make, name = FAMILIES[family]
    config, words, images, own = make()
    torch.manual_seed(0)
    model = getattr(hf, f"{name}ForConditionalGeneration")(config).eval()
    rouse(model)
    folder = place / family
    for part in (model, words, images):
        part.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": f"{name}Processor", **own}))
    return str(folder)


class Models(dict[str, LoadedModel]):
    """The families' models, each saved in a folder of the place and loaded when it is first asked for."""

    def __init__(self, place: Path) -> None:
        super().__init__()
        self.place = place

    def __missing__(self, family: str) -> LoadedModel:
        self[family] = _loaded(family, self.place)
        return self[family]


@once
def _loaded(family: str, place: Path) -> LoadedModel:
    return load(LoadOptions(model=saved(family, place)))


def read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call processors in this process, not in a fork, which takes longer than the rest of a test.

    Their deadline and their bound on memory do not hold here.
    """
    asked: list[Any] = [apart.answer_of]
    monkeypatch.setattr(apart, "_elsewhere", asked)


# Models of pictures alone: how each is made; all are given 56 x 56 pixels in patches of 14.
SIDES = HEADS | {"hidden_size": 32, "num_hidden_layers": 3, "image_size": 56, "patch_size": 14}
READS = HEADS | {"hidden_size": 32, "vocab_size": 50}  # the tower beside it, of texts
ALONE: dict[str, Callable[[], Any]] = {
    "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**SIDES)),
    "clip_vision": lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**SIDES)),
    "dinov2_with_registers": lambda: hf.Dinov2WithRegistersModel(hf.Dinov2WithRegistersConfig(**SIDES)),
    "dinov3": lambda: hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**SIDES, num_register_tokens=2)),
    "internvl": lambda: hf.InternVLVisionModel(
        hf.InternVLVisionConfig(**SIDES | {"image_size": [56, 56], "patch_size": [14, 14], "use_qk_norm": True})
    ),
    "deit": lambda: hf.DeiTModel(hf.DeiTConfig(**SIDES)),
    "siglip_vision": lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**SIDES)),
    "yolos": lambda: hf.YolosModel(hf.YolosConfig(**SIDES | {"image_size": [56, 56]}, num_detection_tokens=3)),
    "clip": lambda: hf.CLIPModel(hf.CLIPConfig(vision_config=SIDES, text_config=READS)),
    "altclip": lambda: hf.AltCLIPModel(hf.AltCLIPConfig(vision_config=SIDES, text_config=READS)),
    "pixio": lambda: hf.PixioModel(hf.PixioConfig(**SIDES, n_cls_tokens=2)),
}
UNREAD_ALONE: dict[str, Callable[[], Any]] = {
    "beit": lambda: hf.BeitModel(hf.BeitConfig(**SIDES, use_relative_position_bias=True)),
    "data2vec-vision": lambda: hf.Data2VecVisionModel(
        hf.Data2VecVisionConfig(**SIDES, use_relative_position_bias=True)
    ),
}
SQUARE = {"height": 56, "width": 56}
SIZED = {
    "clip": {"shortest_edge": 56},
    "clip_vision": {"shortest_edge": 56},
    "deit": {"height": 64, "width": 64},
}  # what their middle is cut out of


def saved_alone(kind: str, place: Path) -> str:
    """A folder with a model of pictures alone and its image processor."""
    need_image_processors()
    torch.manual_seed(0)
    model, size = (ALONE | UNREAD_ALONE)[kind]().eval(), SIZED.get(kind)
    rouse(model)
    images = hf.CLIPImageProcessorPil(size=size, crop_size=SQUARE) if size else hf.ViTImageProcessorPil(size=SQUARE)
    images = hf.ViTImageProcessorPil(size={"height": 42, "width": 56}) if kind == "dinov3" else images
    for part in (model, images):
        part.save_pretrained(place / kind)
    return str(place / kind)
