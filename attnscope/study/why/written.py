"""What writes the residual that enters a layer: one pass in which it can be asked how each part reaches that layer.

Each head's output is a variable of its own. What else a block computes of its residual is a constant: the module that
computes it is given the residual without a gradient. So a gradient finds its way through output projections, gates,
norms with frozen scales and residual connections alone, as the family's own code has them.

Shapes: B text (one), T token, H head, V width of v, E model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnscope.cells import head_name
from attnscope.errors import ModelError
from attnscope.intervene.branches import BranchError, DecoderLayers, decoder_layers
from attnscope.seam.engines import UNCHECKED
from attnscope.seam.listen import calls_interface, listen, listening, running
from attnscope.study.why.frozen import FrozenNorms, is_norm
from attnscope.study.why.sides import exact

if TYPE_CHECKING:
    from attnscope.attention.spec import AttentionSpec
    from attnscope.model.loaded import LoadedModel
    from attnscope.seam.call import AttentionCall

TRIED = 8  # tokens by which the layers are found
ROWS = 128  # of weights at once
ANOTHER = "choose another model"
LOST = "the residual of this model cannot be followed"


@dataclass(frozen=True)
class Component:
    """Who writes a part of the residual: `embedding`, a `head`, or the `rest` of a block; layer: of the block.

    position: of the token that a head read, where its output is split by its own keys.
    """

    kind: str
    layer: int | None = None
    head: int | None = None
    position: int | None = None

    @property
    def name(self) -> str:
        """As a table names it: `L2H1`, `L2 rest`."""
        if self.layer is None:
            return self.kind
        return f"L{self.layer} {self.kind}" if self.head is None else head_name(self.layer, self.head)


@dataclass
class Written:
    """A pass up to the attention of one layer, with what its gradients are asked of.

    residuals: (B, T, E), what each block is given, the last that of the layer. heads: by the number of a block, the
    attention calls in it, whose `output_BQHV` is a variable. spec: of the layer's own call. rerun: see `again`.
    """

    numbers: tuple[int, ...]
    residuals: list[Tensor] = field(default_factory=list)
    heads: dict[int, AttentionCall] = field(default_factory=dict)
    spec: AttentionSpec | None = None
    rerun: Callable[[Tensor, bool], AttentionSpec] | None = None

    @property
    def components(self) -> list[Component]:
        """Who writes, in the model's order."""
        found = [Component("embedding")]
        for block, number in enumerate(self.numbers[:-1]):
            count = _output(self.heads[block]).shape[2] if block in self.heads else 0
            found += [Component("head", number, head) for head in range(count)]
            found.append(Component("rest", number))
        return found

    def gradients(self, value: Tensor, along: Tensor | None = None) -> list[Tensor | None]:
        """Of a number at the residuals, then at the heads' outputs by block; along: of a tensor, in this direction,
        itself a variable."""
        variables = [*self.residuals, *map(_output, self.heads.values())]
        how = {"retain_graph": True, "allow_unused": True, "create_graph": along is not None}
        return list(torch.autograd.grad(value, variables, along, **how))

    def shares(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """(C,) float64: how much of a number each component gives, by its gradients."""
        return self.shares_by_row(gradients).sum(1)

    def shares_by_row(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """(C, T) float64: the same, of what each component writes at each token.

        What else a block writes is what the residual gives behind it, less what it gives before it and what its heads
        give.
        """
        residuals, heads = gradients[: len(self.residuals)], gradients[len(self.residuals) :]
        whole = [_products(x, g).sum((0, 2)).cpu().double() for x, g in zip(self.residuals, residuals, strict=True)]
        of_block = {
            block: _products(_output(call), gradient).sum((0, 3)).T.cpu().double()
            for (block, call), gradient in zip(self.heads.items(), heads, strict=True)
        }
        found = [whole[0][None]]
        for block in range(len(whole) - 1):
            heads_HT = of_block.get(block, whole[0].new_zeros(0, len(whole[0])))
            found += [heads_HT, (whole[block + 1] - whole[block] - heads_HT.sum(0))[None]]
        return torch.cat(found)

    def shares_by_token(self, gradients: Sequence[Tensor | None]) -> dict[Component, Tensor]:
        """{head: (T,) float64}: how much of a number each head gives by each of the tokens that it reads."""
        found: dict[Component, Tensor] = {}
        for (block, call), gradient in zip(self.heads.items(), gradients[len(self.residuals) :], strict=True):
            by_token_HT = _by_token(call, gradient)
            for head, by_token_T in enumerate(by_token_HT):
                found[Component("head", self.numbers[block], head)] = by_token_T
        return found

    def vectors(self, chosen: Sequence[int]) -> list[Tensor]:
        """(T, E) of each chosen component: what of the layer's residual is its own, every norm on the way frozen."""
        along = torch.zeros_like(self.residuals[-1], requires_grad=True)
        share_C = self.shares(self.gradients(self.residuals[-1], along))
        return [torch.autograd.grad(share_C[one], along, retain_graph=True)[0][0] for one in chosen]

    def again(self, residual_BTE: Tensor, frozen: bool = True) -> AttentionSpec:
        """The layer's call on another residual; frozen: with the scales that the norms had."""
        assert self.rerun is not None
        with torch.no_grad():
            return self.rerun(residual_BTE, frozen)


def _output(call: AttentionCall) -> Tensor:
    assert call.output_BQHV is not None
    return call.output_BQHV


def _products(x: Tensor, gradient: Tensor | None) -> Tensor:
    return exact(torch.zeros_like(x)) if gradient is None else exact(x.detach()) * exact(gradient)


@torch.no_grad()
def _by_token(call: AttentionCall, gradient_BTHV: Tensor | None) -> Tensor:
    """(H, K) float64: what each head gives by each key, A (v . gradient), summed over its rows."""
    spec, output = call.spec, _output(call)
    if spec is None:
        raise ModelError("the values of this model's heads are not seen", ANOTHER)
    v_HKV = exact(spec.v_BGKV[0]).repeat_interleave(spec.heads // spec.kv_heads, 0)
    found_HK = v_HKV.new_zeros(v_HKV.shape[:2])
    if gradient_BTHV is None:
        return found_HK
    gradient_HTV = exact(gradient_BTHV[0].transpose(0, 1))
    rows = torch.nonzero(gradient_HTV.abs().sum((0, 2)))[:, 0].tolist()
    for start in range(min(rows, default=0), max(rows, default=-1) + 1, ROWS):
        stop = min(start + ROWS, output.shape[1])
        weights_HQK = exact(spec.weights(start, stop)[0])
        found_HK += (weights_HQK * (gradient_HTV[:, start:stop] @ v_HKV.mT)).sum(1)
    return found_HK


@contextmanager
def written(loaded: LoadedModel, ids: Sequence[int], layer: int) -> Iterator[Written]:
    """Run the model up to the attention of a layer. While open, the call can be made again.

    Raises ModelError for a family whose residual cannot be followed.
    """
    if not calls_interface(loaded.model):
        raise ModelError(f"{loaded.geometry.model_type} attends where its q and k are not seen", ANOTHER)
    try:
        layers = decoder_layers(loaded, ids[:TRIED])
    except BranchError as error:
        raise ModelError(f"{LOST}: {error}", ANOTHER) from error
    around = layers.around
    if next(one for one in around if around[one] is around[layer]) != layer:
        raise ModelError(
            f"{LOST}: layer {layer} is in the block of an earlier layer", "choose the first layer of the block"
        )
    with FrozenNorms(loaded.model) as norms:
        yield _Pass(loaded.model, layers, layer, norms).run(torch.tensor([list(ids)], device=loaded.device))


class _ReachedError(Exception):
    """The layer attends: what follows is not needed."""


class _Pass:
    """One pass up to the attention of a layer, and the hooks that make it one that can be asked."""

    def __init__(self, model: nn.Module, layers: DecoderLayers, layer: int, norms: FrozenNorms) -> None:
        self.model, self.layer, self.norms = model, layer, norms
        number_of = {id(block): number for number, block in layers.around.items()}
        last = layers.start(layer)
        self.blocks = layers.all[: last + 1]
        self.attention = {id(module) for module in layers.attention.values()}
        self.written = Written(tuple(number_of.get(id(block), place) for place, block in enumerate(self.blocks)))
        self.given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def run(self, ids_BT: Tensor) -> Written:
        """The pass; what the layer's own code makes of another residual can then be asked."""
        with ExitStack() as hooks:
            for block in self.blocks:
                hooks.enter_context(_before(block, self._enter))
            for block in self.blocks[:-1]:
                for module in branches(block, self.attention):
                    hooks.enter_context(_before(module, self._constant))
            self._listen(ids_BT)
        self.written.rerun = self._again
        return self.written

    def _listen(self, ids_BT: Tensor) -> None:
        engine = replace(UNCHECKED, change=self._vary)
        try:
            listen(self.model, ids_BT, self._reached, engine=engine, gradients=True)
        except _ReachedError:
            return
        raise ModelError(f"layer {self.layer} made no attention call", "choose another layer")

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a block: keep its residual, of the first block as a variable."""
        residual = _hidden(args, kwargs)
        if residual is None or residual.ndim != 3 or len(residual) != 1:
            raise ModelError(f"{LOST}: its blocks are not given one vector per token", ANOTHER)
        if not self.written.residuals:
            residual = residual.detach().requires_grad_()
        self.written.residuals.append(residual)
        if module is self.blocks[-1]:
            self.norms.forget()
            self.given = args, kwargs
        return _with_hidden(args, kwargs, residual)

    def _constant(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a module whose output is taken as it is: no gradient comes back from it, but by the heads' outputs."""
        if len(self.written.residuals) == len(self.blocks):  # it is shared with the layer that is asked for
            return None
        given = _hidden(args, kwargs)
        heads = self.written.heads.get(len(self.written.residuals) - 1)
        if given is None or (heads is not None and _same(given, heads.output_BQHV)):
            return None
        return _with_hidden(args, kwargs, given.detach())

    def _vary(self, call: AttentionCall, output_BQHV: Tensor) -> Tensor:
        """Make the heads' outputs a variable: of the first call in each block."""
        block = len(self.written.residuals) - 1
        if block in self.written.heads:
            return output_BQHV.detach()
        variable = output_BQHV.detach().requires_grad_()
        self.written.heads[block] = replace(call, output_BQHV=variable)
        return variable

    def _reached(self, call: AttentionCall) -> None:
        if call.layer == self.layer:
            self.written.spec = call.spec
            raise _ReachedError

    def _again(self, residual_BTE: Tensor, frozen: bool) -> AttentionSpec:
        found: list[AttentionSpec] = []

        def on_call(call: AttentionCall) -> None:
            assert call.spec is not None
            found.append(call.spec)
            raise _ReachedError

        args, kwargs = _with_hidden(*self.given, residual_BTE)
        with ExitStack() as stack:
            stack.enter_context(running(self.model, UNCHECKED.implementation))
            stack.enter_context(listening(self.model, on_call, engine=UNCHECKED))
            if frozen:
                stack.enter_context(self.norms.again())
            with suppress(_ReachedError):
                self.blocks[-1](*args, **kwargs)
        return found[0]


def branches(block: nn.Module, attention: set[int]) -> Iterator[nn.Module]:
    """The modules of a block that compute something of its residual: its attention, and the largest that have matrices
    and neither attention nor norms in them: one with a norm may hold the residual connection, too."""
    for module in block.children():
        if id(module) in attention:
            yield module
        elif is_norm(module) or all(one.ndim < 2 for one in module.parameters()):
            continue
        elif any(id(one) in attention or is_norm(one) for one in module.modules()):
            yield from branches(module, attention)
        else:
            yield module


@contextmanager
def _before(module: nn.Module, hook: Callable[..., Any]) -> Iterator[None]:
    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The hidden states that a module is given: by name, or first."""
    found = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0] if args else None
    return found if isinstance(found, Tensor) and found.is_floating_point() else None


def _with_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor) -> tuple[Any, Any]:
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": hidden}
    return (hidden, *args[1:]), kwargs


def _same(given: Tensor, output_BQHV: Tensor | None) -> bool:
    """Whether a module is given the heads' outputs side by side."""
    if output_BQHV is None or given.numel() != output_BQHV.numel():
        return False
    return torch.equal(given.reshape(output_BQHV.shape), output_BQHV)
