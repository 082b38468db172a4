"""The model of transformers in an object that somebody handed over: itself, or inside what wraps or holds it.

The object's own entries are read, never what it answers to a name: some objects of other libraries answer to every one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from attnscope.errors import UsageError
from attnscope.model import adapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def model_inside(holder: Any) -> PreTrainedModel:
    """The model that torch.compile, PEFT or a peer's object holds, its adapters in it; a model itself.

    A module of torch that keeps a config and no model of transformers is itself read as one. Raises UsageError where
    there is none, or several; ModelError where its adapter is more than layers of the model or tokens before the text.

    >>> model_inside(TransformersModel("gpt2", dispatch=True))  # nnsight's
    GPT2LMHeadModel(...)
    """
    from torch import nn

    models = list({id(model): model for model in _models(holder)}.values())
    if len(models) == 1:
        return models[0]
    if isinstance(holder, nn.Module) and hasattr(holder, "config"):
        return holder  # somebody's own code, of the same kind
    name = type(holder).__name__
    if models:
        raise UsageError(f"expected one model of transformers, got {name} that holds {len(models)}", "pass one of them")
    kind = "a torch module of other code" if isinstance(holder, nn.Module) else "which holds none"
    raise UsageError(
        f"expected a model of transformers (PreTrainedModel), got {name}, {kind}",
        "pass a PreTrainedModel, or an object that holds one",
    )


def _models(holder: Any) -> Iterator[PreTrainedModel]:
    """The outermost models in an object: in a module of torch at any depth, in another object among its own entries."""
    from torch import nn
    from transformers import PreTrainedModel

    if not isinstance(holder, nn.Module):
        for value in getattr(holder, "__dict__", {}).values():
            if isinstance(value, nn.Module):
                yield from _models(value)
        return
    module = adapters.bare(holder)
    if isinstance(module, PreTrainedModel):
        yield module
        return
    for part in module.children():
        yield from _models(part)
