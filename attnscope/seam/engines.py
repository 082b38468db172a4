"""Which engine reads a text, and how far the two differ on it.

eager: the model's own matrices, a layer at a time. fused: answers from q and k, and no matrix is ever made.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from attnscope.errors import UsageError
from attnscope.memory import DTYPE_BYTES, free_memory
from attnscope.model.geometry import check_eager_fits, eager_bytes

if TYPE_CHECKING:
    from attnscope.model.loading import LoadedModel
    from attnscope.seam.call import AttentionCall
    from attnscope.text.prompt import Prompt

SHARE = 0.5  # of the free memory that one layer's matrices may take before auto turns to fused
COMPARED_TOKENS = 64
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


@dataclass(frozen=True)
class Choice:
    """The engine of a run, and the model under the implementation that it listens to."""

    loaded: LoadedModel
    engine: Literal["eager", "fused"]


def choose(loaded: LoadedModel, tokens: int, engine: str, memory: str | None = None) -> Choice:
    """The engine for so many tokens: as asked, or eager while one layer's matrices fit the budget.

    memory: the budget, such as "4GB"; half of what is free without it. Raises MemoryLimitError where eager does not fit
    and fused cannot be had, UsageError where fused was asked of a family that attends outside the interface.
    """
    from attnscope.model.loading import with_attention
    from attnscope.seam.listen import calls_interface

    can_fuse = calls_interface(loaded.model)
    if engine == "fused" and not can_fuse:
        kind = loaded.geometry.model_type
        raise UsageError(f"{kind} attends where the fused engine cannot ask for q and k", "use --engine eager")
    free = free_memory(loaded.device)
    budget = free if engine == "eager" else round(free * SHARE)
    budget = read_size(memory) if memory is not None else budget
    needed = eager_bytes(loaded.geometry, tokens, DTYPE_BYTES[loaded.dtype])
    if engine == "fused" or (engine == "auto" and needed > budget and can_fuse):
        return Choice(loaded, "fused")
    way_out = ", or use --engine fused" if can_fuse else ""
    check_eager_fits(loaded.geometry, tokens, loaded.device, loaded.dtype, budget, way_out)
    return Choice(with_attention(loaded, "eager"), "eager")


def read_size(text: str) -> int:
    """Bytes of "4GB", "512M", "1e9". Raises UsageError for anything else."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?)i?b?\s*", text.lower())
    try:
        size = float(found[1]) * UNITS[found[2]] if found else 0.0
    except ValueError:
        size = 0.0
    if size < 1:
        raise UsageError(f"a size of memory was expected, {text!r} came", "write --memory 4GB")
    return int(size)


def difference(loaded: LoadedModel, prompt: Prompt) -> float | None:
    """The largest difference between the engines' weights on the prompt's first tokens, in this dtype.

    None where the model cannot be run with eager attention.
    """
    import torch

    from attnscope.model.loading import with_attention
    from attnscope.seam.listen import listen

    ids_BT = torch.tensor([prompt.ids[:COMPARED_TOKENS]], device=loaded.device)
    eager: dict[Any, torch.Tensor] = {}
    largest = [0.0]

    def keep(call: AttentionCall) -> None:
        eager[call.path, call.call] = call.P.dense()

    def compare(call: AttentionCall) -> None:
        found, expected = call.P.dense(), eager.pop((call.path, call.call), None)
        if expected is not None:
            largest[0] = max(largest[0], float((found - expected.to(found.device)).abs().max()))

    attention = loaded.attention
    try:
        listen(with_attention(loaded, "eager").model, ids_BT, keep)
    except (ValueError, KeyError):
        return None
    finally:
        with_attention(loaded, attention)
    listen(loaded.model, ids_BT, compare, answer=True)
    return largest[0]
