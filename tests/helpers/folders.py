"""Tiny random models saved to folders, complete with a tokenizer."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from attnscope.model.loading import DEMO_FOLDER
from helpers.families import tiny_model

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def saved(folder: Path, model_type: str = "llama", shard: str = "5GB", dtype: Any = None, **overrides: Any) -> Path:
    """Save a tiny random model with the tokenizer of the embedded one (which has 2,000 tokens)."""
    return with_tokenizer(tiny_model(model_type, **overrides).to(dtype=dtype), folder, shard)


def with_tokenizer(model: Any, folder: Path, shard: str = "5GB") -> Path:
    """Save a model of 2,000 tokens with the tokenizer of the embedded one."""
    model.save_pretrained(folder, max_shard_size=shard)
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO_FOLDER / name, folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Change values in the config.json of a saved model."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Change the tensors of a saved model: their values, types and names."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.contiguous() for name, tensor in change(load_file(path)).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def rewrite(path: Path, before: bytes, after: bytes) -> None:
    """Change the file in place; its inode, size and time of the last write stay."""
    state, data = path.stat(), path.read_bytes()
    assert data.count(before) == 1
    assert len(before) == len(after)
    with open(path, "r+b") as stream:
        stream.write(data.replace(before, after))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert path.stat().st_mtime_ns == state.st_mtime_ns
