"""Direct effects: what each head itself writes towards the right token, read in one intact pass.

A head's output z goes through its part of the output projection into the residual stream, and from there through the
final norm to the logits (Elhage et al. 2021; Wang et al. 2022, arXiv 2211.00593). The scales of norms, and gates
between heads and projection, are frozen as they were.

    direct_means(passes).values[3, 0]                   # logits
    direct(passes, way_to_logits(loaded, ids))          # (S, N), heads by layer

Shapes: S sequence, B text, T token, H head, N head of all layers, V width of v, E model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from attnscope.hooks.engines import UNCHECKED
from attnscope.hooks.listen import listen
from attnscope.hooks.projections import ProjectionInputs, frozen_scales, projection
from attnscope.observe.logit_path import Way, way_to_logits

if TYPE_CHECKING:
    from attnscope.hooks.calls import AttentionCall
    from attnscope.interventions.passes import Advance, Passes
    from attnscope.model.loaded import LoadedModel
    from attnscope.model.selection import HeadIndex

TRIED = 8  # tokens on which the way is verified


@dataclass(frozen=True)
class Direct:
    """Every head's mean direct effect, and what to say of them; none, and why."""

    values: Mapping[HeadIndex, float]
    said: str = ""


def direct_means(passes: Passes, advance: Advance = lambda token_layers: None) -> Direct:
    """The direct effects of all heads on a task."""
    way = way_to_logits(passes.loaded, passes.task.ids[0][:TRIED])
    if isinstance(way, str):
        return Direct({}, way)
    layers = passes.loaded.geometry.heads_by_layer
    heads = [(layer, head) for layer, count in layers.items() for head in range(count)]
    means_N = direct(passes, way, advance).mean(0)
    return Direct(dict(zip(heads, means_N.tolist(), strict=True)), way.note)


def direct(passes: Passes, way: Way, advance: Advance = lambda token_layers: None) -> np.ndarray:
    """(S, N) float64: what each head adds to the right tokens' centred logits, the mean over each sequence's rows."""
    found: dict[int, np.ndarray] = {}
    for batch in passes.batches(0):
        ids_BT = passes.ids(batch)
        right_BT = torch.full_like(ids_BT, -1)
        for number, place in enumerate(batch):
            row_R = torch.tensor(passes.task.rows[place], device=ids_BT.device)
            right_BT[number, row_R] = ids_BT[number, row_R + 1]
        found |= dict(zip(batch, direct_effects(passes.loaded, way, ids_BT, right_BT).numpy(), strict=True))
        advance(passes.cost(batch, []))
    return np.stack([found[place] for place in range(len(passes.task))])


def direct_effects(loaded: LoadedModel, way: Way, ids_BT: Tensor, right_BT: Tensor) -> Tensor:
    """(B, N) float64: what each head adds to the centred logit of the right token, the mean over a text's rows.

    right_BT: the token that is right after each position, -1 where a row is not asked. Centred: over the vocabulary.
    """
    asked_BT = right_BT >= 0
    towards_BTE = way.towards(right_BT.clamp_min(0))
    inputs = ProjectionInputs({attention: way.out[attention] for attention in way.gated})
    effects: dict[nn.Module, Tensor] = {}  # by output projection, in the order of the layers

    def on_call(call: AttentionCall) -> None:
        assert call.output_BQHV is not None
        out = way.out[call.module]
        W_O_HVE = projection(out, call.P.heads, call.output_BQHV).float()
        direction_BTE = way.before(call.module, towards_BTE.to(W_O_HVE.device))
        pulled_BTHV = torch.einsum("bte,hve->bthv", direction_BTE, W_O_HVE)

        def keep(given: Tensor) -> None:
            effects[out] = (given.float().reshape(pulled_BTHV.shape) * pulled_BTHV).sum(-1).cpu()

        if call.module in way.gated:
            inputs.on_next(call.module, keep)
        else:
            keep(call.output_BQHV)

    with inputs.watched(), frozen_scales([way.norm, *way.after.values()]) as scales:
        listen(loaded.model, ids_BT, on_call, engine=UNCHECKED)
    for attention, norm in way.after.items():
        effects[way.out[attention]] *= scales[norm.module]
    effect_BTN = torch.cat(list(effects.values()), -1).double() * scales[way.norm.module] * way.factor
    return (effect_BTN * asked_BT.cpu()[..., None]).sum(1) / asked_BT.cpu().sum(1, keepdim=True)
