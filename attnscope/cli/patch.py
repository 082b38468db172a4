"""`attnscope patch`: what an answer loses where heads have what they have in another text, and what that gives back.

The options of `attnscope patch`: the two texts, what is patched where, how it is measured, and where it goes.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from attnscope.cli.config import with_options
from attnscope.cli.figure_options import Look, StudyTable
from attnscope.cli.knockout_options import Answered, Compared
from attnscope.cli.option_groups import FIRST, UNRECORDED, check_words, command_line, fill
from attnscope.cli.options import Named, Selected
from attnscope.cli.output import writing_to
from attnscope.cli.study import Printed, load_studied, questions, read_one, run_study
from attnscope.cli.study_tables import patch_notes, patch_sheet
from attnscope.interventions.spec import Method, Over, PatchTarget
from attnscope.utils.folders import PICTURES, TABLES

if TYPE_CHECKING:
    from attnscope.studies.patching import PatchedPairs


class Paired(Answered):
    """A clean and a corrupted text, or many pairs, and what follows each."""

    corrupted: Annotated[str | None, "Second text, with something exchanged.", FIRST, UNRECORDED] = None
    texts: Annotated[
        str | None, "File of pairs instead; its fields corrupted, at, answer and foil override the options.", "FILE"
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_words(self.corrupted, "--corrupted")


class Patches(Named, Selected):
    """What is patched, and in what portions."""

    what: Annotated[PatchTarget, "Output of a head, pattern of its rows, or keys or values of its group.", FIRST] = (
        "output"
    )
    at: Annotated[
        str | None, "Tokens of TEXT to patch (default: all that are shared with the other text).", "TOKENS", FIRST
    ] = None
    over: Annotated[Over, "Portions; none: everything at once.", FIRST] = "none"
    method: Annotated[Method, "Run every patch, or estimate all by one backward pass and run a few."] = "measure"

    def __post_init__(self) -> None:
        self.names(self.at)


class BesideOthers(Compared):
    """What is compared with it, and how many pairs are read."""

    random: Annotated[int, "Number of random sets of heads to compare with, for --over none."] = 100
    seed: Annotated[int, "Seed of the sets."] = 0
    sequences: Annotated[int, "Pairs at most; intervals need 32."] = 64


OUT = "Folder for table, facts and a figure, or a file for one of them; a stopped run resumes."
PatchTable = writing_to(StudyTable, OUT, *PICTURES, *TABLES)
RIVER = '"the bank of the river, the bank of the" --corrupted "the bank of the field, the bank of the"'
EXAMPLES = (
    f'attnscope patch {RIVER} --answer " river" --foil " field" --over heads',
    f'attnscope patch {RIVER} --answer " river" --over layers,positions --out runs/river',
    f"attnscope patch {RIVER} --what value --at 5 --over heads --method gradient",
    "attnscope patch --texts pairs.jsonl --over layers --out runs/pairs",
)


@with_options(Paired, Patches, BesideOthers, PatchTable, Look)
def patch(paired: Paired, patches: Patches, beside: BesideOthers, table: StudyTable, look: Look) -> int:
    """Patch heads with those of another text and measure the loss.

    At the tokens --at, chosen heads of TEXT get the output, pattern, keys or values of the --corrupted text, and
    the model runs on. The effect is the loss of the answer: in nats, or with --foil in logits. The restored part is
    the gain of the answer from the same heads of TEXT in the corrupted text. Both are shares of the gap between the
    two texts, if there is one.
    """
    text = read_one(paired, table)

    from attnscope.studies.patching import AskedPair

    shared = paired.shared | {"corrupted": paired.corrupted, "at": patches.at, "define": patches.names()}
    make = partial(AskedPair.of, shared=shared)
    asked = questions(paired, text, AskedPair.FIELDS, make, beside.sequences, stdin="jsonl")

    # Errors of a text are raised before this line: a model takes seconds to load, and torch with it.
    from attnscope.api.knockout import chosen_heads
    from attnscope.studies.patching import PatchPlan, PatchStudy

    loaded = load_studied(paired, table)
    plan = fill(PatchPlan, patches, beside, **chosen_heads(loaded, patches.select, patches.atlas))
    style = look.figure_style(command_line("patch", paired, patches, beside, look))

    def draw(record: PatchedPairs, folder: Path) -> list[Path | None]:
        from attnscope.export.study_figures import save_patching

        return [save_patching(record, folder, style)]

    return run_study(PatchStudy.of(loaded, asked, plan), beside, table, Printed(patch_sheet, patch_notes, draw))
