"""What is kept per layer of one stack, keyed by stack and layer; see `stacks.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from attnscope.cells import number_list
from attnscope.errors import UnknownLayerError, UsageError
from attnscope.stacks import DECODER, STACKS, prefix

T = TypeVar("T", covariant=True)


class LayerKey(NamedTuple):
    """A layer: its index, and its stack."""

    layer: int
    stack: str = DECODER


def codes(stacks: Sequence[str] | np.ndarray) -> np.ndarray:
    """The place of each stack in STACKS, (N,) int8.

    >>> codes(["cross", "encoder"])
    array([2, 0], dtype=int8)
    """
    return np.array([STACKS.index(stack) for stack in stacks], np.int8)


class ModelLayers(NamedTuple):
    """The layers of a stack: the numbers of those with attention, and {layer: type} of those without."""

    attending: Sequence[int]
    without: Mapping[int, str]


class PerLayer(Mapping[LayerKey, T]):
    """{layer: something} of one stack, in the model's order; `found[3]` is `found[3, "decoder"]` in a causal model.

    Raises UnknownLayerError, which is a KeyError, for a layer that is not there, such as one without attention. model:
    the stack's layers, where they are known: the refusal says which of them attend.

    >>> PerLayer({LayerKey(3): "kept"})[3]
    'kept'
    """

    def __init__(self, found: Mapping[LayerKey, T] | None = None, model: ModelLayers | None = None) -> None:
        self._found, self.model = dict(found or {}), model
        self._stack = next((key.stack for key in self._found), DECODER)

    def __getitem__(self, key: int | tuple[int, str]) -> T:
        if isinstance(key, str):
            how = f"write [{int(key)}]" if key.isdecimal() else "write weights[1][4], or matrix('L1H4')"
            raise UsageError(f"expected the number of a layer, got {key!r}", how)
        layer = LayerKey(*key) if isinstance(key, tuple) else LayerKey(key, self._stack)
        if layer not in self._found:
            raise self._unknown(layer)
        return self._found[layer]

    def _unknown(self, layer: LayerKey) -> UnknownLayerError:
        named = f"{prefix(layer.stack)}layer {layer.layer}"
        if self.model is not None and layer.stack == self._stack and layer.layer not in self.model.attending:
            kind = self.model.without.get(layer.layer)
            message = (
                f"there is no {named}"
                if kind is None
                else f"{named} has no attention over the text, its type is {kind}"
            )
            return UnknownLayerError(message, f"layers with attention: {number_list(self.model.attending)}")
        if not self._found:
            return UnknownLayerError("nothing was kept of any layer: it was not asked for", "name it in the Request")
        known = ", ".join(f"{prefix(key.stack)}{key.layer}" for key in self._found)
        return UnknownLayerError(f"nothing of {named} was kept: it was not asked for", f"take {known}")

    def __contains__(self, key: object) -> bool:
        return (LayerKey(key, self._stack) if isinstance(key, int) else key) in self._found

    def __iter__(self) -> Iterator[LayerKey]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return f"PerLayer of {len(self)} layers"
