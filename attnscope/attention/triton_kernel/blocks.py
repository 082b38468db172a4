"""How large a program's blocks are: chosen from what the compiler says of registers and spills.

`tests/test_triton.py` compiles them for sm_80 and sm_90, and docs/cuda.md has what it found.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from attnscope.attention.spec import AttentionSpec

FEW_ROWS = 16  # the fewest that a tensor core multiplies: what is generated, token by token
LEAST_COLUMNS = 16  # of a product
LEAST_HALVES = 64  # the same of 16 bits: narrower ones Triton 3.6 reads beyond their end on Hopper
AMPERE, HOPPER = 8, 9  # and Ada, as Ampere


@dataclass(frozen=True)
class Blocks:
    """M queries and N keys of a program, C columns of a product, its warps, and how many loads are under way."""

    M: int = 64
    N: int = 64
    C: int = 0
    warps: int = 4
    stages: int = 2


def blocks(spec: AttentionSpec, columns: int = 0, exact: bool = False) -> Blocks:
    """The blocks of a kernel over one call; exact: its columns are multiplied in more than the dtype of q."""
    M = FEW_ROWS if spec.visible.queries <= FEW_ROWS else 64
    loads = spec.bias is not None or spec.visible.as_mask is not None  # a number for every score, as well as k
    N = 64 if spec.q_BHQD.shape[-1] <= (64 if loads else 128) else 32
    least, most = (LEAST_COLUMNS, LEAST_COLUMNS) if exact else (LEAST_HALVES, 128)
    form = Blocks(M, N, min(most, power_of_two(columns, least)) if columns else 0)
    return replace(form, warps=8) if exact and M > FEW_ROWS and generation(spec.device) > HOPPER else form


def of_statistics(spec: AttentionSpec) -> Blocks:
    """The blocks of `statistics`: as many keys and threads as spill nothing on the card.

    On Hopper twice the keys, if nothing else is loaded. On Blackwell, and with a position bias, twice the threads; of
    wide heads with a bias fewer keys.
    """
    form, card, bias = blocks(spec), generation(spec.device), spec.bias is not None
    if form.M == FEW_ROWS:
        return form
    if card == HOPPER:
        return form if bias or form.N < 64 or spec.visible.as_mask is not None else replace(form, N=128)
    N = 16 if bias and spec.q_BHQD.shape[-1] > 128 else form.N
    return replace(form, N=N, warps=8) if bias or card > HOPPER else form


def of_largest(spec: AttentionSpec) -> Blocks:
    """The blocks of `largest`: on Ampere 32 keys, as more spill."""
    form = blocks(spec)
    return replace(form, N=32) if generation(spec.device) == AMPERE else form


@cache
def generation(device: torch.device) -> int:
    """Of a CUDA device, 10 and 12 Blackwell's; 0 of others."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def power_of_two(number: int, least: int = 1) -> int:
    """The smallest power of two that is at least both."""
    return max(least, 1 << max(0, number - 1).bit_length())
