"""The models that TransformerLens judges, each loaded by attnscope and by TransformerLens, and what both are given.

Shapes: B text, T token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

import attnscope
from external.models import words

TEXTS, TOKENS = 6, 16
ANSWER, FOIL = 7, 11


@dataclass(frozen=True)
class Both:
    """A model as attnscope and as TransformerLens have it, each loaded from the files by itself."""

    name: str
    folder: Path

    @cached_property
    def ours(self) -> Any:
        return attnscope.load(str(self.folder))

    @cached_property
    def theirs(self) -> Any:
        return self.bridge()

    def bridge(self) -> Any:
        return TransformerBridge.boot_transformers(str(self.folder), device="cpu", dtype=torch.float32)

    @property
    def heads(self) -> list[tuple[int, int]]:
        return [(layer, head) for layer, count in self.ours.geometry.heads_by_layer.items() for head in range(count)]

    def ids(self, texts: int = TEXTS, tokens: int = TOKENS) -> Tensor:
        """(B, T): random tokens."""
        drawn = torch.Generator().manual_seed(1)
        return torch.randint(3, min(self.ours.geometry.vocab_size, 1000), (texts, tokens), generator=drawn)

    @property
    def repeated(self) -> str:
        """A text of 24 words, twice."""
        if self.name == "demo":
            half = self.ours.tokenizer.decode(self.ids(1, 24)[0])
            return half + half
        half = words(torch.randperm(60, generator=torch.Generator().manual_seed(2))[:24] + 3)
        return f"{half} {half}"

    def __str__(self) -> str:
        return self.name


def near(found: Tensor, expected: Tensor | float, allowed: float) -> bool:
    """Whether no number is further apart."""
    return bool(((found - expected).abs() <= allowed).all())
