"""What engines cost: the most memory that one layer's attention takes, without the model itself.

eager_bytes(geometry, 2048, 4)      # grows with the square of the text
fused_bytes(geometry, 2048)         # grows with the text
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import isqrt
from typing import TYPE_CHECKING, Protocol

from attnscope.attention.tiling import TILE_BYTES
from attnscope.errors import MemoryLimitError
from attnscope.model.families import family
from attnscope.model.geometry import Geometry
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
        raise MemoryLimitError(
            f"memory ran out on {loaded.device} while {tokens} tokens were read",
            f"{tokens_that_should_fit(loaded, tokens)} tokens fit: shorten the text, or take a smaller model or dtype",
        ) from error


def tokens_that_should_fit(loaded: LoadedModel, failed: int) -> int:
    """What eager attention has room for; at most half of what just failed, which takes a quarter of the memory."""
    room = tokens_that_fit(loaded.geometry, free_memory(loaded.devices), DTYPE_BYTES[loaded.dtype])
    return max(1, min(room, failed // 2))
