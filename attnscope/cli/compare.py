"""`attnscope compare`: two texts, or two models, head by head."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from attnscope.cli import output
from attnscope.cli.config import with_options
from attnscope.cli.figure_options import Look, ManyTexts
from attnscope.cli.option_groups import FIRST, UNRECORDED, check_one_given, command_line, fill, recorded
from attnscope.cli.options import ENGINE, ENGINE_WORDS, Implementation, Memory, ModelTexts, OtherSide, Selected
from attnscope.cli.output import Results, Top, check_file, writing_to
from attnscope.cli.study_tables import open_line
from attnscope.errors import UsageError
from attnscope.model.selection import SEQ2SEQ, as_ranges, mixes
from attnscope.utils.display import number_of
from attnscope.utils.signals import unwinding

if TYPE_CHECKING:
    from attnscope.api.compare import SidesOfText
    from attnscope.observe.run import Run
    from attnscope.studies.comparison import Comparison
    from attnscope.studies.gate import Verdict

EXAMPLES = (
    'attnscope compare --text "Mary gave John a book" --compare-text "John gave Mary a book" --out runs/swapped',
    "attnscope compare --texts corpus.txt.gz --compare-model demo --top 5",
    'attnscope compare --texts corpus.txt.gz --compare-dtype bfloat16 --gate "visible=same,js<0.01"',
)


class Sides(Implementation, ModelTexts, OtherSide, ManyTexts):
    """One side, and what is compared with it."""

    compare_text: Annotated[str | None, "Second text.", FIRST, UNRECORDED] = None
    compare_model: Annotated[str | None, "Second model, on the same texts.", FIRST] = None
    compare_dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, "Precision of the second side (default: that of the first)."
    ] = None
    compare_engine: Annotated[
        str | None, "Engine of the second side (default: that of the first).", "|".join(ENGINE_WORDS), ENGINE
    ] = None
    compare_attention: Annotated[
        str | None,
        "Attention of transformers that the second side is loaded with, for the engine probe (default: as the first).",
        "NAME",
    ] = None
    gate: Annotated[
        str | None,
        "Conditions on every head, by commas: visible=same, role=same, js<X, lost<X, weight<X, METRIC<X. "
        "The exit code is 1 if a head breaks one.",
        "CONDITIONS",
        FIRST,
        UNRECORDED,
    ] = None
    baseline: Annotated[
        Path | None,
        "Numbers of an earlier run instead of a second side: a file of --save-baseline, or a run's folder.",
        "PATH",
    ] = None
    save_baseline: Annotated[
        Path | None, "Save the numbers of the model as a baseline and compare nothing.", "FILE.json", UNRECORDED
    ] = None
    texts: Annotated[str | None, "Texts for two models: a file, a folder or a glob; - reads stdin.", "FILE"] = None

    @property
    def of_models(self) -> bool:
        """Whether the second side is another model, or the same in another way."""
        return self.compare_engine is not None or bool(self.second_loading)

    @property
    def second_loading(self) -> dict[str, Any]:
        """What the second side is loaded with otherwise."""
        ways = {"model": self.compare_model, "dtype": self.compare_dtype, "attention": self.compare_attention}
        return {name: value for name, value in ways.items() if value is not None}

    def second_model(self) -> Sides:
        """The same options, of the second side's model."""
        apart: dict[str, Any] = {} if self.compare_model is None else {"revision": None, "base": None}
        return replace(self, **self.second_loading, **apart)

    def __post_init__(self) -> None:
        super().__post_init__()
        # A baseline is the second side, or is made of the only one.
        alone = {"--baseline": self.baseline, "--save-baseline": self.save_baseline}
        check_one_given(alone)
        if any(alone.values()):
            if self.compare_text is not None or self.of_models:
                flag = next(name for name, value in alone.items() if value)
                raise UsageError(f"{flag} takes the place of a second side, and one was given", f"leave out {flag}")
            if self.save_baseline is not None:
                if self.gate is not None:
                    raise UsageError("--gate needs two sides, and --save-baseline reads one", "give it with --baseline")
                check_file(self.save_baseline, "baseline.json")
        elif self.compare_text is None and not self.of_models:
            raise UsageError("nothing to compare with", "give --compare-text TEXT or --compare-model NAME")
        # Two texts are read by one model in one way.
        self.check_other_side()
        if self.compare_text is not None and self.of_models:
            raise UsageError("--compare-text is of one model, read in one way", "leave it out, or the other")
        if self.gate is not None and self.compare_text is not None:
            raise UsageError("--gate holds two models to each other, and two texts differ", "leave out --gate")
        if self.texts is not None and (self.has_text or self.compare_text is not None):
            raise UsageError("--texts is for two models, instead of a text", "give it with --compare-model alone")
        if self.texts is not None and self.target is not None:
            raise UsageError("--target is of one text", "leave it out: a target is generated of each text")
        if self.audio is not None and self.compare_text is not None:
            raise UsageError("--audio replaces the text, and --compare-text needs one", "give --compare-model")
        if self.picture:
            raise UsageError("compare reads no pictures", "draw it with attnscope draw")


