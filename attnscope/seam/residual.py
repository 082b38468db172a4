"""Residuals that are no plain sum of what blocks write: several streams, or an attention over what was before.

Nothing here knows families: what blocks are given in a pass says it.

Shapes: B text, T token, E model width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

EARLIER = "its blocks attend to what earlier blocks were given, so that its residual is no plain sum"


def streams(residual: Tensor, written_BTE: Tensor) -> int:
    """How many streams a residual is: of hyper-connections several of the width that a block's modules write.

    written_BTE: what one of those modules gave. Zhu et al. 2024, Hyper-Connections, arXiv:2409.19606.
    """
    return residual.numel() // written_BTE.numel() if written_BTE.numel() else 1


def in_streams(count: int) -> str:
    """Why a residual of several streams is no plain sum, in words."""
    return f"its residual is {count} streams that every block mixes, as in hyper-connections, and no plain sum"


def has_earlier(inputs: Iterable[Tensor], earlier: Sequence[Tensor]) -> bool:
    """Whether a block is given, side by side in one tensor, what earlier blocks were given, (B, T, E) each."""
    stacked = [value for value in inputs if value.ndim > 3 and value.is_floating_point()]
    return any(
        bool((part_BTE == state_BTE).all())
        for state_BTE in earlier
        for many in stacked
        if state_BTE.ndim == 3 and (*many.shape[:-2], many.shape[-1]) == state_BTE.shape
        for part_BTE in many.unbind(-2)
    )
