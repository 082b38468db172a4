"""Who computes a layer's attention: the model itself, attnscope's tiles, or both side by side.

The seam hands every call that comes through the attention interface to the engine; the engine gives the layer's output
back, shows the call to the listener as an operator, and says how it held. A new engine is one more row of ENGINES.

Shapes: B text, Q query, R sampled rows, H head, V width of v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from attnscope.attention import kernels_cpu as compiled
from attnscope.attention import kernels_cuda as triton_kernel
from attnscope.attention import tiling as small
from attnscope.attention.kernels_cpu import CompiledAttention
from attnscope.attention.kernels_cuda import TritonAttention
from attnscope.attention.operator import AttentionOperator, DenseAttention
from attnscope.attention.spec import AttentionSpec
from attnscope.attention.tiling import SmallAttention, TiledAttention
from attnscope.errors import ModelError, UsageError
from attnscope.seam.call import AttentionCall, CallPlace
from attnscope.seam.checks import CHECKED_ROWS, REPEATED_ROWS, check_call, relative_error, sampled, sdpa_kernel
from attnscope.seam.cost import Cost, eager_bytes, fused_bytes
from attnscope.seam.own import OwnAttention
from attnscope.seam.report import CallCheck
from attnscope.utils.signals import ProcessWide

OnCall = Callable[[AttentionCall], None]
Change = Callable[[AttentionCall, Tensor], Tensor]  # a call and its output; what the model gets instead
T = TypeVar("T")


@dataclass(frozen=True)
class Engine:
    """Who computes the layers' attention.

    name: what `--engine` and manifests say. operator: answers the questions where the model shows no matrix. bytes:
    about the most memory that one layer's attention adds to the model. implementation: transformers' attention
    that the model runs under. output: who gives the layers' outputs: the model's own attention, or attnscope, by an
    operator that is a TiledAttention; some rows are then compared with the model's own. checked: whether the calls of
    the model's own attention are checked. change(call, output_BQHV): returns what the model gets instead of a layer's
    output, for heads that are switched off, patched or steered; the call shows the attention as it was, its q, k and v.

        >>> def without_head_3(call, output):
        ...     return output if call.layer != 2 else output.index_fill(2, torch.tensor([3]), 0.0)
        >>> listen(model, ids, on_call, engine=replace(ENGINES["eager"], change=without_head_3)).output
    """

    name: str
    operator: Callable[[AttentionSpec], AttentionOperator] = TiledAttention
    bytes: Cost = fused_bytes
    implementation: str = "sdpa"
    output: Literal["model", "attnscope"] = "model"
    checked: bool = True
    change: Change | None = None

    @property
    def alters(self) -> bool:
        """Whether it changes what the model computes."""
        return self.change is not None

    def run(
        self, place: CallPlace, spec: AttentionSpec, own: OwnAttention, on_call: OnCall
    ) -> tuple[Tensor, CallCheck]:
        """Give the layer's output (B, Q, H, V) and how the call held; `on_call` was given the call."""
        attend = self._by_model if self.output == "model" else self._by_operator
        call, output, check = attend(place, spec, own, on_call)
        if self.change is None:
            return output, check
        changed = self.change(call, output)
        if changed.shape != output.shape:
            raise ModelError(
                f"layer {place.layer}: expected an output of shape {tuple(output.shape)}, got {tuple(changed.shape)}",
                "return a tensor of the shape that was given",
            )
        check.altered = changed is not output
        return changed, check

    def _by_model(
        self, place: CallPlace, spec: AttentionSpec, own: OwnAttention, on_call: OnCall
    ) -> tuple[AttentionCall, Tensor, CallCheck]:
        """The model's own attention runs; its matrix, where it makes one, answers the questions."""
        output, weights = own()
        P = self.operator(spec) if weights is None else DenseAttention(weights, spec.visible, spec)
        call = AttentionCall(place, P, spec, weights, output)
        with full_precision(P.device):
            check = check_own(call, own) if self.checked else unchecked(call, output.dtype)
            on_call(call)
        return call, output, check

    def _by_operator(
        self, place: CallPlace, spec: AttentionSpec, own: OwnAttention, on_call: OnCall
    ) -> tuple[AttentionCall, Tensor, CallCheck]:
        """One pass over q and k answers the questions and gives the output; the model's own runs over some rows."""
        P = self.operator(spec)
        assert isinstance(P, TiledAttention), f"engine {self.name}: its operator gives no output"
        P.with_output = True
        call = AttentionCall(place, P, spec)
        with full_precision(P.device):
            on_call(call)
            output = P.output().contiguous()  # as the families' own attention gives it: some view it flat
            check = check_call(call, "answered")
        check.kernel, check.answered_by = "attnscope", P.answered_by
        count = max(REPEATED_ROWS, CHECKED_ROWS // P.batch)
        row_R, host_R = sampled(P.visible, count, output.device)
        expected = own.rows(spec, row_R, host_R)
        no_number = 0 * output.sum(dtype=torch.float32)  # NaN where any of the output is none, in whatever row
        check.note(value_error=relative_error(output[:, row_R] + no_number, expected))
        check.dtype = expected.dtype
        return call, output, check


def check_own(call: AttentionCall, own: OwnAttention) -> CallCheck:
    """How a call held whose output the model's own attention gave."""
    check = check_call(call, "interface")
    check.answered_by = call.P.answered_by if isinstance(call.P, TiledAttention) else {}
    if call.weights_BHQK is None and call.spec and getattr(own.attend, "__name__", "").startswith("sdpa"):
        check.kernel = sdpa_kernel(call.spec)
    return check


def unchecked(call: AttentionCall, dtype: torch.dtype) -> CallCheck:
    """That a call was made whose output has this dtype; nothing is measured."""
    return CallCheck(call.layer, call.call, call.path, call.P.heads, "interface", dtype=dtype, stack=call.stack)


def fastest(spec: AttentionSpec) -> TiledAttention:
    """The first operator that reads such a call faster than the tiles, by a kernel or by rows; else the tiles."""
    kernels = (
        (TritonAttention, triton_kernel.usable),
        (CompiledAttention, compiled.usable),
        (SmallAttention, small.is_short),
    )
    return next((operator for operator, can in kernels if can(spec)), TiledAttention)(spec)


# By what `--engine` says; "auto" chooses between them. What a kernel does not know is left to the tiles.
ENGINES: Mapping[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine("eager", bytes=eager_bytes, implementation="eager"),  # the model's own, one layer's matrix at a time
        Engine("fused", fastest, output="attnscope"),
        Engine("tiles", output="attnscope"),
        Engine("numba", CompiledAttention, output="attnscope"),
        Engine("triton", TritonAttention, output="attnscope"),
    )
}
UNCHECKED = Engine("fused", checked=False)  # the model's own, for many passes of which only the logits are wanted


