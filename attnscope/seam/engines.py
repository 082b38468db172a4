"""Who computes a layer's attention: the model itself, attnscope's tiles, or both side by side.

The seam hands every call that comes through the attention interface to the engine; the engine gives the layer's output
back, shows the call to the listener as an operator, and says how it held. A new engine is one more class in ENGINES.

Shapes: B text, Q query, R sampled rows, H head, V width of v.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnscope.attention import compiled, triton_kernel
from attnscope.attention.compiled import CompiledAttention
from attnscope.attention.operator import AttentionOperator, DenseAttention
from attnscope.attention.spec import AttentionSpec
from attnscope.attention.tiled import TiledAttention
from attnscope.attention.triton_kernel import TritonAttention
from attnscope.errors import ModelError, UsageError
from attnscope.model.geometry import Geometry, eager_bytes, fused_bytes
from attnscope.seam.call import AttentionCall, CallCheck, Place
from attnscope.seam.checks import CHECKED_ROWS, REPEATED_ROWS, check_call, relative_error, sampled_rows, sdpa_kernel

ARGUMENTS = ("query", "key", "value", "attention_mask", "scaling", "dropout")  # of an attention function, by position
OnCall = Callable[[AttentionCall], None]


@dataclass(frozen=True)
class OwnAttention:
    """The model's own attention function with the arguments of one call, for an engine that wants it run."""

    attend: Callable[..., Any]
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def given(self) -> dict[str, Any]:
        """The arguments by name."""
        return {**dict(zip(ARGUMENTS, self.args, strict=False)), **self.kwargs}

    def __call__(self) -> tuple[Tensor, Tensor | None]:
        """Output (B, Q, H, V) and weights (B, H, Q, K), None under fused implementations."""
        output, weights = self.attend(self.module, *self.args, **self.kwargs)
        return output, weights

    def rows(self, spec: AttentionSpec, row_R: Tensor) -> Tensor:
        """The output of some queries alone, (B, R, H, V)."""
        given = self.given
        asked = {**given, "query": given["query"][:, :, row_R], "attention_mask": _mask_rows(given, spec, row_R)}
        for name in ("position_bias", "sinks"):  # one per query, where the family has them
            if isinstance(given.get(name), Tensor) and given[name].ndim == 4:
                asked[name] = given[name][..., row_R, :]
        output, _ = self.attend(self.module, *(asked.pop(name) for name in ARGUMENTS[:4]), **asked)
        return output


class Engine(ABC):
    """Who computes the layers' attention.

    name: what `--engine` and manifests say. implementation: transformers' attention that the model runs under. output:
    who gives the layers' outputs, "model" or "attnscope". alters: whether it changes them.
    """

    name: str
    implementation: str
    output: str
    alters: bool = False

    @abstractmethod
    def bytes(self, geometry: Geometry, tokens: int, dtype_bytes: int, batch: int = 1, device: str = "cpu") -> int:
        """About the most memory that one layer's attention takes beside the model on such a device."""

    @abstractmethod
    def run(self, place: Place, spec: AttentionSpec, own: OwnAttention, on_call: OnCall) -> tuple[Tensor, CallCheck]:
        """Give the layer's output (B, Q, H, V) and how the call held; `on_call` was given the call."""


class Eager(Engine):
    """The model's own eager attention, one layer's matrix at a time."""

    name, implementation, output = "eager", "eager", "model"

    def bytes(self, geometry: Geometry, tokens: int, dtype_bytes: int, batch: int = 1, device: str = "cpu") -> int:
        return eager_bytes(geometry, tokens, dtype_bytes, batch)

    def operator(self, spec: AttentionSpec) -> TiledAttention:
        """The call's attention where the model keeps no matrix."""
        return TiledAttention(spec)

    def run(self, place: Place, spec: AttentionSpec, own: OwnAttention, on_call: OnCall) -> tuple[Tensor, CallCheck]:
        output, weights = own()
        P: AttentionOperator = self.operator(spec) if weights is None else DenseAttention(weights, spec.visible, spec)
        call = AttentionCall(place, P, spec, weights, output)
        with full_precision(P.device):
            check = self.check(call, own)
            on_call(call)
        return output, check

    @staticmethod
    def check(call: AttentionCall, own: OwnAttention) -> CallCheck:
        """How it held."""
        check = check_call(call, "interface")
        check.answered_by = call.P.answered_by if isinstance(call.P, TiledAttention) else {}
        if call.weights_BHQK is None and call.spec and getattr(own.attend, "__name__", "").startswith("sdpa"):
            check.kernel = sdpa_kernel(call.spec)
        return check


