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
from attnscope.hooks.forward import check_gradients, with_gradients
from attnscope.hooks.listen import listen
from attnscope.intervene.branches import unheard
from attnscope.intervene.replacement import Replacing

if TYPE_CHECKING:
    from attnscope.hooks.calls import AttentionCall
    from attnscope.intervene.passes import Advance, Passes

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
    intervention = passes.intervention
    if not isinstance(intervention, Replacing):
        raise UsageError("a screen by gradients is of outputs that are replaced", "use {replace=mean}")

    heads: list[tuple[int, int]] = []
    products_SN2: dict[int, np.ndarray] = {}
    for batch in passes.batches(BACKWARD):  # a backward pass keeps what every layer made
        calls, gradients = backward(passes, batch)
        lengths = [passes.task.lengths[place] for place in batch]

        # grad . (replacement - z) and grad . z of each head; a layer that attends twice has the sum of both calls.
        by_layer: dict[int, Tensor] = {}
        with torch.no_grad():
            for (call, z_BTHV), grad_BTHV in zip(calls, gradients, strict=True):
                change_BTHV = intervention.instead(call.place, z_BTHV, lengths) - z_BTHV
                products = [(grad_BTHV.double() * value).sum((1, 3)) for value in (change_BTHV, z_BTHV)]
                by_layer[call.layer] = by_layer.get(call.layer, 0) + torch.stack(products, -1).cpu()

        # Batches come in the order of their lengths, the result in that of the task.
        heads = [(layer, head) for layer, product_BH2 in by_layer.items() for head in range(product_BH2.shape[1])]
        products_SN2 |= dict(zip(batch, torch.cat(list(by_layer.values()), 1).numpy(), strict=True))
        advance(BACKWARD * passes.cost(batch, []))
    both_SN2 = np.stack([products_SN2[place] for place in range(len(passes.task))])
    return FirstOrder(tuple(heads), both_SN2[..., 0], np.abs(both_SN2[..., 1]))


@with_gradients
def backward(passes: Passes, batch: Sequence[int]) -> tuple[list[tuple[AttentionCall, Tensor]], Sequence[Tensor]]:
    """The calls of an intact pass over some sequences with their outputs, and the gradient of each output: how much
    worse the measure gets, summed over the sequences. Raises UsageError for weights made in inference mode."""
    check_gradients(passes.loaded.model)
    calls: list[tuple[AttentionCall, Tensor]] = []

    def keep(call: AttentionCall, output_BTHV: Tensor) -> Tensor:
        output_BTHV = output_BTHV if output_BTHV.requires_grad else output_BTHV.requires_grad_()
        calls.append((call, output_BTHV))
        return output_BTHV

    positions = passes.asked(batch)
    report = listen(
        passes.loaded.model,
        passes.ids(batch),
        unheard,
        engine=replace(passes.engine, change=keep),
        logits_at=positions,
        gradients=True,
    )
    assert report.logits is not None
    values_BK = passes.values(report.logits, batch, positions)
    cost = passes.measure.worse * values_BK.sum()  # of a text's rows only its own value has a gradient
    return calls, torch.autograd.grad(cost, [output_BTHV for _, output_BTHV in calls])
