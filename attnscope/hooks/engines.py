"""Who computes a layer's attention, the model itself, attnscope's tiles, or both side by side, and what that costs.

The listener hands every call that comes through the attention interface to the engine; the engine gives the layer's
output back, shows the call to who asked as an operator, and says how it held. A new engine is one more row of ENGINES.
Its cost is the most memory that one layer's attention takes, without the model itself.

    eager_bytes(geometry, 2048, 4)      # grows with the square of the text
    fused_bytes(geometry, 2048)         # grows with the text

Shapes: B text, Q query, R sampled rows, H head, V width of v.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import isqrt
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from attnscope.attention import kernels_cpu, kernels_cuda
from attnscope.attention import tiling as small
from attnscope.attention.kernels_cpu import CompiledAttention
from attnscope.attention.kernels_cuda import TritonAttention
from attnscope.attention.operator import AttentionOperator, DenseAttention, ProbedAttention
from attnscope.attention.rows import Block
from attnscope.attention.spec import AttentionSpec
from attnscope.attention.tiling import TILE_BYTES, SmallAttention, TiledAttention
from attnscope.errors import MemoryLimitError, ModelError, UsageError
from attnscope.hooks import calls
from attnscope.hooks.calls import CHECKED_ROWS, REPEATED_ROWS, AttentionCall, CallSite, OriginalAttention, RowChecks
from attnscope.hooks.report import UNREAD, CallCheck
from attnscope.model.families import family
from attnscope.model.geometry import Geometry, LayerGeometry
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


def _most(geometry: Geometry, of: Callable[[LayerGeometry], int]) -> int:
    """The largest number of its layers with attention, of which one at a time takes memory; 0 without any."""
    return max(map(of, geometry.attention_layers), default=0)


def eager_bytes(geometry: Geometry, tokens: int, dtype_bytes: int, batch: int = 1, device: str = "cpu") -> int:
    """Peak bytes of the attention matrices that are alive at once while eager attention runs one layer, on any device.

    In float32 that is the masked scores and their softmax, 2 x 4 bytes for every head and pair of tokens; in half
    precision the scores, their float32 copy and the float32 softmax, 2 + 4 + 4. Families that keep more say so in
    `matrices_alive`. The masks are added, N x N once for each type of layer.

    Example:
        eager_bytes(geometry, 2048, 4)  # 24 heads: 24 * 8 * 2048**2 + 4 * 2048**2 = 822083584
    """
    types, heads = {layer.type for layer in geometry.attention_layers}, _most(geometry, lambda layer: layer.heads)
    alive = family(geometry.model_type).matrices_alive
    entry = alive * dtype_bytes if dtype_bytes >= 4 else 6 + 2 * alive
    return batch * tokens * tokens * (heads * entry + len(types) * dtype_bytes)


def logits_bytes(geometry: Geometry, tokens: int, batch: int = 1) -> int:
    """Bytes of one layer's logits in float32, which are kept of a module that asks no interface where they are asked.

    Example:
        logits_bytes(geometry, 2048)  # 24 heads: 24 * 4 * 2048**2 = 402653184
    """
    return 4 * batch * tokens**2 * _most(geometry, lambda layer: layer.heads)


def fused_bytes(geometry: Geometry, tokens: int, dtype_bytes: int = 4, batch: int = 1, device: str = "cpu") -> int:
    """Peak bytes of what the fused engine adds to one layer: q, k, v, its output twice, and its tiles, all in float32.

    It grows with the text, not with its square. On a CPU there are two tiles, which a core takes again and again. Other
    devices sort a tile's rows, which takes three more, none larger than one layer's heads over all tokens; where an
    eighth of what is free is less than a tile, they are smaller. The model's own dtype changes nothing.

    Example:
        fused_bytes(geometry, 2048)  # 24 heads on 8 kv heads of 128: 4 * 2048 * (3 * 24 + 2 * 2 * 8) * 128 + 2 tiles
    """
    kind, whole = device.partition(":")[0], logits_bytes(geometry, tokens)

    def per_token(layer: LayerGeometry) -> int:
        own, shared = layer.heads * (layer.head_dim + 2 * layer.value_dim), layer.head_dim + layer.value_dim
        return own + 2 * layer.kv_heads * shared

    tiles = 2 * TILE_BYTES["cpu"] if kind == "cpu" else SORTED_TILES * min(TILE_BYTES[kind], whole)
    return 4 * batch * tokens * _most(geometry, per_token) + tiles


def probe_bytes(geometry: Geometry, tokens: int, dtype_bytes: int, batch: int = 1, device: str = "cpu") -> int:
    """Peak bytes of what the probe adds to one layer's kernel: its rows, and an output and values twice.

    The rows are held whole where a quarter of the free memory has room for them, else a part at a time.

    Example:
        probe_bytes(geometry, 2048, 4)  # 24 heads on 8 kv heads of 128: 4 * 2048 * (24 * 2048 + (24 + 8) * 128)
    """

    def per_token(layer: LayerGeometry) -> int:
        return layer.heads * (tokens + layer.value_dim) + layer.kv_heads * layer.value_dim

    return dtype_bytes * batch * tokens * _most(geometry, per_token)


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
    that the model runs under, None for the one that it has. probes: whether the answers are read out of the model's
    own function, see `attention/operator.py`. output: who gives the layers' outputs: the model's own attention, or
    attnscope, by an operator that is a TiledAttention; some rows are then compared with the model's own. checked:
    whether the calls of the model's own attention are checked. change(call, output_BQHV): returns what the model gets
    instead of a layer's output, for heads that are switched off, patched or steered; the call shows the attention as it
    was, its q, k and v.

        >>> def without_head_3(call, output):
        ...     return output if call.layer != 2 else output.index_fill(2, torch.tensor([3]), 0.0)
        >>> listen(model, ids, on_call, engine=replace(ENGINES["eager"], change=without_head_3)).output
    """

    name: str
    operator: Callable[[AttentionSpec], AttentionOperator] = TiledAttention
    bytes: Cost = fused_bytes
    implementation: str | None = "sdpa"
    probes: bool = False
    output: Literal["model", "attnscope"] = "model"
    checked: bool = True
    change: Change | None = None

    @property
    def alters(self) -> bool:
        """Whether it changes what the model computes."""
        return self.change is not None

    def outcome(self, spec: AttentionSpec, original: OriginalAttention) -> tuple[Tensor, Tensor | None]:
        """What the model's own attention gives, and its weights: its matrix, or the rows that are read out of it."""
        if not self.probes:
            return original()
        own = _own_arithmetic(original, spec.device)
        with own():
            output, _ = original()
        return output, probed(spec, original, own).weights_BHQK

    def run(
        self, place: CallSite, spec: AttentionSpec, original: OriginalAttention, on_call: OnCall
    ) -> tuple[Tensor, CallCheck]:
        """Give the layer's output (B, Q, H, V) and how the call held; `on_call` was given the call."""
        P: AttentionOperator
        if self.probes:
            # The model's own attention runs, and again for rows that are requested; no other rows are made.
            own = _own_arithmetic(original, spec.device)
            with own():
                output, _ = original()
            rows = RowChecks(spec.visible)
            P = probed(spec, original, own, rows.keep)
            call = AttentionCall(place, P, spec, None, output, kernel=original.kernel_of(spec))
            with full_precision(P.device):
                on_call(call)
                if self.checked and P.is_known:
                    check = calls.check_call(call, "interface", rows)
                else:
                    check = replace(unmeasured(call, output, UNREAD), keys=P.keys, queries=P.queries)
            check.kernel = original.kernel(spec)
        elif self.output == "model":
            # The model's own attention runs; its matrix, where it makes one, answers the questions.
            output, weights = original()
            P = self.operator(spec) if weights is None else DenseAttention(weights, spec.visible, spec)
            call = AttentionCall(place, P, spec, weights, output, kernel="attnscope" if weights is None else "eager")
            with full_precision(P.device):
                check = check_own(call, original) if self.checked else unmeasured(call, output, "interface")
                on_call(call)
        else:
            # One pass over q and k answers the questions and gives the output; the model's own runs over some rows.
            P = self.operator(spec)
            assert isinstance(P, TiledAttention), f"engine {self.name}: its operator gives no output"
            P.with_output = True
            call = AttentionCall(place, P, spec, kernel="attnscope")
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
        return self.changed(call, output, check), check

    def changed(self, call: AttentionCall, output: Tensor, check: CallCheck) -> Tensor:
        """What the model gets instead of a call's output; its check says whether that is another."""
        if self.change is None:
            return output
        changed = self.change(call, output)
        if changed.shape != output.shape:
            raise ModelError(
                f"{check.name}: expected an output of shape {tuple(output.shape)}, got {tuple(changed.shape)}",
                "return a tensor of the shape that was given",
            )
        check.altered = changed is not output
        return changed


