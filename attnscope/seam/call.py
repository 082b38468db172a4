"""One attention call, as a model made it, and the record of a forward pass's calls.

Shapes: B text, H head, Q query, K key, V width of v.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from attnscope.attention.operator import AttentionOperator
from attnscope.attention.spec import AttentionSpec, Visibility
from attnscope.model.selection import DECODER


@dataclass(frozen=True)
class CallPlace:
    """Which call of a forward pass: its layer, which call of that layer (families that attend twice count up), module.

    path: the module's name in the model. stack: the stack of the layer, see `stacks.py`.
    """

    layer: int
    call: int
    path: str
    module: nn.Module
    stack: str = DECODER


@dataclass(eq=False)
class AttentionCall:
    """One attention call, as an operator to ask.

    P: the call's attention. spec: q, k, v and how the logits are made, None where the family bypasses the interface.
    weights_BHQK: the model's own matrix, None under fused implementations. output_BQHV: what the model's own attention
    gave, before the output projection; None where it is not known, or attnscope is to give it. seen_values: v where a
    family that bypasses the interface was seen to use it.
    """

    place: CallPlace
    P: AttentionOperator
    spec: AttentionSpec | None = None
    weights_BHQK: Tensor | None = None
    output_BQHV: Tensor | None = None
    seen_values: Tensor | None = None

    @property
    def v_BGKV(self) -> Tensor | None:
        """The values, one for H / G heads; None where the family does not show them."""
        return self.seen_values if self.spec is None else self.spec.v_BGKV

    def output_shares(self, start: int, stop: int) -> Tensor | None:
        """What of a block's weighted values the heads write, see `AttentionSpec.output_shares`; None for all."""
        return None if self.spec is None else self.spec.output_shares(start, stop)

    @property
    def layer(self) -> int:
        return self.place.layer

    @property
    def call(self) -> int:
        return self.place.call

    @property
    def stack(self) -> str:
        return self.place.stack

    @property
    def path(self) -> str:
        return self.place.path

    @property
    def module(self) -> nn.Module:
        return self.place.module

    @property
    def visible(self) -> Visibility:
        return self.P.visible
