"""Attention spread evenly over the visible keys: the null that a head's score is read against.

Shapes: B text, Q query, K key, M feature.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from attnscope.attention.operator import RowAttention
from attnscope.attention.visibility import Visibility


class UniformAttention(RowAttention):
    """Evenness as an operator of one head: every visible key gets 1 / (how many there are).

    Without a mask a query sees one run of keys, and every answer is read off sums over the keys so far: O(K), where
    rows would take O(Q K).

    Example:
        UniformAttention(Visibility(4, 4)).entropy()  # ln 1, ln 2, ln 3, ln 4
    """

    def __init__(self, visible: Visibility) -> None:
        super().__init__(visible.counts_BHQ.shape[0], 1, visible, None)
        self._share_BHQ = 1 / visible.counts_BHQ[:, :1].float().clamp_min(1)

    @property
    def device(self) -> torch.device:
        return self._share_BHQ.device

    def rows(self, start: int, stop: int) -> Tensor:
        return self.visible.rows(start, stop)[:, :1] * self._share_BHQ[..., start:stop, None]

    @property
    def mass(self) -> Tensor:
        return (self.visible.counts_BHQ[:, :1] > 0).float()

    def __matmul__(self, features: Tensor) -> Tensor:
        if self._run_Q2 is None:
            return super().__matmul__(features)
        features_BKM = features.to(self.device, torch.float64)
        features_BKM = features_BKM if features.ndim == 3 else features_BKM[None]
        sums_BKM = torch.nn.functional.pad(features_BKM.cumsum(1), (0, 0, 1, 0))
        first_Q, past_Q = self._run_Q2.unbind(-1)
        return self._shared((sums_BKM[:, past_Q] - sums_BKM[:, first_Q])[:, None])

    def at(self, key_Q: Tensor) -> Tensor:
        return self.visible.at(key_Q.to(self.device))[:, :1] * self._share_BHQ

    def entropy(self, skip_first: bool = False) -> Tensor:
        count_BHQ = 1 / self._share_BHQ
        if skip_first:
            first_Q = torch.zeros(self.queries, dtype=torch.long, device=self.device)
            count_BHQ = count_BHQ - self.visible.at(first_Q)[:, :1].float()
        return count_BHQ.clamp_min(1).log()

    def squares(self) -> Tensor:
        return self._share_BHQ

    def largest(self) -> Tensor:
        return self._share_BHQ

    def match_mass(self, query_label_BQ: Tensor, key_label_BK: Tensor, gap: int) -> Tensor:
        if self._run_Q2 is None:
            return super().match_mass(query_label_BQ, key_label_BK, gap)
        first_Q, past_Q = self._run_Q2.unbind(-1)
        past_Q = past_Q.minimum(self._position_Q - gap + 1).maximum(first_Q)
        K = self.keys + 1  # positions 0 to K, so that the end of a run is told from the next label's start
        sorted_BK = (key_label_BK * K + torch.arange(self.keys, device=self.device)).sort().values
        count_BQ = torch.searchsorted(sorted_BK, query_label_BQ * K + past_Q) - torch.searchsorted(
            sorted_BK, query_label_BQ * K + first_Q
        )
        return self._shared(count_BQ[:, None, :, None])[..., 0]

    def recent_mass(self, width: int) -> Tensor:
        if self._run_Q2 is None:
            return super().recent_mass(width)
        first_Q, past_Q = self._run_Q2.unbind(-1)
        past_Q = past_Q.minimum(self._position_Q + 1)
        count_Q = (past_Q - first_Q.maximum(past_Q - width)).clamp_min(0)
        return self._shared(count_Q[None, None, :, None])[..., 0]

    def _shared(self, sums_BHQM: Tensor) -> Tensor:
        return (sums_BHQM * self._share_BHQ[..., None]).float()

    @property
    def _position_Q(self) -> Tensor:
        return torch.arange(self.keys - self.queries, self.keys, device=self.device)

    @cached_property
    def _run_Q2(self) -> Tensor | None:
        """The first visible key of each query and the one after its last; None where a mask decides."""
        visible = self.visible
        if visible.mask is not None:
            return None
        past_Q = self._position_Q + 1 if visible.causal else torch.full_like(self._position_Q, self.keys)
        first_Q = torch.zeros_like(past_Q)
        if visible.window is not None:
            first_Q = (self._position_Q - visible.window + 1).clamp_min(0)
        return torch.stack([first_Q, past_Q], -1)
