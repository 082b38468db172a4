"""The norms of a model while it runs, each row with the scale that the intact pass gave it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from attnscope.hooks.calls import relative_error
from attnscope.hooks.projections import Norm, norm_of
from attnscope.hooks.report import tolerance
from attnscope.model.modules import weights_of

TRIED = 32  # tokens
NORM = re.compile("norm", re.IGNORECASE)


class FrozenNorms:
    """While open, a gradient passes each norm as if its scale were a constant; the values stay what they are.

    `again` runs modules on other values with the scales that the first run found.
    """

    def __init__(self, model: nn.Module) -> None:
        self._norms = [one for one in model.modules() if is_norm(one)]
        self._found: dict[nn.Module, list[tuple[Norm, Tensor]]] = {}
        self._again: dict[nn.Module, Iterator[tuple[Norm, Tensor]]] | None = None
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        self._handles = [one.register_forward_hook(self._freeze, with_kwargs=True) for one in self._norms]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def forget(self, but: nn.Module | None = None) -> None:
        """Forget the scales so far: what is run again begins here. but: a norm that keeps its scale."""
        self._found = {norm: found for norm, found in self._found.items() if norm is but}

    @contextmanager
    def again(self) -> Iterator[None]:
        """A block in which norms take the scales that they had since `forget`, in the order in which they ran."""
        self._again = {norm: iter(found) for norm, found in self._found.items()}
        try:
            yield
        finally:
            self._again = None

    def _freeze(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.is_floating_point()]
        if len(given) != 1 or not isinstance(output, Tensor):
            return None
        [x] = given
        if self._again is not None:
            found = next(self._again.get(module, iter(())), None)
            return None if found is None else found[0].frozen(x.float(), found[1]).to(output.dtype)
        if not x.requires_grad:  # before the residual begins, or in a tower
            return None
        with torch.no_grad():
            norm = norm_of(module, _some_rows(x), _some_rows(output), _close)
            if norm is None:
                return None
            scale = norm.scale(x.float(), output.float())
            self._found.setdefault(module, []).append((norm, scale))
        return norm.frozen(x.float(), scale).to(output.dtype)


def _some_rows(x: Tensor) -> Tensor:
    """Float32: some first parts of a tensor, spread over the text, of which it is found out what norm it is.

    A row in which it is another would be missing from the sum, which is compared with the logit.
    """
    if x.ndim < 3:
        return x.float()
    return x[:, :: max(1, x.shape[1] // TRIED)].float()


def is_norm(module: nn.Module) -> bool:
    """Whether a module may be a norm, by its name: one without parts, with a weight per number of a row."""
    named = NORM.search(type(module).__name__) is not None
    return named and not list(module.children()) and all(one.ndim <= 2 for one in weights_of(module).values())


def _close(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and float(relative_error(found, expected)) <= tolerance("float32")[1]
