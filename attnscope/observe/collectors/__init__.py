"""What is kept of a forward pass, one file each, and how layers are asked for it before their matrices are dropped.

A collector says what it asks of a layer (`questions`), and makes of the answers something small that is kept
(`collect`); each is called once per layer. All collectors' questions are answered in one pass. None keeps an N x N
matrix unasked. Layers of a short text are asked together: what a question costs in Python is paid once for several.

Shapes: B text, H head (or kv head, where a view averages them), L layer, Q query, K key, G group of tokens (of values:
kv head, and R its query heads), V width of v, k kept keys.

Groups of tokens: the named, the units of a text, and the mass between them. B text, H head, G group, T token.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, ClassVar, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from attnscope.attention.operator import DenseAttention
from attnscope.attention.questions import GroupMass, Question
from attnscope.attention.rows import indicator
from attnscope.attention.spec import Visibility
from attnscope.attention.tiling import SmallAttention
from attnscope.hooks.engines import full_precision
from attnscope.inputs.prompt import Prompt, Span
from attnscope.inputs.tokens import TokenMatch
from attnscope.metrics.texts import MAP_SIDE
from attnscope.observe.request import Layer, LayerKey, PerLayer, Request, TextInputs, View

T = TypeVar("T")
Answers = Mapping[Question, Any]
Collected = Mapping[LayerKey, Any]  # what a collector kept of each layer
PENDING_BYTES = 64 * 2**20
TOGETHER_BYTES = 2**20  # of the matrices of layers that wait for each other: what a core's own cache holds


class OfMasks(WeakKeyDictionary[Visibility, T]):
    """What is made of a mask once: layers that share it share that. Weak: a mask per layer must not pile up."""

    def of(self, visible: Visibility, make: Callable[[], T]) -> T:
        """What `make` makes at the first ask."""
        if visible not in self:
            self[visible] = make()
        return self[visible]


class LayerCollector(Protocol):
    """What to ask of a layer and what to keep of it."""

    @abstractmethod
    def questions(self, layer: Layer) -> Sequence[Question]:
        """The questions that the layer's pass should answer."""

    @abstractmethod
    def collect(self, layer: Layer, answers: Answers) -> Any:
        """What stays of the layer, small, moved to the CPU with the rest; None where there is nothing."""


class Collector(LayerCollector):
    """One thing that is kept of a pass: what it asks of a layer, what it keeps of the answers, and of one text.

    Each is a class with a name in a file of `collectors/`, where `collectors` finds it: another file is another thing
    that is kept. name: what `Observation.kept` has it by. Where `Request` has a field of that name it is kept where the
    field is set, else always. of_heads: whether it keeps of a layer with the heads of several what it keeps of each,
    see `side_by_side`. in_order: whether what it asks of a layer depends on what it kept of those before.
    """

    name: ClassVar[str]
    in_order: ClassVar[bool] = False

    @property
    def of_heads(self) -> bool:
        return False

    @classmethod
    @abstractmethod
    def of(cls, texts: Sequence[TextInputs], request: Request) -> Collector | None:
        """What collects what is asked of one stack over some texts; None where that is nothing."""

    def of_layers(self, collected: Any, layers: Sequence[Layer]) -> dict[LayerKey, Any]:
        """What was kept of a block with the heads of all layers, by layer; at the first where it is not cut."""
        return {layers[0].key: collected}

    def of_text(self, collected: Any, row: int, text: TextInputs) -> Any:
        """One text's part of what was kept of a layer; row: which of the texts it is."""
        raise NotImplementedError(f"{type(self).__name__} cuts what it keeps of all layers into texts")

    def of_texts(self, collected: Collected, texts: Sequence[TextInputs]) -> Sequence[Any]:
        """What was kept of all layers, an entry for each text."""
        return [
            PerLayer({key: self.of_text(part, row, text) for key, part in collected.items()})
            for row, text in enumerate(texts)
        ]


