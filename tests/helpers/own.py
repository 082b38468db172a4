"""What a model gives of its own, without attnscope."""

from collections.abc import Sequence
from typing import Any

import torch


def attentions(model: Any, ids: Sequence[int]) -> list[torch.Tensor]:
    """Its weights of one text, a layer (H, Q, K) each."""
    with torch.no_grad():
        found = model(torch.tensor([list(ids)]), output_attentions=True, use_cache=False).attentions
    return [layer[0] for layer in found]
