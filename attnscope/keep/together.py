"""Layers of a short text are asked together: what a question costs in Python is paid once for several of them.

Shapes: B text, H head, L layer, Q query, K key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attnscope.attention.operator import DenseAttention
from attnscope.attention.questions import Question
from attnscope.attention.tiled.small import SmallAttention
from attnscope.keep.layers import LayerKey
from attnscope.keep.probe import Layer, run_probes
from attnscope.keep.thing import Thing
from attnscope.seam.engines import full_precision

TOGETHER_BYTES = 2**20  # of the matrices of layers that wait for each other: what a core's own cache holds


class Together:
    """Layers whose small matrices wait, on a CPU, until those of one mask and one shape are asked as one layer.

    >>> together = Together(things)
    >>> found = together.add(layer) | together.all()    # {layer: {thing: what its probe keeps}}
    """

    def __init__(self, things: Mapping[str, Thing]) -> None:
        self.things = things
        self._waiting: list[Layer] = []

    def add(self, layer: Layer) -> dict[LayerKey, dict[str, Any]]:
        """What is known now: of the layers that waited where this one cannot join them, its own where it does not wait.

        What is kept of all heads alike lies at the first of the layers that were asked together.
        """
        if not _is_small(layer) or any(one.in_order for one in self.things.values()):
            return self.all() | {layer.key: run_probes({name: one.probe for name, one in self.things.items()}, layer)}
        joins = not self._waiting or _alike(self._waiting[0], layer)
        fits = _bytes(layer) * (len(self._waiting) + 1) <= TOGETHER_BYTES
        found = {} if joins and fits else self.all()
        self._waiting.append(layer)
        return found

    def all(self) -> dict[LayerKey, dict[str, Any]]:
        """What is kept of all layers that wait."""
        layers, self._waiting = self._waiting, []
        if not layers:
            return {}
        with torch.no_grad(), full_precision(layers[0].P.device):  # the pass, which saw to both, may be over
            return asked_together(self.things, layers)


def asked_together(things: Mapping[str, Thing], layers: Sequence[Layer]) -> dict[LayerKey, dict[str, Any]]:
    """What the probes keep of alike layers, from one block with the heads of all; see `Together.add`."""
    whole = side_by_side(layers)
    of_heads = {name: one.probe for name, one in things.items() if one.of_heads}
    of_layers = {name: one.probe for name, one in things.items() if not one.of_heads}
    asked = [[question for probe in of_layers.values() for question in probe.asks(layer)] for layer in layers]
    shared = [question for question in asked[0] if _of_all_heads(question) and all(question in own for own in asked)]
    questions = [question for probe in of_heads.values() for question in probe.asks(whole)]
    answers = whole.P.together([*questions, *shared])
    found: dict[LayerKey, dict[str, Any]] = {}
    for number, (layer, own) in enumerate(zip(layers, asked, strict=True)):
        heads = slice(number * layer.P.heads, (number + 1) * layer.P.heads)
        known = {question: _of_heads(answers[question], heads) for question in shared}
        known |= layer.P.together([question for question in own if question not in known])
        found[layer.key] = {name: probe.keep(layer, known) for name, probe in of_layers.items()}
        if isinstance(layer.P, SmallAttention):
            layer.P.answered(answers)
    found[layers[0].key] |= {name: probe.keep(whole, answers) for name, probe in of_heads.items()}
    return found


def side_by_side(layers: Sequence[Layer]) -> Layer:
    """Alike layers as one that has the heads of all, layer by layer."""
    first = layers[0]
    if len(layers) == 1:
        return first
    P = DenseAttention(torch.cat([one.P.dense() for one in layers], 1), first.P.visible)
    P.sums_to_one = first.P.sums_to_one
    beside = [one.key for one in layers[1:]]
    return Layer(first.key, P, first.kv_heads * len(layers), first.texts, beside=beside)


def _is_small(layer: Layer) -> bool:
    """Whether a layer is cheaper to ask beside others: all its heads share a mask, and its matrix is small and here."""
    mask = layer.P.visible.mask
    dense = type(layer.P) in (DenseAttention, SmallAttention) and layer.P.device.type == "cpu"
    return dense and (mask is None or mask.shape[1] == 1) and _bytes(layer) <= TOGETHER_BYTES // 2


def _bytes(layer: Layer) -> int:
    return 4 * layer.P.batch * layer.P.heads * layer.P.queries * layer.P.keys


def _alike(one: Layer, other: Layer) -> bool:
    shapes = [(layer.P.heads, layer.kv_heads, layer.P.sums_to_one) for layer in (one, other)]
    return one.P.visible is other.P.visible and shapes[0] == shapes[1]


def _of_all_heads(question: Question) -> bool:
    """Whether a question is of every head, so that the answer for some of them is a part of it."""
    return getattr(question, "heads", None) is None


def _of_heads(answer: Any, heads: slice) -> Any:
    return tuple(part[:, heads] for part in answer) if isinstance(answer, tuple) else answer[:, heads]
