"""Embeddings that stand before every text: what prompt tuning and P-tuning learnt, as tokens with ids of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class WithVirtual(nn.Module):
    """A model's input embeddings, and behind them those of its virtual tokens, (V, E): ids that no text has.

    What makes logits of hidden states stays as it was: no virtual token is ever generated.
    """

    def __init__(self, inner: nn.Embedding, virtual_VE: Tensor) -> None:
        super().__init__()
        self.inner, self.first, self.virtual = inner, inner.num_embeddings, len(virtual_VE)
        self.virtual_VE = nn.Parameter(virtual_VE, requires_grad=False)

    @property
    def num_embeddings(self) -> int:
        return self.first + self.virtual

    @property
    def weight(self) -> Tensor:
        return self.inner.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        number_BT = ids_BT - self.first
        of_text_BTE = self.inner(ids_BT.masked_fill(number_BT >= 0, 0))
        virtual_BTE = self.virtual_VE[number_BT.clamp(min=0)].to(of_text_BTE)
        return torch.where((number_BT >= 0)[..., None], virtual_BTE, of_text_BTE)


def put_before(model: PreTrainedModel, virtual_VE: Tensor) -> PreTrainedModel:
    """The model, with embeddings of so many virtual tokens."""
    inner: Any = model.get_input_embeddings()
    model.set_input_embeddings(WithVirtual(inner, virtual_VE.to(inner.weight.device)))
    return model
