"""`attnscope parity`: every attention layer of a model against attention written from the papers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnscope.cli import options, output
from attnscope.cli.settings import Settings, gather
from attnscope.cli.signals import unwinding
from attnscope.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.table import Table as RichTable

    from attnscope.model.loading import LoadedModel
    from attnscope.parity import ParityReport
    from attnscope.text.prompt import Prompt

EXAMPLES = (
    "attnscope parity --out certificate.json",
    'attnscope parity --model demo --text "the river bank" --select last --format jsonl',
)

Atol = Annotated[
    float, typer.Option(help="What weights, and outputs relative to their norm, may differ by.", metavar="SIZE")
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Write the certificate here.", metavar="FILE.json")]


def parity(
    context: typer.Context,
    text: options.Text = None,
    file: options.File = None,
    model: options.Model = "demo",
    out: Out = None,
    select: options.Select = None,
    atol: Atol = 1e-5,
    chat: options.Chat = False,
    truncate: options.Truncate = None,
    format: options.Format = None,
    config: options.Config = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    device_map: options.DeviceMap = None,
    revision: options.Revision = None,
    offline: options.Offline = False,
    quantize: options.Quantize = None,
    trust_remote_code: options.RemoteCode = False,
    allow_pickle: options.Pickle = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Hold every attention layer against attention written from the papers, from the layer's own weights.

    Without a text, a built-in sentence. Levels: full (from hidden states and raw weights), scores (from the captured
    q, k and v), none. Leaves with 1 where a layer does not hold.
    """
    settings = gather(context, locals())
    if not atol >= 0:
        raise UsageError(f"--atol takes a size from 0; {atol} came", "leave it out for 1e-5")
    return run(settings, atol)


def run(settings: Settings, atol: float) -> int:
    """Check one model on one text."""
    format = output.wanted_format(settings.format)

    from attnscope.cli.single import chosen_heads, header, load_prompt
    from attnscope.text.prompt import read_text

    settings = settings if settings.text or settings.file else replace(settings, text=_sentence())
    text = read_text(settings.text, settings.file)
    output.complain_through_talk(settings.quiet)
    choice, prompt = load_prompt(settings, text)
    loaded = choice.loaded
    chosen_heads(settings, loaded)  # refuse a selection that is not there before the forward pass
    output.talk(header(loaded, prompt), settings.quiet)

    from attnscope.parity import check_parity
    from attnscope.parity.certificate import table

    with output.progress("forward pass and oracle", None, settings.quiet):
        report = check_parity(loaded, prompt, select=settings.select, atol=atol)
    found = table(report)
    _write(settings, report, loaded, prompt)  # first: a reader of stdout may leave early
    output.emit(found, format, lambda: picture(found))
    return conclude(report, settings.quiet)


def conclude(report: ParityReport, quiet: bool) -> int:
    """Say which layers do not hold, and last the largest difference; the exit code that follows."""
    from attnscope.parity.certificate import in_words

    for layer in report.failures:
        output.talk(f"does not hold: {in_words(layer, report)}", quiet=False)
    if report.quantised:
        output.talk("the weights are quantised: rounding is reported, nothing is judged", quiet)
    output.talk(verdict(report), quiet)
    return 0 if report.holds else 1


def verdict(report: ParityReport) -> str:
    """One line: level, largest difference and where."""
    largest = report.largest()
    levels = {layer.level: sum(one.level == layer.level for one in report.layers) for layer in report.layers}
    reached = ", ".join(f"{count} at level {level}" for level, count in levels.items())
    if largest is None:
        return f"parity: {reached}; nothing was judged"
    what, value, layer = largest
    held = "holds" if report.holds else "does not hold"
    return f"parity {held}: {reached}; largest difference {value:.2g} ({what}, layer {layer.layer})"


def picture(found: pa.Table) -> RichTable:
    """The rows for a person, without the columns that say nothing."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable

    silent = {"call": 0, "why": ""}
    said = {
        name: column for name, column in found.to_pydict().items() if any(value != silent.get(name) for value in column)
    }
    shown = RichTable(*said, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for row in zip(*said.values(), strict=True):
        shown.add_row(*(_cell(value) for value in row))
    return shown


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return "" if value is None else f"{value:.1e}" if isinstance(value, float) else str(value)


def _write(settings: Settings, report: ParityReport, loaded: LoadedModel, prompt: Prompt) -> None:
    if settings.out is None:
        return
    from attnscope.files import save_json
    from attnscope.parity.certificate import certificate

    with unwinding():
        written = save_json(certificate(report, loaded, prompt), settings.out)
    output.talk(f"wrote {written}", settings.quiet)


def _sentence() -> str:
    from attnscope.parity import TEXT

    return TEXT
