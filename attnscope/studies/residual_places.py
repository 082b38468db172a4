"""The place of a head, and what is held constant on the way to it.

Its place: which runs of blocks write the residual of its queries, and that of its keys. It is found by one pass over a
few tokens. A cross layer's keys are of the encoder, and its queries of the decoder; elsewhere both are of one residual.

Constant are the norms of a model while it runs, each row with the scale that the intact pass gave it, and factors: what
an activation gives, and one over the size of a vector. Hyper-connections mix their streams by sigmoids of them, gated
norms multiply by one, and norms of a family's own divide by a size: a factor in front of the residual, no part of it.

Shapes: B text, T token, E model width.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from attnscope.errors import ModelError
from attnscope.hooks.engines import UNCHECKED
from attnscope.hooks.listen import listen
from attnscope.hooks.projections import Norm, norm_of
from attnscope.hooks.report import tolerance, turned
from attnscope.interventions.passes import mixes
from attnscope.model.loaded import weights_of
from attnscope.model.selection import DECODER, ENCODER, VISION, is_cross, is_linear, prefix

if TYPE_CHECKING:
    from attnscope.hooks.calls import AttentionCall, CallSite
    from attnscope.model.loaded import LoadedModel

FROZEN_TRIED = 32  # tokens
NORM = re.compile("norm", re.IGNORECASE)


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """A block after which hooks are removed, also where one of them could not be registered."""
    with ExitStack() as hooks:
        for handle in handles:
            hooks.callback(handle.remove)
        yield


class FrozenNorms:
    """With its hooks, a gradient passes each norm as if its scale were a constant; the values stay what they are.

    `again` runs modules on other values with the scales that the first run found.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._found: dict[nn.Module, list[tuple[Norm, Tensor]]] = {}
        self._again: dict[nn.Module, Iterator[tuple[Norm, Tensor]]] | None = None

    def hooks(self) -> Iterator[RemovableHandle]:
        """One on each norm."""
        for module in self._model.modules():
            if is_norm(module):
                yield module.register_forward_hook(self._freeze, with_kwargs=True)

    def forget(self, but: nn.Module | None = None) -> None:
        """Forget the scales so far: what is run again begins here. but: a norm that keeps its scale."""
        self._found = {norm: found for norm, found in self._found.items() if norm is but}

    @contextmanager
    def again(self) -> Iterator[None]:
        """A block in which norms take the scales that they had since `forget`, in the order in which they ran."""
        self._again = {norm: iter(found) for norm, found in self._found.items()}
        try:
            yield
        finally:
            self._again = None

    def _freeze(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.is_floating_point()]
        if len(tensors) != 1 or not isinstance(output, Tensor):
            return None
        [x] = tensors
        if self._again is not None:
            scale_before = next(self._again.get(module, iter(())), None)
            return None if scale_before is None else scale_before[0].frozen(x.float(), scale_before[1]).to(output.dtype)
        if not x.requires_grad:  # before the residual begins, or in a tower
            return None
        with torch.no_grad():
            norm = norm_of(module, _some_rows(x), _some_rows(output), tolerance("float32")[1])
            if norm is None:
                return None
            scale = norm.scale(x.float(), output.float())
            self._found.setdefault(module, []).append((norm, scale))
        return norm.frozen(x.float(), scale).to(output.dtype)


