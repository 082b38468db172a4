"""What one attention call computes: q, k, v, and how its logits become weights.

The seam makes one of each call; the dense and the tiled operator, parity and explain read it.

Shapes: B text, H head, G kv head, R heads of a group as rows, Q query, K key, D width of q and k, V width of v.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnscope.attention.visibility import Visibility, hides

KEYS_AT_ONCE = 2**15  # that are made float32, where single rows of a long text are wanted


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

    def first_texts(self, count: int) -> AttentionSpec:
        """The call with its first texts alone."""
        visible, (bias, sinks) = self.visible, (self.bias, self.sinks)
        mask = visible.mask if visible.mask is None else visible.mask[:count]
        return replace(
            self,
            q_BHQD=self.q_BHQD[:count],
            k_BGKD=self.k_BGKD[:count],
            v_BGKV=self.v_BGKV[:count],
            visible=replace(visible, mask=mask, _matches={}, _once={}),
            bias=bias if bias is None else bias[:count],
            sinks=sinks if sinks is None else sinks[:count],
        )

    def logits(self, start: int, stop: int) -> Tensor:
        """Logits (pre-softmax) of a block of queries, fp32 (B, H, stop - start, K); -inf where a mask blanks."""
        q_BGRD = self.q_BHQD[:, :, start:stop].float().reshape(self.batch, self.kv_heads, -1, self.q_BHQD.shape[-1])
        logits = (q_BGRD @ self.k_BGKD.float().mT).view(self.batch, self.heads, stop - start, -1) * self.scale
        mask, keys = self.visible.mask, logits.shape[-1]
        added = mask[..., start:stop, :keys] if mask is not None and self.visible.additive else None
        seen = self.visible.rows(start, stop) if added is None else None
        return self._shaped(logits, None if self.bias is None else self.bias[..., start:stop, :], added, seen)

    def output_shares(self, start: int, stop: int) -> Tensor | None:
        """What of a block's weighted values a family writes whose sinks scale its output, (B, H, stop - start, 1).

        None where that is all of them: elsewhere sinks take their share of the rows.
        """
        if self.sinks is None or not self.sinks_scale_output:
            return None
        sinks_BHR = self.sinks.float().expand(-1, -1, self.q_BHQD.shape[2])[..., start:stop]
        return torch.sigmoid(self.logits(start, stop).logsumexp(-1) - sinks_BHR)[..., None]

    def logits_of(self, query_BH: Tensor) -> Tensor:
        """Logits of one query of each text and head, fp32 (B, H, K): `logits`, where each head has a row of its own."""
        at_BH11, shape = query_BH[..., None, None], (self.batch, self.heads, -1, -1)

        def row(values: Tensor) -> Tensor:
            values = values.expand(shape)
            return values.gather(2, at_BH11.expand(-1, -1, 1, values.shape[-1]))

        q_BGRD = row(self.q_BHQD).float().reshape(self.batch, self.kv_heads, -1, self.q_BHQD.shape[-1])
        parts = [q_BGRD @ part.float().mT for part in self.k_BGKD.split(KEYS_AT_ONCE, 2)]
        logits = torch.cat(parts, -1).view(self.batch, self.heads, 1, -1) * self.scale
        visible, mask = self.visible, self.visible.as_mask
        mask = None if mask is None else row(mask[..., : visible.keys])
        added = mask if visible.additive else None
        if mask is None:
            mask = visible.seen_from(visible.position_Q.to(self.device)[at_BH11[..., 0]])
        bias = None if self.bias is None else row(self.bias.expand(*shape[:2], -1, visible.keys))
        return self._shaped(logits, bias, added, None if visible.additive else mask)[:, :, 0]

    def _shaped(self, logits: Tensor, bias: Tensor | None, added: Tensor | None, seen: Tensor | None) -> Tensor:
        """Soft-cap, position bias and mask, additive or of what is seen, in this order."""
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if bias is not None:
            logits = logits + bias.float()
        if added is not None:  # may carry finite bias; finfo.min stays additive
            added = added.float()
            return torch.where(hides(added), added, logits + added)  # whatever the logit is, NaN too
        assert seen is not None
        return logits.masked_fill(~seen, float("-inf"))

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
