"""Tiny models whose attention has something to say: no parameter at its default, so that nothing left out goes unseen.

A freshly made model has zeros for biases, ones for norms, and weights so small that every row is nearly uniform: there
a dropped bias, a norm without its weight or a scale off by 1 % change next to nothing.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama import modeling_llama

from attnscope.certificate.check import check_parity
from attnscope.certificate.verdicts import Difference, Level
from attnscope.errors import ModelError
from attnscope.model.geometry import geometry_of
from attnscope.model.loaded import LoadedModel
from attnscope.reference.layouts import layout_of
from helpers.families import WITHOUT_ATTENTION, tiny_model
from helpers.families import _shrunk as shrunk

TOKENS = 24  # longer than the tiny windows of 8


# What `families.tiny_config` cannot make: sizes of a nested config, and decoders whose config is not their type's.
SLIDING = {  # of the sliding layers of dots3_note, which have heads of their own
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 32,
    "swa_v_head_dim": 16,
    "swa_qk_nope_head_dim": 24,
    "swa_q_lora_rank": 32,
    "swa_kv_lora_rank": 32,
}
NESTED = {
    "dots3_note_text": SLIDING,
    "dots3_note": {
        "text_config": SLIDING,
        "vision_config": {"hidden_size": 64, "adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
}
DECODERS = {"musicgen": "musicgen_decoder", "musicgen_melody": "musicgen_melody_decoder"}
NOT_MADE = {
    "gemma3n": "its vision tower needs the timm package",
    "gemma4_assistant": "transformers refuses every config of it",
    "gemma4_unified_assistant": "it runs only together with the model that it assists",
}
CODEBOOKS = 4  # musicgen reads as many rows of ids for one text
TYPES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(NOT_MADE) - set(WITHOUT_ATTENTION))


def within(difference: Difference, atol: float) -> bool:
    """Whether what was measured is at most atol, whatever was allowed of it; NaN is not."""
    return replace(difference, weights_allowed=atol, output_allowed=atol).holds


def roused_model(model_type: str, **overrides: Any) -> Any:
    """A tiny model of this family with every parameter drawn at random, norms and biases too.

    A family's own is made once, and each caller has a copy, which takes a quarter of the time.
    """
    model = _made(model_type, **overrides) if overrides else deepcopy(_kept(model_type))
    torch.manual_seed(0)  # what is drawn next does not depend on who asked first
    return model


@cache
def _kept(model_type: str) -> Any:
    return _made(model_type)


def _made(model_type: str, **overrides: Any) -> Any:
    if model_type in DECODERS:
        model = _decoder(model_type)
    else:
        model = tiny_model(model_type, **NESTED.get(model_type, {}), **overrides)
    rouse(model)
    return model


def ids_for(model_type: str, seed: int = 0, tokens: int = TOKENS) -> torch.Tensor:
    """(B, T) token ids, of as many rows as the family reads for one text."""
    rows = CODEBOOKS if model_type in DECODERS else 1
    return torch.randint(6, 128, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def _decoder(model_type: str) -> Any:
    torch.manual_seed(0)
    config_class = CONFIG_MAPPING[DECODERS[model_type]]
    config = config_class(**shrunk(config_class()))
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    return model_class._from_config(config, attn_implementation="eager").eval().requires_grad_(False)


def rouse(model: nn.Module, seed: int = 1) -> None:
    """Draw every parameter: matrices keep the size of what goes through them, vectors move off 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "embed_positions" in name:  # RoFormer keeps the sines and cosines of its positions there
            continue
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        owner = name.split(".")[-2] if "." in name else name
        if parameter.dim() > 1 and "embed" not in owner and "norm" not in owner:
            parameter.data.copy_(noise * 0.7 * min(parameter.shape[-2:]) ** -0.5)
        elif parameter.dim() > 1:
            parameter.data.copy_(noise)
        else:
            parameter.data.add_(0.2 * noise)


def as_loaded(model: Any) -> LoadedModel:
    """What `load` gives, for a model made in memory."""
    return LoadedModel(
        model=model,
        tokenizer=None,
        geometry=geometry_of(model.config, count=False),
        name=getattr(model.config, "model_type", "model"),
        revision=None,
        device="cpu",
        dtype=str(model.dtype).removeprefix("torch."),
    )


def in_half(model: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model with its parameters in half precision, and its tables as they were: what `from_pretrained` makes."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@dataclass(frozen=True)
class Measured:
    """How far one type or case gets: its layout, the level of its weakest layer, and the largest differences."""

    layout: str
    level: str
    holds: bool
    weights: float | None
    output: float | None
    why: str


def measure(model_type: str, level: Level = "full", **overrides: Any) -> Measured:
    """Hold a roused tiny model of this family against the oracle."""
    model = roused_model(model_type, **overrides)
    layout = layout_of(model.config.get_text_config(decoder=True))
    name = layout.text if layout else "-"
    loaded = as_loaded(model)
    try:
        report = check_parity(loaded, ids_for(model_type), level=level)
    except ModelError as error:
        return Measured(name, "none", False, None, None, error.message)
    why = "; ".join(dict.fromkeys(layer.why for layer in report.layers if layer.why))
    found = [layer.implementation for layer in report.layers if layer.verdict is not None]
    weights, output = ([getattr(one, name) for one in found] for name in ("weights", "output_relative"))
    return Measured(name, report.level, report.holds, max(weights, default=None), max(output, default=None), why)


def attend_otherwise(
    monkeypatch: pytest.MonkeyPatch, change: Callable[..., tuple[torch.Tensor, float]], layer: int | None = None
) -> None:
    """llama's eager attention with another mask and scale in half precision; the float32 copy stays right.

    layer: the only one that is changed; without it all are.
    """
    original = modeling_llama.eager_attention_forward

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **kwargs: Any) -> Any:
        if query.dtype != torch.float32 and layer in (None, module.layer_idx):
            mask, scaling = change(mask, scaling)
        return original(module, query, key, value, mask, scaling=scaling, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", attend)
