"""What the oracle is given of a model's run: the module's raw weights, what entered it, what its attention was passed.

The one place that turns a run into the oracle's inputs: parity and explain both read layers through it.

Shapes: B text, T token, H head, G kv head, Q query, K key, D head dim, V width of v.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnscope.hooks.calls import AttentionCall
from attnscope.hooks.modules import ModuleRun
from attnscope.model.modules import is_prefix, weights_of
from attnscope.model.selection import is_cross
from attnscope.parity.adapted import adapted
from attnscope.parity.arranged import PLAIN, Arrangement
from attnscope.reference.given import Given, UnreadableError
from attnscope.reference.layout import Layout


def given_of(
    run: ModuleRun,
    layout: Layout,
    config: Any,
    layer: Any,
    device: str | None = None,
    arrangement: Arrangement = PLAIN,
) -> Given:
    """A run's raw parameters, and what entered its module, in the oracle's precision.

    config: the model's (the text part). layer: index, heads, kv_heads, type and window of the layer. device: where the
    oracle computes, the module's own device where it is None. arrangement: of the tokens of a text with pictures.
    Raises UnreadableError for a module that attends more than once or outside its own forward, where its weights are
    offloaded to where no one finds them, where an adapter changes them in another way than LoRA or brings keys and
    values, and in cross-attention where the encoder's states did not come by a known name.

    >>> given_of(run, layout, config, layer).hidden_BTE.dtype
    torch.float64
    """
    if len(run.calls) > 1 or run.output_BTE is None:
        raise UnreadableError("its module attends more than once, or outside its own forward")
    if any(map(is_prefix, run.arguments.values())):
        raise UnreadableError("its first keys and values are an adapter's, which no hidden states have made")
    # The module's own; and a table of positions that only the stack's first layer has, as T5's layers share it.
    parameters = weights_of(run.module)
    if layout.table and layout.table not in parameters and run.first is not None:
        parameters |= {name: values for name, values in weights_of(run.first).items() if name == layout.table}
    if any(parameter.is_meta for parameter in parameters.values()):
        raise UnreadableError("its weights are offloaded")
    hidden_BTE, source_BSE = precise(run.hidden_BTE, device), run.source_BSE
    if is_cross(run.stack) and source_BSE is None:
        raise UnreadableError("its module is given the encoder's states in a way of its own")
    # k and v (B, G, T, D) of an earlier layer, where the module has no projection of its own for them.
    states, own = run.arguments.get("shared_kv_states"), any(name.startswith("k_proj.") for name in parameters)
    shared = None if states is None or own else states[config.layer_types[layer.index]]
    # All of it in the oracle's precision, so that its own rounding is no part of a difference.
    return Given(
        layout=layout,
        parameters=adapted(run.module, {name: precise(one, device) for name, one in parameters.items()}),
        config=config,
        layer=layer,
        hidden_BTE=hidden_BTE,
        position_T=torch.arange(hidden_BTE.shape[1], device=hidden_BTE.device),
        arguments={
            name: precise(value, device)
            for name, value in run.arguments.items()
            if isinstance(value, Tensor) and value.is_floating_point()
        },
        shared=None if shared is None else (precise(shared[0], device), precise(shared[1], device)),
        model_dtype=run.model_dtype,
        stack=run.stack,
        source_BSE=None if source_BSE is None else precise(source_BSE, device),
        axes_AT=_to(hidden_BTE, arrangement.axes_AT),
        block_T=_to(hidden_BTE, arrangement.blocks(layer)),
    )


def _to(hidden_BTE: Tensor, of_tokens: Tensor | None) -> Tensor | None:
    """Numbers of tokens where the hidden states are. Raises UnreadableError for another number of tokens."""
    if of_tokens is not None and of_tokens.shape[-1] != hidden_BTE.shape[1]:
        what = f"{of_tokens.shape[-1]} tokens by the pictures' sizes, {hidden_BTE.shape[1]} in its module"
        raise UnreadableError(f"its tokens are not arranged as expected: {what}")
    return None if of_tokens is None else of_tokens.to(hidden_BTE.device)


def precise(x: Tensor, device: str | None = None) -> Tensor:
    """The oracle's own rounding stays out of the difference: float64, where the device has it.

    >>> precise(torch.ones(1)).dtype
    torch.float64
    """
    x = x.detach() if device is None else x.detach().to(device)
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


def mask_of(call: AttentionCall, device: str | None = None) -> Tensor:
    """The call's mask, boolean or to be added, (B or 1, H or 1, Q, K): the model's own, or what its rule says."""
    visible = call.visible
    mask = visible.rows(0, visible.queries) if visible.mask is None else visible.mask[..., : visible.keys]
    return mask.to(device) if mask.dtype == torch.bool else precise(mask, device)
