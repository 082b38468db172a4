"""What else `ablate` answers of the same heads and task: pairs, a pruning, a screen by gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from attnscope.cli.ablate_tables import pairs_sheet, prune_sheet, screen_sheet, trusted
from attnscope.errors import InputError, UsageError

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.table import Table as RichTable

    from attnscope.study.ablation import Advance, Passes

Head = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Otherwise:
    """Another question than what sets cost."""

    pairs: Annotated[
        bool, Option("--pairs", help="Instead: what any two of the heads cost beyond what both cost alone.")
    ] = False
    prune: Annotated[bool, Option("--prune", help="Instead: heads go one by one, the least missed first.")] = False
    method: Annotated[
        Literal["replace", "gradient"],
        Option(help="gradient: screen all heads to first order, and say how well that orders them."),
    ] = "replace"

    def __post_init__(self) -> None:
        wanted = [name for name, asked in self._wishes.items() if asked]
        if len(wanted) > 1:
            raise UsageError(f"{wanted[0]} and {wanted[1]} were both given", "ask one question at a time")

    @property
    def _wishes(self) -> Mapping[str, bool]:
        return {"--pairs": self.pairs, "--prune": self.prune, "--method gradient": self.method == "gradient"}

    @property
    def question(self) -> Question | None:
        """Who answers; None for sets."""
        answers = (asked_pairs, pruning, screen)
        return next((one for one, asked in zip(answers, self._wishes.values(), strict=True) if asked), None)


@dataclass(frozen=True)
class Answer:
    """What was found: a name for its files, a table, what a terminal shows of its first rows, and notes.

    draw: writes its figure into a folder.
    """

    name: str
    table: pa.Table
    sheet: Callable[[int | None], RichTable]
    notes: tuple[str, ...] = ()
    draw: Callable[[Path], object] | None = None


Question = Callable[["Asking"], Answer]


@dataclass(frozen=True)
class Asking:
    """Whom and what to ask. readings: a folder for what is kept on the way. picture: what a figure says of the run."""

    passes: Passes
    heads: tuple[Head, ...]
    readings: Path | None
    picture: str
    advance: Advance


def asked_pairs(asking: Asking) -> Answer:
    """The synergy of every two heads."""
    from attnscope.study.pairs import pair_sets, synergies

    if len(asking.heads) < 2:
        raise InputError("a pair takes two heads, and one was named", "name more with {select}")
    found = synergies(asking.heads, asking.passes.losses(pair_sets(asking.heads), asking.advance))
    return Answer("pairs", found.table(), lambda top: pairs_sheet(found, top))


def pruning(asking: Asking) -> Answer:
    """The heads in the order in which they are missed least."""
    import math

    from attnscope.figures import About, Style
    from attnscope.study.prune import curve, pruned

    loaded = asking.passes.loaded
    intact = float(asking.passes.losses([])[:, 0].mean())
    steps = list(pruned(asking.passes, asking.heads, asking.readings, asking.advance))

    def draw(folder: Path) -> Path:
        from attnscope.figures.pruning import save_pruning

        guess = [("uniform guess", math.log(loaded.geometry.vocab_size))]
        losses, style = [intact, *(one.loss for one in steps)], Style(about=About(asking.picture, loaded.name))
        return save_pruning(folder / "prune.png", [f"L{one.layer}H{one.head}" for one in steps], losses, guess, style)

    told = f"intact {intact:.3f} nats per token"
    return Answer("prune", curve(steps, intact), lambda top: prune_sheet(steps, intact, top), (told,), draw)


def screen(asking: Asking) -> Answer:
    """All heads to first order, some of them ablated beside."""
    from attnscope.study.gradient import screened

    found = screened(asking.passes, asking.advance)
    return Answer("gradient", found.table(), lambda top: screen_sheet(found, top), (trusted(found),))