class Room(Memory):
    """Who computes the attention, and how much is kept of the first side."""

    memory: Annotated[str | None, "Memory for the first side, e.g. 4GB (default: the free memory)."] = None


Differences = writing_to(Results, "Folder for tables, signed maps and compare.json.")


@with_options(Sides, Room, Selected, Top, Differences, Look)
def compare(asked: Sides, room: Room, selected: Selected, top: Top, printing: Results, look: Look) -> int:
    """Compare two texts, or two models, head by head.

    Tokens are aligned by position or by characters; see --align. A head's row has the Jensen-Shannon divergence in
    bits over the shared keys, averaged over the shared queries. It also has the weight on other keys, and the
    difference of every metric. From 32 texts on, numbers have intervals. Each stack of an encoder-decoder has its
    own tokens. --gate sets conditions on every head and lists the heads that break one on stderr.
    """
    format = output.wanted_format(printing.format)

    from attnscope.cli.one_text import load_model
    from attnscope.export.manifest import AROUND

    if asked.save_baseline is not None and printing.out is not None:
        raise UsageError("--save-baseline writes one file, and --out was given", "leave out --out")
    if asked.gate is not None:  # before a model is loaded
        from attnscope.studies.gate import parse_gate

        parse_gate(asked.gate)
    texts, loaded = texts_of(asked, printing), load_model(asked, printing)
    other = loaded
    if asked.second_loading:
        other = load_model(asked.second_model(), printing)

    from attnscope.api.compare import CompareOptions, ComparisonTexts, compared, save_baseline
    from attnscope.cli.study_tables import differences_sheet
    from attnscope.observe.run import run_lines, target_lines

    # What compare.json says was asked for has no paths and nothing that leaves the numbers as they are.
    groups = (asked, room, selected, look)
    options = {name: value for name, value in recorded(*groups).items() if name not in AROUND}
    if len(texts) > 1 and loaded.geometry.task == SEQ2SEQ:
        output.log("the targets are generated greedily, each by the model that reads it", printing.quiet)
    how = fill(CompareOptions, asked, room, selected)
    tell = output.TerminalProgress(printing.quiet)

    def ready(run: Run) -> None:
        output.log_lines((*run_lines(run), *target_lines(run)), printing.quiet)

    sides = ComparisonTexts(texts, how, tell, ready)
    if asked.save_baseline is not None:
        numbers = save_baseline(asked.save_baseline, sides, loaded)
        size = f"{number_of(len(numbers.heads), 'head')} over {number_of(len(numbers.texts), 'text')}"
        output.log(f"wrote {asked.save_baseline}: {size}", printing.quiet)
        output.log_lines((f"check failed: {line}" for line in numbers.failures), quiet=False)
        return 1 if numbers.failures else 0
    out, force = printing.out, printing.force
    models = [loaded] if asked.baseline is not None else [loaded, other]
    result = compared(sides, models, options=options, out=out, force=force, maps=out is not None)
    # Files first: a reader of stdout that goes away takes nothing from the folder.
    comparison = result.found
    if printing.out is not None:
        from attnscope.export.study_figures import save_comparison

        drawn = comparison.pair.drawn.values() if comparison.pair else ()
        pictures = len(comparison.stacks) + sum(len(maps.values) for maps in drawn)
        save = partial(save_comparison, places=result.places, gate=result.gate_facts, spreadsheet=printing.spreadsheet)
        style = look.figure_style(command_line("compare", *groups))
        with unwinding(), output.progress("drawing", pictures, printing.quiet, "pictures") as advance:
            written = save(comparison, printing.out, result.asked, style, advance=advance)
        output.log(f"wrote {len(written)} files to {printing.out}", printing.quiet)
        opened, intervals = comparison.open_ends()
        if opened:
            output.log(open_line(opened, f"{intervals} differences of metrics"), printing.quiet)
    sheet = partial(differences_sheet, comparison, result.places[: top.shown], output.width())
    output.emit_first(result.table(), top, format, sheet, printing)
    left = ((stack, layers) for stack, layers in loaded.geometry.views.items() if mixes(stack))
    without = (f"{stack} layers {as_ranges([layer.index for layer in layers])}" for stack, layers in left)
    output.log_lines((f"not compared: {layers}, which have no softmax" for layers in without), printing.quiet)
    code = report(comparison, printing.quiet)
    if result.verdict is not None:
        code |= conclude(result.verdict, printing.quiet)
    return code


