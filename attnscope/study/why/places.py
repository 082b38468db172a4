"""The place of a head: which runs of blocks write the residual of its queries, and that of its keys.

Found by one pass over a few tokens. A cross layer's keys are of the encoder, and its queries of the decoder; elsewhere
both are of one residual.

Shapes: B text, T token, E model width.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnscope.errors import ModelError
from attnscope.hooks.engines import UNCHECKED
from attnscope.hooks.families import FROM_ENCODER
from attnscope.hooks.listen import listen
from attnscope.hooks.report import turned
from attnscope.model.selection import DECODER, ENCODER, VISION, is_cross, prefix
from attnscope.study.why.frozen import is_norm

if TYPE_CHECKING:
    from attnscope.hooks.calls import AttentionCall
    from attnscope.hooks.calls import CallSite as CallPlace
    from attnscope.model.loaded import LoadedModel

logger = logging.getLogger(__name__)
TRIED = 8  # tokens by which the blocks are found
TARGET = "decoder_input_ids"
ANOTHER = "choose another model"
LOST = "the residual of this model cannot be followed"


@dataclass(frozen=True)
class BlockRun:
    """One run of a block; number: of its first layer with attention, else its place among the runs."""

    block: nn.Module
    number: int


@dataclass(frozen=True)
class Course:
    """The runs of blocks that write a residual, in order. group: ENCODER or DECODER, the part that they are of.

    stack: that they are of, as a component names it; None for the model's own.
    """

    group: str
    stack: str | None
    runs: tuple[BlockRun, ...]


@dataclass(frozen=True)
class HeadPlace:
    """The place of the heads of one attention.

    module: the one that attends, in a call of this stack and layer. query, key: what writes the residuals of its
    queries and of its keys; key is None where the encoder's blocks are not found. within: whether more of its block
    runs before it than norms: then its residual is read in front of it, not where the block begins. norm: the one whose
    output the module is given; tail: the one whose output the encoder gives. attention: every module that attends.
    """

    module: nn.Module
    stack: str
    layer: int
    query: Course
    key: Course | None
    within: bool
    norm: nn.Module | None
    tail: nn.Module | None
    attention: frozenset[nn.Module]

    @property
    def crosses(self) -> bool:
        """Whether its keys are of another residual than its queries."""
        return self.key is not self.query

    @property
    def courses(self) -> list[Course]:
        """Those that are followed."""
        return [self.query, self.key] if self.key is not None and self.crosses else [self.query]


def place_of(loaded: LoadedModel, reads: Tensor, inputs: Mapping[str, Any], stack: str, layer: int) -> HeadPlace:
    """The place of a layer's attention. Raises ModelError where it makes no call, or its blocks are in no list.

    reads, inputs: what the model's forward is given first, and by name.
    """
    if loaded.geometry.over_patches:
        raise ModelError(f"{LOST}: its layers are over bytes and patches of them", ANOTHER)
    seen = _Seen(loaded.model, stack, layer)
    few, more = _few(reads, inputs)
    with seen.watching():
        report = listen(loaded.model, few, seen.on_call, engine=UNCHECKED, **more)
    for line in turned(report.calls):
        logger.warning("does not hold: %s", line)
    return seen.place(loaded.geometry.stack)


def _few(reads: Tensor, inputs: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """The first tokens of a text, and of its target; what is read otherwise is read as a whole."""
    if reads.is_floating_point() or inputs.keys() - {TARGET}:
        return reads, dict(inputs)
    return reads[:, :TRIED], {name: value[:, :TRIED] for name, value in inputs.items()}


class _Seen:
    """What happened in a pass: which parts of lists began, which attention was called, and what norms gave."""

    def __init__(self, model: nn.Module, stack: str, layer: int) -> None:
        self.model, self.stack, self.layer = model, stack, layer
        self.events: list[nn.Module | CallPlace] = []
        self.given: dict[nn.Module, Tensor] = {}
        self.gave: dict[nn.Module, Tensor] = {}
        self.normed: list[tuple[nn.Module, Tensor, Tensor]] = []
        self.target: CallPlace | None = None
        self.norm: nn.Module | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        listed = {id(part) for one in self.model.modules() if isinstance(one, nn.ModuleList) for part in one}
        handles: list[Any] = []
        for module in self.model.modules():
            handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            if id(module) in listed or is_norm(module):
                handles.append(module.register_forward_hook(self._after, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.events.append(module)
        found = hidden_of(args, kwargs)
        if found is not None:
            self.given[module] = found

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        found = output[0] if isinstance(output, tuple | list) else output
        if isinstance(found, Tensor):
            self.gave[module] = found
            given = hidden_of(args, kwargs)
            if is_norm(module) and given is not None:
                self.normed.append((module, given, found))

    def on_call(self, call: AttentionCall) -> None:
        self.events.append(call.place)
        if self.target is None and (call.stack, call.layer) == (self.stack, self.layer):
            self.target = call.place
            given = self.given.get(call.module)
            self.norm = next((one for one, _, gave in reversed(self.normed) if gave is given), None)

    def place(self, plain: str) -> HeadPlace:
        """The place of the target. plain: the model's own stack."""
        if self.target is None:
            raise ModelError(f"{prefix(self.stack)}layer {self.layer} made no attention call", "choose another layer")
        groups = self._groups()
        runs, before = self._until(groups, group_of(self.stack))
        query = Course(group_of(self.stack), _named(group_of(self.stack), plain), runs)
        key: Course | None = query
        tail = None
        if is_cross(self.stack):
            every, _ = self._until(groups, ENCODER)
            key = Course(ENCODER, _named(ENCODER, plain), every) if every else None
            tail = self._tail(every) if every else None
        residual = self.given.get(runs[-1].block)
        within = before or residual is None or residual.ndim != 3
        attention = frozenset(one.module for one in self.events if not isinstance(one, nn.Module))
        if any(run.block in attention for run in runs):
            raise ModelError(f"{LOST}: its list of layers holds attention alone", ANOTHER)
        return HeadPlace(self.target.module, self.stack, self.layer, query, key, within, self.norm, tail, attention)

    def _groups(self) -> dict[nn.Module, str]:
        """{block: the part that it is of}, of all blocks in the lists whose parts attend."""
        found: dict[nn.Module, str] = {}
        for place in self.events:
            if isinstance(place, nn.Module) or place.stack == VISION:
                continue
            number = re.search(r"\.\d+(?=\.|$)", place.path)
            if number is None:
                raise ModelError(f"{LOST}: {place.path} is in no list of layers", ANOTHER)
            blocks = self.model.get_submodule(place.path[: number.start()])
            found.update({block: group_of(place.stack) for block in blocks.children() if block not in found})
        return found

    def _until(self, groups: Mapping[nn.Module, str], group: str) -> tuple[tuple[BlockRun, ...], bool]:
        """The runs of a part's blocks until the target attends, and whether another attends before it in the last."""
        runs: list[tuple[nn.Module, list[CallPlace]]] = []
        for event in self.events:
            if isinstance(event, nn.Module):
                if groups.get(event) == group:
                    runs.append((event, []))
            elif group_of(event.stack) == group and runs:
                runs[-1][1].append(event)
            if event is self.target:
                break
        found = [BlockRun(block, calls[0].layer if calls else at) for at, (block, calls) in enumerate(runs)]
        return tuple(found), bool(runs) and len(runs[-1][1]) > 1

    def _tail(self, runs: tuple[BlockRun, ...]) -> nn.Module | None:
        """The norm that is given what the last block of an encoder gives."""
        last, blocks = self.gave.get(runs[-1].block), {id(part) for run in runs for part in run.block.modules()}
        for norm, given, _ in self.normed:
            if id(norm) not in blocks and last is not None and given.shape == last.shape and torch.equal(given, last):
                return norm
        return None


def group_of(stack: str) -> str:
    """The part of a model that a stack's blocks are of: cross layers are in the decoder's."""
    return stack if stack in (ENCODER, VISION) else DECODER


def _named(stack: str, plain: str) -> str | None:
    return None if stack == plain else stack


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The hidden states that a module is given: by name, or first."""
    found = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0] if args else None
    return found if isinstance(found, Tensor) and found.is_floating_point() else None


def with_hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any], hidden: Tensor) -> tuple[Any, Any]:
    """The same arguments with other hidden states."""
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": hidden}
    return (hidden, *args[1:]), kwargs


def states_of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The states of an encoder that an attention module is given."""
    given = {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}
    return next((given[name] for name in FROM_ENCODER if isinstance(given.get(name), Tensor)), None)


def with_states(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], states: Tensor, others: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with other states of the encoder."""
    changed = tuple(others if one is states else one for one in args)
    return changed, {name: others if one is states else one for name, one in kwargs.items()}
