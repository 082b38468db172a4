"""One pass up to a layer in which it can be asked how each part of the residual reaches that layer.

Each head's output is a variable of its own, of a linear layer what its rule gives, before gate and norm. What else a
block computes of its residual is a constant: the module that computes it is given the residual without a gradient. So a
gradient finds its way through output projections, gates, norms with frozen scales and residual connections alone, as
the family's own code has them.

`Recipe` is for attention that asks no interface: its heads' outputs as variables, and its q and k as the oracle makes
them. The output projection is given the heads side by side, or, where it is in another module, the attention module
gives them. q and k are made by the family's layout of what enters the module, and are compared with the weights that it
gave.

Shapes: B text (one), T token, H head, V width of v, E model width, Q query, K key.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attnscope.certificate.compare import Stack, made_spec
from attnscope.errors import ModelError
from attnscope.hooks.calls import same_numbers
from attnscope.hooks.engines import UNCHECKED
from attnscope.hooks.families import FROM_ENCODER
from attnscope.hooks.listen import calls_interface, listen, listening, running
from attnscope.hooks.modules import ModuleRun
from attnscope.hooks.projections import EARLIER, has_earlier, weighted
from attnscope.interventions.passes import mixes
from attnscope.model.selection import ENCODER, is_vision
from attnscope.studies.residual import HeadOutputs, Projection, ResidualSources, WrittenSides
from attnscope.studies.residual_places import (
    ANOTHER,
    LOST,
    FrozenFactors,
    FrozenNorms,
    HeadPlace,
    ResidualPath,
    group_of,
    hidden_of,
    hooked,
    is_norm,
    place_of,
    with_hidden,
)

if TYPE_CHECKING:
    from attnscope.attention.spec import AttentionSpec
    from attnscope.hooks.calls import AttentionCall
    from attnscope.model.loaded import LoadedModel

# A call, what its heads wrote, and what that is given to.
OnLeft = Callable[["AttentionCall", HeadOutputs, Projection | None], None]


class Recipe:
    """How the attention of one stack is made, where its modules do not ask the interface.

    by_tokens: keep each call, for who asks what its heads read. Raises ModelError where no layout describes its layers,
    and for a model of several texts.
    """

    def __init__(self, loaded: LoadedModel, stack: str, by_tokens: bool) -> None:
        stacks = {name: layers for name, layers in loaded.geometry.stacks.items() if not is_vision(name)}
        heads = {layer.heads for layer in stacks.get(stack, {}).values()}
        self._stack = Stack(loaded.model.config, stack, stacks.get(stack, {}).values())
        if self._stack.layout is None or list(stacks) != [stack] or len(heads) != 1:
            raise ModelError(f"{loaded.geometry.model_type} attends where its q and k are not seen", ANOTHER)
        self.by_tokens = by_tokens
        self._out, [self._heads] = self._stack.layout.out, heads
        self._call: AttentionCall | None = None
        self._given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._variable: Tensor | None = None
        self._projection: Projection | None = None

    def on_call(self, call: AttentionCall) -> None:
        """Keep a call until its module is left; for whoever listens."""
        self._call = call

    def hooks(self, attention: Iterable[nn.Module], shown: nn.Module, heard: OnLeft) -> Iterator[RemovableHandle]:
        """By these the calls of attention modules are handed on when these are left, their output a variable.

        shown: the module whose call has its q and k.
        """
        for module in attention:
            yield module.register_forward_pre_hook(self._enter, with_kwargs=True)
            yield module.register_forward_hook(partial(self._leave, shown, heard))
            if self._out:
                yield module.get_submodule(self._out).register_forward_pre_hook(self._project)
                yield module.get_submodule(self._out).register_forward_hook(self._projected)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._given, self._call, self._variable, self._projection = (args, kwargs), None, None, None

    def _vary(self, heads_BTE: Tensor) -> Tensor:
        """The same numbers, made of a variable."""
        self._variable = heads_BTE.detach().unflatten(-1, (self._heads, -1)).requires_grad_()
        return self._variable.flatten(-2)

    def _project(self, out: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Before the output projection."""
        return (self._vary(args[0]), *args[1:])

    def _projected(self, out: nn.Module, args: tuple[Any, ...], gave: Tensor) -> None:
        self._projection = Projection(out, args[0], gave)

    def _leave(self, shown: nn.Module, heard: OnLeft, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """The module ends. Without a projection in it, what it gives is the variable."""
        call, changed = self._call, None
        if call is None or call.module is not module:
            return None
        if not self._out:
            changed = self._vary(output[0] if isinstance(output, tuple) else output)
        run = ModuleRun(module, *self._given, [call]).left(output)
        spec = made_spec(run, self._stack) if module is shown else None
        assert self._variable is not None
        heads = HeadOutputs(call.layer, call.stack, self._variable, call if self.by_tokens else None)
        heard(replace(call, spec=spec), heads, self._projection)
        return (changed, *output[1:]) if changed is not None and isinstance(output, tuple) else changed


@contextmanager
def follow_residual(
    loaded: LoadedModel, reads: Tensor, inputs: Mapping[str, Any], stack: str, layer: int, *, by_tokens: bool = False
) -> Iterator[WrittenSides]:
    """Run the model up to the attention of a layer. While open, the call can be made again.

    reads, inputs: what the model's forward is given first, and by name. by_tokens: keep what earlier heads read, so
    that `shares_by_token` can be asked: the matrices of all layers, of a family outside the interface. Raises
    ModelError for a family whose residual cannot be followed.
    """
    with ExitStack() as opened:
        sides = opened.enter_context(_one_pass(loaded, reads, inputs, stack, layer, by_tokens))
        if sides.keys_of is not None:
            # The keys are as another pass has them, up to the layer that made them.
            made = opened.enter_context(_one_pass(loaded, reads, inputs, stack, sides.keys_of, by_tokens))
            spec, key = sides.spec, made.key
            assert key is not None

            def with_query(residual_BTE: Tensor, frozen: bool) -> AttentionSpec:
                assert key.rerun is not None
                return replace(spec, k_BGKD=key.rerun(residual_BTE, frozen).k_BGKD)

            keys = replace(key, rerun=with_query)
            sides = WrittenSides(replace(spec, k_BGKD=made.spec.k_BGKD), sides.query, keys)
        yield sides


@contextmanager
def _one_pass(
    loaded: LoadedModel, reads: Tensor, inputs: Mapping[str, Any], stack: str, layer: int, by_tokens: bool
) -> Iterator[WrittenSides]:
    recipe = None if calls_interface(loaded.model) else Recipe(loaded, stack, by_tokens)
    place = place_of(loaded, reads, inputs, stack, layer)
    norms = FrozenNorms(loaded.model)
    with hooked(norms.hooks()):
        one = _Pass(loaded, place, norms, recipe)
        try:
            yield one.run(reads, inputs)
        finally:
            one.forget()


class _ReachedError(Exception):
    """The layer attends: what follows is not needed."""


class _Track:
    """A residual on its way through the runs of its blocks; ends: whether the last of them holds what is asked for."""

    def __init__(self, course: ResidualPath, plain: str, ends: bool, within: bool) -> None:
        self.course, self.ends, self.within = course, ends, within
        self.written = ResidualSources(course, plain)
        self.entered = 0
        self.projecting: tuple[nn.Module, Tensor] | None = None  # the projection that runs, and what it is given
        self.closed = False  # by the point at which the layer's residual is read

    @property
    def at_last(self) -> bool:
        """Whether the block runs that holds what is asked for."""
        return self.ends and self.entered == len(self.course.runs)

    def enter(self, residual: Tensor, others: Iterable[Any]) -> Tensor:
        """A block begins, given this: the first as a variable. others: what else the block is given."""
        if not self.written.residuals:
            residual = residual.detach().requires_grad_()
        elif not residual.requires_grad:
            tensors = (one for one in others if isinstance(one, Tensor))
            mixed = has_earlier(tensors, self.written.residuals)
            raise ModelError(f"{LOST}: {EARLIER if mixed else 'a block is run without gradients'}", ANOTHER)
        self.written.residuals.append(residual)
        self.entered += 1
        return residual

    def close(self, residual: Tensor) -> None:
        """The layer's residual, where it is read behind the beginning of a block."""
        if not self.closed:
            self.written.residuals.append(residual)
            self.closed = True


class _Pass:
    """One pass up to the attention of a layer, and the hooks that make it one that can be asked."""

    def __init__(self, loaded: LoadedModel, place: HeadPlace, norms: FrozenNorms, recipe: Recipe | None) -> None:
        self.loaded, self.model, self.place, self.norms = loaded, loaded.model, place, norms
        self.factors = FrozenFactors()
        self.recipe = recipe
        plain = loaded.geometry.stack
        self.tracks = {
            one.group: _Track(one, plain, one is place.query, place.within or one is not place.query)
            for one in (place.query, place.key)
            if one is not None
        }
        self.own = self.tracks[place.query.group]
        self.given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self.spec: AttentionSpec | None = None

    def run(self, reads: Tensor, inputs: Mapping[str, Any]) -> WrittenSides:
        """The pass; what the layer's own code makes of another residual can then be asked."""
        hooks, on_call = self._hooks(), self._reached
        how: dict[str, Any] = {"engine": replace(UNCHECKED, change=self._vary), "mixers": mixes(self.loaded)}
        if self.recipe is not None:
            hooks = chain(hooks, self.recipe.hooks(self.place.attention, self.place.module, self._heard))
            on_call, how = self.recipe.on_call, {"computed": self.recipe.by_tokens}
        try:
            with hooked(hooks), self.factors:
                listen(self.model, reads, on_call, gradients=True, **how, **inputs)
        except _ReachedError:
            pass  # the layer attended, as it has to
        else:
            raise ModelError(f"layer {self.place.layer} made no attention call", "choose another layer")
        assert self.spec is not None
        query = self.own.written
        query.rerun = partial(self._again, False)
        if not self.place.crosses:
            return WrittenSides(self.spec, query, query, query.made_keys(self.spec))
        if self.place.key is None:
            return WrittenSides(self.spec, query, None)
        key = self.tracks[self.place.key.group].written
        key.rerun = partial(self._again, True)
        return WrittenSides(self.spec, query, key)

    def forget(self) -> None:
        """Let go of what was kept: the pass and what it found know each other, and would stay otherwise."""
        for track in self.tracks.values():
            for values in (track.written.residuals, track.written.heads, track.written.projections):
                values.clear()
        self.given, self.spec = ((), {}), None

    def _hooks(self) -> Iterator[RemovableHandle]:
        for track in self.tracks.values():
            for block in {run.block: None for run in track.course.runs}:
                yield block.register_forward_pre_hook(partial(self._enter, track), with_kwargs=True)
                for module in branches(block, self.place.attention):
                    yield module.register_forward_pre_hook(partial(self._constant, track), with_kwargs=True)
                for module in (module for module in weighted(block) if not is_norm(module)):
                    yield module.register_forward_pre_hook(partial(self._project, track), with_kwargs=True)
                    yield module.register_forward_hook(partial(self._projected, track))
        if self.place.tail is not None:
            yield self.place.tail.register_forward_pre_hook(self._leave, with_kwargs=True)
        if self.place.within and self.place.norm is not None:
            yield self.place.norm.register_forward_pre_hook(self._norm, with_kwargs=True)
        if self.place.within:
            yield self.place.module.register_forward_pre_hook(self._attend, with_kwargs=True)

    def _enter(self, track: _Track, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a block: keep its residual."""
        residual, runs = hidden_of(args, kwargs), track.course.runs
        if track.entered == len(runs) or runs[track.entered].block is not module:
            raise ModelError(f"{LOST}: its blocks run in another order than over a few tokens", ANOTHER)
        if residual is None or residual.ndim < 3:
            raise ModelError(f"{LOST}: its blocks are not given one vector per token", ANOTHER)
        residual = track.enter(residual, (*args, *kwargs.values()))
        if track.at_last and not self.place.within:
            self._forget()
            self.given = args, kwargs
        return with_hidden(args, kwargs, residual)

    def _constant(self, track: _Track, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a module that counts as a constant: no gradient comes back from it, but by the heads' outputs."""
        if track.closed or (track.at_last and (not track.within or module is self.place.module)):
            return None
        hidden = hidden_of(args, kwargs)
        heads = [one.output_BQHV for run, one in track.written.heads if run == track.entered - 1]
        if hidden is None or any(same_numbers(hidden, one) for one in heads):
            return None
        return with_hidden(args, kwargs, hidden.detach())

    def _project(self, track: _Track, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a module with weights: the first that is given a call's heads is their projection."""
        heads, hidden = track.written.heads, args[0] if args else None
        at = len(heads) - 1
        if track.closed or track.projecting is not None or at < 0 or at in track.written.projections:
            return
        numbers = heads[at][1].output_BQHV.numel()
        if isinstance(hidden, Tensor) and hidden.requires_grad and hidden.numel() == numbers:
            track.projecting = module, hidden

    def _projected(self, track: _Track, module: nn.Module, args: tuple[Any, ...], gave: Any) -> None:
        """Behind that module."""
        if track.projecting is not None and track.projecting[0] is module:
            if isinstance(gave, Tensor):
                track.written.projections[len(track.written.heads) - 1] = Projection(*track.projecting, gave)
            track.projecting = None

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the norm at the end of an encoder: its residual is what the keys are made of."""
        hidden = hidden_of(args, kwargs)
        if hidden is not None:
            self.tracks[ENCODER].close(hidden)

    def _norm(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the norm of what the layer is given: this is its residual."""
        hidden = hidden_of(args, kwargs)
        if hidden is not None and self.own.at_last and not self.own.closed:
            self._forget()
            self.own.close(hidden)

    def _attend(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the layer's own module: keep what it is given, which is its residual where no norm was given it."""
        self._norm(module, args, kwargs)
        if hidden_of(args, kwargs) is None or not self.own.at_last:
            return
        self.factors.forget()
        self.given = args, kwargs
        across = self.tracks.get(ENCODER)
        if self.place.crosses and across is not None:
            # The states of the encoder have another name in each family.
            named = {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}
            states = next((named[name] for name in FROM_ENCODER if isinstance(named.get(name), Tensor)), None)
            if states is not None:
                across.close(states)
                self.states = states

    def _vary(self, call: AttentionCall, output_BQHV: Tensor) -> Tensor:
        """Make the heads' outputs a variable."""
        track = self.tracks.get(group_of(call.stack))
        if track is None or track.closed:
            return output_BQHV.detach()
        variable = output_BQHV.detach().requires_grad_()
        track.written.heads.append((track.entered - 1, HeadOutputs(call.layer, call.stack, variable, call)))
        return variable

    def _heard(self, call: AttentionCall, heads: HeadOutputs, through: Projection | None) -> None:
        """A call outside the interface, of which the output is a variable already."""
        self._reached(call)
        track = self.tracks.get(group_of(call.stack))
        if track is not None and not track.closed:
            track.written.heads.append((track.entered - 1, heads))
            if through is not None:
                track.written.projections[len(track.written.heads) - 1] = through

    def _reached(self, call: AttentionCall) -> None:
        if (call.stack, call.layer) == (self.place.stack, self.place.layer):
            self.spec = call.spec
            raise _ReachedError

    def _forget(self) -> None:
        """What is run again begins here; the end of an encoder, which is run before it, keeps the scale of its norm."""
        self.norms.forget(but=self.place.tail)
        self.factors.forget()

    def _again(self, across: bool, residual: Tensor, frozen: bool) -> AttentionSpec:
        """The layer's call, where its block, or its norm and its module, is given another residual.

        across: its module is given what the end of the encoder makes of another residual.
        """
        place = self.place
        specs: list[AttentionSpec] = []
        module = place.module if across or place.within else place.query.runs[-1].block
        norm = place.tail if across else place.norm if place.within else None

        # What follows the call is not needed.
        def on_call(call: AttentionCall) -> None:
            assert call.spec is not None
            specs.append(call.spec)
            raise _ReachedError

        with ExitStack() as stack:
            stack.enter_context(running(self.model, UNCHECKED.implementation))
            if self.recipe is None:
                stack.enter_context(listening(self.model, on_call, engine=UNCHECKED))
            else:
                own = place.module
                stack.enter_context(hooked(self.recipe.hooks([own], own, lambda call, *others: on_call(call))))
                # as in the pass before, so that factors come in the same order
                stack.enter_context(listening(self.model, self.recipe.on_call, computed=self.recipe.by_tokens))
            if frozen:
                stack.enter_context(self.norms.again())
            hidden = residual if norm is None else norm(residual)
            args, kwargs = self.given
            # The states of the encoder are given by place or by name.
            if across:
                args = tuple(hidden if one is self.states else one for one in args)
                kwargs = {name: hidden if one is self.states else one for name, one in kwargs.items()}
            else:
                args, kwargs = with_hidden(args, kwargs, hidden)
            if frozen:
                stack.enter_context(self.factors.again())
            with suppress(_ReachedError):
                module(*args, **kwargs)
        return specs[0]


def branches(block: nn.Module, attention: Set[nn.Module]) -> Iterator[nn.Module]:
    """The modules of a block that compute something of its residual: its attention, and the largest that have matrices
    and neither attention nor norms in them: one with a norm may hold the residual connection, too."""
    for module in block.children():
        if module in attention:
            yield module
        elif is_norm(module) or all(parameter.ndim < 2 for parameter in module.parameters()):
            continue
        elif any(one in attention or is_norm(one) for one in module.modules()):
            yield from branches(module, attention)
        else:
            yield module
