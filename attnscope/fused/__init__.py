"""The fused engine: attention answered from q and k in one tiled pass."""

from attnscope.fused.operator import FusedAttention

__all__ = ["FusedAttention"]
