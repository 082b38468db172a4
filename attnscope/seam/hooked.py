"""What attention modules return, where their family never asks the interface: the weights among it, at true positions.

Most return (output, weights), others put more around the weights or return them in pieces.

Shapes: B text, T token, N block, H head, Q query, K key, W keys of a window, X global tokens of the text with most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attnscope.model.families import Family


def weights_in(output: Any, family: Family) -> list[Tensor]:
    """The weights in what a module returned, in its order; empty where there are none.

    They follow the module's output, or have a name as it has; where the output itself comes with more, follow that.

        >>> weights_in((hidden, weights), Family())
        [weights]
    """
    if isinstance(output, Mapping):
        parts = list(output.values())
    elif isinstance(output, tuple | list) and output:
        parts = [*(output[0] if isinstance(output[0], tuple | list) else ()), *output[1:]]
    else:
        return []
    if family.layout == "blocks":  # the bias of positions is before them
        parts = parts[1:]
    rank = 5 if family.layout == "blocks" else 4
    matrices = [part for part in parts if isinstance(part, Tensor) and part.ndim == rank and part.is_floating_point()]
    matrices = [part for part in matrices if len(part)]  # that of a module around one that attends is empty: `without`
    return matrices if family.merges_cross or family.layout == "band" else matrices[:1]


def without(output: Any, weights: list[Tensor], keep_shape: bool) -> Any:
    """The same with None in place of the weights, or with a tensor of no texts, for code that works on with it."""
    if isinstance(output, Tensor):
        if not any(output is matrix for matrix in weights):
            return output
        return output.new_empty(0, *output.shape[1:]) if keep_shape else None
    like: Any = type(output)
    if isinstance(output, Mapping):
        return like({name: without(part, weights, keep_shape) for name, part in output.items()})
    if isinstance(output, tuple | list):
        return like([without(part, weights, keep_shape) for part in output])
    return output


def banded(matrices: Sequence[Tensor], global_BT: Tensor | None, tokens: int) -> tuple[Tensor, int]:
    """(B, H, Q, K) of weights in the layout "band", cut to the text's tokens, and how far a query sees to either side.

    matrices: (B, Q, H, X + W), each query's weights on the X global keys and on those of its window; where there are
    global tokens their own rows too, (B, H, X, K). global_BT: which tokens these are. X is the most of a text.
    """
    weights, *global_rows = matrices
    B, Q, H, _ = weights.shape
    X = global_rows[0].shape[2] if global_rows else 0
    local_BHQW = weights[..., X:].transpose(1, 2)
    W, tokens = local_BHQW.shape[-1], min(tokens, Q)
    reach = W // 2
    whole_BHQK = weights.new_zeros(B, H, Q, Q + 2 * reach)
    key_QW = torch.arange(Q, device=weights.device)[:, None] + torch.arange(W, device=weights.device)
    whole_BHQK.scatter_(-1, key_QW.expand(B, H, Q, W), local_BHQW)
    whole_BHQK = whole_BHQK[..., reach : reach + Q].clone()
    for text, global_T in enumerate(global_BT if global_BT is not None and global_rows else ()):
        at = global_T.nonzero()[:, 0]
        whole_BHQK[text, :, :, at] += weights[text, :, :, : len(at)].transpose(0, 1)  # the window leaves these keys out
        whole_BHQK[text, :, at] = global_rows[0][text, :, : len(at), :Q]
    return whole_BHQK[:, :, :tokens, :tokens], reach


def whole(weights: Tensor, layout: str, tokens: int) -> tuple[Tensor, int | None]:
    """(B, H, Q, K) of weights in another layout, cut to the text's tokens, and how far a query sees to either side.

    layout: see `Family.layout`; of a band see `banded`.
    """
    if layout == "last":
        return weights.permute(2, 3, 0, 1), None
    B, N, H, block, _ = weights.shape
    tokens = min(tokens, N * block)
    whole_BHQK = weights.new_zeros(B, H, N * block, (N + 2) * block)
    for start in range(0, N * block, block):
        whole_BHQK[:, :, start : start + block, start : start + 3 * block] = weights[:, start // block]
    return whole_BHQK[:, :, :tokens, block : block + tokens], block - 1


def near(tokens: int, reach: int | None, device: torch.device, global_BT: Tensor | None = None) -> Tensor | None:
    """(B or 1, 1, Q, K) boolean: the keys at most `reach` from the query; None for all.

    global_BT: the tokens that see all others, and that all others see.
    """
    if reach is None:
        return None
    position_T = torch.arange(tokens, device=device)
    near_11QK = ((position_T[:, None] - position_T).abs() <= reach)[None, None]
    if global_BT is None:
        return near_11QK
    global_BT = global_BT[:, :tokens].to(device)
    return near_11QK | global_BT[:, None, :, None] | global_BT[:, None, None, :]
