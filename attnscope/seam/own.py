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
    def given(self) -> dict[str, Any]:
        """The arguments by name."""
        return {**dict(zip(ARGUMENTS, self.args, strict=False)), **self.kwargs}

    def __call__(self) -> tuple[Tensor, Tensor | None]:
        """Output (B, Q, H, V) and weights (B, H, Q, K), None under fused implementations."""
        output, weights = self.attend(self.module, *self.args, **self.kwargs)
        return output, weights

    def rows(self, spec: AttentionSpec, row_R: Tensor, host_R: Tensor) -> Tensor:
        """The output of some queries alone, (B, R, H, V); host_R: the same on the CPU."""
        given = self.given
        asked = {
            **given,
            "query": given["query"][:, :, row_R],
            "attention_mask": _mask_rows(given, spec, row_R, host_R),
        }
        for name in ("position_bias", "sinks"):  # one per query, where the family has them
            if isinstance(given.get(name), Tensor) and given[name].ndim == 4:
                asked[name] = given[name][..., row_R, :]
        output, _ = self.attend(self.module, *(asked.pop(name) for name in ARGUMENTS[:4]), **asked)
        return output


def _mask_rows(given: Mapping[str, Any], spec: AttentionSpec, row_R: Tensor, host_R: Tensor) -> Tensor:
    mask = given.get("attention_mask")
    if isinstance(mask, Tensor):
        return mask[..., row_R, :] if mask.shape[-2] > 1 else mask
    dtype = spec.q_BHQD.dtype

    def make() -> Tensor:
        runs = host_R.split(max(1, len(host_R) // 4))  # a look at a device's would make the host wait
        seen = torch.cat([spec.visible.rows(int(run[0]), int(run[-1]) + 1) for run in runs], 2)
        return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)

    return spec.visible.once(("mask of rows", len(host_R), dtype), make)
