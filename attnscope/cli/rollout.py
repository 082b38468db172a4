"""`attnscope rollout`: where what a token holds after the last layer came from, if attention alone mixed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from attnscope.cli import options, output
from attnscope.cli.relations import picture
from attnscope.cli.settings import Settings, gather
from attnscope.cli.signals import unwinding

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from attnscope.measure.rollout import Rollout
    from attnscope.model.loading import LoadedModel
    from attnscope.observe import Observation
    from attnscope.text.prompt import Prompt, Span

EXAMPLES = (
    'attnscope rollout --text "the cat sat on the mat" --top-k 3 --out runs/rolled',
    "attnscope rollout --file README.md --truncate right --group sentences --sink mask --out runs/sentences",
)
SUM_TOLERANCE = 1e-4
LONGEST_LABEL = 24

Group = Annotated[
    Literal["tokens", "words", "sentences"] | None,
    typer.Option(help="Units: sum over keys, mean over queries (default: tokens, in runs where there are over 200)."),
]


def rollout(
    context: typer.Context,
    text: options.Text = None,
    file: options.File = None,
    model: options.Model = "demo",
    out: options.Out = None,
    top: Annotated[int, typer.Option(help="Rows in the printed table.", metavar="N")] = 40,
    top_k: options.TopK = "5",
    min_weight: options.MinWeight = None,
    group: Group = None,
    scale: options.Scale = "linear",
    sink: options.Sink = None,
    annotate: options.Annotate = None,
    image: options.Image = "png",
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
    positions: options.Positions = None,
    engine: options.Engine = "auto",
    listen: options.Listen = False,
    memory: options.Memory = None,
    verify: options.Verify = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Attention rolled out: where what each token holds after the last layer came from, if attention alone mixed.

    The product over all layers of the heads' mean plus the residual (Abnar & Zuidema 2020), which leaves out what
    values and MLPs do. On a terminal the first --top rows are shown; in a pipe all of them are printed as csv. With
    --out, rollout.csv, a heatmap and manifest.json are written too.
    """
    return run(gather(context, locals()))


def run(settings: Settings) -> int:
    """Roll one text out and list where its units came from."""
    format = output.wanted_format(settings.format)

    from attnscope.cli.single import observe_text, report_checks

    loaded, seen = observe_text(settings, metrics=(), rollout=settings.group or "bins")
    rolled = seen.rollout
    assert rolled is not None
    seen.context["rollout"] = facts(loaded, rolled)
    table = rolled.table(settings.keys_per_query, settings.min_weight)
    if settings.out:
        from attnscope.cli.export import finish, writable
        from attnscope.tables import save

        folder = writable(settings.out)
        with unwinding():
            written = [save(table, folder / "rollout.csv"), draw(settings, seen, rolled, folder)]
            finish(settings, loaded, seen, folder, written)
    output.emit(table, format, lambda: picture(table, settings.top))
    if format == "table" and len(table) > settings.top:
        output.talk(f"{settings.top} of {len(table)} rows; --top N shows more, a pipe gets all", settings.quiet)
    return max(report_checks(loaded, seen, settings), report_rollout(seen, rolled, settings))


def facts(loaded: LoadedModel, rolled: Rollout) -> dict[str, Any]:
    """What the manifest says of the rollout."""
    return {
        "layers": list(rolled.layers),
        "passed_over": [layer.index for layer in loaded.geometry.layers if layer.index not in rolled.layers],
        "units": len(rolled.units),
        "row_sum_error": rolled.row_sum_error,
    }


def report_rollout(seen: Observation, rolled: Rollout, settings: Settings) -> int:
    """Say what the rows stand for where they are not what one expects, and what did not hold; the exit code."""
    run = longest(rolled)
    if settings.group is None and run > 1:
        output.talk(f"a row is a run of {run} tokens; --group tokens keeps them apart", settings.quiet)
    if passed_over := seen.context["rollout"]["passed_over"]:
        output.talk(f"layers {passed_over} do not attend to tokens: the rollout passes them unchanged", settings.quiet)
    if rolled.row_sum_error <= SUM_TOLERANCE:
        return 0
    output.talk(f"does not hold: rollout rows sum to 1 only within {rolled.row_sum_error:.2g}", quiet=False)
    return 1


def longest(rolled: Rollout) -> int:
    """Tokens of the longest unit."""
    return max(unit.stop - unit.start for unit in rolled.units)


def draw(settings: Settings, seen: Observation, rolled: Rollout, folder: Path) -> Path:
    """rollout.png: units x units, put together where there are more than a map takes."""
    from attnscope.cli.export import bin_labels
    from attnscope.figures import Maps, save_head_maps

    values_GG, step = rolled.binned()
    if settings.group is None:
        run, shown = longest(rolled), bin_labels(seen.prompt.labels, [unit.stop - unit.start for unit in rolled.units])
    else:
        run, shown = 1, labels(seen.prompt, rolled.units, step)
    rule = "sum over keys, mean over queries"
    maps = Maps(rolled.layers[-1], (0,), values_GG[None], shown, shown, run, rule if run > 1 else "", quantity="share")
    title = f"Rollout of {len(rolled.layers)} layers" + f", {step} {settings.group} a cell" * (step > 1)
    path, style = folder / f"rollout.{settings.image}", settings.style()
    [written] = save_head_maps([(path, maps, 0)], style, title=lambda maps, index: title)
    return written


def labels(prompt: Prompt, units: Sequence[Span], step: int) -> tuple[str, ...]:
    """What stands beside each row of `step` units: the text of a short one, the positions that others span."""
    edges = [
        (units[start].start, units[min(start + step, len(units)) - 1].stop) for start in range(0, len(units), step)
    ]
    texts = ["".join(prompt.labels[start:stop]) for start, stop in edges]
    return tuple(
        text if step == 1 and (stop - start == 1 or len(text) <= LONGEST_LABEL) else f"{start}–{stop - 1}"
        for text, (start, stop) in zip(texts, edges, strict=True)
    )
