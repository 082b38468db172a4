"""A model whose own attention is another in half precision alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama


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
