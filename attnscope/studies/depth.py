"""How much of what a layer reads each earlier block wrote: over depth, not over tokens.

    depth_of(loaded, ids_1T, {}, tokens=None).points[-1].numbers_CSQ

The residual is a sum of what blocks wrote: the embedding, each attention, each MLP. `residual_tape.py` follows it
between branches. A branch is the largest module whose output holds nothing of the residual, as a pass over a few tokens
shows. So a norm behind a branch, or a multiplier, is a part of what the block wrote, and streams of hyper-connections
stay apart.

Some models mix the states of earlier blocks by a softmax instead: one map per use, tokens x blocks. It is heard where
PyTorch's attention runs outside of branches, over a stack of such states.

Shapes: T token, E model width, S stream, C block, Q token that is kept (or their mean), N use, ... as the model has it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from attnscope.errors import ModelError
from attnscope.hooks.engines import UNCHECKED
from attnscope.hooks.families import ModuleStacks
from attnscope.hooks.forward import backbone, bare_model, config_of
from attnscope.hooks.listen import listen
from attnscope.hooks.projections import streams
from attnscope.hooks.report import tolerance
from attnscope.model.selection import consecutive, is_cross
from attnscope.model.tasks import mixers_of
from attnscope.studies.attribution_records import FINAL, LAYER, SHARE, WEIGHT, Block, DepthParts, DepthPoint
from attnscope.studies.residual_places import (
    ANOTHER,
    LOST,
    TARGET,
    TRIED,
    group_of,
    hidden_of,
    hooked,
    is_norm,
    with_hidden,
)
from attnscope.studies.residual_tape import Node, Source, Tape, block_of, expanded

if TYPE_CHECKING:
    from attnscope.hooks.calls import AttentionCall
    from attnscope.model.loaded import LoadedModel

ALLOWED = 1e-5  # |sum - residual| / |residual|, in float32
MIXED = 1e-6  # |weights x stack - what the module returned|, relative
TINY = 1e-30
MLP, ALONE = "mlp", 1e-2  # how far the last token may be from itself without the others
LAST = 10**9  # behind all runs of branches
SIDES = ("query", "key", "value")
ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@dataclass
class _Mixture:
    """A softmax over earlier blocks; users: {number of a query: the branch that reads it, and as what}."""

    track: _Track
    layer: int
    weight_TNC: Tensor
    norm_TC: Tensor
    entries: tuple[tuple[Block, ...], ...]
    users: dict[int, tuple[nn.Module, str]] = field(default_factory=dict)


@dataclass(eq=False)
class _Track:
    """A residual on its way through the blocks of one list. written: what each block wrote of it so far."""

    blocks: nn.Module
    stack: str
    written: dict[Block, Tensor] = field(default_factory=dict)
    runs: int = 0
    last: Node | None = None  # behind the last block, or before the last norm


def depth_of(
    loaded: LoadedModel, reads: Tensor, inputs: Mapping[str, Any], tokens: Mapping[str, Sequence[int]] | None = None
) -> DepthParts:
    """The shares of earlier blocks in what each layer reads, as means over the tokens, or of some tokens each.

    reads, inputs: what the model's forward is given first, and by name. tokens: {stack: positions}. Raises ModelError
    where the residual of a model cannot be followed, or its parts do not sum to it.
    """
    loaded.check_bare("depth")
    few = max(TRIED, loaded.geometry.least_tokens)
    short, short_inputs = reads, dict(inputs)
    if not (reads.is_floating_point() or inputs.keys() - {TARGET}):
        short, short_inputs = reads[:, :few], {name: value[:, :few] for name, value in inputs.items()}
    trial = _Trial(loaded.model)
    trial.run(short, short_inputs)
    return _Depth(loaded.model, trial, tokens).run(reads, inputs)


def lists_of(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """{block: its list} of the outermost lists of a model whose parts have parts."""
    result: dict[nn.Module, nn.Module] = {}

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                result.update({part: child for part in child if next(part.children(), None) is not None})
            else:
                walk(child)

    walk(bare_model(model))
    return result


def is_leaf(module: nn.Module) -> bool:
    """Whether a module multiplies by a matrix of its own and has no parts, or has a matrix for each of its experts."""
    sizes = [sum(size > 1 for size in weight.shape) for weight in module.parameters(recurse=False)]
    return max(sizes, default=0) >= (2 if next(module.children(), None) is None else 3) or (
        next(module.children(), None) is None and any(buffer.ndim > 1 for buffer in module.buffers(recurse=False))
    )


class _Recording:
    """A pass, its blocks and its branches; what follows differs between the trial and the text."""

    expected: tuple[int, ...] | None = None  # layers that attend; with none of them the pass is not run once more

    def __init__(self, model: nn.Module, branches: Iterable[nn.Module]) -> None:
        self.model, self.branches = model, set(branches)
        self.lists, self.tape = lists_of(model), Tape(model)
        self.stacks = ModuleStacks(bare_model(model), config_of(model))
        self.track: _Track | None = None
        self.within: nn.Module | None = None  # the block that runs
        self.at = 0
        self.places: dict[Block, int] = {}  # in which order blocks wrote

    def read(self, reads: Tensor, inputs: Mapping[str, Any]) -> None:
        """Run the model once."""
        with ExitStack() as around:
            around.enter_context(hooked(self.hooks()))
            around.enter_context(_Mixing(self))
            around.enter_context(self.tape)
            listen(self.model, reads, self.on_call, engine=UNCHECKED, expected_layers=self.expected, **inputs)

    def hooks(self) -> Iterator[RemovableHandle]:
        """On blocks, branches and norms."""
        for block in self.lists:
            yield block.register_forward_pre_hook(self._enter, with_kwargs=True)
            yield block.register_forward_hook(self._leave)
        for module in self.branches:
            yield module.register_forward_pre_hook(self._open, with_kwargs=True)
            yield module.register_forward_hook(self._close, with_kwargs=True)

    def on_call(self, call: AttentionCall) -> None:
        """The model attends."""

    def mixture(self, q: Tensor, k: Tensor, v: Tensor, output: Tensor, how: Mapping[str, Any]) -> None:
        """Attention outside of branches."""

    def kind(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> str:
        """What a branch is called: `attention`, `mlp` where it mixes no tokens, else as the model calls it."""
        return ""

    def entered(self, track: _Track, node: Node) -> None:
        """A block begins with this residual."""

    def finished(self, track: _Track) -> None:
        """The last block of a list is done."""

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.within is not None or self.tape.closed:
            return
        tape, hidden = self.tape, hidden_of(args, kwargs)
        values = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        carried = [one for one in values if (node := tape.node(one)) is not None and node.blocks]
        goes_on = self.track is not None and self.track.blocks is self.lists[module]
        # A layer may be given its states beside the residual: the largest that carries it is meant.
        if hidden is None or (goes_on and tape.node(hidden) is None and carried):
            hidden = max(carried, key=lambda one: one.numel(), default=None)
        if hidden is None or hidden.ndim < 3:
            return
        node = tape.node(hidden)
        blocks = self.lists[module]
        if self.track is None or (self.track.blocks is not blocks and node is None):
            if self.track is not None:
                with tape.off():
                    self.finished(self.track)
            self.track = _Track(blocks, group_of(self.stacks.of(module)), {Block("embedding"): hidden.float()})
        elif node is None or not node.blocks:
            what = f"what enters layer {self.track.runs} is not made of what left the layer before"
            raise ModelError(f"{LOST}: {what}", ANOTHER)
        else:
            with tape.off():
                self.track.written = self.expanded(node)
        self.track.blocks = blocks
        # What was made before this block is let go, but for stacks of states.
        kept = [tape.node(one) for one in values if one is not hidden]
        tape.nodes.clear()
        tape.written = self.track.written
        for one in kept:
            if one is not None and one.entries is not None:
                tape.put(Node(one.value, blocks=one.blocks, entries=one.entries))
        root = tape.put(Node(hidden, carries=True, blocks=tuple(self.track.written)))
        self.root, self.within = root, module
        with tape.off():
            self.entered(self.track, root)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is not self.within:
            return
        self.within = None
        assert self.track is not None
        self.track.runs += 1
        self.track.last = next((node for one in tensors_of(output) if (node := self.tape.node(one)) is not None), None)

    def _open(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tape.closed += 1

    def _close(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.tape.closed -= 1
        if self.tape.closed or self.track is None or self.within is None:
            return
        nodes = [node for one in (*args, *kwargs.values()) if (node := self.tape.node(one)) and not node.carries]
        block = Block(self.kind(module, args, kwargs, output), self.track.runs)
        source = Source(self.at, block, sum(weight.numel() for weight in module.parameters()))
        self.at += 1
        for one in tensors_of(output):
            origins = frozenset([source]).union(*(node.origins for node in nodes))
            writer = block_of(origins)
            assert writer is not None
            self.places[writer] = self.at
            self.tape.put(Node(one, blocks=(writer,), origins=origins))

    def expanded(self, node: Node) -> dict[Block, Tensor]:
        """What each block wrote of a tensor."""
        assert self.track is not None
        rest = Block("rest", max(0, self.track.runs - 1))  # of the block that ran last
        return expanded(node, {self.root: self.track.written}, rest)


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors of floating point that a module gives."""
    values = output if isinstance(output, tuple | list) else (output,)
    return [one for one in values if isinstance(one, Tensor) and one.is_floating_point()]


