"""How a quantised model computes: by which method, in which precision, and whether it computes tokens apart.

One of its layers is asked, a copy of it, since some repack their weights when they first run.

Shapes: B text, T token, E width.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnscope.model.quantised import is_quantised, method_of, rounding_layers

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Arithmetic:
    """How a model that is or was quantised computes.

    method: that its config names, or the package of its layers. unpacked: whether its weights are plain numbers now,
    and its layers compute with these as they are. products: the dtype to which a layer rounds what enters it, where
    that is another than the model's. together: whether what a layer makes of a token depends on other tokens.
    """

    method: str
    unpacked: bool
    products: str | None = None
    together: bool = False

    @property
    def facts(self) -> dict[str, Any]:
        """What a manifest says of it."""
        return {
            "method": self.method,
            "unpacked": self.unpacked,
            **({"products": self.products} if self.products else {}),
            **({"tokens_together": True} if self.together else {}),
        }


def arithmetic_of(model: Any, config: Any) -> Arithmetic | None:
    """How a model computes that is quantised, or was in its files; None for others. config: as its files state it.

    >>> arithmetic_of(loaded.model, loaded.model.config)
    """
    method = method_of(config)
    if not is_quantised(model):
        return Arithmetic(method, unpacked=True) if method else None
    layer = next(rounding_layers(model), None)
    if layer is None:
        return Arithmetic(method or "unknown", unpacked=False)
    kinds = (type(getattr(layer, "weight", None)), type(layer))
    packages = [kind.__module__.partition(".")[0] for kind in kinds]
    package = next((package for package in packages if package not in ("torch", "builtins")), "torch")
    products, together = _measured(layer, model.dtype)
    return Arithmetic(method or package, False, products, together)


def _measured(layer: Any, dtype: torch.dtype) -> tuple[str | None, bool]:
    """To which dtype a layer rounds what enters it, and whether a token's output depends on the others'."""
    import torch

    x_BTE = torch.randn(1, 4, layer.in_features, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad(), suppress(Exception):  # any library's layer
        own = copy.deepcopy(layer)
        x_BTE = x_BTE.to(next(iter((*own.parameters(), *own.buffers())), x_BTE).device)
        output_BTE = own(x_BTE)
        halves = [half for half in (torch.bfloat16, torch.float16) if dtype == torch.float32]
        rounding = next((half for half in halves if torch.equal(own(x_BTE.to(half).to(dtype)), output_BTE)), None)
        products = None if rounding is None else str(rounding).removeprefix("torch.")
        with_large_BTE = own(torch.cat([x_BTE, 1000 * x_BTE], 1))[:, :4]
        difference = float((with_large_BTE - output_BTE).norm() / output_BTE.norm())
        return products, difference > 10 * torch.finfo(dtype).eps
    return None, False
