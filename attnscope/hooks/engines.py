"""Who computes a layer's attention, the model itself, attnscope's tiles, or both side by side, and what that costs.

The listener hands every call that comes through the attention interface to the engine; the engine gives the layer's
output back, shows the call to who asked as an operator, and says how it held. A new engine is one more row of ENGINES.
Its cost is the most memory that one layer's attention takes, without the model itself.

    eager_bytes(geometry, 2048, 4)      # grows with the square of the text
    fused_bytes(geometry, 2048)         # grows with the text

Shapes: B text, Q query, R sampled rows, H head, V width of v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import isqrt
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

import torch
from torch import Tensor

from attnscope.attention import kernels_cpu, kernels_cuda
from attnscope.attention import tiling as small
from attnscope.attention.kernels_cpu import CompiledAttention
from attnscope.attention.kernels_cuda import TritonAttention
from attnscope.attention.operator import AttentionOperator, DenseAttention
from attnscope.attention.spec import AttentionSpec
from attnscope.attention.tiling import TILE_BYTES, SmallAttention, TiledAttention
from attnscope.errors import MemoryLimitError, ModelError, UsageError
from attnscope.hooks import calls
from attnscope.hooks.calls import CHECKED_ROWS, REPEATED_ROWS, AttentionCall, CallSite, OriginalAttention
from attnscope.hooks.report import CallCheck
from attnscope.model.families import family
from attnscope.model.geometry import Geometry
from attnscope.model.libraries import ProcessWide
from attnscope.utils.memory import DTYPE_BYTES, free_memory, is_out_of_memory

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel

SORTED_TILES = 5  # alive at once where rows are sorted: logits, weights, sorted, their places (of 8 bytes)


class Cost(Protocol):
    """About the most bytes that one layer's attention over so many tokens takes, `batch` texts side by side."""

    def __call__(
        self, geometry: Geometry, tokens: int, dtype_bytes: int, batch: int = 1, device: str = "cpu"
    ) -> int: ...


def eager_bytes(geometry: Geometry, tokens: int, dtype_bytes: int, batch: int = 1, device: str = "cpu") -> int:
    """Peak bytes of the attention matrices that are alive at once while eager attention runs one layer, on any device.

    In float32 that is the masked scores and their softmax, 2 x 4 bytes for every head and pair of tokens; in half
    precision the scores, their float32 copy and the float32 softmax, 2 + 4 + 4. Families that keep more say so in
    `matrices_alive`. The masks are added, N x N once for each type of layer.

    Example:
        eager_bytes(geometry, 2048, 4)  # 24 heads: 24 * 8 * 2048**2 + 4 * 2048**2 = 822083584
    """
    types = {layer.type for layer in geometry.attention_layers}
    heads = max((layer.heads for layer in geometry.attention_layers), default=0)
    alive = family(geometry.model_type).matrices_alive
    entry = alive * dtype_bytes if dtype_bytes >= 4 else 6 + 2 * alive
    return batch * tokens * tokens * (heads * entry + len(types) * dtype_bytes)


def logits_bytes(geometry: Geometry, tokens: int, batch: int = 1) -> int:
    """Bytes of one layer's logits in float32, which are kept of a module that asks no interface where they are asked.

    Example:
        logits_bytes(geometry, 2048)  # 24 heads: 24 * 4 * 2048**2 = 402653184
    """
    return 4 * batch * tokens**2 * max((layer.heads for layer in geometry.attention_layers), default=0)


def fused_bytes(geometry: Geometry, tokens: int, dtype_bytes: int = 4, batch: int = 1, device: str = "cpu") -> int:
    """Peak bytes of what the fused engine adds to one layer: q, k, v, its output twice, and its tiles, all in float32.

    It grows with the text, not with its square. On a CPU there are two tiles, which a core takes again and again. Other
    devices sort a tile's rows, which takes three more, none larger than one layer's heads over all tokens; where an
    eighth of what is free is less than a tile, they are smaller. The model's own dtype changes nothing.

    Example:
        fused_bytes(geometry, 2048)  # 24 heads on 8 kv heads of 128: 4 * 2048 * (3 * 24 + 2 * 2 * 8) * 128 + 2 tiles
    """
    layers, kind = geometry.attention_layers, device.partition(":")[0]
    per_token = max(
        (
            layer.heads * (layer.head_dim + 2 * layer.value_dim)
            + 2 * layer.kv_heads * (layer.head_dim + layer.value_dim)
            for layer in layers
        ),
        default=0,
    )
    whole = 4 * max((layer.heads for layer in layers), default=0) * tokens**2
    tiles = 2 * TILE_BYTES["cpu"] if kind == "cpu" else SORTED_TILES * min(TILE_BYTES[kind], whole)
    return 4 * batch * tokens * per_token + tiles


