"""How the loss would change if heads were replaced, to first order: one backward pass for all heads, as a screen.

    found = screened(prepared(loaded, task, []))
    found.table(), found.correlations

Shapes: S sequence, B text, N head of all layers, T token, H head, V width of v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from attnscope.cells import head_name
from attnscope.errors import UsageError
from attnscope.seam.listen import listen
from attnscope.study.ablation.branches import unheard
from attnscope.study.ablation.replacement import Replacing
from attnscope.study.ablation.sets import HeadSet
from attnscope.tables import as_table

if TYPE_CHECKING:
    import pyarrow as pa

    from attnscope.seam.call import CallPlace
    from attnscope.study.ablation.passes import Advance, Passes

TRIED = 8  # heads that are ablated to see how far the screen can be trusted
BACKWARD = 3  # what a pass with its backward pass takes, in passes


@dataclass(frozen=True)
class FirstOrder:
    """The screen of all heads, as (layer, head), in nats per token.

    signed_SN: the change of the loss if the head's output were replaced, grad . (replacement - z). size_SN: |grad . z|,
    the sensitivity to a gate on the head (Michel et al. 2019, arXiv 1905.10650).
    """

    heads: tuple[tuple[int, int], ...]
    signed_SN: np.ndarray
    size_SN: np.ndarray

    def tried(self) -> list[HeadSet]:
        """TRIED heads from the largest to the smallest signed effect, equally far apart in that order."""
        order = np.argsort(-self.signed_SN.mean(0), kind="stable")
        places = np.unique(np.linspace(0, len(order) - 1, TRIED).round().astype(int))
        heads = [self.heads[place] for place in order[places]]
        return [HeadSet(head_name(*head), (head,)) for head in heads]


@dataclass(frozen=True)
class Screen:
    """The screen of every head (means over the sequences), and what ablation costs where it was tried, else NaN."""

    heads: tuple[tuple[int, int], ...]
    signed_N: np.ndarray
    size_N: np.ndarray
    ablated_N: np.ndarray

    @property
    def correlations(self) -> tuple[float, float]:
        """Spearman's with ablation, over the heads that were tried: of the signed effect, and of both sizes."""
        tried_N = np.isfinite(self.ablated_N)
        true = self.ablated_N[tried_N]
        return rank_correlation(self.signed_N[tried_N], true), rank_correlation(self.size_N[tried_N], np.abs(true))

    def table(self) -> pa.Table:
        """A row per head: layer, head, signed, size, ablated, in nats per token."""
        layer, head = (np.array(part, np.int32) for part in zip(*self.heads, strict=True))
        columns = {"signed": self.signed_N, "size": self.size_N, "ablated": self.ablated_N}
        return as_table({"layer": layer, "head": head, **columns})


def screened(passes: Passes, advance: Advance = lambda token_layers: None) -> Screen:
    """Screen all heads, and ablate the few that say how far the screen can be trusted."""
    found = first_order(passes, advance)
    tried = found.tried()
    loss_SK = passes.losses(tried, advance)
    ablated_N = np.full(len(found.heads), np.nan)
    ablated_N[[found.heads.index(one.heads[0]) for one in tried]] = (loss_SK[:, 1:] - loss_SK[:, :1]).mean(0)
    return Screen(found.heads, found.signed_SN.mean(0), found.size_SN.mean(0), ablated_N)


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

    kept: dict[CallPlace, Tensor] = {}

    def keep(place: CallPlace, output_BTHV: Tensor) -> Tensor:
        kept[place] = output_BTHV if output_BTHV.requires_grad else output_BTHV.requires_grad_()
        return kept[place]

    asked = sorted({row for place in batch for row in passes.task.rows[place]})
    report = listen(
        passes.loaded.model,
        passes.ids(batch),
        unheard,
        engine=replace(passes.engine, change=keep),
        logits_at=asked,
        gradients=True,
    )
    assert report.logits is not None
    loss = passes.nats(report.logits, batch, asked).sum()  # a text's own loss alone has a gradient in its rows
    lengths = [passes.task.lengths[place] for place in batch]
    gradients = torch.autograd.grad(loss, list(kept.values()))
    found: dict[int, Tensor] = {}
    with torch.no_grad():
        for (place, z_BTHV), grad_BTHV in zip(kept.items(), gradients, strict=True):
            gone_BTHV = intervention.instead(place, z_BTHV, lengths) - z_BTHV
            products = [(grad_BTHV.double() * one).sum((1, 3)) for one in (gone_BTHV, z_BTHV)]
            found[place.layer] = found.get(place.layer, 0) + torch.stack(products, -1).cpu()
    heads = [(layer, head) for layer, one in found.items() for head in range(one.shape[1])]
    return heads, torch.cat(list(found.values()), 1).numpy()


def rank_correlation(first_N: np.ndarray, second_N: np.ndarray) -> float:
    """Spearman's: the correlation of the ranks, equal values sharing theirs; NaN where one does not vary.

    >>> rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([2.0, 30.0, 10.0]))
    0.5
    """
    ranks = [((one[:, None] > one) + (one[:, None] == one) / 2).sum(1) for one in (first_N, second_N)]
    with np.errstate(invalid="ignore"):
        return float(np.corrcoef(*ranks)[0, 1])