def _some_rows(x: Tensor) -> Tensor:
    """Float32: some first parts of a tensor, spread over the text, of which it is found out what norm it is.

    A row in which it is another would be missing from the sum, which is compared with the logit.
    """
    if x.ndim < 3:
        return x.float()
    return x[:, :: max(1, x.shape[1] // FROZEN_TRIED)].float()


def is_norm(module: nn.Module) -> bool:
    """Whether a module may be a norm, by its name: one without parts, with a weight per number of a row."""
    named = NORM.search(type(module).__name__) is not None
    return named and not list(module.children()) and all(weight.ndim <= 2 for weight in weights_of(module).values())


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
class ResidualPath:
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
    output the module is given; tail: the one whose output the encoder gives. attention: every module that attends, and
    those of linear layers.
    """

    module: nn.Module
    stack: str
    layer: int
    query: ResidualPath
    key: ResidualPath | None
    within: bool
    norm: nn.Module | None
    tail: nn.Module | None
    attention: frozenset[nn.Module]

    @property
    def crosses(self) -> bool:
        """Whether its keys are of another residual than its queries."""
        return self.key is not self.query


def place_of(loaded: LoadedModel, reads: Tensor, inputs: Mapping[str, Any], stack: str, layer: int) -> HeadPlace:
    """The place of a layer's attention. Raises ModelError where it makes no call, or its blocks are in no list.

    reads, inputs: what the model's forward is given first, and by name.
    """
    if loaded.geometry.over_patches:
        raise ModelError(f"{LOST}: its layers are over bytes and patches of them", ANOTHER)
    events = _Seen(loaded.model, stack, layer)
    # The first tokens of a text, and of its target, show the blocks; what is read otherwise is read as a whole.
    if not (reads.is_floating_point() or inputs.keys() - {TARGET}):
        reads, inputs = reads[:, :TRIED], {name: value[:, :TRIED] for name, value in inputs.items()}
    with hooked(events.hooks()):
        report = listen(loaded.model, reads, events.on_call, engine=UNCHECKED, mixers=mixes(loaded), **inputs)
    for line in turned(report.calls):
        logger.warning("check failed: %s", line)
    return events.place(loaded.geometry.stack)


class _Seen:
    """What happened in a pass: which parts of lists began, which attention was called, and what norms gave."""

    def __init__(self, model: nn.Module, stack: str, layer: int) -> None:
        self.model, self.stack, self.layer = model, stack, layer
        self.events: list[nn.Module | CallSite] = []
        self.linear: set[nn.Module] = set()
        self.given: dict[nn.Module, Tensor] = {}
        self.gave: dict[nn.Module, Tensor] = {}
        self.normed: list[tuple[nn.Module, Tensor, Tensor]] = []
        self.target: CallSite | None = None
        self.norm: nn.Module | None = None

    def hooks(self) -> Iterator[RemovableHandle]:
        """What fills it."""
        listed = {id(part) for one in self.model.modules() if isinstance(one, nn.ModuleList) for part in one}
        for module in self.model.modules():
            yield module.register_forward_pre_hook(self._before, with_kwargs=True)
            if id(module) in listed or is_norm(module):
                yield module.register_forward_hook(self._after, with_kwargs=True)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.events.append(module)
        hidden = hidden_of(args, kwargs)
        if hidden is not None:
            self.given[module] = hidden

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        result = output[0] if isinstance(output, tuple | list) else output
        if isinstance(result, Tensor):
            self.gave[module] = result
            hidden = hidden_of(args, kwargs)
            if is_norm(module) and hidden is not None:
                self.normed.append((module, hidden, result))

    def on_call(self, call: AttentionCall) -> None:
        if is_linear(call.stack):  # which reads no residual of its own that could be asked for
            self.linear.add(call.module)
            return
        self.events.append(call.place)
        if self.target is None and (call.stack, call.layer) == (self.stack, self.layer):
            self.target = call.place
            hidden = self.given.get(call.module)
            self.norm = next((one for one, _, gave in reversed(self.normed) if gave is hidden), None)

    def place(self, plain: str) -> HeadPlace:
        """The place of the target. plain: the model's own stack."""
        if self.target is None:
            raise ModelError(f"{prefix(self.stack)}layer {self.layer} made no attention call", "choose another layer")
        groups, group = self._groups(), group_of(self.stack)
        runs, before = self._until(groups, group)
        query = ResidualPath(group, None if group == plain else group, runs)
        key: ResidualPath | None = query
        tail: nn.Module | None = None
        if is_cross(self.stack):
            every, _ = self._until(groups, ENCODER)
            key = ResidualPath(ENCODER, None if plain == ENCODER else ENCODER, every) if every else None
            # The norm that is given what the last block of the encoder gives.
            last = self.gave.get(every[-1].block) if every else None
            blocks = {id(part) for run in every for part in run.block.modules()}
            behind = ((norm, given) for norm, given, _ in self.normed if id(norm) not in blocks)
            tail = next((norm for norm, given in behind if last is not None and torch.equal(given, last)), None)
        residual = self.given.get(runs[-1].block)
        within = before or residual is None or residual.ndim != 3
        attention = frozenset(event.module for event in self.events if not isinstance(event, nn.Module)) | self.linear
        if any(run.block in attention for run in runs):
            raise ModelError(f"{LOST}: its list of layers holds attention alone", ANOTHER)
        return HeadPlace(self.target.module, self.stack, self.layer, query, key, within, self.norm, tail, attention)

    def _groups(self) -> dict[nn.Module, str]:
        """{block: the part that it is of}, of all blocks in the lists whose parts attend."""
        groups: dict[nn.Module, str] = {}
        for place in self.events:
            if isinstance(place, nn.Module) or place.stack == VISION:
                continue
            number = re.search(r"\.\d+(?=\.|$)", place.path)
            if number is None:
                raise ModelError(f"{LOST}: {place.path} is in no list of layers", ANOTHER)
            blocks = self.model.get_submodule(place.path[: number.start()])
            groups.update({block: group_of(place.stack) for block in blocks.children() if block not in groups})
        return groups

    def _until(self, groups: Mapping[nn.Module, str], group: str) -> tuple[tuple[BlockRun, ...], bool]:
        """The runs of a part's blocks until the target attends, and whether another attends before it in the last."""
        runs: list[tuple[nn.Module, list[CallSite]]] = []
        for event in self.events:
            if isinstance(event, nn.Module):
                if groups.get(event) == group:
                    runs.append((event, []))
            elif group_of(event.stack) == group and runs:
                runs[-1][1].append(event)
            if event is self.target:
                break
        numbered = [BlockRun(block, calls[0].layer if calls else at) for at, (block, calls) in enumerate(runs)]
        return tuple(numbered), bool(runs) and len(runs[-1][1]) > 1


def group_of(stack: str) -> str:
    """The part of a model that a stack's blocks are of: cross layers are in the decoder's."""
    return stack if stack in (ENCODER, VISION) else DECODER


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The hidden states that a module is given: by name, or first."""
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0] if args else None
    return hidden if isinstance(hidden, Tensor) and hidden.is_floating_point() else None


def with_hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any], hidden: Tensor) -> tuple[Any, Any]:
    """The same arguments with other hidden states."""
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": hidden}
    return (hidden, *args[1:]), kwargs


FACTORS = frozenset(
    """
    rsqrt norm vector_norm linalg_vector_norm linalg_norm
    sigmoid sigmoid_ tanh tanh_ relu relu_ silu gelu softmax log_softmax softplus elu selu celu leaky_relu mish
    hardsigmoid hardswish hardtanh relu6 logsigmoid softsign
    """.split()  # noqa: SIM905
)


class FrozenFactors(TorchFunctionMode):
    """While open, no gradient passes a factor; the values stay what they are.

    `again` runs code on other values with the factors that it had the first time, in the order of their calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self._found: list[Tensor] = []
        self._again: Iterator[Tensor] | None = None

    def forget(self) -> None:
        """Forget the factors so far: what is run again begins here."""
        self._found = []

    @contextmanager
    def again(self) -> Iterator[None]:
        """A block in which factors are those since `forget`."""
        self._again = iter(self._found)
        try:
            with self:
                yield
        finally:
            self._again = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") not in FACTORS or not isinstance(value, Tensor):
            return value
        if self._again is None:
            self._found.append(value.detach())
            return value.detach()
        before = next(self._again, None)
        return value if before is None or before.shape != value.shape else before
