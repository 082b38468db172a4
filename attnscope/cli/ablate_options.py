"""The options of `attnscope ablate`: which heads go, on what, and where the table goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from attnscope.cli.groups import FIRST, option_group
from attnscope.cli.options import Config, Exporting, Format, Heads, Seed
from attnscope.cli.study_options import MOST_SEQUENCES, MOST_SETS, Sequences
from attnscope.cli.top import Top
from attnscope.errors import UsageError

if TYPE_CHECKING:
    from attnscope.interventions.spec import Task


@option_group
class Taken(Heads):
    """Which heads are taken away, and what replaces them."""

    panel = "Attention"
    sets: Annotated[
        Path | None,
        Option(help='Sets, as {"set": "name", "heads": ["L3H0", "L3H1"]} per line.', metavar="FILE"),
        FIRST,
    ] = None
    atlas: Annotated[
        Path | None, Option(help="What `scan` wrote: sets are its roles, or what @ROLE selects.", metavar="DIR")
    ] = None
    by: Annotated[Literal["kv"] | None, Option(help="Take away whole groups, all heads of a kv head.")] = None
    each: Annotated[bool, Option(help="Every head of the model alone, too.")] = False
    replace: Annotated[
        Literal["mean", "zero", "resample"],
        Option(help="What replaces a head: its mean over other sequences; zero; another sequence's, which misinforms."),
        FIRST,
    ] = "mean"
    random: Annotated[
        int, Option(min=0, max=MOST_SETS, help="Random sets of as many heads to hold each against.", metavar="N")
    ] = 100
    controls: Annotated[
        Literal["unnamed", "all"],
        Option(help="Draw random sets from the heads that no set names, or from all heads."),
    ] = "unnamed"

    def __post_init__(self) -> None:
        named = [f"--{name}" for name in ("select", "atlas") if getattr(self, name) is not None]
        if self.sets is not None and named:
            raise UsageError(f"{named[0]} and --sets were both given", "give one of them")

    @property
    def nothing(self) -> bool:
        """Whether no heads were named."""
        return self.select is None and self.sets is None and self.atlas is None


@option_group
class On(Sequences, Seed, Top):
    """What is to be predicted meanwhile."""

    panel = "Corpus"
    on: Annotated[
        str | None,
        Option(
            help='copy: repeated tokens; texts: of --texts; or {"text": "...", "targets": [[12, 16]]} per line.',
            metavar="copy|texts|FILE",
        ),
        FIRST,
    ] = None
    texts: Annotated[str | None, Option(help="A corpus: the loss of every next token.", metavar="FILE")] = None
    sequences: Annotated[
        int, Option(min=2, max=MOST_SEQUENCES, help="Sequences or texts at most; intervals need 32.", metavar="N")
    ] = 64
    top: Annotated[
        str | None,
        Option(
            help="Sets printed, with the rows of each, or pairs, steps, heads: a number, or all (default: 40 on a "
            "terminal, all in a pipe). Files in --out have all."
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.texts is not None and self.on not in (None, "texts"):
            raise UsageError(f"--texts was given, and --on {self.on}", "leave out one of them")
        if self.texts is None and self.on == "texts":
            raise UsageError("--on texts needs a corpus", "name it with --texts FILE")

    def of_all(self, count: int, task: Task) -> int:
        """What all sequences take, where those of the task take so much: a rehearsal draws few of equal length."""
        drawn = self.texts is None and self.on in (None, "copy")
        return count * self.sequences // len(task) if drawn else count

    def read_texts(self) -> list[str] | None:
        """The texts of --texts; None without it."""
        if self.texts is None:
            return None
        from attnscope.corpus.items import texts_in

        return [item.text for item in texts_in(self.texts, self.sequences)]


@option_group
class Measured(Config, Format, Exporting):
    """A table to stdout, table and facts to --out."""

    out: Annotated[Path | None, Option(help="Write table and facts here; a stopped run resumes.", metavar="DIR")] = None
