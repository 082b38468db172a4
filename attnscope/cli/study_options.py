"""The options of commands that read many texts or sequences."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from attnscope.cli.groups import FIRST, option_group
from attnscope.cli.options import Config, Exporting, Format

FEW = 2  # sequences of a rehearsal: as many as a mean over others takes
MOST_SEQUENCES = 1_000_000
MOST_SETS = 100_000  # that are drawn to compare with


@option_group
class ManyTexts:
    """A file of texts, for statistics over them."""

    panel = "Corpus"
    texts: Annotated[str | None, Option(help="Texts, one per line or record.", metavar="FILE"), FIRST] = None


@option_group
class Sampled:
    """How many sequences a number is of."""

    panel = "Corpus"
    sequences: Annotated[
        int, Option(min=2, max=MOST_SEQUENCES, help="Sequences per probe; intervals need 32.", metavar="N"), FIRST
    ] = 64


@option_group
class Rehearsal:
    """Whether anything is done."""

    dry_run: Annotated[bool, Option(help="Print what would be done, and its cost."), FIRST] = False


@option_group
class Sequences(Rehearsal, Sampled, ManyTexts):
    """Sequences that are drawn, or counted alone."""

    @property
    def drawn(self) -> int:
        """How many are drawn: a rehearsal counts all, and draws few."""
        return min(self.sequences, FEW) if self.dry_run else self.sequences


@option_group
class StudyTable(Config, Format, Exporting):
    """A table to stdout, and files to --out."""
