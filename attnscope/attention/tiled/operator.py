"""Attention answered from q and k in one tiled pass: every statistic of every head, and never an N x N matrix.

Questions are noted first and answered together: while a tile of exponentiated logits is in the cache, all of them read
it. The same pass can return the layer's own output, so that no other attention need run.

    with P.planning():
        measure(P, texts, ids)      # noted, answered with zeros
    measure(P, texts, ids)          # answered, from one pass over the scores

Shapes: B text, H head, G kv head, R heads of a group, Q query, K key, D head dim, M feature, r rows of a tile, n keys
of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnscope.attention.operator import AttentionOperator
from attnscope.attention.tiled.questions import (
    At,
    Between,
    Entropy,
    Feature,
    Features,
    Largest,
    Mass,
    Match,
    Output,
    Product,
    Question,
    Recent,
    Squares,
    TopK,
)
from attnscope.attention.tiled.tiles import TILE_BYTES, Tile, Tiling
from attnscope.attention.visibility import Logits
from attnscope.errors import MemoryLimitError
from attnscope.memory import free_memory, human_bytes, is_out_of_memory

LEAST_TILE = 2**16  # bytes: smaller ones would not save what is missing


@dataclass
class _Plan:
    """The questions of the next pass, and the answers of the last."""

    open: bool = False
    noted: list[Question] = field(default_factory=list)
    answered: list[Question] = field(default_factory=list)


class TiledAttention(AttentionOperator):
    """P known by q, k and how the family makes its logits; answers come from tiles that fit the cache.

    logits: q, k, scale, soft-cap, bias and mask. sinks: (B or 1, H, Q or 1) sink logits, None without; they take their
    share of every row, or, with `sinks_scale_output`, of the output alone. v_BGKD: the values, for `output()`; with
    `answers`, the pass that answers a plan gives the output too.
    """

    def __init__(
        self,
        logits: Logits,
        sinks: Tensor | None = None,
        v_BGKD: Tensor | None = None,
        answers: bool = False,
        sinks_scale_output: bool = False,
    ) -> None:
        assert logits.visible is not None
        super().__init__(logits.q_BHQD.shape[0], logits.q_BHQD.shape[1], logits.visible, logits)
        self.sinks = sinks
        self.v_BGKD = v_BGKD
        self.answers = answers
        self.sinks_scale_output = sinks_scale_output
        self._plan = _Plan()

    @property
    def device(self) -> torch.device:
        return self._logits.q_BHQD.device

    @property
    def _logits(self) -> Logits:
        assert self.logits is not None
        return self.logits

    @contextmanager
    def planning(self) -> Iterator[None]:
        """While open, questions are noted and answered with zeros; one pass answers them all at the end."""
        self._plan.open = True
        try:
            if self.answers:
                self.output()
            yield
        finally:
            self._plan.open = False
        self.sweep(self._plan.noted)

    def output(self) -> Tensor:
        """P V, the call's own output before the projection: (B, Q, H, Dv) in the model's dtype."""
        assert self.v_BGKD is not None
        return self._ask(Output(self.v_BGKD)).transpose(1, 2).to(self._logits.q_BHQD.dtype)

    @property
    def mass(self) -> Tensor:
        return self._ask(Mass())

    def __matmul__(self, features: Tensor) -> Tensor:
        return self._ask(Feature(features) if features.shape[-1] == 1 else Features(features))

    def at(self, key_Q: Tensor) -> Tensor:
        return self._ask(At(key_Q))

    def scores(self, start: int, stop: int) -> Tensor:
        if self._plan.open:  # what a plan reads is thrown away
            return torch.zeros(self.batch, self.heads, stop - start, self.keys, device=self.device)
        return self._logits.rows(start, stop)

    def rows(self, start: int, stop: int) -> Tensor:
        logits = self.scores(start, stop)
        if self.sinks is not None and not self.sinks_scale_output:
            sink_BHQ = self.sinks.float()[..., start:stop] if self.sinks.shape[-1] > 1 else self.sinks.float()
            logits = torch.cat([logits, sink_BHQ.expand(logits.shape[:3])[..., None]], -1)
        return logits.softmax(-1)[..., : self.keys].nan_to_num(0.0)  # a row of a boolean mask that sees nothing

    def entropy(self, skip_first: bool = False) -> Tensor:
        return self._ask(Entropy(skip_first))

    def squares(self) -> Tensor:
        return self._ask(Squares())

    def largest(self) -> Tensor:
        return self._ask(Largest())

    def match_mass(self, query_label_BQ: Tensor, key_label_BK: Tensor, gap: int) -> Tensor:
        return self._ask(Match(query_label_BQ, key_label_BK, gap))

    def recent_mass(self, width: int) -> Tensor:
        return self._ask(Recent(width, self.keys - self.queries))

    def group_mass(self, query_group_BQ: Tensor, key_group_BK: Tensor) -> Tensor:
        return self._ask(Between(query_group_BQ, key_group_BK))

    def topk(self, k: int, heads: Sequence[int] | None = None, skip_first: bool = False) -> tuple[Tensor, Tensor]:
        return self._ask(TopK(min(k, self.keys), range(self.heads) if heads is None else heads, skip_first))

    def _ask(self, question: Question) -> Any:
        known = next((one for one in self._plan.answered + self._plan.noted if one.same(question)), None)
        if known is not None:
            return known.answer
        if self._plan.open:
            question.begin(self)
            self._plan.noted.append(question)
        else:
            self.sweep([question])
        return question.answer

    def sweep(self, questions: Sequence[Question]) -> None:
        """Answer the questions in one pass over the tiles; smaller tiles where memory runs out.

        Raises MemoryLimitError where the smallest do not fit either.
        """
        tile_bytes = _tile_bytes(self.device)
        while not self._pass(questions, tile_bytes):
            tile_bytes //= 2
            if tile_bytes < LEAST_TILE:
                device = str(self.device)
                raise MemoryLimitError(
                    f"memory ran out over {self.keys} tokens: one layer takes {human_bytes(self._bytes)} beside the "
                    f"model, and {device} has {human_bytes(free_memory(device))} left",
                    "shorten the text, ask for fewer keys or heads, or free memory on the device",
                )
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        self._plan.answered += questions

    @property
    def _bytes(self) -> int:
        """Of q, k, v and the output in float32."""
        q, k, v = self._logits.q_BHQD, self._logits.k_BGKD, self.v_BGKD
        return 4 * sum(2 * part.numel() for part in (q, k, k if v is None else v))

    def _pass(self, questions: Sequence[Question], tile_bytes: int) -> bool:
        """Whether a pass with tiles of this size found the memory that it takes."""

        def visit(tile: Tile) -> None:
            for question in questions:
                question.visit(tile)

        try:
            for question in questions:
                question.begin(self)
            self._tiling(questions, tile_bytes).each(visit)
            for question in questions:
                question.end()
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                return False
            raise
        return True

    def _tiling(self, questions: Sequence[Question], tile_bytes: int) -> Tiling:
        top = [question for question in questions if isinstance(question, TopK)]
        heads = sorted({head for question in top for head in question.heads})
        most = max((question.wanted for question in top), default=0)
        products = _side_by_side(questions)
        G = self._logits.k_BGKD.shape[1]

        def columns(text: int) -> Tensor | None:
            parts = [product.columns(text).to(self.device) for product in products]
            return torch.cat([part.expand(G, *part.shape[1:]) for part in parts], -1) if parts else None

        return Tiling(self._logits, self.sinks, self.sinks_scale_output, most, heads, columns, tile_bytes)


def _tile_bytes(device: torch.device) -> int:
    """A tile's size: what suits the device, at most an eighth of what is free on it."""
    wanted = TILE_BYTES.get(device.type, TILE_BYTES["cpu"])
    return min(wanted, max(LEAST_TILE, free_memory(str(device)) // 8)) if device.type == "cuda" else wanted


def _side_by_side(questions: Sequence[Question]) -> list[Product]:
    """The questions that multiply, each given its columns in the common product."""
    products, start = [question for question in questions if isinstance(question, Product)], 0
    for product in products:
        product.span = slice(start, start + product.width)
        start += product.width
    return products
