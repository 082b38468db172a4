"""Attention on a CPU answered by one compiled sweep over its rows."""

from attnscope.attention.kernels_cpu.layout import MOST_TOP
from attnscope.attention.kernels_cpu.object_code import SWITCHED_OFF, installed, switched_off
from attnscope.attention.kernels_cpu.sweep import PAYS, CompiledAttention, usable

__all__ = ["MOST_TOP", "PAYS", "SWITCHED_OFF", "CompiledAttention", "installed", "switched_off", "usable"]
