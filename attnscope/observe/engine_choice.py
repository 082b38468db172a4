"""Which engine reads a text, and how far its weights are from the model's own."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attnscope.attention import kernels_cpu
from attnscope.attention.kernels_cuda import device_can
from attnscope.errors import ForwardError, MemoryLimitError, UsageError
from attnscope.hooks.engines import ENGINES, Engine, engine_named, logits_bytes, tokens_that_fit
from attnscope.hooks.forward import text_inputs
from attnscope.hooks.listen import calls_interface, implementation_of, listen
from attnscope.model.geometry import Geometry
from attnscope.model.selection import DIFFERENCE
from attnscope.observe.request import Request
from attnscope.utils.memory import DTYPE_BYTES, free_memory, human_bytes, read_size

if TYPE_CHECKING:
    from attnscope.hooks.calls import AttentionCall
    from attnscope.inputs.prompt import Prompt
    from attnscope.model.loaded import LoadedModel

SHARE = 0.5  # of the free memory that one layer's matrices may take before auto turns to fused
# From here on a first reading in float32 on a CPU is faster without matrices, the loading of the kernel and the
# comparison with eager counted: "Which engine auto takes" in benchmarks/RESULTS.md, by benchmarks/choice.py; of texts
# side by side, "Batch". On a card the kernels in half precision are expected to be faster (docs/cuda.md); anything else
# was not measured: there auto goes by memory alone.
FASTER_TOKENS = 1_000  # of a text, by the kernel and by the tiles, whatever is asked of weights but whole matrices
FASTER_ROWS = 2_000  # of a text whose logits or norms are asked, which either reads row by row
FASTER_SCORES = 2**24  # of shorter texts together, where the kernel answers all that is asked
LACKING = "a compiled kernel reads such a text faster: pip install 'attnscope[fast]'"
NO_ROOM = "a layer's matrices do not fit"  # why auto took fused
COMPARED_TOKENS = 64
SURELY_FITS = 512**2  # pairs of tokens: one layer's matrices are then no more than some megabytes


class Choice(NamedTuple):
    """An engine, and why auto took it.

    why: in a few words, "" where it was named, or nothing else was in question. reader: which of the fused ones reads
    the text on a CPU; of the probe the implementation that it reads. for_speed: whether eager would fit too. hint: what
    would make it faster, "" for nothing.
    """

    engine: Engine
    why: str = ""
    reader: str = ""
    for_speed: bool = False
    hint: str = ""

    @property
    def words(self) -> str:
        """`fused (numba): faster from 1,000 tokens`."""
        name = f"{self.engine.name} ({self.reader})" if self.reader else self.engine.name
        return f"{name}: {self.why}" if self.why else name


def choose(
    loaded: LoadedModel,
    tokens: int,
    name: str = "auto",
    memory: str | None = None,
    *,
    listen: bool = False,
    batch: int = 1,
    request: Request | None = None,
) -> Choice:
    """The engine for so many tokens: as named, or the fastest that gives what is asked and fits the memory.

    memory: the budget of one layer's matrices, such as "4GB"; half of what is free without it. listen: leave the
    layers' outputs to the model. batch: texts of so many tokens side by side. request: what is asked; without it auto
    goes by memory alone. Raises MemoryLimitError where eager does not fit and fused cannot be had, UsageError where
    fused was asked of a family that attends outside the interface.
    """
    can_fuse, geometry = calls_interface(loaded.model), loaded.geometry
    if not any(geometry.stacks.values()) and name in ENGINES:  # an engine is of attention
        name = "eager"
    # An engine that was named is taken, or refused.
    if name not in ("auto", "eager"):
        if not can_fuse:
            what = "no kernel can be called again" if name == "probe" else "the fused engine cannot ask for q and k"
            raise UsageError(f"{geometry.model_type} attends where {what}", "use {engine=eager}")
        if name == "triton" and not device_can(torch.device(loaded.device)):
            raise UsageError(
                f"the engine triton needs Triton and a CUDA device from Ampere on, and the model is on {loaded.device}",
                "use {engine=fused}, the fastest that can",
            )
        engine = engine_named(name, listen)
        return _probe(loaded, engine, request) if engine.probes else Choice(engine)
    # Eager's matrices must fit: few pairs of tokens always do, since to ask for the memory takes longer than they.
    width = DTYPE_BYTES[loaded.dtype]
    if memory is not None:
        room = read_size(memory)
    elif batch * tokens**2 <= SURELY_FITS:
        room = sys.maxsize
    else:
        free = free_memory(loaded.devices)
        room = free if name == "eager" else round(free * SHARE)
    needed = ENGINES["eager"].bytes(geometry, tokens, width, batch)
    if request is not None and request.view.weights != "softmax" and not can_fuse:
        needed += logits_bytes(geometry, tokens, batch)
    choice = Choice(ENGINES["eager"])
    if name == "auto":
        case = Case(geometry, loaded.device, loaded.dtype, can_fuse)
        choice = automatic(case, tokens, request, fits=needed <= room)
    if choice.engine.name != "eager":
        return choice._replace(engine=engine_named(choice.engine.name, listen))
    if needed <= room:
        return choice
    otherwise = ", or use {engine=fused}" if can_fuse else ""
    raise MemoryLimitError(
        f"eager attention over {tokens} tokens takes {human_bytes(needed)} for one layer, and {loaded.device} has "
        f"{human_bytes(room)} for it",
        f"{tokens_that_fit(geometry, room, width)} tokens fit: shorten the text{otherwise}",
    )


def _probe(loaded: LoadedModel, engine: Engine, request: Request | None) -> Choice:
    """The probe of the kernel that a model was loaded with, or that transformers chooses by itself."""
    if request is not None and request.view.weights == "scores":
        raise UsageError("a kernel gives no logits, only weights", "use {engine=eager}, or {weights=softmax}")
    if loaded.options is not None and loaded.options.attention is None:
        engine = replace(engine, implementation="sdpa")
    return Choice(engine, reader=implementation_of(loaded.model, engine.implementation))


class Case(NamedTuple):
    """What auto goes by of a model: its geometry, device and dtype, and whether its attention shows q and k."""

    geometry: Geometry
    device: str
    dtype: str
    can_fuse: bool

    @property
    def on_card(self) -> bool:
        """Whether the Triton kernels read it: eager's blocks of rows are then the slower way, by what is predicted."""
        half = self.dtype in ("float16", "bfloat16")
        return half and self.device != "cpu" and device_can(torch.device(self.device))

    def keeps_eager(self, request: Request) -> str:
        """Why a text is read by eager where that is slower, "" where it is not."""
        if not self.can_fuse:
            return f"{self.geometry.model_type} does not show q and k"
        if request.weights:
            return "whole matrices are kept"
        if DIFFERENCE in self.geometry.views:
            return "differences of heads are taken of matrices"
        if self.on_card:
            return ""
        if self.device != "cpu":
            return f"fused was not timed on {self.device.partition(':')[0]} in {self.dtype}"
        return "" if self.dtype == "float32" else f"fused rounds differently in {self.dtype}"


