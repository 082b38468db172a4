"""P of a layer that attends within pieces of its tokens, such as windows of patches: each piece is asked on its own.

Nothing is made across pieces: questions are put into a piece's own places, and its answers back into the text's.

Shapes: B text, H head, Q query, K key, T token of the text, N token of a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnscope.attention.operator import AttentionOperator, DenseAttention
from attnscope.attention.questions import (
    At,
    Back,
    Entropy,
    Features,
    Holding,
    Key,
    MaxWeight,
    Question,
    Received,
    RowSum,
    SumOfSquares,
    TopK,
)
from attnscope.attention.spec import AttentionSpec
from attnscope.attention.visibility import Visibility


@dataclass(eq=False, kw_only=True)
class PieceVisibility(Visibility):
    """A query sees the tokens of its own piece. piece_T: the number of each token's piece."""

    piece_T: Tensor
    causal: bool = False

    @property
    def by_position(self) -> bool:
        return False

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

    pieces: an operator each, all of whose queries see all of its keys. places: where each one's tokens stand, (N,).
    spec: of the whole, whose logits across pieces its visibility hides; None where the pieces have none.
    """

    def __init__(
        self, pieces: Sequence[AttentionOperator], places: Sequence[Tensor], spec: AttentionSpec | None
    ) -> None:
        count, device = sum(map(len, places)), pieces[0].device
        self.pieces, self.places = pieces, [place_N.to(device) for place_N in places]
        piece_T = torch.empty(count, dtype=torch.long, device=device)
        for number, place_N in enumerate(self.places):
            piece_T[place_N] = number
        visible = PieceVisibility(queries=count, keys=count, device=device, piece_T=piece_T)
        spec = None if spec is None else replace(spec, visible=visible)
        super().__init__(pieces[0].batch, pieces[0].heads, visible, spec)

    @property
    def device(self) -> torch.device:
        return self.pieces[0].device

    def rows(self, start: int, stop: int) -> Tensor:
        found = torch.zeros(self.batch, self.heads, stop - start, self.keys, device=self.device)
        for piece, place_N in zip(self.pieces, self.places, strict=True):
            here = ((place_N >= start) & (place_N < stop)).nonzero()[:, 0]
            if len(here):
                found[:, :, (place_N[here] - start)[:, None], place_N] = _rows(piece, here)
        return found

    def together(self, questions: Iterable[Question]) -> Mapping[Question, Any]:
        asked = list(dict.fromkeys(questions))
        local = [question for question in asked if type(question) in LOCAL]
        parts = [self._of_piece(local, *one) for one in zip(self.pieces, self.places, strict=True)]
        found = {question: self._in_place([part[question] for part in parts]) for question in local}
        return {**found, **super().together([question for question in asked if question not in found])}

    @staticmethod
    def _of_piece(questions: Sequence[Question], piece: AttentionOperator, place_N: Tensor) -> dict[Question, Any]:
        own = {question: LOCAL[type(question)](question, place_N) for question in questions}
        found = piece.together(own.values())
        return {question: _of_text(found[one], question, place_N) for question, one in own.items()}

    def _in_place(self, parts: Sequence[Any]) -> Any:
        if isinstance(parts[0], tuple):
            return tuple(self._in_place(part) for part in zip(*parts, strict=True))
        joined = torch.cat(list(parts), 2)
        found = torch.empty_like(joined)
        found[:, :, torch.cat(self.places)] = joined
        return found


def _rows(piece: AttentionOperator, here_R: Tensor) -> Tensor:
    """Some rows of a piece, wherever they stand, (B, H, R, N)."""
    if isinstance(piece, DenseAttention):
        return piece.weights_BHQK[:, :, here_R].float()
    assert piece.spec is not None
    visible = Visibility(len(here_R), piece.keys, causal=False, device=piece.device)
    return replace(piece.spec, q_BHQD=piece.spec.q_BHQD[:, :, here_R], visible=visible).weights(0, len(here_R))


def _skipping(question: Any, place_N: Tensor) -> Any:
    """Key 0 is the first of the piece that has it."""
    return replace(question, skip_key0=question.skip_key0 and bool(place_N[0] == 0))


def _top(question: TopK, place_N: Tensor) -> Question:
    return replace(_skipping(question, place_N), k=min(question.k, len(place_N)))


def _at(key_BQ: Tensor, place_N: Tensor) -> Question:
    """The keys of the piece's own queries, by their places in it; -1 for those of another piece."""
    same_BNN = key_BQ.to(place_N.device)[..., None] == place_N
    return At(torch.where(same_BNN.any(-1), same_BNN.int().argmax(-1), -1))


# How a question about the text is put to a piece; what is not here is read off rows.
LOCAL: Mapping[type[Question], Callable[[Any, Tensor], Question]] = {
    **dict.fromkeys((RowSum, SumOfSquares, MaxWeight, Holding), lambda question, place_N: question),
    Entropy: _skipping,
    TopK: _top,
    At: lambda question, place_N: _at(question.key_BQ.to(place_N.device)[:, place_N], place_N),
    Back: lambda question, place_N: _at(place_N[None] - question.steps, place_N),
    Key: lambda question, place_N: _at(torch.full_like(place_N, question.position)[None], place_N),
    Features: lambda question, place_N: Features(question.features.to(place_N.device)[..., place_N, :]),
    Received: lambda question, place_N: Received(question.query_share_BQ.to(place_N.device)[:, place_N]),
}


def _of_text(answer: Any, question: Question, place_N: Tensor) -> Any:
    """A piece's answer in the text's numbers: keys where they stand, as many as were asked for."""
    if not isinstance(question, TopK):
        return answer
    weights, keys = answer
    short = (0, question.k - weights.shape[-1])
    weights = torch.nn.functional.pad(weights, short, value=torch.nan)
    return weights, torch.nn.functional.pad(place_N.to(keys.device)[keys], short)
