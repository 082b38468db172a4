"""Copying, the second property of an induction head: it raises the logit of the token that it looks at.

Olsson et al. 2022, arXiv 2209.11895. Shapes: B text, R asked row, H head, Q query, V width of v, E model width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from attnscope.attention.questions import Question, TopK
from attnscope.hooks.engines import UNCHECKED
from attnscope.hooks.listen import listen
from attnscope.hooks.projections import Norm, ProjectionInputs, plain_and_gated, projection
from attnscope.model.modules import as_input
from attnscope.observe.collector import Answers
from attnscope.observe.layers import Layer
from attnscope.observe.logit_path import norms_after_attention

if TYPE_CHECKING:
    from attnscope.hooks.calls import AttentionCall
    from attnscope.model.loaded import LoadedModel

RAISED = 5  # logits that count as raised most


@dataclass(frozen=True)
class CalledLayer(Layer):
    """A layer with the call that it was heard in.

    gated_BRC: of heads behind a gate, what their projection is given in the rows that are asked; C: all heads' numbers.
    """

    call: AttentionCall
    gated_BRC: Tensor | None = None

    @property
    def output_BQHV(self) -> Tensor | None:
        """What its heads give, before the output projection; None where the family does not show it."""
        if self.call.output_BQHV is not None or self.call.spec is None:
            return self.call.output_BQHV
        return self.call.P.output() if hasattr(self.call.P, "output") else None


@dataclass(frozen=True)
class Copying:
    """The share of asked rows whose strongest key's token is among the RAISED logits that z W_O W_U raises most.

    unembed: the vocabulary projection W_U. out: the output projection of each attention module. row_R: the rows. gated:
    the attention modules with a gate between heads and projection, which is frozen. after: the norm that takes what an
    attention module gives, where there is one, with a frozen scale: z W_O means what it makes of that.
    """

    unembed: nn.Module
    out: Mapping[nn.Module, nn.Module]
    row_R: Tensor | None = None
    gated: frozenset[nn.Module] = frozenset()
    after: Mapping[nn.Module, Norm] = field(default_factory=dict)

    def questions(self, layer: Layer) -> Sequence[Question]:
        return [TopK(1)]

    def collect(self, layer: Layer, answers: Answers) -> Tensor:
        assert isinstance(layer, CalledLayer)
        attention, output_BQHV = layer.call.module, layer.output_BQHV
        out = self.out.get(attention)
        if out is None or output_BQHV is None or self.row_R is None:
            return torch.full((layer.P.batch, layer.P.heads), torch.nan, dtype=torch.float64)
        row_R = self.row_R.to(output_BQHV.device)
        key_BHR = answers[TopK(1)][1][..., 0][..., row_R]
        ids_BT = layer.texts.ids_BT
        token_BHR = ids_BT[:, None].expand(-1, layer.P.heads, -1).gather(-1, key_BHR)
        z_BRHV = output_BQHV[:, row_R]
        if layer.gated_BRC is not None:
            z_BRHV = layer.gated_BRC.reshape(z_BRHV.shape)
        W_O_HVE, norm = projection(out, layer.P.heads, output_BQHV), self.after.get(attention)
        if norm is not None:  # its scale is one factor of a row's logits, which changes no rank
            W_O_HVE = norm.straight(W_O_HVE.float()).to(W_O_HVE.dtype)
        shares = [self._raised(z_BRHV[:, :, head] @ W_O_HVE[head], token_BHR[:, head]) for head in range(layer.P.heads)]
        return torch.stack(shares, 1).cpu()

    def behind_gates(self, loaded: LoadedModel, ids_BT: Tensor) -> dict[nn.Module, Tensor]:
        """(B, R, C) by attention module: what projections behind gates are given, in a pass of its own."""
        found: dict[nn.Module, Tensor] = {}
        inputs = ProjectionInputs({one: self.out[one] for one in self.gated})

        def on_call(call: AttentionCall) -> None:
            def keep(given: Tensor) -> None:
                found[call.module] = given.reshape(*ids_BT.shape, -1)[:, self.row_R]

            if call.module in self.gated:
                inputs.on_next(call.module, keep)

        if self.gated:
            with inputs.watched():
                listen(loaded.model, ids_BT, on_call, engine=UNCHECKED)
        return found

    def _raised(self, written_BRE: Tensor, token_BR: Tensor) -> Tensor:
        """(B,): the share of rows; what all logits have in common, mean or bias of the projection, raises none."""
        with torch.no_grad():
            logits = self.unembed(as_input(written_BRE, self.unembed))
            bias = getattr(self.unembed, "bias", None)
            top_BRk = (logits if bias is None else logits - bias).topk(RAISED).indices
        return (top_BRk == token_BR.to(top_BRk.device)[..., None]).any(-1).double().mean(-1)


def copying_of(loaded: LoadedModel, ids: Sequence[int]) -> Copying | str:
    """What asks a model's heads whether they copy; or why they cannot be asked. ids: some tokens to find W_O with."""
    unembed = loaded.model.get_output_embeddings()
    if unembed is None:
        return "the model has no vocabulary projection"
    plain, gated = plain_and_gated(loaded, ids, len(loaded.geometry.heads_by_layer))
    if not plain and not gated:
        return "no projection takes the heads side by side, as they come or gated"
    return Copying(unembed, gated | plain, gated=frozenset(gated), after=norms_after_attention(loaded, ids))
