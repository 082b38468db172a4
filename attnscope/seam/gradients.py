"""Passes that need gradients, whatever mode their caller is in: `torch.no_grad()`, `torch.inference_mode()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from attnscope.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

F = TypeVar("F", bound=Callable[..., Any])


def with_gradients(function: F) -> F:
    """Decorate a function, or a generator, that follows gradients: while it runs, they are kept.

    Tensors that its caller made in inference mode have to be cloned before they take part.

        >>> @with_gradients
        ... def backward(passes, batch): ...
    """
    # enable_grad has no effect in inference mode, so that mode is left first.
    return torch.inference_mode(False)(torch.enable_grad()(function))


def check_gradients(model: nn.Module) -> None:
    """Raise UsageError for weights that were made in inference mode: nothing computed with them has a gradient."""
    if any(weight.is_inference() for weight in model.parameters()):
        raise UsageError(
            "the model's weights were made in torch.inference_mode(), and this needs gradients",
            "load the model outside torch.inference_mode()",
        )
