"""Hear the attention of any PyTorch module, by what its functions ask of PyTorch, and change nothing of it.

    with hearing(module, lambda call: print(call.path, call.P.entropy().mean())) as report:
        module(inputs)

A mode of PyTorch's dispatcher sees every operation of this thread, whatever name the module's code calls it by. Nothing
is attached to modules, and no function is exchanged. So the fast path of `nn.TransformerEncoder` and
`nn.MultiheadAttention` stays on, which hooks and function modes switch off. The stack of calls says which module calls.

An operation is heard in one of three ways. A kernel of scaled dot-product attention has q, k, v and the mask as its
arguments. An operation for a whole layer has the layer's states and weights: q, k and v are made of them again, and the
layer's output shows whether they are right. A softmax over keys has finished weights, and the product that follows has
the values. Scripted and traced modules are heard too; compiled ones run uncompiled. Calls in other threads are not.

Shapes: B text, H head, G kv head, Q query, K key, T token, D width of q and k, V width of v, E width of the layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from attnscope.attention.operator import AttentionOperator, DenseAttention
from attnscope.attention.spec import AttentionSpec, Visibility, by_place
from attnscope.errors import ModelError, listed
from attnscope.hooks.calls import REPEATED_ROWS, AttentionCall, CallSite, check_call, relative_error, sampled
from attnscope.hooks.engines import OnCall, full_precision, select_operator
from attnscope.hooks.forward import bare_model, operation
from attnscope.hooks.listen import uncompiled
from attnscope.hooks.report import KERNEL, LAYER, SOFTMAX, CallCheck, CaptureReport, settle
from attnscope.model.libraries import ProcessWide
from attnscope.model.selection import CROSS, DECODER, ENCODER

Change = Callable[[AttentionCall], Tensor | None]
CHANNELS = "attention over channels, not over tokens"
OTHER_AXIS = "a softmax over another axis than that of the keys"
UNSEEN = "a softmax over other columns than its tokens, or of weights that values were not seen to be multiplied by"
UNORDERED = "weights with as many heads as tokens, or with their queries before their heads"
NESTED = "attention over nested tensors, in a kernel that shows no single text"
LOOKED_FOR = "scaled_dot_product_attention, PyTorch's own attention layers, and a softmax that values are multiplied by"


@contextmanager
def hearing(
    module: nn.Module,
    on_call: OnCall,
    *,
    operator: Callable[[AttentionSpec], AttentionOperator] = select_operator,
    change: Change | None = None,
) -> Iterator[CaptureReport]:
    """While open, every attention call that this thread makes in `module` is handed to `on_call`, whoever runs it.

    Layers are numbered in the order of their first call, and named by the path of the module that calls. The output is
    the module's own, bit for bit. operator: answers the questions about a call whose q and k are known. change: called
    with every call, its output in `call.output_BQHV`; the module gets what it returns instead, None for the output
    itself. With it the fast path is off, whose operations give no output of a head.

        >>> with hearing(net, lambda call: print(call.path)) as report:
        ...     net(ids)
        >>> report.unheard  # what attends in a way that was not heard, by the path of its module
    """
    ear = _Ear(bare_model(module), on_call, operator, change)
    with uncompiled(), nullcontext() if change is None else _slow_path(), ear:
        yield ear.report
        ear.flush()  # what waits for its values, now that the pass has ended
        settle(ear.report.calls)


def check_heard(report: CaptureReport, name: str) -> None:
    """Raise ModelError where a pass made no attention call that was heard.

    >>> check_heard(report, "net")
    """
    if not report.calls:
        others = "; ".join(["", *unheard_lines(report)])
        raise ModelError(
            f"no attention was heard in {name}{others}", f"looked for {LOOKED_FOR}, in the thread that ran it"
        )


def unheard_lines(report: CaptureReport) -> list[str]:
    """What attends in another way than was heard, in words: a line for each way.

    >>> unheard_lines(CaptureReport(unheard={"blocks.0": CHANNELS, "blocks.1": CHANNELS}))
    ['attention over channels, not over tokens: blocks.0, blocks.1']
    """
    ways: dict[str, list[str]] = {}
    for path, what in report.unheard.items():
        ways.setdefault(what, []).append(path or "the module itself")
    return [f"{what}: {listed(paths)}" for what, paths in ways.items()]


@ProcessWide
@contextmanager
def _slow_path() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class Caller(NamedTuple):
    """The innermost module that runs, its path, and the tensors that its forward was given, by name."""

    module: nn.Module
    path: str
    inputs: Mapping[str, Tensor]

    @property
    def texts(self) -> int:
        """How many texts its inputs are of, side by side; 1 where that is not known."""
        first = next(iter(self.inputs.values()), None)
        if first is None or first.ndim < 3:
            return 1
        return first.shape[1 if self._sequence_first else 0]

    @property
    def tokens(self) -> set[int]:
        """How many tokens its inputs have, where its shape says it: of (B, T, E), and of pictures either way round."""
        counts = set[int]()
        for value in self.inputs.values():
            sizes = () if value.is_nested else tuple(value.shape)
            if len(sizes) == 2:
                counts.add(sizes[0])
            elif len(sizes) == 3:
                counts.add(sizes[0 if self._sequence_first else 1])
            elif len(sizes) == 4:
                counts |= {sizes[1] * sizes[2], sizes[2] * sizes[3]}
        return counts

    @property
    def crosses(self) -> bool:
        """Whether its queries and keys are known to be of two texts."""
        query, key = (self.inputs.get(name) for name in ("query", "key"))
        return isinstance(self.module, nn.MultiheadAttention) and query is not None and query is not key

    def heads(self, rows: int) -> int:
        """How many heads are folded into a batch of so many rows."""
        count = getattr(self.module, "num_heads", None)
        if isinstance(count, int) and count > 0 and rows % count == 0:
            return count
        return rows // self.texts if rows % self.texts == 0 else 1

    @property
    def _sequence_first(self) -> bool:
        return getattr(self.module, "batch_first", True) is False


@dataclass(eq=False)
class _Softmax:
    """Weights that a softmax gave, until their product with values; own: of a kernel that is spelled out.

    copies: of the weights, as in the dtype of the values. One of them may be what the values are multiplied by.
    """

    weights: Tensor
    caller: Caller
    own: bool
    copies: list[Tensor] = field(default_factory=list)

    def of(self, operand: Tensor) -> _Softmax | None:
        """These weights as an operand holds them, its last axis that of the keys; None where it holds others."""
        held = (held for held in (self.weights, *self.copies) if _same(held, operand))
        weights = next((held for held in held if _in_order(held, operand)), None)
        return None if weights is None else _Softmax(weights, self.caller, self.own)

    def is_turned_in(self, operand: Tensor) -> bool:
        """Whether an operand holds these weights, its last axis that of the queries."""
        held = (held for held in (self.weights, *self.copies) if _same(held, operand))
        return any(_in_order(held.mT, operand) for held in held)


class _Ear(TorchDispatchMode):
    """The mode: it hands attention calls on, and keeps the report."""

    supports_higher_order_operators = True

    def __init__(
        self,
        module: nn.Module,
        on_call: OnCall,
        operator: Callable[[AttentionSpec], AttentionOperator],
        change: Change | None,
    ) -> None:
        super().__init__()
        self.paths = {id(part): (part, path) for path, part in module.named_modules()}
        self.on_call, self.operator, self.change = on_call, operator, change
        self.report = CaptureReport()
        self._layers: dict[str, int] = {}
        self._calls: dict[str, int] = {}
        self._handlers: dict[Any, Callable[..., Any] | None] = {}
        self._pending: _Softmax | None = None

    def on_operation(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func not in self._handlers:
            self._handlers[func] = self._handler(func)
        handler, kwargs = self._handlers[func], kwargs or {}
        if handler is None:
            return operation(func, args, kwargs)
        return handler(func, args, kwargs)

    def _handler(self, func: Any) -> Callable[..., Any] | None:
        """What hears an operation, by its name and its schema; None for what is no attention."""
        name = _name(func)
        if name in ("_softmax", "softmax", "_safe_softmax"):
            return self._on_softmax
        if name in ("bmm", "matmul", "mm"):
            return self._on_product
        if name in ("_to_copy", "clone"):
            return self._on_copy
        if name in LAYERS:
            return partial(self._on_layer, LAYERS[name])
        if "backward" in name or not ("attention" in name or "attn" in name):
            return None
        schema = getattr(func, "_schema", None)
        names = {argument.name for argument in schema.arguments} if schema else set()
        known = "scaled_dot_product" in name and {"query", "key", "value"} <= names and "q_descale" not in names
        return self._on_kernel if known else self._on_unknown

    # The three ways, and what is none of them.

    def _on_kernel(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = operation(func, args, kwargs)
        caller = self._caller()
        if caller is None:
            return result
        given = _arguments(func, args, kwargs)
        q, k, v = given["query"], given["key"], given["value"]
        if q.is_nested or k.is_nested:
            self.report.unheard[caller.path] = NESTED
            return result
        self.flush()
        mask = given.get("attn_mask", given.get("attn_bias"))
        heads = self._heads_of(caller, q)
        q, k, v = (_by_head(part, heads) for part in (q, k, v))
        texts = max(map(len, (q, k, v)))  # of one text each may be given once for all
        q, k, v = (part.expand(texts, -1, -1, -1) for part in (q, k, v))
        visible = visibility_of(q, k, mask, bool(given.get("is_causal")))
        scale = q.shape[-1] ** -0.5 if given.get("scale") is None else given["scale"]
        output = result[0] if isinstance(result, tuple) else result
        output_BQHV = _by_head(output, heads).transpose(1, 2)
        spec = AttentionSpec(q, k, v, scale, visible)
        changed = self._hand_on(caller, spec, KERNEL, output_BQHV)
        if changed is output_BQHV:
            return result
        changed = changed.transpose(1, 2).reshape(output.shape).to(output.dtype)
        return (changed, *result[1:]) if isinstance(result, tuple) else changed

    def _on_layer(self, layer: LayerOperation, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with _casting_as_outside(args[0].device):
            result, caller = operation(func, args, kwargs), self._caller()
            if caller is not None:
                output = result[0] if isinstance(result, tuple) else result
                self._hear_layer(caller, layer, _arguments(func, args, kwargs), output)
        return result

    def _hear_layer(self, caller: Caller, layer: LayerOperation, given: Mapping[str, Any], output: Tensor) -> None:
        self.flush()
        states, heads = given[layer.states], given[layer.heads]
        lengths: list[int] | None = None
        if states.is_nested:
            lengths = [len(part) for part in states.unbind()]
            states, output = (torch.nested.to_padded_tensor(part, 0.0) for part in (states, output))
        normed = _norm(given, states, 1) if given.get("norm_first") else states
        qkv = functional.linear(normed, given["qkv_weight"], given["qkv_bias"])
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
        visible = _layer_visibility(q, given.get("mask"), given.get("mask_type"), lengths)
        spec = AttentionSpec(q, k, v, q.shape[-1] ** -0.5, visible)

        def error(P: AttentionOperator) -> Tensor:
            sample = sampled(visible, REPEATED_ROWS, P.device)
            weights_BHRK = torch.cat([P.rows(start, stop) for start, stop in sample.runs], 2)
            dtype = given["proj_weight"].dtype  # that of the states, where nothing casts
            heads_BRE = (weights_BHRK @ v.float()).transpose(1, 2).flatten(2).to(dtype)
            expected = layer.finished(given, sample.of(states).to(dtype), heads_BRE)
            # Rows of padding hold whatever the operation left there.
            real = visible.counts_BHQ[:, :1, sample.row_R].transpose(1, 2) > 0
            if lengths is not None:
                real = real & (sample.row_R < torch.tensor(lengths, device=P.device)[:, None])[..., None]
            return relative_error(expected * real, sample.of(output) * real)

        # The part of the module that calls whose weight it is; the module itself where that is its own.
        address = given["qkv_weight"].data_ptr()
        weights = (name for name, own in caller.module.named_parameters() if own.data_ptr() == address)
        path = ".".join(filter(None, (caller.path, next(weights, "").rpartition(".")[0])))
        self._hand_on(caller._replace(path=path), spec, LAYER, error=error)
        self.report.calls[-1].dtype = _read_as(output.dtype)

    def _on_softmax(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = operation(func, args, kwargs)
        if not isinstance(result, Tensor) or result.is_nested or result.ndim < 2 or not result.numel():
            return result
        axis, caller = args[1] if len(args) > 1 else kwargs.get("dim", -1), self._caller()
        if caller is not None and axis % result.ndim == result.ndim - 1:
            self.flush()
            self._pending = _Softmax(result, caller, "safe" in str(func))
        elif caller is not None and result.ndim == 4:  # with fewer it may be anything
            self.report.unheard[caller.path] = OTHER_AXIS
        return result

    def _on_product(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = operation(func, args, kwargs)
        pending = self._pending
        if pending is not None and (multiplied := pending.of(args[0])) is not None:
            self._pending = None
            return self._finished_weights(multiplied, args[1], result)
        if pending is not None and pending.is_turned_in(args[0]):
            self._pending = None
            self.report.unheard[pending.caller.path] = OTHER_AXIS
        return result

    def _on_copy(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A copy of weights, as in the dtype of the values, is what the values are multiplied by."""
        result = operation(func, args, kwargs)
        pending = self._pending
        if pending is not None and result.is_floating_point() and pending.of(args[0]) is not None:
            pending.copies.append(result)
        return result

    def _on_unknown(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        caller = self._caller()
        if caller is not None:
            self.report.unheard[caller.path] = f"a call of {_name(func).strip('_')}, which shows no weights"
        return operation(func, args, kwargs)

    # Finished weights: their values may follow.

    def flush(self) -> None:
        """Weights whose product with values was not seen, where their shape says that they are over tokens."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        shape, tokens = pending.weights.shape, pending.caller.tokens
        if len(shape) < 4:  # mostly the softmax of a classifier or a router
            if len(shape) == 3 and tokens.issuperset(shape[1:]):
                self.report.unheard[pending.caller.path] = UNSEEN
            return
        if tokens and shape[-1] not in tokens:
            width = next(iter(pending.caller.inputs.values())).shape[-1]
            self.report.unheard[pending.caller.path] = CHANNELS if shape[-1] * shape[-3] == width else UNSEEN
            return
        self._finished_weights(pending)

    def _finished_weights(self, pending: _Softmax, values: Tensor | None = None, result: Any = None) -> Any:
        """Hand on weights that a softmax gave; the product of them with values, changed where that is asked."""
        weights, caller = pending.weights, pending.caller
        tokens = caller.tokens
        if values is not None and tokens and weights.shape[-1] not in tokens and values.shape[-1] in tokens:
            self.report.unheard[caller.path] = CHANNELS
            return result
        # Linear attention takes one softmax over tokens, and one over channels.
        linear = self.report.unheard.get(caller.path) == OTHER_AXIS
        if linear and tokens and not tokens.issuperset(weights.shape[-2:]):
            self.report.unheard[caller.path] = CHANNELS
            return result
        # What the mask was is read off the weights: later keys without any are hidden.
        heads = self._heads_of(caller, weights)
        weights_BHQK = _by_head(weights, heads)
        B, H, Q, K = weights_BHQK.shape
        # Values of several heads, or of each text for all its heads.
        parts = 0 if values is None else values.shape[:-2].numel()
        heads_first = weights.ndim < 4 or Q in tokens or H not in tokens
        if not heads_first and parts != B * H:
            self.report.unheard[caller.path] = UNORDERED
            return result
        causal = Q == K >= 2 and not bool((weights_BHQK.amax((0, 1)).triu(1) > 0).any())
        visible = Visibility(Q, K, None, causal, None, weights.device)
        # Values of other widths, as of talking heads, are none of these heads.
        v_BHKV = output_BQHV = None
        if values is not None and parts in (B * H, B) and values.shape[-2] == K:
            v_BHKV = values.reshape(B, -1, K, values.shape[-1]).expand(-1, H, -1, -1)
            output_BQHV = result.reshape(B, H, Q, -1).transpose(1, 2)
        call = AttentionCall(
            self._site(caller, Q, K, visible),
            DenseAttention(weights_BHQK, visible),
            None,
            weights_BHQK,
            output_BQHV,
            v_BHKV,
        )
        self._report(call, KERNEL if pending.own else SOFTMAX)
        changed = None if self.change is None else self.change(call)
        if changed is None:
            return result
        if output_BQHV is None:
            raise ModelError(
                f"layer {call.layer} ({call.path}) shows no output of its heads, which cannot be changed",
                "leave its output as it is",
            )
        self.report.calls[-1].altered = True
        return changed.transpose(1, 2).reshape(result.shape).to(result.dtype)

    # What is handed on.

    def _hand_on(
        self,
        caller: Caller,
        spec: AttentionSpec,
        route: str,
        output_BQHV: Tensor | None = None,
        error: Callable[[AttentionOperator], Tensor] | None = None,
    ) -> Any:
        """Hand on a call whose q and k are known; returns its output, or what it is changed to."""
        place = self._site(caller, spec.visible.queries, spec.visible.keys, spec.visible)
        call = AttentionCall(place, self.operator(spec), spec, None, output_BQHV)
        check = self._report(call, route)
        if error is not None:
            with full_precision(spec.device):
                check.note(value_error=error(call.P))
        changed = None if self.change is None or output_BQHV is None else self.change(call)
        check.altered = changed is not None
        return output_BQHV if changed is None else changed

    def _report(self, call: AttentionCall, route: str) -> CallCheck:
        with full_precision(call.P.device):
            check = check_call(call, route)
            check.kernel = {KERNEL: "sdpa", LAYER: "fast path"}.get(route, "eager")
            check.dtype = _read_as(check.dtype)
            self.on_call(call)
        self.report.calls.append(check)
        return check

    def _site(self, caller: Caller, queries: int, keys: int, visible: Visibility) -> CallSite:
        """The layer of a call, and which call of it this is; its stack as far as its own shape shows it."""
        layer = self._layers.setdefault(caller.path, len(self._layers))
        self._calls[caller.path] = self._calls.get(caller.path, -1) + 1
        looks_back = visible.once("looks back", lambda: float(visible.ahead) == 0)
        stack = CROSS if queries != keys or caller.crosses else DECODER if looks_back else ENCODER
        return CallSite(layer, self._calls[caller.path], caller.path, caller.module, stack)

    def _heads_of(self, caller: Caller, folded: Tensor) -> int:
        """How many heads are folded into the batch of a tensor, and a note of the order that is assumed of them."""
        heads = caller.heads(len(folded)) if folded.ndim == 3 else 1
        if 1 < heads < len(folded) and not isinstance(caller.module, nn.MultiheadAttention):
            self.report.folded[caller.path] = heads
        return heads

    def _caller(self) -> Caller | None:
        """The innermost part of the module that runs now, by the frames of this thread; None outside of it."""
        frame: Any = sys._getframe(2)
        inner, inputs = None, dict[str, Tensor]()
        while frame is not None:
            code = frame.f_code
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            owner = frame.f_locals.get(names[0]) if names else None
            if isinstance(owner, nn.Module) and id(owner) in self.paths:
                if inner is not None and owner is not inner:
                    break
                values = {name: frame.f_locals.get(name) for name in names[1:]}
                tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
                inner, inputs = owner, tensors or inputs
                if code.co_name == "forward":
                    break
            frame = frame.f_back
        return None if inner is None else Caller(*self.paths[id(inner)], inputs)


# Set, not defined: PyTorch wraps what is defined, and imports its compiler for that, which takes seconds.
_Ear.__torch_dispatch__ = _Ear.on_operation  # type: ignore[method-assign, assignment]


def _name(func: Any) -> str:
    """What an operation is called, without its overload."""
    return str(getattr(func, "__name__", func)).partition(".")[0]


def _arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operation by the names of its schema."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _same(tensor: Tensor, operand: Tensor) -> bool:
    """Whether an operand of two axes or more holds all elements of a tensor."""
    same = operand.layout == torch.strided and operand.ndim >= 2 and operand.numel() == tensor.numel()
    return same and operand.data_ptr() == tensor.data_ptr()


def _in_order(tensor: Tensor, operand: Tensor) -> bool:
    """Whether an operand has the rows of a tensor in their order, whatever axes these are in."""
    if tensor.shape[-1] == operand.shape[-1] and tensor.is_contiguous() and operand.is_contiguous():
        return True
    return tensor.shape[-2:] == operand.shape[-2:] and tensor.stride()[-2:] == operand.stride()[-2:]


def _by_head(tensor: Tensor, heads: int) -> Tensor:
    """(B, H, ...) of what has texts and heads in one dimension, in several, or not at all."""
    if tensor.ndim == 2:
        return tensor[None, None]
    return tensor.unflatten(0, (-1, heads)) if tensor.ndim == 3 else tensor.flatten(0, -4)


def visibility_of(q_BHQD: Tensor, k_BGKD: Tensor, mask: Tensor | None, causal: bool) -> Visibility:
    """Which keys the queries of a call of `scaled_dot_product_attention` see; by place where its mask says no more.

    >>> visibility_of(torch.ones(1, 1, 4, 8), torch.ones(1, 1, 4, 8), None, causal=True).causal
    True
    """
    Q, K, device = q_BHQD.shape[-2], k_BGKD.shape[-2], q_BHQD.device
    if mask is None and causal and Q != K:  # the first query sees the first key, and none the keys behind them
        mask = torch.ones(Q, K, dtype=torch.bool, device=device).tril()
    if mask is None:
        return Visibility(Q, K, None, causal, None, device)
    mask = mask[(None,) * (4 - mask.ndim)] if mask.ndim <= 4 else mask.flatten(0, -4)
    return _by_rule(Visibility(Q, K, mask, device=device))


def _by_rule(visible: Visibility) -> Visibility:
    """The same without a mask that hides nothing, or later keys alone."""
    mask = visible.mask
    assert mask is not None
    if bool((mask if mask.dtype == torch.bool else mask == 0).all()):
        return Visibility(visible.queries, visible.keys, None, False, None, visible.device)
    return by_place(visible, [None]) if visible.queries == visible.keys else visible


def _layer_visibility(
    q_BHTD: Tensor, mask: Tensor | None, kind: int | None, lengths: Sequence[int] | None
) -> Visibility:
    """What the operations for whole layers hide: where a mask is not 0, of tokens (0), padding (1) or both (2)."""
    T, device = q_BHTD.shape[-2], q_BHTD.device
    if lengths is not None:
        # Tokens of padding are not there: nothing is a key for them, and they are none.
        real_BT = torch.arange(T, device=device) < torch.tensor(lengths, device=device)[:, None]
        return _by_rule(Visibility(T, T, (real_BT[:, :, None] & real_BT[:, None])[:, None], device=device))
    if mask is None:
        return Visibility(T, T, None, False, None, device)
    seen = mask.bool().logical_not()
    return _by_rule(
        Visibility(T, T, seen[:, None, None] if kind == 1 else seen[(None,) * (4 - seen.ndim)], device=device)
    )


@contextmanager
def _casting_as_outside(device: torch.device) -> Iterator[None]:
    """A block that autocast rounds as it does the caller's code: behind a mode PyTorch has it off.

    Most operations are cast before a mode sees them; one for a whole layer casts inside.
    """
    snapshot: Any = getattr(torch._C, "_RestorePythonTLSSnapshot", nullcontext)
    with snapshot():
        casts = torch.is_autocast_enabled(device.type)
    with torch.autocast(device.type, torch.get_autocast_dtype(device.type)) if casts else nullcontext():
        yield


def _read_as(dtype: Any) -> Any:
    """The dtype whose rounding a call is held to: weights are read in float32 at most."""
    return torch.float32 if dtype == torch.float64 else dtype


def _norm(given: Mapping[str, Any], states: Tensor, number: int) -> Tensor:
    weight, bias = given[f"norm_weight_{number}"], given[f"norm_bias_{number}"]
    return functional.layer_norm(states, weight.shape, weight, bias, given["eps"])


def _project(given: Mapping[str, Any], states: Tensor, heads_BRE: Tensor) -> Tensor:
    """What `nn.MultiheadAttention` gives."""
    return functional.linear(heads_BRE, given["proj_weight"], given["proj_bias"])


def _encode(given: Mapping[str, Any], states: Tensor, heads_BRE: Tensor) -> Tensor:
    """What `nn.TransformerEncoderLayer` gives, its norms first or last."""
    first = given["norm_first"]
    attended = states + _project(given, states, heads_BRE)
    attended = attended if first else _norm(given, attended, 1)
    inner = functional.linear(
        _norm(given, attended, 2) if first else attended, given["ffn_weight_1"], given["ffn_bias_1"]
    )
    inner = functional.gelu(inner) if given["use_gelu"] else functional.relu(inner)
    output = attended + functional.linear(inner, given["ffn_weight_2"], given["ffn_bias_2"])
    return output if first else _norm(given, output, 2)


class LayerOperation(NamedTuple):
    """An operation for a whole layer: its arguments with the states and the number of heads, and what it gives.

    finished: what it makes of its arguments, the states and the heads' outputs.
    """

    states: str
    heads: str
    finished: Callable[[Mapping[str, Any], Tensor, Tensor], Tensor]


LAYERS = {
    "_native_multi_head_attention": LayerOperation("query", "num_head", _project),
    "_transformer_encoder_layer_fwd": LayerOperation("src", "num_heads", _encode),
}
