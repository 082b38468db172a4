"""The fused engine: attention answered from q and k in one tiled pass."""

from attnscope.attention.tiled.operator import TiledAttention

__all__ = ["TiledAttention"]
