"""Sounds made of a few sines, and tiny models that read them, saved with feature extractor and tokenizer."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CONFIG_MAPPING,
    GenerationConfig,
    SeamlessM4TFeatureExtractor,
    Speech2TextFeatureExtractor,
    Wav2Vec2FeatureExtractor,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import wrap
from attnscope.model.tasks import model_class, task_of
from helpers.families import _shrunk
from helpers.parity_models import rouse

RATE = 16_000
SPECIAL = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>")
SPECIAL += ("<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")
LAYERS, HEADS, SECONDS = 2, 4, 1  # of the tiny Whisper, which reads sounds of one second as 50 frames of 0.02 s
FRAMES = 50 * SECONDS


def samples(seconds: float, rate: int = RATE, pitch: float = 300.0) -> np.ndarray:
    """A rising tone, (S,) within -1 to 1."""
    time_S = np.arange(round(seconds * rate)) / rate
    return 0.5 * np.sin(2 * np.pi * pitch * time_S * (1 + time_S))


def write_wav(path: Path, samples_SC: np.ndarray, rate: int = RATE, width: int = 2) -> Path:
    """PCM of so many bytes a sample; one channel or several."""
    whole = np.round(samples_SC * (2 ** (8 * width - 1) - 1)).astype(np.int64)
    if width == 1:
        data = (whole + 128).astype(np.uint8).tobytes()
    else:
        data = b"".join(int(one).to_bytes(width, "little", signed=True) for one in whole.ravel())
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1 if samples_SC.ndim == 1 else samples_SC.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(data)
    return path


def whisper_tokenizer() -> Any:
    """Whisper's own class over single bytes and its special tokens."""
    letters = sorted(ByteLevel.alphabet())
    vocab = {one: place for place, one in enumerate([*letters, *SPECIAL])}
    return WhisperTokenizer(vocab=vocab, merges=[], additional_special_tokens=list(SPECIAL[1:]))


def tiny_whisper(**overrides: Any) -> Any:
    """A Whisper of 2 + 2 layers, every parameter drawn at random."""
    tokens = {token: 256 + place for place, token in enumerate(SPECIAL)}
    end = tokens["<|endoftext|>"]
    sizes = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 16}
    sizes |= {f"{part}_layers": LAYERS for part in ("encoder", "decoder")}
    sizes |= {f"{part}_attention_heads": HEADS for part in ("encoder", "decoder")}
    ids = {"pad_token_id": end, "bos_token_id": end, "eos_token_id": end}
    ids |= {
        "decoder_start_token_id": tokens["<|startoftranscript|>"],
        "begin_suppress_tokens": None,
        "tie_word_embeddings": False,
    }
    places = {"max_source_positions": FRAMES, "max_target_positions": 40, "vocab_size": len(tokens) + 256}
    places |= {"tie_word_embeddings": False}
    config = WhisperConfig(**(sizes | ids | places | overrides))
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration._from_config(config, attn_implementation="eager")
    rouse(model)
    starts = {"no_timestamps_token_id": tokens["<|notimestamps|>"], "forced_decoder_ids": [[1, tokens["<|en|>"]]]}
    own = ids | starts | {"return_timestamps": False, "suppress_tokens": list(tokens.values())[1:]}
    model.generation_config = GenerationConfig(**own)
    return model.eval().requires_grad_(False)


def saved_whisper(folder: Path, **overrides: Any) -> Path:
    """The same in a folder, complete."""
    model = tiny_whisper(**overrides)
    model.save_pretrained(folder)
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=SECONDS)
    extractor.save_pretrained(folder)
    whisper_tokenizer().save_pretrained(folder)
    return folder


CONVOLUTIONS = {"conv_dim": [16] * 7, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4}
NEEDED: dict[str, dict[str, Any]] = {
    "data2vec-audio": CONVOLUTIONS | {"num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 5},
    "sew": CONVOLUTIONS | {"conv_dim": [16] * 13},
    "sew-d": CONVOLUTIONS | {"conv_dim": [16] * 13},
    "speech_to_text": {"input_feat_per_channel": 16, "conv_channels": 32, "vocab_size": 2000},
    "moonshine": {"vocab_size": 2000},
    "wav2vec2-bert": {},
}
EXTRACTORS = {
    "speech_to_text": Speech2TextFeatureExtractor(feature_size=16, num_mel_bins=16),
    "wav2vec2-bert": SeamlessM4TFeatureExtractor(),
}


def tiny_listener(model_type: str, tokenizer: Any, folder: Path) -> LoadedModel:
    """A tiny random model of a type that reads sound, its feature extractor in the folder."""
    config_class = CONFIG_MAPPING[model_type]
    config = config_class(**_shrunk(config_class()) | NEEDED.get(model_type, CONVOLUTIONS))
    torch.manual_seed(0)
    model = model_class(config, task_of(config), model_type)._from_config(config, attn_implementation="eager")
    rouse(model)
    EXTRACTORS.get(model_type, Wav2Vec2FeatureExtractor()).save_pretrained(folder)
    model.config.name_or_path = str(folder)
    return wrap(model.eval().requires_grad_(False), tokenizer, model_type)
