"""One layer's attention as a linear operator P: ask it, don't materialise it.

Almost every question about a head is `P @ F` for some features F of the keys, or one entry per row, `P.at(j)`.
Metrics and collectors are written once against `AttentionOperator`; how the answer is found is the subclass's business.
Here are the matrix that a model made, that which a kernel keeps for itself, and uniform attention: the null that a
head's score is read against.

Shapes: B text, H head, G kv head, Q query, K key, M feature, V width of v, r rows that are held.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnscope.attention import questions as ask
from attnscope.attention.questions import Question
from attnscope.attention.rows import TINY, Block, asked_key, read_blocks
from attnscope.attention.spec import AttentionSpec, Visibility, row_blocks
from attnscope.errors import UsageError
from attnscope.utils.memory import free_memory

Kernel = Callable[[Tensor], Tensor]  # values (B, G, K, V) -> what the kernel gives of them, (B, Q, H, V)
SURELY_HELD = 2**28  # bytes of a kernel's matrix that is held whole: to ask for the memory takes longer
SHARE = 4  # a larger one may take one part in so many of what is free


class AttentionOperator(ABC):
    """One layer's attention for a batch of texts: P (B, H, Q, K), rows that sum to 1, or less with sink logits.

    visible: which keys each query may see. spec: q, k and how the family makes its logits, None where it does not show
    them. device: where the answers live. sums_to_one: whether rows are known to sum to 1, so that what is missing from
    one is rounding. finds_largest: whether a row's largest weight is known without its key, which takes another walk.
    signed: whether weights have a sign, see `linear.LinearMap`; the strongest keys are then those with the largest |w|.
    answered_by: who read each kind of question, where it was not the rows of a matrix that is there.
    """

    finds_largest: bool = False
    signed: bool = False

    def __init__(
        self, batch: int, heads: int, visible: Visibility, spec: AttentionSpec | None, device: torch.device
    ) -> None:
        self.batch, self.heads, self.device = batch, heads, device
        self.queries, self.keys = visible.queries, visible.keys
        self.visible = visible
        self.spec = spec
        self.sums_to_one = spec is not None and spec.row_sinks is None
        self.answered_by: dict[str, str] = {}

    @abstractmethod
    def rows(self, start: int, stop: int) -> Tensor:
        """A dense block of query rows, fp32 (B, H, stop - start, K)."""

    def together(self, questions: Iterable[Question]) -> Mapping[Question, Any]:
        """The answers to many questions from one pass over the rows, in blocks of at most `block_bytes`.

        >>> P.together([Entropy(), TopK(5)])[Entropy()].shape
        torch.Size([1, 6, 9])
        """
        distinct = list(dict.fromkeys(questions))
        blocks = (self.block(start, stop) for start, stop in self.blocks())
        return dict(zip(distinct, read_blocks(blocks, distinct), strict=True)) if distinct else {}

    def ask(self, question: Question) -> Any:
        """The answer to one question."""
        return self.together([question])[question]

    def block(self, start: int, stop: int) -> Block:
        """The same rows, and what several questions read off them."""
        return Block(self.rows(start, stop), start, stop, self.visible)

    def row_sum(self) -> Tensor:
        """(B, H, Q): see `questions.RowSum`."""
        return self.ask(ask.RowSum())

    def sink_share(self, row_sum: Tensor) -> Tensor:
        """What each row lacks of 1, given its sum; exactly 0 where no sink logit takes a share."""
        return row_sum * 0 if self.sums_to_one else 1 - row_sum

    def __matmul__(self, features: Tensor) -> Tensor:
        """P @ F: F (K, M) or (B, K, M) -> (B, H, Q, M)."""
        return self.ask(ask.Features(features))

    def at(self, key_BQ: Tensor) -> Tensor:
        """(B, H, Q): the weight of query i on key `key_BQ[b, i]`, (B or 1, Q) or (Q,); 0 where there is none."""
        return self.ask(ask.At(key_BQ if key_BQ.ndim == 2 else key_BQ[None]))

    def entropy(self, skip_key0: bool = False) -> Tensor:
        """(B, H, Q) nats: see `questions.Entropy`."""
        return self.ask(ask.Entropy(skip_key0))

    def received(self, query_share_BQ: Tensor | None = None) -> Tensor:
        """(B, H, K): what each key receives, on average over all queries by default; see `questions.Received`."""
        if query_share_BQ is None:
            query_share_BQ = torch.full((1, self.queries), 1 / self.queries, device=self.device)
        return self.ask(ask.Received(query_share_BQ))

    def topk(self, k: int, heads: Sequence[int] | None = None, skip_key0: bool = False) -> tuple[Tensor, Tensor]:
        """The k largest weights of every row and their keys, (B, heads, Q, k) each: see `questions.TopK`."""
        return self.ask(ask.TopK(min(k, self.keys), None if heads is None else tuple(heads), skip_key0))

    def largest_key(self, query_BH: Tensor, skip_key0: bool = False) -> Tensor:
        """(B, H): the key of the largest weight of one query of each text and head, from q and k.

        Raises UsageError where the family does not show them.
        """
        logits_BHK = self._known_spec.logits_of(query_BH)
        if skip_key0:
            logits_BHK[..., 0] = -torch.inf
        return logits_BHK.argmax(-1)

    def largest_entry(self, query_BH: Tensor, skip_key0: bool = False) -> tuple[Tensor, Tensor]:
        """(B, H) each: of one query of each text and head the weight of the largest size, signed, and its key."""
        entries = torch.stack([self.rows(query, query + 1)[:, :, 0] for query in query_BH.unique().tolist()])
        place_BH = torch.searchsorted(query_BH.unique(), query_BH)[None, :, :, None]
        row_BHK = entries.take_along_dim(place_BH, 0)[0]
        size_BHK = row_BHK.abs()
        if skip_key0:
            size_BHK[..., 0] = -1.0
        key_BH = size_BHK.argmax(-1)
        return row_BHK.gather(-1, key_BH[..., None])[..., 0], key_BH

    @property
    def shows_logits(self) -> bool:
        """Whether `scores` are known."""
        return self.spec is not None

    def scores(self, start: int, stop: int) -> Tensor:
        """Logits of a block of queries, after scale, cap, bias and mask, fp32 (B, H, stop - start, K).

        Raises UsageError where the family does not show them.
        """
        return self._known_spec.logits(start, stop)

    @property
    def _known_spec(self) -> AttentionSpec:
        if self.spec is None:
            raise UsageError("this model family does not show its logits", "use {weights=softmax}")
        return self.spec

    def dense(self) -> Tensor:
        """The whole matrix, fp32 (B, H, Q, K); for those who ask for it."""
        return self.rows(0, self.queries)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Row ranges whose dense block stays within `spec.block_bytes`."""
        return row_blocks(self.queries, self.keys * self.batch * self.heads, self.device)


