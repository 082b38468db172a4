"""The options of commands that read many texts or sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from attnscope.cli.groups import FIRST

FEW = 2  # sequences of a rehearsal: as many as a mean over others takes


@dataclass(frozen=True, kw_only=True)
class ManyTexts:
    """A file of texts, for statistics over them."""

    panel = "Corpus"
    texts: Annotated[str | None, Option(help="Texts, one per line or record.", metavar="FILE"), FIRST] = None


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """How many sequences stand behind a number."""

    panel = "Corpus"
    sequences: Annotated[int, Option(min=2, help="Sequences per probe; intervals need 32.", metavar="N"), FIRST] = 64


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """Whether anything is done."""

    dry_run: Annotated[bool, Option(help="Print what would be done, and its cost."), FIRST] = False


@dataclass(frozen=True, kw_only=True)
class Sequences(Rehearsal, Sampled, ManyTexts):
    """Sequences that are drawn, or counted alone."""

    @property
    def drawn(self) -> int:
        """How many are drawn: a rehearsal counts all, and draws few."""
        return min(self.sequences, FEW) if self.dry_run else self.sequences
