"""One forward pass that carries many variants of a batch: a variant's rows branch off where it begins to differ.

The pass begins with the B texts as they are. Before the decoder layer in which a variant first differs, their rows are
repeated for it, so that no layer below is computed twice. At the end there are B rows of the texts, then B of every
variant, in the order in which the variants begin.

Shapes: B text, N row (text, or variant and text).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnscope.hooks.calls import AttentionCall
from attnscope.hooks.engines import UNCHECKED
from attnscope.hooks.listen import listen

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel


class BranchError(Exception):
    """This model's rows cannot be repeated on the way; why, in words."""


@dataclass(frozen=True)
class DecoderLayers:
    """The decoder layers of a model: around[layer]: the one around an attention layer; all: in order, others too.

    attention[layer]: the module that attends in it.
    """

    around: Mapping[int, nn.Module]
    all: tuple[nn.Module, ...]
    attention: Mapping[int, nn.Module]

    def start(self, layer: int) -> int:
        """How many decoder layers run before an attention layer."""
        return self.all.index(self.around[layer])


def decoder_layers(loaded: LoadedModel, ids: Sequence[int]) -> DecoderLayers:
    """The decoder layers, found by reading some tokens. Raises BranchError where attention is shared between them."""
    around: dict[int, nn.Module] = {}
    attention: dict[int, nn.Module] = {}
    lists: dict[nn.Module, None] = {}

    def note(call: AttentionCall, output: Tensor) -> Tensor:
        place = call.place
        number = re.search(r"\.\d+(?=\.|$)", place.path)
        if number is None:
            raise BranchError(f"{place.path} is in no list of layers")
        module = loaded.model.get_submodule(place.path[: number.end()])
        if around.setdefault(place.layer, module) is not module:
            raise BranchError("its layers share their attention")
        attention.setdefault(place.layer, place.module)
        lists[loaded.model.get_submodule(place.path[: number.start()])] = None
        return output

    ids_BT = torch.tensor([list(ids)], device=loaded.device)
    listen(loaded.model, ids_BT, unheard, engine=replace(UNCHECKED, change=note))
    return DecoderLayers(around, tuple(layer for layers in lists for layer in layers.children()), attention)


def unheard(call: object) -> None:
    """Nothing is asked of the attention."""


@contextmanager
def branching(layers: Sequence[nn.Module], adds: Mapping[nn.Module, int], batch: int) -> Iterator[None]:
    """While open, decoder layers get more rows than before: adds[layer] more variants of the batch's first rows.

    layers: all decoder layers, in order. Raises BranchError out of the pass where a layer is run twice, is given no
    rows, or is given what other layers keep.
    """
    rows, waiting = batch, list(dict.fromkeys(layers))

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        nonlocal rows
        # A variant that branched off twice, or whose rows are not where they are expected, would be another's.
        if module not in waiting:
            raise BranchError("it runs a layer more than once")
        waiting.remove(module)
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0] if args else None
        if not isinstance(hidden, Tensor) or hidden.ndim != 3 or len(hidden) != rows:
            raise BranchError("its layers are not given one row per text")
        sizes, rows = {rows, batch}, rows + adds.get(module, 0) * batch

        # Masks and positions grow as the hidden states do. What has one row serves all, and is left to broadcast.
        def grown(value: Any) -> Any:
            if isinstance(value, Tensor):
                repeated = value is hidden or (value.ndim > 1 and len(value) in sizes and len(value) > 1)
                return with_copies(value, batch, rows) if repeated else value
            if isinstance(value, Mapping) and value:
                raise BranchError("its layers hand each other keys and values")
            return type(value)(map(grown, value)) if type(value) in (tuple, list) else value

        return tuple(map(grown, args)), {name: grown(value) for name, value in kwargs.items()}

    with ExitStack() as stack:
        for layer in tuple(waiting):
            stack.callback(layer.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
        yield


def with_copies(value: Tensor, batch: int, rows: int) -> Tensor:
    """The tensor with copies of its first `batch` rows after its own, until there are so many.

    >>> with_copies(torch.tensor([[1], [2], [9], [9]]), 2, 6).T
    tensor([[1, 2, 9, 9, 1, 2]])
    """
    missing = (rows - len(value)) // batch
    return torch.cat([value, value[:batch].repeat(missing, *[1] * (value.ndim - 1))]) if missing else value
