"""Which stack of a model an attention module belongs to, and whether its keys are what an encoder gave.

An encoder-decoder says which of its parts the encoder is. Whether a module of the decoder attends to the text so far or
to the encoder's states is seen when it runs, by what it is given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from attnscope.model.families import family
from attnscope.model.selection import CROSS, CROSSING, DECODER, ENCODER, VISION, main_stack
from attnscope.model.tasks import looks_back_alone, task_of

FROM_ENCODER = ("key_value_states", "encoder_hidden_states")  # what most modules call the states of an encoder


class Stacks:
    """The stack of every attention module of a model.

    >>> Stacks(model, model.config).of(model.model.encoder.layers[0].self_attn)
    'encoder'
    """

    def __init__(self, model: nn.Module, config: Any) -> None:
        self.config = config
        self._back_alone: dict[str, bool | None] = {}
        self.stack = DECODER if config is None else main_stack(task_of(config))
        self._of: dict[nn.Module, str] = {}
        self._crossing: dict[nn.Module, bool] = {}
        self._states: set[int] = set()  # where the encoder's output lies
        has_encoder = getattr(config, "is_encoder_decoder", False)
        encoder = getattr(model, "get_encoder", lambda: None)() if has_encoder else None  # of an encoder's, itself
        self.encoder = encoder if isinstance(encoder, nn.Module) else None
        self._mark(self.encoder, ENCODER)
        parts = {VISION: "vision_config"} | dict(family(getattr(config, "model_type", None)).parts)
        stacks = {id(getattr(config, name)): stack for stack, name in parts.items() if getattr(config, name, None)}
        for module in model.modules() if stacks else ():
            if stack := stacks.get(id(getattr(module, "config", None))):
                self._mark(module, stack)

    def _mark(self, part: nn.Module | None, stack: str) -> None:
        crossing = next((crossed for crossed, of in CROSSING.items() if of == stack), stack)
        for module in part.modules() if part is not None else ():
            self._of.setdefault(module, crossing if "Cross" in type(module).__name__ else stack)

    def of(self, module: nn.Module) -> str:
        """The stack of a module that attends now."""
        stack = self._of.get(module, self.stack)
        return CROSS if stack == DECODER and self._crossing.get(module) else stack

    def back_alone(self, stack: str) -> bool | None:
        """Whether queries of a stack see no key after their own, by config and class; None where these do not say."""
        if stack not in self._back_alone:
            self._back_alone[stack] = None if self.config is None else looks_back_alone(self.config, stack)
        return self._back_alone[stack]

    def hook(self, modules: Iterable[nn.Module]) -> list[Any]:
        """Hooks that watch what the attention modules of a decoder with an encoder are given; none without one."""
        if self.encoder is None:
            return []
        watched = [module for module in modules if self._of.get(module) is None]
        return [
            self.encoder.register_forward_hook(self._encoded),
            *(module.register_forward_pre_hook(self._watch, with_kwargs=True) for module in watched),
        ]

    def _encoded(self, module: nn.Module, args: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple | list | Mapping) else output
        self._states = {_place(states)} if isinstance(states, Tensor) else set()

    def _watch(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        arguments = {**dict(zip(_names(type(module).forward), args, strict=False)), **kwargs}
        by_name = any(isinstance(arguments.get(name), Tensor) for name in FROM_ENCODER)
        tensors = (value for value in arguments.values() if isinstance(value, Tensor))
        self._crossing[module] = by_name or any(_place(value) in self._states for value in tensors)


def _place(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor that keeps its numbers elsewhere
        return id(tensor)


@lru_cache
def _names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """What the forward of a class calls its arguments, in order."""
    return tuple(inspect.signature(forward).parameters)[1:]
