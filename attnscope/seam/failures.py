"""What fails while a model runs: its own code, a hook that somebody else left in it, or whoever listens."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from types import CodeType
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from attnscope.errors import ForwardError, first_line
from attnscope.seam.forward import bare_model, config_of
from attnscope.utils.memory import is_out_of_memory

OURS = __name__.partition(".")[0]


@contextmanager
def own_errors(model: nn.Module) -> Iterator[None]:
    """What fails in the model's own code while the block runs, or in a hook on it, is a ForwardError."""
    try:
        yield
    except Exception as error:  # any family's code, with any weights and any text
        if is_out_of_memory(error):
            raise
        if (failed := hook_error(error, model)) is not None:
            raise failed from error

        # The model's own code failed where neither attnscope nor who listens called PyTorch last.
        packages = _packages(model)
        frames = (frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_tb(error.__traceback__))
        callers = [package for package in frames if package == OURS or package in packages - {"torch"}]
        if not callers or callers[-1] == OURS:
            raise
        raise ForwardError(
            f"the forward pass of {_kind(model)} failed: {first_line(error)}",
            "check its config, its weights and its processor's files",
        ) from error


def hook_error(error: BaseException, model: nn.Module) -> ForwardError | None:
    """What to raise for an error that rose in somebody else's hook on the model; None for an error elsewhere."""
    codes, own = set(_hook_codes(bare_model(model))), _packages(model) | {"torch", "accelerate"}
    failed = None
    for frame, _ in walk_tb(error.__traceback__):
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package == OURS:
            failed = None  # who listens was called in the hook, and failed
        elif frame.f_code in codes and package not in own:
            failed = f"{package} ({frame.f_code.co_qualname})"
    if failed is None:
        return None
    return ForwardError(
        f"a hook of {failed} failed in the forward pass of {_kind(model)}: {first_line(error)}",
        "read the model without that hook",
    )


def _kind(model: nn.Module) -> str:
    return getattr(config_of(model), "model_type", None) or type(bare_model(model)).__name__


def _hook_codes(model: nn.Module) -> Iterator[CodeType]:
    """The code of every function that torch calls before or after the forward of one of the model's modules."""
    hooks = [*torch_module._global_forward_hooks.values(), *torch_module._global_forward_pre_hooks.values()]
    for part in model.modules():
        hooks += [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]
    for hook in hooks:
        plain: Any = hook
        while isinstance(plain, functools.partial):
            plain = plain.func
        plain = getattr(plain, "__func__", plain)
        code = getattr(plain, "__code__", None) or getattr(type(plain).__call__, "__code__", None)
        if code is not None:
            yield code


def _packages(model: nn.Module) -> set[str]:
    """Where the code of a model is."""
    return {type(module).__module__.partition(".")[0] for module in bare_model(model).modules()} | {"transformers"}