def automatic(case: Case, tokens: int, request: Request | None, *, fits: bool) -> Choice:
    """What auto takes for a text; fits: whether eager's matrices do."""
    least = FASTER_TOKENS if request is None or request.view.weights == "softmax" else FASTER_ROWS
    long = tokens >= least and request is not None
    kept = case.keeps_eager(request) if request is not None else ""
    if long and not kept:
        how = "expected to be faster" if case.on_card else "faster"
        return _fused(case, tokens, request, f"{how} from {least:,} tokens")._replace(for_speed=fits)
    if not fits and case.can_fuse:
        return _fused(case, tokens, request, NO_ROOM)
    return Choice(ENGINES["eager"], kept * long)


def _fused(case: Case, tokens: int, request: Request | None, why: str) -> Choice:
    if case.device != "cpu":
        return Choice(ENGINES["fused"], why)
    heads = max((layer.heads for layer in case.geometry.attention_layers), default=0)
    pays = heads * tokens**2 >= kernels_cpu.PAYS
    if pays and kernels_cpu.installed():
        return Choice(ENGINES["fused"], why, "numba")
    return Choice(ENGINES["fused"], why, "tiles", hint=LACKING if pays and request and _swept(request) else "")


def _swept(request: Request) -> bool:
    """Whether all that is asked is what the kernel answers faster than the tiles: not sums over groups, as maps are."""
    others = request.maps or request.operands or request.rollout or not request.view.of_heads or request.group
    few = request.top_k is not None and request.top_k <= kernels_cpu.MOST_TOP
    return few and not (others or request.query or request.key)


def kernel_reads(loaded: LoadedModel, request: Request) -> bool:
    """Whether the kernel is here and answers all that is asked, so that short texts are faster too, many at once."""
    case = Case(loaded.geometry, loaded.device, loaded.dtype, calls_interface(loaded.model))
    return case.device == "cpu" and kernels_cpu.installed() and not case.keeps_eager(request) and _swept(request)


def difference_to_eager(
    loaded: LoadedModel, prompt: Prompt, source: Prompt | None = None, engine: Engine = ENGINES["tiles"]
) -> float | None:
    """The largest difference between eager's and an engine's weights on the prompt's first tokens, in this dtype.

    source: what an encoder-decoder's encoder reads. None where the model cannot be run with eager attention.
    """
    ids_BT, inputs = text_inputs(loaded, prompt, source, COMPARED_TOKENS)
    eager: dict[Any, torch.Tensor] = {}
    differences: list[float] = []

    def keep(call: AttentionCall) -> None:
        eager[call.path, call.call] = call.P.dense()

    def compare(call: AttentionCall) -> None:
        expected = eager.pop((call.path, call.call), None)
        if expected is not None:
            weights = call.P.dense()
            differences.append(float((weights - expected.to(weights.device)).abs().max()))

    try:
        listen(loaded.model, ids_BT, keep, engine=ENGINES["eager"], **inputs)
    except ForwardError:  # a family that refuses eager attention
        return None
    listen(loaded.model, ids_BT, compare, engine=engine, **inputs)
    return max(differences, default=0.0)
