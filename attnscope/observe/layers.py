"""A layer that is asked, and what is kept per layer of one stack, keyed by stack and layer; see `stacks.py`.

How the entries of an attention matrix are read, and of which heads.

Shapes: B text, H head, H head (or kv head, where they are averaged), Q query, K key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import numpy as np

from attnscope.errors import UnknownLayerError, UsageError
from attnscope.model.selection import DECODER, STACKS, prefix
from attnscope.utils.display import number_list

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.attention.operator import AttentionOperator
    from attnscope.metrics.texts import Texts

T = TypeVar("T", covariant=True)


class LayerKey(NamedTuple):
    """A layer: its index, and its stack."""

    layer: int
    stack: str = DECODER


@dataclass(frozen=True)
class Layer:
    """What is asked: which layer, its operator, its kv heads, and the texts on its device.

    value_norms(start, stop): gives the norm of what a whole weight on a key writes, see `values.ValueNorms`; where
    values weigh. written(start, stop): gives what it adds to a logit, see `values.Directions`; where logits are asked
    about. further: more layers; their heads follow its own, see `side_by_side`.
    """

    key: LayerKey
    P: AttentionOperator
    kv_heads: int
    texts: Texts
    value_norms: Callable[[int, int], Tensor] | None = field(default=None, repr=False, compare=False, kw_only=True)
    written: Callable[[int, int], Tensor] | None = field(default=None, repr=False, compare=False, kw_only=True)
    further: Sequence[LayerKey] = field(default=(), kw_only=True)
    _here: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False, kw_only=True)

    @property
    def keys(self) -> tuple[LayerKey, ...]:
        """The layers whose heads it has."""
        return self.key, *self.further

    def here(self, tensor: Tensor) -> Tensor:
        """The tensor on the layer's device: the same one each time, since it distinguishes questions."""
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


ENTRIES = {"softmax": "weight", "scores": "score", "value": "norm", "logit": "logit"}  # the column of what a view reads


@dataclass(frozen=True)
class View:
    """How entries are read wherever they are tabled or drawn.

    weights: "softmax"; "scores", the logits after scale, cap, bias and mask; "value", the norm of what a key writes
    into the residual stream, A[i,j] |v_j W_O| (Kobayashi et al. 2020, arXiv 2004.10102), norms and gates as they were
    in the query's row; or "logit", what it adds to the logit of the answer's token, signed, in the rows that make the
    answer: over the mean of all tokens, or with a foil over the foil's first token. by_kv: average the query heads that
    share a kv head. heads: {layer: heads to keep}, None for all.

        >>> attnscope.Request(view=attnscope.View(by_kv=True, heads={0: [1, 2]}), relations=True)
    """

    weights: Literal["softmax", "scores", "value", "logit"] = "softmax"
    by_kv: bool = False
    heads: Mapping[int, Sequence[int]] | None = None
    foil: str | None = None

    def __post_init__(self) -> None:
        if self.foil is not None and self.weights != "logit":
            raise UsageError("a foil needs effects on a logit", "add {weights=logit}, or leave out {foil}")

    @property
    def by_size(self) -> bool:
        """Whether the strongest entries are the largest of either sign."""
        return self.weights == "logit"

    @property
    def of_heads(self) -> bool:
        """Whether entries are the weights of the heads themselves."""
        return self.weights == "softmax" and not self.by_kv

    def kept(self, layer: Layer) -> list[int]:
        """The heads (kv heads, when averaged) of a layer that this view keeps."""
        if self.heads is None:
            return list(range(layer.kv_heads if self.by_kv else layer.P.heads))
        starts = range(0, layer.P.heads, layer.P.heads // len(layer.keys))
        of_layers = [self.heads.get(key.layer, ()) for key in layer.keys]
        chosen = [start + head for start, heads in zip(starts, of_layers, strict=True) for head in heads]
        return sorted({layer.kv_head(head) for head in chosen}) if self.by_kv else chosen

    def rows(self, layer: Layer, heads: Sequence[int], start: int, stop: int) -> Tensor:
        """Entries of a block of queries, fp32 (B, len(heads), stop - start, K)."""
        entries = layer.P.scores(start, stop) if self.weights == "scores" else layer.P.rows(start, stop)
        if self.weights == "value":
            assert layer.value_norms is not None
            entries = entries * layer.value_norms(start, stop)
        if self.weights == "logit":
            assert layer.written is not None
            entries = entries * layer.written(start, stop)
        entries = layer.per_kv_head(entries) if self.by_kv else entries
        return entries if list(heads) == list(range(entries.shape[1])) else entries[:, list(heads)]

    def seen(self, layer: Layer, heads: Sequence[int], seen_BHQK: Tensor) -> Tensor:
        """Which entries of these heads there are, from what the query heads see, (B or 1, H or 1, Q, K) boolean.

        A kv head has a mean weight where any of its heads sees the key, and a mean logit where all of them do.
        """
        if seen_BHQK.shape[1] == 1:  # one mask for all heads
            return seen_BHQK
        if self.by_kv:
            grouped = seen_BHQK.unflatten(1, (layer.kv_heads, -1))
            seen_BHQK = grouped.all(2) if self.weights == "scores" else grouped.any(2)
        return seen_BHQK[:, list(heads)]
