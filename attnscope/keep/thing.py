"""A thing that is kept: what asks the layers for it, and what it is of one text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from attnscope.keep.layers import LayerKey
from attnscope.keep.probe import Probe

FoundByLayer = Mapping[LayerKey, Any]  # what the probe kept of each layer


class Thing(NamedTuple):
    """probe: asks every layer of a stack. of_texts: cuts what it kept of all layers into the texts, one entry each."""

    probe: Probe
    of_texts: Callable[[FoundByLayer], Sequence[Any]]