class Tiled(Engine):
    """One pass over tiles of q and k answers the questions and gives the output; some rows are checked."""

    name, implementation, output = "tiles", "sdpa", "attnscope"

    def operator(self, spec: AttentionSpec) -> TiledAttention:
        """The call's attention, which can give the output too."""
        return TiledAttention(spec)

    def bytes(self, geometry: Geometry, tokens: int, dtype_bytes: int, batch: int = 1, device: str = "cpu") -> int:
        return fused_bytes(geometry, tokens, batch, device)

    def run(self, place: Place, spec: AttentionSpec, own: OwnAttention, on_call: OnCall) -> tuple[Tensor, CallCheck]:
        P = self.operator(spec)
        P.with_output = True
        call = AttentionCall(place, P, spec)
        with full_precision(P.device):
            on_call(call)
            output = P.output()
            check = check_call(call, "answered")
        check.kernel, check.answered_by = "attnscope", P.answered_by
        row_R = sampled_rows(P.queries, max(REPEATED_ROWS, CHECKED_ROWS // P.batch)).to(output.device)
        expected = own.rows(spec, row_R)
        no_number = 0 * output.sum(dtype=torch.float32)  # NaN where any of the output is none, in whatever row
        check.dtype, check.value_error = expected.dtype, relative_error(output[:, row_R] + no_number, expected)
        return output, check


class Compiled(Tiled):
    """A kernel for the CPU, compiled where it runs; what it does not know, and other devices, are left to the tiles."""

    name = "numba"

    def operator(self, spec: AttentionSpec) -> TiledAttention:
        return CompiledAttention(spec)


class OnCard(Tiled):
    """Kernels for CUDA, once they have proven themselves there; what they do not know is left to the tiles."""

    name = "triton"

    def operator(self, spec: AttentionSpec) -> TiledAttention:
        return TritonAttention(spec)


# The operators with a kernel, and whether they read a call faster than the tiles: the first that does is taken.
FASTEST: tuple[tuple[type[TiledAttention], Callable[[AttentionSpec], bool]], ...] = (
    (TritonAttention, triton_kernel.usable),
    (CompiledAttention, compiled.usable),
)


class Fused(Tiled):
    """The fastest of attnscope's own that can."""

    name = "fused"

    def operator(self, spec: AttentionSpec) -> TiledAttention:
        return next((operator for operator, can in FASTEST if can(spec)), TiledAttention)(spec)


class Beside(Eager):
    """The model's own fused attention gives the outputs; another engine's operator answers the questions beside it."""

    implementation = "sdpa"

    def __init__(self, engine: Tiled) -> None:
        self.engine, self.name = engine, engine.name

    def operator(self, spec: AttentionSpec) -> TiledAttention:
        return self.engine.operator(spec)

    def bytes(self, geometry: Geometry, tokens: int, dtype_bytes: int, batch: int = 1, device: str = "cpu") -> int:
        return self.engine.bytes(geometry, tokens, dtype_bytes, batch, device)


class Unchecked(Beside):
    """The model's own fused attention, its calls not checked: for many passes of which only the logits are wanted."""

    def __init__(self) -> None:
        super().__init__(Fused())

    def run(self, place: Place, spec: AttentionSpec, own: OwnAttention, on_call: OnCall) -> tuple[Tensor, CallCheck]:
        output, weights = own()
        on_call(AttentionCall(place, TiledAttention(spec), spec, weights, output))
        return output, CallCheck(
            place.layer, place.call, place.path, output.shape[2], "interface", dtype=output.dtype, kind=place.kind
        )


@dataclass(frozen=True)
class Altered(Engine):
    """Another engine whose outputs are changed before the model goes on: heads switched off, patched, steered.

    change(place, output_BQHV) returns the output that the model is to get; the operator shows the attention as it was.

        >>> def without_head_3(place, output):
        ...     return output if place.layer != 2 else output.index_fill(2, torch.tensor([3]), 0.0)
        >>> listen(model, ids, on_call, engine=Altered(Eager(), without_head_3)).output
    """

    engine: Engine
    change: Callable[[Place, Tensor], Tensor]
    alters = True

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.engine.name

    @property
    def implementation(self) -> str:  # type: ignore[override]
        return self.engine.implementation

    @property
    def output(self) -> str:  # type: ignore[override]
        return self.engine.output

    def bytes(self, geometry: Geometry, tokens: int, dtype_bytes: int, batch: int = 1, device: str = "cpu") -> int:
        return self.engine.bytes(geometry, tokens, dtype_bytes, batch, device)

    def run(self, place: Place, spec: AttentionSpec, own: OwnAttention, on_call: OnCall) -> tuple[Tensor, CallCheck]:
        output, check = self.engine.run(place, spec, own, on_call)
        changed = self.change(place, output)
        if changed.shape != output.shape:
            raise ModelError(
                f"layer {place.layer}: an output of shape {tuple(output.shape)} was expected back, "
                f"{tuple(changed.shape)} came",
                "return a tensor of the shape that was given",
            )
        check.altered = changed is not output
        return changed, check


# By what `--engine` says; "auto" chooses between them.
ENGINES: Mapping[str, Engine] = {engine.name: engine for engine in (Eager(), Fused(), Tiled(), Compiled(), OnCard())}
BESIDE: Mapping[str, Engine] = {name: Beside(engine) for name, engine in ENGINES.items() if isinstance(engine, Tiled)}


def engine_named(name: str, listen: bool = False) -> Engine:
    """The engine of a name; with `listen`, the one that leaves the outputs to the model. Raises UsageError."""
    if name not in ENGINES:
        raise UsageError(f"there is no engine {name!r}", f"the engines are {', '.join(['auto', *ENGINES])}")
    if name == Compiled.name and compiled.switched_off():
        raise UsageError(*compiled.SWITCHED_OFF)
    if name == Compiled.name and not compiled.installed():
        raise UsageError("the engine numba needs Numba, which is not installed", "pip install 'attnscope[fast]'")
    return BESIDE.get(name, ENGINES[name]) if listen else ENGINES[name]


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """A block whose arithmetic no autocast of the caller rounds; the model's own is left to him."""
    casts = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if casts else nullcontext()


def _mask_rows(given: Mapping[str, Any], spec: AttentionSpec, row_R: Tensor) -> Tensor:
    mask = given.get("attention_mask")
    if isinstance(mask, Tensor):
        return mask[..., row_R, :] if mask.shape[-2] > 1 else mask
    runs = row_R.cpu().split(max(1, len(row_R) // 4))  # one copy: each number of a device's tensor makes the host wait
    seen = torch.cat([spec.visible.rows(int(run[0]), int(run[-1]) + 1) for run in runs], 2)
    dtype = spec.q_BHQD.dtype
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
