"""Attention answered from q and k in one tiled pass: every statistic of every head, and never an N x N matrix.

While a tile of exponentiated logits is in the cache, all questions of a pass read it. The same pass can return the
layer's own output, so that no other attention need run. A short text, whose whole matrix is smaller than a tile, is
answered by its rows. A layer that attends within pieces of its tokens, such as windows of patches, is asked piece by
piece: questions are put into a piece's own places, and its answers back into the text's.

Shapes: B text, H head, G kv head, Q query, K key, D width of q and k, V width of v, R row, T token of the text, W
piece of equal size, N token of a piece.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnscope.attention import questions as ask
from attnscope.attention.operator import AttentionOperator, DenseAttention, ProbedAttention
from attnscope.attention.questions import Question
from attnscope.attention.rows import read_blocks
from attnscope.attention.spec import AttentionSpec, Visibility
from attnscope.attention.tile_readers import OutputReader, ProductReader, Reader, TopKReader, reader_of
from attnscope.attention.tiles import Tile, Tiles, Tiling
from attnscope.errors import MemoryLimitError
from attnscope.utils.memory import free_memory, human_bytes, is_out_of_memory

TILE_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20, "mps": 64 * 2**20}  # of a tile, at most
FEW_ROWS = 8  # where at most one row in so many is asked about, those alone are made
LEAST_TILE = 2**16  # bytes: smaller ones would not save what is missing


class TiledOperator(AttentionOperator):
    """P whose answers come from tiles that fit the cache.

    with_output: the first pass gives the layer's output too. kernel: who reads what `swept` answers. In `answered_by`
    are "tiles" or the kernel, and "rows" for what no tile can.
    """

    kernel: str = ""
    with_output: bool = False
    _output: Tensor | None = None

    @abstractmethod
    def tiles(
        self, most: int, top_heads: Sequence[int], columns: Callable[[int], Tensor | None], tile_bytes: int
    ) -> Tiles:
        """A pass over the tiles, see `Tiles`."""

    @property
    @abstractmethod
    def inputs(self) -> Sequence[Tensor]:
        """What the tiles are made of."""

    @property
    def kv_heads(self) -> int:
        """How many heads the columns have that a tile is multiplied by."""
        return self.heads

    def together(self, questions: Iterable[Question]) -> Mapping[Question, Any]:
        """The answers to many questions from one pass: the kernel's, of the tiles what it leaves, and then of the rows.

        Smaller tiles are taken where memory runs out; raises MemoryLimitError where the smallest do not fit either.
        """
        distinct = list(dict.fromkeys(questions))
        answers = self._noted(self.swept(distinct), self.kernel)
        remaining = [question for question in distinct if question not in answers]
        wants_output = self.with_output and self._output is None

        # Few rows that are asked about are made alone; on a CPU all questions are read from the same tiles.
        of_rows = [question for question in remaining if isinstance(question, ask.Strongest)]
        rows = {row for question in of_rows for queries in question.query for row in queries}
        few = len(of_rows) == len(remaining) and 0 < len(rows) <= self.queries // FEW_ROWS
        if few and self.device.type != "cpu" and not wants_output:
            firsts, lasts = (sorted(row for row in rows if row + step not in rows) for step in (-1, 1))
            most, runs = next(self.blocks())[1], zip(firsts, lasts, strict=True)
            starts = [(a, last + 1) for first, last in runs for a in range(first, last + 1, most)]
            blocks = (self.block(start, min(stop, start + most)) for start, stop in starts)
            answers |= self._noted(dict(zip(remaining, read_blocks(blocks, remaining), strict=True)), "rows")
            remaining = []
        if remaining or wants_output:
            # What suits the device, at most an eighth of what is free on it; smaller where that is not there after all.
            device = str(self.device)
            tile_bytes = TILE_BYTES.get(self.device.type, TILE_BYTES["cpu"])
            if self.device.type == "cuda":
                tile_bytes = min(tile_bytes, max(LEAST_TILE, free_memory(device) // 8))
            while (of_tiles := self._pass(remaining, tile_bytes)) is None:
                tile_bytes //= 2
                if tile_bytes < LEAST_TILE:
                    takes = 4 * sum(2 * part.numel() for part in self.inputs)  # they and the output, in float32
                    raise MemoryLimitError(
                        f"memory ran out over {self.keys} tokens: one layer takes {human_bytes(takes)} on top of "
                        f"the model, and {device} has {human_bytes(free_memory(device))} left",
                        "shorten the text, ask for fewer keys or heads, or free memory on the device",
                    )
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
            answers |= self._noted(of_tiles, "tiles")
            remaining = [question for question in remaining if question not in answers]
        return {**answers, **self._noted(dict(super().together(remaining)), "rows")}

    def swept(self, questions: Sequence[Question]) -> dict[Question, Any]:
        """What a kernel that an operator of this kind has answers, and the output where it is wanted; the tiles: none.

        What is not among the answers is left to the tiles.
        """
        return {}

    def _noted(self, answers: dict[Question, Any], who: str) -> dict[Question, Any]:
        self.answered_by.update({type(question).__name__: who for question in answers})
        return answers

    def _pass(self, questions: Sequence[Question], tile_bytes: int) -> dict[Question, Any] | None:
        """One pass with tiles of this size; None where it did not find the memory that it takes."""
        try:
            readers = {question: reader for question in questions if (reader := reader_of(question, self))}
            output = OutputReader(None, self) if self.with_output and self._output is None else None
            every: list[Reader] = [*readers.values(), *([output] if output else [])]

            def visit(tile: Tile) -> None:
                for reader in every:
                    reader.visit(tile)

            if every:
                # One search of a row serves all that ask for its largest entries.
                top = [reader for reader in every if isinstance(reader, TopKReader)]
                heads = sorted({head for reader in top for head in reader.heads})
                most = max((reader.wanted for reader in top), default=0)

                # All that multiply share one product per tile: each is given its columns in it.
                products, start = [reader for reader in every if isinstance(reader, ProductReader)], 0
                for product in products:
                    product.span = slice(start, start + product.width)
                    start += product.width

                def columns(text: int) -> Tensor | None:
                    parts = [product.columns(text).to(self.device) for product in products]
                    parts = [part.expand(self.kv_heads, *part.shape[1:]) for part in parts]
                    return torch.cat(parts, -1) if parts else None

                self.tiles(most, heads, columns, tile_bytes).each(visit)
            for reader in every:
                reader.end()
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                return None
            raise
        if output:
            self._output = output.answer.transpose(1, 2).to(self.inputs[0].dtype)
        return {question: reader.answer for question, reader in readers.items()}


class TiledAttention(TiledOperator):
    """P known by q, k and how the family makes its logits.

    with_output: the first pass gives the layer's output too, for `output()`.
    """

    spec: AttentionSpec

    def __init__(self, spec: AttentionSpec, with_output: bool = False) -> None:
        super().__init__(spec.batch, spec.heads, spec.visible, spec, spec.device)
        self.with_output = with_output

    def rows(self, start: int, stop: int) -> Tensor:
        return self.spec.weights(start, stop)

    def output(self) -> Tensor:
        """P V, the call's own output before the projection: (B, Q, H, V) in the model's dtype."""
        if self._output is None:
            self.with_output = True
            self.together([])
        assert self._output is not None
        return self._output

    def tiles(
        self, most: int, top_heads: Sequence[int], columns: Callable[[int], Tensor | None], tile_bytes: int
    ) -> Tiles:
        return Tiling(most, top_heads, columns, tile_bytes, self.spec)

    @property
    def inputs(self) -> Sequence[Tensor]:
        return self.spec.q_BHQD, self.spec.k_BGKD, self.spec.v_BGKV

    @property
    def kv_heads(self) -> int:
        return self.spec.kv_heads


SMALL = 2**17  # weights of a call, over all texts and heads; beyond, tiles are shared out among the cores


class SmallAttention(TiledAttention):
    """P of a short text, known by q, k and how the family makes its logits; its rows answer every question."""

    kernel = "rows"

    def rows(self, start: int, stop: int) -> Tensor:
        return self.matrix.weights_BHQK[:, :, start:stop]

    @cached_property
    def matrix(self) -> DenseAttention:
        return DenseAttention(self.spec.weights(0, self.queries), self.visible, self.spec)

    def swept(self, questions: Sequence[Question]) -> dict[Question, Any]:
        if self.with_output and self._output is None:
            weights_BGRK = self.matrix.weights_BHQK.reshape(self.batch, self.spec.kv_heads, -1, self.keys)
            output_BHQV = (weights_BGRK @ self.spec.v_BGKV.float()).view(self.batch, self.heads, self.queries, -1)
            self._output = output_BHQV.transpose(1, 2).to(self.spec.q_BHQD.dtype)
        return dict(self.matrix.together(questions))

    def answered(self, questions: Iterable[Question]) -> None:
        """Note that rows of the matrix were read for these elsewhere, with those of other layers."""
        self._noted(dict.fromkeys(questions), self.kernel)


def is_short(spec: AttentionSpec) -> bool:
    """Whether a call's matrix is small, on a CPU, and gives the call's output."""
    size = spec.batch * spec.heads * spec.visible.queries * spec.visible.keys
    return size <= SMALL and spec.device.type == "cpu" and not spec.sinks_scale_output


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
                if isinstance(piece, DenseAttention | ProbedAttention):
                    weights_WHNN = piece.weights_BHQK[some].float()
                else:
                    assert piece.spec is not None
                    q, k, v = (getattr(piece.spec, name)[some] for name in ("q_BHQD", "k_BGKD", "v_BGKV"))
                    weights_WHNN = replace(piece.spec, q_BHQD=q, k_BGKD=k, v_BGKV=v).weights(0, piece.queries)
                rows_RHN = weights_WHNN[at, :, query]
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
                answer = answers[inner]
                if isinstance(question, ask.TopK):  # keys by their places in the text, as many as were asked for
                    weights, keys = answer
                    short, device = (0, question.k - weights.shape[-1]), keys.device
                    piece_W111 = torch.arange(len(keys), device=device)[:, None, None, None]
                    keys = torch.nn.functional.pad(place_WN.to(device)[piece_W111, keys], short)
                    answer = torch.nn.functional.pad(weights, short, value=torch.nan), keys
                parts[question].append(answer)
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
        return self._noted(dict(AttentionOperator.together(self, questions)), "rows")


def _skipping(question: Any, place_WN: Tensor) -> Any:
    """Key 0 is the first of the piece that has it."""
    return replace(question, skip_key0=question.skip_key0 and bool(place_WN[0, 0] == 0))


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
    ask.TopK: lambda question, place_WN: replace(_skipping(question, place_WN), k=min(question.k, place_WN.shape[1])),
    ask.At: lambda question, place_WN: _at(_of_tokens(question.key_BQ[0], place_WN), place_WN),
    ask.Back: lambda question, place_WN: _at(place_WN - question.steps, place_WN),
    ask.Key: lambda question, place_WN: _at(torch.full_like(place_WN, question.position), place_WN),
    ask.Features: lambda question, place_WN: ask.Features(_of_tokens(question.features.flatten(0, -2), place_WN)),
    ask.Received: lambda question, place_WN: ask.Received(_of_tokens(question.query_share_BQ[0], place_WN)),
}