class DenseAttention(AttentionOperator):
    """P as the matrix that the model's own eager attention returned: exactly Hugging Face's numbers.

    logits_BHQK: what the model's softmax was given, where that was seen and no q and k were.
    """

    def __init__(
        self,
        weights_BHQK: Tensor,
        visible: Visibility,
        spec: AttentionSpec | None = None,
        logits_BHQK: Tensor | None = None,
    ) -> None:
        super().__init__(weights_BHQK.shape[0], weights_BHQK.shape[1], visible, spec, weights_BHQK.device)
        self.weights_BHQK, self.logits_BHQK = weights_BHQK, logits_BHQK
        self._whole: Block | None = None

    def rows(self, start: int, stop: int) -> Tensor:
        return self.weights_BHQK[:, :, start:stop].float()

    @property
    def shows_logits(self) -> bool:
        return super().shows_logits or self.logits_BHQK is not None

    def scores(self, start: int, stop: int) -> Tensor:
        return super().scores(start, stop) if self.logits_BHQK is None else self.logits_BHQK[:, :, start:stop].float()

    def block(self, start: int, stop: int) -> Block:
        if (start, stop) != (0, self.queries):
            return super().block(start, stop)
        self._whole = self._whole or super().block(start, stop)  # of a short text: its check has asked for its sums
        return self._whole


