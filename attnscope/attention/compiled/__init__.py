"""Attention on a CPU answered by one compiled sweep over its rows."""

from attnscope.attention.compiled.object_code import installed
from attnscope.attention.compiled.operator import CompiledAttention, usable

__all__ = ["CompiledAttention", "installed", "usable"]