def conclude(verdict: Verdict, quiet: bool) -> int:
    """Say which heads moved, and last the verdict; the exit code that follows."""
    output.log_lines((f"moved: {line}" for line in verdict.lines), quiet=False)
    output.log(verdict.line, quiet)
    return 0 if verdict.holds else 1


def texts_of(asked: Sides, printing: Results) -> list[SidesOfText]:
    """The texts of both sides. Raises UsageError or InputError for what cannot be read."""
    from attnscope.api.compare import SidesOfText
    from attnscope.cli.one_text import read_given

    if asked.texts is None:
        text = read_given(asked, printing)
        return [SidesOfText("the text", text, text if asked.compare_text is None else asked.compare_text)]

    from attnscope.corpus.items import texts_in

    return [
        SidesOfText(str(item.id), item.text, item.text) for item in texts_in(asked.texts, chat=asked.chat, strict=True)
    ]


def report(comparison: Comparison, quiet: bool) -> int:
    """Say what belongs to the table and what did not hold; the exit code that follows."""
    from attnscope.inputs.spans import WORDS
    from attnscope.inputs.tokens import TokenMatch, described
    from attnscope.studies.intervals import FEWEST

    # How many tokens each text has on both sides, how they are paired, and which moved or have no partner.
    for text in comparison.pair.texts if comparison.pair else ():
        name, moved = f"{text.name}: " * bool(text.name), f", {text.moved} of them at another position"
        shared = f"{text.units.size} shared tokens, {WORDS[text.by]}"
        output.log(name + shared + moved * bool(text.moved), quiet)
        sides = zip((f"the first {text.name or 'text'}", "the other"), text[2:4], text.units.alone, strict=True)
        for side, prompt, alone in sides:
            if alone:
                output.log(f"only in {side}: {described(prompt, TokenMatch('', tuple(alone)))}", quiet)
    if not comparison.pair:
        output.log(number_of(comparison.texts, "text") + ", too few for intervals" * (comparison.texts < FEWEST), quiet)
    # Which layer of each stack is the first to differ, where it is not the first.
    differs = (comparison.js.effect > 0).any()
    if not differs and comparison.has_divergence:
        output.log("no head differs", quiet)
    for stack, places in comparison.stacks.items() if differs else ():
        name, js = comparison.stack_name(stack), comparison.js.effect[places]
        layers = [comparison.heads[place][0] for place in places]
        differing = [layer for layer, bits in zip(layers, js, strict=True) if bits > 0]
        if not differing:
            output.log(f"no {name}head differs", quiet)
        elif min(differing) > min(layers):
            output.log(f"no {name}head differs before layer {min(differing)}", quiet)
    output.log_lines((f"check failed: {line}" for line in comparison.failures), quiet=False)
    return 1 if comparison.failures else 0
