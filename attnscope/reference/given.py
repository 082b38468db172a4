"""What the oracle works from: one layer's parameters and hidden states, its layout, and what the config says.

Shapes: B text, T token, A axis, S token of the encoder's text, E model width, G kv head, D width of k, V width of v.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from attnscope.reference.layout import Layout


class UnreadableError(Exception):
    """A layer that its layout does not describe: what was expected and what there was.

    >>> raise UnreadableError("its layout expects a parameter q_proj.weight, which the module lacks")
    Traceback (most recent call last):
    attnscope.reference.given.UnreadableError: its layout expects a parameter q_proj.weight, which the module lacks
    """


@dataclass(frozen=True)
class Given:
    """What the oracle works from, all of it in one dtype.

    layout: how the family builds its attention. parameters: the attention module's own, by name. config: the model's
    (the text part). layer: index, heads, kv_heads, type ("sliding" and "chunked" limit the keys to `window`).
    hidden_BTE: what enters the module. position_T: the tokens' positions. arguments: other tensors that entered it, of
    which only the layout's residual is read. shared: k (B, G, T, D) and v (B, G, T, V) of an earlier layer, where this
    one reads those instead of its own (Gemma 3n). model_dtype: what the model runs in, which some families round to.
    stack: the layer's stack; only a "decoder" looks back alone. source_BSE: in cross-attention what the encoder gave,
    which keys and values are made of. axes_AT: positions on several axes, where tokens have them. block_T: the block
    that each token is of, -1 for none: in a decoder the tokens of a block see each other also ahead, in other stacks
    they see nothing else.

    >>> given.hidden_BTE.shape, given.layer.heads, given.rope["rope_theta"]
    (torch.Size([1, 9, 8]), 2, 10000.0)
    """

    layout: Layout
    parameters: Mapping[str, Tensor]
    config: Any
    layer: Any
    hidden_BTE: Tensor
    position_T: Tensor
    arguments: Mapping[str, Tensor] = field(default_factory=dict)
    shared: tuple[Tensor, Tensor] | None = None
    model_dtype: torch.dtype = torch.float32
    stack: str = "decoder"
    source_BSE: Tensor | None = None
    axes_AT: Tensor | None = None
    block_T: Tensor | None = None

    @property
    def keyed_BSE(self) -> Tensor:
        """What keys and values are made of: the hidden states, or in cross-attention the encoder's."""
        return self.hidden_BTE if self.source_BSE is None else self.source_BSE

    @property
    def rope(self) -> Mapping[str, Any] | None:
        """The config's rope parameters for this layer, None where it has none."""
        if self.layout.base is not None:
            own = setting(self.config, "rope_theta", self.layout.base)
            theta = setting(self.config, "rope_parameters.rope_theta", own)
            return {"rope_type": "default", "rope_theta": theta}
        rope = setting(self.config, "rope_parameters")
        kinds = setting(self.config, "layer_types")
        if rope is not None and kinds is not None and kinds[self.layer.index] in rope:
            return rope[kinds[self.layer.index]]
        return rope

    @property
    def eps(self) -> float:
        """What the layout's norms add under the root."""
        eps = self.layout.eps
        return eps if isinstance(eps, float) else setting(self.config, eps)

    def parameter(self, name: str) -> Tensor:
        """A parameter by name; raises UnreadableError where the module has none of that name."""
        if name not in self.parameters:
            raise UnreadableError(f"its layout ({self.layout.name}) expects a parameter {name}, which the module lacks")
        return self.parameters[name]

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x through one of the module's projections."""
        weight = self.parameter(f"{name}.weight")
        weight = weight.T if self.layout.transposed else weight
        return functional.linear(x, weight, self.parameters.get(f"{name}.bias"))


def setting(config: Any, name: str, default: Any = None) -> Any:
    """A config's value by name; a dot goes into a nested config. The default where it is missing or None.

    >>> setting(config, "attn_config.clip_qkv", default=8.0)
    8.0
    """
    for part in name.split("."):
        config = config.get(part) if isinstance(config, Mapping) else getattr(config, part, None)
    return default if config is None else config
