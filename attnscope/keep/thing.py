"""A thing that is kept: what asks the layers for it, and what it is of one text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from attnscope.keep.layers import LayerKey, PerLayer
from attnscope.keep.probe import Probe

T = TypeVar("T")
FoundByLayer = Mapping[LayerKey, Any]  # what the probe kept of each layer


class Thing(NamedTuple):
    """probe: asks every layer of a stack. of_texts: cuts what it kept of all layers into the texts, one entry each.

    of_heads: whether the probe keeps of a layer that has the heads of several what it keeps of each; see `together.py`.
    in_order: whether what it asks of a layer depends on what it kept of those before.
    """

    probe: Probe
    of_texts: Callable[[FoundByLayer], Sequence[Any]]
    of_heads: bool = False
    in_order: bool = False


def text_by_text(found: FoundByLayer, texts: int, cut: Callable[[Any, int], T]) -> list[PerLayer[T]]:
    """What was kept of every layer, a text each; cut: a layer's, and the number of the text -> its part."""
    return [PerLayer({key: cut(kept, row) for key, kept in found.items()}) for row in range(texts)]
