"""The attention function of a model with the arguments of one call.

Shapes: B text, Q query, R sampled rows, H head, V width of v.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnscope.attention.spec import AttentionSpec

ARGUMENTS = ("query", "key", "value", "attention_mask", "scaling", "dropout")  # of an attention function, by position


@dataclass(frozen=True)
class OwnAttention:
    """The model's own attention function with the arguments of one call, for an engine that wants it run."""

    attend: Callable[..., Any]
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name."""
        return {**dict(zip(ARGUMENTS, self.args, strict=False)), **self.kwargs}

    def __call__(self) -> tuple[Tensor, Tensor | None]:
        """Output (B, Q, H, V) and weights (B, H, Q, K), None under fused implementations."""
        output, weights = self.attend(self.module, *self.args, **self.kwargs)
        return output, weights

    def rows(self, spec: AttentionSpec, row_R: Tensor, host_R: Tensor) -> Tensor:
        """The output of some queries alone, (B, R, H, V); host_R: the same on the CPU."""
        arguments, dtype = self.arguments, spec.q_BHQD.dtype
        arguments["query"] = arguments["query"][:, :, row_R]
        for name in ("position_bias", "sinks"):  # one per query, where the family has them
            if isinstance(arguments.get(name), Tensor) and arguments[name].ndim == 4:
                arguments[name] = arguments[name][..., row_R, :]

        def make_mask() -> Tensor:
            runs = host_R.split(max(1, len(host_R) // 4))  # a look at a device's would make the host wait
            seen = torch.cat([spec.visible.rows(int(run[0]), int(run[-1]) + 1) for run in runs], 2)
            return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)

        # Without a mask a function hides by the order of the queries, which these rows no longer have.
        mask = arguments.get("attention_mask")
        if not isinstance(mask, Tensor):
            arguments["attention_mask"] = spec.visible.once(("mask of rows", len(host_R), dtype), make_mask)
        elif mask.shape[-2] > 1:
            arguments["attention_mask"] = mask[..., row_R, :]
        output, _ = self.attend(self.module, *(arguments.pop(name) for name in ARGUMENTS[:4]), **arguments)
        return output
