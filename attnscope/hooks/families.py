"""What families do in their own way: the route of their calls, the stacks of their modules, weights that they return.

Whether a model's attention asks the interface `model/families.py` knows of transformers' own families; of code that
somebody else wrote, a pass over two tokens shows it. An encoder-decoder says which of its parts the encoder is; whether
a module of the decoder attends to the text so far or to the encoder's states is seen when it runs, by what it is given.

Where a family never asks the interface, most modules return (output, weights), others put more around the weights or
return them in pieces. While such a module runs, torch hands on each of its own functions that is called there. The
logits are what that softmax was given which gave the module's weights. The values are what these weights were
multiplied with, and the product is the heads' outputs. What the module returns as weights decides which softmax and
which product those are.

Shapes: B text, T token, N block, H head, Q query, K key, W keys of a window, X global tokens of the text with most, G
kv head, V width of v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attnscope.hooks.calls import same_numbers
from attnscope.hooks.forward import bound
from attnscope.model.families import Family, family, family_of
from attnscope.model.libraries import knows_interface
from attnscope.model.selection import CROSS, CROSSING, DECODER, ENCODER, VISION, main_stack
from attnscope.model.tasks import looks_back_alone, task_of

WITH_WEIGHTS: Mapping[str, Any] = {"output_attentions": True}


@dataclass(frozen=True)
class Route:
    """interface: whether its calls come through the interface. extras: further arguments of its forward."""

    interface: bool = True
    extras: Mapping[str, Any] = field(default_factory=dict)


_routes: WeakKeyDictionary[nn.Module, Route] = WeakKeyDictionary()


def route_of(model: nn.Module, listen: Callable[[Mapping[str, Any]], set[str]]) -> Route:
    """The route of a model, tried once. listen: runs two tokens with further arguments, and names the calls' routes.

    >>> route_of(attnscope.load("demo").model, lambda extras: set()).interface
    True
    """
    has_config = hasattr(model, "config")
    if type(model).__module__.startswith("transformers.") or not has_config:
        family = family_of(model)
        files = (type(module) for module in model.modules())
        asks = not family.bypasses_interface and (not has_config or any(map(knows_interface, files)))
        return Route(asks, WITH_WEIGHTS if family.returns_weights_when_asked else {})

    # Code that somebody else wrote may ask the interface, return its weights, or return them to who asks for them.
    for extras in ({}, WITH_WEIGHTS) if model not in _routes else ():
        try:
            routes = listen(extras)
        except Exception:  # any author's code: what is wrong with it is shown where it is run in earnest
            continue
        if routes:
            _routes[model] = Route("interface" in routes, extras)
            break
    return _routes.setdefault(model, Route())


FROM_ENCODER = ("key_value_states", "encoder_hidden_states")  # what most modules call the states of an encoder


class ModuleStacks:
    """The stack of every attention module of a model.

    >>> ModuleStacks(model, model.config).of(model.model.encoder.layers[0].self_attn)
    'encoder'
    """

    def __init__(self, model: nn.Module, config: Any) -> None:
        self.config = config
        self._back_alone: dict[str, bool | None] = {}
        self.stack = DECODER if config is None else main_stack(task_of(config))
        self._of: dict[nn.Module, str] = {}
        self._crossing: dict[nn.Module, bool] = {}
        self._states: Tensor | None = None  # the encoder's output, kept so that nothing else lies where it does
        has_encoder = getattr(config, "is_encoder_decoder", False)
        encoder = getattr(model, "get_encoder", lambda: None)() if has_encoder else None  # of an encoder's, itself
        self.encoder = encoder if isinstance(encoder, nn.Module) else None
        self._mark(self.encoder, ENCODER)
        parts = {VISION: "vision_config"} | dict(family(getattr(config, "model_type", None)).parts)
        stacks = {id(getattr(config, name)): stack for stack, name in parts.items() if getattr(config, name, None)}
        for module in model.modules() if stacks else ():
            if stack := stacks.get(id(getattr(module, "config", None))):
                self._mark(module, stack)

    def _mark(self, part: nn.Module | None, stack: str) -> None:
        crossing = next((crossed for crossed, of in CROSSING.items() if of == stack), stack)
        for module in part.modules() if part is not None else ():
            self._of.setdefault(module, crossing if "Cross" in type(module).__name__ else stack)

    def of(self, module: nn.Module) -> str:
        """The stack of a module that attends now."""
        stack = self._of.get(module, self.stack)
        return CROSS if stack == DECODER and self._crossing.get(module) else stack

    def back_alone(self, stack: str) -> bool | None:
        """Whether queries of a stack see no key after their own, by config and class; None where these do not say."""
        if stack not in self._back_alone:
            self._back_alone[stack] = None if self.config is None else looks_back_alone(self.config, stack)
        return self._back_alone[stack]

    def hook(self, modules: Iterable[nn.Module]) -> list[Any]:
        """Hooks that watch what the attention modules of a decoder with an encoder are given; none without one."""
        if self.encoder is None:
            return []
        watched = [module for module in modules if self._of.get(module) is None]
        return [
            self.encoder.register_forward_hook(self._encoded),
            *(module.register_forward_pre_hook(self._watch, with_kwargs=True) for module in watched),
        ]

    def _encoded(self, module: nn.Module, args: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple | list | Mapping) else output
        self._states = states if isinstance(states, Tensor) else None

    def _watch(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        arguments = bound(module, args, kwargs)
        by_name = any(isinstance(arguments.get(name), Tensor) for name in FROM_ENCODER)
        own = None if self._states is None else _address(self._states)
        tensors = (value for value in arguments.values() if isinstance(value, Tensor))
        self._crossing[module] = by_name or (own is not None and any(_address(value) == own for value in tensors))


def _address(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor that keeps its numbers elsewhere
        return id(tensor)


def weights_in(output: Any, family: Family) -> list[Tensor]:
    """The weights in what a module returned, in its order; empty where there are none.

    They follow the module's output, or have a name as it has; where the output itself comes with more, follow that.

        >>> weights_in((hidden, weights), Family())
        [weights]
    """
    if isinstance(output, Mapping):
        parts = list(output.values())
    elif isinstance(output, tuple | list) and output:
        parts = [*(output[0] if isinstance(output[0], tuple | list) else ()), *output[1:]]
    else:
        return []
    if family.layout == "blocks":  # the bias of positions is before them
        parts = parts[1:]
    rank = 5 if family.layout == "blocks" else 4
    matrices = [part for part in parts if isinstance(part, Tensor) and part.ndim == rank and part.is_floating_point()]
    matrices = [part for part in matrices if len(part)]  # that of a module around one that attends is empty: `without`
    return matrices if family.merges_cross or family.layout == "band" else matrices[:1]


def strip_weights(output: Any, weights: list[Tensor], keep_shape: bool) -> Any:
    """The same with None in place of the weights, or with a tensor of no texts, for code that works on with it."""
    if isinstance(output, Tensor):
        if not any(output is matrix for matrix in weights):
            return output
        return output.new_empty(0, *output.shape[1:]) if keep_shape else None
    like: Any = type(output)
    if isinstance(output, Mapping):
        return like({name: strip_weights(part, weights, keep_shape) for name, part in output.items()})
    if isinstance(output, tuple | list):
        return like([strip_weights(part, weights, keep_shape) for part in output])
    return output


def banded(matrices: Sequence[Tensor], global_BT: Tensor | None, tokens: int) -> tuple[Tensor, int]:
    """(B, H, Q, K) of weights in the layout "band", cut to the text's tokens, and how far a query sees to either side.

    matrices: (B, Q, H, X + W), each query's weights on the X global keys and on those of its window; where there are
    global tokens their own rows too, (B, H, X, K). global_BT: which tokens these are. X is the most of a text.
    """
    weights, *global_rows = matrices
    B, Q, H, _ = weights.shape
    X = global_rows[0].shape[2] if global_rows else 0
    local_BHQW = weights[..., X:].transpose(1, 2)
    W, tokens = local_BHQW.shape[-1], min(tokens, Q)
    reach = W // 2
    whole_BHQK = weights.new_zeros(B, H, Q, Q + 2 * reach)
    key_QW = torch.arange(Q, device=weights.device)[:, None] + torch.arange(W, device=weights.device)
    whole_BHQK.scatter_(-1, key_QW.expand(B, H, Q, W), local_BHQW)
    whole_BHQK = whole_BHQK[..., reach : reach + Q].clone()
    for text, global_T in enumerate(global_BT if global_BT is not None and global_rows else ()):
        at = global_T.nonzero()[:, 0]
        whole_BHQK[text, :, :, at] += weights[text, :, :, : len(at)].transpose(0, 1)  # the window leaves these keys out
        whole_BHQK[text, :, at] = global_rows[0][text, :, : len(at), :Q]
    return whole_BHQK[:, :, :tokens, :tokens], reach


def unpack_layout(
    matrices: Sequence[Tensor], layout: str, tokens: int, global_BT: Tensor | None = None
) -> tuple[Tensor, int | None]:
    """(B, H, Q, K) of weights in another layout, cut to the text's tokens, and how far a query sees to either side.

    layout: see `Family.layout`. matrices, global_BT: of a band see `banded`; of other layouts the weights alone.
    """
    if layout == "band":
        return banded(matrices, global_BT, tokens)
    weights = matrices[0]
    if layout == "last":
        return weights.permute(2, 3, 0, 1), None
    B, N, H, block, _ = weights.shape
    tokens = min(tokens, N * block)
    whole_BHQK = weights.new_zeros(B, H, N * block, (N + 2) * block)
    for start in range(0, N * block, block):
        whole_BHQK[:, :, start : start + block, start : start + 3 * block] = weights[:, start // block]
    return whole_BHQK[:, :, :tokens, block : block + tokens], block - 1


def near(tokens: int, reach: int | None, device: torch.device, global_BT: Tensor | None = None) -> Tensor | None:
    """(B or 1, 1, Q, K) boolean: the keys at most `reach` from the query; None for all.

    global_BT: the tokens that see all others, and that all others see.
    """
    if reach is None:
        return None
    position_T = torch.arange(tokens, device=device)
    near_11QK = ((position_T[:, None] - position_T).abs() <= reach)[None, None]
    if global_BT is None:
        return near_11QK
    global_BT = global_BT[:, :tokens].to(device)
    return near_11QK | global_BT[:, None, :, None] | global_BT[:, None, None, :]


SOFTMAX = "softmax"
PRODUCTS = ("matmul", "bmm", "einsum")


@dataclass(frozen=True)
class Computed:
    """What a module computed with its weights, each None where it was not seen.

    logits_BHQK: what the softmax was given, masked. v_BGKV: each value is that of H / G heads. output_BQHV: what the
    heads gave, before the output projection.
    """

    logits_BHQK: Tensor | None = None
    v_BGKV: Tensor | None = None
    output_BQHV: Tensor | None = None


class FunctionCall(NamedTuple):
    """One call of a function of torch: its name, its tensors in order, how many numbers it gave, and what.

    result: None of a softmax, which is not kept: `repeat` makes it a second time.
    """

    name: str
    args: Sequence[Any]
    size: int
    result: Tensor | None
    repeat: Callable[[], Tensor]

    @property
    def operands(self) -> Sequence[Tensor]:
        """What a softmax or a product was given; of `einsum` after its equation, one by one or in a list."""
        if self.name != "einsum":
            return self.args
        return self.args[1:] if isinstance(self.args[1], Tensor) else self.args[1]


class Watch(TorchFunctionMode):
    """While open, keeps the softmax of each module that runs, and the products of what it gave.

    >>> watch = Watch()
    >>> with watch:
    ...     watch.enter(attention, ())
    ...     output, weights_BHQK = attention(hidden)
    ...     computed(watch.leave(attention), weights_BHQK).logits_BHQK
    """

    def __init__(self) -> None:
        super().__init__()
        self._running: list[tuple[nn.Module, list[FunctionCall]]] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        """A module begins; for a forward pre-hook."""
        self._running.append((module, []))

    def leave(self, module: nn.Module) -> list[FunctionCall]:
        """What was kept of a module that ends, and of none that another error has ended; nothing where none began."""
        if all(running is not module for running, _ in self._running):
            return []
        while self._running[-1][0] is not module:
            self._running.pop()
        return self._running.pop()[1]

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").strip("_")
        if self._running and (name == SOFTMAX or name in PRODUCTS) and isinstance(result, Tensor):
            steps, by_name = self._running[-1][1], kwargs or {}
            tensors = (*args, *(by_name[key] for key in ("input", "other", "mat2") if key in by_name))
            repeat = partial(func, *args, **by_name)
            step = FunctionCall(name, tensors, result.numel(), None if name == SOFTMAX else result, repeat)
            sizes = [earlier.size for earlier in steps if earlier.name == SOFTMAX]
            if name == SOFTMAX or step.operands[0].numel() in sizes:
                steps.append(step)  # no product from before the softmax: it would keep a matrix alive
        return result


def computed(steps: Sequence[FunctionCall], weights_BHQK: Tensor) -> Computed:
    """What the module that gave these weights computed with them."""
    shape = weights_BHQK.shape
    softmaxes = [step for step in steps if step.name == SOFTMAX]
    softmax = next((step for step in softmaxes if _matches(step.repeat(), weights_BHQK)), None)
    product = next((step for step in steps if step.name != SOFTMAX and _matches(step.operands[0], weights_BHQK)), None)
    logits_BHQK = None if softmax is None else softmax.operands[0].reshape(shape)
    return Computed(logits_BHQK, *((None, None) if product is None else _values(product, *shape)))


def _matches(x: Tensor, weights_BHQK: Tensor) -> bool:
    """Whether these are the weights, in any precision, texts and heads perhaps in one dimension."""
    return x.shape[-2:] == weights_BHQK.shape[-2:] and same_numbers(x.to(weights_BHQK.dtype), weights_BHQK)


def _values(product: FunctionCall, B: int, H: int, Q: int, K: int) -> tuple[Tensor | None, Tensor | None]:
    """What weights were multiplied with (B, G, K, V), and what that gave (B, Q, H, V); None in another arrangement."""
    assert product.result is not None
    if product.name != "einsum":
        values = product.operands[1]
        v_BGKV = values.unflatten(0, (B, H)) if values.ndim == 3 else values
        if v_BGKV.ndim != 4 or v_BGKV.shape[2] != K or H % v_BGKV.shape[1]:
            return None, None
        return v_BGKV.expand(B, -1, -1, -1), product.result.reshape(B, H, Q, -1).transpose(1, 2)

    # Of `einsum("bnij,jbnd->ibnd", weights, values)` the letters say the order, whatever it is.
    inputs, _, output = product.args[0].replace(" ", "").partition("->")
    first, second = inputs.split(",") if inputs.count(",") == 1 else ("", "")
    widths = set(second) - set(first)
    if len(first) != 4 or len(second) != 4 or len(widths) != 1 or first[2] in second or len(output) != 4:
        return None, None
    text, head, query, key = tuple(first)
    [width] = widths
    v_BHKV = product.operands[1].permute([second.index(letter) for letter in (text, head, key, width)])
    return v_BHKV, product.result.permute([output.index(letter) for letter in (text, query, head, width)])
