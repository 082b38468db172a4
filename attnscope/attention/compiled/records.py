"""What the sweep is given, as numbers: one record of NAMES for each kv head of each text of a job."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnscope.attention.compiled.shapes import NAMES


class Each(NamedTuple):
    """A tensor whose first two dimensions are a job's texts and kv heads, or 1: each is given its own part."""

    tensor: Tensor

    @property
    def addresses(self) -> np.ndarray:
        """(texts or 1, kv heads or 1)."""
        first, size = self.tensor.data_ptr(), self.tensor.element_size()
        text, group = (
            size * step * np.arange(n) for n, step in zip(self.tensor.shape, self.tensor.stride()[:2], strict=False)
        )
        return first + text[:, None] + group


RecordValues = dict[str, int | Tensor | Each | None]  # tensors by their address, None as 0


def records(values: RecordValues, shape: tuple[int, int]) -> np.ndarray:
    """(texts * kv heads, NAMES) int64; what is given must outlive the sweep."""
    rows = np.empty((*shape, len(NAMES)), dtype=np.int64)
    for number, name in enumerate(NAMES):
        value = values[name]
        if isinstance(value, Each):
            rows[..., number] = value.addresses
        else:
            rows[..., number] = value.data_ptr() if isinstance(value, torch.Tensor) else value or 0
    return rows.reshape(-1, len(NAMES))
