"""The factors of a model while it runs: what an activation gives, and one over the size of a vector, are constants.

Hyper-connections mix their streams by sigmoids of them, gated norms multiply by one, and norms of a family's own
divide by a size: a factor in front of the residual, not a part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

FACTORS = frozenset(
    """
    rsqrt norm vector_norm linalg_vector_norm linalg_norm
    sigmoid sigmoid_ tanh tanh_ relu relu_ silu gelu softmax log_softmax softplus elu selu celu leaky_relu mish
    hardsigmoid hardswish hardtanh relu6 logsigmoid softsign
    """.split()  # noqa: SIM905
)


class FrozenFactors(TorchFunctionMode):
    """While open, no gradient passes a factor; the values stay what they are.

    `again` runs code on other values with the factors that it had the first time, in the order of their calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self._found: list[Tensor] = []
        self._again: Iterator[Tensor] | None = None

    def forget(self) -> None:
        """Forget the factors so far: what is run again begins here."""
        self._found = []

    @contextmanager
    def again(self) -> Iterator[None]:
        """A block in which factors are those since `forget`."""
        self._again = iter(self._found)
        try:
            with self:
                yield
        finally:
            self._again = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") not in FACTORS or not isinstance(given, Tensor):
            return given
        if self._again is None:
            self._found.append(given.detach())
            return given.detach()
        before = next(self._again, None)
        return given if before is None or before.shape != given.shape else before
