"""What one attention call computes: q, k, v, and how its logits become weights.

The seam makes one of each call; the dense and the tiled operator, parity and explain read it.

Shapes: B text, H head, G kv head, R heads of a group as rows, Q query, K key, D width of q and k, V width of v.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnscope.attention.visibility import Visibility, hides


@dataclass(eq=False)
class AttentionSpec:
    """One attention call as the model made it: logits are scale * q.k, soft-cap, position bias, mask, in this order.

    q_BHQD, k_BGKD, v_BGKV: after position encoding; H is a multiple of G. softcap: c in c * tanh(logit / c).
    bias: added to the logits, broadcastable to (B, H, Q, K). sinks: sink logits (B or 1, H, Q or 1), None without; they
    take their share of every row, or, with `sinks_scale_output`, of the output alone.
    """

    q_BHQD: Tensor
    k_BGKD: Tensor
    v_BGKV: Tensor
    scale: float
    visible: Visibility
    softcap: float | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    sinks_scale_output: bool = False

    @property
    def batch(self) -> int:
        return self.q_BHQD.shape[0]

    @property
    def heads(self) -> int:
        return self.q_BHQD.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k_BGKD.shape[1]

    @property
    def device(self) -> torch.device:
        return self.q_BHQD.device

    @property
    def row_sinks(self) -> Tensor | None:
        """The sink logits that take a share of the rows, which then sum to less than 1."""
        return None if self.sinks_scale_output else self.sinks

    def logits(self, start: int, stop: int) -> Tensor:
        """Logits (pre-softmax) of a block of queries, fp32 (B, H, stop - start, K); -inf where a mask blanks."""
        q_BGRD = self.q_BHQD[:, :, start:stop].float().reshape(self.batch, self.kv_heads, -1, self.q_BHQD.shape[-1])
        logits = (q_BGRD @ self.k_BGKD.float().mT).view(self.batch, self.heads, stop - start, -1) * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if self.bias is not None:
            logits = logits + self.bias[..., start:stop, :].float()
        mask = self.visible.mask
        if mask is not None and self.visible.additive:  # may carry finite bias; finfo.min stays additive
            added = mask[..., start:stop, : logits.shape[-1]].float()
            return torch.where(hides(added), added, logits + added)  # whatever the logit is, NaN too
        return logits.masked_fill(~self.visible.rows(start, stop), float("-inf"))

    def weights(self, start: int, stop: int) -> Tensor:
        """Weights (post-softmax) of a block of queries, fp32 (B, H, stop - start, K); 0 in a row that sees nothing."""
        return self.normalised(self.logits(start, stop), start, stop)

    def normalised(self, logits: Tensor, start: int, stop: int) -> Tensor:
        """The softmax of the logits of a block of queries; sink logits that take a share of the rows take it."""
        blind = logits.amax(-1, keepdim=True).isneginf()
        if self.row_sinks is not None:
            sink_BHQ = self.row_sinks.float()[..., start:stop] if self.row_sinks.shape[-1] > 1 else self.row_sinks
            logits = torch.cat([logits, sink_BHQ.float().expand(logits.shape[:3])[..., None]], -1)
        return logits.softmax(-1)[..., : self.visible.keys].masked_fill(blind, 0.0)
