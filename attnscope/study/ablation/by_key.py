"""Direct effects by key: what a head writes of each key's value towards the answer, A_ij <v_j W_O, u>, signed.

u is the direction of the residual stream that raises the answer's logit over a foil's, or over the mean of all. Gates
and the scales of norms are frozen as they were in an intact pass. Over all keys a query's effects sum to its direct
effect, see `direct`.

    found = directions(loaded, ids, {5: answer}, foil=None)
    found.of[attention_module]                       # (H, R, V)

Shapes: B text, T token, H head, R row that is asked, V width of v, E model width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from attnscope.errors import UsageError
from attnscope.hooks.engines import UNCHECKED
from attnscope.hooks.listen import listen
from attnscope.hooks.projections import ProjectionInputs, frozen_scales, projection
from attnscope.keep.values import Directions
from attnscope.study.ablation.way import Way, way_to_logits

if TYPE_CHECKING:
    from attnscope.hooks.calls import AttentionCall
    from attnscope.inputs.prompt import Prompt
    from attnscope.keep.request import Request
    from attnscope.model.loaded import LoadedModel

TRIED = 8  # tokens on which the way is verified


def directions(
    loaded: LoadedModel, ids: Sequence[int], right: Mapping[int, int], foil: int | None = None
) -> Directions:
    """Where a value must point to raise the right token's logit, of every head in each row that is asked.

    right: the token that is right after each row that is asked. foil: a token with a logit that is taken off; without
    one it is the mean over the vocabulary. Raises UsageError where the way from the heads to the logits is not plain.
    """
    way = way_to_logits(loaded, ids[:TRIED])
    if isinstance(way, str):
        raise UsageError(f"what a key writes to the logits is not known: {way}", "use {weights=value}")
    rows = sorted(right)
    towards_1RE = way.towards(torch.tensor([[right[row] for row in rows]]))
    if foil is not None:
        towards_1RE = towards_1RE - way.towards(torch.tensor([[foil]]))
    return Directions(rows, _pulled(loaded, way, ids, rows, towards_1RE))


def asked_of_answer(request: Request, prompt: Prompt) -> Request:
    """The request about the rows that make the answer; with a foil about the one that makes its first token.

    Raises UsageError where there is no answer, or the prompt is not one of token ids alone.
    """
    if prompt.answer is None:
        raise UsageError("effects on a logit need an answer", "add {answer=TEXT}")
    if prompt.medium.inputs or prompt.medium.patches:
        raise UsageError(
            "effects on a logit are read of texts, not of pictures or sounds", "leave out the picture or the sound"
        )
    if request.query is not None:
        return request
    return replace(request, query="made" if request.view.foil is None else str(prompt.answer - 1))


def directions_of_answer(
    loaded: LoadedModel, prompt: Prompt, rows: Sequence[int], foil: Sequence[int] | None
) -> Directions:
    """The directions of the rows that were asked about; foil: its ids, of which the first counts.

    Raises UsageError where such a row makes no token of the answer, or, with a foil, not its first.
    """
    assert prompt.answer is not None
    if foil is not None and not foil:
        raise UsageError("the foil is empty", "give one with at least one word, or leave out {foil}")
    made = range(prompt.answer - 1, len(prompt) - 1 if foil is None else prompt.answer)
    others = [row for row in rows if row not in made]
    if others:
        what = "no token of the answer" if foil is None else "another token than the answer's first, as a foil has it"
        raise UsageError(f"the row of token {others[0]} makes {what}", f"use {{query={made[0] if foil else 'made'}}}")
    if foil is not None and list(foil[:1]) == [prompt.ids[prompt.answer]]:
        raise UsageError("the answer and its foil begin with the same token", "choose another foil")
    return directions(loaded, prompt.ids, {row: prompt.ids[row + 1] for row in rows}, foil[0] if foil else None)


def _pulled(
    loaded: LoadedModel, way: Way, ids: Sequence[int], rows: Sequence[int], towards_1RE: Tensor
) -> dict[nn.Module, Tensor]:
    """(H, R, V) by attention module: a direction of the residual stream, as one of the heads' values."""
    inputs = ProjectionInputs({attention: way.out[attention] for attention in way.gated})
    pulled: dict[nn.Module, Tensor] = {}

    def on_call(call: AttentionCall) -> None:
        assert call.output_BQHV is not None
        out = way.out[call.module]
        W_O_HVE = projection(out, call.P.heads, call.output_BQHV).float()
        direction_1RE = way.before(call.module, towards_1RE.to(W_O_HVE.device))
        pulled[call.module] = torch.einsum("re,hve->hrv", direction_1RE[0], W_O_HVE)
        z_RHV = call.output_BQHV[0, rows]

        def gate(given: Tensor) -> None:
            # What the heads' outputs were multiplied by; 0 where nothing was to be multiplied.
            gated_RHV = given.reshape(1, len(ids), *z_RHV.shape[1:])[0, rows].float()
            gate_RHV = torch.where(z_RHV == 0, 0.0, gated_RHV / torch.where(z_RHV == 0, 1.0, z_RHV.float()))
            pulled[call.module] = pulled[call.module] * gate_RHV.transpose(0, 1)

        if call.module in way.gated:
            inputs.on_next(call.module, gate)

    with inputs.watched(), frozen_scales([way.norm, *way.after.values()]) as scales:
        listen(loaded.model, torch.tensor([list(ids)], device=loaded.device), on_call, engine=UNCHECKED)
    for attention, one_HRV in pulled.items():
        scale_R1 = scales[way.norm.module][0, rows] * way.factor
        if attention in way.after:
            scale_R1 = scale_R1 * scales[way.after[attention].module][0, rows]
        pulled[attention] = one_HRV * scale_R1.to(one_HRV.device)
    return pulled