def check_own(call: AttentionCall, original: OriginalAttention) -> CallCheck:
    """How a call held whose output the model's own attention gave."""
    check = calls.check_call(call, "interface")
    check.answered_by = call.P.answered_by
    if call.spec:
        check.kernel = original.kernel(call.spec)
    return check


def unmeasured(call: AttentionCall, output: Tensor, route: str) -> CallCheck:
    """That a call was made is noted, and nothing is measured."""
    layer, number, path, heads = call.layer, call.call, call.path, call.P.heads
    return CallCheck(layer, number, path, heads, route, dtype=output.dtype, stack=call.stack)


Arithmetic = Callable[[], AbstractContextManager[Any]]


def probed(
    spec: AttentionSpec,
    original: OriginalAttention,
    own: Arithmetic,
    on_rows: Callable[[Block], object] = lambda block: None,
) -> ProbedAttention:
    """A call's attention read out of the model's own function. own: its arithmetic. on_rows: see `ProbedAttention`."""

    def kernel(values_BGKV: Tensor) -> Tensor:
        with own():
            return original.of_values(values_BGKV)

    return ProbedAttention(spec, kernel, on_rows)


def _own_arithmetic(original: OriginalAttention, device: torch.device) -> Arithmetic:
    """Blocks in which the model's own function computes as it does now: compiled, and rounded as its caller has set."""
    kind, casts = device.type, torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(kind) if casts else None
    tf32 = _tf32() if kind == "cuda" else None
    # A capture runs compiled models uncompiled; a function that compiles its kernel is to have it.
    compiles = original.implementation not in ("", "eager", "sdpa") and "torch._dynamo" in sys.modules

    @contextmanager
    def block() -> Iterator[None]:
        with (
            torch.autocast(kind, dtype, enabled=True) if casts else nullcontext(),
            torch.compiler.set_stance("default") if compiles else nullcontext(),
            _with_tf32(tf32) if tf32 else nullcontext(),
        ):
            yield

    return block


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
        Engine("probe", bytes=probe_bytes, implementation=None, probes=True),  # the rows of the kernel that it has
    )
}
UNCHECKED = Engine("fused", checked=False)  # the model's own, for many passes of which only the logits are wanted


