"""Which engine reads a text, and how far its weights are from the model's own."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import torch

from attnscope.attention import compiled
from attnscope.attention.triton_kernel import device_can
from attnscope.errors import ForwardError, MemoryLimitError, UsageError
from attnscope.memory import DTYPE_BYTES, free_memory, human_bytes
from attnscope.model.geometry import Geometry, tokens_that_fit
from attnscope.seam.engines import ENGINES, Eager, Engine, OnCard, Tiled, engine_named
from attnscope.seam.inputs import given_of
from attnscope.seam.listen import calls_interface, listen

if TYPE_CHECKING:
    from attnscope.model.loading import LoadedModel
    from attnscope.seam.call import AttentionCall
    from attnscope.text.prompt import Prompt

SHARE = 0.5  # of the free memory that one layer's matrices may take before auto turns to fused
COMPARED_TOKENS = 64
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def choose(
    loaded: LoadedModel,
    tokens: int,
    name: str = "auto",
    memory: str | None = None,
    *,
    listen: bool = False,
    batch: int = 1,
) -> Engine:
    """The engine for so many tokens: as named, or eager while one layer's matrices fit the budget.

    memory: the budget, such as "4GB"; half of what is free without it. listen: leave the layers' outputs to the model.
    batch: texts of so many tokens side by side. Raises MemoryLimitError where eager does not fit and fused cannot be
    had, UsageError where fused was asked of a family that attends outside the interface.
    """
    can_fuse = calls_interface(loaded.model)
    if name not in ("auto", "eager"):
        if not can_fuse:
            kind = loaded.geometry.model_type
            raise UsageError(f"{kind} attends where the fused engine cannot ask for q and k", "use {engine=eager}")
        if name == OnCard.name and not device_can(torch.device(loaded.device)):
            raise UsageError(
                f"the engine triton needs Triton and a CUDA device from Ampere on, and the model is on {loaded.device}",
                "use {engine=fused}, the fastest that can",
            )
        return engine_named(name, listen)
    eager, free, width = ENGINES["eager"], free_memory(loaded.device), DTYPE_BYTES[loaded.dtype]
    room = free if name == "eager" else round(free * SHARE)
    room = room if memory is None else read_size(memory)
    needed = eager.bytes(loaded.geometry, tokens, width, batch)
    if needed <= room:
        return eager
    if name == "auto" and can_fuse:
        return engine_named("fused", listen)
    raise does_not_fit(loaded.geometry, tokens, needed, room, (loaded.device, width), can_fuse)


def kernel_reads(loaded: LoadedModel, top_k: int | None) -> bool:
    """Whether the compiled kernel answers for this model in eager's stead: the same numbers but for float32's rounding.

    top_k: how many keys are kept of a query, None for all.
    """
    there = loaded.device == "cpu" and loaded.dtype == "float32" and compiled.installed()
    return there and top_k is not None and top_k <= compiled.MOST_TOP and calls_interface(loaded.model)


def does_not_fit(
    geometry: Geometry, tokens: int, needed: int, room: int, where: tuple[str, int], can_fuse: bool
) -> MemoryLimitError:
    """The refusal of a text that eager attention has no room for; where: device, bytes per number."""
    device, width = where
    otherwise = ", or use {engine=fused}" if can_fuse else ""
    return MemoryLimitError(
        f"eager attention over {tokens} tokens takes {human_bytes(needed)} for one layer, and {device} has "
        f"{human_bytes(room)} for it",
        f"{tokens_that_fit(geometry, room, width)} tokens fit: shorten the text{otherwise}",
    )


def read_size(text: str) -> int:
    """Bytes of "4GB", "512M", "1e9". Raises UsageError for anything else."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?)i?b?\s*", text.lower())
    try:
        size = float(found[1]) * UNITS[found[2]] if found else 0.0
    except ValueError:
        size = 0.0
    if not 1 <= size < math.inf:
        raise UsageError(f"a size of memory was expected, {text!r} came", "write {memory=4GB}")
    return int(size)


def difference(loaded: LoadedModel, prompt: Prompt, source: Prompt | None = None) -> float | None:
    """The largest difference between eager's and the tiles' weights on the prompt's first tokens, in this dtype.

    source: what an encoder-decoder's encoder reads. None where the model cannot be run with eager attention.
    """
    ids_BT, inputs = given_of(loaded, prompt, source, COMPARED_TOKENS)
    eager: dict[Any, torch.Tensor] = {}
    found: list[float] = []

    def keep(call: AttentionCall) -> None:
        eager[call.path, call.call] = call.P.dense()

    def compare(call: AttentionCall) -> None:
        expected = eager.pop((call.path, call.call), None)
        if expected is not None:
            weights = call.P.dense()
            found.append(float((weights - expected.to(weights.device)).abs().max()))

    try:
        listen(loaded.model, ids_BT, keep, engine=Eager(), **inputs)
    except ForwardError:  # a family that refuses eager attention
        return None
    listen(loaded.model, ids_BT, compare, engine=Tiled(), **inputs)
    return max(found, default=0.0)