class ProbedAttention(AttentionOperator):
    """P as a kernel applies it, read out of it with columns of the identity in place of the values.

    A kernel gives P V and keeps P for itself. Where V is columns of the identity, what it gives is those columns of P.
    It is called again on the same q, k and mask, as many columns at a time as V is wide: T / V times for T keys. The
    arithmetic is the kernel's own, whichever it is, and so is the dtype. Nothing is called before something is asked.
    Of a long text a part of the rows is held at a time. Every part takes all these calls, since a kernel is given all
    queries of a call.

    kernel: gives what the model's own attention function makes of other values, all else as it was. on_rows: called
    with each block of rows when they are first made.
    """

    spec: AttentionSpec

    def __init__(
        self, spec: AttentionSpec, kernel: Kernel, on_rows: Callable[[Block], object] = lambda block: None
    ) -> None:
        super().__init__(spec.batch, spec.heads, spec.visible, spec, spec.device)
        self.kernel, self.on_rows = kernel, on_rows
        self._held: Tensor | None = None  # (B, H, r, K), of the kernel's dtype
        self._first = 0  # the first query that is held

    @property
    def is_known(self) -> bool:
        """Whether anything was asked, so that there are rows."""
        return self._held is not None

    @property
    def weights_BHQK(self) -> Tensor:
        """The whole matrix, in the kernel's dtype."""
        if self._held is None or self._held.shape[2] < self.queries:
            self._hold(0, self.queries)
        assert self._held is not None
        return self._held

    def rows(self, start: int, stop: int) -> Tensor:
        held = 0 if self._held is None else self._held.shape[2]
        if start < self._first or stop > self._first + held:
            row_bytes, most = self.batch * self.heads * self.keys * self.spec.v_BGKV.element_size(), self.queries
            if row_bytes * self.queries > SURELY_HELD:
                most = max(SURELY_HELD, free_memory(str(self.device)) // SHARE) // row_bytes
            self._hold(start, min(self.queries, max(stop, start + most)))
        assert self._held is not None
        return self._held[:, :, start - self._first : stop - self._first].float()

    @property
    def shows_logits(self) -> bool:
        """What a kernel computes on its way is not known."""
        return False

    def _hold(self, start: int, stop: int) -> None:
        """Make and hold some rows in place of those before, all columns of them."""
        self._held = None
        with torch.no_grad():
            values_BGKV = torch.zeros_like(self.spec.v_BGKV)  # strided as the model's own: the same kernel takes them
            width = values_BGKV.shape[-1]
            for first in range(0, self.keys, width):
                count = min(width, self.keys - first)
                columns = values_BGKV[:, :, first : first + count].diagonal(0, -2, -1)
                columns.fill_(1)
                output_BQHV = self.kernel(values_BGKV)
                columns.fill_(0)
                if self._held is None:
                    shape = self.batch, self.heads, stop - start, self.keys
                    self._held, self._first = output_BQHV.new_empty(shape), start
                self._held[..., first : first + count] = output_BQHV[:, start:stop, :, :count].transpose(1, 2)
        assert self._held is not None
        if self.spec.sinks_scale_output:  # what is left of the output is a factor of all columns, and of no weight
            sums_BHr1 = self._held.sum(-1, keepdim=True, dtype=torch.float32)
            self._held = (self._held / sums_BHr1.clamp_min(TINY)).to(self._held.dtype)
        for a, b in self.blocks():
            if a < stop and b > start:
                a, b = max(a, start), min(b, stop)
                self.on_rows(Block(self.rows(a, b), a, b, self.visible))


class LastQueries(AttentionOperator):
    """P of a text whose last tokens alone have queries, known by theirs over all keys; the rows before are zeros.

    visible: which keys every token sees, as if all had queries.
    """

    def __init__(self, of: AttentionOperator, visible: Visibility) -> None:
        super().__init__(of.batch, of.heads, visible, None, of.device)
        self.of, self.first, self.sums_to_one = of, visible.queries - of.queries, of.sums_to_one

    def rows(self, start: int, stop: int) -> Tensor:
        return self.placed(start, stop, self.of.rows)

    @property
    def shows_logits(self) -> bool:
        return self.of.shows_logits

    def scores(self, start: int, stop: int) -> Tensor:
        return self.placed(start, stop, self.of.scores)

    def placed(self, start: int, stop: int, rows: Callable[[int, int], Tensor]) -> Tensor:
        """A block of rows of the text, of a reader of ranges of the queries that there are."""
        if stop <= self.first:
            return torch.zeros(self.batch, self.heads, stop - start, self.keys, device=self.device)
        return self._whole(rows(max(start - self.first, 0), stop - self.first), stop - start)

    def together(self, questions: Iterable[Question]) -> Mapping[Question, Any]:
        """From the queries that there are; what is no question of these is read off rows."""
        distinct = list(dict.fromkeys(questions))
        known = (question for question in distinct if type(question) in OF_LAST)
        own = {question: OF_LAST[type(question)](question, self.first) for question in known}
        answers = self.of.together(own.values())
        whole = {question: self._answer(question, answers[inner]) for question, inner in own.items()}
        return {**whole, **super().together([question for question in distinct if question not in own])}

    def _answer(self, question: Question, answer: Any) -> Any:
        if isinstance(question, ask.GroupMass | ask.Received | ask.Strongest):  # which have no axis of all queries
            return answer
        if isinstance(answer, tuple):
            return tuple(self._whole(part, self.queries) for part in answer)
        return self._whole(answer, self.queries)

    @staticmethod
    def _whole(values: Tensor, rows: int) -> Tensor:
        """(B, H, q, ...) -> (B, H, rows, ...): zeros before the queries that there are."""
        before = (0, 0) * (values.ndim - 3)
        return torch.nn.functional.pad(values, (*before, rows - values.shape[2], 0))


# How a question about all queries is put to the last ones, from query `first` on.
OF_LAST: Mapping[type[Question], Callable[[Any, int], Question]] = {
    **dict.fromkeys(
        (
            *(ask.RowSum, ask.SizeSum, ask.Entropy, ask.SumOfSquares, ask.MaxWeight, ask.Holding, ask.Distance),
            *(ask.AbsoluteDistance, ask.Back, ask.Key, ask.Window, ask.Features, ask.TopK),
        ),
        lambda question, first: question,
    ),
    ask.At: lambda question, first: ask.At(question.key_BQ[:, first:]),
    ask.EqualLabels: lambda question, first: replace(question, query_label_BQ=question.query_label_BQ[:, first:]),
    ask.GroupMass: lambda question, first: ask.GroupMass(
        question.query_group_BQ[:, first:], question.key_group_BK, question.counts
    ),
    ask.Received: lambda question, first: ask.Received(question.query_share_BQ[:, first:]),
    ask.Strongest: lambda question, first: replace(
        question, query=tuple(tuple(row - first for row in rows) for rows in question.query)
    ),
}


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

    def together(self, questions: Iterable[Question]) -> Mapping[Question, Any]:
        """From the counts where they tell, else from the rows."""
        every = list(questions)
        forms = {**BY_COUNT, **(BY_RUN if self.visible.by_position else {})}
        direct = {question: forms[type(question)](self, question) for question in every if type(question) in forms}
        return {**super().together([question for question in every if question not in direct]), **direct}

    def _one_key(self, question: ask.At | ask.Back | ask.Key) -> Tensor:
        if isinstance(question, ask.Key) and 0 <= question.position < self.keys:
            return self.visible.sees(question.position) * self._share_BHQ
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

    def _equal_labels(self, question: ask.EqualLabels) -> Tensor:
        first_Q, past_Q = self._runs
        past_Q = past_Q.minimum(self.visible.position_Q - question.gap + 1).maximum(first_Q)
        K = self.keys + 1  # positions 0 to K, so that the end of a run differs from the next label's start
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

    @cached_property
    def _runs(self) -> tuple[Tensor, Tensor]:
        """The first visible key of each query and the one after its last, where each sees one run of keys."""
        visible = self.visible
        past_Q = visible.position_Q + 1 if visible.causal else torch.full_like(visible.position_Q, self.keys)
        if visible.window is None:
            return torch.zeros_like(past_Q), past_Q
        return (visible.position_Q - visible.window + 1).clamp_min(0), past_Q


Form = Callable[[UniformAttention, Any], Tensor]
BY_COUNT: Mapping[type[Question], Form] = {
    **dict.fromkeys((ask.RowSum, ask.SizeSum), lambda P, question: (P.visible.counts_BHQ > 0).float()),
    **dict.fromkeys((ask.At, ask.Back, ask.Key), UniformAttention._one_key),
    ask.Entropy: UniformAttention._entropy,
    ask.SumOfSquares: lambda P, question: P._share_BHQ,
    ask.MaxWeight: UniformAttention._largest,
    ask.Holding: lambda P, question: (-(-P.visible.counts_BHQ * question.percent // 100)).float(),
}
BY_RUN: Mapping[type[Question], Form] = {
    ask.Features: UniformAttention._features,
    ask.Distance: lambda P, question: (P.visible.position_Q - (sum(P._runs) - 1) / 2)[None, None],
    ask.EqualLabels: UniformAttention._equal_labels,
    ask.Window: UniformAttention._window,
    ask.Received: UniformAttention._received,
}