def tokens_that_fit(geometry: Geometry, free_bytes: int, dtype_bytes: int) -> int:
    """The longest text whose `eager_bytes` are at most `free_bytes`."""
    per_pair = eager_bytes(geometry, 1, dtype_bytes)
    return isqrt(max(free_bytes, 0) // per_pair) if per_pair else 0


@contextmanager
def within_memory(loaded: LoadedModel, tokens: int) -> Iterator[None]:
    """Raise MemoryLimitError, which says what would fit, where memory runs out while so many tokens are read."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        # What eager attention has room for; at most half of what just failed, which takes a quarter of the memory.
        room = tokens_that_fit(loaded.geometry, free_memory(loaded.devices), DTYPE_BYTES[loaded.dtype])
        raise MemoryLimitError(
            f"memory ran out on {loaded.device} while {tokens} tokens were read",
            f"{max(1, min(room, tokens // 2))} tokens fit: shorten the text, or take a smaller model or dtype",
        ) from error


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
        self, place: CallSite, spec: AttentionSpec, original: OriginalAttention, on_call: OnCall
    ) -> tuple[Tensor, CallCheck]:
        """Give the layer's output (B, Q, H, V) and how the call held; `on_call` was given the call."""
        if self.output == "model":
            # The model's own attention runs; its matrix, where it makes one, answers the questions.
            output, weights = original()
            P = self.operator(spec) if weights is None else DenseAttention(weights, spec.visible, spec)
            call = AttentionCall(place, P, spec, weights, output)
            with full_precision(P.device):
                if self.checked:
                    check = check_own(call, original)
                else:  # that a call was made is noted, and nothing is measured
                    path, dtype = call.path, output.dtype
                    check = CallCheck(call.layer, call.call, path, P.heads, "interface", dtype=dtype, stack=call.stack)
                on_call(call)
        else:
            # One pass over q and k answers the questions and gives the output; the model's own runs over some rows.
            P = self.operator(spec)
            assert isinstance(P, TiledAttention), f"engine {self.name}: its operator gives no output"
            P.with_output = True
            call = AttentionCall(place, P, spec)
            with full_precision(P.device):
                on_call(call)
                output = P.output().contiguous()  # as the families' own attention gives it: some view it flat
                check = calls.check_call(call, "answered")
            check.kernel, check.answered_by = "attnscope", P.answered_by
            sample = calls.sampled(P.visible, max(REPEATED_ROWS, CHECKED_ROWS // P.batch), output.device)
            expected = original.rows(spec, sample)
            no_number = 0 * output.sum(dtype=torch.float32)  # NaN where any of the output is none, in whatever row
            check.note(value_error=calls.relative_error(sample.of(output) + no_number, expected))
            check.dtype = expected.dtype
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


def check_own(call: AttentionCall, original: OriginalAttention) -> CallCheck:
    """How a call held whose output the model's own attention gave."""
    check = calls.check_call(call, "interface")
    check.answered_by = call.P.answered_by if isinstance(call.P, TiledAttention) else {}
    if call.weights_BHQK is None and call.spec and getattr(original.attend, "__name__", "").startswith("sdpa"):
        check.kernel = calls.sdpa_kernel(call.spec)
    return check


def select_operator(spec: AttentionSpec) -> TiledAttention:
    """The first operator that reads such a call faster than the tiles, by a kernel or by rows; else the tiles."""
    kernels = (
        (TritonAttention, kernels_cuda.usable),
        (CompiledAttention, kernels_cpu.usable),
        (SmallAttention, small.is_short),
    )
    return next((operator for operator, can in kernels if can(spec)), TiledAttention)(spec)


# By what `--engine` says; "auto" chooses between them. What a kernel does not know is left to the tiles.
ENGINES: Mapping[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine("eager", bytes=eager_bytes, implementation="eager"),  # the model's own, one layer's matrix at a time
        Engine("fused", select_operator, output="attnscope"),
        Engine("tiles", output="attnscope"),
        Engine("numba", CompiledAttention, output="attnscope"),
        Engine("triton", TritonAttention, output="attnscope"),
    )
}
UNCHECKED = Engine("fused", checked=False)  # the model's own, for many passes of which only the logits are wanted


def with_change(engine: Engine | None, change: Callable[[AttentionCall], Tensor | None] | None) -> Engine | None:
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
    if name == "numba" and kernels_cpu.switched_off():
        raise UsageError(*kernels_cpu.SWITCHED_OFF)
    if name == "numba" and not kernels_cpu.installed():
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
