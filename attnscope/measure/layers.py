"""What is kept per layer, keyed by layer and kind of attention.

A model may have several stacks: the attention of a decoder, of an encoder, from one to the other. Every causal model's
layers are of kind "decoder", and a plain layer number means those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeVar

T = TypeVar("T", covariant=True)
DECODER = "decoder"


class LayerKey(NamedTuple):
    """A layer: its index, and the kind of attention that it computes."""

    layer: int
    kind: str = DECODER


class PerLayer(Mapping[LayerKey, T]):
    """{layer: something}, in the model's order; `found[3]` is `found[3, "decoder"]`.

    >>> PerLayer({LayerKey(3): "kept"})[3]
    'kept'
    """

    def __init__(self, found: Mapping[LayerKey, T] | None = None) -> None:
        self._found = dict(found or {})

    def __getitem__(self, key: int | tuple[int, str]) -> T:
        return self._found[LayerKey(*key) if isinstance(key, tuple) else LayerKey(key)]

    def __contains__(self, key: object) -> bool:
        return (LayerKey(key) if isinstance(key, int) else key) in self._found

    def __iter__(self) -> Iterator[LayerKey]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return f"PerLayer of {len(self)} layers"
