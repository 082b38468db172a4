"""Attribution patching: what patches would cost, to first order, from one backward pass.

After Nanda 2023, "Attribution patching", and Kramár et al. 2024 (arXiv 2403.00745). The gradient is that of a head's
output, times what the patch changes there. A patched key or value, or a pattern, is carried through the head itself
exactly: its softmax is no part of the approximation.

    estimated(passes, patches).mean(0)

Shapes: S sequence, K patch, B text of a pass, T token, H head, V width of v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from attnscope.errors import UsageError
from attnscope.intervene.gradient import BACKWARD, backward
from attnscope.intervene.patching import Patch, Patching, moved_heads, moves

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.hooks.calls import AttentionCall
    from attnscope.intervene.passes import Advance, Passes


def estimated(passes: Passes, patches: Sequence[Patch], advance: Advance = lambda token_layers: None) -> np.ndarray:
    """(S, K) float64: how much worse each patch would make each text's measure. Raises UsageError for passes that patch
    nothing."""
    patching = passes.intervention
    if not isinstance(patching, Patching):
        raise UsageError("attribution patching is of patches", "use a pair of texts")
    found_SK = np.zeros((len(passes.task), len(patches)))
    for batch in passes.batches(BACKWARD):
        calls, gradients = backward(passes, batch)
        with torch.no_grad():
            for (call, output_BTHV), grad_BTHV in zip(calls, gradients, strict=True):
                if call.stack == patching.stack:
                    found_SK[batch] += _of_layer(patching, patches, batch, call, output_BTHV.detach(), grad_BTHV)
        advance(BACKWARD * passes.cost(batch, []))
    return found_SK


def _of_layer(
    patching: Patching,
    patches: Sequence[Patch],
    batch: Sequence[int],
    call: AttentionCall,
    output_BTHV: Tensor,
    grad_BTHV: Tensor,
) -> np.ndarray:
    """(B, K): the share of one layer."""
    found_BK = np.zeros((len(batch), len(patches)))
    for number, patch in enumerate(patches):
        # The intact texts themselves are patched, each from its intact partner.
        moved = [replace(move, row=move.row - len(batch)) for move in moves([patch], batch, call.layer)]
        if moved:
            heads = moved_heads(moved)
            stay = [replace(move, source=move.row, source_at=move.at) for move in moved]  # the same rows computed again
            before, after = (patching.changed(call, output_BTHV, moves_of, heads) for moves_of in (stay, moved))
            product_B = (grad_BTHV.double() * (after - before)).sum((1, 2, 3))
            found_BK[:, number] = product_B.cpu().numpy()
    return found_BK
