"""What replacing heads would cost, to first order: one backward pass for all heads.

    first_order(prepared(loaded, task, [])).signed_SN.mean(0)

Shapes: S sequence, B text, N head of all layers, T token, H head, V width of v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from attnscope.errors import UsageError
from attnscope.intervene.branches import unheard
from attnscope.intervene.replacement import Replacing
from attnscope.seam.gradients import check_gradients, with_gradients
from attnscope.seam.listen import listen

if TYPE_CHECKING:
    from attnscope.intervene.passes import Advance, Passes
    from attnscope.seam.call import AttentionCall

BACKWARD = 3  # what a pass with its backward pass takes, in passes


@dataclass(frozen=True)
class FirstOrder:
    """The screen of all heads, as (layer, head), in the measure's unit.

    signed_SN: what it would cost to replace the head's output, grad . (replacement - z). size_SN: |grad . z|, the
    sensitivity to a gate on the head (Michel et al. 2019, arXiv 1905.10650).
    """

    heads: tuple[tuple[int, int], ...]
    signed_SN: np.ndarray
    size_SN: np.ndarray


def first_order(passes: Passes, advance: Advance = lambda token_layers: None) -> FirstOrder:
    """The screen over the sequences of a task, with what the passes put in a head's place."""
    heads: list[tuple[int, int]] = []
    found_SN2: dict[int, np.ndarray] = {}
    for batch in passes.batches(BACKWARD):  # which keeps what every layer made
        heads, found_BN2 = _of_batch(passes, batch)
        found_SN2 |= dict(zip(batch, found_BN2, strict=True))
        advance(BACKWARD * passes.cost(batch, []))
    both_SN2 = np.stack([found_SN2[place] for place in range(len(passes.task))])
    return FirstOrder(tuple(heads), both_SN2[..., 0], np.abs(both_SN2[..., 1]))


def _of_batch(passes: Passes, batch: Sequence[int]) -> tuple[list[tuple[int, int]], np.ndarray]:
    """The heads, and (B, N, 2): grad . (replacement - z) and grad . z of each."""
    intervention = passes.intervention
    if not isinstance(intervention, Replacing):
        raise UsageError("a screen by gradients is of outputs that are replaced", "use {replace=mean}")

    kept, gradients = backward(passes, batch)
    lengths = [passes.task.lengths[place] for place in batch]
    found: dict[int, Tensor] = {}
    with torch.no_grad():
        for (call, z_BTHV), grad_BTHV in zip(kept, gradients, strict=True):
            gone_BTHV = intervention.instead(call.place, z_BTHV, lengths) - z_BTHV
            products = [(grad_BTHV.double() * one).sum((1, 3)) for one in (gone_BTHV, z_BTHV)]
            found[call.layer] = found.get(call.layer, 0) + torch.stack(products, -1).cpu()
    heads = [(layer, head) for layer, one in found.items() for head in range(one.shape[1])]
    return heads, torch.cat(list(found.values()), 1).numpy()


@with_gradients
def backward(passes: Passes, batch: Sequence[int]) -> tuple[list[tuple[AttentionCall, Tensor]], Sequence[Tensor]]:
    """The calls of an intact pass over some sequences with their outputs, and the gradient of each output: how much
    worse the measure gets, summed over the sequences. Raises UsageError for weights made in inference mode."""
    check_gradients(passes.loaded.model)
    kept: list[tuple[AttentionCall, Tensor]] = []

    def keep(call: AttentionCall, output_BTHV: Tensor) -> Tensor:
        output_BTHV = output_BTHV if output_BTHV.requires_grad else output_BTHV.requires_grad_()
        kept.append((call, output_BTHV))
        return output_BTHV

    asked = passes.asked(batch)
    report = listen(
        passes.loaded.model,
        passes.ids(batch),
        unheard,
        engine=replace(passes.engine, change=keep),
        logits_at=asked,
        gradients=True,
    )
    assert report.logits is not None
    values_BK = passes.values(report.logits, batch, asked)
    cost = passes.measure.worse * values_BK.sum()  # of a text's rows only its own value has a gradient
    return kept, torch.autograd.grad(cost, [output_BTHV for _, output_BTHV in kept])