class ViewCollector(Collector):
    """What is kept of the heads that a view keeps; of a layer without one nothing is asked, and nothing kept.

    cuts: whether `part` cuts what is kept of some heads: weights are then kept of several layers at once.
    """

    cuts: ClassVar[bool] = False

    view: View

    @property
    def of_heads(self) -> bool:
        return self.cuts and self.view.weights == "softmax"  # a block has weights, not how they were made

    def questions(self, layer: Layer) -> Sequence[Question]:
        return self.ask(layer) if self.view.kept(layer) else ()

    def collect(self, layer: Layer, answers: Answers) -> Any:
        heads = self.view.kept(layer)
        return self.keep(layer, heads, answers) if heads else None

    def ask(self, layer: Layer) -> Sequence[Question]:
        """`questions` of a layer with such heads: none where its rows themselves are read."""
        return ()

    @abstractmethod
    def keep(self, layer: Layer, heads: list[int], answers: Answers) -> Any:
        """`collect` of a layer with these heads."""

    def of_layers(self, collected: Any, layers: Sequence[Layer]) -> dict[LayerKey, Any]:
        start, parts = 0, dict[LayerKey, Any]()
        for layer in layers:
            if heads := self.view.kept(layer):
                parts[layer.key] = self.part(collected, slice(start, start + len(heads)), heads)
                start += len(heads)
        return parts

    def part(self, collected: Any, places: slice, heads: list[int]) -> Any:
        """Of what `keep` kept that of the heads at some places, whose numbers in their layer are `heads`.

        Here of a record with the numbers of its heads, then what is kept of them, (B, H, ...) each.
        """
        return type(collected)(heads, *(of_heads[:, places] for of_heads in collected[1:]))


@cache
def collectors() -> Mapping[str, type[Collector]]:
    """Every collector by its name: those that are always kept, then those that `Request` has a field for, in its order.

    The order is the same whatever was imported first, since manifests list who answered which question.
    """
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    named = {
        kind.name: kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Collector) and "name" in vars(kind)
    }
    order = {field.name: place for place, field in enumerate(fields(Request), 1)}
    return {name: named[name] for name in sorted(named, key=lambda name: (order.get(name, 0), name))}


def wanted_collectors(texts: Sequence[TextInputs], request: Request) -> dict[str, Collector]:
    """What collects all that is to be kept of one stack over some texts, by name."""
    wanted = {name: kind.of(texts, request) for name, kind in collectors().items() if getattr(request, name, True)}
    return {name: collector for name, collector in wanted.items() if collector is not None}


def collect_layer(collectors: Mapping[str, LayerCollector], layer: Layer) -> dict[str, Any]:
    """What each collector keeps of a layer, on its device; all their questions are answered in one pass."""
    answers = layer.P.together(_questions(collectors, layer))
    return {name: collector.collect(layer, answers) for name, collector in collectors.items()}


def _questions(collectors: Mapping[str, LayerCollector], layer: Layer) -> list[Question]:
    return [question for collector in collectors.values() for question in collector.questions(layer)]


class LayerBatcher:
    """Layers whose small matrices wait, on a CPU, until those of one mask and one shape are asked as one layer.

    >>> batcher = LayerBatcher(collectors)
    >>> found = batcher.add(layer) | batcher.all()    # {layer: {collector: what it keeps}}
    """

    def __init__(self, collectors: Mapping[str, Collector]) -> None:
        self.collectors = collectors
        self._one_by_one = any(collector.in_order for collector in collectors.values())
        self._waiting: list[Layer] = []

    def add(self, layer: Layer) -> dict[LayerKey, dict[str, Any]]:
        """What is known now: of the layers that waited where this one cannot join them, its own where it does not wait.

        What is kept of all heads alike lies at the first of the layers that were asked together.
        """
        if self._one_by_one or not _is_small(layer):
            return self.all() | {layer.key: collect_layer(self.collectors, layer)}
        joins = not self._waiting or _alike(self._waiting[0], layer)
        fits = _bytes(layer) * (len(self._waiting) + 1) <= TOGETHER_BYTES
        ready = {} if joins and fits else self.all()
        self._waiting.append(layer)
        return ready

    def all(self) -> dict[LayerKey, dict[str, Any]]:
        """What is kept of all layers that wait."""
        layers, self._waiting = self._waiting, []
        if not layers:
            return {}
        with torch.no_grad(), full_precision(layers[0].P.device):  # the pass, which saw to both, may be over
            return collect_together(self.collectors, layers)


def collect_together(collectors: Mapping[str, Collector], layers: Sequence[Layer]) -> dict[LayerKey, dict[str, Any]]:
    """What the collectors keep of alike layers, from one block with the heads of all; see `LayerBatcher.add`."""
    whole = side_by_side(layers)
    of_block = {name: collector for name, collector in collectors.items() if collector.of_heads}
    of_layers = {name: collector for name, collector in collectors.items() if name not in of_block}
    answers = whole.P.together(_questions(of_block, whole))
    kept = {layer.key: collect_layer(of_layers, layer) for layer in layers}
    for name, collector in of_block.items():
        for key, collected in collector.of_layers(collector.collect(whole, answers), layers).items():
            kept[key][name] = collected
    for layer in layers:
        if isinstance(layer.P, SmallAttention):
            layer.P.answered(answers)  # its report says who answered what, here the block
    return kept