def changing(engine: Engine | None, change: Callable[[AttentionCall], Tensor | None] | None) -> Engine | None:
    """The engine with a change of the calls' outputs; see `listen`. Raises UsageError where it has one already."""
    if change is None:
        return engine
    if engine is not None and engine.change is not None:
        raise UsageError("the engine changes outputs already", "leave out {change}, or the engine")

    def changed(call: AttentionCall, output_BQHV: Tensor) -> Tensor:
        result = change(replace(call, output_BQHV=output_BQHV))
        return output_BQHV if result is None else result

    return replace(engine or ENGINES["eager"], change=changed)


def engine_named(name: str, listen: bool = False) -> Engine:
    """The engine of a name; with `listen`, the same with the outputs left to the model. Raises UsageError."""
    if name not in ENGINES:
        raise UsageError(f"there is no engine {name!r}", f"the engines are {', '.join(['auto', *ENGINES])}")
    if name == "numba" and compiled.switched_off():
        raise UsageError(*compiled.SWITCHED_OFF)
    if name == "numba" and not compiled.installed():
        raise UsageError("the engine numba needs Numba, which is not installed", "pip install 'attnscope[fast]'")
    return replace(ENGINES[name], output="model") if listen else ENGINES[name]


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """A block whose arithmetic no autocast and no TF32 of the caller rounds; the model's own is left to him."""
    casts = torch.is_autocast_enabled(device.type)
    block = torch.autocast(device.type, enabled=False) if casts else nullcontext()
    return exact_products(block) if device.type == "cuda" else block


@contextmanager
def exact_products(block: AbstractContextManager[T]) -> Iterator[T]:
    """The block, with products of float32 in float32 on CUDA: images and callers may have set TF32, of 10 bits."""
    with _no_tf32(), block as inside:
        yield inside


@ProcessWide
@contextmanager
def _no_tf32() -> Iterator[None]:
    products: Any = torch.backends.cuda.matmul
    name, exact, before = "allow_tf32", cast(Any, False), cast(Any, None)
    try:
        before = products.allow_tf32
    except RuntimeError:  # who has set the newer name may not ask for the older
        name, exact = "fp32_precision", "ieee"
        before = products.fp32_precision
    setattr(products, name, exact)
    try:
        yield
    finally:
        setattr(products, name, before)
