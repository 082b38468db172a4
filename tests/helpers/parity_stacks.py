"""Tiny encoders and encoder-decoders with every parameter drawn at random, and what the oracle makes of them."""

from __future__ import annotations

from typing import Any

import torch

from attnscope.certificate.check import ParityReport, check_parity
from attnscope.model.tasks import model_class, task_of
from helpers.families import VOCABULARY, _shrunk, _update, config_class_of
from helpers.parity_models import as_loaded, rouse

SOURCE, TARGET, WINDOW = 24, 22, 8  # tokens; texts are longer than windows, and than T5's distances of one bucket

# What shrinking alone gets wrong.
NEEDED: dict[str, dict[str, Any]] = {
    "big_bird": {"attention_type": "original_full"},
    "distilbert": {"dim": 64, "hidden_dim": 96},
    "modernbert": {"local_attention": 2 * WINDOW},
    "whisper": {"num_mel_bins": 16, "max_source_positions": SOURCE},
    "speech_to_text": {"num_mel_bins": 16, "input_feat_per_channel": 16, "conv_channels": 32},
    "xmod": {"default_language": "en_XX"},
}


def tiny_stacks(model_type: str, **overrides: Any) -> Any:
    """The config of a tiny model of this family."""
    config_class = config_class_of(model_type)
    arguments = _shrunk(config_class())
    _update(arguments, NEEDED.get(model_type, {}) | overrides)
    return config_class(**arguments)


def stack_model(model_type: str, **overrides: Any) -> Any:
    """A tiny model of this family as attnscope loads it: encoder, or encoder and decoder."""
    config = tiny_stacks(model_type, **overrides)
    torch.manual_seed(0)
    model = model_class(config, task_of(config), model_type)._from_config(config, attn_implementation="eager")
    rouse(model)
    return model.eval().requires_grad_(False)


def texts_for(model: Any) -> dict[str, torch.Tensor]:
    """What `check_parity` is given: ids, and a source of another length where there are two texts; or features."""
    generator = torch.Generator().manual_seed(0)
    source_BT = torch.randint(6, VOCABULARY, (1, SOURCE), generator=generator)
    if not model.config.is_encoder_decoder:
        return {"prompt": source_BT}
    target_BT = torch.randint(6, VOCABULARY, (1, TARGET), generator=generator)
    if model.main_input_name == "input_features":
        mel = getattr(model.config, "num_mel_bins", None) or model.config.input_feat_per_channel
        frames_BMT = torch.randn(1, mel, 2 * SOURCE, generator=generator)
        source = frames_BMT if model.config.model_type == "whisper" else frames_BMT.transpose(1, 2)
        return {"prompt": target_BT, "source": source}
    return {"prompt": target_BT, "source": source_BT}


def parity_of(model: Any, **how: Any) -> ParityReport:
    return check_parity(as_loaded(model), **texts_for(model), **how)
