"""`attnscope heads`: what every head does with a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from attnscope.cli import options, output
from attnscope.cli.settings import Settings, gather
from attnscope.cli.signals import unwinding

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from attnscope.observe import Head, Observation

EXAMPLES = (
    'attnscope heads --text "the financial bank is located on river bank" --out runs/bank',
    "attnscope heads --file README.md --truncate right --sort induction --top 5",
)
# heading of each metric on the terminal, in the order in which narrow screens keep them
SHORT = {
    "focus": "focus",
    "previous_token": "prev",
    "induction": "induct",
    "first_token": "first",
    "entropy": "entropy",
    "duplicate_token": "dupl",
    "self": "self",
    "distance": "dist",
    "effective_keys": "eff keys",
    "sink": "sink",
    "confidence": "conf",
    "local_mass_32": "loc 32",
    "entropy_normalised": "entr norm",
    "off_token_mass": "off tok",
}


def heads(
    context: typer.Context,
    text: options.Text = None,
    file: options.File = None,
    model: options.Model = "demo",
    out: options.Out = None,
    select: options.Select = None,
    sort: Annotated[
        str, typer.Option(help="Rank by this metric; `attnscope metrics` lists them.", metavar="METRIC")
    ] = "focus",
    top: Annotated[int, typer.Option(help="Heads in the printed table.", metavar="N")] = 20,
    top_k: options.TopK = "5",
    min_weight: options.MinWeight = None,
    group: options.Group = None,
    weights: options.Weights = "softmax",
    by: options.By = None,
    scale: options.Scale = "linear",
    sink: options.Sink = None,
    per_head_scale: options.PerHeadScale = False,
    bin: options.Bin = "sum",
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
    """What every head does with a text: a ranked table; with --out also relations, heatmaps and a manifest.

    On a terminal the heads are ranked by --sort; in a pipe all heads are printed as csv.
    """
    settings = gather(context, locals())
    return run(settings)


def run(settings: Settings) -> int:
    """Observe one text and say what its heads do."""
    from attnscope.measure.metrics import known

    known([settings.sort])
    format = output.wanted_format(settings.format)

    from attnscope.cli.single import observe_text, report_checks

    loaded, seen = observe_text(
        settings,
        key_zero=settings.sink == "keep",
        relations=settings.out is not None,
        top_k=settings.keys_per_query,
        group=settings.group,
        maps="all" if settings.out else None,
        bin_rule=settings.bin,
        split_sink=settings.sink == "mask",
    )
    ranked = rank(seen.kept_heads(), settings)
    shown = ranked[: settings.top]
    seen.heads = ranked
    if settings.out:
        from attnscope.cli.export import export

        with unwinding():
            export(settings, loaded, seen, shown)
    output.emit(seen.table(), format, lambda: picture(seen, shown, settings))
    for line in missing_support(seen):
        output.talk(line, settings.quiet)
    return report_checks(loaded, seen, settings)


def rank(found: Sequence[Head], settings: Settings) -> list[Head]:
    """The selected heads, largest score first; nulls last, ties in the model's order."""
    key = settings.sort
    return sorted(found, key=lambda head: (math.isnan(head.score[key]), -head.score[key], head.layer, head.kv_head))


def picture(seen: Observation, shown: Sequence[Head], settings: Settings) -> RichTable:
    """The ranked heads for a person: as many metrics as the terminal has room for."""
    relations = [strongest(seen, head) for head in shown]
    names = _columns_that_fit(shown, relations, settings.sort)
    table = output.sheet()
    table.add_column("head", no_wrap=True)
    table.add_column("kv", justify="right", no_wrap=True)
    table.add_column("role", no_wrap=True)
    for name in names:
        table.add_column(SHORT[name] + (" ▾" if name == settings.sort else ""), justify="right", no_wrap=True)
    table.add_column("strongest relation", min_width=8)
    for head, relation in zip(shown, relations, strict=True):
        cells = [_number(head.score[name]) for name in names]
        table.add_row(head.name, str(head.kv_head), head.role, *cells, output.one_line(relation))
    even = seen.even[shown[0].layer]
    table.add_section()
    table.add_row(
        "even",
        "",
        "",
        *(_number(even[name]) for name in names),
        output.one_line("attention spread evenly"),
        style="dim",
    )
    return table


def strongest(seen: Observation, head: Head) -> str:
    """A head's strongest relation as text: `bank(8) → river(7) 0.63`."""
    if head.strongest is None:
        return "-"
    label = [shown.strip("·") or shown for shown in seen.prompt.labels]
    query, key, weight = head.strongest.query, head.strongest.key, head.strongest.weight
    return f"{label[query]}({query}) → {label[key]}({key}) {weight:.2f}"


def missing_support(seen: Observation) -> list[str]:
    """Why heads have no role, where the text is too short or repeats too little to show it."""
    from attnscope.measure.roles import unsupported

    first = next(iter(seen.support.values()), None)
    return [f"no role without support: {line}" for line in unsupported(first)] if first else []


def _columns_that_fit(shown: Sequence[Head], relations: Sequence[str], sort: str) -> list[str]:
    taken = 10 + 3 + 16 + max(24, *(len(text) for text in relations))
    room = output.width() - taken
    names = []
    for name in [sort, *(name for name in SHORT if name != sort)]:
        need = max(len(SHORT[name]) + 2 * (name == sort), 5) + 1
        if need <= room:
            names.append(name)
            room -= need
    return sorted(names, key=list(SHORT).index)


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{round(value, 2) + 0.0:.2f}"  # + 0.0: no -0.00