class _Trial(_Recording):
    """A pass over a few tokens: which modules are branches, and which of them attend."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, (one for one in bare_model(model).modules() if is_leaf(one)))
        self.carrying: set[nn.Module] = set()
        self.ran: set[nn.Module] = set()
        self.attending: dict[nn.Module, str] = {}
        self.sizes: dict[nn.Module, int] = {}  # of what modules gave
        self.residuals: dict[nn.Module, int] = {}  # of what a block of each list was given
        self.streams: dict[nn.Module, int] = {}  # of each list

    def run(self, reads: Tensor, inputs: Mapping[str, Any]) -> None:
        """Find them."""
        self.read(reads, inputs)
        self.found = list[nn.Module]()
        for block, blocks in self.lists.items():
            for module in self._branches(block):
                self.found.append(module)
                if any(part in self.attending for part in module.modules()):
                    self.streams[blocks] = streams(self.residuals.get(blocks, 0), self.sizes.get(module, 0))

    def hooks(self) -> Iterator[RemovableHandle]:
        yield backbone(self.model).register_forward_pre_hook(self._begin)
        yield from super().hooks()
        for block in self.lists:
            for module in block.modules():
                yield module.register_forward_hook(self._ended)

    def _begin(self, module: nn.Module, args: Any) -> None:
        """A model in which nothing attends is run once more, with its weights asked for."""
        self.track = self.within = None
        self.tape.nodes.clear()

    def _ended(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.within is None:
            return
        gave = tensors_of(output)
        self.ran.add(module)
        self.sizes[module] = gave[0].numel() if gave else 0
        if any(node.carries for one in gave if (node := self.tape.node(one)) is not None):
            self.carrying.add(module)

    def entered(self, track: _Track, node: Node) -> None:
        self.residuals[track.blocks] = node.value.numel()

    def on_call(self, call: AttentionCall) -> None:
        self.attending[call.module] = "cross attention" if is_cross(call.stack) else "attention"

    def _branches(self, module: nn.Module) -> Iterator[nn.Module]:
        apart = module in self.ran and module not in self.carrying and any(map(is_leaf, module.modules()))
        if apart or is_leaf(module):
            yield module
        else:
            for child in module.children():
                yield from self._branches(child)


class _Depth(_Recording):
    """The pass over the text."""

    expected = ()  # which modules attend is known

    def __init__(self, model: nn.Module, trial: _Trial, tokens: Mapping[str, Sequence[int]] | None) -> None:
        super().__init__(model, trial.found)
        self.tokens = tokens
        self.points: list[DepthPoint] = []
        self.error = self.mixed_error = 0.0
        self.mixtures: list[_Mixture] = []
        self.kinds, self.alone = self._named(trial), dict[type, bool]()
        self.streams = trial.streams
        mixing = {bare_model(model).get_submodule(path) for path in mixers_of(bare_model(model))}
        inside = {part for mixer in mixing for part in mixer.modules()}
        self.mixing = inside | {branch for branch in trial.found if not mixing.isdisjoint(branch.modules())}

    def _named(self, trial: _Trial) -> dict[nn.Module, str]:
        """What branches are called that attend, or are a part of what attends."""
        heard = {part: kind for module, kind in trial.attending.items() for part in module.modules()}
        inside = {
            module: next((trial.attending[part] for part in module.modules() if part in trial.attending), None)
            for module in trial.found
        }
        return {module: kind for module in trial.found if (kind := inside[module] or heard.get(module)) is not None}

    def kind(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> str:
        if module not in self.kinds:
            # A text of one token has no others, and a rule may give the last token nearly nothing of them.
            if module not in self.mixing and type(module) not in self.alone:
                self.alone[type(module)] = self._by_token_alone(module, args, kwargs, output)
            alone = module not in self.mixing and self.alone[type(module)]
            # Else it is called by the first name on the way to it.
            parts = () if self.within is None else self.within.named_modules()
            own = next((path.partition(".")[0] for path, part in parts if part is module), "")
            self.kinds[module] = MLP if alone else own or type(module).__name__
        return self.kinds[module]

    def _by_token_alone(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> bool:
        """Whether a branch gives the last token the same without the others: then it mixes no tokens."""
        hidden, result = hidden_of(args, kwargs), next(iter(tensors_of(output)), None)
        if hidden is None or result is None or hidden.ndim < 2:
            return False
        tokens = hidden.shape[-2]

        def last(value: Any) -> Any:
            sliced = isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == tokens
            return value[:, -1:] if sliced else value

        args, kwargs = tuple(map(last, args)), {name: last(value) for name, value in kwargs.items()}
        args, kwargs = with_hidden(args, kwargs, hidden[..., -1:, :])
        try:
            with self.tape.off():
                found = next(iter(tensors_of(module.forward(*args, **kwargs))), None)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, AssertionError):
            return False  # it needs the others
        expected = result[..., -1:, :]
        if found is None or found.shape != expected.shape:
            return False
        return float((found - expected).norm()) <= ALONE * float(expected.norm())

    def run(self, reads: Tensor, inputs: Mapping[str, Any]) -> DepthParts:
        """The shares, or the weights of a model that mixes blocks."""
        self.read(reads, inputs)
        if self.track is None or not self.track.runs:
            raise ModelError(f"{LOST}: its blocks are in no list", ANOTHER)
        self.finished(self.track)
        if self.mixtures:
            points, error = [self._mixed(mixture) for mixture in self.mixtures], self.mixed_error
            return DepthParts(WEIGHT, tuple(chain(*points)), error)
        return DepthParts(SHARE, tuple(self.points), self.error)

    def hooks(self) -> Iterator[RemovableHandle]:
        yield from super().hooks()
        for module in bare_model(self.model).modules():
            if is_norm(module):
                yield module.register_forward_pre_hook(self._norm, with_kwargs=True)

    def _norm(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a norm behind the last block: it reads the final residual."""
        if self.within is None and self.track is not None and self.track.runs:
            hidden = hidden_of(args, kwargs)
            node = None if hidden is None else self.tape.node(hidden)
            if node is not None and node.carries:
                self.track.last = node

    def entered(self, track: _Track, node: Node) -> None:
        self.shares(track, track.written, node.value, track.runs)

    def finished(self, track: _Track) -> None:
        if self.mixtures:
            return
        if track.last is None or not track.last.carries:
            raise ModelError(f"{LOST}: what leaves the last layer is not made of what enters it", ANOTHER)
        self.shares(track, self.expanded(track.last), track.last.value, None)

    def shares(self, track: _Track, parts: Mapping[Block, Tensor], residual: Tensor, layer: int | None) -> None:
        """How much of a residual each block wrote; layer: that reads it, None behind the last. Raises ModelError where
        their parts do not sum to it."""
        count = self.streams.get(track.blocks, 1)
        whole_TSE = by_token(residual, count).float()
        size_TS1 = whole_TSE.square().sum(-1, keepdim=True)
        missed_TSE = sum((by_token(part, count).to(whole_TSE) for part in parts.values()), -whole_TSE)
        error = float(missed_TSE.norm() / whole_TSE.norm().clamp_min(TINY))
        allowed = ALLOWED if residual.dtype == torch.float32 else tolerance(residual.dtype)[1]
        where = "the final residual" if layer is None else f"the residual of layer {layer}"
        if not error <= allowed and not self.mixtures:
            raise ModelError(
                f"what its blocks wrote differs from {where} by {error:.2g} of it, and rounding allows {allowed:.2g}",
                ANOTHER,
            )
        self.error = max(self.error, error)
        # Divided once by the squared norm, so that a share is one product with each part.
        direction_TSE = whole_TSE / size_TS1.clamp_min(TINY)
        share_CSQ, norm_CSQ = [], []
        blocks = sorted(parts, key=self._place)
        for block in blocks:
            part_TSE = by_token(parts[block], count).to(whole_TSE)
            share_CSQ.append(self._kept(torch.einsum("tse,tse->ts", part_TSE, direction_TSE), track))
            norm_CSQ.append(self._kept(part_TSE.norm(dim=-1), track))
        use, names = FINAL if layer is None else LAYER, tuple(block.name for block in blocks)
        values = np.stack(share_CSQ), np.stack(norm_CSQ)
        self.points.append(DepthPoint(track.stack, layer, use, names, *values, self._tokens(track)))

    def _place(self, block: Block) -> tuple[int, int]:
        """In the order of the model: by layer, and in it by what wrote first."""
        return -1 if block.layer is None else block.layer, self.places.get(block, LAST)

    def _tokens(self, track: _Track) -> tuple[int, ...] | None:
        """The tokens that are kept each, None for the mean of all."""
        chosen = None if self.tokens is None else self.tokens.get(track.stack)
        return None if chosen is None else tuple(chosen)

    def _kept(self, value_TS: Tensor, track: _Track) -> np.ndarray:
        """(S, Q): of the tokens that are kept, or their mean."""
        tokens = self._tokens(track)
        kept_QS = value_TS.double().mean(0, keepdim=True) if tokens is None else value_TS[list(tokens)].double()
        array: np.ndarray = kept_QS.T.cpu().numpy()
        return array

    def mixture(self, q: Tensor, k: Tensor, v: Tensor, output: Tensor, how: Mapping[str, Any]) -> None:
        """A softmax outside of branches: one over blocks, if its keys are a stack of their states."""
        node = self.tape.node(k)
        if node is None or node.entries is None or len(node.entries) != k.shape[-2] or self.track is None:
            return
        scale = how.get("scale") or q.shape[-1] ** -0.5
        weights = (q.double() @ k.double().mT * scale).softmax(-1)
        mixed = weights @ v.double()
        error = float((mixed - output).norm() / output.norm().clamp_min(TINY))
        allowed = MIXED if output.dtype == torch.float32 else tolerance(output.dtype)[1]
        plain = how.get("attn_mask") is None and not how.get("is_causal")
        if not plain or not error <= allowed:
            raise ModelError(
                f"the weights over blocks times their states differ by {error:.2g} from what is read", ANOTHER
            )
        self.mixed_error = max(self.mixed_error, error)
        weight_TNC, norm_TC = weights.flatten(0, -3), v.norm(dim=-1).flatten(0, -2)
        number = len(self.mixtures)
        self.mixtures.append(_Mixture(self.track, self.track.runs, weight_TNC, norm_TC, node.entries))
        self.tape.put(Node(output, uses=frozenset((number, query) for query in range(q.shape[-2]))))

    def _open(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Which branch reads which query of a mixture."""
        super()._open(module, args, kwargs)
        if self.tape.closed > 1 or not self.mixtures or self.within is None:
            return
        named = {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}
        nodes = {name: node for name, one in named.items() if (node := self.tape.node(one)) is not None and node.uses}
        several = len({use for node in nodes.values() for use in node.uses}) > 1
        for name, node in nodes.items():
            for number, query in node.uses:
                side = next((side for side in SIDES if name.startswith(side)), SIDES[0])
                self.mixtures[number].users[query] = (module, side[0] if several else "")

    def _mixed(self, mixture: _Mixture) -> Iterator[DepthPoint]:
        """The weights of each use of a mixture."""
        names = tuple(map(names_of, mixture.entries))
        for query, weight_TC in enumerate(mixture.weight_TNC.unbind(1)):
            user, side = mixture.users.get(query, (None, ""))
            use = FINAL if user is None else side or self.kinds.get(user, MLP)
            layer = None if user is None else mixture.layer
            weight_CSQ, norm_CSQ = (
                np.stack([self._kept(value_T[:, None], mixture.track) for value_T in value_TC.unbind(1)])
                for value_TC in (weight_TC, weight_TC * mixture.norm_TC)
            )
            stack, tokens = mixture.track.stack, self._tokens(mixture.track)
            yield DepthPoint(stack, layer, use, names, weight_CSQ, norm_CSQ, tokens)


class _Mixing(TorchFunctionMode):
    """Hears attention that runs outside of branches."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is functional.scaled_dot_product_attention and not self.recording.tape.closed:
            how = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
            with self.recording.tape.off():
                self.recording.mixture(how.pop("query"), how.pop("key"), how.pop("value"), result, how)
        return result


def by_token(x: Tensor, streams: int = 1) -> Tensor:
    """(T, S, E) of one text's residual, of one vector per token or of several streams in any order of axes.

    streams: that lie one after the other in one vector.

    >>> by_token(torch.zeros(1, 5, 8)).shape, by_token(torch.zeros(4, 1, 5, 8)).shape
    (torch.Size([5, 1, 8]), torch.Size([5, 4, 8]))
    >>> by_token(torch.zeros(1, 5, 8), streams=2).shape
    torch.Size([5, 2, 4])
    """
    if x.ndim == 3:  # texts first or tokens first, of one text
        return x.reshape(-1, streams, x.shape[-1] // streams)
    return x[0] if x.shape[0] == 1 else x[:, 0].transpose(0, 1)


def names_of(blocks: Sequence[Block]) -> str:
    """The blocks of one state, those of whole layers together: `L0-L3 + L4 attention`.

    >>> names_of([Block("attention", 0), Block("mlp", 0), Block("attention", 1)])
    'L0 + L1 attention'
    """
    by_layer: dict[int | None, list[Block]] = {}
    for block in blocks:
        by_layer.setdefault(block.layer, []).append(block)
    most = max(map(len, by_layer.values()), default=0)
    whole = [layer for layer, own in by_layer.items() if layer is not None and len(own) == most > 1]
    parts = [block.name for block in by_layer.get(None, ())]
    parts += [f"L{run[0]}" if len(run) == 1 else f"L{run[0]}-L{run[-1]}" for run in consecutive(sorted(whole))]
    parts += [
        block.name for layer, own in by_layer.items() if layer is not None and layer not in whole for block in own
    ]
    return " + ".join(parts)
