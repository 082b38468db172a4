"""`attnscope patch`: what an answer loses where heads have what they have in another text, and what that gives back."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from attnscope.cli import output
from attnscope.cli.figure_options import Look
from attnscope.cli.groups import command_line
from attnscope.cli.heads import GROUPS
from attnscope.cli.patch_options import BesideOthers, Paired, Patches, PatchTable, patch_plan
from attnscope.cli.patch_table import shown, to_know
from attnscope.cli.study import Printed, load_studied, questions, read_one, run_study
from attnscope.cli.takes import takes

if TYPE_CHECKING:
    from pathlib import Path

    from attnscope.studies.patching import PatchedPairs

RIVER = '"the bank of the river, the bank of the" --corrupted "the bank of the field, the bank of the"'
EXAMPLES = (
    f'attnscope patch {RIVER} --answer " river" --foil " field" --over heads',
    f'attnscope patch {RIVER} --answer " river" --over layers,positions --out runs/river',
    f"attnscope patch {RIVER} --what value --at 5 --over heads --method gradient",
    "attnscope patch --texts pairs.jsonl --over layers --out runs/pairs",
)


@takes(Paired, Patches, BesideOthers, PatchTable, Look, file=GROUPS)
def patch(paired: Paired, patches: Patches, beside: BesideOthers, table: PatchTable, look: Look) -> int:
    """What an answer loses where heads are as in another text.

    At the tokens --at, chosen heads of TEXT are given the output, pattern, keys or values that they have in the
    --corrupted text, and the model runs on. The effect is what the answer loses: nats, or with --foil logits. What is
    restored is what the same heads of TEXT give back to the answer of the corrupted text. Both are shares of the gap
    between the two texts, where there is one.
    """
    output.wanted_format(table.format)
    text = read_one(paired, table)

    from attnscope.studies.patching import AskedPair

    shared = {
        "corrupted": paired.corrupted,
        "at": patches.at,
        "answer": paired.answer,
        "foil": paired.foil,
        "define": patches.names(),
        "chat": paired.chat,
        "truncate": paired.truncate,
    }
    make = partial(AskedPair.of, shared=shared)
    asked = questions(paired, text, AskedPair.FIELDS, make, beside.sequences, stdin="jsonl")

    from attnscope.api.knockout import chosen_heads
    from attnscope.studies.patching import PatchStudy

    loaded = load_studied(paired, table)
    plan = patch_plan(patches, beside, chosen_heads(loaded, patches.select, patches.atlas))
    style = look.style(command_line("patch", paired, patches, beside, look))

    def draw(record: PatchedPairs, folder: Path) -> list[Path | None]:
        from attnscope.export.study_figures import save_patching

        return [save_patching(record, folder, style)]

    return run_study(PatchStudy.of(loaded, asked, plan), beside, table, Printed(shown, to_know, draw))
