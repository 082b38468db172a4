"""The norms of what keys write, |v W_O|: what they are computed from.

Shapes: H head, V width of v.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from attnscope.errors import UsageError
from attnscope.seam.call import AttentionCall
from attnscope.seam.projection import gram_root


def root_of(call: AttentionCall, out: Mapping[nn.Module, nn.Module]) -> torch.Tensor:
    """What makes norms of a layer's values as they are written. Raises UsageError where they are not v W_O."""
    spec, why = call.spec, ""
    if spec is None:
        why = "does not show the values of its attention"
    elif spec.sinks_scale_output:
        why = "scales what its weights give before it is written"
    elif call.module not in out:
        why = "has no output projection that is given the heads side by side, as they come"
    if spec is None or why:
        raise UsageError(f"this model family {why}, so that no key's share of it is known", "use {weights=softmax}")
    return gram_root(out[call.module], spec.heads, spec.v_BGKV)
