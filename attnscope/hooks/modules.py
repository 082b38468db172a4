"""What enters and leaves every attention module during one forward pass, and the same run again in float32.

The seam observes the attention inside a module; this records what is around it. By hooks, removed when the block ends.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn

from attnscope.hooks.calls import AttentionCall
from attnscope.hooks.engines import Engine
from attnscope.hooks.families import FROM_ENCODER
from attnscope.hooks.listen import listening
from attnscope.hooks.windows import in_one
from attnscope.model.loaded import hooks_of
from attnscope.model.modules import is_prefix
from attnscope.model.selection import is_cross, is_vision

ATTENTION = re.compile(r"attention|attn|mla", re.IGNORECASE)
CACHES = ("past_key_values", "past_key_value", "layer_past", "cache")
HALF = (torch.float16, torch.bfloat16)
FLOAT32_MIN = torch.finfo(torch.float32).min
EAGER_INSTEAD = "its kernel computes no float32, which eager attention did instead"
ROTARY = re.compile(r"Rotary|RoPE|Rope")
# Cosines or sines, the module that gave them, what it was given, and which part of its output they are.
ModuleCall = tuple[Tensor, nn.Module, tuple[Any, ...], dict[str, Any], int]


@dataclass(eq=False)
class ModuleRun:
    """One run of one attention module: what it was given, the attention calls made inside, what it gave.

    hidden_BTE: what the projections read; a batch of one for a vision tower that has its pictures as one row of
    patches. arguments: every argument by the name that the module gives it. model_dtype: what the model runs in,
    float32 where no tensor was given. caveat: what a repetition in float32 kept. original: the run that this one
    repeats. first: the same module of the stack's first layer.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    calls: list[AttentionCall] = field(default_factory=list)
    output_BTE: Tensor | None = None
    caveat: str = ""
    original: ModuleRun | None = None
    first: nn.Module | None = None

    @property
    def stack(self) -> str:
        """The stack of its layer; a copied module no longer knows it."""
        return (self.original or self).calls[0].stack

    @property
    def source_BSE(self) -> Tensor | None:
        """In cross-attention what the encoder gave, None where the module is given no such thing by a known name."""
        if not is_cross(self.stack):
            return None
        arguments = self.arguments
        return next((arguments[name] for name in FROM_ENCODER if isinstance(arguments.get(name), Tensor)), None)

    @property
    def arguments(self) -> Mapping[str, Any]:
        bound = inspect.signature(type(self.module).forward).bind_partial(self.module, *self.args, **self.kwargs)
        return {**bound.arguments, **bound.arguments.get("kwargs", {})}

    @property
    def hidden_BTE(self) -> Tensor:
        return _batched(next(value for value in self._candidates() if isinstance(value, Tensor)))

    def left(self, output: Any) -> Self:
        """The run with what the module gave; the calls of a vision tower, over windows or pictures, are one call."""
        first = _first_tensor(output)
        self.output_BTE = None if first is None else _batched(first)
        self.calls = in_one(self.calls) if is_vision(self.stack) else self.calls
        return self

    @property
    def model_dtype(self) -> torch.dtype:
        if self.original is not None:
            return self.original.model_dtype
        tensors = (value for value in self._candidates() if isinstance(value, Tensor) and value.is_floating_point())
        return next((value.dtype for value in tensors), torch.float32)

    def _candidates(self) -> list[Any]:
        return [self.kwargs.get("hidden_states"), *self.args, *self.kwargs.values()]


def _first_tensor(output: Any) -> Tensor | None:
    """The output itself of what a module returned; a quantised one returns it in a pair, with its factor."""
    if isinstance(output, Tensor):
        return output
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return next((first for part in parts if (first := _first_tensor(part)) is not None), None)


def _batched(x: Tensor) -> Tensor:
    return x[None] if x.ndim == 2 else x


