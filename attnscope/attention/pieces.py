"""P of a layer that attends within pieces of its tokens, such as windows of patches: each piece is asked on its own.

Nothing is made across pieces: questions are put into a piece's own places, and its answers back into the text's.

Shapes: B text, H head, Q query, K key, R row, T token of the text, W piece of equal size, N token of a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnscope.attention import questions as ask
from attnscope.attention.operator import AttentionOperator, DenseAttention
from attnscope.attention.spec import AttentionSpec
from attnscope.attention.tiled import TiledAttention
from attnscope.attention.visibility import Visibility


@dataclass(eq=False, kw_only=True)
class PieceVisibility(Visibility):
    """A query sees the tokens of its own piece. piece_T: the number of each token's piece."""

    piece_T: Tensor
    causal: bool = False

    @property
    def by_position(self) -> bool:
        return False

    @cached_property
    def as_mask(self) -> Tensor:
        return self.rows(0, self.queries)

    def rows(self, start: int, stop: int) -> Tensor:
        return (self.piece_T[start:stop, None] == self.piece_T)[None, None]

    def at(self, key_BQ: Tensor) -> Tensor:
        exists_BQ = (key_BQ >= 0) & (key_BQ < self.keys)
        return (exists_BQ & (self.piece_T[key_BQ.clamp(0, self.keys - 1)] == self.piece_T))[:, None]

    @cached_property
    def counts_BHQ(self) -> Tensor:
        return self.piece_T.bincount()[self.piece_T][None, None]

    def cells(self, row_sizes: Sequence[int], column_sizes: Sequence[int]) -> None:
        return None


class PieceAttention(AttentionOperator):
    """A layer's attention known by that of its pieces.

    pieces: operators all of whose queries see all of their keys, each of one piece or of W of equal size as its texts.
    places: the places in the text of the tokens of each one's pieces, (N,) or (W, N); the piece of token 0 has an
    operator of its own. spec: of the whole, whose logits across pieces its visibility hides; None where the pieces have
    none.
    """

    def __init__(
        self, pieces: Sequence[AttentionOperator], places: Sequence[Tensor], spec: AttentionSpec | None
    ) -> None:
        device = pieces[0].device
        self.pieces, self.places = pieces, [torch.atleast_2d(place).to(device) for place in places]
        self.order_T = torch.cat([place_WN.flatten() for place_WN in self.places])
        sizes = [place_WN.shape[1] for place_WN in self.places for _ in place_WN]
        number_T = torch.arange(len(sizes), device=device).repeat_interleave(torch.tensor(sizes, device=device))
        piece_T, count = torch.empty_like(number_T), len(number_T)
        piece_T[self.order_T] = number_T
        visible = PieceVisibility(queries=count, keys=count, device=device, piece_T=piece_T)
        spec = None if spec is None else replace(spec, visible=visible)
        super().__init__(1, pieces[0].heads, visible, spec, device)

    def rows(self, start: int, stop: int) -> Tensor:
        rows_HrK = torch.zeros(self.heads, stop - start, self.keys, device=self.device)
        for piece, place_WN in zip(self.pieces, self.places, strict=True):
            inside_WN = (place_WN >= start) & (place_WN < stop)
            [some] = inside_WN.any(1).nonzero(as_tuple=True)
            if len(some):
                at, query = inside_WN[some].nonzero(as_tuple=True)
                rows_RHN = _whole(piece, some)[at, :, query]
                keys_RN, queries_R = place_WN[some[at]], place_WN[some[at], query] - start
                rows_HrK[:, queries_R[:, None], keys_RN] = rows_RHN.transpose(0, 1)
        return rows_HrK[None]

    def together(self, questions: Iterable[ask.Question]) -> Mapping[ask.Question, Any]:
        distinct = list(dict.fromkeys(questions))
        local = [question for question in distinct if type(question) in LOCAL]

        # Each piece is asked in its own places, all questions in one pass.
        parts: dict[ask.Question, list[Any]] = {question: [] for question in local}
        for piece, place_WN in zip(self.pieces, self.places, strict=True):
            own = {question: LOCAL[type(question)](question, place_WN) for question in local}
            answers = piece.together(own.values())
            for question, inner in own.items():
                parts[question].append(_of_text(answers[inner], question, place_WN))
        whole = {question: self._in_place(part) for question, part in parts.items()}
        return {**whole, **super().together([question for question in distinct if question not in whole])}

    def _in_place(self, parts: Sequence[Any]) -> Any:
        """Answers (W, H, N, ...) as the text's, (1, H, T, ...)."""
        if isinstance(parts[0], tuple):
            return tuple(self._in_place(part) for part in zip(*parts, strict=True))
        joined = torch.cat([part.transpose(0, 1).flatten(1, 2) for part in parts], 1)
        ordered = torch.empty_like(joined)
        ordered[:, self.order_T] = joined
        return ordered[None]


