"""Attention that asks no interface, seen while its module computes it: logits, values and heads' outputs.

While such a module runs, torch hands on each of its own functions that is called there. The logits are what that
softmax was given which gave the module's weights. The values are what these weights were multiplied with, and the
product is the heads' outputs. What the module returns as weights decides which softmax and which product those are.

Shapes: B text, H head, G kv head, Q query, K key, V width of v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attnscope.seam.checks import same_numbers

SOFTMAX = "softmax"
PRODUCTS = ("matmul", "bmm", "einsum")


@dataclass(frozen=True)
class Computed:
    """What a module computed with its weights, each None where it was not seen.

    logits_BHQK: what the softmax was given, masked. v_BGKV: each value is that of H / G heads. output_BQHV: what the
    heads gave, before the output projection.
    """

    logits_BHQK: Tensor | None = None
    v_BGKV: Tensor | None = None
    output_BQHV: Tensor | None = None


class FunctionCall(NamedTuple):
    """One call of a function of torch: its name, its tensors in order, how many numbers it gave, and what.

    gave: None of a softmax, which is not kept: `again` makes it a second time.
    """

    name: str
    args: Sequence[Any]
    size: int
    gave: Tensor | None
    again: Callable[[], Tensor]


class Watch(TorchFunctionMode):
    """While open, keeps the softmax of each module that runs, and the products of what it gave.

    >>> watch = Watch()
    >>> with watch:
    ...     watch.enter(attention, ())
    ...     output, weights_BHQK = attention(hidden)
    ...     computed(watch.leave(attention), weights_BHQK).logits_BHQK
    """

    def __init__(self) -> None:
        super().__init__()
        self._running: list[tuple[nn.Module, list[FunctionCall]]] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        """A module begins; for a forward pre-hook."""
        self._running.append((module, []))

    def leave(self, module: nn.Module) -> list[FunctionCall]:
        """What was kept of a module that ends, and of none that another error has ended; nothing where none began."""
        if all(running is not module for running, _ in self._running):
            return []
        while self._running[-1][0] is not module:
            self._running.pop()
        return self._running.pop()[1]

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        gave = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").strip("_")
        if self._running and (name == SOFTMAX or name in PRODUCTS) and isinstance(gave, Tensor):
            steps, by_name = self._running[-1][1], kwargs or {}
            tensors = (*args, *(by_name[key] for key in ("input", "other", "mat2") if key in by_name))
            again = partial(func, *args, **by_name)
            step = FunctionCall(name, tensors, gave.numel(), None if name == SOFTMAX else gave, again)
            sizes = [earlier.size for earlier in steps if earlier.name == SOFTMAX]
            if name == SOFTMAX or _left(step).numel() in sizes:
                steps.append(step)  # no product from before the softmax: it would keep a matrix alive
        return gave


def computed(steps: Sequence[FunctionCall], weights_BHQK: Tensor) -> Computed:
    """What the module that gave these weights computed with them."""
    shape = weights_BHQK.shape
    logits = next((_left(step) for step in steps if step.name == SOFTMAX and _are(step.again(), weights_BHQK)), None)
    product = next((step for step in steps if step.name != SOFTMAX and _are(_left(step), weights_BHQK)), None)
    v_BGKV, output_BQHV = (None, None) if product is None else _values(product, *shape)
    return Computed(None if logits is None else logits.reshape(shape), v_BGKV, output_BQHV)


def _left(step: FunctionCall) -> Tensor:
    """What a softmax or a product was given first."""
    if step.name != "einsum":
        first: Tensor = step.args[0]
        return first
    operands = step.args[1:] if isinstance(step.args[1], Tensor) else step.args[1]
    return operands[0]


def _are(x: Tensor, weights_BHQK: Tensor) -> bool:
    """Whether these are the weights, in any precision, texts and heads perhaps in one dimension."""
    return x.shape[-2:] == weights_BHQK.shape[-2:] and same_numbers(x.to(weights_BHQK.dtype), weights_BHQK)


def _values(product: FunctionCall, B: int, H: int, Q: int, K: int) -> tuple[Tensor | None, Tensor | None]:
    """What weights were multiplied with (B, G, K, V), and what that gave (B, Q, H, V); None in another arrangement."""
    assert product.gave is not None
    if product.name == "einsum":
        return _values_of_sum(product)
    right: Tensor = product.args[1]
    v_BGKV = right.unflatten(0, (B, H)) if right.ndim == 3 else right
    if v_BGKV.ndim != 4 or v_BGKV.shape[2] != K or H % v_BGKV.shape[1]:
        return None, None
    return v_BGKV.expand(B, -1, -1, -1), product.gave.reshape(B, H, Q, -1).transpose(1, 2)


def _values_of_sum(product: FunctionCall) -> tuple[Tensor | None, Tensor | None]:
    """The same of `einsum("bnij,jbnd->ibnd", weights, values)`, whatever the order of the letters."""
    equation, *operands = product.args
    operands = operands if isinstance(operands[0], Tensor) else list(operands[0])
    inputs, _, output = equation.replace(" ", "").partition("->")
    left, right = inputs.split(",") if inputs.count(",") == 1 else ("", "")
    widths = set(right) - set(left)
    if len(left) != 4 or len(right) != 4 or len(widths) != 1 or left[2] in right or len(output) != 4:
        return None, None
    text, head, query, key = tuple(left)
    [width] = widths
    assert product.gave is not None
    v_BHKV = operands[1].permute([right.index(letter) for letter in (text, head, key, width)])
    return v_BHKV, product.gave.permute([output.index(letter) for letter in (text, query, head, width)])
