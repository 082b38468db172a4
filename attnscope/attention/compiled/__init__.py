"""Attention on a CPU answered by one compiled sweep over its rows."""

from attnscope.attention.compiled.object_code import SWITCHED_OFF, installed, switched_off
from attnscope.attention.compiled.operator import PAYS, CompiledAttention, usable
from attnscope.attention.compiled.shapes import MOST_TOP

__all__ = ["MOST_TOP", "PAYS", "SWITCHED_OFF", "CompiledAttention", "installed", "switched_off", "usable"]
