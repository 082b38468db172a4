"""Uniform attention over the visible keys: the null that a head's score is read against.

Shapes: B text, Q query, K key, M feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnscope.attention import questions as ask
from attnscope.attention.operator import AttentionOperator
from attnscope.attention.rows import asked_key
from attnscope.attention.visibility import Visibility


class UniformAttention(AttentionOperator):
    """Uniform attention as an operator: every visible key gets 1 / (how many there are).

    It has one head for all, or, where the mask differs from head to head, as many as the mask.

    Without a mask a query sees one run of keys, and every answer is read off sums over the keys so far: O(K), where
    rows would take O(Q K).

    Example:
        UniformAttention(Visibility(4, 4)).entropy()  # ln 1, ln 2, ln 3, ln 4
    """

    def __init__(self, visible: Visibility) -> None:
        texts, heads, _ = visible.counts_BHQ.shape
        super().__init__(texts, heads, visible, None, visible.counts_BHQ.device)
        self._share_BHQ = 1 / visible.counts_BHQ.float().clamp_min(1)

    def rows(self, start: int, stop: int) -> Tensor:
        return self.visible.rows(start, stop) * self._share_BHQ[..., start:stop, None]

    def together(self, questions: Iterable[ask.Question]) -> Mapping[ask.Question, Any]:
        """From the counts where they tell, else from the rows."""
        every = list(questions)
        forms = BY_COUNT if self._run_Q2 is None else {**BY_COUNT, **BY_RUN}
        direct = {question: forms[type(question)](self, question) for question in every if type(question) in forms}
        return {**super().together([question for question in every if question not in direct]), **direct}

    def _one_key(self, question: ask.At | ask.Back | ask.Key) -> Tensor:
        return self.visible.at(asked_key(question, self.visible).to(self.device)) * self._share_BHQ

    def _entropy(self, question: ask.Entropy) -> Tensor:
        count_BHQ = self.visible.others_BHQ if question.skip_key0 else self.visible.counts_BHQ
        return count_BHQ.float().clamp_min(1).log()

    def _largest(self, question: ask.MaxWeight) -> Tensor:
        share_BHQ, others_BHQ = self._share_BHQ, self.visible.others_BHQ
        return share_BHQ.masked_fill(others_BHQ == 0, torch.nan) if question.skip_key0 else share_BHQ

    def _features(self, question: ask.Features) -> Tensor:
        features_BKM = question.features.to(self.device, torch.float64)
        features_BKM = features_BKM if features_BKM.ndim == 3 else features_BKM[None]
        sums_BKM = torch.nn.functional.pad(features_BKM.cumsum(1), (0, 0, 1, 0))
        first_Q, past_Q = self._runs
        return self._of_counts((sums_BKM[:, past_Q] - sums_BKM[:, first_Q])[:, None])

    def _distance(self, question: ask.Distance) -> Tensor:
        first_Q, past_Q = self._runs
        return (self.visible.position_Q - (first_Q + past_Q - 1) / 2)[None, None]

    def _equal_labels(self, question: ask.EqualLabels) -> Tensor:
        first_Q, past_Q = self._runs
        past_Q = past_Q.minimum(self.visible.position_Q - question.gap + 1).maximum(first_Q)
        K = self.keys + 1  # positions 0 to K, so that the end of a run is told from the next label's start
        sorted_BK = (question.key_label_BK * K + torch.arange(self.keys, device=self.device)).sort().values
        label_BQ = question.query_label_BQ * K
        count_BQ = torch.searchsorted(sorted_BK, label_BQ + past_Q) - torch.searchsorted(sorted_BK, label_BQ + first_Q)
        return self._of_counts(count_BQ[:, None, :, None])[..., 0]

    def _window(self, question: ask.Window) -> Tensor:
        first_Q, past_Q = self._runs
        past_Q = past_Q.minimum(self.visible.position_Q + 1)
        count_Q = (past_Q - first_Q.maximum(past_Q - question.width)).clamp_min(0)
        return self._of_counts(count_Q[None, None, :, None])[..., 0]

    def _received(self, question: ask.Received) -> Tensor:
        """Every query gives its share to the keys of its run: added where the run begins, taken away past its end."""
        share_BHQ = question.query_share_BQ.to(self.device, torch.float64)[:, None] * self._share_BHQ
        steps_BHK = share_BHQ.new_zeros(*share_BHQ.shape[:2], self.keys + 1)
        for edge_Q, sign in zip(self._runs, (1, -1), strict=True):
            steps_BHK.index_add_(-1, edge_Q, share_BHQ, alpha=sign)
        return steps_BHK.cumsum(-1)[..., :-1].float()

    def _of_counts(self, sums_BHQM: Tensor) -> Tensor:
        return (sums_BHQM * self._share_BHQ[..., None]).float()

    @property
    def _runs(self) -> tuple[Tensor, Tensor]:
        assert self._run_Q2 is not None
        first_Q, past_Q = self._run_Q2.unbind(-1)
        return first_Q, past_Q

    @cached_property
    def _run_Q2(self) -> Tensor | None:
        """The first visible key of each query and the one after its last; None where it may be in pieces."""
        visible = self.visible
        if not visible.by_position:
            return None
        past_Q = visible.position_Q + 1 if visible.causal else torch.full_like(visible.position_Q, self.keys)
        first_Q = torch.zeros_like(past_Q)
        if visible.window is not None:
            first_Q = (visible.position_Q - visible.window + 1).clamp_min(0)
        return torch.stack([first_Q, past_Q], -1)


Form = Callable[[UniformAttention, Any], Tensor]
BY_COUNT: Mapping[type[ask.Question], Form] = {
    ask.RowSum: lambda P, question: (P.visible.counts_BHQ > 0).float(),
    ask.At: UniformAttention._one_key,
    ask.Back: UniformAttention._one_key,
    ask.Key: UniformAttention._one_key,
    ask.Entropy: UniformAttention._entropy,
    ask.SumOfSquares: lambda P, question: P._share_BHQ,
    ask.MaxWeight: UniformAttention._largest,
    ask.Holding: lambda P, question: (-(-P.visible.counts_BHQ * question.percent // 100)).float(),
}
BY_RUN: Mapping[type[ask.Question], Form] = {
    ask.Features: UniformAttention._features,
    ask.Distance: UniformAttention._distance,
    ask.EqualLabels: UniformAttention._equal_labels,
    ask.Window: UniformAttention._window,
    ask.Received: UniformAttention._received,
}
