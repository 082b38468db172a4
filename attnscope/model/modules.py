"""What an adapter puts before every text, as tokens with ids of their own: embeddings, or each layer's keys and values.

Prompt tuning and P-tuning learnt embeddings. Prefix tuning learnt keys and values that no token has made: its tokens
are read with embeddings of 0, and in every layer their keys and values are exchanged for the learnt ones before a query
sees them. So the text's own tokens are what they are in PEFT's model, and the queries of the virtual ones mean nothing.

Shapes: B text, T token, V virtual token, E width, L layer, G kv head, D head dim.
"""

from __future__ import annotations

import copy
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnscope.model.libraries import needed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


CACHE_ARGUMENTS = ("cache", "past_key_values")  # the first from transformers 5.24 on


class WithVirtual(nn.Module):
    """A model's input embeddings, and after them those of its virtual tokens, (V, E): ids that no text has.

    What makes logits of hidden states stays as it was: no virtual token is ever generated. prefix: what the model's
    forward is to be given as its cache where the tokens are keys and values alone, None where they are embeddings.
    """

    def __init__(self, inner: nn.Embedding, virtual_VE: Tensor, prefix: Any = None) -> None:
        super().__init__()
        self.prefix = prefix
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


def sharing(model: PreTrainedModel) -> PreTrainedModel:
    """A second model of the same weights and hooks, whose modules may be exchanged.

    >>> sharing(model).lm_head.weight is model.lm_head.weight
    True
    """
    hooks = (
        hook
        for part in model.modules()
        for them in (part._forward_hooks, part._forward_pre_hooks)
        for hook in them.values()
    )
    return copy.deepcopy(model, {id(shared): shared for shared in (*model.parameters(), *model.buffers(), *hooks)})


def put_before(model: PreTrainedModel, virtual_VE: Tensor) -> PreTrainedModel:
    """The model, with embeddings of so many virtual tokens."""
    inner: Any = model.get_input_embeddings()
    model.set_input_embeddings(WithVirtual(inner, virtual_VE.to(inner.weight.device)))
    return model


def put_in_layers(model: PreTrainedModel, learnt_L2GVD: Tensor) -> PreTrainedModel:
    """The model, with so many virtual tokens that are keys and values of each layer."""
    inner: Any = model.get_input_embeddings()
    none_VE = inner.weight.new_zeros(learnt_L2GVD.shape[3], inner.weight.shape[1])
    learnt_L2GVD = learnt_L2GVD.to(inner.weight)

    def exchanged(given_BGTD: Tensor, learnt_GVD: Tensor) -> Tensor:
        first_GVD = learnt_GVD[:, : given_BGTD.shape[2]]
        return torch.cat([first_GVD.expand(len(given_BGTD), -1, -1, -1), given_BGTD[:, :, first_GVD.shape[1] :]], 2)

    # A cache is what transformers' models ask for keys and values: this one keeps none, and exchanges the first V.
    class Prefix(needed("transformers.cache_utils", "DynamicCache")):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.learnt_L2GVD = learnt_L2GVD

        def update(self, k_BGTD: Tensor, v_BGTD: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            learnt_2GVD = learnt_L2GVD[layer].to(k_BGTD)
            return exchanged(k_BGTD, learnt_2GVD[0]), exchanged(v_BGTD, learnt_2GVD[1])

    model.set_input_embeddings(WithVirtual(inner, none_VE, Prefix()))
    return model


def cache_argument(model: PreTrainedModel) -> str | None:
    """The name by which a model's forward takes a cache, None where it takes none.

    >>> cache_argument(model)
    'past_key_values'
    """
    parameters = signature(model.base_model.forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), None)


def is_prefix(cache: Any) -> bool:
    """Whether a cache keeps nothing of what it is given, and puts the keys and values of prefix tuning in its place."""
    return hasattr(cache, "learnt_L2GVD")
