"""Norms with a frozen scale: what a norm does to a part of what it was given, each row's scale being that of the whole.

Nothing here knows families: whether a module is a norm, and of which kind, is measured on its input and output.

Shapes: E width of what is normed; ... any rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnscope.model.modules import weights_of
from attnscope.seam.checks import relative_error, same_numbers
from attnscope.seam.engines import UNCHECKED
from attnscope.seam.forward import temporary
from attnscope.seam.listen import listen
from attnscope.seam.report import tolerance

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel


@dataclass(frozen=True)
class Norm:
    """A norm with a frozen scale: weight ⊙ x, or x without its mean, and some bias."""

    module: nn.Module
    weight_E: Tensor
    bias_E: Tensor
    centred: bool

    def scale(self, x: Tensor, y: Tensor) -> Tensor:
        """(..., 1): what it multiplied each row by, from its input and output; 0 for a row that it makes nothing of."""
        straight, unbiased = self.straight(x), y - self.bias_E.to(y.device)
        size = straight.square().sum(-1, keepdim=True)
        return (unbiased * straight).sum(-1, keepdim=True) / size.masked_fill(size == 0, torch.inf)

    def straight(self, x: Tensor) -> Tensor:
        """The norm of x but for its scale and its bias."""
        return self.weight_E.to(x.device) * (x - x.mean(-1, keepdim=True) if self.centred else x)

    def back(self, direction: Tensor) -> Tensor:
        """The direction of what it is given that is a direction of what it gives, but for its scale: its transpose."""
        weighted = self.weight_E.to(direction.device) * direction
        return weighted - weighted.mean(-1, keepdim=True) if self.centred else weighted

    def frozen(self, x: Tensor, scale: Tensor) -> Tensor:
        """The norm of x with a scale that was found before."""
        return scale * self.straight(x) + self.bias_E.to(x.device)


def norm_of(module: nn.Module, x: Tensor, y: Tensor, close: Callable[[Tensor, Tensor], bool]) -> Norm | None:
    """The module as a norm with a frozen scale, where it is one: of x or centred x, times its weight or its weight + 1.

    x, y: float32, its input and output. close: whether a result is what was expected.
    """
    weight, bias = (weights_of(module).get(name) for name in ("weight", "bias"))
    ones_E = torch.ones(x.shape[-1], device=x.device)
    weights = [ones_E]
    if weight is not None:
        # There must be a weight for each number of a row, or of the last parts of a row.
        sizes = zip(weight.shape, x.shape[x.ndim - weight.ndim :], strict=True)
        if weight.ndim > x.ndim or not all(size in (1, own) for size, own in sizes):
            return None
        weight_E = weight.detach().float().to(x.device)
        weights = [weight_E, weight_E + 1]  # Gemma's is added to 1
    bias_E = ones_E * 0 if bias is None else bias.detach().float().to(x.device)
    for centred in (False, True):
        for weight_E in weights:
            norm = Norm(module, weight_E, bias_E, centred)
            if x.shape == y.shape and close(norm.frozen(x, norm.scale(x, y)), y):
                return norm
    return None


@contextmanager
def frozen_scales(norms: Sequence[Norm]) -> Iterator[Mapping[nn.Module, Tensor]]:
    """While open, the scales that norms give the rows of a pass, (..., 1) on the CPU, by the norm's module."""
    by_module, scales = {norm.module: norm for norm in norms}, dict[nn.Module, Tensor]()

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        scales[module] = by_module[module].scale(inputs[0].float(), output.float()).cpu()

    with temporary([module.register_forward_hook(note) for module in by_module]):
        yield scales


def norms_behind(
    loaded: LoadedModel, out: Mapping[nn.Module, nn.Module], ids: Tensor, **inputs: Any
) -> dict[nn.Module, Norm]:
    """{attention module: the norm that is given what its output projection gives, as it is}.

    out: {attention module: its output projection}. ids: what the model's forward is given first, inputs what else.
    """
    attention_of = {projection: attention for attention, projection in out.items()}
    gave: dict[nn.Module, Tensor] = {}
    norms: dict[nn.Module, Norm] = {}

    # In the order of the pass: a projection gives first what the norm after it is given.
    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module in attention_of and isinstance(output, Tensor):
            gave[attention_of[module]] = output
            return
        # Dropout and identities hand on the same numbers: what follows them is tried instead.
        x = args[0] if args else None
        if not isinstance(x, Tensor) or not isinstance(output, Tensor) or same_numbers(output, x):
            return
        allowed = tolerance(x.dtype, "bfloat16")[1]

        def close(actual: Tensor, expected: Tensor) -> bool:
            return actual.shape == expected.shape and float(relative_error(actual, expected)) <= allowed

        for attention, projected in gave.items():
            if x.shape == projected.shape and same_numbers(x, projected) and attention not in norms:
                norm = norm_of(module, x.float(), output.float(), close)
                if norm is not None:
                    norms[attention] = norm

    parts = [part for part in loaded.model.modules() if part in attention_of or not list(part.children())]
    with temporary([part.register_forward_hook(after) for part in parts]):
        listen(loaded.model, ids, lambda call: None, engine=UNCHECKED, **inputs)
    return norms
