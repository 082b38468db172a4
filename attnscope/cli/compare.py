"""`attnscope compare`: two texts, or two models, head by head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Option

from attnscope.cli import output
from attnscope.cli.completion import models
from attnscope.cli.figure_options import Look
from attnscope.cli.groups import FIRST, UNRECORDED, command_line, recorded
from attnscope.cli.heads import GROUPS
from attnscope.cli.load_options import Memory
from attnscope.cli.options import ModelTexts, OtherSide, Results, Selected, Top
from attnscope.cli.study_options import ManyTexts
from attnscope.cli.takes import takes
from attnscope.errors import InputError, UsageError
from attnscope.signals import unwinding
from attnscope.stacks import SEQ2SEQ

if TYPE_CHECKING:
    from attnscope.ask import Text
    from attnscope.figures import Style
    from attnscope.model.loaded import LoadedModel
    from attnscope.run import Run
    from attnscope.study.comparison import Comparison, OneSide, Shared

EXAMPLES = (
    'attnscope compare --text "Mary gave John a book" --compare-text "John gave Mary a book" --out runs/swapped',
    "attnscope compare --texts corpus.txt.gz --compare-model demo --top 5",
)


@dataclass(frozen=True, kw_only=True)
class Sides(ModelTexts, OtherSide, ManyTexts):
    """One side, and what is compared with it."""

    compare_text: Annotated[str | None, Option(help="The other text.", metavar="TEXT"), FIRST, UNRECORDED] = None
    compare_model: Annotated[
        str | None, Option(help="The other model, on the same texts.", metavar="NAME", autocompletion=models), FIRST
    ] = None
    texts: Annotated[
        str | None, Option(help="For two models: a file of texts, a folder or a glob; - reads stdin.", metavar="FILE")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compare_text is None and self.compare_model is None:
            raise UsageError("nothing to compare with", "give --compare-text TEXT or --compare-model NAME")
        self.check_other_side()
        if self.texts is not None and (self.has_text or self.compare_text is not None):
            raise UsageError("--texts is for two models, instead of a text", "give it with --compare-model alone")
        if self.texts is not None and self.target is not None:
            raise UsageError("--target is of one text", "leave it out: a target is generated of each text")
        if self.audio is not None and self.compare_text is not None:
            raise UsageError("--audio replaces the text, and --compare-text needs one", "give --compare-model")
        if self.picture:
            raise UsageError("compare reads no pictures", "draw it with attnscope heatmap")


@dataclass(frozen=True, kw_only=True)
class Room(Memory):
    """Who computes the attention, and how much is kept of the first side."""

    memory: Annotated[
        str | None,
        Option(help="What may be kept of the first side, e.g. 4GB (default: what is free).", metavar="SIZE"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Differences(Results):
    """A table to stdout, the same and its pictures to --out."""

    out: Annotated[Path | None, Option(help="Write tables, signed maps and compare.json here.")] = None


class Named(NamedTuple):
    """A text on either side, and how messages call it."""

    name: str
    first: Text
    other: Text


@takes(Sides, Room, Selected, Top, Differences, Look, file=GROUPS)
def compare(asked: Sides, room: Room, selected: Selected, top: Top, printing: Differences, look: Look) -> int:
    """Two texts, or two models on the same texts, head by head.

    Tokens are aligned by position, or by characters (--align). Per head: the Jensen-Shannon divergence in bits over the
    keys that both have, averaged over the shared queries, the mass that is lost to the others, and every metric's
    difference. Over at least 32 texts with intervals. Of an encoder-decoder each stack has its own tokens. In a pipe
    all heads are printed as csv.
    """
    format = output.wanted_format(printing.format)

    from attnscope.folder.manifest import AROUND

    texts, loaded = texts_of(asked, printing), load_models(asked, printing)

    from attnscope.cli.compare_table import differences_sheet
    from attnscope.study.comparison import check_alike
    from attnscope.study.comparison import compare as compared
    from attnscope.study.differences import check_folder, comparison_facts, heads_table

    check_alike(*loaded)
    heads = heads_of(loaded[0], selected)
    groups = (asked, room, selected, look)
    options = {name: value for name, value in recorded(*groups).items() if name not in AROUND}
    said = comparison_facts(loaded, [getattr(part, "sha256", str(part)) for one in texts for part in one[1:]], options)
    if printing.out is not None:
        check_folder(printing.out, said, printing.force)
    maps = heads if printing.out is not None and len(texts) == 1 else None
    steps = 2 * len(texts) * sum(map(len, loaded[0].geometry.stacks.values()))
    with output.progress("forward passes", steps, printing.quiet, "layers") as advance:
        pairs = readings(texts, loaded, asked, room, printing.quiet)
        found = compared(pairs, maps=maps, memory=room.memory, align=asked.align, advance=advance)
    chosen = {(stack, layer, head) for stack, of in heads.items() for layer, here in of.items() for head in here}
    places = [place for place in found.order if (found.head_stacks[place], *found.heads[place]) in chosen]
    if printing.out is not None:
        write_comparison(found, places, said, look.style(command_line("compare", *groups)), printing)
    table = heads_table(found, places)
    output.emit(table, format, lambda: differences_sheet(found, places[: top.top]), printing.spreadsheet)
    return report(found, printing.quiet)


def heads_of(loaded: LoadedModel, selected: Selected) -> dict[str, dict[int, tuple[int, ...]]]:
    """The heads that are listed and drawn, by stack: those that --select names, or all."""
    from attnscope.run import atlas_of
    from attnscope.selection import everything, select_stacks
    from attnscope.study.comparison import heads_of as compared

    heads, atlas = compared(loaded), atlas_of(loaded, selected.atlas)
    if selected.select is None:
        return {stack: everything(of_stack) for stack, of_stack in heads.items()}
    return select_stacks(selected.select, heads, loaded.geometry.stack, atlas.by_role() if atlas else None)


def texts_of(asked: Sides, printing: Differences) -> list[Named]:
    """The texts of both sides. Raises UsageError or InputError for what cannot be read."""
    from attnscope.cli.single import read_given

    if asked.texts is None:
        text = read_given(asked, printing)
        return [Named("the text", text, text if asked.compare_text is None else asked.compare_text)]

    from attnscope.batch.items import texts_in

    output.complain_through_talk(printing.quiet)
    return [Named(item.id, item.text, item.text) for item in texts_in(asked.texts, chat=asked.chat, strict=True)]


def load_models(asked: Sides, printing: Differences) -> tuple[LoadedModel, LoadedModel]:
    """The model of either side; one and the same for two texts."""
    from attnscope.cli.single import load_model

    loaded = load_model(asked, printing)
    if asked.compare_model is None:
        return loaded, loaded
    return loaded, load_model(replace(asked, model=asked.compare_model, revision=None, base=None), printing)


def readings(
    texts: Sequence[Named], loaded: Sequence[LoadedModel], asked: Sides, room: Room, quiet: bool
) -> Iterator[tuple[OneSide, OneSide]]:
    """Both sides of each text, ready to be read; of many, those that do not fit are named and left out."""
    from attnscope.ask import Ask
    from attnscope.cli.single import tell_run, tell_target
    from attnscope.media.sound import Sound
    from attnscope.run import prepare
    from attnscope.study.comparison import OneSide

    def ready(model: LoadedModel, text: Text, chat: bool) -> Run:
        ask = Ask(text, engine=room.engine, memory=room.memory, chat=chat, truncate=asked.truncate, target=asked.target)
        return prepare(model, ask)

    if len(texts) > 1 and loaded[0].geometry.task == SEQ2SEQ:
        output.talk("the targets are generated greedily, each by the model that reads it", quiet)
    for name, first, other in texts:
        try:
            runs = [ready(loaded[0], first, asked.chat)]
            written = isinstance(other, str | Sound)  # tokens are of one model: the other reads what they say
            runs.append(ready(loaded[1], other if written else runs[0].text.text, asked.chat and written))
        except InputError as error:
            if len(texts) == 1:
                raise
            output.talk(f"left out: {name}: {error.message}", quiet)
            continue
        for run in runs if len(texts) == 1 else ():
            tell_run(run, quiet)
            tell_target(run, quiet)
        one, two = (OneSide(run.loaded, run.prompt, run.engine, run.source) for run in runs)
        yield one, two


def write_comparison(
    found: Comparison, places: Sequence[int], said: Mapping[str, Any], style: Style, printing: Differences
) -> None:
    """Tables and pictures into --out, with a bar while they are drawn; said: what tells it from another comparison."""
    from attnscope.show.comparison import save

    assert printing.out is not None
    drawn = found.pair.drawn.values() if found.pair else ()
    pictures = len(found.stacks) + sum(len(one.values) for one in drawn)
    with unwinding(), output.progress("drawing", pictures, printing.quiet, "pictures") as advance:
        spreadsheet = printing.spreadsheet
        written = save(found, printing.out, said, style, places=places, spreadsheet=spreadsheet, advance=advance)
    output.talk(f"wrote {len(written)} files to {printing.out}", printing.quiet)


def report(found: Comparison, quiet: bool) -> int:
    """Say what stands beside the table and what did not hold; the exit code that follows."""
    if found.pair:
        for text in found.pair.texts:
            tell_shared(text, quiet)
    else:
        from attnscope.study.statistics import FEWEST

        output.talk(f"{found.texts} texts" + ", too few for intervals" * (found.texts < FEWEST), quiet)
    if not (found.js.effect > 0).any():
        output.talk("no head differs", quiet)
    else:
        tell_first(found, quiet)
    for line in found.failures:
        output.talk(f"does not hold: {line}", quiet=False)
    return 1 if found.failures else 0


def tell_shared(text: Shared, quiet: bool) -> None:
    """Say how many tokens a text has on both sides, how they are paired, and which moved or have no partner."""
    from attnscope.text.align import WORDS
    from attnscope.text.tokens import Found, described

    moved = f", {text.moved} of them at another position" if text.moved else ""
    output.talk(f"{text.name + ': ' * bool(text.name)}{text.units.size} shared tokens, {WORDS[text.by]}{moved}", quiet)
    sides = zip((f"the first {text.name or 'text'}", "the other"), text[2:4], text.units.alone, strict=True)
    for name, prompt, alone in sides:
        if alone:
            output.talk(f"only in {name}: {described(prompt, Found('', tuple(alone)))}", quiet)


def tell_first(found: Comparison, quiet: bool) -> None:
    """Say which layer of each stack is the first to differ, where it is not the first."""
    for stack, places in found.stacks.items():
        name, js = found.stack_name(stack), found.js.effect[places]
        layers = [found.heads[place][0] for place in places]
        differing = [layer for layer, bits in zip(layers, js, strict=True) if bits > 0]
        if not differing:
            output.talk(f"no {name}head differs", quiet)
        elif min(differing) > min(layers):
            output.talk(f"no {name}head differs before layer {min(differing)}", quiet)