def with_change(engine: Engine | None, change: Callable[[AttentionCall], Tensor | None] | None) -> Engine | None:
    """The engine with a change of the calls' outputs; see `listen`. Raises UsageError where it has one already."""
    if change is None:
        return engine
    if engine is not None and engine.change is not None:
        raise UsageError("the engine changes outputs already", "leave out {change}, or the engine")
    if engine is not None and engine.probes:
        raise UsageError(f"the engine {engine.name} reads outputs and changes none", "use {engine=eager}")

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
    if listen and ENGINES[name].probes:
        raise UsageError(f"the engine {name} leaves the outputs to the model in any case", "leave out {listen}")
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


def _tf32() -> tuple[str, Any]:
    """The setting of TF32 for products on CUDA: its name, and its value."""
    products: Any = torch.backends.cuda.matmul
    try:
        return "allow_tf32", products.allow_tf32
    except RuntimeError:  # who has set the newer name may not ask for the older
        return "fp32_precision", products.fp32_precision


@contextmanager
def _with_tf32(setting: tuple[str, Any]) -> Iterator[None]:
    before = _tf32()
    setattr(torch.backends.cuda.matmul, *setting)
    try:
        yield
    finally:
        setattr(torch.backends.cuda.matmul, *before)


_no_tf32 = ProcessWide(lambda: _with_tf32((_tf32()[0], {"allow_tf32": False}.get(_tf32()[0], "ieee"))))
