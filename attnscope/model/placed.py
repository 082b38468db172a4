"""Where a model's weights are: on its devices, or as accelerate offloads them, elsewhere until a module runs.

Read off the hooks that accelerate leaves on modules (`_hf_hook`), so that accelerate is not imported for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def hooks_of(module: nn.Module) -> list[Any]:
    """What accelerate does around a module's forward: its hooks, one by one.

    >>> hooks_of(attnscope.load("demo").model)
    []
    """
    hook = getattr(module, "_hf_hook", None)
    return [] if hook is None else list(getattr(hook, "hooks", [hook]))


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; an offloaded one as its module's next run would bring it.

    Those that no one knows where to find stay on the device meta.

    >>> weights_of(nn.Linear(2, 3))["weight"].shape
    torch.Size([3, 2])
    """
    weights = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    for path, hook in _offloading(module):
        prefix = f"{path}." if path else ""
        for name, tensor in weights.items():
            short = name.removeprefix(prefix)
            if tensor.is_meta and name.startswith(prefix) and short in hook.weights_map:
                weights[name] = hook.weights_map[short].to(hook.execution_device, tensor.dtype)
    return weights


def device_of(model: nn.Module) -> torch.device:
    """Where a model's inputs go: its first weight's device, or where that is brought to.

    >>> device_of(attnscope.load("demo").model)
    device(type='cpu')
    """
    device = next(model.parameters()).device
    targets = (hook.execution_device for _, hook in _offloading(model)) if device.type == "meta" else ()
    return torch.device(next((target for target in targets if target is not None), device))


def as_input(x: Tensor, module: nn.Module) -> Tensor:
    """x on the device and in the dtype of a module's weights.

    >>> as_input(torch.ones(1, dtype=torch.float64), nn.Linear(1, 1)).dtype
    torch.float32
    """
    return x.to(device_of(module), next(module.parameters()).dtype)


def _offloading(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, part in module.named_modules():
        yield from ((path, hook) for hook in hooks_of(part) if getattr(hook, "weights_map", None) is not None)
