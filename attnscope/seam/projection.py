"""The output projections of a model, W_O: found by what they are given, read by what they make of it.

Shapes: H head, V width of v, E model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnscope.seam.engines import ENGINES
from attnscope.seam.listen import listen

if TYPE_CHECKING:
    from attnscope.model.loading import LoadedModel
    from attnscope.seam.call import AttentionCall


def output_projections(loaded: LoadedModel, ids: Sequence[int]) -> dict[nn.Module, nn.Module]:
    """{attention module: its output projection}: the module within it that is given the heads' outputs as they are."""
    given: dict[nn.Module, Tensor] = {}
    found: dict[nn.Module, nn.Module] = {}

    def on_call(call: AttentionCall) -> None:
        if call.output_BQHV is not None:
            given[call.module] = call.output_BQHV.flatten(-2)

    def watch(attention: nn.Module) -> Any:
        def before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            heads = given.get(attention)
            if heads is None or not inputs or not isinstance(inputs[0], Tensor):
                return
            if inputs[0].numel() == heads.numel() and torch.equal(inputs[0].reshape(heads.shape), heads):
                found.setdefault(attention, module)

        return before

    attentions = [one for one in loaded.model.modules() if "attention" in type(one).__name__.lower()]
    handles = [
        part.register_forward_pre_hook(watch(one))
        for one in attentions
        for part in one.modules()
        if part is not one and not list(part.children()) and list(part.parameters())
    ]
    try:
        listen(loaded.model, torch.tensor([list(ids)], device=loaded.device), on_call, engine=ENGINES["eager"])
    finally:
        for handle in handles:
            handle.remove()
    return found


def projection(out: nn.Module, heads: int, like: Tensor) -> Tensor:
    """W_O (H, V, E) of an output projection, whatever class keeps it: what it makes of each unit vector."""
    width = heads * like.shape[-1]
    with torch.no_grad():
        unit = torch.eye(width, dtype=like.dtype, device=like.device)
        return (out(unit) - out(unit[:1] * 0)).view(heads, like.shape[-1], -1)
