"""A CUDA device that is not there: tensors that say `cuda:N` and are held by the CPU, on a machine without CUDA.

    with pretend() as seen:
        place(model, {"model": "cuda:0", "lm_head": "cuda:1"})
        observe(...)                   # an operator that mixes devices raises MixedDevicesError
    seen.waits                         # where the package made the host wait for the device, and how often

Every operator's tensors are held to CUDA's rules before it runs on the CPU: one device, but for numbers beside tensors
in pointwise operators and for indices from the CPU. Gradients are those of the numbers that are held. What it is not:
CUDA's numbers, speed or kernels.
"""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock
from weakref import finalize

import accelerate
import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import attnscope

CPU = torch.device("cpu")
# Whose code is at work is known by where it lies: a folder above it may have the name of a package.
PACKAGE = os.path.join(os.path.dirname(attnscope.__file__), "")
LIBRARIES = tuple(os.path.join(os.path.dirname(one.__file__), "") for one in (transformers, accelerate))
# Operators whose result the host reads, or whose result's shape depends on what the device holds.
WAITS = (
    *("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim"),
    *(
        "aten::unique_consecutive",
        "aten::equal",
        "aten::bincount",
        "aten::is_nonzero",
        "aten::repeat_interleave.Tensor",
    ),
)
COPIES = ("aten::_to_copy", "aten::copy_")
INDEXING = ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_", "aten::_unsafe_index")
HOST_READS = (Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.__bool__)
GRADIENTS = (Tensor.requires_grad.__get__, Tensor.requires_grad_, torch.autograd.grad)  # type: ignore[attr-defined]
# Of a PyTorch that was built for the CPU, and of one for CUDA where there is no driver.
NO_CUDA = ("not linked with support for cuda", "CUDA driver version is insufficient", "Found no NVIDIA driver")


class MixedDevicesError(RuntimeError):
    """What CUDA refuses: tensors of several devices in one operator."""


@dataclass
class Seen:
    """waits: {(what, function of the package): times}. most: how many memory blocks of `large` bytes lived at once."""

    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    large: float = math.inf
    most: int = 0
    _alive: Counter[int] = field(default_factory=Counter)

    def wait(self, what: str) -> None:
        if where := _function():
            self.waits[what, where] += 1

    def born(self, made: Pretended) -> None:
        """Count the memory that a tensor lies in, as long as any tensor does."""
        memory = made.held.untyped_storage()
        if memory.nbytes() >= self.large:
            self._alive[memory.data_ptr()] += 1
            self.most = max(self.most, len(self._alive))
            finalize(made, self._died, memory.data_ptr())

    def _died(self, memory: int) -> None:
        self._alive[memory] -= 1
        if not self._alive[memory]:
            del self._alive[memory]


_seen = Seen()


