"""What to keep of a layer's attention before its matrix is dropped: scores, relations, group masses, maps.

A probe says what it asks of a layer (`asks`), and makes of the answers something small that is kept (`keep`); each is
called once per layer. All probes' questions are answered in one pass. None keeps an N x N matrix unasked.

Shapes: B text, H head (or kv head, where a view averages them), Q query, K key, G group of tokens (of values: kv head,
and R its query heads), V width of v, k kept keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from attnscope.attention.operator import AttentionOperator
from attnscope.attention.questions import Question
from attnscope.attention.visibility import Visibility
from attnscope.keep.layers import LayerKey
from attnscope.measure.metrics import Texts

T = TypeVar("T")
Answers = Mapping[Question, Any]
WAITING_BYTES = 64 * 2**20
OfMasks = WeakKeyDictionary[Visibility, T]  # weak: a model that makes a mask per layer must not pile them up


@dataclass(frozen=True)
class Layer:
    """Where a probe stands: which layer, its operator, its kv heads, and the texts on its device.

    value_norms(start, stop): gives the norm of what a whole weight on a key writes, see `values.ValueNorms`; where
    values weigh. written(start, stop): gives what it adds to a logit, see `values.Directions`; where logits are asked
    about. beside: further layers, whose heads follow its own, see `side_by_side`.
    """

    key: LayerKey
    P: AttentionOperator
    kv_heads: int
    texts: Texts
    value_norms: Callable[[int, int], Tensor] | None = field(default=None, repr=False, compare=False, kw_only=True)
    written: Callable[[int, int], Tensor] | None = field(default=None, repr=False, compare=False, kw_only=True)
    beside: Sequence[LayerKey] = field(default=(), kw_only=True)
    _here: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False, kw_only=True)

    @property
    def keys(self) -> tuple[LayerKey, ...]:
        """The layers whose heads it has."""
        return self.key, *self.beside

    def here(self, tensor: Tensor) -> Tensor:
        """The tensor on the layer's device: the same one each time, since questions are told apart by it."""
        if tensor.device == self.P.device:
            return tensor
        if id(tensor) not in self._here:
            self._here[id(tensor)] = tensor, tensor.to(self.P.device)  # holding the first keeps its id its own
        return self._here[id(tensor)][1]

    def kv_head(self, head: int) -> int:
        """The kv head that a query head reads."""
        return head * self.kv_heads // self.P.heads

    def per_kv_head(self, values: Tensor) -> Tensor:
        """(B, H, ...) -> (B, kv heads, ...), the mean over the query heads that share a kv head."""
        return values.view(self.P.batch, self.kv_heads, -1, *values.shape[2:]).mean(2)


class Probe(Protocol):
    """What to ask of a layer and what to keep of it."""

    def asks(self, layer: Layer) -> Sequence[Question]:
        """The questions that the layer's pass should answer."""

    def keep(self, layer: Layer, answers: Answers) -> Any:
        """What stays of the layer, small, moved to the CPU with what others keep; None where there is nothing."""


def run_probes(probes: Mapping[str, Probe], layer: Layer) -> dict[str, Any]:
    """What each probe keeps of a layer, on its device; all their questions are answered in one pass."""
    answers = layer.P.together([question for probe in probes.values() for question in probe.asks(layer)])
    return {name: probe.keep(layer, answers) for name, probe in probes.items()}


class Waiting:
    """What layers keep, by layer, until it is taken to the CPU: of several at once, since each copy has the host wait.

    A device holds at most WAITING_BYTES of it, and what one layer keeps.
    """

    def __init__(self) -> None:
        self._kept: dict[LayerKey, Any] = {}
        self._device: torch.device | None = None
        self._bytes = 0

    def add(self, device: torch.device, kept: Mapping[LayerKey, Any]) -> dict[LayerKey, Any]:
        """Keep what layers do; what is taken to the CPU now, by layer, theirs included where they lie there."""
        ready = self.all() if device != self._device else {}
        self._kept |= kept
        self._device = device
        if device.type != "cpu":
            tensors = (one for one in tree_flatten(kept)[0] if isinstance(one, Tensor))
            self._bytes += sum(one.untyped_storage().nbytes() for one in tensors)  # of a part all that it is part of
            if self._bytes <= WAITING_BYTES:
                return ready
        return ready | self.all()

    def all(self) -> dict[LayerKey, Any]:
        """All that waits, on the CPU."""
        kept, self._kept, self._bytes = self._kept, {}, 0
        on_cpu = self._device is None or self._device.type == "cpu"
        return kept if on_cpu or not kept else on_host(kept)


def on_host(kept: Any) -> Any:
    """What was kept, whatever holds it, with its tensors on the CPU: in one copy, since each has the host wait."""
    leaves, form = tree_flatten(kept)
    away = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.device.type != "cpu"]
    away.sort(key=lambda place: -leaves[place].element_size())  # so that each lies where its dtype may
    parts = [leaves[place].flatten().view(torch.uint8) for place in away]
    moved = torch.cat(parts).cpu().split([len(part) for part in parts]) if parts else ()
    for place, part in zip(away, moved, strict=True):
        leaves[place] = part.view(leaves[place].dtype).view(leaves[place].shape)
    return tree_unflatten(leaves, form)
