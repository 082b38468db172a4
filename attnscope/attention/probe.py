"""Attention read out of the kernel that computes it: columns of the identity in place of the values.

A kernel gives P V and keeps P for itself. Where V is columns of the identity, what it gives is those columns of P. It
is called again on the same q, k and mask, as many columns at a time as V is wide: T / V times for T keys. The
arithmetic is the kernel's own, whichever it is, and so is the dtype.

Of a long text a part of the rows is held at a time. Every part takes all these calls, since a kernel is given all
queries of a call.

Shapes: B text, H head, G kv head, Q query, K key, V width of v, r rows that are held.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnscope.attention.operator import AttentionOperator
from attnscope.attention.rows import TINY, Block
from attnscope.attention.spec import AttentionSpec
from attnscope.utils.memory import free_memory

Kernel = Callable[[Tensor], Tensor]  # values (B, G, K, V) -> what the kernel gives of them, (B, Q, H, V)
SURELY_HELD = 2**28  # bytes of a matrix that is held whole: to ask for the memory takes longer
SHARE = 4  # a larger one may take one part in so many of what is free


class ProbedAttention(AttentionOperator):
    """P as a kernel applies it, a call at a time; nothing is called before something is asked.

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
            self._hold(start, min(self.queries, max(stop, start + self._rows_that_fit)))
        assert self._held is not None
        return self._held[:, :, start - self._first : stop - self._first].float()

    @property
    def shows_logits(self) -> bool:
        """What a kernel computes on its way is not known."""
        return False

    @property
    def _rows_that_fit(self) -> int:
        row_bytes = self.batch * self.heads * self.keys * self.spec.v_BGKV.element_size()
        if row_bytes * self.queries <= SURELY_HELD:
            return self.queries
        return max(SURELY_HELD, free_memory(str(self.device)) // SHARE) // row_bytes

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
