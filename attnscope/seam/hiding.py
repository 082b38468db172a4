"""Keys hidden from queries before the softmax, beyond what the mask hides: the row's other keys take their mass.

Attention knockout (Geva et al. 2023, arXiv 2304.14767). Shapes: B text, H head, Q query, K key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnscope.attention.spec import AttentionSpec
from attnscope.attention.visibility import Visibility
from attnscope.errors import UsageError
from attnscope.seam.call import CallPlace
from attnscope.seam.own import OwnAttention

# True (B or 1, H or 1, Q, K) where a key is hidden; None: none
Hide = Callable[[CallPlace, AttentionSpec], Tensor | None]


def without(
    place: CallPlace, spec: AttentionSpec, own: OwnAttention, hidden_BHQK: Tensor
) -> tuple[AttentionSpec, OwnAttention]:
    """A call in which keys are hidden. Raises UsageError for a query that would see no key."""
    before, device = spec.visible, spec.q_BHQD.device
    seen = before.rows(0, before.queries).to(device)
    left = seen & ~hidden_BHQK.to(device)
    if bool((seen.any(-1) & ~left.any(-1)).any()):
        raise UsageError(f"layer {place.layer}: a query would see no key", "hide fewer keys")
    mask = _added(before.as_mask, left, spec.q_BHQD.dtype).masked_fill(~left, torch.finfo(spec.q_BHQD.dtype).min)
    given: dict[str, Any] = {**own.given, "attention_mask": mask}
    given |= {"is_causal": False} if "is_causal" in own.kwargs else {}
    visible = Visibility(before.queries, before.keys, mask, device=device)
    return replace(spec, visible=visible), own.called(given)


def _added(mask: Tensor | None, left: Tensor, dtype: torch.dtype) -> Tensor:
    """What the mask adds to the logits, in the shape of what is left; 0 where it only hides."""
    if mask is None or mask.dtype == torch.bool:
        return torch.zeros(left.shape, dtype=dtype, device=left.device)
    return mask[..., : left.shape[-1]].to(left.device).expand(left.shape)
