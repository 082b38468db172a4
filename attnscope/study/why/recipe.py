"""Attention that no interface is asked for: its heads' outputs as variables, and its q and k as the oracle makes them.

The output projection is given the heads side by side, or, where it is in another module, the attention module gives
them. q and k are made by the family's layout of what enters the module, and are compared with the weights that it gave.

Shapes: B text, T token, H head, V width of v, Q query, K key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from attnscope.errors import ModelError
from attnscope.hooks.modules import ModuleRun
from attnscope.model.selection import is_vision
from attnscope.parity.comparing import Stack
from attnscope.parity.made import made_spec
from attnscope.study.why.places import ANOTHER
from attnscope.study.why.written import HeadOutputs, Projection

if TYPE_CHECKING:
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

    @contextmanager
    def heard(self, attention: Iterable[nn.Module], shown: nn.Module, heard: OnLeft) -> Iterator[None]:
        """While open, the calls of attention modules are handed on when these are left, their output a variable.

        shown: the module whose call has its q and k.
        """
        with ExitStack() as hooks:
            for module in attention:
                handles = [
                    module.register_forward_pre_hook(self._enter, with_kwargs=True),
                    module.register_forward_hook(partial(self._leave, shown, heard)),
                ]
                if self._out:
                    handles.append(module.get_submodule(self._out).register_forward_pre_hook(self._project))
                    handles.append(module.get_submodule(self._out).register_forward_hook(self._projected))
                for handle in handles:
                    hooks.callback(handle.remove)
            yield

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