def _function() -> str:
    """The package's function that is at work, "" where the model's own code is."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(LIBRARIES):
            return ""
        if name.startswith(PACKAGE):
            return frame.f_code.co_qualname
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class Pretended(Tensor):
    """A tensor that says it is elsewhere. held: its numbers, on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, device: Any = None, requires_grad: bool = False) -> Any:
        if device is None:  # as accelerate makes a parameter of the class that it replaces
            return nn.Parameter(held, requires_grad)
        where = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made = Tensor._make_wrapper_subclass(cls, held.size(), **where, device=_device(device))  # type: ignore[attr-defined]
        made.held = held
        _seen.born(made)
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Pretended({tuple(self.shape)}, {self.dtype}, {self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            made = Pretended(self.held.clone(), self.device)
            memo[id(self)] = nn.Parameter(made, requires_grad=False) if isinstance(self, nn.Parameter) else made
        return memo[id(self)]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in HOST_READS:
            _seen.wait(func.__name__)
            return func(args[0].held, *args[1:], **kwargs)
        if func in GRADIENTS:  # known of what is held alone: PyTorch goes backward on devices that are there
            return _differentiated(func, args, kwargs)
        if func in (Tensor.numpy, Tensor.__array__):
            raise TypeError(f"can't convert {args[0].device} device type tensor to numpy")
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            return _indexed(func, *args)
        if func is Tensor.copy_:  # between devices, too
            _note(args[1].device, args[0].device, args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            func(held(args[0]), held(args[1]))
            return args[0]
        if func is nn.functional.scaled_dot_product_attention:  # one kernel on CUDA
            return _aside(func, args, kwargs)
        if func is Tensor.data_ptr:  # by which accelerate knows tied weights
            return args[0].held.data_ptr()
        if func is torch._fused_sdp_choice:
            return 1
        if func is Tensor.contiguous and args[0].held.is_contiguous():
            return args[0]
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            if func == Tensor.data.__set__:  # type: ignore[attr-defined]
                func(*args)
                args[0].held = args[1].held
                return None
            try:
                return func(*_named(args), **_named(kwargs))
            except RuntimeError as error:  # a binding that asks CUDA before it asks any tensor
                if not any(words in str(error) for words in NO_CUDA):
                    raise
        return _aside(func, args, kwargs)


class _Functions(TorchFunctionMode):
    """Makes tensors for a device that PyTorch's own code would look for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(kwargs.get("device"), int):  # a device's number, as accelerate plans with
            kwargs["device"] = _device(kwargs["device"])
        if func is torch.device and isinstance(args[0], int):
            return _device(args[0])
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and kwargs.get("device") is not None:
            device = _device(kwargs.pop("device"))
            return func(*args, **kwargs).to(device)
        if func is Tensor.to:
            args = (args[0], *(_device(one) if type(one) is int else one for one in args[1:]))
            args, kwargs = _named(args), _named(kwargs)
        return func(*args, **kwargs)


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _device(device: Any) -> torch.device:
    device = torch.device(f"cuda:{device}") if isinstance(device, int) else torch.device(device)
    return torch.device("cuda", 0) if device == torch.device("cuda") else device


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """The value with everything in its tuples, lists and dictionaries changed; PyTorch's own takes half of a test."""
    if isinstance(value, tuple | list):
        parts = [_each(change, x) for x in value]
        return type(value)._make(parts) if hasattr(value, "_make") else type(value)(parts)
    if isinstance(value, dict):
        return {key: _each(change, x) for key, x in value.items()}
    return change(value)


def _named(value: Any) -> Any:
    """With every device "cuda" numbered, which only CUDA's own code could do."""
    return _each(lambda x: _device(x) if isinstance(x, torch.device | str) and str(x) == "cuda" else x, value)


def held(value: Any) -> Any:
    def one(x: Any) -> Any:
        if isinstance(x, Pretended):
            return x.held
        return CPU if isinstance(x, torch.device) and x.type == "cuda" else x

    return _each(one, value)


def _pretended(value: Any, device: torch.device) -> Any:
    def one(x: Any) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, Pretended):
            return x
        return Pretended(x, device)

    return _each(one, value)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [x for part in parts for x in _tensors(part)]


def _one_device(func: Any, value: Any) -> torch.device:
    """The device of an operator's tensors, where CUDA would take them together."""
    tensors = _tensors(value)
    if torch.Tag.pointwise in getattr(func, "tags", ()):  # a number beside tensors is an argument of the kernel
        tensors = [x for x in tensors if x.dim() or x.device.type != "cpu"] or tensors
    devices = {x.device for x in tensors}
    if len(devices) > 1:
        raise MixedDevicesError(f"{func}: {[(str(x.device), tuple(x.shape)) for x in tensors]}")
    return devices.pop()


def _differentiated(func: Any, args: Any, kwargs: Any) -> Any:
    found = func(*held(args), **held(kwargs))
    if func is torch.autograd.grad:
        inputs = args[1] if len(args) > 1 else kwargs["inputs"]
        return tuple(_pretended(one, of.device) for one, of in zip(found, inputs, strict=True))
    return args[0] if func is Tensor.requires_grad_ else found


@contextmanager
def _recorded(given: Any) -> Iterator[None]:
    """What is computed of held numbers is differentiable, though operators come here below autograd."""
    keys, allowed = torch._C.DispatchKey, torch._C._SetExcludeDispatchKeyGuard  # type: ignore[attr-defined]
    if not (torch.is_grad_enabled() and any(isinstance(x, Pretended) for x in given)):
        yield
        return
    with allowed(keys.AutogradFunctionality, False), allowed(keys.ADInplaceOrView, False):
        yield


def _aside(func: Any, args: Any, kwargs: Any) -> Any:
    device = _one_device(func, [args, kwargs])
    return _pretended(func(*held(args), **held(kwargs)), device)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """An operator on the CPU's numbers, its result on the device that CUDA would give it."""
    name, tensors = func._schema.name, _tensors([args, kwargs])
    if name in COPIES:
        return _copied(func, args, kwargs)
    if not any(isinstance(x, Pretended) for x in tensors):
        device = _device(kwargs["device"]) if kwargs.get("device") is not None else CPU
    elif name in INDEXING:
        device = _of_index(args[0], args[1], args[2] if len(args) > 2 else None)
    else:
        device = _one_device(func, [args, kwargs])
    if device.type != "cuda":
        return func(*args, **kwargs)
    if name in WAITS or (f"{name}.{func._overloadname}" in WAITS and kwargs.get("output_size") is None):
        _seen.wait(name.removeprefix("aten::"))
    if name == "aten::_softmax" and args[2]:  # half in, float32 out: CUDA alone has it
        args = (args[0].float(), args[1], False)
    if name == "aten::histc" and not args[0].is_floating_point():  # of integers, too
        args = (args[0].float(), *args[1:])
    if name in ("aten::mm", "aten::bmm") and func._overloadname == "dtype":  # and another dtype out
        func, args = func.overloadpacket.default, tuple(x.to(args[2]) for x in args[:2])
    written = {id(x.held): x for x in tensors if isinstance(x, Pretended)}
    with _recorded(tensors):
        result = func(*held(args), **held(kwargs))
    return _each(lambda x: written[id(x)] if id(x) in written else _pretended(x, device), result)


def _copied(func: Any, args: Any, kwargs: Any) -> Any:
    """Copies may cross devices; those from and to the host wait, but for `non_blocking` ones."""
    if func._schema.name == "aten::copy_":
        _note(args[1].device, args[0].device, args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        with _recorded(args):
            func(held(args[0]), held(args[1]))
        return args[0]
    device = _device(kwargs.get("device") or args[0].device)
    if device.type == "meta":
        return func(held(args[0]), **kwargs)
    _note(args[0].device, device, kwargs.get("non_blocking", False))
    with _recorded(args):
        result = func(held(args[0]), **{**kwargs, "device": CPU})
    return _pretended(result, device) if device.type == "cuda" else result


def _note(source: torch.device, to: torch.device, non_blocking: bool) -> None:
    if source != to and CPU in (source, to) and not non_blocking:
        _seen.wait("to host" if to == CPU else "from host")


def _of_index(target: Tensor, index: Sequence[Any], values: Any = None) -> torch.device:
    """The device of what is indexed: indices may come from the host; boolean ones are counted by it."""
    for part in index:
        if isinstance(part, list | range):
            _seen.wait("index from host")
        if not isinstance(part, Tensor):
            continue
        if part.device not in (target.device, CPU):
            raise MixedDevicesError(f"index on {part.device} of a tensor on {target.device}")
        if target.device != CPU and ((part.device == CPU and part.dim()) or part.dtype == torch.bool):
            _seen.wait("index from host" if part.device == CPU else "boolean index")
    if isinstance(values, Tensor) and values.dim() and values.device != target.device:
        raise MixedDevicesError(f"values on {values.device} for a tensor on {target.device}")
    return target.device


def _indexed(func: Any, target: Tensor, index: Any, *value: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    device = _of_index(target, parts)
    for part in parts:
        if isinstance(part, Pretended) and not part.dim() and part.dtype != torch.bool:
            _seen.wait("index read by host")
    for one in value:
        if isinstance(one, Tensor) and one.device != device and one.dim():
            if any(isinstance(part, Tensor | list) for part in parts):
                raise MixedDevicesError(f"values on {one.device} for a tensor on {device}")
            _note(one.device, device, False)
    found = func(held(target), held(index), *held(value))
    return _pretended(found, device) if device.type == "cuda" and isinstance(found, Tensor) else found


def devices_of(model: Any, count: int) -> dict[str, str]:
    """As `device_map` splits: the first layers on the first device, the others and what follows them on the last."""
    base, prefix = model.base_model, model.base_model_prefix
    [stack] = [name for name, part in base.named_children() if isinstance(part, nn.ModuleList)]
    layers, last = len(getattr(base, stack)), f"cuda:{count - 1}"
    places = {
        f"{prefix}.{name}": last if "norm" in name or "ln" in name else "cuda:0" for name, _ in base.named_children()
    }
    del places[f"{prefix}.{stack}"]
    places |= {f"{prefix}.{stack}.{layer}": f"cuda:{layer * count // layers}" for layer in range(layers)}
    head = "cuda:0" if model.config.tie_word_embeddings else last
    return places | {name: head for name, _ in model.named_children() if name != prefix}


def place(model: nn.Module, devices: Mapping[str, str]) -> None:
    """Put modules, by name, on pretended devices, and leave on them what accelerate does for a `device_map`."""
    from accelerate import dispatch_model

    moved: dict[int, tuple[Tensor, nn.Parameter]] = {}  # tied ones stay tied
    for name, device in devices.items():
        for module in model.get_submodule(name).modules():
            for key, one in module._parameters.items():
                if one is not None and not isinstance(one, Pretended):
                    if id(one) not in moved:
                        new = nn.Parameter(Pretended(one.detach(), device), requires_grad=False)
                        moved[id(one)] = one, new  # holding the first keeps its id its own
                    module._parameters[key] = moved[id(one)][1]
            for key, buffer in module._buffers.items():
                if buffer is not None and not isinstance(buffer, Pretended):
                    module._buffers[key] = Pretended(buffer, device)
    if len(set(devices.values())) > 1:
        dispatch_model(model, dict(devices), main_device=next(iter(devices.values())))


@contextmanager
def pretend(devices: int = 2, memory: int = 80 << 30) -> Iterator[Seen]:
    """While open there are CUDA devices, of `memory` bytes each."""
    global _seen
    _seen, before = Seen(), _seen
    cuda: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: devices,
        "mem_get_info": lambda device=None: (memory, memory),
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (9, 0),
        **dict.fromkeys(("synchronize", "empty_cache", "_lazy_init", "set_device"), lambda device=None: None),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), lambda device=None: 0),
    }
    with ExitStack() as stack:
        for name, stand_in in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        stack.enter_context(mock.patch.object(torch.version, "cuda", None))  # Triton's kernels need a driver
        stack.enter_context(_Functions())
        stack.enter_context(_Operators())
        try:
            yield _seen
        finally:
            _seen = before