class RowsAttention(TiledAttention):
    """P of many short texts, known by q and k: a block of rows of all of them at once, where tiles go text by text."""

    def together(self, questions: Iterable[ask.Question]) -> Mapping[ask.Question, Any]:
        answers = AttentionOperator.together(self, questions)
        self.answered_by.update({type(question).__name__: "rows" for question in answers})
        return answers


def _whole(piece: AttentionOperator, some: Tensor) -> Tensor:
    """The weights of some of an operator's pieces, (some, H, N, N)."""
    if isinstance(piece, DenseAttention):
        return piece.weights_BHQK[some].float()
    assert piece.spec is not None
    q, k, v = (getattr(piece.spec, name)[some] for name in ("q_BHQD", "k_BGKD", "v_BGKV"))
    return replace(piece.spec, q_BHQD=q, k_BGKD=k, v_BGKV=v).weights(0, piece.queries)


def _skipping(question: Any, place_WN: Tensor) -> Any:
    """Key 0 is the first of the piece that has it."""
    return replace(question, skip_key0=question.skip_key0 and bool(place_WN[0, 0] == 0))


def _top(question: ask.TopK, place_WN: Tensor) -> ask.Question:
    return replace(_skipping(question, place_WN), k=min(question.k, place_WN.shape[1]))


def _at(key_WN: Tensor, place_WN: Tensor) -> ask.Question:
    """The keys of the pieces' own queries, by their places in their piece; -1 for those of another."""
    (count, size), last = place_WN.shape, int(place_WN.max())
    spot_T = torch.full((last + 1,), -1, device=place_WN.device)
    spot_T[place_WN] = torch.arange(count * size, device=place_WN.device).view(count, size)
    spot_WN = torch.where((key_WN >= 0) & (key_WN <= last), spot_T[key_WN.clamp(0, last)], -1)
    own_W1 = torch.arange(count, device=place_WN.device)[:, None]
    return ask.At(torch.where(spot_WN.div(size, rounding_mode="floor") == own_W1, spot_WN % size, -1))


def _of_tokens(given_T: Tensor, place_WN: Tensor) -> Tensor:
    """What is given of the text's tokens, (T, ...), in their pieces, (W, N, ...)."""
    return given_T.to(place_WN.device)[place_WN]


# How a question about the text is put to its pieces; what is not here is read off rows.
LOCAL: Mapping[type[ask.Question], Callable[[Any, Tensor], ask.Question]] = {
    **dict.fromkeys((ask.RowSum, ask.SumOfSquares, ask.Holding), lambda question, place_WN: question),
    ask.Entropy: _skipping,
    ask.MaxWeight: _skipping,
    ask.TopK: _top,
    ask.At: lambda question, place_WN: _at(_of_tokens(question.key_BQ[0], place_WN), place_WN),
    ask.Back: lambda question, place_WN: _at(place_WN - question.steps, place_WN),
    ask.Key: lambda question, place_WN: _at(torch.full_like(place_WN, question.position), place_WN),
    ask.Features: lambda question, place_WN: ask.Features(_of_tokens(question.features.flatten(0, -2), place_WN)),
    ask.Received: lambda question, place_WN: ask.Received(_of_tokens(question.query_share_BQ[0], place_WN)),
}


def _of_text(answer: Any, question: ask.Question, place_WN: Tensor) -> Any:
    """An answer of pieces in the text's numbers: keys by their places in the text, as many as were asked for."""
    if not isinstance(question, ask.TopK):
        return answer
    weights, keys = answer
    short = (0, question.k - weights.shape[-1])
    keys = place_WN.to(keys.device)[torch.arange(len(keys), device=keys.device)[:, None, None, None], keys]
    return torch.nn.functional.pad(weights, short, value=torch.nan), torch.nn.functional.pad(keys, short)
