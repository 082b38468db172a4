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
    from attnscope.model.loaded import LoadedModel
    from attnscope.seam.call import AttentionCall


def output_projections(loaded: LoadedModel, ids: Sequence[int] | Tensor, **inputs: Any) -> dict[nn.Module, nn.Module]:
    """{attention module: its output projection}: the linear module that is given the heads' outputs as they are.

    ids: of one text, or what the model's forward is given first, and inputs what beside it, see `inputs.given`.
    One with an adapter beside its weights is the layer around both, which is given them before its parts are.
    """
    reads = ids if isinstance(ids, Tensor) else torch.tensor([list(ids)], device=loaded.device)
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
        if part is not one and (not list(part.children()) or hasattr(part, "base_layer")) and list(part.parameters())
    ]
    try:
        listen(loaded.model, reads, on_call, engine=ENGINES["eager"], **inputs)
    finally:
        for handle in handles:
            handle.remove()
    return {attention: out for attention, out in found.items() if _is_linear(out, given[attention])}


@torch.no_grad()
def _is_linear(out: nn.Module, heads: Tensor) -> bool:
    """Whether twice as much in gives twice as much out, but for quantisation: a norm before the projection does not."""
    nothing = out(heads * 0)
    once, twice = out(heads) - nothing, out(heads * 2) - nothing
    return bool((twice - 2 * once).norm() <= 0.05 * twice.norm())


def projection(out: nn.Module, heads: int, like: Tensor) -> Tensor:
    """W_O (H, V, E) of an output projection, whatever class keeps it: what it makes of each unit vector."""
    width = heads * like.shape[-1]
    with torch.no_grad():
        unit = torch.eye(width, dtype=like.dtype, device=like.device)
        return (out(unit) - out(unit[:1] * 0)).view(heads, like.shape[-1], -1)


def gram_root(out: nn.Module, heads: int, like: Tensor) -> Tensor:
    """R (H, V, V) with |v R| = |v W_O| for every v: R Rᵀ is the Gram matrix W_O W_Oᵀ of a head.

    Read off W_O itself, by QR: in the Gram matrix small norms would lose half their digits.
    """
    W_O_HVE = projection(out, heads, like).float().cpu()  # LAPACK's: not every device has one
    return torch.linalg.qr(W_O_HVE.mT, mode="r").R.mT.to(like.device)
