"""What passes are run on: token sequences, and their rows whose next-token loss counts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Task:
    """Sequences and what counts in them.

    ids: of every sequence. rows: of every sequence the positions whose next token's loss counts, ascending. facts: what
    it was made of. together: so many sequences that follow each other are read in one pass: 2 for pairs.
    """

    name: str
    ids: tuple[tuple[int, ...], ...]
    rows: tuple[tuple[int, ...], ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    together: int = 1

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.ids]

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return sum(self.lengths)

    @property
    def one_length(self) -> bool:
        return len(set(self.lengths)) == 1

    @property
    def sha256(self) -> str:
        """Of all ids and rows."""
        return hashlib.sha256(json.dumps([self.ids, self.rows]).encode()).hexdigest()
