"""The jobs of a sweep: what one core reads at once.

Shapes: H head, G kv head, R heads of a kv head, Q query, K key, D width of q and k, P panel of keys, n keys, c columns;
in a job b texts.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnscope.attention.compiled.shapes import BLOCK, PANEL


@dataclass(eq=False)
class Texts:
    """What the jobs of some texts read."""

    q_bGRQD: Tensor
    k_bGPDn: Tensor
    columns_bGcKs: Tensor  # (b, G or 1, strips, P * 64, STRIP)


@dataclass(eq=False)
class Job:
    """The same rows of the heads of some kv heads of some texts.

    queries: how many are read at once. turn: the job's number among those of its texts and kv heads.
    """

    texts: slice
    groups: slice
    rows: slice
    keys: slice
    inputs: Texts
    queries: int
    turn: int

    @property
    def heads(self) -> int:
        """Of one kv head."""
        return self.inputs.q_bGRQD.shape[2]

    @property
    def padded(self) -> int:
        """Rows that are read at once, in whole blocks."""
        return -(-self.queries * self.heads // BLOCK) * BLOCK

    @property
    def panels(self) -> tuple[int, int]:
        return self.keys.start // PANEL, -(-self.keys.stop // PANEL)

    @property
    def shape(self) -> tuple[int, int]:
        """How many texts, and how many kv heads of each."""
        return self.texts.stop - self.texts.start, self.groups.stop - self.groups.start
