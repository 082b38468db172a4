"""Attention answered by Triton kernels, on a CUDA device or, slowly, in Triton's interpreter; the tiles fill the gaps.

Importing this imports no triton: it is imported for the first call that it is to answer.
"""

from attnscope.attention.kernels_cuda.operator import TritonAttention, device_can, usable

__all__ = ["TritonAttention", "device_can", "usable"]
