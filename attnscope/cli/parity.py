"""`attnscope parity`: every attention layer of a model against attention written from the papers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from attnscope.cli import output
from attnscope.cli.config import with_options
from attnscope.cli.one_text import load_model, read_given
from attnscope.cli.option_groups import FIRST, OptionGroup
from attnscope.cli.options import Implementation, ModelTexts, Selected
from attnscope.cli.output import Printing, check_file
from attnscope.model.selection import DECODER, prefix
from attnscope.utils.display import Column, Sheet, plain
from attnscope.utils.signals import unwinding

if TYPE_CHECKING:
    import pyarrow as pa

    from attnscope.certificate.check import ParityReport
    from attnscope.certificate.verdicts import Largest

EXAMPLES = (
    "attnscope parity --out certificate.json",
    'attnscope parity --model demo --text "the river bank" --select last --format jsonl',
)


class Tolerance(OptionGroup, panel="What to ask"):
    """What the model is held to."""

    atol: Annotated[
        float,
        "Tolerance for weights, and for outputs relative to their norm.",
        "SIZE",
        Option(min=0, max=1000),
        FIRST,
    ] = 1e-5
    whole: Annotated[
        bool,
        "Also compare hidden states and output with a second instance, loaded by transformers alone. "
        "Takes the memory of two models.",
        FIRST,
    ] = False


class KernelTexts(Implementation, ModelTexts, panel="Model and engine"):
    """One text, the model that reads it, the attention that it is loaded with, and the engine that is checked."""

    engine: Annotated[
        Literal["eager", "probe"],
        "eager: the model's own matrices; probe: rows of the kernel that the model runs with.",
        FIRST,
    ] = "eager"


class Certified(Printing):
    """A table to stdout, a file to --out."""

    out: Annotated[Path | None, "File for the certificate.", "FILE.json"] = None

    def __post_init__(self) -> None:
        if self.out is not None:
            check_file(self.out, "certificate.json")


@with_options(KernelTexts, Selected, Tolerance, Certified)
def parity(asked: KernelTexts, selected: Selected, tolerance: Tolerance, printing: Certified) -> int:
    """Check attention layers against an independent implementation.

    The implementation follows the papers and uses the layer's own weights. Without a text, it reads a built-in
    sentence. Levels: full (from hidden states and raw weights), scores (from captured q, k and v), none. An
    encoder-decoder is checked in encoder, decoder and cross-attention. The hidden states are taken on trust;
    --whole checks them. The exit code is 1 if a check fails, or if a layer cannot be checked.
    """
    format = output.wanted_format(printing.format)

    if asked.has_text or asked.picture:
        text = read_given(asked, printing)
    else:
        from attnscope.certificate.check import TEXT

        text = TEXT
    loaded = load_model(asked, printing)

    from attnscope.api.parity import ParityOptions, checked
    from attnscope.observe.request import Request
    from attnscope.observe.run import prepare, run_lines, target_lines

    run = prepare(loaded, replace(asked.ask(text, selected, Request()), engine=asked.engine))
    output.log_lines((*run_lines(run), *target_lines(run)), printing.quiet)

    compared = ParityOptions(select=selected.select, atol=tolerance.atol, whole=tolerance.whole, engine=asked.engine)
    with output.progress("forward pass and oracle", None, printing.quiet):
        result = checked(run, compared)
    table = result.table()
    if printing.out is not None:  # first: a reader of stdout may leave early
        from attnscope.utils.files import save_json

        with unwinding():
            written = save_json(result.certificate(), printing.out)
        output.log(f"wrote {written}", printing.quiet)
    output.emit(table, format, lambda: parity_sheet(table, asked.engine))
    return conclude(result.report, printing.quiet)


def conclude(report: ParityReport, quiet: bool) -> int:
    """Say which layers do not hold or were not checked, and last the verdict; the exit code that follows."""
    from attnscope.certificate.check import in_words, whole_in_words

    if report.whole and not report.whole.holds:
        output.log(f"check failed: {whole_in_words(report.whole)}", quiet=False)
    output.log_lines((f"check failed: {in_words(layer, report)}" for layer in report.failures), quiet=False)
    output.log_lines((f"not checked: {in_words(layer, report)}" for layer in report.unchecked), quiet=False)
    if report.quantised:
        output.log("the weights are quantised: rounding is reported, nothing is judged", quiet)
    output.log(f"taken on trust: {report.on_trust}", quiet)
    output.log(verdict(report), quiet)
    return 0 if report.holds else 1


VERDICTS = {True: "holds", False: "does not hold", None: "is not shown"}


def verdict(report: ParityReport) -> str:
    """One line: level, largest difference, distance of half precision from float32, what the text cannot show."""
    from attnscope.certificate.check import whole_in_words

    largest, rounding = report.largest(), report.largest("rounding")
    # How many layers of a stack reached which level, with the stack's name where there are several.
    stacks = []
    for stack in report.levels:
        levels = Counter(layer.level for layer in report.layers if layer.stack == stack)
        counts = ", ".join(f"{count} at level {level}" for level, count in levels.items())
        stacks.append(counts if len(report.levels) == 1 else f"{stack} {counts}")
    reached = ", ".join(stacks)
    parts = [f"parity: {reached}", "no layer was judged"]
    if largest is not None:
        parts = [f"parity {VERDICTS[report.verdict]}: {reached}", f"largest difference {_where(largest, report)}"]
    if rounding is not None:
        parts.append(f"as run in {report.dtype} up to {_where(rounding, report)} from float32")
    if report.whole:
        parts.append(whole_in_words(report.whole))
    if report.too_short:
        lengths = [count for count in (report.source_tokens, report.tokens) if count]
        count = f"{' and '.join(map(str, lengths))} token{'s' * (lengths != [1])}"
        parts.append(f"{count} cannot show {', '.join(report.too_short)}")
    return "; ".join(parts)


def _where(largest: Largest, report: ParityReport) -> str:
    name, value, layer = largest
    return f"{value:.2g} ({name}, {report.name(layer)})"


def parity_sheet(table: pa.Table, engine: str = "eager") -> Sheet:
    """The rows for a person, without the columns that say nothing."""
    from attnscope.certificate.check import ATOL

    columns, silent = table.to_pydict(), {"call": 0, "why": "", "weights_allowed": ATOL, "stack": DECODER}
    silent |= {"kernel": engine} if engine == "eager" else {}
    if len(set(columns["stack"])) > 1:
        stacks = columns.pop("stack")
        places = zip(stacks, columns["layer"], strict=True)
        columns["layer"] = [f"{prefix(stack)}L{layer}" for stack, layer in places]
    telling = {name: column for name, column in columns.items() if any(value != silent.get(name) for value in column)}
    sheet = []
    for name, column in telling.items():
        number = all(type(value) in (int, float, NoneType) for value in column)
        words = name.replace("_", " ")  # a heading breaks between words where the screen is narrow
        sheet.append(Column(words, _cell, name, "right" if number else "left", "wrap"))
    return Sheet([dict(zip(telling, row, strict=True)) for row in zip(*telling.values(), strict=True)], sheet)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.1e}" if isinstance(value, float) else plain(value)
