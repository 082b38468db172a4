"""Which layers of a model attend, read from the code of its modules: for layer types that are not in `TYPES`.

A module attends where its code asks transformers' attention interface. Nothing is run, and no weights are needed.
"""

from __future__ import annotations

import copy
import inspect
import re
from typing import TYPE_CHECKING, Any

from attnscope.model.permits import Permits
from attnscope.stacks import DECODER

if TYPE_CHECKING:
    from torch import nn

INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # what every modelling file of transformers calls it


def layer_of(module: nn.Module, path: str) -> int:
    """The index of a module's layer: its `layer_idx`, or the first number in its path."""
    index = getattr(module, "layer_idx", None)
    if isinstance(index, int) and index >= 0:  # zamba2's shared module says -1
        return index
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", path)
    return int(number[1]) if number else 0


def asks_interface(module: nn.Module) -> bool:
    """Whether the code of a module's forward asks transformers' attention interface.

    >>> asks_interface(model.model.layers[0].self_attn)
    True
    """
    forward = inspect.unwrap(type(module).forward)
    return INTERFACE in getattr(getattr(forward, "__code__", None), "co_names", ())


def attending_layers(config: Any, part: Any, stack: str) -> frozenset[int] | None:
    """The layers of a stack whose modules attend; None where the model of a config cannot be built.

    part: what the model's config has for the stack, or the whole. The model of that part, or the whole, is built on the
    meta device, without code that it brings, once for each config.
    """
    key = stack, config.to_json_string()
    if key not in _found:
        _found.clear()  # one model is read at a time, and asks again for every pass
        answers = (_of_model(built, stack) for built in (part, config))
        _found[key] = next((layers for layers in answers if layers is not None), None)
    return _found[key]


_found: dict[tuple[str, str], frozenset[int] | None] = {}


def _of_model(config: Any, stack: str) -> frozenset[int] | None:
    """The layers that attend in the model of a config; None where it cannot be built."""
    import torch
    from transformers import AutoModel

    permits = Permits()
    try:
        with permits.held(), torch.device("meta"):
            model = AutoModel.from_config(copy.deepcopy(config), trust_remote_code=permits.code)
        part = model.get_decoder() if stack == DECODER else model.get_encoder()
    except Exception:  # any family's constructor, with any config
        return None
    return frozenset(layer_of(module, path) for path, module in part.named_modules() if asks_interface(module))