def side_by_side(layers: Sequence[Layer]) -> Layer:
    """Alike layers as one that has the heads of all, layer by layer."""
    first = layers[0]
    if len(layers) == 1:
        return first
    P = DenseAttention(torch.cat([layer.P.dense() for layer in layers], 1), first.P.visible)
    P.sums_to_one = first.P.sums_to_one
    further = [layer.key for layer in layers[1:]]
    return Layer(first.key, P, first.kv_heads * len(layers), first.texts, further=further)


def _is_small(layer: Layer) -> bool:
    """Whether a layer is cheaper to ask with others: its heads share a mask, and its matrix is small and here."""
    mask = layer.P.visible.mask
    dense = type(layer.P) in (DenseAttention, SmallAttention) and layer.P.device.type == "cpu"
    return dense and (mask is None or mask.shape[1] == 1) and _bytes(layer) <= TOGETHER_BYTES // 2


def _bytes(layer: Layer) -> int:
    return 4 * layer.P.batch * layer.P.heads * layer.P.queries * layer.P.keys


def _alike(one: Layer, other: Layer) -> bool:
    shapes = [(layer.P.heads, layer.kv_heads, layer.P.sums_to_one) for layer in (one, other)]
    return one.P.visible is other.P.visible and shapes[0] == shapes[1]


class PendingTransfers:
    """What layers keep, by layer, until it is taken to the CPU: of several at once, since each copy has the host wait.

    A device holds at most PENDING_BYTES of it, and what one layer keeps.
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
            tensors = (leaf for leaf in tree_flatten(kept)[0] if isinstance(leaf, Tensor))
            self._bytes += sum(leaf.untyped_storage().nbytes() for leaf in tensors)  # of a part all that it is part of
            if self._bytes <= PENDING_BYTES:
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


def group_question(layer: Layer, query_groups_BT: Tensor, key_groups_BT: Tensor) -> GroupMass:
    """What a probe asks of a layer for the mass between groups, (B, T) numbers each, -1 for none."""
    sizes = int(query_groups_BT.max()) + 1, int(key_groups_BT.max()) + 1  # counted where they are: on the host
    return GroupMass(layer.here(query_groups_BT), layer.here(key_groups_BT), sizes)


def group_mass(layer: Layer, view: View, answers: Answers, query_groups_BT: Tensor, key_groups_BT: Tensor) -> Tensor:
    """(B, H, G, G): sum over the keys of a group, mean over its queries, so rows keep their sum."""
    question = group_question(layer, query_groups_BT, key_groups_BT)
    size_BG = indicator(question.query_group_BQ, question.counts[0]).sum(1).clamp_min(1)
    return view.select(layer, view.kept(layer), answers[question]) / size_BG[:, None, :, None]


def bins(prompt: Prompt, most: int = MAP_SIDE) -> list[Span]:
    """The text cut into at most `most` runs of as many tokens each; single tokens where that is enough.

    >>> [unit.name for unit in bins(prompt, 3)]
    ['<s> the', ' bank is', ' wide']
    """
    size = -(-len(prompt) // most)
    return [
        Span(start, min(len(prompt), start + size), "".join(prompt.tokens[start : start + size]))
        for start in range(0, len(prompt), size)
    ]


def units_of(prompt: Prompt, group: str) -> Sequence[Span]:
    """The units of a prompt: its tokens, words or sentences, or `bins` of tokens."""
    if group in ("bins", "tokens"):
        return bins(prompt) if group == "bins" else bins(prompt, len(prompt))
    return prompt.spans(group)


def groups_of(prompts: Sequence[Prompt], group: str) -> Tensor:
    """The number of each token's group, (B, T); -1 for padding."""
    groups_BT = torch.full((len(prompts), max(len(prompt) for prompt in prompts)), -1)
    for row, prompt in enumerate(prompts):
        for number, unit in enumerate(units_of(prompt, group)):
            groups_BT[row, unit.start : unit.stop] = number
    return groups_BT


def marked(matches: Sequence[TokenMatch | None], longest: int, default: bool) -> Tensor | None:
    """True on each text's named tokens, (B, T); `default` in a text that names none, None where none does."""
    if not any(matches):
        return None
    marked_BT = torch.full((len(matches), longest), default)
    for row, match in enumerate(matches):
        if match is not None:
            marked_BT[row] = False
            marked_BT[row, list(match.positions)] = True
    return marked_BT
