"""`attnscope patch`: what an answer loses where heads have what they have in another text, and what that gives back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnscope.cli import output
from attnscope.cli.figure_options import Look
from attnscope.cli.groups import command_line
from attnscope.cli.heads import GROUPS
from attnscope.cli.patch_options import BesideOthers, Paired, Patches, PatchTable, asked_of_options, patch_plan
from attnscope.cli.patch_table import shown, to_know
from attnscope.cli.place import ONE_BY_ONE, write_file
from attnscope.cli.takes import takes
from attnscope.signals import unwinding

if TYPE_CHECKING:
    from pathlib import Path

    from attnscope.study.patching.pairs import TextPair

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
    format = output.wanted_format(table.format)
    text = None
    if paired.texts is None:
        from attnscope.cli.single import read_text

        text = read_text(paired, table)
    output.complain_through_talk(table.quiet)
    asked = asked_of_options(paired, patches, text, beside.sequences)

    from attnscope.calls.knockout import chosen_heads
    from attnscope.cli.single import load_model
    from attnscope.study.patching.pairs import pairs_of

    loaded = load_model(paired, table)
    output.talk(f"{loaded.name}  {loaded.device}  {loaded.precision}  {loaded.geometry.in_words}", table.quiet)
    plan = patch_plan(patches, beside, chosen_heads(loaded, patches.select, patches.atlas))
    pairs = pairs_of(loaded, asked, plan.what)
    if len(pairs) == 1:
        _tell(pairs[0], table.quiet)
    if beside.dry_run:
        from attnscope.cli.rehearsal import number_of, rehearsed
        from attnscope.study.patching.effects import planned

        asked_patches, random, passes = planned(loaded, pairs, plan)
        sets = [*(one.patch for one in asked_patches), *random]
        said = f"{len(sets)} patches of {number_of(len(pairs), 'pair')}"
        output.show(rehearsed(loaded, passes, sets, said, table.quiet))
        return 0

    from attnscope.study.patching.effects import patched

    with unwinding():
        with output.progress("patching", None, table.quiet) as advance:
            found = patched(loaded, pairs, plan, table.folder, force=table.force, advance=advance)
        if table.out is not None:
            from attnscope.show.patching import save_patching

            style = look.style(command_line("patch", paired, patches, beside, look))
            if table.file is not None:

                def draw(folder: Path) -> list[Path | None]:
                    return [save_patching(found, folder, style)]

                write_file(table.file, found.table, draw, table.quiet, ONE_BY_ONE)
            else:
                with output.progress("drawing", None, table.quiet):
                    save_patching(found, table.out, style)
    output.emit_first(found.table(), beside, format, lambda: shown(found, beside.shown), table.quiet)
    for line in to_know(found):
        output.talk(line, table.quiet)
    return 0


def _tell(pair: TextPair, quiet: bool) -> None:
    """Say which tokens differ and which are patched, and what the answer is."""
    from attnscope.cells import shortened
    from attnscope.study.knockout.records import key_name

    ids, other = pair.clean.prompt.ids, pair.corrupted.prompt.ids
    places = zip(pair.at, pair.partners, strict=True)
    differ = [(one, two) for one, two in places if ids[one] != other[two]]
    said = ", ".join(f"{key_name(pair.clean, one)} -> {key_name(pair.corrupted, two)}" for one, two in differ)
    output.talk(f"differ: {shortened(said, 200) or 'none of the patched tokens'}", quiet)
    if pair.without:
        output.talk(f"{pair.without} tokens have no partner in the corrupted text and are not patched", quiet)
    output.talk(f"answer: {pair.clean.said}", quiet)
