"""Which tokens have global attention, in models of windows (Longformer, LED): as their class chooses, or as named.

Such a token sees all others and is seen by all.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnscope.errors import InputError, UsageError, first_line
from attnscope.hooks.forward import GLOBAL, arguments, backbone, bare_model
from attnscope.hooks.listen import running
from attnscope.inputs.tokens import find

if TYPE_CHECKING:
    from attnscope.inputs.prompt import Prompt
    from attnscope.model.loaded import LoadedModel

NONE = "none"  # names no token


def with_global_tokens(loaded: LoadedModel, prompt: Prompt, named: str | None) -> Prompt:
    """The prompt with its global tokens among what the model is given; named: an expression, `none`, or None.

    Raises UsageError for a model that has no such tokens, InputError for an expression that means none, and for a text
    of which the model's class cannot tell them.

        >>> positions(with_global_tokens(longformer, prompt, "first"))
        [0]
    """
    if GLOBAL not in arguments(loaded.model):
        if named is not None:
            raise UsageError(
                f"{loaded.name} has no global attention that tokens could have", "leave out {global_tokens}"
            )
        return prompt
    if named is None:
        mask_BT = chosen_by_class(loaded, torch.tensor([prompt.ids], device=loaded.device))
    else:
        places = [] if named == NONE else find(prompt, named).positions
        mask_BT = torch.zeros(1, len(prompt), dtype=torch.long)
        mask_BT[0, list(places)] = 1
    if mask_BT is None or not mask_BT.any():
        return prompt
    inputs = {**prompt.medium.inputs, GLOBAL: mask_BT.long().cpu()}
    return replace(prompt, medium=replace(prompt.medium, inputs=inputs))


def positions(prompt: Prompt) -> list[int]:
    """The places of the global tokens."""
    mask_BT: Tensor | None = prompt.medium.inputs.get(GLOBAL)
    return [] if mask_BT is None else mask_BT[0].nonzero()[:, 0].tolist()


def chosen_by_class(loaded: LoadedModel, ids_BT: Tensor) -> Tensor | None:
    """The mask that the model's class hands its body, found by its forward until that begins; None for none."""
    from transformers import MODEL_FOR_MULTIPLE_CHOICE_MAPPING

    model, body, handed = bare_model(loaded.model), backbone(loaded.model), dict[str, Any]()
    if body is model:
        return None

    def stop(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        handed.update(kwargs)
        raise _BodyBeginsError

    handle = body.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with running(model, None), suppress(_BodyBeginsError):
            model(ids_BT[:, None] if type(model) in MODEL_FOR_MULTIPLE_CHOICE_MAPPING.values() else ids_BT)
    except Exception as error:  # any class's own code, with any text
        raise InputError(
            f"{type(model).__name__} cannot tell which tokens of this text are global: {first_line(error)}",
            "give both texts of a pair with {pair}, or name the tokens with {global_tokens=first}",
        ) from error
    finally:
        handle.remove()
    return handed.get(GLOBAL)


class _BodyBeginsError(Exception):
    """What follows is not wanted."""
