"""The fused engine: attention answered from q and k in one tiled pass."""

from attnscope.attention.tiled.operator import TILE_BYTES, TiledAttention

__all__ = ["TILE_BYTES", "TiledAttention"]
