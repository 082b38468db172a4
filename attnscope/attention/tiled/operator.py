"""Attention answered from q and k in one tiled pass: every statistic of every head, and never an N x N matrix.

While a tile of exponentiated logits is in the cache, all questions of a pass read it. The same pass can return the
layer's own output, so that no other attention need run.

Shapes: B text, H head, G kv head, Q query, K key, D width of q and k, V width of v.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attnscope.attention.operator import AttentionOperator
from attnscope.attention.questions import Question, Strongest
from attnscope.attention.rows import read_blocks
from attnscope.attention.spec import AttentionSpec
from attnscope.attention.tiled.readers import OutputReader, ProductReader, Reader, TopKReader, reader_of
from attnscope.attention.tiled.tiles import Tile, Tiling
from attnscope.errors import MemoryLimitError
from attnscope.utils.memory import free_memory, human_bytes, is_out_of_memory

TILE_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20, "mps": 64 * 2**20}  # of a tile, at most
FEW_ROWS = 8  # where at most one row in so many is asked about, those alone are made
LEAST_TILE = 2**16  # bytes: smaller ones would not save what is missing


class TiledAttention(AttentionOperator):
    """P known by q, k and how the family makes its logits; answers come from tiles that fit the cache.

    with_output: the first pass gives the layer's output too, for `output()`. kernel: who reads what `swept` answers.
    answered_by: who read each kind of question, "tiles" or the kernel, and "rows" what no tile can.
    """

    spec: AttentionSpec
    kernel: str = ""

    def __init__(self, spec: AttentionSpec, with_output: bool = False) -> None:
        super().__init__(spec.batch, spec.heads, spec.visible, spec, spec.device)
        self.with_output = with_output
        self._output: Tensor | None = None
        self.answered_by: dict[str, str] = {}

    def rows(self, start: int, stop: int) -> Tensor:
        return self.spec.weights(start, stop)

    def output(self) -> Tensor:
        """P V, the call's own output before the projection: (B, Q, H, V) in the model's dtype."""
        if self._output is None:
            self.with_output = True
            self.together([])
        assert self._output is not None
        return self._output

    def together(self, questions: Iterable[Question]) -> Mapping[Question, Any]:
        """The answers to many questions from one pass: the kernel's, of the tiles what it leaves, and then of the rows.

        Smaller tiles are taken where memory runs out; raises MemoryLimitError where the smallest do not fit either.
        """
        distinct = list(dict.fromkeys(questions))
        answers = self._noted(self.swept(distinct), self.kernel)
        remaining = [question for question in distinct if question not in answers]
        if runs := self._few_rows(remaining):
            blocks = (self.block(start, stop) for start, stop in runs)
            answers |= self._noted(dict(zip(remaining, read_blocks(blocks, remaining), strict=True)), "rows")
            remaining = []
        if remaining or (self.with_output and self._output is None):
            answers |= self._noted(self._tiled(remaining), "tiles")
            remaining = [question for question in remaining if question not in answers]
        return {**answers, **self._noted(dict(super().together(remaining)), "rows")}

    def _few_rows(self, questions: Sequence[Question]) -> list[tuple[int, int]]:
        """The runs of rows that answer these, where they name few and the output is known; empty where tiles do.

        On a CPU all questions are read from the same tiles.
        """
        of_rows = [question for question in questions if isinstance(question, Strongest)]
        waiting = self.with_output and self._output is None
        rows = {row for question in of_rows for queries in question.query for row in queries}
        few = len(of_rows) == len(questions) and len(rows) <= self.queries // FEW_ROWS
        if self.device.type == "cpu" or waiting or not few:
            return []
        firsts, lasts = (sorted(row for row in rows if row + step not in rows) for step in (-1, 1))
        most = next(self.blocks())[1]
        runs = zip(firsts, lasts, strict=True)
        return [(a, min(last + 1, a + most)) for first, last in runs for a in range(first, last + 1, most)]

    def swept(self, questions: Sequence[Question]) -> dict[Question, Any]:
        """What a kernel that an operator of this kind has answers, and the output where it is wanted; the tiles: none.

        What is not among the answers is left to the tiles.
        """
        return {}

    def _noted(self, answers: dict[Question, Any], who: str) -> dict[Question, Any]:
        self.answered_by.update({type(question).__name__: who for question in answers})
        return answers

    def _tiled(self, questions: Sequence[Question]) -> dict[Question, Any]:
        # What suits the device, at most an eighth of what is free on it; smaller where that is not there after all.
        device = str(self.device)
        tile_bytes = TILE_BYTES.get(self.device.type, TILE_BYTES["cpu"])
        if self.device.type == "cuda":
            tile_bytes = min(tile_bytes, max(LEAST_TILE, free_memory(device) // 8))
        while (answers := self._pass(questions, tile_bytes)) is None:
            tile_bytes //= 2
            if tile_bytes < LEAST_TILE:
                inputs = (self.spec.q_BHQD, self.spec.k_BGKD, self.spec.v_BGKV)
                takes = 4 * sum(2 * part.numel() for part in inputs)  # they and the output, in float32
                raise MemoryLimitError(
                    f"memory ran out over {self.keys} tokens: one layer takes {human_bytes(takes)} on top of "
                    f"the model, and {device} has {human_bytes(free_memory(device))} left",
                    "shorten the text, ask for fewer keys or heads, or free memory on the device",
                )
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return answers

    def _pass(self, questions: Sequence[Question], tile_bytes: int) -> dict[Question, Any] | None:
        """One pass with tiles of this size; None where it did not find the memory that it takes."""
        try:
            readers = {question: reader for question in questions if (reader := reader_of(question, self))}
            output = OutputReader(None, self) if self.with_output and self._output is None else None
            every = [*readers.values(), *([output] if output else [])]

            def visit(tile: Tile) -> None:
                for reader in every:
                    reader.visit(tile)

            if every:
                self._tiling(every, tile_bytes).each(visit)
            for reader in every:
                reader.end()
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                return None
            raise
        if output:
            self._output = output.answer.transpose(1, 2).to(self.spec.q_BHQD.dtype)
        return {question: reader.answer for question, reader in readers.items()}

    def _tiling(self, readers: Sequence[Reader], tile_bytes: int) -> Tiling:
        # One search of a row serves all that ask for its largest entries.
        top = [reader for reader in readers if isinstance(reader, TopKReader)]
        heads = sorted({head for reader in top for head in reader.heads})
        most = max((reader.wanted for reader in top), default=0)

        # All that multiply share one product per tile: each is given its columns in it.
        products, start = [reader for reader in readers if isinstance(reader, ProductReader)], 0
        for product in products:
            product.span = slice(start, start + product.width)
            start += product.width

        def columns(text: int) -> Tensor | None:
            parts = [product.columns(text).to(self.device) for product in products]
            parts = [part.expand(self.spec.kv_heads, *part.shape[1:]) for part in parts]
            return torch.cat(parts, -1) if parts else None

        return Tiling(self.spec, most, heads, columns, tile_bytes)
