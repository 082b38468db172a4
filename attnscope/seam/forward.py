"""How a model is run: its backbone, its own logits at some positions, without a cache."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attnscope.errors import UsageError
from attnscope.model.modules import hooks_of


def bare_model(model: nn.Module) -> nn.Module:
    """The module inside a torch.compile wrapper."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def config_of(model: nn.Module) -> Any:
    """The config of transformers that a model keeps, None for another module."""
    config = getattr(bare_model(model), "config", None)
    return config if hasattr(config, "get_text_config") else None


def backbone(model: nn.Module) -> nn.Module:
    """The model without its vocabulary projection: 128k tokens of logits are tens of gigabytes.

    Of a model of pictures or sound the whole, where its inner part is not given these: DINOv3's are made patches
    before.
    """
    bare = bare_model(model)
    backbone, main = getattr(bare, "base_model", bare), getattr(bare, "main_input_name", "input_ids")
    if not isinstance(backbone, nn.Module):
        return bare
    return backbone if main == "input_ids" or main in inspect.signature(backbone.forward).parameters else bare


def run_backbone(model: nn.Module, ids_BT: Tensor, **inputs: Any) -> Any:
    """What the backbone gives back. The whole model is called where hooks wait for that, with one row of logits.

    >>> run_backbone(loaded.model, ids_BT).last_hidden_state
    """
    bare, inner = bare_model(model), backbone(model)
    if not hooks_around(model):
        return inner(ids_BT, **inputs)
    outputs: list[Any] = []
    with inner.register_forward_hook(lambda module, args, output: outputs.append(output)):
        names = inspect.signature(bare.forward).parameters
        whole = bare(ids_BT, **inputs, **({"logits_to_keep": 1} if "logits_to_keep" in names else {}))
    return outputs[-1] if outputs else whole


@contextmanager
def temporary(hooks: Iterable[Any]) -> Iterator[None]:
    """While open, hooks that were registered stay; afterwards they are removed, whatever happened.

    >>> with temporary([module.register_forward_hook(note) for module in model.modules()]):
    ...     run_backbone(model, ids_BT)
    """
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def hooks_around(model: nn.Module) -> bool:
    """Whether hooks of the whole model must run, which a call of its backbone alone would pass by.

    Some bring or change weights that all layers need. Those that only carry tensors to a device need not run.

    >>> hooks_around(attnscope.load("demo").model)
    False
    """
    bare = bare_model(model)
    brings = (getattr(hook, "offload", True) for hook in hooks_of(bare))
    return backbone(model) is not bare and bool(bare._forward_pre_hooks or bare._forward_hooks or any(brings))


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that attend, and those around them, by what their classes are called.

    >>> len(attention_modules(attnscope.load("demo").model))
    4
    """
    return [module for module in bare_model(model).modules() if "attention" in type(module).__name__.lower()]


def arguments(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """What the forward of a model's backbone is given, by name."""
    return inspect.signature(backbone(model).forward).parameters


def with_logits(model: nn.Module, ids_BT: Tensor, at: Sequence[int], inputs: Mapping[str, Any]) -> tuple[Any, Tensor]:
    """What the whole model gives back, and its own logits at some positions, (B, len(at), vocabulary)."""
    tokens = ids_BT.shape[1]
    wrong = next((place for place in at if not -tokens <= place < tokens), None)
    if wrong is not None:
        raise UsageError(f"there is no token {wrong} in a text of {tokens}", "name positions of the text")
    first = min((place % tokens for place in at), default=0)
    rows = torch.tensor([place % tokens for place in at], dtype=torch.long, device=ids_BT.device)
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        output = model(ids_BT, **inputs)
        return output, output.logits[:, rows.to(output.logits.device)]
    if hooks_of(model):  # accelerate's bring a tensor to the first device, and the hidden states are on the last
        output = model(ids_BT, logits_to_keep=tokens - first, **inputs)
        return output, output.logits[:, (rows - first).to(output.logits.device)]
    output = model(ids_BT, logits_to_keep=rows, **inputs)
    return output, output.logits


def without_cache(model: nn.Module) -> dict[str, Any]:
    """The argument that leaves out the cache, where the model has one."""
    names = inspect.signature(model.forward).parameters
    return {"use_cache": False} if {"use_cache", "kwargs"} & names.keys() else {}
