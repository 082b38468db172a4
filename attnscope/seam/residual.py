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


def has_earlier(given: Iterable[Tensor], earlier: Sequence[Tensor]) -> bool:
    """Whether a block is given, side by side in one tensor, what earlier blocks were given, (B, T, E) each."""
    stacked = [one for one in given if one.ndim > 3 and one.is_floating_point()]
    return any(_within(one_BTE, many) for one_BTE in earlier for many in stacked)


def _within(one_BTE: Tensor, many: Tensor) -> bool:
    """Whether a tensor is one of those that another holds along its axis before the last."""
    if one_BTE.ndim != 3 or many.shape[:-2] != one_BTE.shape[:-1] or many.shape[-1:] != one_BTE.shape[-1:]:
        return False
    return any(bool((part_BTE == one_BTE).all()) for part_BTE in many.unbind(-2))