class ModuleRecorder:
    """While open, records every run of an attention module, with the calls made inside it, and passes it to `on_run`.

    engine: that reads the calls of a run's repetition.

    with ModuleRecorder(model, lambda run, recorder: print(run.hidden_BTE.shape)) as recorder:
        listen(model, ids_BT, recorder.record)
    """

    def __init__(
        self, model: nn.Module, on_run: Callable[[ModuleRun, ModuleRecorder], None], engine: Engine | None = None
    ) -> None:
        self.model, self.on_run, self.engine = model, on_run, engine
        self._modules = dict(model.named_modules())
        self._paths = {module: path for path, module in self._modules.items()}
        self._running: list[ModuleRun] = []
        self._rotary: dict[int, ModuleCall] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        for module in self.model.modules():
            name = type(module).__name__
            if ROTARY.search(name):
                self._handles.append(module.register_forward_hook(self._positions, with_kwargs=True))
            elif ATTENTION.search(name):
                self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                self._handles.append(module.register_forward_hook(self._leave))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._running.clear()
        self._rotary.clear()

    def record(self, call: AttentionCall) -> None:
        """Add a call to the run of its module; the call of a module without hooks is a run without inputs."""
        for run in reversed(self._running):
            if run.module is call.module:
                run.calls.append(call.with_weights())
                return
        self.on_run(ModuleRun(call.module, (), {}, [call.with_weights()]), self)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        of_first_layer = re.sub(r"(?<=\.)\d+(?=\.)", "0", self._paths[module], count=1)
        self._running.append(ModuleRun(module, args, kwargs, first=self._modules.get(of_first_layer)))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        run = self._running.pop()
        if run.calls:
            self.on_run(run.left(output), self)

    def _positions(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        for index, part in enumerate(output if isinstance(output, tuple | list) else [output]):
            if isinstance(part, Tensor):
                self._rotary[id(part)] = (part, module, args, kwargs, index)

    def in_float32(self, run: ModuleRun) -> ModuleRun:
        """The run repeated by a float32 copy of its module on the same hidden states.

        Where a probe reads a kernel that computes no float32, as FlashAttention's, eager attention takes its place.
        Cosines and sines are asked again of the model's own rotary module, which rounds them to what it is given.
        """
        if self.engine is not None:
            with suppress(Exception):  # any kernel, asked to run in another dtype
                again = self._repeated(run, self.engine)
                if not any(call.output_BQHV is not None and call.output_BQHV.dtype in HALF for call in again.calls):
                    return again
        again = self._repeated(run, None)
        again.caveat = "; ".join(filter(None, (again.caveat, EAGER_INSTEAD * (self.engine is not None))))
        return again

    def _repeated(self, run: ModuleRun, engine: Engine | None) -> ModuleRun:
        """The run repeated in float32; without an engine that probes, by eager attention where it was probed."""
        module = _float32_copy(run.module)
        kwargs = {name: value for name, value in run.kwargs.items() if name not in CACHES or is_prefix(value)}
        if engine is None and self.engine is not None:
            config: Any = module.config
            config._attn_implementation = "eager"
            if run.calls and not isinstance(kwargs.get("attention_mask"), Tensor):  # as eager attention is given it
                seen = run.calls[0].visible.rows(0, run.calls[0].visible.queries)
                kwargs["attention_mask"] = torch.zeros_like(seen, dtype=torch.float32).masked_fill_(~seen, FLOAT32_MIN)
        again = ModuleRun(module, _mapped(run.args, self._float32), _mapped(kwargs, self._float32))
        again.original, again.first = run, run.first

        # The rounding of tables that the model keeps in half precision, such as GPT-J's sines, stays in the copy.
        rounded = sorted(name for name, buffer in run.module.named_buffers() if buffer.dtype in HALF)
        again.caveat = f"the model keeps its {', '.join(rounded)} in half precision" if rounded else ""
        with listening(module, lambda call: again.calls.append(call.with_weights()), engine=engine), torch.no_grad():
            output = module(*again.args, **again.kwargs)
        return again.left(output)

    def _float32(self, x: Tensor) -> Tensor:
        # Those that accelerate brings to the device of each layer are copies: of the same numbers.
        alike = (call for call in self._rotary.values() if (call[0].shape, call[0].dtype) == (x.shape, x.dtype))
        copied = (call for call in alike if torch.equal(call[0].to(x.device), x))
        rotary = self._rotary.get(id(x)) or next(copied, None)
        if rotary is not None:
            _, module, args, kwargs, index = rotary
            output = module.forward(*_mapped(args, _widened), **_mapped(kwargs, _widened))  # past the hook
            return (output[index] if isinstance(output, tuple | list) else output).to(x.device)
        if x.ndim == 4 and x.dtype in HALF:  # what an additive mask hides stays at the end of the range
            return x.float().masked_fill(x == torch.finfo(x.dtype).min, FLOAT32_MIN)
        return _widened(x)


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.is_floating_point() else x


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nested tuples, lists and dicts with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(_mapped(item, change) for item in value)
    if isinstance(value, Mapping):  # a copy, also of what layers of a model hand to each other
        return {key: _mapped(item, change) for key, item in value.items()}
    return value


def _float32_copy(module: nn.Module) -> nn.Module:
    """A copy in float32. Hooks that are methods of another object belong to whoever records, and are not copied."""

    def methods(of: nn.Module) -> list[tuple[dict[int, Any], int, MethodType]]:
        registries = [hooks for part in of.modules() for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        return [
            (hooks, key, hook) for hooks in registries for key, hook in hooks.items() if isinstance(hook, MethodType)
        ]

    # What hooks belong to is not copied: a recorder has all runs, accelerate's hooks the weights of the whole model.
    owners = [hook.__self__ for _, _, hook in methods(module)]
    owners += [hook for part in module.modules() for hook in hooks_of(part)]
    copied = copy.deepcopy(module, {id(owner): owner for owner in owners})
    for hooks, key, _ in methods(copied):
        del hooks[key]
    return copied.float().eval()
